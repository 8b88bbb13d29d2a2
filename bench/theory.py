"""How fast the theory is, against its stated bounds: `python bench/theory.py`; exits 1 if one of them is missed.

The Monte Carlo is the plain simulation of the walk, vectorised, in float32 and in the span of the weights.
"""

import sys
import time
from collections.abc import Callable

import torch

from locater import spectra
from locater.theory import exact, monte_carlo, rotary

LENGTH, D_HEAD, D_MODEL, NUM_WALKS = 1024, 64, 512, 20_000


def seconds(function: Callable[[], object], repeats: int) -> float:
    """The best of several runs, after one that warms up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def verdict(name: str, value: float, bound: float, *, at_least: bool = False) -> bool:
    passed = value >= bound if at_least else value <= bound
    print(f"{'PASS' if passed else 'FAIL'}  {name}: {value:.3g} ({'at least' if at_least else 'at most'} {bound:g})")
    return passed


def random_heads(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5 for _ in range(2))
    return query, key


def exact_against_monte_carlo(lift: float) -> bool:
    """One asymmetric head, without a mean (lift 0) or with one, whose profile is then sharp."""
    query, key = random_heads(D_HEAD, D_MODEL)
    key = key + lift * query
    quick = seconds(lambda: exact.profile(query, key, length=LENGTH), 3)
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(1)
    simulated = monte_carlo.profile(query, key, length=LENGTH, num_walks=NUM_WALKS, generator=generator)
    slow = time.perf_counter() - start
    found = exact.profile(query, key, length=LENGTH)
    error = (found - exact.profile(query, key, length=LENGTH, tolerance=0.0)).abs().max()
    away = ((found - simulated.mean).abs() / (simulated.standard_error + 0.5 / NUM_WALKS)).max()
    print(
        f"lift {lift:g}: exact {quick:.3f} s, {NUM_WALKS} walks {slow:.1f} s, at most {away:.1f} standard errors apart"
    )
    fast = verdict("exact, times as fast as Monte Carlo", slow / quick, 10, at_least=True)
    return verdict("exact, absolute error against every t", float(error), 1e-4) and fast


def moments_against_products() -> bool:
    query, key = random_heads(32, 128, 4096)

    def products() -> None:
        for left, right in ((key, query), (query, query), (key, key)):
            torch.bmm(left, right.mT)

    bare, whole = seconds(products, 7), seconds(lambda: spectra.moments(query, key), 7)
    print(f"moments of 32 heads: {whole:.3f} s, their three products {bare:.3f} s")
    return verdict("moments, times the bare products", whole / bare, 1.5)


def rotary_scan() -> bool:
    query, key = random_heads(1000, 128, 256)
    pairs = torch.arange(128).reshape(2, 64).mT
    frequencies = 10_000.0 ** (-torch.arange(64) / 64)
    positions = torch.linspace(1, LENGTH, 64).long()
    settings = {"length": LENGTH, "frequencies": frequencies, "pairs": pairs, "positions": positions}
    return verdict(
        "rotary profiles of 1,000 heads at 64 positions, seconds",
        seconds(lambda: rotary.profile(query, key, **settings), 1),
        10,
    )


if __name__ == "__main__":
    results = [moments_against_products(), rotary_scan(), *(exact_against_monte_carlo(lift) for lift in (0.0, 1.0))]
    sys.exit(0 if all(results) else 1)
