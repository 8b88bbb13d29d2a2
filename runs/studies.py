"""The page of studies: `python runs/studies.py` writes docs/studies.md and its figures from the rows in runs/studies.

`python runs/studies.py keep FOLDER…` first takes over the rows of finished studies (`locater study NAME --out FOLDER`).
"""

import sys
from pathlib import Path

from locater.report import figures
from locater.report.studies import study_figure
from locater.studies.page import documents, keep, page
from locater.studies.study import points_of
from locater.studies.sweep.folder import open_sweep

ROOT = Path(__file__).parents[1]
ROWS, PAGE = ROOT / "runs" / "studies", ROOT / "docs" / "studies.md"


def take_over(folder: Path) -> None:
    sweep = open_sweep(folder)
    name = sweep.kind.removeprefix("study ")
    keep(sweep, ROWS / f"{name}.json", quick=list(sweep.points) == points_of(name, quick=True))


def write_page() -> None:
    pictures = PAGE.with_suffix("")
    for name, found in documents(ROWS).items():
        if found["rows"]:
            figures.save(study_figure(found), pictures / f"{name}.png")
    PAGE.write_text(page(ROWS, pictures=pictures.name), encoding="utf-8")


if __name__ == "__main__":
    for folder in sys.argv[2:] if sys.argv[1:2] == ["keep"] else ():
        take_over(Path(folder))
    write_page()
