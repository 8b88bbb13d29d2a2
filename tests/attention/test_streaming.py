"""Streamed statistics against the materialised softmax in float64, for every mask, layout and precision."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from locater.attention import (
    NAMES,
    Blocks,
    Mask,
    Rule,
    Scores,
    materialised,
    mean_over_queries,
    sample_queries,
    stream,
)
from locater.errors import Refusal

SMALL = Blocks(queries=8, keys=8, logits=300)  # so that the smallest input has many blocks and parts


def lengths(batch, tokens, *, left):
    """Padding: each text is shorter than the one before, and starts or ends with padding."""
    valid = torch.ones(batch, tokens, dtype=torch.bool)
    for text in range(batch):
        cut = min(tokens, 3 * text)
        valid[text, slice(0, cut) if left else slice(tokens - cut, tokens)] = False
    return valid


def packed(batch, tokens, seed):
    """Documents one after the other, with labels in no order."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.rand(batch, tokens, generator=generator) < 0.2
    return torch.tensor([7, 2, 9, 4, 3, 8, 1])[starts.cumsum(-1) % 7]


def masks(batch, heads, queries, keys, seed):
    same = queries == keys
    generator = torch.Generator().manual_seed(seed)
    documents = packed(batch, keys, seed)
    yield "bidirectional", Mask()
    yield "cross with padding", Mask(key_valid=lengths(batch, keys, left=False))
    dense = torch.rand(batch, heads, queries, keys, generator=generator) < 0.5
    yield "dense per head", Mask(dense=dense)
    yield "dense for all heads", Mask(dense=dense[:, :1], lookahead=0)
    odd = Rule(lambda b, h, q, k: (3 * q + k + h + 2 * b) % 5 > 1, *map(torch.arange, (batch, heads, queries)))
    yield "rule", Mask(rule=odd)
    if not same:
        offset = torch.arange(queries)[None] + keys - queries
        yield "causal, queries at the end", Mask(lookahead=0, query_positions=offset)
        return
    yield "causal", Mask(lookahead=0)
    yield "window", Mask(lookback=4, lookahead=0)
    yield "window to both sides", Mask(lookback=6, lookahead=6)
    yield "long window to both sides", Mask(lookback=19, lookahead=19)
    valid = lengths(batch, keys, left=True)
    yield "padding on the left", Mask(lookahead=0, key_valid=valid, query_valid=valid)
    yield "packed", Mask(lookahead=0, query_segments=documents, key_segments=documents)
    yield "packed, both ways, padded", Mask(query_segments=documents, key_segments=documents, key_valid=valid)
    shuffled = torch.randperm(keys, generator=generator)[None]
    yield "positions in no order", Mask(lookback=9, lookahead=2, query_positions=shuffled, key_positions=shuffled)


def first_tokens(mask, batch, queries, keys):
    """Each query's first token, by looking: the first valid key of its segment; −1 for none."""
    found = torch.full((batch, 1, queries), -1)
    for text in range(batch):
        for query in range(queries):
            for key in range(keys):
                valid = mask.key_valid is None or mask.key_valid[text, key]
                same = mask.key_segments is None or mask.key_segments[text, key] == mask.query_segments[text, query]
                if valid and same:
                    found[text, 0, query] = key
                    break
    return found


