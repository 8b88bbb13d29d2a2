"""Attaching, copying, saving, failing, threads: a monitor leaves nothing behind and feeds on nothing else."""

import copy
import gc
import io
import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from test_calls import TOKENS, assert_exact
from test_monitor import fingerprint
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

import monitor_lives
from locater.monitor import AttentionMonitor, Scope
from locater.stabilisers import QKNorm, SoftCap
from monitor_lives import left_behind, small_model
from written_models import Fused, Net, Separate


def layers_seen(monitor):
    report = monitor.report()
    return len(report.training) + len(report.evaluation)


def test_a_thousand_times_leave_nothing():
    model = Net(Fused)
    before, expected = fingerprint(model), model(TOKENS)
    monitor = AttentionMonitor(model, every=1)
    for _ in range(1000):
        monitor.attach()
        monitor.attach()
        monitor.detach()
        monitor.detach()
    assert fingerprint(model) == before
    assert torch.equal(model(TOKENS), expected)
    assert layers_seen(monitor) == 0


def test_lives_leave_no_object_and_no_tensor():
    model = small_model()
    before, expected = fingerprint(model), model(TOKENS).logits
    left = left_behind(model, 3)
    assert fingerprint(model) == before and torch.equal(model(TOKENS).logits, expected)
    # Fewer is no leak: what earlier tests of the process left behind may go meanwhile.
    assert left["tensors"] <= 0 and left["objects"] < 50, left


@pytest.mark.slow
def test_a_thousand_lives_leave_no_memory():
    done = subprocess.run([sys.executable, Path(monitor_lives.__file__), "1000"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    left = json.loads(done.stdout)
    print(f"1,000 lives: {left}")
    assert left["tensors"] == 0 and left["objects"] < 50, "not one per life"
    assert left["resident"] < 2_000_000 and left["traced"] < 100_000, "of a few lives: tables that grow once"


def test_observing_changes_no_bit_and_no_gradient():
    one, other = Net(Separate), Net(Separate)
    with AttentionMonitor(other, every=1):
        outputs = one(TOKENS), other(TOKENS)
        for output in outputs:
            output.square().sum().backward()
    assert torch.equal(*outputs)
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


@pytest.mark.parametrize("how", ["deepcopy", "save"])
def test_a_copy_does_not_feed_the_monitor(how):
    model = Net(Fused)
    with AttentionMonitor(model, every=1) as monitor:
        if how == "deepcopy":
            twin = copy.deepcopy(model)
        else:
            buffer = io.BytesIO()
            torch.save(model, buffer)
            assert b"locater" not in buffer.getvalue(), "it loads where this package is not"
            twin = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
        expected = twin(TOKENS)
        assert monitor.hooks is not None and monitor.hooks.num_passes == 0
        assert torch.equal(model(TOKENS), expected)
        assert layers_seen(monitor) == 2
    with AttentionMonitor(twin, every=1) as own:
        twin(TOKENS)
        assert layers_seen(own) == 2


def test_an_exception_in_the_forward_pass_leaves_no_mode():
    model = Net(Fused)

    def fail(*given):
        raise RuntimeError("on purpose")

    with AttentionMonitor(model, every=1) as monitor:
        handle = model.blocks[1].attn.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            model(TOKENS)
        handle.remove()
        assert torch._C._len_torch_function_stack() == 0
        torch.nn.functional.scaled_dot_product_attention(*torch.randn(3, 1, 1, 4, 8))
        monitor.report()
        model(TOKENS)
        assert layers_seen(monitor) == 2


def test_two_monitors_in_any_order():
    model = Net(Fused)
    before = fingerprint(model)
    first, second = AttentionMonitor(model, every=1).attach(), AttentionMonitor(model, every=1).attach()
    model(TOKENS)
    one, other = first.report(), second.report()
    assert one.training == other.training and len(one.training) == 2
    first.detach()
    model(TOKENS)
    assert layers_seen(second) == 2 and layers_seen(first) == 0
    second.detach()
    first.detach()
    assert fingerprint(model) == before


def test_threads_keep_their_passes_apart():
    """One thread's model is watched, another's is not; and a model that two threads run is seen by both."""
    watched, other = Net(Fused), Net(Separate)
    kernel = torch.nn.functional.scaled_dot_product_attention
    expected = other(TOKENS)
    outputs, errors = [], []

    def run(model):
        try:
            for _ in range(20):
                outputs.append((model, model(TOKENS)))
        except Exception as error:
            errors.append(error)

    with AttentionMonitor(watched, every=1, scope=Scope(budget=1e9)) as monitor:
        threads = [threading.Thread(target=run, args=(model,)) for model in (watched, other, watched)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        report = monitor.report()
    assert not errors and torch.nn.functional.scaled_dot_product_attention is kernel
    assert [layer.num_passes for layer in report.training] == [40, 40]
    assert_exact(report.training[0], watched.blocks[0].attn.kept, near=16)
    assert all(torch.equal(output, expected) for model, output in outputs if model is other)


def test_the_last_batch_is_not_kept():
    model = Net(Fused)
    with AttentionMonitor(model, every=1) as monitor:
        tokens = TOKENS.clone()
        alive = weakref.ref(tokens)
        model(tokens)
        monitor.report()
        del tokens
        gc.collect()
        assert alive() is None


def test_recomputed_activations_and_accumulated_batches_count_once():
    class Checkpointed(Net):
        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    model = Checkpointed(Fused)
    with AttentionMonitor(model, every=1, scope=Scope(near=4)) as monitor:
        for _ in range(2):
            model(TOKENS).sum().backward()
        report = monitor.step()
    assert [layer.num_passes for layer in report.training] == [2, 2]
    assert_exact(report.training[1], model.blocks[1].attn.kept)


def test_a_token_at_a_time_is_no_collapse():
    """Generation: one token is like all others, whatever the model is like."""
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=64)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).eval()
    with AttentionMonitor(model, every=1) as monitor, torch.no_grad():
        cache = model(TOKENS[:, :5]).past_key_values
        monitor.report()
        for token in range(5, 8):
            model(TOKENS[:, token : token + 1], past_key_values=cache)
        report = monitor.report()
    assert len(report.evaluation) == 2 and all("residual" not in layer.ranks for layer in report.evaluation)
    assert not any(alarm.kind == "rank collapse" for alarm in report.alarms)


def test_our_own_stabilisers_are_seen():
    """Behind QK-norm no logit exceeds d_h/λ at gain one, behind a soft-cap none the cap."""
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50, n_positions=64)

    def largest(attach):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
        with torch.no_grad():
            for block in model.transformer.h:
                block.attn.c_attn.weight.mul_(30)
        attach(model)
        with AttentionMonitor(model, every=1) as monitor, torch.no_grad():
            model(TOKENS)
            return [layer.mean("max_logit") for layer in monitor.report().evaluation]

    plain = largest(lambda model: None)
    normed, capped = largest(QKNorm), largest(lambda model: SoftCap(model, cap=5.0))
    assert min(plain) > 20
    assert all(value <= 8 / 8**0.5 + 1e-4 for value in normed)
    assert all(4 < value <= 5 for value in capped)
