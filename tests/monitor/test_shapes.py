"""Calls of every number of dimensions, several in a module, of other operators; and heads found in passing."""

import copy

import pytest
import torch
from test_calls import TOKENS, assert_exact, watched
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

from locater import Live, scan
from locater.attention.call_statistics import statistics_of_call
from locater.attention.calls import AttentionCall
from locater.attention.flash import labels
from locater.attention.kernels import packed
from locater.errors import Refusal
from locater.monitor import AttentionMonitor, Scope
from locater.stabilisers import QKNorm
from written_models import HEADS, SIZE, D, Einsum, Fused, Grouped, Net, Separate, causal, heads


class Own(Separate):
    """The kernel is called by `kernel`, and gives (texts, heads, tokens, size)."""

    def kernel(self, q, k, v):
        return scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x):
        q, k, v = self.make(x)
        self.kept = self.logits(q, k).detach()
        return self.kernel(q, k, v).transpose(1, 2).flatten(2)


class Folded(Own):
    """Texts and heads in one dimension."""

    def kernel(self, q, k, v):
        folded = (part.flatten(0, 1) for part in (q, k, v))
        return scaled_dot_product_attention(*folded, is_causal=True).unflatten(0, (len(q), -1))


class FoldedWithMask(Own):
    """The same with a mask of every text."""

    def logits(self, q, k):
        return super().logits(q, k).masked_fill(~self.mask(len(q)), -torch.inf)

    def mask(self, num_texts):
        late = torch.arange(24) < torch.tensor([24, 20, 17])[:num_texts, None]
        return causal(24) & late[:, None, None]

    def kernel(self, q, k, v):
        folded = (part.flatten(0, 1) for part in (q, k, v))
        mask = self.mask(len(q)).expand(-1, HEADS, -1, -1).flatten(0, 1)
        return scaled_dot_product_attention(*folded, attn_mask=mask).unflatten(0, (len(q), -1))


class Spread(Own):
    """Groups of heads in a dimension of their own, keys broadcast over them."""

    key_heads = 2
    inner = True

    def kernel(self, q, k, v):
        q = q.unflatten(1, (2, -1))
        k, v = (part[:, :, None] if self.inner else part[:, :, None].expand_as(q) for part in (k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True).flatten(1, 2)


class Expanded(Spread):
    inner = False


class Outer(Own):
    """Five dimensions again, but neighbouring heads have different keys."""

    key_heads = 2

    def logits(self, q, k):
        return super().logits(q, k.repeat(1, 2, 1, 1))

    def kernel(self, q, k, v):
        q = q.unflatten(1, (-1, 2))
        return scaled_dot_product_attention(q, k[:, None], v[:, None], is_causal=True).flatten(1, 2)


class Operator(Own):
    """torch's operator, not its function."""

    def kernel(self, q, k, v):
        return torch.ops.aten.scaled_dot_product_attention(q, k, v, None, 0.0, True)


class CpuOperator(Own):
    """The operator behind it, which gives two tensors."""

    def kernel(self, q, k, v):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)[0]


class InnerModule(Own):
    """The kernel stands in a module of its own that is given no layer input."""

    class Kernel(nn.Module):
        def forward(self, q, k, v):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"kernel": self.Kernel()})

    def kernel(self, q, k, v):
        folded = (part.flatten(0, 1) for part in (q, k, v))
        return self.inner["kernel"](*folded).unflatten(0, (len(q), -1))


SHAPES = [Folded, FoldedWithMask, Spread, Expanded, Outer, Operator, CpuOperator, InnerModule]


@pytest.mark.parametrize("kind", SHAPES, ids=lambda kind: kind.__name__)
def test_calls_of_any_number_of_dimensions_are_read_exactly(kind):
    model = Net(kind)
    report = watched(model)
    for layer, block in zip(report.training, model.blocks, strict=True):
        assert layer.heads == tuple(range(HEADS)) and layer.ranks
        assert_exact(layer, block.attn.kept)


def test_folded_batches_of_several_sizes_make_one_mean():
    model = Net(Folded)
    with AttentionMonitor(model, every=1) as monitor:
        for tokens in (TOKENS, TOKENS[:1], TOKENS[:2, :9]):
            model(tokens)
        report = monitor.report()
    assert [(layer.num_passes, layer.num_queries) for layer in report.training] == [(3, 72 + 24 + 18)] * 2


def test_two_readings_of_a_call_are_refused_and_the_pass_goes_on():
    class Alone(Own):
        """Text by text: as many heads as another model's texts and heads in one dimension."""

        def kernel(self, q, k, v):
            parts = zip(q, k, v, strict=True)
            return torch.stack([scaled_dot_product_attention(*part, is_causal=True) for part in parts])

    model = Net(Alone)
    with AttentionMonitor(model, every=1) as monitor:
        model(TOKENS[:2])
        with pytest.raises(Refusal, match=r"a call with dimensions of its own .* \(4, 24, 8\) from 2 texts"):
            monitor.report()
    assert_exact(watched(Live(model, heads=NAMES)).training[1], model.blocks[1].attn.kept)


