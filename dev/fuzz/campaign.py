"""One worker: cases of a format in order, each with a limit of processor time and a look at its peak of memory."""

import functools
import json
import os
import random
import resource
import shutil
import signal
import sys
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import formats

from locater.errors import Refusal

SECONDS, MEGABYTES, ADDRESS_SPACE = 10, 1000, 12 * 2**30


class Hang(BaseException):
    """Beneath what any code of the package would catch."""


def signature(cause: BaseException) -> str:
    """The kind of the error and the innermost line of the package that it came through."""
    frames = traceback.extract_tb(cause.__traceback__)
    ours = [frame for frame in frames if "/src/locater" in frame.filename] or frames[-1:]
    place = f"{ours[-1].filename.rpartition('/src/')[2]}:{ours[-1].name}:{ours[-1].lineno}" if ours else "?"
    return f"{type(cause).__name__} at {place}: {str(cause)[:100]!r}"


def peak_megabytes() -> int:
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


@functools.cache
def whole(name: str) -> Any:
    """The result of the seed as it is."""
    one = formats.FORMATS[name]
    if name in ("quantised", "families"):
        rows = functools.cache(lambda model: formats.rows_of(formats.scan(formats.SEEDS / name / model)))
        return {"seed": name, "rows": rows}
    with_folder = Path(os.environ["FUZZ_SCRATCH"]) / f"whole-{name}"
    prepare(with_folder, one.seed)
    if name == "report":
        (with_folder / "chosen").write_text("scan.json")
    return one.run(with_folder)


def prepare(folder: Path, seed: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(formats.SEEDS / seed, folder) if seed else folder.mkdir(parents=True)


def attempt(name: str, number: int, scratch: Path) -> tuple[str, str]:
    """The outcome of one case (`read`, `refused`, or what is wrong), and what was done to the seed."""
    one, folder = formats.FORMATS[name], scratch / "case"
    prepare(folder, one.seed)
    told = one.spoil(folder, random.Random(f"{name} {number}"))
    reference = whole(name)
    forget_peak()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        result = one.run(folder)
        signal.setitimer(signal.ITIMER_PROF, 0)
        outcome = judge(one, folder, result, reference)
    except Refusal as cause:
        outcome = "refused" if cause.__class__.__name__ != "Unforeseen" else signature(cause.__cause__ or cause)
        outcome = outcome if len(str(cause)) < 20_000 else "a refusal of more than 20,000 letters"
    except (Hang, Exception) as cause:
        outcome = signature(cause)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if (peak := peak_megabytes()) > MEGABYTES:
        outcome = f"{peak} MB"
    return outcome, told


def judge(one: formats.Format, folder: Path, result: Any, reference: Any) -> str:
    try:
        complaint = one.check(folder, result, reference)
    except Exception as cause:
        complaint = f"an independent reading fails: {type(cause).__name__} {str(cause)[:80]}"
    return f"wrong: {complaint}" if complaint else "read"


def work(name: str, numbers: range, scratch: Path, progress: Path) -> dict[str, Any]:
    """All cases of a stretch; the one under way stands in `progress`, for a parent that must end this process."""
    counts, failures = Counter(), []
    for number in numbers:
        progress.write_text(str(number))
        outcome, told = attempt(name, number, scratch)
        counts[outcome if outcome in ("read", "refused") else "failed"] += 1
        if outcome not in ("read", "refused"):
            failures.append({"case": f"{name}/{number}", "what": outcome, "told": told[:200]})
    return {"counts": counts, "failures": failures, "peak": peak_megabytes()}


def main(name: str, first: int, last: int, seeds: Path, scratch: Path) -> None:
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    os.environ |= {
        "FUZZ_SCRATCH": str(scratch),
        "COLUMNS": "80",
        "TERM": "dumb",
        "LOCATER_CACHE": str(scratch / "cache"),
    }
    formats.SEEDS = seeds

    def give_up(*_: object) -> None:
        raise Hang(f"more than {SECONDS} s of processor time")

    signal.signal(signal.SIGPROF, give_up)
    parts = [work(one, range(first, last), scratch, scratch / "progress") for one in name.split(",")]
    counts = sum((part["counts"] for part in parts), Counter())
    failures = [failure for part in parts for failure in part["failures"]]
    found = {"counts": counts, "failures": failures, "peak": max(part["peak"] for part in parts)}
    (scratch / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
    print((Path(sys.argv[5]) / "found.json").read_text())
