"""The page of studies: `python runs/studies.py` writes docs/studies.md and its figures from the rows in runs/studies.

`python runs/studies.py keep FOLDER…` first takes over the rows of finished studies (`locater study NAME --out FOLDER`).
`python runs/studies.py time [NAME…]` first measures how long `locater study NAME --quick` takes, by default of all.
The tables of docs/evidence.md are written from runs/studies/real-data.json (`locater study real-data --json`), and
nothing else is by `python runs/studies.py evidence`.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from locater.records import write_json
from locater.report import figures
from locater.report.curves import study_figure
from locater_lab.studies.page import TIMES, documents, keep_rows, quick_times, study_page
from locater_lab.studies.real_data import real_data_page as evidence_tables
from locater_lab.studies.study import STUDIES, points_of
from locater_lab.studies.sweep.folder import open_sweep
from locater_lab.studies.words import reference, unsaid_table
from locater_lab.studies.words import words_page as words_tables

sys.path.insert(0, str(Path(__file__).parent))
from settled_rows import outcomes  # noqa: E402
from settled_said import advice  # noqa: E402

ROOT = Path(__file__).parents[1]
ROWS, PAGE = ROOT / "runs" / "studies", ROOT / "docs" / "studies.md"
WORDS_BEGIN, WORDS_END = "<!-- words -->\n", "<!-- end of words -->"
UNSAID_BEGIN, UNSAID_END = "<!-- unsaid -->\n", "<!-- end of unsaid -->"
REFERENCE = ROOT / "src" / "locater" / "reference.json"
EVIDENCE, BEGIN, END = ROOT / "docs" / "evidence.md", "<!-- tables -->\n", "<!-- end of tables -->"


def take_over(folder: Path) -> None:
    sweep = open_sweep(folder)
    name = sweep.kind.removeprefix("study ")
    quick = list(sweep.points) == points_of(name, quick=True)
    keep_rows(sweep.kind, sweep.rows(), ROWS / f"{name}.json", num_points=len(sweep.points), quick=quick)


def measure_quick(name: str) -> None:
    """One thread, one process; the processor's time is the study's own, the clock's is of everything beside it too."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "locater.cli", "study", name, "--quick", "--out", str(Path(folder) / "study")]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    own = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    found = {name: {"processor_seconds": round(own, 1), "seconds": round(seconds, 1)}}
    write_json(quick_times(ROWS) | found, ROWS / TIMES)


def write_page() -> None:
    pictures = PAGE.with_suffix("")
    for name, found in documents(ROWS).items():
        if found["rows"]:
            figures.save(study_figure(found), pictures / f"{name}.png")
    found = outcomes()
    advised = advice(found["end"], found["longer"])
    PAGE.write_text(study_page(ROWS, pictures=pictures.name, advice=advised), encoding="utf-8")


def write_evidence() -> None:
    """The tables alone: what is written around them stays."""
    rows = json.loads((ROWS / "real-data.json").read_text(encoding="utf-8"))["models"]
    before, rest = EVIDENCE.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    text = f"{before}{BEGIN}\n{evidence_tables(rows)}\n\n{END}{after}"
    before, rest = text.split(WORDS_BEGIN)
    after = rest.split(WORDS_END)[1]
    kept = json.loads((ROWS / "words.json").read_text(encoding="utf-8"))
    text = f"{before}{WORDS_BEGIN}\n{words_tables(kept)}\n\n{WORDS_END}{after}"
    before, rest = text.split(UNSAID_BEGIN)
    after = rest.split(UNSAID_END)[1]
    unsaid = json.loads((ROWS / "words_unsaid.json").read_text(encoding="utf-8"))
    text = f"{before}{UNSAID_BEGIN}\n{unsaid_table(unsaid)}\n\n{UNSAID_END}{after}"
    EVIDENCE.write_text(text, encoding="utf-8")
    write_json(reference(kept), REFERENCE)


if __name__ == "__main__" and sys.argv[1:] == ["evidence"]:
    write_evidence()
elif __name__ == "__main__":
    for folder in sys.argv[2:] if sys.argv[1:2] == ["keep"] else ():
        take_over(Path(folder))
    for name in (sys.argv[2:] or STUDIES) if sys.argv[1:2] == ["time"] else ():
        measure_quick(name)
    write_page()
    write_evidence()
