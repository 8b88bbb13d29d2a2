"""kill -9 at file events of training, sweeps and reports, and at any moment: all that is there is whole.

An audit hook counts the files that a process opens for writing, renames and removes in its folder, and ends it at one.
(Random moments of training: test_training_killed.py.)
"""

import json
import multiprocessing
import os
import random
import signal
import sys
import time

import pytest
import torch

from training_cases import STATEFUL, assert_same_run, tiny, write_text

EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree")
CHANGED = dict(steps=8, save_every=1, validate_every=3, **STATEFUL)
POINTS = [{"x": number} for number in range(6)]


def end_at(number: int, folder) -> list[int]:
    """Count the file events in a folder from now on; at that one the process is killed."""
    seen = [0]

    def note(event: str, arguments: tuple) -> None:
        if event not in EVENTS or not str(arguments[0]).startswith(str(folder)):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        seen[0] += 1
        if seen[0] == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(note)
    return seen


def train(folder) -> None:
    from locater_lab.train import run

    if (folder / "config.json").exists():
        run.resume(folder, say=lambda sentence: None)
    else:
        run.start(tiny(folder.parent / "text.txt", **CHANGED), folder, say=lambda sentence: None)


def measured(point, place) -> dict:
    (place / "note").write_text("x")
    time.sleep(0.01)  # moments between files are hit, too
    return {"square": point["x"] ** 2}


def sweep(folder) -> None:
    from locater_lab.studies.sweep.folder import create

    create(folder, "test", POINTS).work(measured)


def report(folder) -> None:
    from locater.cli import program

    os.environ["SOURCE_DATE_EPOCH"] = "0"
    folder.mkdir(exist_ok=True)
    sys.argv = ["locater", "report", str(folder.parent / "scan.json"), "-o", str(folder / "page.html")]
    program.app(standalone_mode=False)


JOBS = {"train": train, "sweep": sweep, "report": report}


def child(job: str, folder, number: int) -> None:
    os.environ["LOCATER_CACHE"] = str(folder.parent / "cache")
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115, PTH123
    torch.set_num_threads(1)
    seen = end_at(number, folder)
    folder.with_suffix(".begun").touch()
    begun = time.monotonic()
    JOBS[job](folder)
    folder.with_suffix(".events").write_text(str(seen[0]))
    folder.with_suffix(".seconds").write_text(str(time.monotonic() - begun))


def run(job: str, folder, number: int = 0, *, seconds: float | None = None) -> int:
    """The exit code; `number` 0 is never reached, and without `seconds` nobody ends it from outside."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["locater_lab.train.run", "locater.cli.program"])
    folder.with_suffix(".begun").unlink(missing_ok=True)
    started = context.Process(target=child, args=(job, folder, number))
    started.start()
    if seconds is not None:
        while not folder.with_suffix(".begun").exists():
            time.sleep(0.001)
        time.sleep(seconds)
        started.kill()
    started.join()
    assert started.exitcode in (0, -9)
    return started.exitcode


def same_sweep(found, expected) -> None:
    rows = [sorted(path.read_text() for path in (one / "rows").glob("*.json")) for one in (found, expected)]
    assert len(rows[0]) == len(POINTS) and rows[0] == rows[1]
    assert not any("error" in json.loads(row) for row in rows[0])


def same_page(found, expected) -> None:
    pages = [(one / "page.html").read_text().replace(f"{one.name}/page.html", "") for one in (found, expected)]
    assert pages[0] == pages[1] and [path.name for path in found.iterdir()] == ["page.html"]


SAME = {"train": assert_same_run, "sweep": same_sweep, "report": same_page}


def prepare(job: str, folder) -> None:
    write_text(folder)
    if job == "report":
        from test_damaged_files import write

        from locater.records import write_json
        from locater.scanning.scan import scan

        write_json(scan(write(folder / "model"), length=24).to_json(), folder / "scan.json")


def check(job: str, folder, *, kills: int) -> int:
    """So many kills at events spread over the whole job; how many processes were killed."""
    prepare(job, folder)
    assert run(job, folder / "whole") == 0
    events = int((folder / "whole.events").read_text())
    draw, killed = random.Random(0), 0
    for number in range(kills):
        place = folder / f"killed-{number}"
        killed += run(job, place, draw.randint(1, events)) == -9
        assert run(job, place) == 0
        SAME[job](place, folder / "whole")
        print(
            f"{job}: {killed} processes killed at one of {events} file events, all resumed equal to the bit", flush=True
        )
    return killed


def check_moments(job: str, folder, *, kills: int) -> int:
    """The same at moments spread evenly at random over the time that the whole job took."""
    prepare(job, folder)
    assert run(job, folder / "first") == run(job, folder / "whole") == 0
    duration, draw, killed = float((folder / "whole.seconds").read_text()), random.Random(1), 0
    for number in range(kills):
        place = folder / f"killed-{number}"
        killed += run(job, place, seconds=draw.uniform(0, duration)) == -9
        assert run(job, place) == 0
        SAME[job](place, folder / "whole")
    return killed


@pytest.mark.parametrize("job", ["sweep", "report"])
def test_killed_at_a_file_event(job, tmp_path):
    assert check(job, tmp_path, kills=2) == 2


@pytest.mark.slow
@pytest.mark.parametrize("job, kills", [("train", 60), ("sweep", 20), ("report", 20)])
def test_killed_at_many_file_events(job, kills, tmp_path):
    assert check(job, tmp_path, kills=kills) >= 0.9 * kills


@pytest.mark.slow
@pytest.mark.parametrize("job", ["sweep", "report"])
def test_killed_at_many_moments(job, tmp_path):
    assert check_moments(job, tmp_path, kills=40) >= 20, "too many had ended before their kill"
