"""`Head` against logits written out by hand, one mechanism at a time."""

import math
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear

from locater.errors import Refusal
from locater.head import Head
from locater.positions import (
    NTK,
    Alibi,
    Buckets,
    DynamicNTK,
    LinearScaling,
    Llama3,
    LongRoPE,
    Proportional,
    Rotary,
    YaRN,
)
from locater.projections import LowRank, Norm, Projection, Whole

pytestmark = pytest.mark.quick

D, H, T = 12, 4, 7


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def make(query=None, key=None, **fields):
    return Head(3, 1, query or Projection(randn(H, D)), key or Projection(randn(H, D)), 0.5, **fields)


@pytest.fixture
def x():
    return randn(2, T, D)


def test_plain_logit_is_the_bilinear_form(x):
    head = make(Projection(randn(H, D), randn(H)), Projection(randn(H, D), randn(H)))
    expected = torch.empty(2, T, T, dtype=torch.float64)
    for batch in range(2):
        for i in range(T):
            for j in range(T):
                q = head.query.weight @ x[batch, i] + head.query.bias
                k = head.key.weight @ x[batch, j] + head.key.bias
                expected[batch, i, j] = 0.5 * (q @ k)
    torch.testing.assert_close(head.logits(x, x), expected)


def test_without_bias_it_is_x_w_x(x):
    head = make()
    w = head.key.weight.T @ head.query.weight
    torch.testing.assert_close(head.logits(x, x), 0.5 * x @ w.T @ x.mT)


@pytest.mark.parametrize("kind", ["layer", "rms", "l2"])
def test_qk_norm_over_the_head(x, kind):
    norm = Norm(kind, randn(H), randn(H), 1e-6)
    head = make(query=Projection(randn(H, D), norm=norm))
    rows = x @ head.query.weight.T
    if kind == "layer":
        expected = torch.nn.functional.layer_norm(rows, (H,), norm.gain, norm.bias, 1e-6)
    elif kind == "rms":
        expected = torch.nn.functional.rms_norm(rows, (H,), norm.gain, 1e-6) + norm.bias
    else:
        expected = torch.nn.functional.normalize(rows, dim=-1) * norm.gain + norm.bias
    torch.testing.assert_close(head.query(x), expected, rtol=1e-5, atol=1e-5)


def test_qk_norm_over_the_whole_projection(x):
    whole, gain = randn(3 * H, D), randn(3 * H)
    rows = slice(H, 2 * H)
    head = make(query=Projection(whole[rows], norm=Norm("rms", gain[rows], epsilon=0.0), whole=Whole(whole)))
    expected = torch.nn.functional.rms_norm(x @ whole.T, (3 * H,), gain, 0.0)[..., rows]
    torch.testing.assert_close(head.query(x), expected)


def test_low_rank_goes_through_the_inner_norm(x):
    down, up, direct, gain = randn(5, D), randn(H - 1, 5), randn(1, D), randn(5)
    low_rank = LowRank(down, up, Norm("rms", gain, epsilon=0.0))
    head = make(query=Projection(torch.cat([low_rank.weight, direct]), low_rank=low_rank))
    inner = torch.nn.functional.rms_norm(x @ down.T, (5,), gain, 0.0)
    torch.testing.assert_close(head.query(x), torch.cat([inner @ up.T, x @ direct.T], -1))


@pytest.mark.parametrize("low_rank", [False, True])
def test_folded_head_on_the_normalised_input_is_the_same_head(x, low_rank):
    norm = Norm("layer", randn(D), randn(D))

    def projection():
        if not low_rank:
            whole = Whole(randn(2 * H, D), randn(2 * H))
            return Projection(whole.weight[:H], whole.bias[:H], norm, Norm("rms", randn(H)), whole)
        inner = LowRank(randn(5, D), randn(H - 1, 5), Norm("rms", randn(5)), randn(5))
        return Projection(torch.cat([inner.weight, randn(1, D)]), randn(H), norm, low_rank=inner)

    head = make(projection(), projection())
    bare = Norm("layer")(x)
    torch.testing.assert_close(head.folded().logits(bare, bare), head.logits(norm(x), norm(x)))
    assert head.folded().query.input_norm is None


