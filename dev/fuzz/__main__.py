"""Spoil files of every format and see that each is read right or refused in a sentence.

    python dev/fuzz --cases 2000 --out FOLDER          every format, so many cases each; goes on where it was stopped
    python dev/fuzz --minutes 10                       as many as fit
    python dev/fuzz --case safetensors/1234            one of them again, with what was done and what came of it

A case is the name of a format and a number: the same everywhere. Exit 1 if anything failed.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CHUNK = 1000
PATIENCE = 3600  # seconds of the wall clock for a stretch: processor time is limited inside
NAMES = ("safetensors", "sharded", "torch", "legacy", "gguf", "distributed", "adapter", "layout", "quantised")
NAMES += ("families", "report", "run", "tokens", "arguments")


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE.parents[1] / "src")}


def run_stretch(name: str, first: int, last: int, seeds: Path, scratch: Path) -> dict[str, Any]:
    """In a process of its own; where that dies or does not end, the case under way is to blame and the rest go on."""
    import campaign  # once, with the settings of `main`: the processes are forked from this one and start at once

    scratch.mkdir(parents=True, exist_ok=True)
    given = (name, first, last, seeds, scratch)
    process = multiprocessing.get_context("fork").Process(target=campaign.main, args=given)
    process.start()
    process.join(PATIENCE)
    if process.exitcode == 0:
        return json.loads((scratch / "found.json").read_text())
    reason = f"no end after {PATIENCE} s" if process.exitcode is None else f"the process ended with {process.exitcode}"
    process.kill()
    process.join()
    at = int((scratch / "progress").read_text()) if (scratch / "progress").exists() else first
    blamed = {"counts": {"failed": 1}, "failures": [{"case": f"{name}/{at}", "what": reason, "told": ""}], "peak": 0}
    parts = [run_stretch(name, *span, seeds, scratch) for span in ((first, at), (at + 1, last)) if span[0] < span[1]]
    return joined([blamed, *parts])


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part["counts"])
    failures = [failure for part in parts for failure in part["failures"]]
    return {"counts": counts, "failures": failures, "peak": max((part["peak"] for part in parts), default=0)}


def write_seeds(folder: Path, names: list[str]) -> None:
    needed = {"report": "documents", "arguments": "safetensors"}
    wanted = [needed.get(name, name) for name in names if name != "tokens"]
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(HERE / "seeds.py"), str(folder), *wanted]
    subprocess.run(command, check=True, env=environment() | {"LOCATER_CACHE": str(folder / ".cache")})


def stretches(names: list[str], first: int, cases: int) -> list[tuple[str, int, int]]:
    """All formats in turn, so that a campaign cut short has seen every one."""
    last = first + cases
    return [(name, start, min(start + CHUNK, last)) for start in range(first, last, CHUNK) for name in names]


def campaign(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Results by format; every finished stretch is a file, and is not run again."""
    names, deadline = options.formats, time.monotonic() + 60 * options.minutes
    write_seeds(folder / "seeds", names)
    scratch = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    try:
        for name, first, last in stretches(names, options.first, options.cases):
            kept = folder / "stretches" / f"{name}-{first:07d}-{last:07d}.json"
            if not kept.exists():
                if time.monotonic() > deadline:
                    break
                part = run_stretch(name, first, last, folder / "seeds", scratch / str(os.getpid()))
                kept.parent.mkdir(exist_ok=True)
                kept.with_suffix(".part").write_text(json.dumps(part))
                kept.with_suffix(".part").rename(kept)
                tell(name, last, part)
            found[name].append(json.loads(kept.read_text()))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return {name: joined(parts) for name, parts in found.items()}


def tell(name: str, last: int, part: dict[str, Any]) -> None:
    print(f"{name} to {last}: {dict(part['counts'])}", file=sys.stderr, flush=True)


def summary(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Counts by format, and each signature with how often it came and its first case."""
    failures = [failure for part in found.values() for failure in part["failures"]]
    often = Counter(failure["what"] for failure in failures)
    first = {failure["what"]: failure["case"] for failure in reversed(failures)}
    return {
        "cases": sum(sum(part["counts"].values()) for part in found.values()),
        "formats": {name: dict(part["counts"]) | {"peak_megabytes": part["peak"]} for name, part in found.items()},
        "signatures": [{"what": what, "times": times, "case": first[what]} for what, times in often.most_common()],
    }


def again(case: str, folder: Path) -> None:
    """One case, with all that it says."""
    name, _, number = case.partition("/")
    write_seeds(folder / "seeds", [name])
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(run_stretch(name, int(number), int(number) + 1, folder / "seeds", Path(scratch)), indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10**9, help="of each format")
    parser.add_argument("--first", type=int, default=0, help="number of the first case: cases that no run has seen")
    parser.add_argument("--minutes", type=float, default=10**6)
    parser.add_argument("--formats", nargs="+", default=list(NAMES), choices=NAMES)
    parser.add_argument("--out", type=Path, help="kept results; without it a temporary folder")
    parser.add_argument("--case", help="FORMAT/NUMBER")
    options = parser.parse_args()
    os.environ |= environment()
    sys.path.insert(0, str(HERE.parents[1] / "src"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        if options.case:
            again(options.case, folder)
            return 0
        found = summary(campaign(options, folder))
    print(json.dumps(found, indent=1))
    return 1 if found["signatures"] else 0


if __name__ == "__main__":
    sys.exit(main())
