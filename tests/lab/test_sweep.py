"""Sweeps: rows are the same whoever measures them, however often workers and the driver are killed."""

import json
import os
import signal
import string
import subprocess
import sys
import time
from itertools import takewhile
from pathlib import Path

import pytest
import yaml

from command import locater
from locater.errors import BadArguments, Refusal
from locater_lab.cli.sweep import parse_grid
from locater_lab.studies.sweep.engines import local, slurm_script
from locater_lab.studies.sweep.folder import MOST_DEATHS, create, open_sweep
from training_cases import TINY, write_text

POINTS = [{"number": number} for number in range(5)]


def double(point, place):
    if point["number"] == 3:
        raise ValueError("three is refused")
    return {"twice": 2 * point["number"], "place": place.is_dir()}


def test_a_failure_is_a_row_and_not_the_end(tmp_path):
    sweep = create(tmp_path / "s", "train", POINTS)
    local(sweep, double, jobs=1)
    rows = sweep.rows()
    assert [row["point"]["number"] for row in rows] == [0, 1, 2, 3, 4] and not sweep.missing()
    assert rows[4]["result"] == {"twice": 8, "place": True}
    assert rows[3]["error"].startswith("ValueError: three is refused (test_sweep.py:")
    assert sweep.retry() == 1 and sweep.missing() == [3]
    assert create(tmp_path / "s", "train", POINTS).missing() == [3]
    with pytest.raises(Refusal, match="the points that .* was begun with, got others"):
        create(tmp_path / "s", "train", POINTS[:2])
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(Refusal, match="a new or empty folder"):
        create(tmp_path / "taken", "train", POINTS)
    with pytest.raises(Refusal, match="the folder of a sweep"):
        open_sweep(tmp_path)


def test_a_point_in_other_hands_is_left_alone(tmp_path):
    sweep = create(tmp_path / "s", "train", POINTS)

    def nested(point, place):
        if point["number"] == 0:  # another worker comes by while the first point is being measured
            assert open_sweep(sweep.folder).work(double) == 4
        return "mine"

    assert sweep.work(nested) == 1
    assert [row.get("result") for row in sweep.rows()][0] == "mine" and len(sweep.rows()) == 5


def test_an_interrupt_leaves_no_row_and_counts_as_no_death(tmp_path):
    sweep = create(tmp_path / "s", "train", POINTS[:1])

    def stop(point, place):
        raise KeyboardInterrupt

    for _ in range(MOST_DEATHS + 1):
        with pytest.raises(KeyboardInterrupt):
            sweep.work(stop)
    assert sweep.missing() == [0]
    assert sweep.work(double) == 1 and sweep.rows()[0]["result"]["twice"] == 0


def test_a_point_that_kills_its_workers_becomes_a_failure(tmp_path):
    sweep = create(tmp_path / "s", "train", POINTS[:1])
    for _ in range(MOST_DEATHS):
        if (child := os.fork()) == 0:
            sweep.work(lambda point, place: os.kill(os.getpid(), signal.SIGKILL))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        assert sweep.missing() == [0]
    assert sweep.work(double) == 1
    assert sweep.rows()[0]["error"] == f"the process that measured it died {MOST_DEATHS} times"


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """A file with a grid of four tiny runs, and their rows from one process that nobody disturbed."""
    folder = tmp_path_factory.mktemp("sweep")
    options = TINY | {"data": str(write_text(folder)), "steps": 30, "validate_every": 10}
    options |= {"strength": [0, 0.01], "seed": [0, 1]}
    file = folder / "grid.yaml"
    file.write_text(yaml.safe_dump({"preset": "paper", "grid": options}))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("LOCATER_CACHE", str(folder / "cache"))
        done = locater("sweep", file, "--out", folder / "plain", "--json", folder / "plain.json")
        assert done.code == 0 and "4 done, 0 failed, 0 missing" in done.out, done.err
        yield file, json.loads((folder / "plain.json").read_text())["rows"]


