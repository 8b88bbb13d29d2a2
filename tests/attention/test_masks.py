"""No guess about a mask changes it, every kind is read alike, and "masked" means the same to all: random masks.

`pytest tests/attention/test_masks.py -m slow` goes through more than two thousand.
"""

import pytest
import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from locater import Live
from locater.attention import materialised
from locater.attention.arguments import read_arguments
from locater.attention.call_statistics import mask_of_call, statistics_of_call
from locater.attention.compilation import Eagerly
from locater.attention.interception import Interception
from locater.attention.masks import plain_mask, read_given
from locater.errors import Refusal
from locater.models.live.logits import reach
from locater.monitor import AttentionMonitor
from locater.stabilisers import EntropyBonus, QKClip, QKNorm, SoftCap, ZLoss
from mask_cases import FLOATS, Case, draw_case

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without"),
    pytest.mark.filterwarnings("ignore:Lower right causal bias"),
]
FEW, MANY = range(60), range(60, 2060)
SDPA_KINDS = ("none", "is_causal", "upper left", "lower right", "bool", "float", "float", "bool")
seeds = pytest.mark.parametrize(
    "numbers", [pytest.param(FEW, id="few"), pytest.param(MANY, id="many", marks=pytest.mark.slow)]
)


def kernel(case: Case):
    if case.rule is not None:
        sizes = case.admitted.shape
        mask = create_block_mask(case.rule, *sizes, device="cpu")
        is_grouped = case.query.shape[1] != case.key.shape[1]
        return flex_attention(
            case.query, case.key, case.value, block_mask=mask, scale=case.scale, enable_gqa=is_grouped
        )
    return attend(case, case.query, case.key, case.value)


def attend(case: Case, query, key, value):
    return scaled_dot_product_attention(
        query, key, value, case.mask, 0.0, case.is_causal, scale=case.scale, enable_gqa=True
    )


def call_of(case: Case):
    calls = []
    with Eagerly(), Interception(calls.append):
        kernel(case)
    return calls[0]


# ------------------------------------------------------------------------------------------ slow, written differently
def first_tokens(admitted):
    """The first key of each query's text: queries that see keys on both sides of a gap join what it parts."""
    joined, (texts, num_queries, num_keys) = admitted.any(1), admitted.any(1).shape
    first = torch.full((texts, num_queries), -1)
    for text in range(texts):
        spans = [row.nonzero()[:, 0].tolist() for row in joined[text]]
        cuts = [cut for cut in range(1, num_keys) if not any(span and span[0] < cut <= span[-1] for span in spans)]
        for query, span in enumerate(spans):
            begin = max([cut for cut in [0, *cuts] if span and cut <= span[0]], default=0)
            end = min([cut for cut in [*cuts, num_keys] if span and cut > span[0]], default=0)
            seen = [key for keys in spans for key in keys if begin <= key < end]
            first[text, query] = min(seen, default=-1)
    return first


def where_queries_stand(case: Case):
    num_queries, num_keys = case.admitted.shape[-2:]
    if case.is_causal or case.name == "upper left":
        return 0
    ends = {
        int(row.nonzero()[-1]) - query
        for text in case.admitted.any(1)
        for query, row in enumerate(text)
        if bool(row.any())
    }
    return ends.pop() if len(ends) == 1 and num_queries > 1 else num_keys - num_queries


def logits_of(case: Case, query, key):
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    return query @ key.mT * (query.shape[-1] ** -0.5 if case.scale is None else case.scale)


def attention_of(logits):
    """By exponentials, whose sum over nothing is 0."""
    top = logits.detach().amax(-1, keepdim=True).clamp(min=-1e300)
    e = (logits - top).exp()
    return e / e.sum(-1, keepdim=True).clamp(min=1e-300)


# ------------------------------------------------------------------------------------------------------- the monitor
@seeds
def test_who_is_admitted_is_the_mask_and_the_statistics_are_those_of_a_softmax(numbers):
    for seed in numbers:
        case = draw_case(seed)
        call = call_of(case)
        _, _, num_queries, num_keys = case.admitted.shape
        ours = mask_of_call(read_arguments(call)).block(slice(0, num_queries), slice(0, num_keys))
        assert torch.equal(ours.expand_as(case.admitted), case.admitted), (seed, case.name)
        assert torch.equal(call.admitted().expand_as(case.admitted), case.admitted), (seed, case.name)
        logits = logits_of(case, case.query, case.key) + case.added.masked_fill(~case.admitted, 0.0)
        distance = torch.arange(num_queries)[:, None] + where_queries_stand(case) - torch.arange(num_keys)
        # A call without a mask of pairs is one text, of keys that nobody may see as well.
        first = first_tokens(case.admitted)[:, None] if call.rule or call.attn_mask is not None else None
        expected = materialised(logits, case.admitted, distance[None, None], near=4, sink=first)
        found = statistics_of_call(call, near=4)
        assert torch.equal(found.num_keys.expand_as(expected.num_keys), expected.num_keys), (seed, case.name)
        for (name, one), (_, other) in zip(found.numbers(), expected.numbers(), strict=True):
            assert torch.allclose(one, other, rtol=1e-6, atol=1e-6, equal_nan=True), (seed, case.name, name)


