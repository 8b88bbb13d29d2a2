"""How cost grows with heads, width, length and file: `python bench/growth.py` prints fitted exponents beside theory's.

Processor time on one thread; all sizes in turn, round by round; the exponent is the slope of log median over log size,
with its standard error. Small sizes pay fixed costs, so that a fitted exponent lies below the theoretical one.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from peers import models

from locater import spectra
from locater.attention import Mask, Scores, stream
from locater.scanning.scan import scan
from locater.stabilisers.penalty import penalty
from locater.theory import exact, monte_carlo

Job = Callable[[], object]


@dataclass(frozen=True)
class Subject:
    """`make` gives the job of a size; `theory` is the exponent that counting operations gives."""

    name: str
    grows_with: str
    sizes: tuple[int, ...]
    theory: str
    make: Callable[[int], Job]


def head(d_head: int, width: int, *batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(*batch, d_head, width, generator=generator) / width**0.5 for _ in range(2))
    return query, key


def scanned(root: Path, **changed: int) -> Job:
    """A scan of queries and keys of Llama's shape, from its file, eigenvalues included."""
    config = models.SEVEN_BILLION | dict(num_hidden_layers=2, hidden_size=512, num_attention_heads=8) | changed
    config |= dict(num_key_value_heads=config["num_attention_heads"])
    folder = root / "-".join(f"{name}{size}" for name, size in changed.items())
    layers = (models.llama_layer(config, layer) for layer in range(config["num_hidden_layers"]))
    models.write(folder, config, [models.merged(layers)])
    return lambda: scan(folder, details=["eigenvalues"])


def watched(length: int) -> Job:
    queries, keys = (torch.randn(1, 4, length, 64, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    return lambda: stream(queries, keys, mask=Mask(lookahead=0), scores=Scores(1 / 8))


def walked(length: int) -> Job:
    generator = torch.Generator().manual_seed(1)
    return partial(monte_carlo.profile, *head(64, 128), length=length, num_walks=500, generator=generator)


def subjects(root: Path) -> list[Subject]:
    return [
        Subject(
            "scan of a file", "layers (bytes of the file)", (4, 8, 16, 32), "1",
            lambda n: scanned(root, num_hidden_layers=n),
        ),
        Subject(
            "scan of a file", "heads of 64 in a layer, width with them", (8, 16, 32, 64), "2: heads × width",
            lambda n: scanned(root, num_attention_heads=n, hidden_size=64 * n),
        ),
        Subject(
            "moments of 8 heads of 64", "width", (512, 1024, 2048, 4096), "1",
            lambda n: partial(spectra.moments, *head(64, n, 8)),
        ),
        Subject(
            "eigenvalues of a core", "d_head", (32, 64, 128, 256), "3",
            lambda n: partial(torch.linalg.eigvals, head(n, n)[0]),
        ),
        Subject(
            "LocAteR's penalty of 8 heads of 64", "width", (512, 1024, 2048, 4096), "1",
            lambda n: partial(penalty, *head(64, n, 8)),
        ),
        Subject("an observation of the monitor, 4 heads of 64", "length", (1024, 2048, 4096, 8192), "2", watched),
        Subject(
            "exact theory of a head of 64", "length", (128, 512, 2048, 8192), "below 1: interpolated",
            lambda n: partial(exact.profile, *head(64, 256), length=n),
        ),
        Subject("500 simulated walks of a head of 64", "length", (128, 256, 512, 1024), "1", walked),
    ]  # fmt: skip


def seconds(job: Job) -> float:
    start = time.process_time()
    job()
    return time.process_time() - start


def slope(sizes: list[int], times: list[float]) -> tuple[float, float]:
    """Of the least-squares line through the logarithms, and its standard error."""
    x, y = ([math.log(value) for value in values] for values in (sizes, times))
    (a, b), n = statistics.linear_regression(x, y), len(x)
    residual = sum((v - a * u - b) ** 2 for u, v in zip(x, y, strict=True))
    return a, math.sqrt(residual / (n - 2) / sum((u - statistics.fmean(x)) ** 2 for u in x))


def measure(subject: Subject, *, rounds: int, most: int) -> str:
    jobs = {size: subject.make(size) for size in subject.sizes[:most]}
    taken: dict[int, list[float]] = {size: [] for size in jobs}
    for number in range(rounds + 1):
        for size in list(jobs) if number % 2 else list(jobs)[::-1]:
            spent = seconds(jobs[size])
            if number:  # the first round warms up
                taken[size].append(spent)
    medians = {size: statistics.median(times) for size, times in taken.items()}
    found, error = slope(list(medians), list(medians.values()))
    worst = max((max(times) - min(times)) / medians[size] for size, times in taken.items())
    costs = ", ".join(f"{size}: {1000 * median:.3g}" for size, median in medians.items())
    return (
        f"| {subject.name} | {subject.grows_with} | {costs} | {worst:.0%} | {found:.2f} ± {error:.2f} | "
        f"{subject.theory} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="the three smallest sizes, one round")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    print("| what | grows with | size: milliseconds (median) | widest spread | fitted exponent | theory |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as root, torch.no_grad():
        for subject in subjects(Path(root)):
            print(
                measure(subject, rounds=1 if chosen.quick else chosen.rounds, most=3 if chosen.quick else 9), flush=True
            )


if __name__ == "__main__":
    main()
