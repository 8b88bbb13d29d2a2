from dataclasses import replace

import pytest
import torch

from locater.attention.input_moments import MomentsCollector
from locater.head import Head
from locater.positions import Alibi, Rotary
from locater.prediction.numbers import NAMES, Gatherer
from locater.prediction.result import bias, ceiling, mean_absolute_error, spearman
from locater.prediction.sampling import (
    LAGS,
    InputsCollector,
    LayerInputs,
    draw_texts,
    effective,
    kept_windows,
    lag_shift,
    takes_all,
)
from locater.prediction.windows import Terms, Windows, cut_windows, special_tokens, spread_evenly
from locater.projections import Norm, Projection
from predict_cases import LENGTH

pytestmark = pytest.mark.quick

D_MODEL = 12


def head(**changed) -> Head:
    query, key = (Projection(torch.randn(8, D_MODEL, dtype=torch.float64)) for _ in range(2))
    return Head(0, 0, query, key, scale=0.3, **changed)


def dependent_texts(count: int = 6, length: int = 40) -> torch.Tensor:
    """Moving averages of white noise: neighbours are alike, and more so forwards in some directions."""
    noise = torch.randn(count, length + 3, D_MODEL, dtype=torch.float64)
    mix = torch.randn(D_MODEL, D_MODEL, dtype=torch.float64) / 3
    return 0.5 + noise[:, 3:] + noise[:, 2:-1] @ mix + 0.5 * noise[:, :-3]


@pytest.mark.parametrize(
    "positions",
    [
        dict(lookahead=0),
        dict(lookahead=0, rotary=Rotary(100.0, 8)),
        dict(rotary=Rotary(100.0, 4, start=2, interleaved=True)),
        dict(),
    ],
    ids=["plain", "rotary", "both ways, some rows", "both ways"],
)
def test_lag_shift_is_the_mean_logit_of_centred_pairs(positions):
    """Slow path: the logit of every pair of centred tokens, averaged by distance."""
    x, one = dependent_texts(), head(**positions)
    collector = MomentsCollector(lags=range(1, 30))
    collector.add(x)
    moments = collector.moments()
    shift = lag_shift(one, moments, x[0], length=30)
    centred = x - moments.mean
    logits = one.logits(centred, centred)
    for distance in (1, 2, 7, 29):
        assert shift[29 + distance] == pytest.approx(
            float(logits.diagonal(-distance, -2, -1).mean()), rel=1e-4, abs=1e-6
        )
        expected = 0 if one.lookahead == 0 else float(logits.diagonal(distance, -2, -1).mean())
        assert shift[29 - distance] == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert shift[29] == 0


def test_lag_shift_in_a_basis_is_that_of_inputs_in_its_span():
    low = torch.randn(3, 60, 5, dtype=torch.float64) @ torch.randn(5, D_MODEL, dtype=torch.float64)
    full, cheap = MomentsCollector(lags=[1, 2]), MomentsCollector(lags=[1, 2], rank=5)
    for collector in (full, cheap):
        collector.add(low)
    one = head(rotary=Rotary(50.0, 8))
    shifts = [lag_shift(one, collector.moments(), low[0], length=9) for collector in (full, cheap)]
    torch.testing.assert_close(*shifts)


def test_effective_weight_of_a_norm_is_its_slope():
    """Along a fixed direction whose length varies little, norm(Wx) ≈ W x / rms: the slope says so."""
    weight = torch.randn(8, D_MODEL)
    sample = torch.randn(4000, D_MODEL)
    norm = Norm("rms", gain=torch.full((8,), 2.0))
    found = effective(Projection(weight, norm=norm), sample)
    ratio = (found / weight.double())[:, 0]
    rough = 2 / (sample @ weight.mT).square().mean().sqrt()
    assert bool(((ratio / rough - 1).abs() < 0.4).all())
    assert effective(Projection(weight), sample) is not None
    torch.testing.assert_close(effective(Projection(weight), sample), weight.double())


def collect(x: torch.Tensor, *, kept: int, terms: Terms | None = None, alone: tuple[int, ...] = (0,)) -> LayerInputs:
    sizes = dict(length=x.shape[1], kept=kept_windows(len(x), length=x.shape[1], texts=kept))
    collector = InputsCollector(alone=alone, terms=terms or Terms(), lag_rank=None, **sizes)
    for batch in x.split(4):
        collector.add(batch)
    return collector.inputs()


