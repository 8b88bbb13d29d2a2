"""Queries and keys that turn before their norms (HunYuan): logits, all heads at once, and the mean over beginnings."""

import math
from dataclasses import replace

import pytest
import torch

from locater import Head, Projection, attention
from locater.errors import Refusal
from locater.positions import Given, Rotary, YaRN
from locater.projections import Norm
from locater.scanning.layer import Settings, analyse
from locater.theory.profiles import profile

WIDTH, SIZE = 32, 8


def head(index=0, *, gains=True, rotary=None, **further) -> Head:
    generator = torch.Generator().manual_seed(index)

    def side() -> Projection:
        gain = torch.rand(SIZE, generator=generator, dtype=torch.float64) * 2 if gains else None
        weight = torch.randn(SIZE, WIDTH, generator=generator, dtype=torch.float64)
        return Projection(weight, norm=Norm("rms", gain, epsilon=0.0), input_norm=Norm("rms", epsilon=0.0))

    rotary = rotary or Rotary(100.0, SIZE)
    settings = dict(scale=SIZE**-0.5, rotary=rotary, lookahead=0, turns_first=True) | further
    return Head(0, index, side(), side(), **settings)


def inputs(tokens=6) -> torch.Tensor:
    x = torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return Norm("rms", epsilon=0.0)(x)


def by_hand(one: Head, x: torch.Tensor) -> torch.Tensor:
    """Token by token: project, turn as complex numbers, divide by the root mean square, multiply by the gain."""

    def vectors(side: Projection) -> list[torch.Tensor]:
        made = []
        for position, token in enumerate(x[0]):
            row = side.weight @ token
            pairs = torch.complex(row[: SIZE // 2], row[SIZE // 2 :])
            angles = position * 100.0 ** -(torch.arange(SIZE // 2, dtype=torch.float64) / (SIZE // 2))
            turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).mT.flatten()
            made.append(turned / turned.square().mean().sqrt() * side.norm.gain)
        return made

    queries, keys = vectors(one.query), vectors(one.key)
    return torch.stack([torch.stack([query @ key for key in keys]) for query in queries]) * one.scale


def test_logits_are_those_of_turning_first():
    one, x = head(), inputs()
    torch.testing.assert_close(one.logits(x, x)[0], by_hand(one, x))
    assert not torch.allclose(replace(one, turns_first=False).logits(x, x)[0], by_hand(one, x), atol=1e-2)


def test_all_heads_at_once_are_the_heads_one_by_one():
    heads, x = [head(index) for index in range(3)], inputs()
    queries, keys = attention.queries_and_keys(heads, x, x)
    for one, own in zip(heads, (queries @ keys.mT)[0], strict=True):
        torch.testing.assert_close(own * one.scale, one.logits(x, x)[0])


def test_without_gains_the_order_makes_no_difference():
    one, x = head(gains=False), inputs()
    torch.testing.assert_close(one.logits(x, x), replace(one, turns_first=False).logits(x, x))


ROUND = (1 / 16, 1 / 8, 3 / 16, 1 / 4)  # turns per position: all pairs come round after 16 positions


@pytest.mark.parametrize("turns", [ROUND, ROUND[:2], (*ROUND[:2], 0.0, 0.0)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_anywhere_is_the_mean_over_where_a_text_begins(turns, interleaved):
    scaling = Given(tuple(2 * math.pi * share for share in turns))
    one, x = head(rotary=Rotary(1.0, 2 * len(turns), interleaved=interleaved, scaling=scaling)), inputs()
    positions = torch.arange(x.shape[1])
    by_start = [one.logits(x, x, (positions + start, positions + start)) for start in range(16)]
    torch.testing.assert_close(torch.stack(by_start).mean(0), one.anywhere().logits(x, x))
    assert not torch.allclose(by_start[0], one.anywhere().logits(x, x), atol=0.1)


def test_a_scan_is_that_of_the_mean_and_its_bound_that_of_the_head():
    one, x = head(), inputs(40)
    row, mean = (analyse([each], Settings(length=64)).rows[0] for each in (one, one.anywhere()))
    assert (row.trace, row.eta, row.xi) == (mean.trace, mean.eta, mean.xi)
    assert row.logit_bound > float(one.logits(x, x).abs().max())
    assert row.logit_bound > mean.logit_bound  # gains within a pair that differ reach further than their mean
    torch.testing.assert_close(profile(one, length=16), profile(one.anywhere(), length=16))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(query=Projection(torch.eye(SIZE, WIDTH))), "RMS or L2 norms"),
        (dict(query=Projection(torch.eye(SIZE, WIDTH), norm=Norm("layer"))), "RMS or L2 norms"),
        (dict(rotary=Rotary(100.0, SIZE, scaling=YaRN(4.0, 64, amplitude=1.5))), "amplitude 1"),
    ],
)
def test_what_a_rotation_would_change_is_refused(change, words):
    with pytest.raises(Refusal, match=words):
        replace(head(), **change)


def test_backward_turns_the_other_way():
    forward, x = head(gains=False), inputs()
    assert forward.rotary is not None
    backward = replace(forward, rotary=replace(forward.rotary, backward=True))
    before = -torch.arange(x.shape[1])
    torch.testing.assert_close(backward.logits(x, x), forward.logits(x, x, (before, before)))
    assert not torch.allclose(backward.logits(x, x), forward.logits(x, x), atol=1e-2)
