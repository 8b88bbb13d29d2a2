"""`locater theory`: the signal propagation probability of one head, by every method, and the phase diagram."""

import re
import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ..budget import limited
from ..errors import BadArguments, refusal
from ..records import Json
from ..theory.words import WORDS
from .options import JsonPath, PlotPath, Timeout
from .output import FittedTable, aside, console_for, table

if TYPE_CHECKING:
    from torch import Tensor

NUM_ROWS = 12


class Method(StrEnum):
    closed = "closed"
    exact = "exact"
    monte_carlo = "monte-carlo"
    all = "all"


Matrix = Annotated[Path | None, typer.Option(metavar="A.npy", help="The d×d matrix A.")]
Query = Annotated[Path | None, typer.Option(metavar="Q.npy", help="Query weights, d_h×d.")]
Key = Annotated[Path | None, typer.Option(metavar="K.npy", help="Key weights, d_h×d.")]
HeadOf = Annotated[
    str | None,
    typer.Option("--head", metavar="MODEL:LAYER.HEAD", help="A head of a checkpoint, its norm's gain folded in."),
]
Trace = Annotated[float | None, typer.Option(help="tr A, instead of weights.")]
TraceOfSquare = Annotated[float | None, typer.Option(help="tr A².")]
FrobeniusSquared = Annotated[float | None, typer.Option(help="‖A‖² (Frobenius).")]
Length = Annotated[int, typer.Option(help="T, the number of tokens.")]
Temperature = Annotated[
    float | None, typer.Option(help="λ, which divides the logits; √d_h (√d for --matrix) unless given.")
]
Covariance = Annotated[str, typer.Option(metavar="S", help="Σ of the steps: a number, or a .npy of (d) or (d, d).")]
Walks = Annotated[int, typer.Option(min=1, help="Random walks for Monte Carlo.")]
Limit = Annotated[bool, typer.Option("--limit", help="Add the closed form's limit T → ∞ over θ = t/T.")]
Depth = Annotated[
    int | None,
    typer.Option(metavar="N", help="Follow entropy and rank through N layers that have this head's spectrum."),
]
PhaseDiagram = Annotated[
    bool, typer.Option("--phase-diagram", help="Draw the plane eigenvalue mean × variance instead.")
]


def theory(
    matrix: Matrix = None,
    query: Query = None,
    key: Key = None,
    head: HeadOf = None,
    trace: Trace = None,
    trace_of_square: TraceOfSquare = None,
    frobenius_squared: FrobeniusSquared = None,
    length: Length = 128,
    temperature: Temperature = None,
    covariance: Covariance = "1",
    method: Annotated[Method, typer.Option(metavar="NAME", help="closed, exact, monte-carlo or all.")] = Method.closed,
    walks: Walks = 20_000,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    limit: Limit = False,
    depth: Depth = None,
    phase_diagram: PhaseDiagram = False,
    timeout: Timeout = None,
    plot: PlotPath = None,
    json: JsonPath = None,
) -> None:
    """Compute which tokens pass on a signal: the propagation probability of each token of a random walk."""
    if phase_diagram:
        from .phase_diagram import run

        return run(seed=seed, plot=plot, json=json)
    moments = (trace, trace_of_square, frobenius_squared)
    by_moments = any(moment is not None for moment in moments)
    ways = (matrix is not None) + (query is not None or key is not None) + (head is not None) + by_moments
    if ways > 1:
        raise BadArguments("give one of --matrix, --query with --key, --head, or three moments (or --phase-diagram)")
    options: dict[str, Any] = dict(length=length, temperature=temperature, limit=limit)
    if by_moments:
        if depth is not None:
            raise BadArguments("--depth needs the weights: three moments do not tell d; give --matrix, --query, --head")
        document = _of_moments(moments, method, options)
    else:
        with limited(seconds=timeout):
            weights = _weights(matrix, query, key, head, options)
        options |= dict(covariance=_covariance(covariance), num_walks=walks, seed=seed)
        document = _of_weights(weights, method, options)
        if depth is not None:
            from .depth import depth_document

            document["depth"] = depth_document(weights, layers=depth, options=options)
    return _show(document, plot, json)


def _of_moments(moments: tuple[float | None, ...], method: Method, options: dict[str, Any]) -> Json:
    from ..theory.document import profile_of_moments

    given = [moment for moment in moments if moment is not None]
    if len(given) < 3:
        raise BadArguments("give all three of --trace, --trace-of-square and --frobenius-squared")
    if method is not Method.closed:
        raise BadArguments(
            f"--method {method.value} needs the weights: three moments fix the closed form only; "
            "give --matrix or --query with --key, or use --method closed"
        )
    if options["temperature"] is None:
        raise BadArguments("three moments do not tell d_h, so give --temperature (λ, as a rule √d_h)")
    return profile_of_moments(*given, **options)