def drawn(inputs: LayerInputs, count: int, terms: Terms, stay: torch.Tensor | None = None) -> torch.Tensor:
    stay = torch.zeros(inputs.windows.shape[:2], dtype=torch.bool) if stay is None else stay
    return draw_texts(inputs, stay, terms=terms, count=count, generator=torch.Generator().manual_seed(0))


def test_drawn_texts_have_each_token_once_at_its_position():
    """Tokens carry the number of their window and their position; two rounds of five windows, of ten."""
    x = torch.stack(torch.meshgrid(torch.arange(10.0), torch.arange(LENGTH * 1.0), indexing="ij"), -1)
    texts = drawn(collect(x, kept=5, terms=Terms(lags=False)), 10, Terms())
    assert bool((texts[..., 1] == torch.arange(LENGTH)).all())
    windows = texts[..., 0].reshape(2, 5, LENGTH).sort(1).values
    assert bool((windows == torch.tensor([1.0, 3, 5, 7, 9])[:, None]).all())
    assert int(texts[0, :, 0].unique().numel()) == 5  # of one text, from all windows


@pytest.mark.parametrize("positions", [True, False])
def test_what_stays_does_not_move(positions):
    x = torch.stack(torch.meshgrid(torch.arange(5.0), torch.arange(LENGTH * 1.0), indexing="ij"), -1)
    inputs, stay = collect(x, kept=5, terms=Terms(lags=False)), torch.rand(5, LENGTH) < 0.3
    texts = drawn(inputs, 5, Terms(positions=positions), stay)
    torch.testing.assert_close(texts[stay], x[stay])
    assert float((texts[~stay] == x[~stay]).all(-1).float().mean()) < 0.4
    assert sorted(texts.flatten(0, 1).tolist()) == sorted(x.flatten(0, 1).tolist())


def test_tokens_that_outweigh_a_typical_window_are_found():
    """Planted in one window of five; in four of five they are typical; and those near the query are not meant."""
    torch.manual_seed(0)
    weight = torch.zeros(1, D_MODEL, dtype=torch.float64)
    weight[0, 0] = 1
    one = Head(0, 0, Projection(weight, bias=torch.ones(1)), Projection(weight), scale=1.0)
    x = 0.1 * torch.randn(5, LENGTH, D_MODEL, dtype=torch.float64)
    x[3, [20, 40, LENGTH - 2], 0] = 12.0
    near = replace(one, position_bias=Alibi(1.0))
    for heads in ([one], [near, one]):
        assert takes_all(heads, LayerInputs(x, (0,), None)).nonzero().tolist() == [[3, 20], [3, 40], [3, LENGTH - 2]]
    x[:4, 50:53, 0] = 12.0
    assert not takes_all([one], LayerInputs(x, (0,), None)).any()
    assert not takes_all([one], LayerInputs(x[:, :, torch.arange(D_MODEL).roll(1)], (0,), None)).any()  # not read


def test_without_positions_tokens_come_from_anywhere_but_special_ones_stay():
    x = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(LENGTH * 1.0), indexing="ij"), -1)
    inputs = collect(x, kept=4, terms=Terms(lags=False), alone=(0, LENGTH - 1))
    for first, stay in ((True, True), (False, False)):
        texts = drawn(inputs, 4, Terms(first=first, positions=False))
        assert bool((texts[:, [0, -1], 1] == torch.tensor([0.0, LENGTH - 1])).all()) is stay
        assert int((texts[:, 1:-1, 1] == torch.arange(1, LENGTH - 1)).sum()) < 40  # of 376: they have moved
        assert sorted(texts.flatten(0, 1).tolist()) == sorted(x.flatten(0, 1).tolist())


@pytest.mark.parametrize("kept", [1, 3, 8])
def test_draws_with_their_shift_have_the_mean_logit_of_the_windows(kept):
    """Slow path: logits of all pairs in one window and in two, mixed as a draw of `kept` windows mixes them."""
    torch.manual_seed(0)
    drift = torch.sin(torch.arange(40) / 9)[:, None] * torch.randn(D_MODEL)
    x, one = dependent_texts(8) + drift, head(lookahead=0, rotary=Rotary(100.0, 8))
    lagged = collect(x, kept=kept).lagged
    assert lagged is not None
    shift = lag_shift(one, lagged, x[0], length=40)
    places = (torch.arange(40), torch.arange(40))
    pairs = torch.stack([torch.stack([one.logits(query, key, places) for key in x]) for query in x])
    same, all_pairs = pairs.diagonal().mean(-1), pairs.mean((0, 1))
    different = (all_pairs - same / len(x)) / (1 - 1 / len(x))
    together = same / kept + different * (1 - 1 / kept)
    for distance in LAGS[:8]:
        expected, found = (logits[1:, 1:].diagonal(-distance).mean() for logits in (same, together))
        assert float(found + shift[39 + distance]) == pytest.approx(float(expected), rel=1e-4, abs=1e-5)


