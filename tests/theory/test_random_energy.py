"""The law of the true softmax against sampled logits, and against attention over simulated tokens."""

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from locater.errors import Refusal
from locater.theory import random_energy
from locater.theory.depth import AttentionLayer, token_kernel, walk_kernel
from locater.theory.random_energy import border, collapse_variance, logit_variances, mean_entropy

ROWS = Path(__file__).parents[2] / "runs" / "studies" / "softmax.json"


def entropies(logits):
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return -np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1)


def law(variance, count):
    return float(mean_entropy(torch.tensor(float(variance)), count))


@pytest.mark.parametrize("count", [2, 16, 300])
@pytest.mark.parametrize("variance", [0.0, 0.1, 3.0, 12.0, 100.0])
def test_mean_entropy_is_that_of_sampled_logits(variance, count):
    sampled = entropies(math.sqrt(variance) * np.random.default_rng(count).normal(size=(4000, count)))
    error = sampled.std() / math.sqrt(len(sampled))
    assert law(variance, count) == pytest.approx(sampled.mean(), abs=4 * error + 1e-6)


def test_two_keys_have_the_entropy_of_one_difference():
    """Of two keys only ω₁ − ω₂ ~ N(0, 2V) counts: one integral, by another rule."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    both = np.stack([math.sqrt(2 * 1.7) * nodes, np.zeros_like(nodes)], -1)
    expected = (weights * entropies(both)).sum() / weights.sum()
    assert law(1.7, 2) == pytest.approx(expected, abs=1e-7)


@given(st.floats(0, 40), st.floats(0.01, 20), st.integers(2, 10**6))
@settings(max_examples=40, deadline=None)
def test_entropy_falls_with_the_variance_and_stays_above_the_limit(variance, more, count):
    here, beyond = law(variance, count), law(variance + more, count)
    assert beyond < here <= math.log(count) + 1e-6
    assert here >= math.log(count) - variance / 2 - 1e-6  # the law as n → ∞


def test_the_limit_is_approached_with_the_number_of_keys():
    """At half of the border the law is ½ ln n; what is missing shrinks with n."""
    gaps = [abs(law(border(count) / 2, count) / math.log(count) - 0.5) for count in (10, 10**3, 10**6, 10**9)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 0.01
    assert [law(1.5 * border(count), count) / math.log(count) for count in (10**3, 10**9)] == pytest.approx(
        [0.25, 0.12], abs=0.06
    )


@pytest.mark.parametrize("count", [16, 128, 1024, 8192])
def test_collapse_begins_at_nearly_the_same_variance_at_any_length(count):
    """As docs/theory.md says: entropy below a quarter from ‖W‖ = 4.9 to 5.1 λ on."""
    found = collapse_variance(count, 0.25)
    assert law(found, count) == pytest.approx(math.log(count) / 4, rel=1e-3)
    assert 4.8 < math.sqrt(found) < 5.15


def attention_entropy(tokens, deviation, draws):
    """Mean over texts and queries of the last half, both ways, in units of ln T; W a plain Gaussian matrix."""
    texts, length, width = tokens.shape
    matrices = draws.normal(size=(texts, width, width)) * deviation / width
    logits = tokens @ matrices.swapaxes(1, 2) @ tokens.swapaxes(1, 2)  # query by key; W is λ times the matrix
    return entropies(logits)[:, length // 2 :].mean() / math.log(length)


@pytest.mark.parametrize("deviation", [0.5, 2.0, 5.0])
def test_attention_over_independent_tokens_has_this_entropy(deviation):
    draws = np.random.default_rng(0)
    shared = 0.8 * draws.normal(size=96)
    tokens = draws.normal(size=(40, 64, 96)) + shared
    tokens *= math.sqrt(96) / np.linalg.norm(tokens, axis=-1, keepdims=True)
    layer = AttentionLayer(0.0, deviation, 0.0, norm=True, causal=False)
    variances = logit_variances(token_kernel(torch.from_numpy(tokens)), layer)
    expected = float(mean_entropy(variances.mean()[None], 64)) / math.log(64)
    assert attention_entropy(tokens, deviation, draws) == pytest.approx(expected, abs=0.02)


def test_a_walk_has_another_law():
    """Its logits are a path: neighbours share the mass, and the entropy is far above that of independent logits."""
    draws = np.random.default_rng(1)
    tokens = draws.normal(size=(40, 64, 96)).cumsum(1)
    layer = AttentionLayer(0.0, 0.5, 0.0, causal=False)
    variances = logit_variances(walk_kernel(64), layer)[32:]
    independent = float(mean_entropy(variances.mean()[None], 64)) / math.log(64)
    assert attention_entropy(tokens, 0.5, draws) > independent + 0.1


def test_variances_are_those_of_drawn_logits():
    draws = torch.Generator().manual_seed(4)
    tokens = torch.randn(7, 5, generator=draws, dtype=torch.float64)
    kernel, length = token_kernel(tokens), 7
    root = torch.linalg.cholesky(kernel + 1e-12 * torch.eye(length))
    noise = torch.randn(40_000, length, length, generator=draws, dtype=torch.float64)
    logits = 0.7 * kernel + 0.4 * root @ noise @ root.T
    expected = torch.stack([logits[:, t, : t + 1].var(-1, correction=0).mean() for t in range(length)])
    found = logit_variances(kernel, AttentionLayer(0.7, 0.4, 0.0))
    assert found.tolist() == pytest.approx(expected.tolist(), rel=0.04, abs=1e-6)


def test_words_that_the_true_softmax_keeps():
    """As docs/theory.md says of the kept rows: early and late survive, middle does not."""
    rows = [row["point"] | row["result"] for row in json.loads(ROWS.read_text(encoding="utf-8"))["rows"]]
    words = Counter((row["regime"], row["softmax_regime"]) for row in rows)
    kept = {word: (words[word, word], sum(n for (said, _), n in words.items() if said == word)) for word, _ in words}
    assert kept["early"] == (23, 23)
    assert kept["late"] == (24, 24)
    assert kept["middle"] == (1, 18)


@pytest.mark.parametrize(
    "ask",
    [
        lambda: border(1),
        lambda: law(-1.0, 8),
        lambda: law(math.nan, 8),
        lambda: collapse_variance(8, 1.0),
        lambda: law(2 * random_energy.LARGEST, 8),
    ],
)
def test_what_has_no_answer_is_refused(ask):
    with pytest.raises(Refusal):
        ask()