def test_the_rows_of_a_sweep_are_runs(grid, tmp_path):
    file, rows = grid
    names = [row["point"]["name"] for row in rows]
    assert names == [f"strength={strength}-seed{seed}" for seed in (0, 1) for strength in ("0", "0.01")]
    compared = locater("runs", file.parent / "plain" / "runs", "--against", "strength=0")
    assert compared.code == 0 and "4 runs in 2 arms" in compared.out


def start(*arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-m", "locater.cli", "sweep", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def wait_for(condition, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds workers by /proc")
def test_kill_9_of_a_worker_and_of_the_driver_loses_no_row(grid, tmp_path):
    """Two workers; one is killed in its first run, then the driver, whose workers are killed after it; then resumed."""
    file, expected = grid
    folder = tmp_path / "killed"
    driver = start(file, "--out", folder, "--jobs", 2)
    wait_for(lambda: any((folder / "runs").glob("*/metrics.jsonl")))
    workers = children(driver.pid)
    os.kill(workers[0], signal.SIGKILL)
    wait_for(lambda: any(folder.glob("rows/[!.]*.json")))
    driver.send_signal(signal.SIGSTOP)  # so that it starts no other worker between the look and the kill
    workers = children(driver.pid)
    driver.kill()
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    driver.wait()
    wait_for(lambda: not any(map(is_running, workers)))  # a large process holds its lock until it is gone
    before = {path.name: path.read_bytes() for path in folder.glob("rows/[!.]*.json")}
    assert before and all(json.loads(row) for row in before.values())
    resumed = locater("sweep", "--resume", folder, "--json", tmp_path / "rows.json")
    assert resumed.code == 0, resumed.err
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == expected
    assert all((folder / "rows" / name).read_bytes() == row for name, row in before.items())


def test_a_slurm_array_that_is_killed_and_requeued_ends_with_the_same_rows(grid, tmp_path):
    """A stand-in for sbatch: one task is asked to stop (SIGTERM), one is killed (SIGKILL), and both are requeued."""
    file, expected = grid
    folder = tmp_path / "array job"
    emitted = locater("sweep", file, "--out", folder, "--emit", "slurm")
    script = folder / "array.sh"
    assert emitted.code == 0 and str(script) in emitted.out.replace("\n", "")
    assert "#SBATCH --array=0-3" in script.read_text() and "--requeue" in script.read_text()
    for number, stop in ((0, signal.SIGTERM), (3, signal.SIGKILL)):
        environment = os.environ | {"SLURM_ARRAY_TASK_ID": str(number), "SLURM_CPUS_PER_TASK": "1"}
        task = subprocess.Popen(["bash", str(script)], env=environment)
        metrics = folder / "runs" / expected[number]["point"]["name"] / "metrics.jsonl"
        wait_for(lambda metrics=metrics: metrics.exists())
        task.send_signal(stop)
        assert task.wait(240) in (128 + signal.SIGTERM, -stop, 0)
        again = subprocess.Popen(["bash", str(script)], env=environment)
        assert again.wait(240) == 0
    assert open_sweep(folder).rows() == [expected[0], expected[3]]
    assert locater("sweep", "--resume", folder, "--task", 9).code == 2


HOSTILE = [
    "a\ntouch PWNED\n",
    "$(touch PWNED)",
    "`touch PWNED`",
    "'; touch PWNED #",
    '"; touch PWNED #',
    "& touch PWNED &",
]
HOSTILE += ["a b", "-n", "%a \\", "\\\ntouch PWNED", "${IFS}", "*", "\r\n#SBATCH --wrap=touch", "{name}", "κ\t"]


