import pytest
import torch

from locater.errors import Refusal
from locater.spectra import moments
from locater.theory import closed_form
from locater.theory.random_walk import walk_weights
from theory_cases import construct

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("length", [1, 2, 7, 30])
def test_walk_weights_equal_their_sums(length):
    steps = torch.arange(1, length + 1, dtype=torch.float64)
    weights = (steps <= steps[:, None]).double() - (length - steps + 1) / length
    total, squares = walk_weights(steps, length)
    torch.testing.assert_close(total, weights.sum(1))
    torch.testing.assert_close(squares, length * weights.square().sum(1))


def test_mean_and_variance_are_those_of_simulated_logits():
    query, key = construct("asymmetric", 3, scale=2.0)
    generator, length, position = torch.Generator().manual_seed(3), 8, 6
    tokens = torch.randn(100_000, length, 9, generator=generator, dtype=torch.float64).cumsum(1)
    logits = torch.einsum("wti,ij,wj->wt", tokens, key.mT @ query, tokens[:, -1])
    sample = (logits - logits.mean(1, keepdim=True))[:, position - 1]
    total, squares = walk_weights(torch.tensor([float(position)], dtype=torch.float64), length)
    found = moments(query, key)
    variance = total**2 * found.trace_of_square + squares * found.frobenius_squared
    assert sample.mean() == pytest.approx(float(total * found.trace), abs=5 * float(variance.sqrt()) / 100_000**0.5)
    assert sample.var() == pytest.approx(float(variance), rel=0.04)


@pytest.mark.parametrize("kind", ["asymmetric", "symmetric", "antisymmetric"])
def test_long_contexts_approach_the_limit(kind):
    found = moments(*construct(kind, 6, scale=0.4))
    theta = torch.tensor([0.1, 0.5, 0.9, 1.0], dtype=torch.float64)
    limit = closed_form.limit(found, theta)
    errors = [
        float((closed_form.at(theta * length, found, length=length) - limit).abs().max()) for length in (50, 500, 5000)
    ]
    assert errors[0] > 3 * errors[1] > 9 * errors[2]
    assert errors[2] < 1e-3


def test_symmetric_limit_has_the_quadratic_g():
    found = moments(*construct("symmetric", 6))
    theta, temperature = torch.linspace(0, 1, 5, dtype=torch.float64), 2.0
    variance = (2 * theta**2 - 2 * theta + 7 / 12) * found.trace_of_square
    expected = closed_form.mass_between(0.0, temperature, mean=(theta - 0.5) * found.trace, variance=variance)
    torch.testing.assert_close(closed_form.limit(found, theta, temperature=temperature), expected)


def test_the_limit_of_a_silent_head_is_one():
    silent = moments(torch.zeros(2, 3), torch.zeros(2, 3))
    assert closed_form.limit(silent, torch.tensor([0.0, 0.5])).tolist() == [1, 1]


def test_the_limit_wants_shares_of_the_context():
    with pytest.raises(Refusal, match="from 0 to 1, got \\[3.0\\]; divide t by T"):
        closed_form.limit(moments(*construct("symmetric", 2)), torch.tensor([3.0]))


def test_certain_values_are_inside_or_not():
    mean, none = torch.tensor([-1.0, 0.0, 1.0, 2.0], dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    assert closed_form.mass_between(-1.0, 2.0, mean=mean, variance=none).tolist() == [0, 1, 1, 0]


def test_a_bias_of_the_logits_moves_the_mean_only():
    """Against walks simulated here, with ALiBi's slope added to every logit; d_h is large, so the Gaussian fits."""
    size, length, slope, walks = 48, 16, 0.2, 20_000
    generator = torch.Generator().manual_seed(0)
    matrix = 0.02 * torch.randn(size, size, generator=generator, dtype=torch.float64)
    tokens = torch.randn(walks, length, size, generator=generator, dtype=torch.float64).cumsum(1)
    bias = -slope * torch.arange(length - 1, -1, -1, dtype=torch.float64)
    logits = torch.einsum("wtd,de,we->wt", tokens, matrix, tokens[:, -1]) / size**0.5 + bias
    centred = logits - logits.mean(1, keepdim=True)
    simulated = ((centred > -1) & (centred < length - 1)).double().mean(0)
    found = moments(matrix, torch.eye(size, dtype=torch.float64))
    plain, biased = (closed_form.from_moments(found, length=length, bias=one) for one in (None, bias))
    assert (biased - simulated).abs().max() < 0.03
    assert (plain - simulated).abs().max() > 0.2
