"""Sweeps on Ray: the same rows on a real cluster of this machine, whoever is killed; and, quickly, on a stand-in."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from test_sweep import children, grid, start, wait_for  # noqa: F401

from command import locater
from locater.errors import BadArguments, Refusal
from locater_lab.studies.sweep import on_ray
from locater_lab.studies.sweep.folder import create, open_sweep
from training_cases import TINY, write_text


class Crash(Exception):
    pass


class Failed(Exception):
    pass


class StandIn:
    """What the engine uses of Ray: tasks run when they are waited for; some of them are killed before they begin."""

    exceptions = SimpleNamespace(WorkerCrashedError=Crash, RayTaskError=Failed)

    def __init__(self, crashes: list[int], failure: str = "") -> None:
        self.crashes, self.failure, self.measured, self.is_up = crashes, failure, [], True

    def remote(self, **options):
        assert options == {"num_cpus": 1, "max_retries": 0}
        return lambda function: SimpleNamespace(options=lambda name: SimpleNamespace(remote=lambda *a: (function, a)))

    def wait(self, waiting, timeout):
        return waiting[:1], waiting[1:]

    def get(self, one):
        function, (folder, number) = one
        if self.failure:
            raise Failed(self.failure)
        if number in self.crashes:
            self.crashes.remove(number)
            raise Crash
        self.measured.append(number)
        open_sweep(Path(folder)).work(lambda point, place: point["number"] * 2, only=[number])

    def shutdown(self):
        self.is_up = False


def on(stand_in, sweep, monkeypatch) -> list[tuple[int, int]]:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(on_ray, "_connected", lambda engine, jobs: stand_in)
    on_ray.measure_on_ray(sweep, "ray", jobs=2, tell=lambda done, total: told.append((done, total)))
    return told


def test_a_task_whose_worker_dies_is_begun_again(tmp_path, monkeypatch):
    sweep = create(tmp_path / "s", "train", [{"number": number} for number in range(4)])
    stand_in = StandIn([1, 1, 3])
    told = on(stand_in, sweep, monkeypatch)
    assert [row["result"] for row in sweep.rows()] == [0, 2, 4, 6] and told[-1] == (4, 4)
    assert sorted(stand_in.measured) == [0, 1, 2, 3] and not stand_in.is_up


def test_a_cluster_that_cannot_measure_is_said_and_left(tmp_path, monkeypatch):
    sweep = create(tmp_path / "s", "train", [{"number": 0}])
    stand_in = StandIn([], "Traceback\nModuleNotFoundError: No module named 'locater'")
    with pytest.raises(Refusal, match="No module named 'locater'.*install locater on every node"):
        on(stand_in, sweep, monkeypatch)
    assert not stand_in.is_up and sweep.missing() == [0]


def test_engines_that_are_none_are_refused(tmp_path, monkeypatch):
    for engine in ("dask", "ray://", "ray:x"):
        with pytest.raises(BadArguments, match="--on expects ray"):
            on_ray.address_of(engine)
    assert locater("sweep", "--grid", "batch=1", "--out", tmp_path / "s", "--asha").code == 2
    monkeypatch.setitem(sys.modules, "ray", None)
    found = locater("sweep", "--grid", "batch=1 steps=1", "--out", tmp_path / "s", "--on", "ray")
    assert found.code == 1 and 'pip install "locater[ray]"' in found.err.replace("\n", " ")


def descendants(pid: int) -> list[int]:
    found = []
    for child in children(pid) if Path(f"/proc/{pid}").exists() else ():
        found += [child, *descendants(child)]
    return found


def tasks(pid: int) -> list[int]:
    """Workers of this driver's cluster that measure a point now."""
    return [one for one in descendants(pid) if _command(one).startswith("ray::locater-point")]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.slow
def test_kill_9_of_a_task_and_of_the_driver_loses_no_row(grid, tmp_path):  # noqa: F811
    """A real cluster, started by the sweep: a worker is killed in its run, then the driver; then it goes on on Ray."""
    pytest.importorskip("ray")
    file, expected = grid
    folder = tmp_path / "killed"
    driver = start(file, "--out", folder, "--on", "ray", "--jobs", 2)
    wait_for(lambda: any((folder / "runs").glob("*/metrics.jsonl")) and tasks(driver.pid))
    os.kill(tasks(driver.pid)[0], signal.SIGKILL)
    wait_for(lambda: any(folder.glob("rows/[!.]*.json")))
    family = descendants(driver.pid)
    driver.kill()
    driver.wait()
    wait_for(lambda: not any("ray::locater-point" in _command(one) for one in family))
    before = {path.name: path.read_bytes() for path in folder.glob("rows/[!.]*.json")}
    assert before
    resumed = start("--resume", folder, "--on", "ray", "--jobs", 2, "--json", tmp_path / "rows.json")
    assert resumed.wait(400) == 0
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == expected
    assert all((folder / "rows" / name).read_bytes() == row for name, row in before.items())


@pytest.mark.slow
def test_asha_ends_trials_that_are_behind(tmp_path, monkeypatch):
    """Eight trials, half of them with a learning rate that learns nothing: some of these end early, and say so."""
    pytest.importorskip("ray")
    monkeypatch.setenv("LOCATER_CACHE", str(tmp_path / "cache"))
    options = TINY | {"data": str(write_text(tmp_path)), "steps": 80, "validate_every": 10, "save_every": 80}
    options |= {"learning_rate": [1e-2, 1e-9], "seed": [0, 1, 2, 3]}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump({"preset": "paper", "grid": options}))
    command = ("sweep", tmp_path / "grid.yaml", "--out", tmp_path / "s", "--on", "ray", "--asha")
    done = subprocess.run([sys.executable, "-m", "locater.cli", *map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = open_sweep(tmp_path / "s").rows()
    assert len(rows) == 8 and all("result" in row for row in rows)
    early = [row for row in rows if not row["result"]["is_done"]]
    assert early and all(row["result"]["step"] < 80 for row in early)
    assert any(row["result"]["is_done"] and row["point"]["options"]["learning_rate"] == 1e-2 for row in rows)
