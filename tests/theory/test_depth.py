"""The recursion on kernels against layers that are simulated with numpy, weights and tokens as wide as a model's."""

import math
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch

from locater.errors import Refusal
from locater.spectra import moments
from locater.theory import depth
from locater.theory.depth import AttentionLayer, layer_of_moments, propagate, walk_kernel

WIDTH, LENGTH, TEXTS = 96, 40, 2
ENTROPY_COLLAPSE, RANK_COLLAPSE = 0.25, 0.15


def weights(trace, deviation, symmetry, draws):
    """λ = √d times eigenvalues that are no Gaussian's: uniform in a random basis; without symmetry a plain matrix."""
    if symmetry:
        values = draws.uniform(-1, 1, WIDTH)
        values = (values - values.mean()) / values.std()
        basis = np.linalg.qr(draws.normal(size=(WIDTH, WIDTH)))[0]
        noise = basis @ np.diag(values / math.sqrt(WIDTH)) @ basis.T
    else:
        noise = draws.choice([-1.0, 1.0], size=(WIDTH, WIDTH)) / WIDTH
    return math.sqrt(WIDTH) * (trace / WIDTH * np.eye(WIDTH) + deviation * noise)


def attended(x, read, matrix, sink):
    """One text, query by query: its entropies, and what attention passes on."""
    entropies, passed = [], np.zeros_like(x)
    for t in range(len(x)):
        logits = read[: t + 1] @ matrix @ read[t] / math.sqrt(WIDTH)
        logits[0] += sink
        p = np.exp(logits - logits.max())
        p /= p.sum()
        passed[t] = p @ read[: t + 1]
        if t:
            entropies.append(-(p[p > 0] * np.log(p[p > 0])).sum() / math.log(t + 1))
    return np.mean(entropies), passed


def spread(x):
    return np.linalg.norm(x - x.mean(0)) / np.linalg.norm(x)


def simulated(texts, layers, draws):
    """Mean entropy over layers, and the residual at the end over that of the start, of texts that share weights."""
    starts, ends, entropies = [spread(x) for x in texts], [], []
    matrices = [weights(layer.trace, layer.deviation, layer.symmetry, draws) for layer in layers]
    for x in texts:
        for layer, matrix in zip(layers, matrices, strict=True):
            read = (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True) if layer.norm else x
            entropy, passed = attended(x, read, matrix, layer.sink)
            entropies.append(entropy)
            x = x + passed if layer.norm else passed
        ends.append(spread(x))
    return np.mean(entropies), np.mean(ends) / np.mean(starts)


@cache
def text_of(seed):
    """Words that return, a vector each, with a position added, as wide as a model and normed."""
    draws = np.random.default_rng(seed)
    words = draws.zipf(1.5, size=LENGTH).clip(max=50)
    waves = np.sin(np.arange(LENGTH)[:, None] / 100 ** (np.arange(WIDTH) / WIDTH) + np.arange(WIDTH))
    x = draws.normal(size=(51, WIDTH))[words] + waves
    return (x - x.mean(1, keepdims=True)) / x.std(1, keepdims=True)


def tokens(kind, draws):
    if kind == "walk":
        return draws.normal(size=(LENGTH, WIDTH)).cumsum(0)
    return text_of(int(draws.integers(1000)))


def kernel_of(kind):
    """Walks by their limit; texts by other draws than those that are simulated."""
    if kind == "walk":
        return walk_kernel(LENGTH)
    return depth.token_kernel(torch.from_numpy(np.stack([text_of(2000 + seed) for seed in range(8)])))


def errors(points, *, num_simulated, num_draws):
    """(|entropy error|, |residual error|, whether both say collapse or not) of each (tokens, layers)."""
    found = []
    for kind, layers in points:
        draws = np.random.default_rng(len(found))
        several = [simulated([tokens(kind, draws) for _ in range(TEXTS)], layers, draws) for _ in range(num_simulated)]
        truth = np.mean(several, axis=0)
        kernel = kernel_of(kind)
        each = math.ceil(num_draws / (1 if kernel.dim() == 2 else len(kernel)))
        theory = propagate(kernel, layers, num_draws=each, generator=torch.Generator().manual_seed(len(found)))
        said = float(theory.entropy.mean.mean()), float(theory.residual.mean[-1])
        found.append((*np.abs(np.subtract(said, truth)), is_collapsed(*said) == is_collapsed(*truth)))
    return np.array(found, dtype=float)


