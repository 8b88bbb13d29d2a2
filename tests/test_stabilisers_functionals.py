import warnings

import pytest
import torch
from torch.autograd import gradcheck

from locater.errors import Refusal
from locater.positions import Rotary
from locater.stabilisers import Eta, Frobenius, OverOffsets, TraceOfSquare, Variance
from locater.stabilisers.gradients import gram_matrices, pull_back
from locater.stabilisers.projection import smaller_root
from locater.stabilisers.scales import Setting

D_MODEL, D_HEAD = 10, 4
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    LITERAL = TraceOfSquare()
ROTARY = Rotary(base=100.0, num_dims=4)
FUNCTIONALS = [Eta(), Frobenius(), Variance(), LITERAL, OverOffsets(Eta(), length=7), OverOffsets(Variance(), length=5)]
GROUPS = [(3, 1), (2, 3)]


def weights(groups: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = D_HEAD, D_MODEL
    return (
        torch.randn(groups, heads, *shape, dtype=torch.float64, requires_grad=True),
        torch.randn(groups, 1, *shape, dtype=torch.float64, requires_grad=True),
    )


def dense(functional, w: torch.Tensor) -> torch.Tensor:
    """The functional of one d×d matrix, written out."""
    d = len(w)
    square, norm, mean = torch.trace(w @ w), w.square().sum(), torch.trace(w)
    centred = w - mean / d * torch.eye(d, dtype=w.dtype)
    return {
        Eta: lambda: (square + 2 * norm) / 3,
        Frobenius: lambda: torch.linalg.svdvals(w).square().sum(),
        Variance: lambda: (torch.trace(centred @ centred) + 2 * centred.square().sum()) / (3 * d),
        TraceOfSquare: lambda: torch.linalg.eigvals(w).square().sum().real,
    }[type(functional)]()


def turned(functional: OverOffsets, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mean over offsets with every rotation carried out on the queries."""
    found = []
    for offset in range(functional.length):
        moved = ROTARY.rotate(query.mT, torch.full((D_MODEL,), offset), length=functional.length).mT
        found.append(dense(functional.scale, key.mT @ moved))
    return torch.stack(found).mean()


def reference(functional, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    one = turned if isinstance(functional, OverOffsets) else lambda f, q, k: dense(f, k.mT @ q)
    return torch.stack([one(functional, q, k[0]) for group, k in zip(query, key, strict=True) for q in group]).sum()


@pytest.mark.parametrize("shape", GROUPS)
@pytest.mark.parametrize("functional", FUNCTIONALS, ids=lambda f: type(getattr(f, "scale", f)).__name__)
def test_value_and_gradient_are_those_of_the_dense_matrix(functional, shape):
    query, key = weights(*shape)
    setting = Setting(D_MODEL, ROTARY)
    expected = reference(functional, query, key)
    grams = gram_matrices(query.detach(), key.detach())
    torch.testing.assert_close(functional.value(grams, setting).sum(), expected.detach())
    found = pull_back(functional.slope(grams, setting), query.detach(), key.detach())
    for one, by_autograd in zip(found, torch.autograd.grad(expected, (query, key)), strict=True):
        torch.testing.assert_close(one, by_autograd)


@pytest.mark.parametrize("functional", FUNCTIONALS[:5], ids=lambda f: type(getattr(f, "scale", f)).__name__)
def test_gradient_by_finite_differences(functional):
    class Total(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key):
            ctx.save_for_backward(query, key)
            return functional.value(gram_matrices(query, key), Setting(D_MODEL, ROTARY)).sum()

        @staticmethod
        def backward(ctx, by_value):
            query, key = ctx.saved_tensors
            slope = functional.slope(gram_matrices(query, key), Setting(D_MODEL, ROTARY))
            return tuple(by_value * part for part in pull_back(slope, query, key))

    assert gradcheck(Total.apply, weights(2, 2))


def test_variance_is_the_eigenvalues_own_for_symmetric_heads():
    query = torch.randn(1, 1, D_HEAD, D_MODEL, dtype=torch.float64)
    found = Variance().value(gram_matrices(query, query), Setting(D_MODEL))
    values = torch.linalg.eigvalsh(query[0, 0].mT @ query[0, 0])
    torch.testing.assert_close(found[0, 0], values.var(correction=0))


def test_heads_without_rotary_positions_have_one_offset():
    grams = gram_matrices(*(weight.detach() for weight in weights(2, 1)))
    setting, averaged = Setting(D_MODEL), OverOffsets(Eta(), length=9)
    assert torch.equal(averaged.value(grams, setting), Eta().value(grams, setting))
    assert torch.equal(averaged.slope(grams, setting).core, Eta().slope(grams, setting).core)


def test_the_literal_form_warns():
    with pytest.warns(UserWarning, match="unbounded below"):
        TraceOfSquare()


def test_a_length_below_one_is_refused():
    with pytest.raises(Refusal, match="length of at least 1"):
        OverOffsets(Eta(), length=0)


def test_the_smaller_root_solves_its_equation():
    quadratic, linear = torch.tensor([[1.0, -2.0, 0.0]]).double(), torch.tensor([[5.0, 7.0, 3.0]]).double()
    constant = torch.tensor([[0.5, -1e-9, 2.0]]).double()
    root = smaller_root(quadratic, linear, constant)
    residual = quadratic * root.square() + linear * root + constant
    torch.testing.assert_close(residual, torch.zeros_like(root), atol=1e-15, rtol=0)
    others = -linear / quadratic - root
    assert (root.abs() < others.abs()).all()
    assert smaller_root(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1)).isnan().all()
