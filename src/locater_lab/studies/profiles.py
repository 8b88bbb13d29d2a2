"""The paper's curves: ρ(θ) over mean and scale, by the closed form and, where a matrix of that mean exists, exactly."""

import math
from collections import Counter
from pathlib import Path

import torch

from locater.records import Json
from locater.spectra import Moments
from locater.theory import closed_form, exact, regimes

from .statistics import together
from .study import Answer, Figure, Study
from .sweep.folder import Point
from .synthetic import of_xi_and_eta

XI, ETA = (-5.0, 0.1, 1.0, 5.0, 20.0, 50.0), (0.001, 2.5, 5.0, 10.0, 25.0, 50.0)
D_MODEL = 64  # so that λ = 8
# ρ of the closed form may be this far from the exact one before it is called wrong.
CLOSE = 0.05


def grid(quick: bool) -> list[Point]:
    return [{"xi": xi, "eta": eta, "length": 32 if quick else 128} for xi in XI for eta in ETA]


def measure(point: Point, place: Path) -> list[Json]:
    """ρ at some positions; exact needs a d×d matrix with ξ² ≤ d."""
    xi, eta, length = point["xi"], point["eta"], point["length"]
    trace, square = (torch.tensor(value, dtype=torch.float64) for value in (xi * eta, eta**2))
    moments = Moments(trace, square, square, d_model=D_MODEL, d_head=D_MODEL)
    found = {"closed": closed_form.from_moments(moments, length=length, temperature=math.sqrt(D_MODEL))}
    if xi**2 <= D_MODEL:
        spectrum = of_xi_and_eta(xi, eta / math.sqrt(D_MODEL), d_model=D_MODEL)
        matrix = spectrum.matrix(D_MODEL, torch.Generator().manual_seed(0))
        found["exact"] = exact.profile(matrix, torch.eye(D_MODEL, dtype=torch.float64), length=length)
    shown = range(0, length, max(1, length // 16))
    return [
        {
            "method": name,
            "theta": (t + 1) / length,
            "rho": float(profile[t]),
            "regime": regimes.classify(profile),
            "localisation": float(regimes.localisation(profile)),
        }
        for name, profile in found.items()
        for t in shown
    ]


def conclude(rows: list[Json]) -> Answer:
    curves: dict[tuple[float, float, str], list[Json]] = {}
    for row in rows:
        curves.setdefault((row["xi"], row["eta"], row["method"]), []).append(row)
    words = Counter(curve[0]["regime"] for (_, _, method), curve in curves.items() if method == "closed")
    gaps = {
        (xi, eta): max(abs(a["rho"] - b["rho"]) for a, b in zip(curve, curves[xi, eta, "exact"], strict=True))
        for (xi, eta, method), curve in curves.items()
        if method == "closed" and (xi, eta, "exact") in curves
    }
    counted = together([f"{n} {word}" for word, n in words.most_common()])
    first = f"In the theory's words, of the paper's {sum(words.values())} curves: {counted}."
    if not gaps:
        return Answer(
            first, f"None of them belongs to a matrix of width {D_MODEL}, none was held against the exact law."
        )
    (xi, eta), worst = max(gaps.items(), key=lambda item: item[1])
    wrong = sum(gap > CLOSE for gap in gaps.values())
    return Answer(
        first,
        f"The Gaussian form is within {CLOSE} of the exact law on {len(gaps) - wrong} of the {len(gaps)} curves that a "
        f"matrix of width {D_MODEL} can have, the largest gap being {worst:.3f} at ξ = {xi:g}, η = {eta:g}; nothing "
        "here is random, so there is no interval.",
    )


STUDY = Study(
    question="What do the paper's curves of the propagation probability look like, and is its Gaussian form exact?",
    grid=grid,
    measure=measure,
    conclude=conclude,
    figure=Figure(
        "theta", "rho", "eta", "xi", "place in the text, t/T", "ρ, Gaussian form", by_label="η", panel_label="ξ ="
    ),
    shown=lambda rows: [row for row in rows if row["method"] == "closed"],
    budget="under a minute of one core",
    doubt="Both forms share the random walk; on real inputs neither need hold.",
)
