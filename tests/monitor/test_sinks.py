"""Where reports go, and the two trainers that can carry the monitor."""

import io
import json
import sys
import types

import pytest
import torch
from rich.console import Console
from test_monitor import TOKENS, gpt2, llama, watch

import hand_written
from locater.errors import Refusal
from locater.monitor import AttentionMonitor, JsonLines, MLflow, Scope, TensorBoard, Terminal, Trackio, WeightsAndBiases

pytestmark = pytest.mark.quick


def report_of(sinks, **options):
    model = llama()
    return watch(model, lambda: model(TOKENS), sinks=sinks, **options)


def test_json_lines_hold_every_head_and_can_be_read_back(tmp_path):
    path = tmp_path / "runs" / "attention.jsonl"
    _, report = (report_of([JsonLines(path)]) for _ in range(2))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2 and lines[1] == json.loads(json.dumps(report.to_json()))
    assert lines[0]["schema"] == "locater.monitor/1"
    assert len(lines[0]["training"][1]["statistics"]["entropy"]) == 4
    assert lines[0]["training"][0]["rows_with_one_key"] == 2


def test_tensorboard_gets_scalars_and_alarms(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight *= 1e4
    report = watch(model, lambda: model(TOKENS), sinks=[TensorBoard(tmp_path)])
    found = EventAccumulator(str(tmp_path)).Reload()
    assert set(found.Tags()["scalars"]) == set(report.metrics())
    (event,) = found.Scalars("attn/layer_00/entropy")
    assert event.step == 0 and abs(event.value - report.metrics()["attn/layer_00/entropy"]) < 1e-6
    assert "attn/alarms/text_summary" in found.Tags()["tensors"]


@pytest.mark.parametrize(("sink", "library"), [(WeightsAndBiases, "wandb"), (Trackio, "trackio")])
def test_run_loggers_get_one_call_per_report(sink, library, monkeypatch):
    logged = []
    double = types.ModuleType(library)
    double.log = lambda metrics: logged.append(metrics)
    monkeypatch.setitem(sys.modules, library, double)
    report = report_of([sink()])
    assert logged == [{**report.metrics(), "attn/step": 0}]
    own = types.SimpleNamespace(log=logged.append)
    report_of([sink(own)])
    assert len(logged) == 2


@pytest.mark.parametrize(
    ("sink", "library"),
    [(WeightsAndBiases, "wandb"), (Trackio, "trackio"), (TensorBoard, "torch.utils.tensorboard")],
)
def test_a_missing_library_is_named_with_its_remedy(sink, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(Refusal, match="missing the package .*; pip install"):
        sink()


def test_the_terminal_shows_layers_alarms_and_notes():
    model = llama()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight *= 1e4
    text = io.StringIO()
    watch(
        model,
        lambda: model(TOKENS.repeat(1, 4)),
        sinks=[Terminal(Console(file=text, width=140))],
        scope=Scope(budget=500),
    )
    shown = text.getvalue()
    assert "attention in training, step 0" in shown and "decoder 1" in shown and "norm." in shown
    assert "alarm entropy collapse: decoder layer 0, heads 0-3" in shown and "to keep within the budget" in shown


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        tokens = TOKENS[index % 2]
        return {"input_ids": tokens, "labels": tokens}


def test_the_hugging_face_trainer_carries_it(tmp_path):
    from transformers import Trainer, TrainingArguments

    from locater.integrations.hugging_face import AttentionCallback

    model, path = gpt2(), tmp_path / "attention.jsonl"
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=3, max_steps=4,
        logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", gradient_checkpointing=True,
    )  # fmt: skip
    callback = AttentionCallback(every=2, sinks=[JsonLines(path)])
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts(), callbacks=[callback])
    trainer.train()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2]
    assert [line["training"][0]["num_passes"] for line in lines] == [3, 3], "three batches make a step, each once"
    assert any("attn/layer_01/entropy" in entry for entry in trainer.state.log_history)
    assert callback.monitor is None and not any(module._forward_pre_hooks for module in model.modules())