NAMES = [(f"blocks.{n}.attn.q_proj", f"blocks.{n}.attn.k_proj", 4, 4) for n in range(2)]


def test_what_cannot_be_looked_into_is_noted_and_the_pass_goes_on():
    class Mapped(Own):
        def kernel(self, q, k, v):
            return torch.vmap(lambda *one: scaled_dot_product_attention(*one, is_causal=True))(q, k, v)

    model = Net(Fused)
    model.blocks[1].attn = Mapped()
    expected = copy.deepcopy(model)(TOKENS)
    with AttentionMonitor(model, every=1, scope=Scope(near=4)) as monitor:
        assert torch.equal(model(TOKENS), expected)
        report = monitor.report()
    assert_exact(report.training[0], model.blocks[0].attn.kept)
    assert len(report.training) == 1 and "in `blocks.1.attn` could not be read" in report.notes[0]


def test_several_calls_of_a_module_are_layers_and_are_said_to_be():
    class Chunks(Own):
        def kernel(self, q, k, v):
            mask = causal(q.shape[2]).split(8)
            parts = [scaled_dot_product_attention(part, k, v, mask[n]) for n, part in enumerate(q.split(8, 2))]
            return torch.cat(parts, 2)

    model = Net(Chunks)
    report = watched(model)
    names = [layer.module for layer in report.training]
    assert names[:4] == ["blocks.0.attn", "blocks.0.attn#1", "blocks.0.attn#2", "blocks.1.attn"]
    assert "`blocks.0.attn` and 1 more call a kernel 3 times in a pass" in report.notes[0]
    means = [torch.tensor(layer.statistics["near_mass"]) for layer in report.training[:3]]
    whole = watched(Net(Own)).training[0].statistics["near_mass"]
    torch.testing.assert_close(sum(means) / 3, torch.tensor(whole), atol=1e-5, rtol=0)


def test_one_module_per_head_is_one_head_each():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(D, SIZE) for _ in range(3))
            self.kept = None

        def forward(self, x):
            q, k = self.q(x), self.k(x)
            self.kept = (q @ k.mT / SIZE**0.5).masked_fill(~causal(x.shape[1]), -torch.inf).detach()[:, None]
            return scaled_dot_product_attention(q, k, self.v(x), is_causal=True)

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.several = nn.ModuleList(Head() for _ in range(HEADS))

        def forward(self, x):
            return torch.cat([one(x) for one in self.several], -1)

    model = Net(Heads)
    report = watched(model)
    assert [layer.heads for layer in report.training] == [(0,)] * 8
    for layer, head in zip(report.training, (one for block in model.blocks for one in block.attn.several), strict=True):
        assert_exact(layer, head.kept)


def test_a_method_is_no_pass_and_the_report_says_so():
    model = Net(Fused)
    with AttentionMonitor(model, every=1) as monitor:
        model.forward(TOKENS)
        assert "call the model itself, model(…), not a method of it" in monitor.report().notes[0]


class Flat(nn.Module):
    """All projections in lists of the model itself; attention through a kernel or not."""

    def __init__(self, fused):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.fused, self.kept = nn.Embedding(50, D), fused, []
        self.queries, self.keys = (nn.ModuleList(nn.Linear(D, D) for _ in range(3)) for _ in range(2))

    def forward(self, tokens):
        x, self.kept = self.embed(tokens), []
        for query, key in zip(self.queries, self.keys, strict=True):
            k, q = heads(key(x)), heads(query(x))
            logits = (2 * q @ k.mT / SIZE**0.5).masked_fill(~causal(x.shape[1]), -torch.inf)
            self.kept.append(logits.detach())
            weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
            out = scaled_dot_product_attention(2 * q, k, k, is_causal=True) if self.fused else weights @ k
            x = x + out.transpose(1, 2).flatten(2)
        return x


@pytest.mark.parametrize("fused", [True, False])
def test_projections_of_several_layers_in_one_module_are_kept_apart(fused):
    model = Flat(fused)
    with torch.no_grad():
        for query in model.queries:
            query.weight.mul_(1 if fused else 2)
            query.bias.mul_(1 if fused else 2)
    report = watched(Live(model, heads=[(f"queries.{n}", f"keys.{n}", HEADS, HEADS) for n in range(3)], causal=True))
    kept = model.kept if fused else [logits / 2 for logits in model.kept]
    for layer, logits in zip(report.training, kept, strict=True):
        assert_exact(layer, logits)
    if fused:
        for layer, logits in zip(watched(model).training, model.kept, strict=True):
            assert_exact(layer, logits)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_rule_that_does_not_look_ahead_is_a_decoders():
    class Flex(Own):
        def kernel(self, q, k, v):
            mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, q.shape[2], k.shape[2], device="cpu")
            return flex_attention(q, k, v, block_mask=mask)

    report = watched(Net(Flex).requires_grad_(False))
    assert [(layer.block, layer.layer) for layer in report.training] == [("decoder", 0), ("decoder", 1)]


