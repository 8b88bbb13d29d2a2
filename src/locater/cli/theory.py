"""`locater theory`: the signal propagation probability of one head, by every method, and the phase diagram."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BadArguments, refuse
from .output import JsonPath, console_for, table

if TYPE_CHECKING:
    from torch import Tensor

NUM_ROWS = 12
MEANING = {
    "uniform": "every token passes on its signal with about the same probability: attention does not select",
    "no-signal": "almost no token passes on a signal: the gradient through attention vanishes",
    "early": "the first tokens pass on their signal, recent ones do not",
    "middle": "only a window in the middle of the context passes on its signal",
    "late": "recent tokens pass on their signal, early ones do not",
    "mixed": "tokens differ, but no single stretch of the context stands out",
}


class Method(StrEnum):
    closed = "closed"
    exact = "exact"
    monte_carlo = "monte-carlo"
    all = "all"


def theory(
    matrix: Annotated[Path | None, typer.Option(metavar="A.npy", help="The d×d matrix A.")] = None,
    query: Annotated[Path | None, typer.Option(metavar="Q.npy", help="Query weights, d_h×d.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="K.npy", help="Key weights, d_h×d.")] = None,
    trace: Annotated[float | None, typer.Option(help="tr A, instead of weights.")] = None,
    trace_of_square: Annotated[float | None, typer.Option(help="tr A².")] = None,
    frobenius_squared: Annotated[float | None, typer.Option(help="‖A‖² (Frobenius).")] = None,
    length: Annotated[int, typer.Option(help="T, the number of tokens.")] = 128,
    temperature: Annotated[
        float | None, typer.Option(help="λ, which divides the logits; √d_h (√d for --matrix) unless given.")
    ] = None,
    covariance: Annotated[
        str, typer.Option(metavar="S", help="Σ of the walk's steps: a number, or a .npy of (d) or (d, d).")
    ] = "1",
    method: Annotated[Method, typer.Option(help="How to compute the probability.")] = Method.closed,
    walks: Annotated[int, typer.Option(help="Random walks for Monte Carlo.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    limit: Annotated[bool, typer.Option("--limit", help="Add the closed form's limit T → ∞ over θ = t/T.")] = False,
    phase_diagram: Annotated[
        bool, typer.Option("--phase-diagram", help="Draw the plane eigenvalue mean × variance instead.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Save a picture (.png, .svg or .pdf).")] = None,
    json: JsonPath = None,
) -> None:
    """Which tokens pass on a signal: the propagation probability of each token of a random walk."""
    if phase_diagram:
        from .phase_diagram import run

        return run(seed=seed, plot=plot, json=json)
    moments_given = [value is not None for value in (trace, trace_of_square, frobenius_squared)]
    sources = [matrix is not None, query is not None or key is not None, any(moments_given)]
    if sum(sources) != 1:
        raise BadArguments("give one of --matrix, --query with --key, or the three moments (or --phase-diagram)")
    if any(moments_given):
        if not all(moments_given):
            raise BadArguments("give all three of --trace, --trace-of-square and --frobenius-squared")
        _refuse_more_than_moments(method, temperature)
        from ..studies.profile import profile_of_moments

        given = (trace, trace_of_square, frobenius_squared)
        document = profile_of_moments(*given, length=length, temperature=temperature, limit=limit)
    else:
        from ..studies.profile import profile_of_weights

        document = profile_of_weights(
            *(_load_matrix(matrix) if matrix else _load_pair(query, key)),
            methods=[one.value for one in Method if method in (one, Method.all) and one is not Method.all],
            length=length,
            temperature=temperature,
            covariance=_covariance(covariance),
            num_walks=walks,
            seed=seed,
            limit=limit,
        )
    _show(document, plot, json)
    return None


def _refuse_more_than_moments(method: Method, temperature: float | None) -> None:
    if method is not Method.closed:
        raise BadArguments(
            f"--method {method.value} needs the weights: three moments fix the closed form only; "
            "give --matrix or --query with --key, or use --method closed"
        )
    if temperature is None:
        raise BadArguments("three moments do not tell d_h, so give --temperature (λ, as a rule √d_h)")


def _load_matrix(path: Path) -> "tuple[Tensor, Tensor]":
    import torch

    loaded = _load(path)
    if loaded.dim() != 2 or loaded.shape[0] != loaded.shape[1]:
        raise refuse(f"a square matrix in {path}", f"shape {tuple(loaded.shape)}", "use --query and --key for factors")
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
        raise refuse(f"a NumPy file at {path}", reason, "save it with numpy.save") from None
    if not isinstance(array, numpy.ndarray) or array.dtype.kind not in "fiu" or array.ndim not in (1, 2):
        raise refuse(f"a real matrix in {path}", getattr(array, "dtype", "an archive"))
    if not numpy.isfinite(array).all():
        raise refuse(f"finite numbers in {path}", "NaN or infinity")
    return torch.from_numpy(array.astype(numpy.float64))


def _covariance(given: str) -> "float | Tensor":
    try:
        return float(given)
    except ValueError:
        return _load(Path(given))


def _show(document: dict[str, Any], plot: Path | None, json: Path | None) -> None:
    from ..records import write_json
    from ..report.terminal import draw

    console = console_for(json)
    best = _best(document["profiles"])
    console.print(
        f"[bold]{document['regime']}[/bold]: {MEANING[document['regime']]}.\n"
        f"T = {document['length']}, λ = {document['temperature']:.4g}, tr A = {document['trace']:.4g}, "
        f"η = {document['eta']:.4g}, ξ = {document['xi']:.4g}, localisation {document['localisation']:.2f}\n"
    )
    drawn = draw(best, width=min(72, console.width - 6))
    console.print(drawn, markup=False)
    console.print("   t=1" + f"t={document['length']}".rjust(max(len(drawn.split("\n")[0]) - 6, 1)), markup=False)
    console.print()
    console.print(_profile_table(document))
    if "limit" in document:
        values = document["limit"]["closed"]
        console.print()
        console.print(table(["θ", "T → ∞"], [[f"{n / 10:.1f}", f"{values[10 * n]:.6f}"] for n in range(11)]))
    if plot:
        from ..report import figures

        figures.save(figures.profile(document), plot)
        console.print(f"picture: {plot}", soft_wrap=True)
    if json:
        write_json(document, json)


def _best(profiles: dict[str, Any]) -> list[float]:
    return profiles.get("exact") or profiles.get("closed") or profiles["monte-carlo"]["mean"]


def _profile_table(document: dict[str, Any]) -> Any:
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