@pytest.mark.parametrize("name", HOSTILE)
def test_no_name_of_a_folder_becomes_a_command(name, tmp_path, monkeypatch):
    """Bash runs the script, in place of sbatch; a stand-in for Python, in a folder of that name, notes its words."""
    monkeypatch.chdir(tmp_path)
    python = tmp_path / name / "python"
    python.parent.mkdir()
    python.write_text('#!/usr/bin/env bash\nprintf "%s\\0" "$@" >"${0%/*}/said"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    folder = tmp_path / "sweeps" / name
    sweep = create(folder, "train", POINTS)
    slurm_script(sweep, folder / "array.sh")
    lines = (folder / "array.sh").read_bytes().decode().split("\n")
    # sbatch reads as far as the first command.
    asked = [line for line in takewhile(lambda line: line.startswith("#"), lines) if line.startswith("#SBATCH")]
    assert len(asked) == 4 and all(set(line) <= set(string.ascii_letters + string.digits + "#-._=@ ") for line in asked)
    done = subprocess.run(["bash", folder / "array.sh"], env=os.environ | {"SLURM_ARRAY_TASK_ID": "3"})
    assert done.returncode == 0
    words = (python.parent / "said").read_bytes().decode().split("\0")[:-1]
    assert words == ["-m", "locater.cli", "sweep", "--resume", str(folder), "--task", "3"]
    assert {path.name for path in tmp_path.iterdir()} == {name, "sweeps"} and (folder / "slurm-3.log").exists()
    assert list((tmp_path / "sweeps").iterdir()) == [folder]


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "..", ".", "", "a\0", "~/x", 3, None, ["x"]])
@pytest.mark.parametrize("verb", ["sweep", "report"])
def test_a_point_has_its_folder_inside_the_sweeps(verb, name, tmp_path):
    folder = tmp_path / "a" / "sweep"
    sweep = create(folder, "train", [{"name": "inside", "arm": "a", "seed": 0}])
    document = json.loads((folder / "sweep.json").read_text())
    document["points"][0]["name"] = name
    (folder / "sweep.json").write_text(json.dumps(document))
    before = sorted(tmp_path.rglob("*"))
    arguments = ["sweep", "--resume", folder] if verb == "sweep" else ["report", folder, "-o", tmp_path / "page.html"]
    refused = locater(*arguments)
    assert refused.code == 1 and "names of files next to" in refused.err and sorted(tmp_path.rglob("*")) == before
    with pytest.raises(Refusal, match="names of files next to"):
        create(tmp_path / "new", "train", document["points"])
    twice = [dict(sweep.points[0], seed=seed) for seed in (0, 1)]
    with pytest.raises(Refusal, match="another name for each point"):
        create(tmp_path / "new", "train", twice)


def test_a_row_of_another_point_is_refused(tmp_path):
    sweep = create(tmp_path / "s", "train", POINTS[:2])
    local(sweep, double, jobs=1)
    first, second = (sweep.path(point) for point in sweep.points)
    first.write_bytes(second.read_bytes())
    with pytest.raises(Refusal, match="the result or the error of its point"):
        sweep.rows()


def test_a_grid_is_read_and_checked(tmp_path):
    assert parse_grid("strength=0,1e-2 mean=free,2 seed=0") == {
        "strength": [0, 0.01],
        "mean": ["free", "2"],
        "seed": [0],
    }
    for text in ("strength", "=1", "batch=1 batch=2", "bpe-size=1 bpe-size=2"):
        with pytest.raises(BadArguments, match="NAME=VALUE"):
            parse_grid(text)
    refused = locater("sweep", "--grid", "strenght=1", "--out", tmp_path / "s")
    assert refused.code == 2 and "no option called 'strenght'" in refused.err and not (tmp_path / "s").exists()
    assert locater("sweep", "--grid", "batch=0", "--out", tmp_path / "s").code == 1
    assert locater("sweep", "--grid", "batch=1").code == 2
    assert locater("sweep", "--out", tmp_path / "s").code == 2
    assert locater("sweep", "--grid", "batch=1", "--out", tmp_path / "s", "--emit", "pbs").code == 2
    assert locater("sweep", "--grid", "batch=1", "--out", tmp_path / "s", "--preset", "no").code == 2
    (tmp_path / "no.yaml").write_text("[1")
    assert locater("sweep", tmp_path / "no.yaml", "--out", tmp_path / "s").code == 1
    (tmp_path / "no.yaml").write_text("preset: paper")
    assert "a `grid` of options" in locater("sweep", tmp_path / "no.yaml", "--out", tmp_path / "s").err
