"""The page of studies: `python runs/studies.py` writes docs/studies.md and its figures from the rows in runs/studies.

`python runs/studies.py keep FOLDER…` first takes over the rows of finished studies (`locater study NAME --out FOLDER`).
The rows of `convergence` are those of runs/measured/convergence, which may still be under way. The tables of
docs/evidence.md are written from runs/studies/real-data.json (`locater study real-data --json`).
"""

import json
import sys
from pathlib import Path

from locater.report import figures
from locater.report.studies import study_figure
from locater.studies.page import documents, keep_rows, page
from locater.studies.real_data import page as evidence_tables
from locater.studies.study import points_of
from locater.studies.sweep.folder import Row, open_sweep
from locater.studies.trained import result
from locater.training.metrics import METRICS

ROOT = Path(__file__).parents[1]
ROWS, PAGE = ROOT / "runs" / "studies", ROOT / "docs" / "studies.md"
EVIDENCE, BEGIN, END = ROOT / "docs" / "evidence.md", "<!-- tables -->\n", "<!-- end of tables -->"


def take_over(folder: Path) -> None:
    sweep = open_sweep(folder)
    name = sweep.kind.removeprefix("study ")
    quick = list(sweep.points) == points_of(name, quick=True)
    keep_rows(sweep.kind, sweep.rows(), ROWS / f"{name}.json", num_points=len(sweep.points), quick=quick)


def take_over_runs(folder: Path) -> None:
    """The points of `convergence` that have a run there; one that has not used up its patience is not done."""
    points = points_of("convergence", quick=False)
    rows: list[Row] = []
    for point in points:
        if (folder / point["name"] / METRICS).exists():
            found = result(folder / point["name"])
            patience = point["options"]["patience"]
            is_done = found["step"] - found["best_step"] >= patience or found["step"] >= point["options"]["steps"]
            rows.append({"point": point, "result": found | {"is_done": is_done}})
    keep_rows("study convergence", rows, ROWS / "convergence.json", num_points=len(points), quick=False)


def write_page() -> None:
    pictures = PAGE.with_suffix("")
    for name, found in documents(ROWS).items():
        if found["rows"]:
            figures.save(study_figure(found), pictures / f"{name}.png")
    PAGE.write_text(page(ROWS, pictures=pictures.name), encoding="utf-8")


def write_evidence() -> None:
    """The tables alone: what is written around them stays."""
    rows = json.loads((ROWS / "real-data.json").read_text(encoding="utf-8"))["models"]
    before, rest = EVIDENCE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    EVIDENCE.write_text(f"{before}{BEGIN}\n{evidence_tables(rows)}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    for folder in sys.argv[2:] if sys.argv[1:2] == ["keep"] else ():
        take_over(Path(folder))
    take_over_runs(ROOT / "runs" / "measured" / "convergence")
    write_page()
    write_evidence()
