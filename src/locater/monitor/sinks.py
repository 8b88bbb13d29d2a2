"""Sinks of reports: one small interface, and six destinations. Each library is imported when its sink is made."""

import importlib
import json
import math
from pathlib import Path
from typing import Any, Protocol

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..errors import import_extra, missing
from .report import Alarm, LayerReport, Report

COLUMNS = ("normalised_entropy", "max_logit", "sink_mass", "near_mass", "mean_distance", "participation")
SHORT = {"normalised_entropy": "norm._entropy", "mean_distance": "mean_dist.", "participation": "particip."}


class Sink(Protocol):
    """Anything that takes reports."""

    def write(self, report: Report) -> None: ...
    def close(self) -> None: ...


class JsonLines:
    """One line per report, with every head; the file is appended to, and complete after every line.

    What a killed process left of a last line is taken off before the first: behind it no line could be read.
    """

    def __init__(self, path: str | Path):
        self.path, self.is_whole = Path(path), False
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, report: Report) -> None:
        line = json.dumps(report.to_json(), allow_nan=False) + "\n"
        with self.path.open("ab") as file:
            if not self.is_whole and file.tell():
                file.truncate(self.path.read_bytes().rfind(b"\n") + 1)
            self.is_whole = False  # until all of it is there: a disk may be full
            file.write(line.encode("utf-8"))
        self.is_whole = True

    def close(self) -> None: ...


class TensorBoard:
    """Scalars, and the alarms as text, through a `SummaryWriter`: a directory's, or one that is given."""

    def __init__(self, directory: str | Path | None = None, *, writer: Any = None):
        if writer is None:
            module = import_extra("torch.utils.tensorboard", "the package tensorboard", extra="tensorboard")
            writer = module.SummaryWriter(log_dir=None if directory is None else str(directory))
        self.writer = writer

    def write(self, report: Report) -> None:
        for name, value in report.metrics().items():
            self.writer.add_scalar(name, value, report.step)
        if report.alarms:
            self.writer.add_text("attn/alarms", "\n\n".join(report.told()), report.step)
        if report.actions:
            self.writer.add_text("attn/actions", "\n\n".join(report.actions), report.step)

    def close(self) -> None:
        self.writer.close()


class _Run:
    """Libraries with `log(metrics)` on a run: one that is given, or the current one.

    The step is a metric of its own: these libraries drop what comes with a step before their latest. With
    `metrics=False` only alarms are sent: a trainer whose `report_to` names the library logs the metrics already.
    """

    library: str

    def __init__(self, run: Any = None, *, metrics: bool = True):
        if run is None:
            try:
                run = importlib.import_module(self.library)
            except ImportError:
                raise missing(f"the package {self.library}", f"pip install {self.library}") from None
        self.run, self.metrics = run, metrics
        self.raised: set[tuple[str, str, int]] = set()

    def write(self, report: Report) -> None:
        if self.metrics:
            self.run.log({**report.metrics(), "attn/step": report.step})
        for alarm in self._new(report):
            self.run.alert(title=f"attention: {alarm.kind}", text=f"step {report.step}: {alarm}")
        for line in report.actions:
            self.run.alert(title="attention: action", text=line)

    def _new(self, report: Report) -> list[Alarm]:
        """An alarm is raised once for a layer, and again only after it has gone."""
        present = {(alarm.kind, alarm.block, alarm.layer): alarm for alarm in report.alarms}
        new = [alarm for key, alarm in present.items() if key not in self.raised]
        self.raised = set(present)
        return new

    def close(self) -> None: ...  # the run belongs to the user


class WeightsAndBiases(_Run):
    """Scalars and alerts (`wandb.alert`) to the run under way, or to the one given."""

    library = "wandb"


class Trackio(_Run):
    """Scalars and alerts (`trackio.alert`) to the run under way, or to the one given."""

    library = "trackio"


class MLflow(_Run):
    """Scalars to the run under way; alarms as a tag of the run, which MLflow can search for, and as a text each."""

    library = "mlflow"

    def write(self, report: Report) -> None:
        if self.metrics:
            self.run.log_metrics(report.metrics(), step=report.step)
        if new := self._new(report):
            text = "\n".join(map(str, new))
            self.run.set_tag("attention.alarm", f"step {report.step}: {new[0].kind}")
            self.run.log_text(text, f"attention/alarms_{report.step:07d}.txt")
        if report.actions:
            self.run.set_tag("attention.action", report.actions[-1])
            self.run.log_text("\n".join(report.actions), f"attention/actions_{report.step:07d}.txt")


class Terminal:
    """A table of the layers, and the alarms beneath it."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(highlight=False)

    def write(self, report: Report) -> None:
        titles = {"training": "training", "no_grad": "training without gradients", "evaluation": "evaluation"}
        for mode, title in titles.items():
            if layers := getattr(report, mode):
                self.console.print(_table(layers, f"attention in {title}, step {report.step}"))
        for words in report.told():
            self.console.print(f"[bold red]alarm[/] {escape(words)}")
        for line in report.actions:
            self.console.print(f"[bold]action[/] {escape(line)}")
        for note in report.notes:
            self.console.print(f"[dim]{escape(note)}[/]")

    def close(self) -> None: ...


def _table(layers: tuple[LayerReport, ...], title: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", padding=(0, 1))
    table.add_column("layer", no_wrap=True)
    for name in (*COLUMNS, "residual"):
        table.add_column(SHORT.get(name, name).replace("_", "\n"), justify="right", no_wrap=True)
    for layer in layers:
        numbers = [layer.mean(name) if name in layer.statistics else math.nan for name in COLUMNS]
        numbers.append(layer.ranks.get("residual", math.nan))
        cells = ("–" if math.isnan(number) else f"{number:.3f}" for number in numbers)
        table.add_row(f"{layer.block} {layer.layer}", *cells)
    return table