def reference(queries, keys, mask, *, scale, softcap=None, bias=None, near=16):
    """In float64, from the whole matrix."""
    (batch, heads, num_queries, _), num_keys = queries.shape, keys.shape[2]
    logits = queries.double() @ keys.double().repeat_interleave(heads // keys.shape[1], 1).mT * scale
    mask = mask.counted(num_queries, num_keys, logits.device)
    everything = slice(0, num_queries), slice(0, num_keys)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if bias is not None:
        logits = logits + bias(mask.distance(*everything)).double()
    admitted = mask.block(*everything)
    if mask.query_valid is not None:
        admitted = admitted & mask.query_valid[:, None, :, None]
    first = first_tokens(mask, batch, num_queries, num_keys)
    found = materialised(logits, admitted, mask.distance(*everything)[:, None], near=near, sink=first)
    return found, logits.abs().max().item()


def assert_equal(found, expected, tolerance, *, context=""):
    assert torch.equal(found.num_keys, expected.num_keys), context
    for (name, ours), (_, theirs) in zip(found.numbers(), expected.numbers(), strict=True):
        # Distances and participation are counts of keys: their size is that of the text.
        size = found.num_keys.clamp(min=1) if name in ("mean_distance", "participation") else 1
        difference = ((ours.double() - theirs) / size).abs()
        assert torch.equal(ours.isnan(), theirs.isnan()), (context, name)
        assert difference.nan_to_num(0).max() <= tolerance, (context, name, difference.nan_to_num(0).max())


def slope(distance):
    return -torch.tensor([0.5, 0.1, 0.02, 0.3])[:, None, None] * distance[:, None]


@settings(max_examples=25, deadline=None)
@given(
    tokens=st.integers(1, 40),
    extra=st.sampled_from([0, 0, 5]),
    key_heads=st.sampled_from([1, 2, 4]),
    batch=st.integers(1, 3),
    size=st.sampled_from([0.1, 1.0, 3.0]),
    near=st.sampled_from([1, 3, 16]),
    seed=st.integers(0, 999),
)
def test_every_mask_and_layout(tokens, extra, key_heads, batch, size, near, seed):
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randn(batch, 4, tokens, 6, generator=generator, dtype=torch.float64) * size
    keys = torch.randn(batch, key_heads, tokens + extra, 6, generator=generator, dtype=torch.float64) * size
    for name, mask in masks(batch, 4, tokens, tokens + extra, seed):
        softcap, bias = (2.0, slope) if seed % 2 else (None, None)
        expected, _ = reference(queries, keys, mask, scale=0.4, softcap=softcap, bias=bias, near=near)
        for blocks in (SMALL, None):
            found = stream(queries, keys, mask=mask, scores=Scores(0.4, softcap, bias), near=near, blocks=blocks)
            assert_equal(found, expected, 1e-9, context=name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_precision_up_to_logits_of_ten_thousand(dtype, size):
    queries, keys = (torch.randn(1, 4, 40, 16, dtype=torch.float64) for _ in range(2))
    queries, keys = (queries * size).to(dtype), keys[:, :2].to(dtype)
    for name, mask in masks(1, 4, 40, 40, 1):
        scale = 10.0 if size > 1 else 0.25
        expected, largest = reference(queries, keys, mask, scale=scale)
        assert largest > (10_000 if size > 1 else 1)
        tolerance = 1e-6 if dtype == torch.float64 else 1e-5 * max(1.0, largest)
        assert_equal(
            stream(queries, keys, mask=mask, scores=Scores(scale), blocks=SMALL), expected, tolerance, context=name
        )


def test_equal_logits_of_ten_thousand_stay_exact():
    """All logits alike: uniform, however large they are."""
    queries, keys = torch.full((1, 1, 30, 1), 100.0), torch.full((1, 1, 30, 1), -100.0)
    found = stream(queries, keys, mask=Mask(lookahead=0), blocks=SMALL)
    assert found.max_logit.eq(-10_000).all()
    torch.testing.assert_close(found.entropy[0, 0], torch.arange(1.0, 31).log())
    torch.testing.assert_close(found.participation[0, 0], torch.arange(1.0, 31))


def test_rows_without_keys_and_with_one_are_left_out_and_counted():
    valid = torch.tensor([[False, False, True, True, True]])
    queries, keys = torch.randn(2, 1, 1, 5, 4, dtype=torch.float64)
    found = stream(queries, keys, mask=Mask(lookahead=0, key_valid=valid))
    assert found.num_keys[0, 0].tolist() == [0, 0, 1, 2, 3]
    assert found.entropy[0, 0].isnan().tolist() == [True, True, False, False, False]
    assert found.normalised_entropy[0, 0].isnan().tolist() == [True, True, True, False, False]
    mean = mean_over_queries(found.normalised_entropy)
    assert mean.count.tolist() == [2]
    torch.testing.assert_close(mean.value, found.normalised_entropy[0, 0, 3:].mean()[None])


class Largest(TorchDispatchMode):
    """The size of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for output in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(output, torch.Tensor):
                self.numel = max(self.numel, output.numel())
        return result


def test_no_tensor_grows_with_the_square_of_the_length_and_shared_keys_are_not_copied():
    queries, keys = torch.randn(1, 8, 1024, 4), torch.randn(1, 2, 1024, 4)
    blocks = Blocks(queries=32, keys=64, logits=1 << 15)
    with Largest() as seen:
        stream(queries, keys, mask=Mask(lookahead=0), blocks=blocks)
    assert seen.numel <= 8 * 1024 * 6, "sums over all queries, but no matrix"


class Products(TorchDispatchMode):
    """Multiplications spent on logits."""

    spent = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.bmm.default:
            self.spent += math.prod(args[0].shape) * args[1].shape[-1]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("mask", "share"), [
    (Mask(), 1.0), (Mask(lookahead=0), 0.57), (Mask(lookahead=0, lookback=31), 0.2),
    (Mask(query_segments=torch.arange(512)[None] // 64, key_segments=torch.arange(512)[None] // 64), 0.26),
])  # fmt: skip
def test_excluded_blocks_are_skipped(mask, share):
    queries, keys = torch.randn(2, 1, 2, 512, 4)
    with Products() as products:
        stream(queries, keys, mask=mask, blocks=Blocks(queries=32, keys=64))
    assert products.spent <= share * 2 * 512 * 512 * 4


def test_a_sample_of_queries_is_unbiased_and_its_standard_error_true():
    """Over many draws the mean is that of all queries, and its spread is the error stated."""
    queries, keys = torch.randn(2, 2, 1, 200, 4, dtype=torch.float64)
    mask = Mask(lookahead=0)
    whole = stream(queries, keys, mask=mask)
    generator, draws, errors = torch.Generator().manual_seed(0), [], []
    for _ in range(150):
        chosen = sample_queries(200, 40, generator)
        part = stream(queries[:, :, chosen], keys, mask=mask.counted(200, 200, keys.device).at(chosen))
        assert torch.allclose(part.entropy, whole.entropy[..., chosen])
        mean = mean_over_queries(part.entropy, seen=40 / 200)
        draws.append(mean.value)
        errors.append(mean.standard_error)
    draws, error = torch.stack(draws), torch.stack(errors).mean(0)
    # Both texts share the draw, and entropy grows with position in both: independent draws would understate it by √2.
    assert (draws.std(0) / error < 1.2).all() and (draws.std(0) / error > 0.8).all()
    assert ((draws.mean(0) - mean_over_queries(whole.entropy).value).abs() < 3.5 * error / math.sqrt(150)).all()
    assert mean_over_queries(whole.entropy).standard_error.eq(0).all()
    assert sample_queries(10, 10, generator) is None


def test_heads_must_be_a_multiple_of_key_heads():
    with pytest.raises(Refusal, match="multiple of the key heads, got 3 and 2"):
        stream(torch.randn(1, 3, 4, 2), torch.randn(1, 2, 4, 2))


def test_names_are_those_of_the_statistics():
    found = stream(torch.randn(1, 1, 4, 2), torch.randn(1, 1, 4, 2))
    assert [name for name, _ in found.numbers()] == list(NAMES)
