"""How fast the theory is, against its stated bounds: `python bench/theory.py`; exits 1 if one of them is missed.

The Monte Carlo is the plain simulation of the walk, vectorised, in float32 and in the span of the weights. All on one
core: with several, the many small operations of one side wait for whatever else the machine does.
"""

import sys
import time
from collections.abc import Callable

import torch

from locater import spectra
from locater.theory import closed_form, exact, monte_carlo
from locater.theory.random_walk import Turns

LENGTH, D_HEAD, D_MODEL, NUM_WALKS = 1024, 64, 512, 20_000


def seconds(*functions: Callable[[], object], repeats: int = 5) -> list[float]:
    """The best of several runs of each, taken in turn so that all meet the same weather, after a warm-up."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, taken in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            taken.append(time.perf_counter() - start)
    return [min(taken[1:]) for taken in times]


def verdict(name: str, value: float, bound: float, *, at_least: bool = False) -> bool:
    passed = value >= bound if at_least else value <= bound
    print(f"{'PASS' if passed else 'FAIL'}  {name}: {value:.3g} ({'at least' if at_least else 'at most'} {bound:g})")
    return passed


def random_heads(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5 for _ in range(2))
    return query, key


def exact_against_monte_carlo() -> bool:
    query, key = random_heads(D_HEAD, D_MODEL)
    (quick,) = seconds(lambda: exact.profile(query, key, length=LENGTH))
    start = time.perf_counter()
    generator = torch.Generator().manual_seed(1)
    simulated = monte_carlo.profile(query, key, length=LENGTH, num_walks=NUM_WALKS, generator=generator)
    slow = time.perf_counter() - start
    error = (exact.profile(query, key, length=LENGTH) - simulated.mean).abs()
    away = float((error / (simulated.standard_error + 0.5 / NUM_WALKS)).max())
    print(f"exact {quick:.3f} s, {NUM_WALKS} walks {slow:.1f} s, at most {away:.1f} standard errors apart")
    return verdict("exact, times as fast as Monte Carlo", slow / quick, 10, at_least=True)


def exact_against_every_position(lift: float) -> bool:
    """The interpolant's error; the larger the mean of the spectrum, the sharper the profile."""
    query, key = random_heads(D_HEAD, D_MODEL)
    key = key + lift * query
    found, every = (exact.profile(query, key, length=LENGTH, tolerance=tolerance) for tolerance in (1e-6, 0.0))
    return verdict(f"exact, absolute error at a lift of {lift:g}", float((found - every).abs().max()), 1e-4)


def moments_against_products() -> bool:
    query, key = random_heads(32, 128, 4096)

    def products() -> None:
        for left, right in ((key, query), (query, query), (key, key)):
            torch.bmm(left, right.mT)

    bare, whole = seconds(products, lambda: spectra.moments(query, key), repeats=9)
    print(f"moments of 32 heads: {whole:.3f} s, their three products {bare:.3f} s")
    return verdict("moments, times the bare products", whole / bare, 1.5)


def rotary_against_products() -> bool:
    """The profiles of a scan: 64 positions of the context, all heads of a layer or more."""
    query, key = random_heads(128, 128, 4096)
    settings = {
        "length": LENGTH,
        "turns": Turns(torch.arange(128).reshape(2, 64).mT, 10_000.0 ** (-torch.arange(64) / 64)),
        "positions": torch.linspace(1, LENGTH, 64).long(),
    }
    bare, whole = seconds(lambda: spectra.grams(query, key), lambda: closed_form.rotary_profile(query, key, **settings))
    print(f"rotary profiles of 128 heads at 64 positions: {whole:.3f} s, their three products {bare:.3f} s")
    return verdict("rotary profiles, times the bare products", whole / bare, 2)


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = [
        moments_against_products(),
        rotary_against_products(),
        *(exact_against_every_position(lift) for lift in (0.0, 1.0, 30.0)),
        exact_against_monte_carlo(),
    ]
    sys.exit(0 if all(results) else 1)