def test_jagged_texts_are_read_one_by_one():
    lengths, generator = (5, 9, 3), torch.Generator().manual_seed(0)
    query, key = ([torch.randn(n, HEADS, SIZE, generator=generator) for n in lengths] for _ in range(2))
    sides = [torch.nested.nested_tensor(side, layout=torch.jagged).transpose(1, 2) for side in (query, key)]
    found = statistics_of_call(packed(AttentionCall(*sides, sides[1])), near=4)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    for q, k, end in zip(query, key, ends, strict=True):
        alone = statistics_of_call(AttentionCall(*(part.transpose(0, 1)[None] for part in (q, k, k))), near=4)
        for (name, ours), (_, theirs) in zip(found.numbers(), alone.numbers(), strict=True):
            torch.testing.assert_close(ours[..., end - len(q) : end], theirs, msg=name)


def test_torchs_kernel_for_packed_texts():
    """It runs on GPUs only: here its operator answers with its queries, and what it was given counts."""
    ends = torch.tensor([0, 24, 48, 72], dtype=torch.int32)
    assert callable(varlen_attn)  # its module defines the operator
    library = torch.library.Library("torch_attn", "FRAGMENT")
    library.impl("_varlen_attn", lambda q, *rest, **options: (q, q, q), "CPU", allow_override=True)

    class Packed(Own):
        def kernel(self, q, k, v):
            flat = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))
            out, _, _ = torch.ops.torch_attn._varlen_attn(*flat, ends, None, 24, 24, False, None, [-1, 0])
            return out.unflatten(0, (len(q), -1)).transpose(1, 2)

    model = Net(Packed)
    report = watched(model)
    library._destroy()
    first = (torch.arange(24) * 0).expand(1, 1, -1)
    for layer, block in zip(report.training, model.blocks, strict=True):
        assert layer.through == "varlen_attn" and layer.block == "decoder"
        assert_exact(layer, block.attn.kept, first=first)
    assert labels(ends, 72)[0].bincount().tolist() == [24, 24, 24]


def test_an_operator_of_several_outputs_is_not_replaced():
    model = Net(CpuOperator)
    stabiliser = QKNorm(model, heads=NAMES)
    with pytest.raises(Refusal, match="scaled_dot_product_attention, whose output can be replaced"):
        model(TOKENS)
    stabiliser.detach()


# ---------------------------------------------------------------------------------------------- heads found in passing
@pytest.mark.parametrize("sample", [TOKENS, None], ids=["on a sample", "in the first pass"])
@pytest.mark.parametrize("kind", [Separate, Fused, Grouped], ids=lambda kind: kind.__name__)
def test_weights_of_unknown_models_are_measured_once_their_heads_are_found(kind, sample):
    model, rows = Net(kind), scan(Live(Net(kind), sample=TOKENS)).heads
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with AttentionMonitor(Live(model, sample=sample), every=1, scope=Scope(near=4)) as monitor:
        model(TOKENS).square().sum().backward()
        report = monitor.step()
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(1e-6 * (torch.zeros(()) if parameter.grad is None else parameter.grad))
        model(TOKENS)
        later = monitor.step()
    assert not report.notes and not any(module._forward_hooks for module in model.modules())
    found = [(layer, number) for layer in report.training for number in layer.heads]
    for row, (layer, number) in zip(rows, found, strict=True):
        assert layer.weights["eta"][number] == pytest.approx(row.eta, rel=1e-4)
        assert layer.weights["sigma_1"][number] == pytest.approx(row.sigma, rel=1e-4)
    assert all(0 < ratio < 1 for layer in later.training for ratio in layer.weights["update_ratio"])
    for layer, block in zip(later.training, model.blocks, strict=True):
        assert_exact(layer, block.attn.kept)


def test_the_pass_in_which_heads_are_found_is_the_same_to_the_bit():
    one, other = Net(Fused), Net(Fused)
    with AttentionMonitor(other, every=1):
        outputs = one(TOKENS), other(TOKENS)
        for output in outputs:
            output.square().sum().backward()
    assert torch.equal(*outputs)
    gradients = [[p.grad for p in model.parameters() if p.grad is not None] for model in (one, other)]
    assert gradients[0] and all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_heads_that_are_not_found_are_said_once_and_leave_the_rest_exact():
    class Curved(Separate):
        def make(self, x):
            q, k, v = super().make(x)
            return torch.tanh(q), k, v

    model = Net(Curved)
    with AttentionMonitor(model, every=1, scope=Scope(near=4)) as monitor:
        reports = [(model(TOKENS), monitor.step())[1] for _ in range(2)]
    assert "nothing is said of the weights of 2 layers" in reports[0].notes[0] and not reports[1].notes
    assert "blocks.0.attn: expected queries that are rows of one product" in reports[0].notes[0]
    assert_exact(reports[1].training[1], model.blocks[1].attn.kept)


def test_a_softmax_beside_kernels_is_named():
    model = Net(Fused)
    model.blocks[1].attn = Einsum()
    report = watched(model)
    (layer,), notes = report.training, report.notes
    assert layer.module == "blocks.0.attn"
    assert "a softmax of its own, and no call of a kernel, in `blocks.1.attn` (Einsum)" in notes[0]
