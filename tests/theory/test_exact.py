import math

import pytest
import torch
from scipy.stats import chi2

from locater.theory import exact
from locater.theory.exact import upper_tail
from theory_cases import construct, imhof, two

TIGHT = 1e-10


def tail(values: list[float], threshold: float) -> float:
    """P(Q > x); zeros fill up whichever sign is in the minority."""
    excess = sum((value > 0) - (value < 0) for value in values)
    full = torch.tensor([sorted(values + [0.0] * abs(excess))], dtype=torch.float64)
    return float(upper_tail(full, threshold))


@pytest.mark.parametrize("count", [1, 2, 7, 64, 600])
@pytest.mark.parametrize("ratio", [1e-9, 0.1, 0.9, 1.0, 1.1, 3.0])
@pytest.mark.parametrize("unit", [1e-8, 1.0, 1e8])
def test_equal_eigenvalues_give_the_chi_squared_law(count, ratio, unit):
    threshold = ratio * count * unit
    assert tail([unit] * count, threshold) == pytest.approx(chi2.sf(ratio * count, count), abs=TIGHT)
    assert tail([-unit] * count, -threshold) == pytest.approx(chi2.cdf(ratio * count, count), abs=TIGHT)


@pytest.mark.parametrize("values", [(1e8, -1.0, -1e-8), (3.0, 1.0, -2.0, -7.0), (1e-3, -1e3), (1e-7, -1e7, 1.0)])
@pytest.mark.parametrize("threshold", [1e-6, 1.0, 40.0, 1e6, -1.0, -1e3])
def test_doubled_eigenvalues_give_a_mixture_of_exponentials(values, threshold):
    side = 1 if threshold > 0 else -1
    expected = sum(
        math.exp(-threshold / (2 * one)) / math.prod(1 - other / one for other in values if other != one)
        for one in values
        if one * side > 0
    )
    expected = expected if side > 0 else 1 - expected
    assert tail([*values, *values], threshold) == pytest.approx(expected, abs=TIGHT)


@pytest.mark.parametrize(("up", "down"), [(1.0, 1.0), (1e8, 1e8), (0.01, 5.0), (5.0, 0.01), (1e-9, 1.0), (0.3, 1e8)])
@pytest.mark.parametrize("threshold", [1e-3, 1.0, 500.0])
def test_two_eigenvalues(up, down, threshold):
    assert tail([up, -down], threshold) == pytest.approx(two(up, down, threshold), abs=TIGHT)


@pytest.mark.parametrize("seed", range(6))
def test_random_eigenvalues_against_the_integral_along_the_axis(seed):
    values = torch.randn(12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).exp()
    values[::2] *= -1
    for threshold in (0.5, 3.0, -2.0, 20.0):
        assert tail(values.tolist(), threshold) == pytest.approx(imhof(values.numpy(), threshold), abs=1e-9)


def test_nothing_is_beyond_zero():
    assert tail([0.0, 0.0], 1.0) == 0
    assert tail([0.0, 0.0], -1.0) == 1
    assert tail([-1.0, -2.0], 1e-9) == 0


def test_eigenvalues_are_those_of_the_form_in_the_models_space():
    query, key = construct("asymmetric", 3)
    length, position = 11, 4
    matrix = exact.form_matrices(
        exact.canonical_form(query, key, length=length, temperature=1.0), torch.tensor([position], dtype=torch.float64)
    )
    unit = exact.canonical_form(query, key, length=length, temperature=1.0).unit
    steps = torch.arange(1, length + 1, dtype=torch.float64)
    weights = (steps <= position).double() - (length - steps + 1) / length
    alpha = weights.sum() / math.sqrt(length)
    beta = (weights.square().sum() - alpha**2).sqrt()
    form = key.mT @ query
    dense = torch.cat([torch.cat([alpha * (form + form.mT), beta * form.mT], 1), torch.cat([beta * form, 0 * form], 1)])
    expected = torch.linalg.eigvalsh(dense * math.sqrt(length) / 2)
    largest = expected[expected.abs().argsort(descending=True)[:6]].sort().values
    torch.testing.assert_close(torch.linalg.eigvalsh(matrix)[0] * unit, largest)


@pytest.mark.parametrize("lift", [0.0, 0.5, 5.0, 300.0, -300.0])
@pytest.mark.parametrize("d_head", [1, 8])
def test_interpolation_keeps_its_tolerance(d_head, lift):
    query, key = construct("asymmetric", d_head, scale=0.5)
    key = key + lift * query * key.norm() / query.norm()
    every = exact.profile(query, key, length=300, tolerance=0.0)
    torch.testing.assert_close(exact.profile(query, key, length=300), every, atol=2e-6, rtol=0)


def test_interpolation_evaluates_few_positions(monkeypatch):
    asked = []
    evaluate = exact.evaluate
    monkeypatch.setattr(exact, "evaluate", lambda form, where: asked.append(len(where)) or evaluate(form, where))
    exact.profile(*construct("asymmetric", 8), length=4096)
    assert sum(asked) <= 4096 // 20
    asked.clear()
    exact.profile(*construct("asymmetric", 8), length=200, tolerance=0.0)
    assert asked == [200]


def test_interpolation_sees_a_spike_that_the_guide_shows():
    positions = torch.arange(1.0, 1001.0, dtype=torch.float64)

    def spike(where):
        return torch.exp(-((where - 333) ** 2))

    found = exact.adaptive(spike, positions, guide=spike, tolerance=1e-6)
    torch.testing.assert_close(found, spike(positions), atol=1e-5, rtol=0)


def test_interpolation_refines_beyond_the_guide():
    positions = torch.arange(1.0, 401.0, dtype=torch.float64)

    def wave(where):
        return torch.sin(where / 12)

    found = exact.adaptive(wave, positions, guide=torch.zeros_like, tolerance=1e-8)
    torch.testing.assert_close(found, wave(positions), atol=1e-7, rtol=0)
