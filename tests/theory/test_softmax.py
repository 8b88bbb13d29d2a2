import pytest
import torch

from locater.errors import Refusal
from locater.theory import monte_carlo
from locater.theory.monte_carlo import clipped_linear, on_slope
from theory_cases import construct


def test_the_linear_softmax_is_the_true_one_near_zero():
    logits = torch.randn(5, 9, dtype=torch.float64)
    errors = [(clipped_linear(scale * logits) - (scale * logits).softmax(-1)).abs().max() for scale in (1e-2, 1e-3)]
    assert errors[1] < 1.2e-2 * errors[0]


def test_the_linear_softmax_is_clipped_and_sums_to_one_or_more():
    logits = 8 * torch.randn(200, 7, dtype=torch.float64)
    found = clipped_linear(logits)
    assert found.min() == 0 and found.max() == 1
    assert (found.sum(-1) >= 1 - 1e-12).all()


def test_the_slope_is_where_the_derivative_is_not_zero():
    logits = (3 * torch.randn(50, 5, dtype=torch.float64)).requires_grad_()
    found = clipped_linear(logits)
    # A token moved alone: the derivative of its own output by its own logit.
    gradient = torch.stack(
        [torch.autograd.grad(found[:, t].sum(), logits, retain_graph=True)[0][:, t] for t in range(5)]
    )
    assert torch.equal(on_slope(logits.detach()), gradient.mT != 0)
    assert torch.equal(on_slope(7 * logits.detach(), temperature=7.0), on_slope(logits.detach()))


def error(scale: float, **settings):
    generator = torch.Generator().manual_seed(0)
    return monte_carlo.clipping_error(
        *construct("asymmetric", 4, scale=scale), num_walks=300, generator=generator, **settings
    )


def test_the_clipping_error_grows_from_nothing_with_the_scale():
    found = [error(scale, length=12) for scale in (0.0, 1e-3, 0.1, 1.0)]
    means = [float(one.mean) for one in found]
    assert means[0] == pytest.approx(0, abs=1e-15) and means[1] < 1e-3
    assert means == sorted(means) and 0.1 < means[-1] <= 1
    assert error(1e8, length=12, temperature=1e-300).mean <= 1
    assert error(1.0, length=1).mean == 0


def test_the_clipping_error_is_the_distance_of_whole_distributions():
    query, key = construct("asymmetric", 4)
    found = monte_carlo.clipping_error(query, key, length=6, num_walks=4000, generator=torch.Generator().manual_seed(0))
    tokens = torch.randn(4000, 6, 11, generator=torch.Generator().manual_seed(9), dtype=torch.float64).cumsum(1)
    logits = torch.einsum("wti,ij,wj->wt", tokens, key.mT @ query, tokens[:, -1]) / 2
    linear = clipped_linear(logits)
    distance = (logits.softmax(-1) - linear / linear.sum(-1, keepdim=True)).clamp_min(0).sum(-1)
    assert found.standard_error == pytest.approx(float(distance.std()) / 4000**0.5, rel=0.1)
    assert abs(found.mean - distance.mean()) < 6 * found.standard_error


def test_logits_that_overflow_are_refused():
    query, key = (weight.float() for weight in construct("asymmetric", 2))
    with pytest.raises(Refusal, match="logits are finite, got an overflow; scale the weights down or use float64"):
        monte_carlo.profile(query * 1e20, key * 1e20, length=3, num_walks=2, generator=torch.Generator())