def test_folding_widens_sixteen_bits():
    weight, gain = torch.randn(H, D).bfloat16(), torch.randn(D)
    folded = Projection(weight, input_norm=Norm("rms", gain)).folded()
    assert folded.weight.dtype == torch.float32
    torch.testing.assert_close(folded.weight, weight.float() * gain, rtol=0, atol=0)


def test_linearised_norm_is_the_norm_on_average():
    """Over white inputs the linear map has the mean square of the normalised rows, and their direction."""
    weight, gain = randn(64, 128), torch.rand(64, dtype=torch.float64) + 0.5
    projection = Projection(weight, norm=Norm("rms", gain))
    x = randn(4000, 128)
    linear_rows, rows = x @ projection.linearised().T, projection(x)
    assert torch.cosine_similarity(linear_rows, rows).min() > 1 - 1e-9
    assert linear_rows.square().mean() / rows.square().mean() == pytest.approx(1, abs=0.02)


def dense_rotation(frequencies, pairs, position, size):
    matrix = torch.eye(size, dtype=torch.float64)
    for frequency, (i, j) in zip(frequencies, pairs.tolist(), strict=True):
        cosine, sine = math.cos(frequency * position), math.sin(frequency * position)
        matrix[i, i], matrix[i, j], matrix[j, i], matrix[j, j] = cosine, -sine, sine, cosine
    return matrix


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("start", "num_dims"), [(0, 8), (0, 4), (2, 6)])
def test_rotary_is_a_rotation_by_the_distance(interleaved, start, num_dims):
    size, model = 8, 16
    rotary = Rotary(100.0, num_dims, start, interleaved)
    head = Head(0, 0, Projection(randn(size, model)), Projection(randn(size, model)), 1.0, rotary=rotary)
    x, positions = randn(5, model), torch.tensor([0, 3, 4, 10, 11])
    logits = head.logits(x, x, (positions, positions))
    for i in range(5):
        for j in range(5):
            turn = dense_rotation(rotary.frequencies(12), rotary.pairs, int(positions[i] - positions[j]), size)
            expected = (head.key.weight @ x[j]) @ turn @ (head.query.weight @ x[i])
            torch.testing.assert_close(logits[i, j], expected)