def _of_weights(weights: "tuple[Tensor, Tensor]", method: Method, options: dict[str, Any]) -> Json:
    from ..theory.document import METHODS, profile_of_weights

    methods = METHODS if method is Method.all else [method.value]
    return profile_of_weights(*weights, methods=methods, **options)


def _weights(
    matrix: Path | None, query: Path | None, key: Path | None, head: str | None, options: dict[str, Any]
) -> "tuple[Tensor, Tensor]":
    """Query and key weights by whichever way they were named; a head also brings its own λ."""
    if matrix:
        return _load_matrix(matrix)
    if head is not None:
        return _load_head(head, options)
    if query is None and key is None:
        from ..theory.document import example_head

        aside("no weights were named, so this is a built-in example: --head MODEL:LAYER.HEAD takes a real one")
        return example_head()
    return _load_pair(query, key)


def _load_head(place: str, options: dict[str, Any]) -> "tuple[Tensor, Tensor]":
    from ..scanning.source import heads

    matched = re.fullmatch(r"(.+):(\d+)\.(\d+)", place)
    if matched is None:
        raise BadArguments(f"--head expects MODEL:LAYER.HEAD, such as gpt2:5.1, got {place!r}")
    source, layer, index = matched[1], int(matched[2]), int(matched[3])
    chosen = next((head.folded() for head in heads(source, layers=[layer]) if head.index == index), None)
    if chosen is None:
        raise refusal(
            f"a head of layer {layer} of {source}", index, f"locater scan {shlex.quote(source)} --heads lists them"
        )
    if chosen.rotary is not None:
        aside("rotary positions are left out here: this is the head at distance 0; locater scan has them in its regime")
    if options["temperature"] is None:
        options["temperature"] = chosen.temperature
    return chosen.query.linearised().double(), chosen.key.linearised().double()


def _load_matrix(path: Path) -> "tuple[Tensor, Tensor]":
    import torch

    loaded = _load(path)
    if loaded.dim() != 2 or loaded.shape[0] != loaded.shape[1]:
        raise refusal(f"a square matrix in {path}", f"shape {tuple(loaded.shape)}", "use --query and --key for factors")
    return loaded, torch.eye(len(loaded), dtype=loaded.dtype)


def _load_pair(query: Path | None, key: Path | None) -> "tuple[Tensor, Tensor]":
    if query is None or key is None:
        raise BadArguments("give both --query and --key")
    return _load(query), _load(key)


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


def _covariance(given: str) -> "float | Tensor":
    try:
        return float(given)
    except ValueError:
        return _load(Path(given))


def _show(document: Json, plot: Path | None, json: Path | None) -> None:
    from ..records import write_json
    from ..report.terminal import draw

    console = console_for(json)
    best = _best(document["profiles"])
    console.print(
        f"[bold]{document['regime']}[/bold]: {WORDS[document['regime']].meaning}.\n"
        f"T = {document['length']}, λ = {document['temperature']:.4g}, tr A = {document['trace']:.4g}, "
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
    if "limit" in document:
        values = document["limit"]["closed"]
        console.print()
        console.print(table(["θ", "T → ∞"], [[f"{n / 10:.1f}", f"{values[10 * n]:.6f}"] for n in range(11)]))
    if "depth" in document:
        from .depth import depth_sentence, depth_table

        console.print()
        console.print(depth_sentence(document["depth"]), markup=False)
        console.print(depth_table(document["depth"]))
    if plot:
        from ..report import figures

        figures.save(figures.profile(document), plot)
        console.print(f"picture: {escape(str(plot))}", soft_wrap=True)
    if json:
        write_json(document, json)


def _softmax_sentence(found: Json, length: int) -> str:
    return (
        f"True softmax over {length} independent tokens behind a norm: logits of variance ‖A‖²/λ² = "
        f"{found['variance']:.3g}, mean entropy {found['normalised_entropy']:.2f} of ln T "
        f"(long texts freeze beyond a variance of 2 ln T = {found['border']:.3g})."
    )


def _best(profiles: Json) -> list[float]:
    return profiles.get("exact") or profiles.get("closed") or profiles["monte-carlo"]["mean"]


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
                cells.append(f"{profile[t - 1]:.6f}")
        rows.append(cells)
    return table(["t", *profiles], rows)
