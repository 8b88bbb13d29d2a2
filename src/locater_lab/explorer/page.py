"""The theory as a toy, in one page: the closed form is computed there, the exact one is read off a grid made here."""

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from locater.quantities import GLOSSARY, REGIME_WORDS
from locater.records import Json, write
from locater.report.page import PAPER, Pack, assemble, asset, definitions
from locater.report.views import Document, View, all_shown, views_of

LENGTH, NUM_DRAWS = 32, 8
# What can be chosen: the layer that is shown, and whether layers have a residual stream and norms.
CHOICES = {"2 layers": (2, False), "4 layers": (4, False), "8 layers": (8, False), "8 layers with norms": (8, True)}


def depth_planes(traces: Sequence[float], deviations: Sequence[float]) -> list[Json]:
    """Entropy in the last layer and rank residual behind it, at most 1, at every point of the plane. Some seconds."""
    found = {norm: [[_layers(x, y, norm) for x in traces] for y in deviations] for norm in (False, True)}
    planes = []
    for title, (last, norm) in CHOICES.items():
        plane: Json = {"title": title, "length": LENGTH}
        for name in ("entropy", "residual"):
            plane[name] = [[point[name][last - 1] for point in row] for row in found[norm]]
        planes.append(plane)
    return planes


def _layers(trace: float, deviation: float, norm: bool) -> dict[str, list[float]]:
    """Both numbers layer by layer, with the same draws at every point: what differs is the plane."""
    import torch

    from locater.theory.depth import AttentionLayer, propagate, walk_kernel

    deepest = max(layers for layers, _ in CHOICES.values())
    layers = [AttentionLayer(trace, deviation, norm=norm)] * deepest
    generator = torch.Generator().manual_seed(0)
    passed = propagate(walk_kernel(LENGTH), layers, num_draws=NUM_DRAWS, generator=generator)
    numbers = {"entropy": passed.entropy.mean, "residual": passed.residual.mean}
    return {name: [round(value, 4) for value in values.clamp(0, 1).tolist()] for name, values in numbers.items()}


SHARED = ("data", "elements", "palette", "theory", "chart", "save")  # with the page of results
SCRIPTS = ("toy", "plane", "story", "explore")
TITLE = "Where does attention look? The theory, to play with"
# The grid of the exact ρ: bent along the mean as the page bends its axis, by factors along the spread.
BEND = 0.03
LENGTHS = (64, 256)
WIDTH = 8  # d: small enough to show where the closed form errs
NUM_POSITIONS = 25
NUM_CHECKS = 60
MOST_HEADS = 4096


def save_explorer(path: Path, phase: Document, scan: Document | None = None, **options: Any) -> None:
    text = explorer(phase, scan, **options)
    write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def explorer(phase: Document, scan: Document | None = None, *, facts: dict[str, str] | None = None) -> str:
    """The page's text: `phase` is the simulated plane (locater.phase-diagram/1), `scan` gives heads to look up."""
    from locater.theory import regimes

    pack = Pack()
    limits = {"no_signal": regimes.NO_SIGNAL, "flat": regimes.FLAT, "low": regimes.LOW, "end": regimes.END}
    data = {
        "regimes": [{"name": name, **word._asdict()} for name, word in REGIME_WORDS.items()],
        "limits": limits,
        "plane": {
            "x": phase["trace_over_temperature"],
            "y": phase["deviation_over_temperature"],
            "entropy": phase["normalised_entropy"],
            "residual": phase["rank_residual"],
            "length": phase["length"],
            "deeper": depth_planes(phase["trace_over_temperature"], phase["deviation_over_temperature"]),
        },
        "grid": exact_grid(pack),
        "heads": [] if scan is None else _heads(views_of([all_shown(scan)])[0]),
    }
    parts = {
        "title": html.escape(TITLE),
        "made": definitions(all_shown(facts or {})),
        "glossary": definitions(GLOSSARY),
        "paper": PAPER,
        "data": pack.text(data),
    }
    here = __package__ or ""
    scripts = [asset(f"{name}.js") for name in SHARED] + [asset(f"{name}.js", here) for name in SCRIPTS]
    return assemble(asset("explore.html", here), scripts, parts)


def _heads(view: View) -> list[list[str | float]]:
    """Name, tr W/λ, spread √(η² − (tr W)²/d)/λ, symmetry and d of every head: what sets the sliders to it."""
    found = []
    for record in view.records[:MOST_HEADS]:
        scale, width = record["temperature"], record["d_model"]
        rest = max(record["eta"] ** 2 - record["trace"] ** 2 / width, 0) / scale**2
        title = f"{record['block']} {record['layer']}.{record['head']}"
        found.append([title, record["trace"] / scale, max(math.sqrt(rest), 1e-6), record["symmetry"], width])
    return found