def test_a_single_window_is_predicted_as_it_is():
    """Nothing can be exchanged, and nothing is added."""
    x = dependent_texts(1).float()
    inputs = collect(x, kept=16)
    assert inputs.lagged is not None and float(inputs.lagged.core.abs().max()) < 1e-6
    torch.testing.assert_close(drawn(inputs, 2, Terms()), x.expand(2, -1, -1))


def test_long_windows_are_kept_in_small_number():
    assert [int(kept_windows(24, length=n, texts=16).sum()) for n in (256, 512, 1024, 2048, 9000)] == [16, 16, 8, 4, 4]
    assert kept_windows(2, length=9000, texts=16).all()


class Words:
    """Splits at blanks; puts 1 before and 2, 3 behind where asked to."""

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        ids = [10 + int(word) if word.isdigit() else 9 for word in text.split()]
        return {"input_ids": [1, *ids, 2, 3] if add_special_tokens else ids}


def test_windows_share_no_word():
    text = " ".join(str(number) for number in range(2000))
    windows = cut_windows(text, Words(), length=50, num_calibration=6, num_test=2)
    assert windows.calibration.shape == (6, 50) and windows.test.shape == (2, 50)
    assert windows.alone == (0, 48, 49)
    both = torch.cat([windows.calibration, windows.test])
    assert (both[:, 0] == 1).all() and (both[:, -2:] == torch.tensor([2, 3])).all()
    inside = both[:, 1:-2].flatten()
    assert len(inside.unique()) == len(inside)


def test_windows_without_special_tokens_keep_the_first_apart():
    assert Windows(torch.zeros(1, 9).long(), torch.zeros(1, 9).long()).alone == (0,)
    assert special_tokens(Words()) == ([1], [2, 3])
    assert special_tokens(lambda text, add_special_tokens=True: {"input_ids": [5]}) == ([], [])


@pytest.mark.parametrize(("total", "chosen"), [(32, 8), (10, 3), (2, 1), (5, 5)])
def test_spread_chooses_that_many_evenly(total, chosen):
    found = spread_evenly(total, chosen)
    assert found.sum() == chosen
    gaps = found.nonzero().flatten().diff()
    assert not len(gaps) or gaps.max() - gaps.min() <= 1


def test_agreement_against_scipy():
    from scipy.stats import spearmanr

    left, right = torch.randint(5, (2, 40)).double().tolist()
    assert spearman(left, right) == pytest.approx(spearmanr(left, right).statistic)
    assert spearman([1.0, 1.0], [2.0, 3.0]) is None
    assert mean_absolute_error([1.0, 2.0], [2.0, 0.0]) == 1.5
    assert bias([1.0, 2.0], [2.0, 0.0]) == 0.5


def test_ceiling_is_what_noise_leaves():
    """A true order seen twice with noise: the truth itself has about the ceiling with the mean of both."""
    torch.manual_seed(0)
    truth, noise = torch.randn(4000).double(), torch.randn(2, 4000).double()
    halves = truth + noise
    found = ceiling(halves[0].tolist(), halves[1].tolist())
    assert found == pytest.approx(spearman(truth.tolist(), halves.mean(0).tolist()), abs=0.02) and found < 0.9
    assert ceiling([1.0, 2.0], [2.0, 1.0]) == 0.0 and ceiling([1.0, 1.0], [1.0, 2.0]) is None


def test_halves_of_the_windows_make_the_whole():
    one = head(lookahead=0)
    gatherer = Gatherer(one, 80)
    assert gatherer.halves() is None
    for text in torch.randn(3, 80, D_MODEL, dtype=torch.float64).split(1):
        gatherer.add(gatherer.logits(one, text))
    whole, (odd, even) = gatherer.numbers(), gatherer.halves()
    for name in NAMES:
        parts = 2 * getattr(odd, name) + getattr(even, name)  # the first and the third window, and the second
        assert getattr(whole, name) == pytest.approx(parts / 3, rel=1e-5)
