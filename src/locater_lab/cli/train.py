"""`locater train`: the paper's experiment and small language models, with or without LocAteR.

The fields of the config's dataclasses are options by `--set NAME=VALUE`, each documented where it is declared.
"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from locater.cli.output import FittedTable, aside, console_for, table
from locater.cli.results import JsonPath
from locater.errors import BadArguments
from locater.records import Json

from ..train.config import PRESETS, Config, make_config

if TYPE_CHECKING:
    from ..train.run import Outcome

# What a resumed run may change: where it ends, and where its data lies.
LENGTH = {"steps", "epochs", "patience"}
FLAGS = ("data", "steps", "seed", "strength")  # fields with a flag of their own
DEFAULT = "paper"
UNVERIFIED = "verified=no"  # of --set: of the way to resume, not of the config
Preset = Annotated[
    str | None, typer.Option(metavar="NAME", help=f"Start from one of {', '.join(PRESETS)}. (default: {DEFAULT})")
]
ConfigFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Options from a YAML or JSON file, such as a run's config.json; --set overrides it."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help="Any option, such as learning_rate=3e-3; may be repeated. --print-config explains them all.",
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Continue the run in this folder; --steps, or --set of epochs or patience, moves its end, --data names "
        f"moved data. --set {UNVERIFIED} takes a folder that was changed, is of another version or on another device.",
    ),
]
StopAfter = Annotated[int | None, typer.Option(min=1, metavar="N", help="Stop at this step, to resume later.")]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print all options with what they mean, as such a file, and exit.")
]
DataPlace = Annotated[
    str | None,
    typer.Option(
        metavar="TEXT",
        help="A text file or folder, wikitext-2, embedded (Python's documentation), or auto.",
    ),
]


def train(
    preset: Preset = None,
    config: ConfigFile = None,
    settings: Settings = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="A new folder for the run.")] = None,
    resume: Resume = None,
    stop_after: StopAfter = None,
    print_config: PrintConfig = False,
    json: JsonPath = None,
    data: DataPlace = None,
    steps: Annotated[str | None, typer.Option(metavar="N", help="Steps of the optimiser.")] = None,
    seed: Annotated[str | None, typer.Option(metavar="N", help="Seed of everything random.")] = None,
    strength: Annotated[str | None, typer.Option(metavar="X|auto", help="κ of LocAteR; 0: none.")] = None,
) -> None:
    """Train a small transformer language model, with or without LocAteR; continues to the bit where it was stopped."""
    from ..train.config_file import read_pairs

    flags = dict(zip(FLAGS, (data, steps, seed, strength), strict=True))
    pairs = [*(settings or ()), *(f"{name}={value}" for name, value in flags.items() if value is not None)]
    given = read_pairs([pair for pair in pairs if pair != UNVERIFIED])
    if resume is not None:
        _check_resume(given | {"preset": preset, "config": config, "out": out})
    elif UNVERIFIED in pairs:
        raise BadArguments(f"--set {UNVERIFIED} goes with --resume DIR")
    chosen = None if resume is not None else _chosen(preset, config, given)
    if print_config:
        return _print(chosen, resume)
    from ..train import run

    if chosen is not None and out is not None:
        outcome = run.start(chosen, out, stop_after=stop_after, say=aside)
    elif resume is not None:
        moved, verified = given.pop("data", None), UNVERIFIED not in pairs
        outcome = run.resume(resume, length=given, data=moved, stop_after=stop_after, verified=verified, say=aside)
    else:
        raise BadArguments("give one of --out DIR, for a new run, and --resume DIR, to continue one")
    if outcome.is_first:
        _report(console_for(json), outcome, json)
    return _leave(outcome)


def _leave(outcome: "Outcome") -> None:
    """A signal is passed on as the exit code that shells give it."""
    code = 0 if outcome.signal is None else 128 + outcome.signal
    if outcome.num_processes > 1:
        from ..train.processes import leave

        leave(code)
    raise typer.Exit(code)


def _check_resume(given: Json) -> None:
    """A resumed run is as it was; only its end may move."""
    if given.pop("out") is not None:
        raise BadArguments("give one of --out DIR, for a new run, and --resume DIR, to continue one")
    if others := sorted(name for name, value in given.items() if value is not None and name not in LENGTH | {"data"}):
        raise BadArguments(f"--resume takes the run's own config: leave out {', '.join(others)}")


def _chosen(preset: str | None, file: Path | None, flags: Json) -> Config:
    """Defaults, then the preset, then the file, then --set and flags."""
    from ..train.config_file import read_file

    named, values = (None, {}) if file is None else read_file(file)
    return make_config(preset or named or DEFAULT, **(values | flags))


def _print(config: Config | None, resume: Path | None) -> None:
    """To standard output, as a file that --config reads."""
    from ..train.config_file import to_yaml

    if config is None:
        from ..train.run import read_run_config

        assert resume is not None
        config = read_run_config(resume)
    print(to_yaml(config), end="")


def _report(console: Console, outcome: "Outcome", json: Path | None) -> None:
    """Print the outcome, and the next commands."""
    from locater.records import write_json

    row = outcome.validation or {}
    early = ", no validation improved any more" if outcome.is_done and outcome.step < outcome.num_steps else ""
    console.print(f"step {outcome.step} of {outcome.num_steps}{early}" + ("" if outcome.is_done else ", stopped"))
    for name in ("loss", "perplexity", "entropy"):
        if name in row:
            console.print(f"validation {name} {row[name]:.4f} (step {row['step']})")
    if row.get("heads"):
        console.print(_heads(row["heads"]))
    model = shlex.quote(str(outcome.folder / "model"))
    console.print(escape(f"model: {model} (locater scan {model})"), soft_wrap=True)
    if not outcome.is_done:
        folder = shlex.quote(str(outcome.folder))
        console.print(escape(f"continue with: locater train --resume {folder}"), soft_wrap=True)
    if json:
        write_json(outcome.to_json(), json)


def _heads(rows: list[Json]) -> FittedTable:
    columns = {"tr W/λ": "trace", "η/λ": "eta", "ξ": "xi", "local": "localisation", "entropy": "normalised_entropy"}
    per_unit = ("trace", "eta")
    body = []
    for row in rows[:16]:
        numbers = [
            row.get(name, float("nan")) / (row["temperature"] if name in per_unit else 1) for name in columns.values()
        ]
        body.append([f"{row['layer']}.{row['head']}", *(f"{number:.3f}" for number in numbers), row["regime"]])
    return table(["head", *columns, "regime"], body, words=["regime"])
