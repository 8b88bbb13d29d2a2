"""What multiplies a head's output: the monitor's gate against the quotient of what comes behind it and before it."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from locater import Live
from locater.models.proof.twin import full_config, run_twin
from locater.monitor import AttentionMonitor, Scope

WIDTH, HEADS, SIZE = 24, 3, 8


class Gated(nn.Module):
    """Attention whose output is changed by `gated` before it is projected; it remembers the quotient of the two."""

    layout = "tokens"

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.per_head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, HEADS)
        self.scale, self.norm = nn.Parameter(torch.rand(HEADS)), nn.RMSNorm(WIDTH)
        self.kept = None

    def gated(self, x, y):
        return y

    def attend(self, q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = self.attend(q, k, v)
        given = self.gated(x, y if self.layout == "heads" else y.transpose(1, 2).reshape(x.shape))
        given = given.transpose(1, 2).flatten(2) if self.layout == "heads" else given
        self.kept = given, y
        return x + self.out(given)

    @property
    def quotient(self):
        given, y = (part.detach().double() for part in self.kept)
        return (given / y.transpose(1, 2).flatten(2)).unflatten(-1, (HEADS, SIZE)).mean(-1)


class Elementwise(Gated):
    def gated(self, x, y):
        return y * torch.sigmoid(self.gate(x))


class PerHead(Gated):
    """Most of one head's gates are closed."""

    def gated(self, x, y):
        gate = torch.sigmoid(self.per_head(x) - torch.tensor([0.0, 9.0, 2.0]))
        return (y.view(*x.shape[:-1], HEADS, SIZE) * gate.unsqueeze(-1)).view(x.shape)


class HeadsFirst(Gated):
    """Before heads and tokens change places; a learned scale of each head besides."""

    layout = "heads"

    def gated(self, x, y):
        gate = self.per_head(x).sigmoid().transpose(1, 2)[..., None]
        return (gate * y).mul(self.scale[:, None, None])


class WrittenOut(Elementwise):
    def attend(self, q, k, v):
        logits = q @ k.mT / SIZE**0.5
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        return functional.dropout(logits.masked_fill(~mask, -torch.inf).softmax(-1), 0.0) @ v


class Normed(Gated):
    """No gate: a norm behind the heads, as BitNet has."""

    def gated(self, x, y):
        return self.norm(y)


class OfItself(Gated):
    """A gate that is computed from the output that it multiplies: two ways lead to products."""

    def gated(self, x, y):
        return y * torch.sigmoid(self.gate(y))


class Difference(Gated):
    """Two maps, one less the other."""

    def attend(self, q, k, v):
        return super().attend(q, k, v) - 0.3 * super().attend(k, q, v)


def model_of(attention):
    torch.manual_seed(0)
    return nn.Sequential(attention(), attention())


def watched(model, *given):
    with AttentionMonitor(model, every=1, scope=Scope(weights=False)) as monitor:
        (model.module if isinstance(model, Live) else model)(*given)
        return monitor.report()


@pytest.mark.parametrize("attention", [Gated, Elementwise, PerHead, HeadsFirst])
def test_the_gate_is_the_quotient_of_what_comes_behind_and_before(attention):
    model, x = model_of(attention), torch.randn(2, 9, WIDTH)
    report = watched(model, x)
    for layer, module in zip(report.training, model, strict=True):
        quotient = module.quotient.flatten(0, 1)
        torch.testing.assert_close(torch.tensor(layer.gates["gate"]), quotient.mean(0).float(), atol=1e-5, rtol=0)
        assert layer.gates["gate_closed"] == pytest.approx((quotient.abs() < 0.1).double().mean(0).tolist())
        assert layer.is_gated == (attention is not Gated)
    shown = {name.rpartition("/")[2] for name in report.metrics()}
    assert ({"gate", "gate_closed"} <= shown) == (attention is not Gated)
    assert set(report.to_frame().columns) >= {"gate", "gate_closed"}
    assert attention is not PerHead or report.training[0].gates["gate_closed"][1] > 0.9


def test_attention_that_is_written_out_has_its_gate_too():
    model, x = model_of(WrittenOut), torch.randn(2, 9, WIDTH)
    report = watched(Live(model, heads=[("0.qkv", HEADS, HEADS), ("1.qkv", HEADS, HEADS)], causal=True), x)
    for layer, module in zip(report.training, model, strict=True):
        assert layer.through == "softmax"
        assert layer.gates["gate"] == pytest.approx(module.quotient.mean((0, 1)).tolist(), abs=1e-5)


@pytest.mark.parametrize("attention", [Normed, OfItself, Difference])
def test_what_is_no_gate_is_not_called_one(attention):
    report = watched(model_of(attention), torch.randn(2, 9, WIDTH))
    assert all(math.isnan(value) for layer in report.training for value in layer.gates["gate"])
    assert report.training[0].to_json()["gates"]["gate"] == [None] * HEADS
    assert not any("gate" in note for note in report.notes), "nothing of what a model does not have"


def test_torchs_own_module_has_none():
    model = nn.TransformerEncoderLayer(WIDTH, HEADS, batch_first=True)
    (layer,) = watched(model, torch.randn(2, 9, WIDTH)).training
    assert layer.gates == {"gate": (1.0,) * HEADS, "gate_closed": (0.0,) * HEADS}


def test_closed_gates_change_nothing_else_and_the_model_gives_the_same():
    model, x = model_of(PerHead), torch.randn(2, 9, WIDTH)
    alone = model(x)
    with AttentionMonitor(model, every=1) as monitor:
        assert torch.equal(model(x), alone)
        monitor.report()


# Elementwise beside the query, by a projection of its own, per head by softplus; none; a norm in its place.
TYPES = ["qwen3_next", "afmoe", "laguna", "qwen3", "bitnet"]


@pytest.mark.parametrize("model_type", TYPES)
def test_gates_of_transformers(model_type, monkeypatch):
    transformers = pytest.importorskip("transformers")
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    check_type(model_type, monkeypatch)


def check_type(model_type, monkeypatch):
    model, given = run_twin(full_config(model_type), lambda model, inputs: (model(**inputs), inputs)[1])
    model.set_attn_implementation("sdpa")
    outputs, expected, kernel = [], {}, functional.scaled_dot_product_attention

    def record(*args, **kwargs):
        outputs.append(kernel(*args, **kwargs))
        return outputs[-1]

    def quotient(name):
        def hook(module, args):
            y = outputs[-1].transpose(1, 2)
            expected[name] = (args[0].double() / y.flatten(2).double()).view(y.shape).detach()

        return hook

    hooks = [
        module.register_forward_pre_hook(quotient(name.rpartition(".")[0]))
        for name, module in model.named_modules()
        if name.endswith("self_attn.o_proj")
    ]
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(functional, "scaled_dot_product_attention", record)
        model(**given)
    for hook in hooks:
        hook.remove()
    with AttentionMonitor(model, every=1, scope=Scope(weights=False)) as monitor:
        model(**given)
        report = monitor.report()
    layers = report.evaluation or report.training
    assert layers
    for layer in layers:
        truth = expected[layer.module]
        if model_type == "bitnet":
            assert math.isnan(layer.gates["gate"][0])
        else:
            assert layer.gates["gate"] == pytest.approx(truth.mean((0, 1, 3)).tolist(), abs=1e-4)
