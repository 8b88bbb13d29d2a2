import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from locater import spectra
from locater.errors import Refusal
from locater.spectra.moments import working

pytestmark = pytest.mark.quick

NAMES = ("trace", "trace_of_square", "frobenius_squared")


def weights(*shape: int, seed: int = 0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))


def dense(query, key):
    """The three moments from W itself."""
    form = key.mT @ query
    trace = form.diagonal(dim1=-2, dim2=-1).sum(-1)
    return trace, (form @ form).diagonal(dim1=-2, dim2=-1).sum(-1), form.square().sum((-2, -1))


class Shapes(TorchDispatchMode):
    """Records the shape of every tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        outputs = result if isinstance(result, (tuple, list)) else [result]
        self.seen += [tuple(output.shape) for output in outputs if isinstance(output, torch.Tensor)]
        return result


@settings(max_examples=30, deadline=None)
@given(d_head=st.integers(1, 6), extra=st.integers(0, 9), batch=st.integers(0, 3), seed=st.integers(0, 999))
def test_moments_equal_those_of_the_dense_form(d_head, extra, batch, seed):
    query, key = weights(batch, d_head, d_head + extra, seed=seed)
    found = spectra.moments(query, key)
    for name, expected in zip(NAMES, dense(query, key), strict=True):
        torch.testing.assert_close(getattr(found, name), expected)


def test_statistics_equal_those_of_all_dense_eigenvalues():
    query, key = weights(3, 4, 9)
    found, values = spectra.moments(query, key), torch.linalg.eigvals(key.mT @ query)
    mean = values.mean(-1)
    torch.testing.assert_close(found.mean, mean.real)
    torch.testing.assert_close(found.variance, (values - mean[:, None]).square().mean(-1).real)
    core = spectra.eigenvalues(query, key)
    torch.testing.assert_close(spectra.spread(core, 9), (values - mean[:, None]).abs().square().mean(-1))
    torch.testing.assert_close(found.mean_nonzero, core.mean(-1).real)
    nonzero = core - core.mean(-1, keepdim=True)
    torch.testing.assert_close(found.variance_nonzero, nonzero.square().mean(-1).real)
    torch.testing.assert_close(spectra.spread(core, len(core[0])), nonzero.abs().square().mean(-1))


def test_eigenvalues_are_the_nonzero_ones_of_the_dense_form():
    query, key = weights(4, 9)
    every = torch.linalg.eigvals(key.mT @ query)
    largest = every[every.abs().argsort(descending=True)[:4]]
    for value in spectra.eigenvalues(query, key):
        assert (largest - value).abs().min() < 1e-10


def test_variance_of_a_rotation_is_negative_and_its_scale_is_not():
    turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    found = spectra.moments(turn, torch.eye(2, dtype=torch.float64))
    assert found.variance == -1
    assert found.eta_squared == pytest.approx(2 / 3)


def test_scale_of_a_symmetric_form_is_the_root_of_its_trace_of_square():
    query, _ = weights(3, 7)
    found = spectra.moments(query, query)
    assert found.eta.square() == pytest.approx(float(found.trace_of_square))
    assert found.xi == pytest.approx(float(found.trace / found.trace_of_square.sqrt()))


def test_ratio_of_the_zero_head_is_zero():
    assert spectra.moments(torch.zeros(2, 3), torch.zeros(2, 3)).xi == 0


def test_no_matrix_of_the_models_size_is_made():
    query, key = weights(2, 3, 4, 50)
    with Shapes() as shapes:
        spectra.moments(query, key[:, :1])
        spectra.eigenvalues(query, key)
        turned_moments(query, key, torch.arange(4).reshape(2, 2), torch.ones(2), torch.arange(60))
    assert shapes.seen
    assert not [shape for shape in shapes.seen if shape.count(50) > 1]


def test_grouped_keys_share_one_gram_matrix():
    (query, _), (_, key) = weights(2, 3, 4, 9), weights(2, 1, 4, 9, seed=1)
    with Shapes() as shapes:
        found = spectra.moments(query, key)
    for name, expected in zip(NAMES, dense(query, key), strict=True):
        torch.testing.assert_close(getattr(found, name), expected)
    assert (2, 1, 4, 4) in shapes.seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_low_precisions_are_computed_in_float32(dtype):
    query, key = weights(4, 9, dtype=dtype)
    found = spectra.moments(query, key)
    assert found.trace.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for name, expected in zip(NAMES, dense(query.double(), key.double()), strict=True):
        torch.testing.assert_close(getattr(found, name).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ["scalar", "diagonal", "full", "singular"])
def test_whitened_weights_have_the_moments_of_the_form_times_the_covariance(kind):
    query, key = weights(3, 5)
    root = weights(5, 5, seed=3)[0]
    singular = root[:, :2] @ root[:, :2].mT
    covariance = {"scalar": 2.5, "diagonal": root[0].abs(), "full": root @ root.mT, "singular": singular}[kind]
    matrix = covariance * torch.eye(5, dtype=torch.float64) if kind in ("scalar", "diagonal") else covariance
    found = spectra.moments(*spectra.whiten(query, key, covariance))
    form = key.mT @ query @ matrix
    torch.testing.assert_close(found.trace, form.trace())
    torch.testing.assert_close(found.trace_of_square, (form @ form).trace())
    torch.testing.assert_close(found.frobenius_squared, (form @ query.mT @ key @ matrix).trace())


@pytest.mark.parametrize(
    ("covariance", "message"),
    [
        (-1.0, "variances of at least 0, got -1"),
        (torch.tensor([1.0, -2.0, 1.0]), "got -2"),
        (float("nan"), "finite covariance"),
        (torch.ones(2), r"\(3,\) or \(3, 3\), got shape \(2,\)"),
        (torch.tensor([[1.0, 0.5, 0], [0, 1, 0], [0, 0, 1]]), "a symmetric covariance"),
        (torch.diag(torch.tensor([1.0, 1.0, -0.5])), "without negative eigenvalues, got -0.5"),
    ],
)
def test_what_is_no_covariance_is_refused(covariance, message):
    with pytest.raises(Refusal, match=message):
        spectra.whiten(*weights(2, 3), covariance)


def test_bad_weights_are_refused():
    good, _ = weights(2, 3)
    with pytest.raises(Refusal, match="finite products"):
        spectra.moments(good, good * float("nan"))
    with pytest.raises(Refusal, match="finite core"):
        spectra.eigenvalues(good, good * float("inf"))
    with pytest.raises(Refusal, match="finite moments, got an overflow"):
        spectra.moments(good * 1e80, good * 1e80)
    with pytest.raises(Refusal, match=r"one shape \(d_h, d\), got \(2, 3\) and \(1, 3\)"):
        working(good, good[:1])
    with pytest.raises(Refusal, match="head dimension within the model's"):
        spectra.moments(good.mT, good.mT)


PAIRS = torch.tensor([[0, 4], [2, 1], [7, 5]])
FREQUENCIES = torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)


def turn(offset: int, *, d_head: int, amplitude: float = 1.0, frequencies=FREQUENCIES, pairs=PAIRS):
    """R_Δ as a matrix, written entry by entry."""
    matrix = torch.eye(d_head, dtype=torch.float64)
    for (first, second), frequency in zip(pairs.tolist(), frequencies, strict=True):
        cosine, sine = amplitude**2 * (frequency * offset).cos(), amplitude**2 * (frequency * offset).sin()
        matrix[first, first] = matrix[second, second] = cosine
        matrix[first, second], matrix[second, first] = -sine, sine
    return matrix


def turned_moments(query, key, pairs, frequencies, offsets, *, amplitude=1.0):
    """The moments at every offset, from the forms."""
    trace, square, norm = spectra.rotary_forms(spectra.grams(query, key), pairs)
    terms = spectra.rotation(offsets.to(trace), frequencies, amplitude=amplitude).to(trace)
    quadratic = ((terms @ form * terms).sum(-1) for form in (square, norm))
    return spectra.Moments((terms @ trace[..., None])[..., 0], *quadratic, query.shape[-1], query.shape[-2])


@pytest.mark.parametrize("d_head", [8, 10])
def test_rotary_forms_equal_those_of_dense_rotations(d_head):
    query, key = weights(2, 3, d_head, 12)
    key = key[:, :1]
    found = turned_moments(query, key, PAIRS, FREQUENCIES, torch.arange(-2, 6), amplitude=1.2)
    for column, offset in enumerate(range(-2, 6)):
        expected = dense(turn(offset, d_head=d_head, amplitude=1.2) @ query, key)
        for name, value in zip(NAMES, expected, strict=True):
            torch.testing.assert_close(getattr(found, name)[..., column], value)


def test_rotary_forms_without_turning_are_the_plain_ones():
    query, key = weights(4, 9, dtype=torch.float32)
    pairs, offsets = torch.arange(4).reshape(2, 2), torch.arange(3)
    turned = turned_moments(query, key, pairs, torch.zeros(2), offsets)
    plain = spectra.moments(query, key)
    for name in NAMES:
        torch.testing.assert_close(getattr(turned, name), getattr(plain, name).expand(3))
    assert turned.eta.shape == (3,) and turned.eta.dtype == torch.float32


@pytest.mark.parametrize("pairs", [[[0, 1], [1, 2]], [[0, 4]], [[-1, 0]]])
def test_pairs_that_are_no_pairs_of_rows_are_refused(pairs):
    query, key = weights(4, 9)
    with pytest.raises(Refusal, match="pairs of different rows from 0 to 3"):
        turned_moments(query, key, torch.tensor(pairs), torch.ones(len(pairs)), torch.arange(3))