def test_lightning_carries_it(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from locater.integrations.lightning import AttentionCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = gpt2()

        def training_step(self, batch, index):
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    path, module = tmp_path / "attention.jsonl", Module()
    callback = AttentionCallback(every=2, sinks=[JsonLines(path)])
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=4, accumulate_grad_batches=3, callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(Texts(), batch_size=2))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2]
    assert [line["training"][0]["num_passes"] for line in lines] == [3, 3]
    assert callback.state_dict()["num_steps"] == 4
    resumed = AttentionCallback(every=2)
    resumed.load_state_dict(callback.state_dict())
    resumed.on_fit_start(trainer, module)
    assert resumed.monitor.num_steps == 4
    resumed.on_fit_end(trainer, module)
    with pytest.raises(Refusal, match="a module under the name absent"):
        AttentionCallback(model="absent").on_fit_start(trainer, module)


def test_lightning_finds_the_model_that_its_steps_call(caplog):
    """A training step is no call of its module: of one without `forward` the largest child is watched."""
    lightning = pytest.importorskip("lightning.pytorch")
    from locater.integrations.lightning import AttentionCallback

    class Steps(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.head, self.net = torch.nn.Linear(2, 2), hand_written.decoder(hand_written.Fused)

    class Forward(Steps):
        def forward(self, tokens):
            return self.net(tokens)

    for module, watched in ((Steps(), "net"), (Forward(), "")):
        callback = AttentionCallback(every=1)
        callback.on_fit_start(None, module)
        assert callback.monitor.entry is module.get_submodule(watched)
        module.net(hand_written.TOKENS) if watched else module(hand_written.TOKENS)
        assert callback.monitor.step().summary() == "no alarm in 2 layers" and not caplog.text
        callback.monitor.detach()


def test_a_monitor_that_sees_nothing_says_so_once(caplog):
    """Its alarms and actions would stay away, and nobody reads the reports of a run that goes well."""
    model = hand_written.decoder(hand_written.Fused).train()
    with AttentionMonitor(model, every=1) as monitor:
        for _ in range(3):
            model.forward(hand_written.TOKENS)
            monitor.step()
    assert caplog.text.count("nothing of this model's attention was seen: no forward pass was seen: call the") == 1


def test_the_terminal_fits_eighty_columns():
    text = io.StringIO()
    report_of([Terminal(Console(file=text, width=80))])
    lines = text.getvalue().splitlines()
    assert not any("…" in line for line in lines) and "particip." in text.getvalue(), "no heading is cut"
    assert "residual" in text.getvalue()
    assert [line.split()[:2] for line in lines if "decoder" in line] == [["decoder", "0"], ["decoder", "1"]]


def with_signatures(library, calls, **signatures):
    """A library whose functions take exactly what the real ones do (wandb 0.31, trackio 0.43, mlflow 3.17)."""
    double = types.ModuleType(library)
    for name, signature in signatures.items():
        namespace = {"record": lambda given, name=name: calls.append((name, given))}
        exec(f"def {name}{signature}: record(locals())", namespace)
        setattr(double, name, namespace[name])
    return double


@pytest.mark.parametrize(
    ("sink", "library", "signatures", "expected"),
    [
        (WeightsAndBiases, "wandb", {"log": "(data, step=None, commit=None)",
            "alert": "(title, text, level=None, wait_duration=None)"}, ["log", "alert", "alert"]),
        (Trackio, "trackio", {"log": "(metrics, step=None)",
            "alert": "(title, text=None, level='warn', webhook_url=None)"}, ["log", "alert", "alert"]),
        (MLflow, "mlflow", {"log_metrics": "(metrics, step=None, synchronous=None, run_id=None, timestamp=None)",
            "set_tag": "(key, value, synchronous=None)", "log_text": "(text, artifact_file, run_id=None)"},
            ["log_metrics", "set_tag", "log_text"]),
    ],
)  # fmt: skip
def test_trackers_are_called_as_they_want_to_be(sink, library, signatures, expected, monkeypatch):
    """`tests/integrations/test_trackers.py` holds the same against the libraries, where installed."""
    calls = []
    monkeypatch.setitem(sys.modules, library, with_signatures(library, calls, **signatures))
    model = llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight *= 1e4
    report = watch(model, lambda: model(TOKENS), sinks=[sink()])
    assert [name for name, _ in calls] == expected
    metrics = next(iter(calls[0][1].values()))
    assert report.metrics().items() <= metrics.items()
    words = " ".join(str(value) for _, given in calls[1:] for value in given.values())
    assert "logit explosion" in words and "; try RollBack" in words
