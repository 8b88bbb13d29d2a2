"""`locater theory`: the signal propagation probability of one head, by every method, and the phase diagram."""

import re
import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..budget import limited
from ..errors import BadArguments, refusal
from ..quantities import REGIME_WORDS
from ..records import Json
from .output import FittedTable, aside, console_for, table
from .results import JsonPath, PlotPath, Timeout, save_result

if TYPE_CHECKING:
    from torch import Tensor

NUM_ROWS = 12


class TheoryMethod(StrEnum):
    closed = "closed"
    exact = "exact"
    monte_carlo = "monte-carlo"
    all = "all"


HeadOf = Annotated[
    str | None,
    typer.Option(
        "--head",
        metavar="PLACE",
        help="A head of a checkpoint, MODEL:LAYER.HEAD; its weights, Q.npy,K.npy (d_h×d); or its matrix, A.npy.",
    ),
]
Moments = Annotated[
    str | None,
    typer.Option(metavar="A,B,C", help="tr A, tr A² and ‖A‖² (Frobenius) of a head, not its weights."),
]
Length = Annotated[int, typer.Option(help="T, the context length in tokens.")]
Temperature = Annotated[float | None, typer.Option(help="λ, which divides the logits; by default √d_h (√d for A.npy).")]
Depth = Annotated[
    int | None,
    typer.Option(metavar="N", help="Follow entropy and rank through N layers that have this head's spectrum."),
]
PhaseDiagram = Annotated[
    bool,
    typer.Option("--phase-diagram", help="Show the plane of eigenvalue mean and variance, not one head."),
]


def theory(
    head: HeadOf = None,
    moments: Moments = None,
    length: Length = 128,
    temperature: Temperature = None,
    method: Annotated[
        TheoryMethod, typer.Option(metavar="NAME", help="closed, exact, monte-carlo or all.")
    ] = TheoryMethod.closed,
    depth: Depth = None,
    phase_diagram: PhaseDiagram = False,
    timeout: Timeout = None,
    plot: PlotPath = None,
    json: JsonPath = None,
) -> None:
    """Compute which tokens pass on a signal: the propagation probability of each token of a random walk."""
    if phase_diagram:
        from .theory_parts import show_phase_diagram

        return show_phase_diagram(plot=plot, json=json)
    if head is not None and moments is not None:
        raise BadArguments("give --head or --moments, not both")
    if moments is not None:
        if depth is not None:
            raise BadArguments("--depth needs the weights: three moments do not tell d; give --head")
        return _show(_profile_of_moments(moments, method, length, temperature), plot, json)
    from ..theory.profiles import METHODS, profile_of_weights

    with limited(seconds=timeout):
        query, key, own_temperature = _weights(head)
    temperature = own_temperature if temperature is None else temperature
    methods = METHODS if method is TheoryMethod.all else [method.value]
    document = profile_of_weights(query, key, length=length, methods=methods, temperature=temperature)
    if depth is not None:
        from .theory_parts import depth_document

        document["depth"] = depth_document(query, key, layers=depth, length=length, temperature=temperature)
    return _show(document, plot, json)


def _profile_of_moments(moments: str, method: TheoryMethod, length: int, temperature: float | None) -> Json:
    from ..theory.profiles import profile_of_moments

    try:
        trace, trace_of_square, frobenius_squared = map(float, moments.split(","))
    except ValueError:
        raise BadArguments(f"--moments expects three numbers, tr A, tr A² and ‖A‖², got {moments!r}") from None
    if method is not TheoryMethod.closed:
        raise BadArguments(
            f"--method {method.value} needs the weights: three moments fix the closed form only; "
            "give --head, or use --method closed"
        )
    if temperature is None:
        raise BadArguments("three moments do not tell d_h, so give --temperature (λ, as a rule √d_h)")
    numbers = trace, trace_of_square, frobenius_squared
    return profile_of_moments(*numbers, length=length, temperature=temperature)


def _weights(head: str | None) -> "tuple[Tensor, Tensor, float | None]":
    """Query and key weights by whichever way they were named, and the λ that a head of a model has."""
    if head is None:
        from ..theory.profiles import example_head

        aside("no weights were named, so this is a built-in example: --head MODEL:LAYER.HEAD takes a real one")
        return *example_head(), None
    if not head.endswith(".npy"):
        return _load_head(head)
    query, *key = map(Path, head.split(","))
    return *((_load(query), _load(key[0])) if len(key) == 1 else _load_matrix(Path(head))), None