SCALINGS = {
    "linear": (LinearScaling(4.0), dict(rope_type="linear", factor=4.0)),
    "dynamic": (DynamicNTK(4.0, 32), dict(rope_type="dynamic", factor=4.0)),
    "yarn": (
        YaRN(4.0, 32, amplitude=0.1 * math.log(4) + 1),
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "llama3": (
        Llama3(8.0, 1.0, 4.0, 16),
        dict(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "longrope": (
        LongRoPE(tuple(1 + n / 8 for n in range(8)), tuple(2.0 + n for n in range(8)), 32),
        dict(
            rope_type="longrope",
            short_factor=[1 + n / 8 for n in range(8)],
            long_factor=[2.0 + n for n in range(8)],
            original_max_position_embeddings=32,
            attention_factor=1.0,
        ),
    ),
    "proportional": (Proportional(4), dict(rope_type="proportional", partial_rotary_factor=0.5)),
}


@pytest.mark.parametrize("length", [16, 32, 33, 100])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_are_those_of_transformers(name, length):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling, parameters = SCALINGS[name]
    config = LlamaConfig(
        hidden_size=16,
        num_attention_heads=1,
        max_position_embeddings=32,
        rope_parameters=dict(rope_theta=500.0, **parameters),
    )
    theirs, amplitude = ROPE_INIT_FUNCTIONS[name](config, None, seq_len=length)
    ours = Rotary(500.0, 16, scaling=scaling)
    torch.testing.assert_close(ours.frequencies(length), theirs.double(), rtol=1e-5, atol=1e-9)
    assert ours.amplitude == pytest.approx(amplitude)


@pytest.mark.parametrize("scaling", [NTK(1000.0), DynamicNTK(4.0, 32)])
def test_a_base_is_stretched_only_where_there_is_a_slower_pair(scaling):
    with pytest.raises(Refusal, match="at least 4 rotated dimensions"):
        Rotary(100.0, 2, scaling=scaling).frequencies(64)
    with pytest.raises(Refusal, match="a positive stretch"):
        Rotary(100.0, 16, scaling=replace(scaling, **{next(iter(vars(scaling))): 1e300})).frequencies(64)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_buckets_are_those_of_t5(bidirectional):
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(200)[:, None] - torch.arange(200)
    table = torch.arange(32, dtype=torch.float64)
    ours = Buckets(table, bidirectional, 128)(distance)
    theirs = T5Attention._relative_position_bucket(-distance, bidirectional, 32, 128)
    torch.testing.assert_close(ours, theirs.double())


def test_additive_positions_and_softcap(x):
    plain = make()
    logits = plain.logits(x, x)
    capped = replace(plain, softcap=2.0).logits(x, x)
    torch.testing.assert_close(capped, 2 * torch.tanh(logits / 2))
    sloped = replace(plain, position_bias=Alibi(0.25)).logits(x, x)
    distance = torch.arange(T)[:, None] - torch.arange(T)
    torch.testing.assert_close(sloped, logits - 0.25 * distance)


def test_window_and_causality(x):
    positions = torch.arange(T)
    causal = make(lookahead=0, lookback=2)
    assert causal.admits(positions, positions).int().tolist() == [
        [int(0 <= i - j <= 2) for j in range(T)] for i in range(T)
    ]
    attention = causal.attention(x, x)
    torch.testing.assert_close(attention.sum(-1), torch.ones(2, T, dtype=torch.float64))
    assert attention[:, 0, 1:].abs().max() == 0


def test_a_head_is_frozen():
    with pytest.raises(FrozenInstanceError):
        make().scale = 1.0


REFUSALS = [
    (lambda: make(query=Projection(randn(H - 1, D))), "one shape"),
    (lambda: Projection(randn(D, H)), "transposed"),
    (lambda: Projection(torch.ones(H, D, dtype=torch.long)), "floating-point"),
    (lambda: Projection(randn(D)), "shape"),
    (lambda: Projection(randn(H, D), randn(H + 1)), "bias of 4 numbers, got 5"),
    (lambda: Projection(randn(H, D), input_norm=Norm("rms", randn(H))), "gain of the input norm of 12"),
    (lambda: Projection(randn(H, D), norm=Norm("rms", randn(D))), "gain of the norm of 4"),
    (lambda: make(query=Projection(randn(H, D) * math.nan)), "decoder layer 3, head 1: expected finite weights"),
    (lambda: make(key=Projection(randn(H, D) * math.inf)), "NaN or infinity"),
    (lambda: make(softcap=0.0), "soft-cap"),
    (lambda: make(block="middle"), "block among"),
    (lambda: make(rotary=Rotary(10.0, 6)), "rotary pairs within 4"),
    (lambda: replace(make(), scale=0.0), "positive, finite logit scale"),
    (lambda: replace(make(), scale=math.nan), "positive, finite logit scale"),
    (lambda: Rotary(10.0, 3), "even number"),
    (lambda: Rotary(-1.0, 4), "positive rotary base"),
    (lambda: Norm("batch"), "layer, rms or l2"),
]


def print_refusals():
    for build, _ in REFUSALS:
        try:
            build()
            print("accepted")
        except Refusal as reason:
            print(reason)


def test_what_cannot_be_a_head_is_refused_in_a_sentence():
    """In a process of its own, where nothing checks annotations before we do."""
    command = [sys.executable, "-c", "import test_heads; test_heads.print_refusals()"]
    output = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout
    sentences = output.splitlines()
    assert len(sentences) == len(REFUSALS)
    for sentence, (_, words) in zip(sentences, REFUSALS, strict=True):
        assert words in sentence


def test_a_large_finite_weight_is_not_taken_for_infinity():
    """Its sum overflows, its entries do not."""
    weight = torch.full((H, D), 3e38)
    Head(0, 0, Projection(weight), Projection(weight), 1.0)


def test_weights_are_read_in_the_precision_of_the_input():
    weight = torch.randn(H, D).bfloat16()
    x = randn(3, D)
    torch.testing.assert_close(Projection(weight)(x), linear(x, weight.double()))
