"""One quantity, three methods: every construction, every precision, every extreme."""

import functools
import math

import pytest
import torch

from locater.errors import Refusal
from locater.theory import closed_form, exact, monte_carlo
from theory_cases import CONSTRUCTIONS, check_matrix, construct, reference

NUM_WALKS = 4000


def simulated(query, key, **settings):
    generator = torch.Generator().manual_seed(5)
    return monte_carlo.profile(query, key, num_walks=NUM_WALKS, generator=generator, **settings).mean


METHODS = {"closed": closed_form.profile, "exact": exact.profile, "monte-carlo": simulated}


def allowed(method: str, expected: torch.Tensor) -> torch.Tensor:
    """How far a method may be from the truth: its bias, its rounding, or its noise."""
    noise = 4 * (expected * (1 - expected) / NUM_WALKS).sqrt() + 2 / NUM_WALKS
    return {"closed": torch.full_like(expected, 0.2), "exact": torch.full_like(expected, 1e-8)}.get(method, noise)


@functools.cache
def small_head(kind: str, dtype: torch.dtype):
    """A head of five dimensions, and its true ρ at three of nine positions."""
    query, key = (weight.to(dtype) for weight in construct(kind, 5, scale=0.5))
    settings = {"length": 9, "temperature": math.sqrt(5)}
    truth = [reference(query.double(), key.double(), position, **settings) for position in (1, 4, 9)]
    return query, key, torch.tensor(truth, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CONSTRUCTIONS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_finds_the_probability(method, kind, dtype):
    query, key, truth = small_head(kind, dtype)
    error = (METHODS[method](query, key, length=9)[[0, 3, 8]] - truth).abs()
    rounding = 0 if dtype == torch.float64 else 1e-5
    assert (error <= allowed(method, truth) + rounding).all(), (error, truth)


def test_check_values():
    matrix, identity = check_matrix(), torch.eye(6, dtype=torch.float64)
    at = [0, 5, 11, 17, 23]
    closed = torch.tensor([0.092179, 0.141847, 0.523308, 0.880385, 0.648561], dtype=torch.float64)
    truth = torch.tensor([0.021766, 0.093056, 0.542209, 0.915946, 0.764977], dtype=torch.float64)
    torch.testing.assert_close(closed_form.profile(matrix, identity, length=24)[at], closed, atol=2e-6, rtol=0)
    torch.testing.assert_close(exact.profile(matrix, identity, length=24)[at], truth, atol=2e-6, rtol=0)


LENGTHS = (2, 3, 17, 130, 512)
SWEEP = [
    (kind, d_head) for kind in CONSTRUCTIONS for d_head in (1, 2, 4, 16, 64) if (kind, d_head) != ("antisymmetric", 1)
]


@pytest.mark.parametrize(("case", "kind", "d_head"), [(case, *head) for case, head in enumerate(SWEEP)])
def test_simulation_agrees_with_the_exact_law(case, kind, d_head):
    length = LENGTHS[(case + case // 5) % 5]
    query, key = (weight.float() for weight in construct(kind, d_head, seed=case, scale=(0.02, 0.3, 2.0)[case % 3]))
    at = torch.linspace(0, length - 1, min(length, 9)).long()
    truth = exact.profile(query, key, length=length)[at]
    error = (simulated(query, key, length=length)[at] - truth).abs()
    assert (error <= allowed("monte-carlo", truth)).all(), (error, truth)


def test_standard_error_is_the_binomial_one():
    query, key = construct("asymmetric", 4)
    runs = [
        monte_carlo.profile(query, key, length=6, num_walks=200, generator=torch.Generator().manual_seed(seed))
        for seed in range(60)
    ]
    seen = torch.stack([run.mean for run in runs]).std(0)
    told = torch.stack([run.standard_error for run in runs]).mean(0)
    assert (seen / told - 1).abs().max() < 0.4
    again = monte_carlo.profile(query, key, length=6, num_walks=200, generator=torch.Generator().manual_seed(0))
    assert torch.equal(again.mean, runs[0].mean)


def test_the_closed_form_approaches_the_exact_one_as_heads_grow():
    def error(d_head: int) -> float:
        query, key = construct("asymmetric", d_head)
        key = key + 0.5 * query * key.norm() / query.norm()
        closed, truth = (METHODS[name](query, key, length=24) for name in ("closed", "exact"))
        return float((closed - truth).abs().max())

    errors = [error(d_head) for d_head in (2, 8, 32, 128)]
    assert all(after < 0.75 * before for before, after in zip(errors, errors[1:], strict=False)), errors
    assert errors[-1] < 0.02


@pytest.mark.parametrize("method", METHODS)
def test_permuting_rows_alike_changes_nothing(method):
    query, key = construct("asymmetric", 5)
    order = torch.tensor([3, 0, 4, 1, 2])
    before = METHODS[method](query, key, length=8)
    after = METHODS[method](query[order], key[order], length=8)
    torch.testing.assert_close(after, before, atol=1e-9 if method != "monte-carlo" else 0.05, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_an_isotropic_covariance_equals_the_scaled_head(method):
    query, key = construct("asymmetric", 3)
    scaled = METHODS[method](query * 2.5, key, length=8)
    full = 2.5 * torch.eye(9, dtype=torch.float64)
    for covariance in (2.5, full.diagonal(), full):
        found = METHODS[method](query, key, length=8, covariance=covariance)
        torch.testing.assert_close(found, scaled, atol=1e-9 if method != "monte-carlo" else 0.05, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_any_covariance_equals_correlated_steps(method):
    query, key = construct("negative", 3)
    root = torch.randn(9, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) / 3
    found = METHODS[method](query, key, length=7, covariance=root @ root.mT)
    truth = reference(query @ root, key @ root, 5, length=7, temperature=math.sqrt(3))
    assert abs(found[4] - truth) <= allowed(method, torch.tensor([truth], dtype=torch.float64))


@pytest.mark.parametrize("method", METHODS)
def test_batches_with_shared_keys_equal_single_heads(method):
    heads = [construct("asymmetric", 3, seed=seed) for seed in range(4)]
    query = torch.stack([query for query, _ in heads]).reshape(2, 2, 3, 9)
    key = torch.stack([heads[0][1], heads[2][1]])[:, None]
    found = METHODS[method](query, key, length=6, temperature=0.7)
    assert found.shape == (2, 2, 6)
    single = METHODS[method](query[1, 0], key[1, 0], length=6, temperature=0.7)
    torch.testing.assert_close(found[1, 0], single, atol=1e-9 if method != "monte-carlo" else 0.05, rtol=0)


@pytest.mark.parametrize("method", METHODS)
class TestExtremes:
    def test_a_single_token_has_no_slope(self, method):
        for scale in (0.0, 1.0, 1e8):
            assert METHODS[method](*construct("asymmetric", 2, scale=scale), length=1) == 0

    @pytest.mark.parametrize("scale", [0.0, 1e-150, 1e-8])
    def test_a_silent_head_has_all_of_its_tokens_on_the_slope(self, method, scale):
        found = METHODS[method](*construct("asymmetric", 2, scale=scale), length=40)
        torch.testing.assert_close(found, torch.ones(40, dtype=torch.float64))

    @pytest.mark.parametrize("kind", CONSTRUCTIONS)
    @pytest.mark.parametrize(("scale", "temperature"), [(1e8, None), (1.0, 1e-30), (1.0, 1e-300), (1e100, None)])
    def test_a_loud_head_has_none(self, method, kind, scale, temperature):
        found = METHODS[method](*construct(kind, 4, scale=scale), length=40, temperature=temperature)
        torch.testing.assert_close(found, torch.zeros_like(found), atol=1e-3, rtol=0)
        assert found.min() >= 0

    def test_eigenvalues_of_all_magnitudes(self, method):
        matrix = torch.diag(torch.tensor([1e8, 1.0, -1e-8], dtype=torch.float64))
        found = METHODS[method](matrix, torch.eye(3, dtype=torch.float64), length=64)
        assert ((found >= 0) & (found <= 1)).all()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"length": 0}, "length of at least 1, got 0"),
            ({"length": 10**400}, "length of at most 2,147,483,648, got 1000"),
            ({"length": 4, "temperature": 0.0}, "temperature above 0, got 0"),
            ({"length": 4, "temperature": math.inf}, "temperature above 0"),
            ({"length": 4, "covariance": -1.0}, "at least 0"),
        ],
    )
    def test_nonsense_is_refused(self, method, arguments, message):
        with pytest.raises(Refusal, match=message):
            METHODS[method](*construct("asymmetric", 2), **arguments)

    def test_what_is_not_finite_is_refused(self, method):
        query, key = construct("asymmetric", 2)
        with pytest.raises(Refusal, match="finite weights"):
            METHODS[method](query * math.nan, key, length=4)
        with pytest.raises(Refusal, match="finite"):
            METHODS[method](query * 1e200, key * 1e200, length=4)


def test_at_least_one_walk_is_asked_for():
    with pytest.raises(Refusal, match="at least one walk, got 0"):
        monte_carlo.profile(*construct("asymmetric", 2), length=4, num_walks=0, generator=torch.Generator())
