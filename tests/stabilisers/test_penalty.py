import warnings

import pytest
import torch
from torch.autograd import gradcheck

from locater.errors import Refusal
from locater.stabilisers import Eta, Frobenius, TraceOfSquare, Variance
from locater.stabilisers.mean import smaller_root
from locater.stabilisers.penalty import gradient, penalty

D_MODEL, D_HEAD = 10, 4
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    LITERAL = TraceOfSquare()
FUNCTIONALS = [Eta(), Frobenius(), Variance(), LITERAL]
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


def reference(functional, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    heads = [(q, k[0]) for group, k in zip(query, key, strict=True) for q in group]
    return torch.stack([dense(functional, k.mT @ q) for q, k in heads]).sum()


@pytest.mark.parametrize("shape", GROUPS)
@pytest.mark.parametrize("functional", FUNCTIONALS, ids=lambda f: type(f).__name__)
def test_value_and_gradient_are_those_of_the_dense_matrix(functional, shape):
    query, key = weights(*shape)
    expected = reference(functional, query, key)
    options = dict(scale=functional)
    torch.testing.assert_close(penalty(query, key, **options).sum(), expected)
    found = gradient(query.detach(), key.detach(), **options)
    for one, by_autograd in zip(found, torch.autograd.grad(expected, (query, key)), strict=True):
        torch.testing.assert_close(one, by_autograd)


@pytest.mark.parametrize("functional", FUNCTIONALS, ids=lambda f: type(f).__name__)
def test_gradient_by_finite_differences(functional):
    options = dict(scale=functional)

    class Total(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key):
            ctx.save_for_backward(query, key)
            return penalty(query, key, **options).sum()

        @staticmethod
        def backward(ctx, *by_value):
            return tuple(by_value[0] * part for part in gradient(*ctx.saved_tensors, **options))

    assert gradcheck(Total.apply, weights(2, 2))


@pytest.mark.parametrize(
    ("batch", "key_batch"),
    [((), ()), ((3,), (3,)), ((2, 3), (2, 3)), ((2, 3), (2, 1)), ((4, 2, 3), (4, 2, 1))],
    ids=str,
)
def test_one_head_and_any_batch_of_heads(batch, key_batch):
    query = torch.randn(*batch, D_HEAD, D_MODEL, dtype=torch.float64, requires_grad=True)
    key = torch.randn(*key_batch, D_HEAD, D_MODEL, dtype=torch.float64, requires_grad=True)
    w = key.mT @ query
    expected = ((w @ w).diagonal(dim1=-2, dim2=-1).sum(-1) + 2 * w.square().sum((-2, -1))) / 3
    torch.testing.assert_close(penalty(query, key), expected)
    found = gradient(query.detach(), key.detach())
    for one, by_autograd in zip(found, torch.autograd.grad(expected.sum(), (query, key)), strict=True):
        torch.testing.assert_close(one, by_autograd)


def test_keys_that_fit_no_query_are_refused():
    with pytest.raises(Refusal, match="one key for each query, or shared keys"):
        gradient(torch.randn(6, 2, 5), torch.randn(1, 6, 2, 5))


def test_variance_is_the_eigenvalues_own_for_symmetric_heads():
    query = torch.randn(D_HEAD, D_MODEL, dtype=torch.float64)
    values = torch.linalg.eigvalsh(query.mT @ query)
    torch.testing.assert_close(penalty(query, query, scale=Variance()), values.var(correction=0))


def test_the_literal_form_warns():
    with pytest.warns(UserWarning, match="unbounded below"):
        TraceOfSquare()


def test_the_smaller_root_solves_its_equation():
    quadratic, linear = torch.tensor([[1.0, -2.0, 0.0]]).double(), torch.tensor([[5.0, 7.0, 3.0]]).double()
    constant = torch.tensor([[0.5, -1e-9, 2.0]]).double()
    root = smaller_root(quadratic, linear, constant)
    residual = quadratic * root.square() + linear * root + constant
    torch.testing.assert_close(residual, torch.zeros_like(root), atol=1e-15, rtol=0)
    others = -linear / quadratic - root
    assert (root.abs() < others.abs()).all()
    assert smaller_root(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1)).isnan().all()
