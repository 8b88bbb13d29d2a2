"""Every stabiliser and the monitor × copying, saving, threads, order and repetition of detaching, failing, compiling.

What a copy computes is held against a model of its own, with the copy's weights and the same thing attached.
"""

import copy
import io
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_kinds import STABILISERS, grown, logits
from torch import nn
from torch.nn import functional

from locater.monitor import AttentionMonitor


class Watched:
    """A monitor under the names that stabilisers have."""

    def __init__(self, model: nn.Module) -> None:
        self.monitor = AttentionMonitor(model, every=1).attach()
        self.detach = self.monitor.detach


SUBJECTS = STABILISERS | {"monitor": lambda model, optimizer, how: Watched(model)}
PARAMETRISED = ("sigma-reparam", "spectral-norm")  # which torch itself does not pickle
KERNEL = functional.scaled_dot_product_attention
matrix = pytest.mark.parametrize("name", SUBJECTS)


def attached(name: str, model: nn.Module):
    return SUBJECTS[name](model, torch.optim.SGD(model.parameters(), lr=0.1), {})


def fresh(name: str | None = None):
    """A model in evaluation, whose parametrisations do not turn with every pass."""
    model = grown("table")[0].eval()
    return model, None if name is None else attached(name, model)


def changed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


def saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def assert_clean(model: nn.Module, expected: torch.Tensor) -> None:
    """As if nothing had ever been attached, to the bit."""
    assert torch.equal(logits(model), expected)
    assert functional.scaled_dot_product_attention is KERNEL
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved])
@matrix
def test_copies(name, duplicate):
    plain = logits(fresh()[0])
    model, thing = fresh(name)
    during = logits(model)
    if duplicate is saved and name in PARAMETRISED:
        with pytest.raises(RuntimeError, match=r"only supported through state_dict"):
            duplicate(model)
        return
    twin = duplicate(model)
    torch.testing.assert_close(logits(twin), during)
    changed(twin)
    other, _ = fresh(name)
    torch.testing.assert_close(logits(twin), logits(changed(other)))  # with its own weights and what came with them
    assert torch.equal(logits(model), during)
    thing.detach()
    assert_clean(model, plain)
    torch.testing.assert_close(logits(twin), logits(other))


@matrix
def test_threads(name):
    """Four models at once, one of them bare."""
    bare, plain = fresh()[0], logits(fresh()[0])
    pairs = [fresh(name) for _ in range(3)]
    during = logits(pairs[0][0])
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            *found, alone = pool.map(logits, [model for model, _ in pairs] + [bare])
            assert all(torch.equal(one, during) for one in found) and torch.equal(alone, plain)
        list(pool.map(lambda pair: pair[1].detach(), pairs))
    for model, _ in pairs:
        assert_clean(model, plain)


@pytest.mark.parametrize("last_first", [False, True])
@matrix
def test_orders_of_detaching(name, last_first):
    """Beside each of two others, detached in the order of attaching and against it, everything twice."""
    model, first = fresh(name)
    plain = logits(fresh()[0])
    things = [first, attached("soft-cap", model), attached("monitor", model)]
    logits(model)
    for thing in reversed(things) if last_first else things:
        thing.detach()
        logits(model)
        thing.detach()
    assert_clean(model, plain)


@matrix
def test_exceptions(name):
    model, thing = fresh(name)
    plain, during = logits(fresh()[0]), logits(model)
    hook = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        logits(model)
    hook.remove()
    assert torch.equal(logits(model), during)
    thing.detach()
    assert_clean(model, plain)