def _load_head(place: str) -> "tuple[Tensor, Tensor, float]":
    from ..scanning.source import heads

    matched = re.fullmatch(r"(.+):(\d+)\.(\d+)", place)
    if matched is None:
        raise BadArguments(f"--head expects MODEL:LAYER.HEAD, such as gpt2:5.1, or .npy files, got {place!r}")
    source, layer, index = matched[1], int(matched[2]), int(matched[3])
    chosen = next((head.folded() for head in heads(source, layers=[layer]) if head.index == index), None)
    if chosen is None:
        raise refusal(
            f"a head of layer {layer} of {source}", index, f"locater scan {shlex.quote(source)} --heads lists them"
        )
    if chosen.rotary is not None:
        aside("rotary positions are left out here: this is the head at distance 0; locater scan has them in its regime")
    return chosen.query.linearised().double(), chosen.key.linearised().double(), chosen.temperature


def _load_matrix(path: Path) -> "tuple[Tensor, Tensor]":
    import torch

    loaded = _load(path)
    if loaded.dim() != 2 or loaded.shape[0] != loaded.shape[1]:
        raise refusal(
            f"a square matrix in {path}", f"shape {tuple(loaded.shape)}", "name two factors as --head Q.npy,K.npy"
        )
    return loaded, torch.eye(len(loaded), dtype=loaded.dtype)


def _load(path: Path) -> "Tensor":
    import numpy
    import torch

    try:
        array = numpy.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as reason:
        raise refusal(f"a NumPy file at {path}", reason, "save it with numpy.save") from None
    if not isinstance(array, numpy.ndarray) or array.dtype.kind not in "fiu" or array.ndim not in (1, 2):
        raise refusal(f"a real matrix in {path}", getattr(array, "dtype", "an archive"))
    if not numpy.isfinite(array).all():
        raise refusal(f"finite numbers in {path}", "NaN or infinity")
    return torch.from_numpy(array.astype(numpy.float64))


def _show(document: Json, plot: Path | None, json: Path | None) -> None:
    from ..report.terminal import draw

    console = console_for(json)
    profiles = document["profiles"]
    best = profiles.get("exact") or profiles.get("closed") or profiles["monte-carlo"]["mean"]  # the most faithful
    console.print(
        f"[bold]{document['regime']}[/bold]: {REGIME_WORDS[document['regime']].meaning}.\n"
        f"T = {document['length']}, λ = {document['temperature']:.4g}, trace {document['trace']:.4g}, "
        f"η = {document['eta']:.4g}, ξ = {document['xi']:.4g}, localisation {document['localisation']:.2f}\n"
    )
    drawn = draw(best, width=min(72, console.width - 6))
    console.print(drawn, markup=False)
    console.print("   t=1" + f"t={document['length']}".rjust(max(len(drawn.split("\n")[0]) - 6, 1)), markup=False)
    console.print()
    console.print(_profile_table(document))
    if "softmax" in document:
        console.print()
        console.print(_softmax_sentence(document["softmax"], document["length"]), markup=False)
    if "depth" in document:
        from .theory_parts import depth_sentence, depth_table

        console.print()
        console.print(depth_sentence(document["depth"]), markup=False)
        console.print(depth_table(document["depth"]))
    save_result(document, json=json, plot=plot)


def _softmax_sentence(found: Json, length: int) -> str:
    from ..theory.random_energy import LARGEST

    bound = "at most " if found["variance"] > LARGEST else ""
    return (
        f"True softmax over {length} independent tokens after a norm: mean entropy "
        f"{bound}{found['normalised_entropy']:.2f} of ln T, from logits of variance {found['variance']:.3g} "
        f"(long texts freeze beyond 2 ln T = {found['border']:.3g})."
    )


def _profile_table(document: Json) -> FittedTable:
    profiles, length = document["profiles"], document["length"]
    step = max(1, (length - 1) / (min(NUM_ROWS, length) - 1)) if length > 1 else 1
    positions = sorted({round(1 + step * row) for row in range(min(NUM_ROWS, length))})
    rows = []
    for t in positions:
        cells = [str(t)]
        for name, profile in profiles.items():
            if name == "monte-carlo":
                cells.append(f"{profile['mean'][t - 1]:.4f} ± {profile['standard_error'][t - 1]:.4f}")
            else:
                cells.append(f"{profile[t - 1]:.4f}")
        rows.append(cells)
    return table(["t", *profiles], rows)
