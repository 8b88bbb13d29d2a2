"""The trackers themselves, where they are installed: what they have stored after a run, read back from their files.

Each run is a process of its own (`python tests/integrations/test_trackers.py LIBRARY LOOP`): trackers keep
state per process.
"""

import importlib
import importlib.util
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_actions import TOKENS, AttentionCallback, explode, llama, trainer

from locater.monitor import AttentionMonitor, MLflow, Trackio, WeightsAndBiases

pytestmark = pytest.mark.slow
SINKS = {"wandb": WeightsAndBiases, "trackio": Trackio, "mlflow": MLflow}
METRIC = "attn/layer_01/max_logit"


# ------------------------------------------------------------------------------------------------- inside the process
def begin(library):
    module = importlib.import_module(library)
    if library == "mlflow":
        module.set_experiment("attention")
        module.start_run()
    else:
        module.init(project="attention")


def own_loop(sink):
    """Four steps; before the third the weights explode. What must arrive is printed."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    values = []
    with AttentionMonitor(model, every=1, sinks=[sink]) as monitor:
        for step in range(4):
            if step == 2:
                explode(model)
            model(TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(monitor.step().metrics()[METRIC])
    print(json.dumps(values))


class Recorded(AttentionCallback):
    """The callback as users have it, and a list of what was reported."""

    def __init__(self, **options):
        super().__init__(**options)
        self.values = []

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            explode(kwargs["model"])

    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        self.values.append(self.report.metrics()[METRIC])


def in_trainer(library, sink):
    callback = Recorded(every=1, sinks=[sink])
    trainer(Path.cwd() / "out", callback, max_steps=4, report_to=[library], project="attention").train()
    print(json.dumps(callback.values))


def main(library, loop):
    if loop == "own" or library != "trackio":  # with trackio the Trainer always begins a run of its own
        begin(library)
    if loop == "trainer":
        in_trainer(library, SINKS[library](metrics=False))  # it ends the run itself
    else:
        own_loop(SINKS[library]())
        module = importlib.import_module(library)
        module.end_run() if library == "mlflow" else module.finish()


# ---------------------------------------------------------------------------------------------- what they have stored
def wandb_records(folder):
    """The records of an offline run: a log in blocks of 32 KiB, each piece with checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        whole += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(whole)
            whole = b""


def stored_by_wandb(folder):
    records = list(wandb_records(folder))
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in records
        if record.WhichOneof("record_type") == "history"
    ]
    alerts = [(r.alert.title, r.alert.text) for r in records if r.WhichOneof("record_type") == "alert"]
    return alerts, rows


def stored_by_trackio(folder):
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = SQLiteStorage.get_runs("attention")
    rows = SQLiteStorage.get_logs("attention", run)
    alerts = [(alert["title"], alert["text"]) for alert in SQLiteStorage.get_alerts("attention")]
    return alerts, rows


def stored_by_mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("attention")
    (run,) = client.search_runs([experiment.experiment_id], filter_string="tags.`attention.alarm` LIKE 'step %'")
    history = client.get_metric_history(run.info.run_id, METRIC)
    rows = [{METRIC: one.value, "attn/step": one.step} for one in sorted(history, key=lambda one: one.step)]
    texts = [path.path for path in client.list_artifacts(run.info.run_id, "attention")]
    (name,) = texts
    text = Path(client.download_artifacts(run.info.run_id, name)).read_text()
    alerts = [(f"attention: {line.partition(':')[0]}", f"step 2: {line}") for line in text.splitlines()]
    return alerts, rows


STORED = {"wandb": stored_by_wandb, "trackio": stored_by_trackio, "mlflow": stored_by_mlflow}


def environment(folder):
    paths = [str(Path(__file__).parents[1]), *(path for path in sys.path if path)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths), "WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true",
        "TRACKIO_DIR": str(folder / "trackio"), "MLFLOW_TRACKING_URI": f"sqlite:///{folder / 'mlflow.db'}",
        "MLFLOW_EXPERIMENT_NAME": "attention", "TRACKIO_PROJECT": "attention", "WANDB_PROJECT": "attention",
        "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1",
    }  # fmt: skip


@pytest.mark.parametrize("loop", ["own", "trainer"])
@pytest.mark.parametrize("library", SINKS)
def test_metrics_and_alarms_arrive(library, loop, tmp_path):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    command = [sys.executable, __file__, library, loop]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    reported = next(json.loads(line) for line in done.stdout.splitlines() if line.startswith("[") and "." in line)
    command = [sys.executable, __file__, "--read", library]
    read = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment(tmp_path))
    assert read.returncode == 0, read.stderr[-2000:]
    alerts, rows = json.loads(read.stdout.splitlines()[-1])
    name = next((name for row in rows for name in row if name.endswith(METRIC)), METRIC)  # trainers put "train/" before
    rows = [row for row in rows if name in row]
    assert [row[name] for row in rows] == pytest.approx(reported)
    assert loop == "trainer" or [row["attn/step"] for row in rows] == [0, 1, 2, 3]
    kinds = sorted({title for title, _ in alerts})
    assert kinds == ["attention: entropy collapse", "attention: logit explosion"]
    assert len(alerts) == len(kinds), "once each, though two reports had them"
    assert all("step 2: " in text and "layer 1" in text and "; try " in text for _, text in alerts)


if __name__ == "__main__":
    if sys.argv[1] == "--read":
        print(json.dumps(STORED[sys.argv[2]](Path.cwd()), default=str))
    else:
        main(*sys.argv[1:])
