"""What no logit can exceed, against logits of inputs made to be as large as they get; and what a norm hides."""

import math
from dataclasses import replace

import pytest
import torch

from family_cases import CASES
from locater import Head, Projection, scan
from locater.positions import Alibi, Buckets, Rotary, YaRN
from locater.projections import Norm
from locater.scanning.layer import Settings, analyse
from locater.scanning.rows import failures, parse_conditions
from locater.spectra import grams, largest_singular_value, side_norms

pytestmark = pytest.mark.quick

WIDTH, SIZE = 24, 6


def made(kind="rms", *, bias=True, seed=0, **changes):
    generator = torch.Generator().manual_seed(seed)
    random = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    norm = Norm(kind, 1 + 0.3 * random(WIDTH), random(WIDTH) if kind == "layer" else None)
    query, key = (Projection(random(SIZE, WIDTH), random(SIZE) if bias else None, norm) for _ in range(2))
    return Head(0, 0, query, key, **dict(scale=0.4) | changes)


def bound_of(head):
    (row,) = analyse([head], Settings(64)).rows
    return row.logit_bound


def largest_seen(head, steps=150):
    """The largest |logit| that gradient ascent on the inputs before the norm finds, at distances 0, 1 and 2."""
    torch.manual_seed(1)
    x = torch.randn(32, 3, head.d_model, dtype=torch.float64, requires_grad=True)
    ascent, logits = torch.optim.Adam([x], lr=0.1), torch.zeros(())
    for _ in range(steps):
        ascent.zero_grad()
        seen = head.query.input_norm(x)
        logits = head.logits(seen, seen).abs()
        (-logits.flatten(1).amax(1).sum()).backward()
        ascent.step()
    return float(logits.detach().max())


@pytest.mark.parametrize(
    "head",
    [
        made(bias=False),
        made(),
        made("layer"),
        made(rotary=Rotary(100.0, SIZE)),
        made(rotary=Rotary(100.0, 4, scaling=YaRN(4.0, 16, amplitude=1.3))),
        made(softcap=7.0),
        made(position_bias=Alibi(0.5), lookahead=0),
        made(position_bias=Buckets(torch.linspace(-2, 3, 8).double(), bidirectional=False)),
    ],
    ids=["plain", "bias", "layer norm", "rotary", "yarn", "soft-cap", "alibi", "buckets"],
)
def test_no_logit_exceeds_the_bound(head):
    bound, seen = bound_of(head), largest_seen(head)
    assert seen <= bound * (1 + 1e-6) and seen > 0.25 * bound


def test_the_bound_is_reached():
    """Without biases and positions the best inputs are the singular vectors of W themselves."""
    head = made(bias=False)
    folded = head.folded()
    left, values, right = torch.linalg.svd(folded.key.weight.mT @ folded.query.weight)
    x_key, x_query = (math.sqrt(WIDTH) * vector for vector in (left[:, 0], right[0]))
    logit = float(folded.logits(x_query[None], x_key[None]))
    assert abs(logit) == pytest.approx(bound_of(head), rel=1e-5)
    assert bound_of(head) == pytest.approx(float(values[0]) * WIDTH * 0.4, rel=1e-5)


@pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
def test_qk_norm_bounds_by_its_gain(kind):
    gain = torch.linspace(0.5, 1.5, SIZE).double()
    head = made()
    sides = (replace(side, norm=Norm(kind, gain)) for side in (head.query, head.key))
    head = replace(head, **dict(zip(("query", "key"), sides, strict=True)))
    assert bound_of(head) == pytest.approx(0.4 * 1.5**2 * (1 if kind == "l2" else SIZE))
    assert largest_seen(head) <= bound_of(head) * (1 + 1e-6)