def edges() -> tuple[list[float], list[float]]:
    """The grid's means, as tr W/λ, and spreads, as √d·σ/λ."""
    half = math.asinh(6 / BEND)
    traces = [BEND * math.sinh(step / 22 * half) for step in range(-22, 23)]
    return traces, [0.003 * 2000 ** (step / 22) for step in range(23)]


def exact_grid(pack: Pack) -> Document:
    """The exact ρ at every point of the grid and every length, in 16 bits, and its worst error at points between."""
    traces, deviations = edges()
    values = numpy.array([_plane(traces, deviations, length) for length in LENGTHS])
    return {
        "lengths": list(LENGTHS),
        "traces": traces,
        "deviations": deviations,
        "positions": NUM_POSITIONS,
        "bend": BEND,
        "width": WIDTH,
        "values": pack.add(numpy.rint(values * 65535), "u2"),
        "error": _worst(values, traces, deviations),
    }


def _plane(traces: list[float], deviations: list[float], length: int) -> numpy.ndarray:
    """ρ as (deviations, traces, positions). Only means from 0 on are computed: ρ_t of −W is ρ_{T+1−t} of W."""
    middle = len(traces) // 2
    points = [(trace, deviation) for deviation in deviations for trace in traces[middle:]]
    found = exact_profiles(points, length).reshape(len(deviations), middle + 1, NUM_POSITIONS)
    return numpy.concatenate([found[:, :0:-1, ::-1], found], axis=1)


def exact_profiles(points: Sequence[tuple[float, float]], length: int) -> numpy.ndarray:
    """The exact ρ of symmetric heads of width WIDTH, λ = 1, whose eigenvalues are evenly normal around their mean.

    A direction of eigenvalue w adds w (Σc ± √(T‖c‖²))/2 to the eigenvalues of the logit's quadratic form.
    """
    import torch

    from locater.theory.exact import upper_tail
    from locater.theory.random_walk import walk_weights

    positions = torch.linspace(1, length, NUM_POSITIONS, dtype=torch.float64)  # real t: the law is analytic there
    total, squares = walk_weights(positions, length)
    factors = torch.stack([total + squares.sqrt(), total - squares.sqrt()], dim=-1) / 2
    values = torch.tensor([_eigenvalues(*point) for point in points], dtype=torch.float64)
    forms = (values[:, None, :, None] * factors[None, :, None, :]).flatten(2).flatten(0, 1).sort(-1).values
    rho = 1 - upper_tail(-forms.flip(-1), 1.0) - upper_tail(forms, length - 1.0)
    return rho.clamp(0, 1).reshape(len(points), NUM_POSITIONS).numpy()


def _eigenvalues(trace: float, deviation: float) -> list[float]:
    """WIDTH of them: mean tr W/d, and evenly filled normal values of standard deviation deviation/√d around it."""
    from scipy.special import ndtri

    shape = ndtri((numpy.arange(WIDTH) + 0.5) / WIDTH)
    shape /= math.sqrt((shape**2).mean())
    return (trace / WIDTH + deviation / math.sqrt(WIDTH) * shape).tolist()


def _worst(values: numpy.ndarray, traces: list[float], deviations: list[float]) -> float:
    """The largest difference between the grid, read linearly, and the truth, at points drawn once and for all."""
    draws = numpy.random.default_rng(0)
    bent = [[math.asinh(trace / BEND) for trace in traces], [math.log(deviation) for deviation in deviations]]
    worst = 0.0
    for number, length in enumerate(LENGTHS):
        at = [[draws.uniform(ends[0], ends[-1]) for ends in bent] for _ in range(NUM_CHECKS)]
        truth = exact_profiles([(BEND * math.sinh(x), math.exp(y)) for x, y in at], length)
        read = numpy.array([_between(values[number], bent, point) for point in at])
        worst = max(worst, float(numpy.abs(read - truth).max()))
    return worst


def _between(values: numpy.ndarray, bent: list[list[float]], at: list[float]) -> numpy.ndarray:
    (column, x), (row, y) = ((_place(ends, value)) for ends, value in zip(bent, at, strict=True))
    corner = values[row : row + 2, column : column + 2]
    across = corner[:, 0] * (1 - x) + corner[:, 1] * x
    return across[0] * (1 - y) + across[1] * y


def _place(ends: list[float], value: float) -> tuple[int, float]:
    below = min(max(int(numpy.searchsorted(ends, value, side="right")) - 1, 0), len(ends) - 2)
    return below, (value - ends[below]) / (ends[below + 1] - ends[below])
