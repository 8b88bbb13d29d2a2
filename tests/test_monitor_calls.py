"""The kernel's own arguments: every statistic against a materialised softmax inside the model, known to us or not."""

import pytest
import torch
from torch import nn

from locater.attention import materialised
from locater.errors import Refusal
from locater.monitor import AttentionMonitor
from written_models import KINDS, Cross, Einsum, Fused, Net, Packed, Separate, WithoutSoftmax, WithWeights

TOKENS = torch.randint(0, 50, (3, 24), generator=torch.Generator().manual_seed(1))


def expected(logits, *, near, first=None):
    num_queries, num_keys = logits.shape[-2:]
    distance = torch.arange(num_queries)[:, None] - torch.arange(num_keys)
    return materialised(logits.double(), logits > -torch.inf, distance[None, None], near=near, sink=first)


def assert_exact(layer, logits, *, first=None, near=4):
    """Every head of a layer, to 1e-5."""
    for name, numbers in expected(logits, near=near, first=first).numbers():
        if name in layer.statistics:
            theirs = numbers.amax((0, 2)) if name == "max_logit" else numbers.nanmean((0, 2))
            size = logits.shape[-1] if name in ("mean_distance", "participation") else 1
            ours = torch.tensor(layer.statistics[name], dtype=torch.float64)
            torch.testing.assert_close(
                ours / size, theirs / size, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
            )


def watched(model, **options):
    with AttentionMonitor(model, every=1, near=4, **options) as monitor:
        model(TOKENS)
        return monitor.report()


@pytest.mark.parametrize("kind", [*KINDS, WithWeights], ids=lambda kind: kind.__name__)
def test_every_way_of_writing_attention_is_read_exactly(kind):
    model = Net(kind)
    report = watched(model)
    assert len(report.training) == 2 and not report.notes
    half = TOKENS.shape[1] // 2
    first = (torch.arange(24) // half * half).expand(1, 1, -1) if kind is Packed else None
    for layer, block in zip(report.training, model.blocks, strict=True):
        assert layer.block == ("cross" if kind is Cross else layer.block)
        assert layer.through == ("softmax" if kind is WithWeights else "scaled_dot_product_attention")
        assert_exact(layer, block.attn.kept, first=first)
        assert layer.ranks["residual"] > 0


def test_projections_named_by_hand_are_read_from_the_call_as_well():
    model = Net(Separate)
    for layer, block in zip(watched(model, heads=NAMES).training, model.blocks, strict=True):
        assert_exact(layer, block.attn.kept)


NAMES = [(f"blocks.{n}.attn.q_proj", f"blocks.{n}.attn.k_proj", 4, 4) for n in range(2)]


@pytest.mark.parametrize("kind", [Einsum, WithoutSoftmax])
def test_attention_that_calls_no_kernel_is_refused_by_name(kind):
    with pytest.raises(Refusal, match="neither in Net; name its projections"):
        watched(Net(kind))


def test_attention_written_out_is_read_from_its_softmax_once_its_module_is_known():
    model = Net(Einsum)
    report = watched(model, heads=NAMES)
    for layer, block in zip(report.training, model.blocks, strict=True):
        assert layer.through == "softmax"
        assert_exact(layer, block.attn.kept)


def test_what_calls_nothing_at_all_is_reconstructed_and_its_causality_asked_for():
    model = Net(WithoutSoftmax)
    report = watched(model, heads=NAMES)
    assert not report.training and "blocks.0.attn.q_proj" in report.notes[0] and "causal=True" in report.notes[0]
    report = watched(model, heads=NAMES, causal=True)
    assert "layers 0-1 called no attention kernel: reconstructed" in report.notes[0]
    for layer, block in zip(report.training, model.blocks, strict=True):
        assert layer.through == "module inputs"
        assert_exact(layer, block.attn.kept)
    wrong = watched(model, heads=NAMES, causal=False).training[0].statistics["entropy"]
    assert wrong != pytest.approx(report.training[0].statistics["entropy"], abs=1e-2)


def test_a_module_that_looks_like_attention_and_calls_nothing_is_named():
    class LinearAttention(nn.Linear):
        pass

    model = Net(Fused)
    model.blocks[1].attn = LinearAttention(32, 32)
    report = watched(model)
    assert len(report.training) == 1 and "`blocks.1.attn` (LinearAttention) looks like attention" in report.notes[0]
