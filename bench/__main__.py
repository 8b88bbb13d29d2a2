"""All benchmarks in one run: `python bench [SUBJECT …] [--quick]`; what they said is gathered in bench/RESULTS.md.

Every subject is a file beside this one, a process of its own. What it said is kept in build/bench, so that subjects can
be measured one by one while the machine is free; a page is made of all that there are. Exits 1 if a bound was missed.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
KEPT = HERE.parent / "build" / "bench"
REHEARSED = KEPT / "rehearsal"
# In the order of the page, with the words of its headings and what makes a rehearsal short.
SUBJECTS: dict[str, tuple[str, list[str]]] = {
    "beside": ("Spectra of all heads, beside other tools", ["--quick"]),
    "growth": ("How cost grows", ["--quick"]),
    "scan": ("A scan against its bounds", []),
    "theory": ("The theory against its bounds", []),
    "stabilisers": ("What stabilisers add to a training step", ["--quick", "--rounds", "1"]),
    "monitor": ("What watching costs", []),
    "training": ("Training beside a bare loop and the Hugging Face Trainer", ["--rounds", "1"]),
    "sweep": ("Two processes of a sweep against one", ["--points", "2", "--steps", "20"]),
    "report": ("Pages", []),
    "prediction": ("Prediction", []),
}
PREAMBLE = """\
# Measured

Written by `make bench`: one run of every file in `bench/`, each in a process of its own, other tools in environments of
their own, on the same inputs and in alternating order. In the first tables a ratio above 1 is a tool that takes longer
than locater; what locater is slower at stands there too, and bounds that were missed come first.

"""


def run(name: str, options: list[str], folder: Path) -> None:
    """One subject; what it says is shown and kept."""
    start = time.monotonic()
    print(f"== {name}", flush=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "120"}
    command = [sys.executable, HERE / f"{name}.py", *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, timeout=1800)
    print(done.stdout, flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    record = dict(output=done.stdout, code=done.returncode, seconds=time.monotonic() - start, options=options)
    record |= dict(commit=commit.stdout.strip(), date=time.strftime("%Y-%m-%d"), load=os.getloadavg()[0])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record), encoding="utf-8")


def verdicts(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(("PASS", "FAIL"))]


def section(name: str, record: dict) -> str:
    """Tables as they are, verdicts as a list, the rest as it was printed."""
    lines, judged = record["output"].splitlines(), verdicts(record["output"])
    tables = [line for line in lines if line.startswith("|")]
    rest = [line for line in lines if line.strip() and line not in tables and line not in judged]
    told = f"`python bench/{name}.py{''.join(f' {option}' for option in record['options'])}`, {record['date']}, commit "
    told += f"{record['commit']}, {record['seconds']:.0f} s, load {record['load']:.1f} at its end."
    parts = [f"## {SUBJECTS[name][0]}", told]
    if record["code"] and not judged:
        parts.append(f"It ended with code {record['code']}.")
    if tables:
        parts.append(separated(tables))
    if judged:
        parts.append(
            "\n".join(f"- {'met' if line[:4] == 'PASS' else '**missed**'}: {line[4:].strip()}" for line in judged)
        )
    if rest:
        parts.append("```text\n" + "\n".join(rest) + "\n```")
    return "\n\n".join(parts)


def separated(rows: list[str]) -> str:
    """An empty line before each heading, which is the row above dashes."""
    headings = {number - 1 for number, row in enumerate(rows) if set(row) <= set("|-")}
    return "\n".join(("\n" if number in headings and number else "") + row for number, row in enumerate(rows))


def page(folder: Path) -> str:
    records = {name: json.loads(path.read_text()) for name in SUBJECTS if (path := folder / f"{name}.json").exists()}
    judged = [line for record in records.values() for line in verdicts(record["output"])]
    missed = [f"- **missed**: {line[4:].strip()}" for line in judged if line.startswith("FAIL")]
    absent = [name for name in SUBJECTS if name not in records]
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
    machine += ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "numpy"))
    count = f"{len(judged) - len(missed)} of {len(judged)} bounds met."
    parts = [PREAMBLE + machine + ".", "## Bounds\n\n" + "\n".join([count, "", *missed]).rstrip()]
    if absent:
        parts.append(f"Not measured in this run: {', '.join(absent)}.")
    return "\n\n".join([*parts, *(section(name, record) for name, record in records.items())]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subjects", nargs="*", choices=[[], *SUBJECTS], metavar="SUBJECT", help=", ".join(SUBJECTS))
    parser.add_argument("--quick", action="store_true", help="a rehearsal with small settings, kept apart")
    parser.add_argument("--page", action="store_true", help="run nothing, make the page of what was kept")
    chosen = parser.parse_args()
    folder = REHEARSED if chosen.quick else KEPT
    for name in [] if chosen.page else chosen.subjects or SUBJECTS:
        run(name, SUBJECTS[name][1] if chosen.quick else [], folder)
    target = folder / "RESULTS.md" if chosen.quick else HERE / "RESULTS.md"
    target.write_text(page(folder), encoding="utf-8")
    print(f"page: {target}")
    return int("**missed**" in target.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