# ------------------------------------------------------------------------------------------------------ stabilisers
D, HEADS = 16, 4


class Holder(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x, y):
        return self.inner(x, y)


class Masked(nn.Module):
    """Attention that obeys whatever case it is given last; queries and keys may be of two lengths."""

    heads = [("inner.q_proj", "inner.k_proj", HEADS, HEADS)]

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(D, D).double() for _ in range(3))
        self.case: Case | None = None

    def make(self, x, y):
        return (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q_proj(x), self.k_proj(y), self.v_proj(y))
        )

    def forward(self, x, y):
        return attend(self.case, *self.make(x, y))


def own_case(seed):
    """A case whose mask fits four heads."""
    case = draw_case(seed, kinds=SDPA_KINDS)
    b, h, q, k = case.admitted.shape
    if case.mask is not None and case.mask.dim() == 4 and h > 1:
        case.mask = case.mask[:, :1]
    case.admitted, case.added = (part[:, :1].expand(b, HEADS, q, k) for part in (case.admitted, case.added))
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(b, number, D, dtype=torch.float64, generator=generator) for number in (q, k))
    return case, x, y


def finite_by_torch(case):
    """torch's kernel for CPUs multiplies what causality forbids by the scale, and −∞ · 0 is none."""
    return not (case.scale == 0 and (case.is_causal or case.name == "upper left" or "lower right" in case.name))


def loss_of(case, output):
    """Over the queries that have a key: a finite number that masks all of a row makes torch's own gradients wrong."""
    return output[case.admitted.any(-1)].square().sum()


def gradients(model, loss):
    parameters = list(model.parameters())
    found = torch.autograd.grad(loss, parameters, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]


def assert_same(ours, theirs, what):
    for one, other in zip(ours, theirs, strict=True):
        assert bool(one.isfinite().all()), what
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6), (*what, float((one - other).abs().max()))


def capped(case, logits):
    return 3 * torch.tanh(logits / 3)


def eager(model, case, x, y, change=lambda case, logits: logits, prepare=lambda q, k: (q, k)):
    """(output, logits with what is added, without what is masked)."""
    q, k, v = model.make(x, y)
    logits = change(case, logits_of(case, *prepare(q, k)))
    added = logits + case.added if case.mask is not None else logits
    by_kernel = added if case.added.any() else logits.masked_fill(~case.admitted, -torch.inf)
    return attention_of(by_kernel) @ v, added


def normed(q, k):
    return tuple(part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))


@seeds
def test_outputs_and_gradients_of_stabilisers_are_those_of_eager_attention(numbers):
    model = Masked()
    holder = Holder(model)

    def cap():
        return SoftCap(holder, cap=3.0, heads=model.heads)

    def norm():
        return QKNorm(holder, heads=model.heads)

    for seed in numbers:
        case, x, y = own_case(seed)
        model.case = case
        for make, change, prepare in (
            (cap, capped, lambda q, k: (q, k)),
            (norm, lambda case, logits: logits, normed),
        ):
            if make is norm and not finite_by_torch(case):
                continue
            stabiliser = make()
            output = model(x, y)
            known = [p for p in model.parameters() if not any(p is own for own in stabiliser.parameters())]
            ours = torch.autograd.grad(loss_of(case, output), known)
            stabiliser.detach()
            expected, _ = eager(model, case, x, y, change, prepare)
            theirs = torch.autograd.grad(loss_of(case, expected), known)
            what = seed, case.name, type(stabiliser).__name__
            assert_same([output, *ours], [expected, *theirs], what)


@seeds
def test_penalties_are_those_of_admitted_keys_and_leave_the_output_alone(numbers):
    model = Masked()
    holder = Holder(model)
    for seed in numbers:
        case, x, y = own_case(seed)
        model.case = case
        if not finite_by_torch(case):
            continue
        plain_output = model(x, y)
        expected_output, logits = eager(model, case, x, y)
        some = case.admitted.any(-1)
        rows = logits[some].masked_fill(~case.admitted[some], -torch.inf)
        p = attention_of(rows)
        entropy = -(p * p.clamp(min=1e-300).log()).sum(-1)
        number = max(1, int(some.sum()))
        losses = {ZLoss: rows.exp().sum(-1).log().square().sum() / number, EntropyBonus: -entropy.sum() / number}
        for kind, expected in losses.items():
            stabiliser = kind(holder, weight=1.0, heads=model.heads)
            output = model(x, y)
            found = stabiliser.penalty()
            stabiliser.detach()
            what = seed, case.name, kind.__name__
            assert torch.equal(output, plain_output), what
            loss, own = loss_of(case, output) + found, loss_of(case, expected_output) + expected
            assert_same([found, *gradients(model, loss)], [expected, *gradients(model, own)], what)
        clip = QKClip(holder, heads=model.heads, log_only=True)
        assert torch.equal(model(x, y), plain_output)
        top = logits.masked_fill(~case.admitted, -torch.inf).amax((0, 2, 3))
        torch.testing.assert_close(next(iter(clip.largest.values())), top, msg=f"{seed} {case.name}")
        clip.detach()


