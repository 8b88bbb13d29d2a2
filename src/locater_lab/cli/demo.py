"""`locater demo`: the theory on one head and on the whole plane, then two models, with pictures and plain words."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from locater.cli.output import console_for
from locater.cli.results import HtmlPath, save_html
from locater.errors import missing
from locater.quantities import REGIME_WORDS
from locater.records import Json

from .demo_models import arrow, say, show_models

INTRODUCTION = """\
[bold]Where does attention look?[/bold]
A head gives every token t a logit ω_t = x_t·W x_T/λ and turns the logits into
weights. W is the product of the head's key and query weights; its trace and
its scale η decide which tokens take part at all. The propagation
probability ρ_t is the chance that a gradient passes through the weight of
token t, that it is clipped neither to nothing nor to everything; it is not
the chance that the token is attended to.
"""

ONE_HEAD = """\
[bold]1. One small head, three ways[/bold]{picture}
The head has d_h = {d_head}, tr W/λ = {ratio:.2f} and ξ = tr W/η = {xi:.2f}. Its regime is
[bold]{regime}[/bold]: {meaning}.
The closed form takes the logit for a Gaussian, the exact one does not, and
Monte Carlo simulates 20,000 random walks. Exact and simulated differ by at
most {worst_exact:.3f}; the closed form is off by up to {worst_closed:.3f}, because a head this
small is far from Gaussian. The wider the head, the closer they come.
"""

PLANE = """\
[bold]2. Every head, on one plane[/bold]{picture}
To the right the mean of the eigenvalues grows, upwards their variance. Theory
calls {localized} of {points} points localized (early, middle or late). A softmax layer over
random-walk tokens, simulated at each point, shows what really happens:

                           on one token         all tokens alike
                           (entropy collapse)   (rank collapse)
  localized, |tr W| ≤ λ    {inside_entropy:<20} {inside_rank}
  localized, |tr W| > λ    {beyond_entropy:<20} {beyond_rank}
  elsewhere                {outside_entropy:<20} {outside_rank}

A mean away from zero with a small variance keeps clear of both failures in
one simulated layer of walks: the paper's claim. In depth it can fail: of eight
layers without norms all early heads collapsed. Beyond |tr W| = λ softmax
sharpens again: attention is still localized, but on very few tokens.
"""


FILES = """
[bold]All of it lies in {out}[/bold]
  one_head.png, phase_diagram.png   the theory: one head, then all on one plane
  training.png                      how both models learnt; their eigenvalues
  attention.png                     what each of them attends to
  report.html                       both models in numbers and curves
  without/, with/                   the two runs; model/ has the weights
[bold]locater demo --out {out}[/bold] shows it again and trains nothing anew.
Next: [bold]locater train --help[/bold], and docs/notation.md for the letters."""
QUICK_FILES = """
[bold]All of it lies in {out}[/bold]
  report.html                       both models in numbers and curves
  without/, with/                   the two runs; model/ has the weights
[bold]locater demo[/bold] trains longer, and draws the plane, the models and their attention."""


def demo(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for pictures and models.")] = Path("demo"),
    quick: Annotated[bool, typer.Option("--quick", help="Train less, without pictures: seconds.")] = False,
    html: HtmlPath = None,
) -> None:
    """Take a guided tour of a minute or two: the theory, then two small models trained without and with LocAteR."""
    from ..demo.two_models import check_folder

    if not quick:
        _require_extras()
    check_folder(out, quick=quick)
    console = console_for(None)
    console.print(INTRODUCTION)
    _show_theory(console, None if quick else out)
    show_models(console, out, quick=quick)
    _save_page(out, html or out / "report.html")
    say(console, (QUICK_FILES if quick else FILES).format(out=escape(str(out))))


def _require_extras() -> None:
    """Before any time is spent: byte pairs and pictures."""
    absent = [name for name in ("tokenizers", "matplotlib") if find_spec(name) is None]
    if absent:
        remedy = "use locater demo --quick, which needs neither"
        raise missing(f"the packages {' and '.join(absent)}", remedy, extra="hf,plot")


def _save_page(out: Path, path: Path) -> None:
    """Both models side by side, and both runs step by step."""
    from locater.report.reading import read_record
    from locater.scanning.scan import scan

    from ..train.run import read_run_config

    runs = [out / "without", out / "with"]
    # As long as the texts of these models: the usual length would be beyond their context.
    length = read_run_config(runs[0]).shape.context
    scans = [scan(run / "model", length=length, details=["eigenvalues", "curves"]).to_json() for run in runs]
    save_html([*scans, *map(read_record, runs)], path, title="Two small models, without and with LocAteR")


def _show_theory(console: Console, out: Path | None) -> None:
    """Pictures go to the folder, if there is one."""
    import torch

    from locater.report import figures
    from locater.theory.phase_diagram import phase_diagram
    from locater.theory.profiles import example_head, profile_of_weights

    generator = torch.Generator().manual_seed(1)
    head, plane = (out / "one_head.png", out / "phase_diagram.png") if out else (None, None)
    document = profile_of_weights(*example_head(), length=64, seed=1)
    if head:
        figures.save(figures.draw_profile(document), head)
    say(console, ONE_HEAD.format(picture=arrow(head), **_one_head_words(document)))
    diagram = phase_diagram(generator=generator)
    if plane:
        figures.save(figures.draw_phase_diagram(diagram), plane)
    say(console, PLANE.format(picture=arrow(plane), **_plane_words(diagram["summary"])))


def _one_head_words(document: Json) -> Json:
    simulated = document["profiles"]["monte-carlo"]["mean"]

    def worst(name: str) -> float:
        return max(abs(a - b) for a, b in zip(document["profiles"][name], simulated, strict=True))

    return {
        "d_head": 6,
        "meaning": REGIME_WORDS[document["regime"]].meaning,
        "ratio": document["trace"] / document["temperature"],
        "xi": document["xi"],
        "regime": document["regime"],
        "worst_exact": worst("exact"),
        "worst_closed": worst("closed"),
    }


def _plane_words(summary: Json) -> dict[str, str]:
    def share(region: str, kind: str) -> str:
        return f"{summary[region][kind]} of {summary[region]['points']}"

    words = {"inside": "localized", "beyond": "localized-beyond", "outside": "elsewhere"}
    return {
        "localized": str(summary["localized"]["points"] + summary["localized-beyond"]["points"]),
        "points": str(sum(region["points"] for region in summary.values())),
        **{f"{word}_entropy": share(region, "entropy_collapse") for word, region in words.items()},
        **{f"{word}_rank": share(region, "rank_collapse") for word, region in words.items()},
    }
