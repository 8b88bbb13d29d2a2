import pytest
import torch

from locater.attention.input_moments import MomentsCollector
from locater.head import Head
from locater.positions import Rotary
from locater.prediction.gaussian import around_offsets, lags_around_offsets, of_moments, of_tokens, position_offsets
from locater.prediction.inputs import InputsCollector, echoes
from locater.prediction.numbers import NAMES, Gatherer
from locater.prediction.result import bias, ceiling, mean_absolute_error, spearman
from locater.prediction.sampling import draw_texts, effective, lag_shift
from locater.prediction.settings import Terms
from locater.prediction.windows import Windows, cut, special_tokens, spread
from locater.projections import Norm, Projection
from predict_cases import LENGTH

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


def test_gaussians_have_the_moments_they_were_made_from():
    x = dependent_texts(8, 50).float()
    tokens = x.flatten(0, 1)
    collector = MomentsCollector()
    collector.add(x)
    few, many = of_tokens(tokens), of_moments(collector.moments())
    covariance = torch.cov(tokens.mT, correction=0)
    for one in (few, many):
        torch.testing.assert_close(one.mean, tokens.mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one.root @ one.root.mT, covariance, rtol=1e-4, atol=1e-4)
        drawn = one.draw(40_000, torch.Generator().manual_seed(0))
        torch.testing.assert_close(torch.cov(drawn.mT), covariance, rtol=0.1, atol=0.1)


def test_gaussian_of_low_rank_keeps_the_variance_outside():
    x = dependent_texts(8, 50).float()
    collector = MomentsCollector(rank=4)
    collector.add(x)
    one = of_moments(collector.moments())
    assert one.residual is not None
    variances = one.root.square().sum(1) + one.residual.square()
    torch.testing.assert_close(variances, x.flatten(0, 1).var(0, correction=0), rtol=0.05, atol=0.05)


def planted(count: int = 16) -> torch.Tensor:
    """White tokens; the first far away, and copies of it at 5 and 9."""
    x = torch.randn(count, LENGTH, D_MODEL)
    x[:, 0] = 20 + 0.1 * torch.randn(count, D_MODEL)
    x[:, [5, 9]] = x[:, :1] + 0.5 * torch.randn(count, 2, D_MODEL)
    return x


def test_echoes_are_found_and_nothing_else():
    found = echoes(planted())
    assert found.sum() == 32
    assert bool(found[:, [5, 9]].all())
    assert not echoes(torch.randn(16, LENGTH, 64)).any()


def collect(x: torch.Tensor, terms: Terms | None = None, alone: tuple[int, ...] = (0,)):
    collector = InputsCollector(alone=alone, terms=terms or Terms(), rank=None, lag_rank=None, length=LENGTH)
    for batch in x.split(4):
        collector.add(batch)
    return collector.inputs()


def test_what_is_apart_is_drawn_apart():
    inputs = collect(planted())
    assert inputs.echo is not None
    assert float(inputs.echo_rate.sum()) == pytest.approx(2, abs=1e-5)
    assert inputs.ordinary.mean.abs().max() < 0.1
    x, ordinary = draw_texts(
        inputs, of_moments(inputs.ordinary), offsets=None, count=200, generator=torch.Generator().manual_seed(0)
    )
    assert x[:, 0].mean() == pytest.approx(20, abs=0.1)
    assert not ordinary[:, 0].any()
    apart = ~ordinary[:, 1:]
    assert apart.sum() / 200 == pytest.approx(2, abs=0.4)
    assert not apart[:, 15:].any()  # echoes stood in positions 4 to 7 and 8 to 15 only
    assert x[:, 1:][apart].mean() == pytest.approx(20, abs=0.5)
    assert x[ordinary].mean() == pytest.approx(0, abs=0.05)


def test_terms_left_out_leave_everything_ordinary():
    inputs = collect(planted(), Terms(first=False, echoes=False, lags=False))
    assert inputs.echo is None and not inputs.alone and inputs.lagged is None
    torch.testing.assert_close(inputs.ordinary.mean.float(), torch.cat(planted().split(4)).mean((0, 1)), rtol=1, atol=1)
    assert inputs.ordinary.mean.mean() > 0.3


def test_positions_are_told_from_noise():
    torch.manual_seed(4)
    noise = torch.randn(32, LENGTH, D_MODEL)
    curve = torch.sin(torch.arange(LENGTH) / 9)[:, None] * torch.randn(D_MODEL)
    inputs = collect(noise)
    assert position_offsets(inputs.by_position, inputs.counts, of_moments(inputs.ordinary)) is None
    inputs = collect(noise + curve)
    ordinary = of_moments(inputs.ordinary)
    offsets = position_offsets(inputs.by_position, inputs.counts, ordinary)
    assert offsets is not None
    error = (offsets - (curve - curve[1:].mean(0)))[1:].square().mean().sqrt()
    raw = (inputs.by_position - inputs.ordinary.mean - (curve - curve[1:].mean(0)))[1:].square().mean().sqrt()
    assert error < 0.6 * raw
    rest = around_offsets(ordinary, offsets)
    torch.testing.assert_close(rest.root @ rest.root.mT, torch.eye(D_MODEL), atol=0.15, rtol=0)
    assert inputs.lagged is not None
    left = lags_around_offsets(inputs.lagged, offsets).core[1:6].abs().max()
    assert left < 0.2 * inputs.lagged.core[1:6].abs().max()


class Words:
    """Splits at blanks; puts 1 before and 2, 3 behind where asked to."""

    def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> dict[str, list[int]]:
        ids = [10 + int(word) if word.isdigit() else 9 for word in text.split()]
        return {"input_ids": [1, *ids, 2, 3] if add_special_tokens else ids}


def test_windows_share_no_word():
    text = " ".join(str(number) for number in range(2000))
    windows = cut(text, Words(), length=50, num_calibration=6, num_test=2)
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
    found = spread(total, chosen)
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


def test_a_kind_that_is_not_rare_is_no_echo():
    """Where a third of the tokens are like the first one, one Gaussian describes them better than two."""
    torch.manual_seed(0)
    x = 3 * torch.randn(4, LENGTH, D_MODEL)
    x[:, 0] = 40.0
    for share, expected in ((0.03, True), (0.33, False)):
        some = x.clone()
        some[torch.rand(4, LENGTH) < share] = 39.0
        some[:, 0] = 40.0
        collector = InputsCollector(alone=[0], terms=Terms(), rank=None, lag_rank=None, length=LENGTH)
        collector.add(some)
        assert (collector.inputs().echo is not None) is expected