# ------------------------------------------------------------------------------------------------- kinds, one by one
class OwnMask(torch.Tensor):
    """A subclass of which nothing is known."""


def test_kinds_of_masks():
    mask = torch.ones(3, 5, dtype=torch.bool)
    assert read_given(None, is_causal=True) == (None, True, 0)
    assert read_given(mask) == (mask, False, 0) and read_given(nn.Parameter(mask.float())).tensor is not None
    assert read_given(causal_upper_left(3, 5)) == (None, True, 0)
    assert read_given(causal_lower_right(3, 5)) == (None, True, 2)
    assert torch.equal(plain_mask(causal_lower_right(3, 5)), mask.tril(2))
    for other in (mask.as_subclass(OwnMask), mask.to_sparse(), torch.nested.nested_tensor([mask]), [[True]]):
        with pytest.raises(
            Refusal, match="a mask that is a plain tensor, a Parameter, a DTensor or torch's CausalBias"
        ):
            read_given(other)


def test_sharded_masks_are_gathered(one_process):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mask = torch.rand(4, 6) < 0.5
    spread = distribute_tensor(mask, init_device_mesh("cpu", (1,)), [Shard(0)])
    assert read_given(spread).tensor is spread and torch.equal(plain_mask(spread), mask)


@pytest.fixture
def one_process(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def masked_model(mask):
    model = Masked()
    model.case = draw_case(0, kinds=("none",))
    model.case.mask, model.case.scale = mask, None
    return model, Holder(model), torch.randn(2, 6, D, dtype=torch.float64)


def test_a_mask_of_an_unknown_kind_is_named_and_ends_no_watched_run():
    model, holder, x = masked_model(torch.ones(6, 6, dtype=torch.bool).as_subclass(OwnMask))
    with AttentionMonitor(Live(holder, heads=model.heads, causal=False), every=1) as monitor:
        holder(x, x)
        report = monitor.report()
        assert "test_masks.OwnMask" in " ".join(report.notes)
        assert not report.training, "nothing is reconstructed without a mask that is there"
    SoftCap(holder, heads=model.heads)
    with pytest.raises(Refusal, match="test_masks.OwnMask"):
        model(x, x)


def test_a_head_that_sees_nothing_leaves_the_others_their_numbers():
    mask = torch.ones(2, HEADS, 6, 6, dtype=torch.bool).tril()
    mask[:, 1] = False
    model, holder, x = masked_model(mask)
    with AttentionMonitor(Live(holder, heads=model.heads, causal=False), every=1) as monitor:
        holder(x, x)
        (layer,) = monitor.report().training
    found = torch.tensor(layer.statistics["entropy"], dtype=torch.float64)
    p = logits_of(model.case, *list(model.make(x, x))[:2]).masked_fill(~mask, -torch.inf).softmax(-1)
    expected = torch.special.entr(p).sum(-1).mean((0, 2))
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("low", FLOATS)
@pytest.mark.parametrize("is_added", [False, True])
def test_a_score_that_masks_is_a_mask(low, is_added):
    """Whatever the number that FlexAttention's `score_mod` forbids by: it admits the same keys."""
    sides = [torch.randn(1, 2, 20, 8) for _ in range(3)]

    def score(logit, b, h, q, k):
        return logit + torch.where(q >= k, 0.0, low) if is_added else torch.where(q >= k, logit, low)

    calls = []
    with Eagerly(), Interception(calls.append):
        flex_attention(*sides, score_mod=score)
        flex_attention(*sides, block_mask=create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 20, 20, device="cpu"))
    ours, theirs = (statistics_of_call(call) for call in calls)
    assert torch.equal(ours.num_keys, theirs.num_keys)
    assert torch.allclose(ours.normalised_entropy, theirs.normalised_entropy, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_heads_of_causal_biases_are_found_as_those_of_causal_calls(make):
    case = draw_case(0, kinds=("none",))
    case.query, case.key, case.value = torch.randn(3, 1, 2, 6, 8).double()
    case.mask = make(6, 6)
    assert reach(call_of(case), 1e-5)[:2] == (None, 0)


def test_blocks_that_say_otherwise_than_their_function_are_refused():
    """Compiled, the kernel goes by the blocks; as written, by the function."""
    sides = [torch.randn(1, 2, 256, 8) for _ in range(3)]
    good = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
    forgetful = BlockMask.from_kv_blocks(
        good.kv_num_blocks, good.kv_indices, good.full_kv_num_blocks, good.full_kv_indices
    )
    for mask, is_refused in ((good, False), (forgetful, True), (None, False)):
        calls = []
        with Eagerly(), Interception(calls.append):
            flex_attention(*sides, block_mask=mask)
        if is_refused:
            with pytest.raises(Refusal, match="blocks and mask_mod admit the same"):
                statistics_of_call(calls[0])
        else:
            statistics_of_call(calls[0])


# ----------------------------------------------------------------------------------------------------- odd arguments
@pytest.mark.parametrize("make", [SoftCap, QKNorm, QKClip, lambda model, heads: ZLoss(model, weight=1.0, heads=heads)])
def test_a_scale_of_zero_makes_attention_even(make):
    model, holder, x = masked_model(None)
    model.case.scale = 0.0
    expected = model(x, x)
    stabiliser = make(holder, heads=model.heads)
    output = model(x, x)
    torch.testing.assert_close(output, expected)
    (output.square().sum() + stabiliser.penalty()).backward()
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("sizes", [(0, 5, 5), (2, 0, 5), (2, 5, 0)], ids=["texts", "queries", "keys"])
@pytest.mark.parametrize("make", [SoftCap, QKNorm, QKClip, lambda model, heads: ZLoss(model, weight=1.0, heads=heads)])
def test_a_call_without_texts_queries_or_keys_is_nothing_to_look_at(make, sizes):
    model, holder, _ = masked_model(None)
    num_texts, num_queries, num_keys = sizes
    sides = [torch.randn(num_texts, number, D, dtype=torch.float64) for number in (num_queries, num_keys)]
    expected = model(*sides)
    stabiliser = make(holder, heads=model.heads)
    torch.testing.assert_close(model(*sides), expected)
    (model(*sides).square().sum() + stabiliser.penalty()).backward()
    stabiliser.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    stabiliser.detach()
    with AttentionMonitor(Live(holder, heads=model.heads, causal=False), every=1) as monitor:
        holder(*sides)
        assert not any("could not be" in note for note in monitor.report().notes)


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_a_further_key_of_torchs_module_is_named(option):
    class Two(nn.Module):
        def __init__(self, *options):
            super().__init__()
            self.layers = nn.ModuleList(nn.MultiheadAttention(D, 2, batch_first=True, **one) for one in options)

        def forward(self, x):
            for layer in self.layers:
                x = x + layer(x, x, x, need_weights=False)[0]
            return x

    odd = {option: True}
    with pytest.raises(Refusal, match="keys that all come from the input, got a further key"):
        AttentionMonitor(Two(odd), every=1)
    model = Two({}, odd)
    with AttentionMonitor(model, every=1) as monitor:
        model(torch.randn(2, 5, D))
        report = monitor.report()
    assert len(report.training) == 1 and "layer 1: layers.1: expected keys that all" in report.notes[0]


class Cached(nn.Module):
    """A decoder that is given one token at a time."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.keys = self.values = None

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        self.keys = k if self.keys is None else torch.cat([self.keys, k], 2)
        self.values = v if self.values is None else torch.cat([self.values, v], 2)
        return scaled_dot_product_attention(q, self.keys, self.values).transpose(1, 2).flatten(2)


class Crossing(nn.Module):
    """One query that looks at another sequence, or at its own input from outside."""

    def __init__(self, pooling):
        super().__init__()
        self.q, self.kv, self.pooling = nn.Linear(D, D), nn.Linear(D, 2 * D), pooling

    def forward(self, x, context=None):
        context = x if self.pooling else context
        q = self.q(x.mean(1, keepdim=True) if self.pooling else x)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in (q, *self.kv(context).chunk(2, -1)))
        return scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("kind", ["cached", "crossing", "pooling"])
def test_one_query_with_a_cache_is_not_cross_attention(kind):
    inner = Cached() if kind == "cached" else Crossing(kind == "pooling")
    model, token, text = nn.Sequential(inner), torch.randn(2, 1, D), torch.randn(2, 7, D)
    if kind == "cached":
        model(text)
    given = {"cached": (token,), "crossing": (token, text), "pooling": (text,)}[kind]
    model.forward = lambda *sides: inner(*sides)
    with AttentionMonitor(model, every=1) as monitor:
        model(*given)
        (layer,) = monitor.report().training
    assert layer.block == ("decoder" if kind == "cached" else "cross")
    assert layer.mean("participation") <= 8
