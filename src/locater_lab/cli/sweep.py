"""`locater sweep`: grids and seeds of `locater train`; resumable, and a failure is a row."""

import re
import shlex
import signal
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from locater.cli.output import console_for, table
from locater.cli.results import Engine, Jobs, JsonPath, Retry, progress
from locater.errors import BadArguments, refusal, within
from locater.records import Json, as_written, read_yaml

if TYPE_CHECKING:
    from ..studies.sweep.folder import Sweep


GRID = 'Options of train with their values, such as "strength=0,1e-2 seed=0,1,2 steps=500".'


def sweep(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="A YAML file with a preset and a grid.")] = None,
    grid: Annotated[str | None, typer.Option(metavar="NAME=A,B …", help=GRID)] = None,
    preset: Annotated[str, typer.Option(metavar="NAME", help="Preset of `locater train` to start from.")] = "paper",
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of results; continues this grid.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="DIR", help="Continue the sweep in this folder.")] = None,
    jobs: Jobs = 1,
    on: Engine = None,
    asha: Annotated[bool, typer.Option("--asha", help="With --on ray: end trials early that fall behind.")] = False,
    retry: Retry = False,
    emit: Annotated[str | None, typer.Option(metavar="slurm", help="Only write the script of an array job.")] = None,
    task: Annotated[int | None, typer.Option(min=0, help="Measure only this point (used by the array job).")] = None,
    worker: Annotated[bool, typer.Option("--worker", hidden=True)] = False,
    json: JsonPath = None,
) -> None:
    """Train over a grid of options, with any number of processes; killed at any moment, it goes on where it was."""
    from ..studies.sweep import engines, on_ray
    from ..studies.sweep.folder import create, open_sweep

    if (resume is None) == (out is None):
        raise BadArguments("give one of --out DIR, for a new sweep, and --resume DIR, to go on with one")
    if asha and on is None:
        raise BadArguments("--asha is of Ray Tune: give --on ray with it")
    if emit not in (None, "slurm"):
        raise BadArguments(f"--emit expects slurm, got {emit!r}")
    on_ray.check_cluster(on)
    found = open_sweep(resume) if resume is not None else create(out, "train", _points(file, grid, preset))  # type: ignore
    if emit:
        engines.slurm_script(found, found.folder / "array.sh")
        submit = shlex.join(["sbatch", str(found.folder / "array.sh")])
        console_for(json).print(f"submit with: {escape(submit)}", soft_wrap=True)
        return
    if worker or task is not None:
        _work(found, task)
        return
    measure_all(found, jobs=jobs, retry=retry, on=on, asha=asha)
    _show(console_for(json), found, json)


def _work(found: "Sweep", task: int | None) -> None:
    """Work as one of several processes: SIGTERM leaves the point for another."""
    import torch

    from ..studies.study import measure_for

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    torch.set_num_threads(1)
    if task is not None and task >= len(found.points):
        raise BadArguments(f"--task expects a number below {len(found.points)}, got {task}")
    try:
        found.work(measure_for(found), only=None if task is None else [task])
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGTERM) from None


def _points(file: Path | None, grid: str | None, preset: str) -> list[Json]:
    """One for each combination, named for what varies; refuses options that train does not have."""
    from ..train.config import PRESETS, make_config
    from ..train.config_file import known_field, typed

    if (file is None) == (grid is None):
        raise BadArguments("give one of FILE and --grid")
    options = parse_grid(grid) if grid is not None else {}
    if file is not None:
        document = _read(file)
        preset = document.get("preset", preset)
        lists = {name: value if isinstance(value, list) else [value] for name, value in document["grid"].items()}
        options = {known_field(name): [typed(name, value) for value in values] for name, values in lists.items()}
    if preset not in PRESETS:
        raise BadArguments(f"the preset is one of {', '.join(PRESETS)}, got {preset!r}")
    for name, value in ((name, value) for name, values in options.items() for value in values):
        make_config(preset, **{name: value})  # every value by itself, before anything is trained
    varied = [name for name, values in options.items() if len(values) > 1 and name != "seed"]
    found = []
    for values in product(*options.values()):
        chosen = dict(zip(options, values, strict=True))
        seed = chosen.pop("seed", 0)
        arm = ",".join(f"{name}={_short(chosen[name])}" for name in varied) or preset
        found.append({"name": f"{arm}-seed{seed}", "arm": arm, "seed": seed, "preset": preset, "options": chosen})
    return found


def _short(value: object) -> str:
    """A value as part of a folder's name."""
    return f"{value:g}" if isinstance(value, float) else re.sub(r"[^\w.,=+ -]", "_", str(value))


def _read(file: Path) -> Json:
    with within(str(file)):
        document = read_yaml(file)
    if not isinstance(document, dict) or not isinstance(document.get("grid"), dict):
        raise refusal(f"a `grid` of options in {file}", f"{document!s:.80}", "see docs/studies.md")
    return document


def parse_grid(text: str) -> dict[str, list[Any]]:
    """Options of train and their values, as `--set` reads each.

    >>> parse_grid("strength=0,1e-2 tied=true data=notes.txt")
    {'strength': [0.0, 0.01], 'tied': [True], 'data': ['notes.txt']}
    """
    from ..train.config_file import read_pairs

    found: dict[str, list[Any]] = {}
    for part in text.split():
        name, separator, values = part.partition("=")
        if not separator or not name or name.replace("-", "_") in found:
            raise BadArguments(f"--grid expects NAME=VALUE,VALUE … with each name once, got {part!r}")
        for value in values.split(","):
            for field, typed in read_pairs([f"{name}={value}"]).items():
                found.setdefault(field, []).append(typed)
    return found


def _show(console: Console, found: "Sweep", json: Path | None) -> None:
    from locater.records import write_json

    rows = found.rows()
    with as_written(found.folder):
        body = [[escape(str(row["point"].get("name", ""))), escape(_said(row))] for row in rows]
    console.print(table(["run", "best validation loss"], body, words=["run", "best validation loss"]))
    failed = sum("error" in row for row in rows)
    console.print(f"{len(rows) - failed} done, {failed} failed, {len(found.missing())} missing")
    compare = shlex.join(["locater", "runs", str(found.folder / "runs")])
    console.print(f"compare them with: {escape(compare)}", soft_wrap=True)
    if json:
        write_json({"schema": "locater.sweep/1", "folder": str(found.folder), "rows": rows}, json)


def _said(row: Json) -> str:
    """Describe the outcome of a point, in a cell of the table."""
    if "error" in row:
        return row["error"]
    return f"{row['result'].get('best_loss', float('nan')):.4f} at step {row['result'].get('best_step')}"


def measure_all(sweep: "Sweep", *, jobs: int, retry: bool = False, on: str | None = None, asha: bool = False) -> None:
    """By this machine's processes, or on a Ray cluster."""
    from ..studies.study import measure_for
    from ..studies.sweep import engines, on_ray

    if retry:
        sweep.retry()
    with progress(sweep.folder.name) as tell:
        if on is None:
            engines.local(sweep, measure_for(sweep), jobs=jobs, tell=tell)
        else:
            on_ray.measure_on_ray(sweep, on, jobs=jobs, asha=asha, tell=tell)