def is_collapsed(entropy, residual):
    return entropy < ENTROPY_COLLAPSE or residual < RANK_COLLAPSE


@pytest.mark.parametrize("norm", [True, False])
def test_agrees_with_simulated_layers(norm):
    layers = [AttentionLayer(*point, norm=norm) for point in ((0.5, 0.1), (0.0, 1.0, 0.0))]
    found = errors([("walk", [layer] * count) for layer in layers for count in (1, 3)], num_simulated=24, num_draws=96)
    assert found[:, 0].max() < (0.01 if norm else 0.04)
    assert found[:, 1].max() < (0.01 if norm else 0.15)


@pytest.mark.slow
def test_agrees_over_a_grid_with_norms():
    points = [
        (kind, [AttentionLayer(trace, deviation, symmetry, norm=True, sink=sink)] * count)
        for (kind, sink), count, trace, (deviation, symmetry) in product(
            (("walk", 0.0), ("text", 0.0), ("text", 4.0)),
            (1, 2, 4, 8),
            (-1.0, 0.0, 2.0),
            ((0.1, 1.0), (1.0, 0.0), (3.0, 1.0)),
        )
    ]
    assert len(points) >= 96
    found = errors(points, num_simulated=8, num_draws=32)
    entropy, residual, same = found.mean(0)
    assert entropy <= 0.015
    assert residual <= 0.015
    assert same >= 0.98


@pytest.mark.slow
def test_agrees_over_a_grid_in_attention_alone():
    """The residual of a layer differs by 0.3 from draw to draw where δ ≥ 1, so both sides need many of them."""
    points = [
        (kind, [AttentionLayer(trace, deviation, symmetry)] * count)
        for kind, count, trace, (deviation, symmetry) in product(
            ("walk", "text"), (1, 2, 4, 8), (-0.5, 0.0, 0.5, 2.0), ((0.03, 1.0), (0.3, 0.0), (1.0, 1.0), (3.0, 1.0))
        )
    ]
    assert len(points) >= 96
    found = errors(points, num_simulated=32, num_draws=256)
    entropy, residual, same = found.mean(0)
    assert entropy <= 0.035
    assert residual <= 0.065
    assert same >= 0.90


def by_kernels(kernel, layers, *, num_draws, seed):
    """The recursion as its formula has it, on K and with a decomposition in every layer."""
    draws, entropies = np.random.default_rng(seed), []
    kernels = np.repeat(kernel.numpy()[None], num_draws, axis=0)
    hidden = np.triu(np.ones_like(kernels[0], dtype=bool), 1)
    for layer in layers:
        lengths = np.sqrt(np.einsum("bii->bi", kernels))
        read = kernels / lengths[:, :, None] / lengths[:, None, :] if layer.norm else kernels
        values, vectors = np.linalg.eigh(read)
        root = vectors * np.sqrt(values.clip(0))[:, None, :]
        normal = draws.normal(size=kernels.shape)
        noise = (normal + normal.swapaxes(1, 2)) / math.sqrt(2) if layer.symmetry else normal
        logits = layer.trace * read + layer.deviation * root @ noise @ root.swapaxes(1, 2)
        logits[..., 0] += layer.sink
        p = torch.from_numpy(np.where(hidden, -np.inf, logits)).softmax(-1).numpy()
        entropies.append(-np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0).sum(-1))
        mixed = p @ read @ p.swapaxes(1, 2)
        crossed = p @ (kernels / lengths[:, :, None])
        kernels = kernels + crossed + crossed.swapaxes(1, 2) + mixed if layer.norm else mixed
    counts = np.log(np.arange(2, kernels.shape[1] + 1))
    return np.mean([(entropy[:, 1:] / counts).mean() for entropy in entropies]), kernels


@pytest.mark.parametrize("symmetry", [0.0, 1.0])
@pytest.mark.parametrize("norm", [True, False])
def test_factors_have_the_law_of_the_kernels(norm, symmetry):
    layers = [AttentionLayer(0.4, 0.3, symmetry, norm=norm, sink=1.0), AttentionLayer(-0.2, 0.5, symmetry, norm=norm)]
    kernel = walk_kernel(12)
    entropy, kernels = by_kernels(kernel, layers, num_draws=4000, seed=1)
    residuals = depth.rank_residual(torch.from_numpy(kernels)).numpy() / float(depth.rank_residual(kernel))
    theory = propagate(kernel, layers, num_draws=4000, generator=torch.Generator().manual_seed(2))
    error = math.hypot(float(theory.residual.standard_error[-1]), residuals.std() / math.sqrt(len(residuals)))
    assert float(theory.entropy.mean.mean()) == pytest.approx(entropy, abs=0.01)
    assert float(theory.residual.mean[-1]) == pytest.approx(residuals.mean(), abs=4 * error)