def test_nothing_is_said_where_nothing_bounds():
    head = made()
    free = replace(head, query=replace(head.query, input_norm=None), key=replace(head.key, input_norm=None))
    assert bound_of(free) is None
    assert bound_of(made(position_bias=Alibi(0.5))) is None
    (row,) = analyse([head], Settings(64, raw=True)).rows
    assert row.logit_bound is None and row.sigma > 0
    conditions = parse_conditions("logit_bound>0 sigma>0 symmetry<2")
    assert [condition.column for condition in failures(conditions, [row])] == ["sigma", "symmetry"]


@pytest.mark.parametrize("rank", [0, 1, 3, SIZE])
def test_the_largest_singular_value_at_any_rank(rank):
    generator = torch.Generator().manual_seed(rank)
    weights = torch.randn(2, 5, SIZE, rank, generator=generator) @ torch.randn(2, 5, rank, WIDTH, generator=generator)
    ours = largest_singular_value(grams(*weights))
    dense = torch.linalg.matrix_norm(weights[1].mT.double() @ weights[0].double(), 2)
    # Where query and key hardly meet, what is left of them is as uncertain as the root of their rounding.
    query, key = torch.linalg.matrix_norm(weights.double(), 2)
    assert ((ours - dense).abs() <= 1e-5 * dense + 3e-4 * query * key).all()


@pytest.mark.parametrize("second", [1.0, 1 - 1e-7, 1 - 1e-5, 1 - 1e-3, 0.5])
def test_the_largest_singular_value_beside_others_that_are_as_large(second):
    """Squaring tells values apart that differ little only after many powers."""
    values = torch.tensor([1.0, *[second] * (SIZE - 1)], dtype=torch.float64)
    bases = (torch.linalg.qr(torch.randn(WIDTH, SIZE, dtype=torch.float64)).Q.mT for _ in range(2))
    query, key = (values.sqrt()[:, None] * basis for basis in bases)
    assert float(largest_singular_value(grams(query, key))) == pytest.approx(1, abs=2e-6)
    assert float(largest_singular_value(grams(query.float(), key.float()))) == pytest.approx(1, abs=5e-6)


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize("rank", [0, 1, 3, SIZE])
def test_the_norms_of_the_sides_are_bounded_closely(rank, scale):
    weights = scale * torch.randn(2, 5, SIZE, rank) @ torch.randn(2, 5, rank, WIDTH)
    for bound, weight in zip(side_norms(grams(*weights.double())), weights.double(), strict=True):
        true = torch.linalg.matrix_norm(weight, 2)
        assert (bound >= true * (1 - 1e-6)).all() and (bound <= true * SIZE ** (1 / 128) * (1 + 1e-6)).all()


def test_the_all_ones_direction_is_not_seen_behind_a_layer_norm():
    """Adding the same number to all columns of a projection changes no logit of a layer norm's output."""
    head = made("layer", bias=False)
    shift = 5 * torch.randn(SIZE, 1, dtype=torch.float64) / head.query.input_norm.gain
    moved = replace(head, query=replace(head.query, weight=head.query.weight + shift))
    (before,), (after,) = (analyse([one], Settings(64)).rows for one in (head, moved))
    assert after.eta == pytest.approx(before.eta, rel=1e-5) and after.xi == pytest.approx(before.xi, abs=1e-5)
    (raw_before,), (raw_after,) = (analyse([one], Settings(64, raw=True)).rows for one in (head, moved))
    assert abs(raw_after.eta - raw_before.eta) > 0.1 * raw_before.eta


@pytest.mark.parametrize("name", ["qwen3", "olmo2", "cohere"])
def test_under_qk_norm_the_scale_of_the_weights_says_nothing(name):
    model = next(case for case in CASES if case.name == name).build()
    before = scan(model).heads
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                parameter.mul_(50.0)
    for row, scaled in zip(before, scan(model).heads, strict=True):
        assert scaled.eta == pytest.approx(row.eta, rel=2e-2) and scaled.regime == row.regime
        assert scaled.xi == pytest.approx(row.xi, abs=2e-2)