def test_no_weights_average_all_that_came_before():
    """W = 0: P_ts = 1/t in every layer, so nothing is random; every layer has full entropy."""
    theory = propagate(walk_kernel(9), [AttentionLayer(0.0, 0.0)] * 3, num_draws=2, generator=torch.Generator())
    mean = torch.ones(9, 9, dtype=torch.float64).tril() / torch.arange(1, 10)[:, None]
    kernel, expected = walk_kernel(9), []
    for _ in range(3):
        kernel = mean @ kernel @ mean.T
        expected.append(float(depth.rank_residual(kernel) / depth.rank_residual(walk_kernel(9))))
    assert theory.entropy.mean.tolist() == pytest.approx([1, 1, 1])
    assert theory.residual.mean.tolist() == pytest.approx(expected)
    assert theory.residual.standard_error.tolist() == pytest.approx([0, 0, 0], abs=1e-9)


def test_a_strong_sink_makes_all_tokens_alike():
    layers = [AttentionLayer(0.0, 0.1, sink=50.0)]
    theory = propagate(walk_kernel(9), layers, num_draws=2, generator=torch.Generator())
    assert float(theory.entropy.mean) == pytest.approx(0, abs=1e-9)
    assert float(theory.residual.mean) == pytest.approx(0, abs=1e-6)


def test_attention_to_both_sides_sees_all_keys():
    layer = AttentionLayer(0.0, 0.0, causal=False)
    theory = propagate(walk_kernel(9), [layer], num_draws=1, generator=torch.Generator())
    assert float(theory.entropy.mean) == pytest.approx(1)
    assert float(theory.residual.mean) == pytest.approx(0, abs=1e-7)


def test_a_layer_of_moments_has_the_numbers_of_its_matrix():
    draws = torch.Generator().manual_seed(3)
    query, key = torch.randn(2, 5, 9, generator=draws, dtype=torch.float64)
    w = key.T @ query
    rest = w - torch.trace(w) / 9 * torch.eye(9, dtype=torch.float64)
    layer = layer_of_moments(moments(query, key), norm=True, sink=2.0)
    scale = math.sqrt(5)
    assert layer.trace == pytest.approx(float(torch.trace(w)) / scale)
    assert layer.deviation == pytest.approx(float(rest.norm()) / scale)
    assert layer.symmetry == pytest.approx(float(torch.trace(rest @ rest) / rest.norm() ** 2))
    assert (layer.norm, layer.sink) == (True, 2.0)


def test_entries_of_the_noise_have_the_said_symmetry():
    noise = depth._gaussian(torch.zeros(40_000, 3, 2, dtype=torch.float64), -0.6, torch.Generator().manual_seed(0))
    assert float(noise[:, 0, 1].square().mean()) == pytest.approx(1, abs=0.03)
    assert float((noise[:, 0, 1] * noise[:, 1, 0]).mean()) == pytest.approx(-0.6, abs=0.03)
    assert float(noise[:, 0, 0].square().mean()) == pytest.approx(0.4, abs=0.02)


@pytest.mark.parametrize(
    ("kernel", "layers", "words"),
    [
        (torch.ones(3, 3), [AttentionLayer(0.0, 1.0)], "all alike"),
        (torch.eye(1), [AttentionLayer(0.0, 1.0)], "two tokens"),
        (torch.eye(3), [], "one layer"),
        (torch.eye(3), [AttentionLayer(0.0, -1.0)], "deviation of at least 0"),
        (torch.eye(3), [AttentionLayer(0.0, 1.0, 1.5)], "symmetry from"),
        (torch.eye(3), [AttentionLayer(math.inf, 1.0)], "finite trace"),
        (-torch.eye(3), [AttentionLayer(0.0, 1.0)], "negative eigenvalues"),
        (torch.full((3, 3), math.nan), [AttentionLayer(0.0, 1.0)], "finite kernel"),
    ],
)
def test_what_has_no_answer_is_refused(kernel, layers, words):
    with pytest.raises(Refusal, match=words):
        propagate(kernel, layers, num_draws=1, generator=torch.Generator())
