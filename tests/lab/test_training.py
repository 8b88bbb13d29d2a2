"""The loop against a plain one, against itself after a stop, and against all that a user may do to it."""

import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from command import locater
from locater.errors import Refusal
from locater.models.live import open_live
from locater.prediction.language_model import load_tokenizer
from locater.prediction.predict import Effort, predict
from locater_lab.data.sources import open_data
from locater_lab.train import loop, observe, run
from locater_lab.train.checksums import seal
from locater_lab.train.config import Config, OptimiserOptions, make_config
from locater_lab.train.loader import load
from locater_lab.train.metrics import Metrics, read_metrics
from locater_lab.train.model import LanguageModel
from locater_lab.train.parts import learning_rate
from locater_lab.train.processes import Processes
from training_cases import STATEFUL, assert_same_run, flags, tiny, weights, write_text

ALONE = Processes(0, 1, torch.device("cpu"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LOCATER_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path)


def trainer(config: Config, folder) -> loop.Trainer:
    data = open_data(config.data, length=config.shape.context, seed=config.loop.seed)
    return loop.Trainer(config, data, folder, ALONE)


def start(config: Config, folder, **options):
    return run.start(config, folder, say=lambda sentence: None, **options)


def assert_close(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    """All weights but the bias of keys: softmax does not see it, so its gradient is rounding, which Adam blows up."""
    for name, parameter in expected.named_parameters():
        if not name.endswith("key.bias"):
            torch.testing.assert_close(found.get_parameter(name), parameter, atol=1e-6, rtol=1e-5)


def test_equals_a_plain_loop(text, tmp_path):
    """The same model, data and rates in a dozen lines of torch."""
    config = tiny(text, schedule="cosine", weight_decay=0.1, optimizer="adamw", clip=0.5)
    ours = trainer(config, tmp_path / "run")
    torch.manual_seed(config.loop.seed)
    model = LanguageModel(ours.module.config)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.98))
    for step in range(12):
        tokens, targets = ours.data.batches.training(4 * step, 4)
        rate = 1e-3 * (step + 1) / 5 if step < 5 else 1e-3 * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - 5) / 15)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    ours.advance(12)
    assert_close(ours.module, model)


def test_accumulated_parts_make_the_whole_batch(text, tmp_path):
    runs = [trainer(tiny(text, accumulate=parts), tmp_path / str(parts)) for parts in (1, 4)]
    for one in runs:
        one.advance(5)
    assert_close(*(one.module for one in runs))


def test_overfits_one_batch(text, tmp_path, monkeypatch):
    one = trainer(tiny(text, steps=300, learning_rate=1e-2, schedule="constant", validate_every=1000), tmp_path / "run")
    batch = one.data.batches.training(0, 4)
    monkeypatch.setattr(type(one.data.batches), "training", lambda *_: batch)
    one.advance(150)
    with torch.no_grad():
        assert one.model(*batch) < 0.05


def test_same_seed_same_numbers_other_seed_others(text, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        start(tiny(text, **STATEFUL, seed=seed), tmp_path / name)
    assert_same_run(tmp_path / "a", tmp_path / "b")
    other = weights(tmp_path / "c")
    assert not any(other[name].equal(tensor) for name, tensor in weights(tmp_path / "a").items() if tensor.dim() > 1)


def test_a_stop_and_a_resume_change_nothing(text, tmp_path):
    """By the command itself; the stop falls between two lines of metrics and two checkpoints."""
    arguments = ["train", *flags(text, **STATEFUL)]
    assert locater(*arguments, "--out", tmp_path / "whole").code == 0
    stopped = locater(*arguments, "--stop-after", 10, "--out", tmp_path / "stopped")
    assert stopped.code == 0 and f"locater train --resume {tmp_path / 'stopped'}" in stopped.out
    assert "step 10 of 20, stopped" in stopped.out
    resumed = locater("train", "--resume", tmp_path / "stopped", "--json", tmp_path / "end.json")
    assert resumed.code == 0 and "step 20 of 20\n" in resumed.out
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    assert json.loads((tmp_path / "end.json").read_text())["validation"]["step"] == 20
    again = locater("train", "--resume", tmp_path / "stopped")  # nothing left to do
    assert again.code == 0
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_a_run_can_be_lengthened(text, tmp_path):
    """Behind its end, or from where it was stopped; what is done cannot be undone."""
    arguments = ["train", *flags(text, **STATEFUL | {"mean_until": 18})]
    assert locater(*arguments, "--steps", 32, "--out", tmp_path / "whole").code == 0
    for name, stop in (("ended", []), ("stopped", ["--stop-after", 10])):
        folder = tmp_path / name
        assert locater(*arguments, *stop, "--out", folder).code == 0
        longer = locater("train", "--resume", folder, "--steps", 32)
        assert longer.code == 0 and "step 32 of 32\n" in longer.out
        assert "step 32 of 32: validation loss " in longer.err  # no terminal, so no bar
        assert all(weights(folder)[key].equal(tensor) for key, tensor in weights(tmp_path / "whole").items())
        assert run.read_run_config(folder) == run.read_run_config(tmp_path / "whole")
    shorter = locater("train", "--resume", folder, "--steps", 9)
    assert shorter.code == 1 and "an end after the 32 steps that are done, got 9" in shorter.err.replace("\n", " ")
    assert run.read_run_config(folder).loop.steps == 32
    by_epochs = locater("train", "--resume", folder, "--set", "epochs=0.2")
    assert by_epochs.code == 0 and run.read_run_config(folder).loop.epochs == 0.2


def test_kappa_is_released(text, tmp_path):
    """κ(1 − step/N) until step N, then nothing: equal to a loop that sets it by hand, stopped and resumed or not."""
    options = STATEFUL | {"strength": 0.2, "strength_until": 8, "mean": "free", "mean_until": 0}
    arguments = ["train", *flags(text, **options)]
    assert locater(*arguments, "--out", tmp_path / "whole").code == 0
    assert locater(*arguments, "--stop-after", 5, "--out", tmp_path / "stopped").code == 0
    assert locater("train", "--resume", tmp_path / "stopped").code == 0
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    held = tiny(text, **options | {"strength_until": 0})
    assert [held.stabiliser.strength_at(step) for step in (0, 30)] == [0.2, 0.2]
    plain = trainer(held, tmp_path / "by hand")
    for step in range(held.loop.steps):
        plain.stabiliser.strength = 0.2 * max(0.0, (8 - step) / 8)
        plain._train()
    by_hand = dict(plain.module.named_parameters())
    assert all(torch.allclose(by_hand[name], tensor) for name, tensor in weights(tmp_path / "whole").items())
    for wrong in (["--set", "strength_until=5"], ["--strength", "auto", "--set", "strength_until=5"]):
        assert locater("train", *wrong, "--out", tmp_path / "wrong").code == 2


def test_patience_ends_a_run_that_does_not_improve(text, tmp_path):
    """At the first validation that is that many steps behind the best one, with or without a stop between."""
    arguments = ["train", *flags(text, **STATEFUL, learning_rate=0.3, steps=200, validate_every=4, patience=10)]
    whole = locater(*arguments, "--out", tmp_path / "whole")
    assert whole.code == 0 and "no validation improved any more" in whole.out
    rows = [row for row in read_metrics(tmp_path / "whole" / "metrics.jsonl") if row["kind"] == "validation"]
    best = min(rows, key=lambda row: row["loss"])["step"]
    assert rows[-1]["step"] == best + 12 < 200  # 10, to the next multiple of 4
    for stop in (best + 3, best + 9):
        folder = tmp_path / f"stopped-{stop}"
        assert locater(*arguments, "--stop-after", stop, "--out", folder).code == 0
        again = locater("train", "--resume", folder)
        assert again.code == 0 and "no validation improved any more" in again.out
        assert_same_run(folder, tmp_path / "whole")
    assert locater("train", "--resume", folder).code == 0  # nothing left to do
    assert_same_run(folder, tmp_path / "whole")
    longer = locater("train", "--resume", folder, "--set", "patience=0", "--steps", best + 14)
    assert longer.code == 0 and f"step {best + 14} of {best + 14}\n" in longer.out


def test_a_longer_cosine_is_another_run(text, tmp_path):
    assert locater("train", *flags(text, schedule="cosine", steps=4), "--out", tmp_path / "run").code == 0
    longer = locater("train", "--resume", tmp_path / "run", "--steps", 6)
    assert longer.code == 0 and "a run begun with this length" in " ".join(longer.err.split())


def test_ctrl_c_saves_and_the_resumed_run_is_the_same(text, tmp_path, monkeypatch):
    arguments = ["train", *flags(text, **STATEFUL)]
    assert locater(*arguments, "--out", tmp_path / "whole").code == 0
    real, before = Metrics.add, signal.getsignal(signal.SIGINT)

    def interrupt(self, row):
        real(self, row)
        if row["step"] == 9:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(Metrics, "add", interrupt)
        stopped = locater(*arguments, "--out", tmp_path / "stopped")
    assert stopped.code == 128 + signal.SIGINT and "--resume" in stopped.out
    assert signal.getsignal(signal.SIGINT) is before
    assert locater("train", "--resume", tmp_path / "stopped").code == 0
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_the_export_is_the_model_and_a_scan_reads_it(text, tmp_path):
    start(tiny(text, num_layers=2, num_key_heads=1, positions="rotary"), tmp_path / "run")
    last = trainer(run.read_run_config(tmp_path / "run"), tmp_path / "run")
    model = load(tmp_path / "run" / "model")
    tokens, _ = last.data.batches.validation(0, 2)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), last.module.eval()(tokens), atol=0, rtol=0)
    scanned = locater("scan", tmp_path / "run" / "model", "--json", "-", "--length", 16)
    found = json.loads(scanned.out)
    assert (found["family"], found["coverage"], len(found["heads"])) == ("locater", "COMPLETE", 4)
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    again = json.loads(locater("scan", checkpoint, "--json", "-", "--length", 16).out)
    assert (again["format"], again["heads"]) == ("distributed", found["heads"])
    effort = Effort(calibration=3, test=1)
    for source in (model, checkpoint):  # texts of 16 tokens have nothing beyond the nearest 16
        with pytest.raises(Refusal, match="windows of at least 32 tokens, got 16"):
            predict(source, text="random", effort=effort)
    with pytest.raises(Refusal, match=r"got neither; .* go without a text \(--text random\)"):
        load_tokenizer(checkpoint)
    logged = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "validation"][-1][
        "heads"
    ]
    for row, head in zip(logged, found["heads"], strict=True):
        assert row["xi"] == pytest.approx(head["xi"], rel=1e-5) and row["regime"] == head["regime"]


def test_validation_is_what_it_says(text, tmp_path):
    """Perplexity, entropy and rank of the last row, computed again in another way."""
    start(tiny(text, validation_windows=0, num_layers=2), tmp_path / "run")
    last = trainer(run.read_run_config(tmp_path / "run"), tmp_path / "run")
    row = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "validation"][-1]
    model, count = last.module.eval(), last.data.batches.num_validation
    tokens, targets = last.data.batches.validation(0, count)
    with torch.no_grad():
        logs = model(tokens).log_softmax(-1).gather(-1, targets[..., None])
        assert row["perplexity"] == pytest.approx(float(logs.mean().neg().exp()), rel=1e-5)
        x = model.embed(tokens[: observe.TOKENS_OBSERVED // 16])
        probabilities = [head.attention(x, x) for head in next(open_live(model).layers()).heads]
    entropies = [-(p * p.clamp(min=1e-30).log()).sum(-1)[:, 1:] / torch.arange(2, 17).log() for p in probabilities]
    found = [head["normalised_entropy"] for head in row["heads"][:2]]
    assert found == pytest.approx([float(entropy.mean()) for entropy in entropies], rel=1e-4)
    centred = (x - x.mean(1, keepdim=True)).flatten(1).norm(dim=1) / x.flatten(1).norm(dim=1)
    assert row["layers"][0]["residual"] == pytest.approx(float(centred.mean()), rel=1e-4)
    assert {"trace", "eta", "mean", "variance", "spread", "localisation", "max_logit"} <= row["heads"][0].keys()
    assert len(row["layers"]) == 3


def test_best_and_last_are_kept_and_no_more(text, tmp_path):
    folder = tmp_path / "run"
    start(tiny(text, learning_rate=2.0, warmup=20, validate_every=2, save_every=3), folder)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "validation"]
    best = min(rows, key=lambda row: row["loss"])["step"]
    assert best < 20, "the case must get worse in the end"
    index = json.loads((folder / "checkpoints" / "index.json").read_text())["names"]
    assert index == {"last": "step-00000020", "best": f"step-{best:08d}"}
    assert sorted(p.name for p in (folder / "checkpoints").glob("step-*")) == sorted(index.values())


@pytest.mark.parametrize("hold", ["projection", "penalty"])
def test_locater_holds_the_mean_where_it_was_told(text, tmp_path, hold):
    changed = dict(
        strength=1e-2, mean="1.0", mean_warmup=0, hold=hold, mean_weight=100.0, steps=60, decoupled=hold != "penalty"
    )
    start(tiny(text, **changed, learning_rate=3e-3, validate_every=60), tmp_path / "run")
    for head in read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["heads"]:
        gap = abs(head["trace"] / head["temperature"] - 1)
        assert gap < (1e-3 if hold == "projection" else 0.5)


def test_the_initial_mean_can_be_held(text, tmp_path):
    one = trainer(tiny(text, mean="initial"), tmp_path / "run")
    before = one.stabiliser.initial[0].clone()
    one.advance(10)
    after = one.stabiliser.metrics(heads=True)
    assert after["qk/layer_00/head_01/trace"] == pytest.approx(float(before.flatten()[1]), abs=1e-4)


def test_queries_and_keys_alone_decay(text, tmp_path):
    """By lr · decay = 1e-3 · 50, after a step of the optimiser that is the same with and without."""
    without, decayed = (trainer(tiny(text, qk_decay=decay, warmup=0), tmp_path / str(decay)) for decay in (0.0, 50.0))
    without.advance(1)
    decayed.advance(1)
    for name, tensor in without.module.state_dict().items():
        share = 0.95 if name.endswith(("query.weight", "key.weight")) else 1.0
        torch.testing.assert_close(decayed.module.state_dict()[name], share * tensor)


def test_bfloat16_stays_close(text, tmp_path):
    losses = []
    for precision in ("float32", "bf16"):
        one = trainer(tiny(text, precision=precision), tmp_path / precision)
        one.advance(20)
        losses.append(read_metrics(tmp_path / precision / "metrics.jsonl")[-1]["loss"])
        assert one.module.embedding.weight.dtype == torch.float32
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_bfloat16_without_the_hardware_is_said(text, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(run, "has_bf16", lambda device: False)
    run.start(tiny(text, precision="bf16", steps=1), tmp_path / "run", say=said.append)
    assert said[0] == "this processor has no instructions for bfloat16: float32 would be faster"


def test_tensorboard_gets_the_same_numbers(text, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    start(tiny(text, tensorboard=True), tmp_path / "run")
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    found = {event.step: event.value for event in board.Scalars("train/loss")}
    assert found == pytest.approx({row["step"]: row["loss"] for row in rows if row["kind"] == "train"})
    xi = board.Scalars("attention/layer_00/head_01/xi")[-1].value
    assert xi == pytest.approx(rows[-1]["heads"][1]["xi"], rel=1e-5)
    assert "tokens/layer_01/residual" in board.Tags()["scalars"]


def test_without_tensorboard_the_remedy_is_said(text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(Refusal, match=r'pip install "locater\[tensorboard\]"'):
        start(tiny(text, tensorboard=True), tmp_path / "run")


# What goes wrong.


def test_a_diverged_run_says_where_and_keeps_the_last_good_state(text, tmp_path):
    """Queries grow until their logits are infinite."""
    one = trainer(tiny(text, num_layers=2), tmp_path / "run")
    one.advance(7)
    good = {name: parameter.detach().clone() for name, parameter in one.module.named_parameters()}
    with torch.no_grad():
        one.module.layers[1].attention.query.weight.mul_(1e38)
    with pytest.raises(loop.Diverged, match=r"layer 1, head \d exploded .*last good state is .*step-00000007; lower"):
        one.advance(20)
    kept = trainer(tiny(text, num_layers=2), tmp_path / "run")
    assert kept.step == 7
    assert all(kept.module.get_parameter(name).equal(parameter) for name, parameter in good.items())


def test_weights_that_are_no_numbers_are_named(text, tmp_path):
    one = trainer(tiny(text), tmp_path / "run")
    with torch.no_grad():
        one.module.layers[0].feedforward.inner.weight[0, 0] = math.nan
    with pytest.raises(
        loop.Diverged, match="the weights `layers.0.feedforward.inner.weight` are not finite; .*step-00000000"
    ):
        one.advance(20)


def test_an_overflow_outside_of_attention_is_named_too(text, tmp_path):
    one = trainer(tiny(text, norm_first=True), tmp_path / "run")
    with torch.no_grad():
        one.module.layers[0].feedforward.outer.weight.mul_(3e38)
        one.module.layers[0].feedforward.inner.weight.mul_(1e6)
    with pytest.raises(loop.Diverged, match="first output that is not finite is that of `layers.0.feedforward"):
        one.advance(20)


def test_a_rate_that_is_absurd_ends_in_a_sentence(text, tmp_path):
    result = locater("train", *flags(text, learning_rate=1e30, clip=0), "--out", tmp_path / "run")
    assert result.code == 1 and result.err.count("\n") == 1
    assert "in step" in result.err and "lower learning_rate" in result.err


def test_a_run_that_diverges_on_held_out_text_alone_ends_in_a_sentence(text, tmp_path):
    """Training has not met the state yet: the step that made it was taken with a finite gradient."""
    arguments = flags(text, learning_rate=1e30, warmup=0, validate_every=1)
    result = locater("train", *arguments, "--out", tmp_path / "run")
    assert result.code == 1 and result.err.count("\n") == 1
    assert "the loss on held-out text became nan in step 1: " in result.err and "exploded" in result.err
    assert "the last good state is" in result.err and "step-00000000" in result.err
    read_metrics(tmp_path / "run" / "metrics.jsonl")


def test_a_full_disk_leaves_the_earlier_checkpoint(text, tmp_path):
    """A limit on the size of files stands for the disk: writing fails in the system, as it would there."""
    one = trainer(tiny(text), tmp_path / "run")
    one.advance(7)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(Refusal, match="free some room, then continue with --resume; step-00000007 is intact"):
            one.advance(14)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000007"]
    resumed = trainer(tiny(text), tmp_path / "run")
    assert resumed.step == 7
    resumed.advance(20)


def test_a_disk_that_is_full_of_metrics_is_said_once(text, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    config = tiny(text, steps=2000, save_every=2000, validate_every=2000, log_every=1)
    try:
        with pytest.raises(Refusal, match="cannot write .*metrics.jsonl: File too large; free some room"):
            # The first checkpoint is larger than all metrics will be: it is there before the limit is.
            start(config, tmp_path / "run", stop_after=1)
            resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, limits[1]))
            run.resume(tmp_path / "run", say=lambda sentence: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) > 10


def test_what_a_killed_writer_left_is_not_read(text, tmp_path):
    """A partial checkpoint, a whole one that the index does not name yet, half a line of metrics."""
    folder = tmp_path / "run"
    start(tiny(text), folder, stop_after=7)
    start(tiny(text), tmp_path / "whole")
    for name in ("step-00000014.partial", "step-00000014"):
        (folder / "checkpoints" / name).mkdir()
        (folder / "checkpoints" / name / "__0_0.distcp").write_bytes(b"half")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 9, "loss": 1.0}\n{"kind": "tra')
    run.resume(folder, say=lambda sentence: None)
    assert_same_run(folder, tmp_path / "whole")


def test_a_run_that_died_before_its_first_checkpoint_starts_again(text, tmp_path):
    start(tiny(text), tmp_path / "whole")
    one = trainer(tiny(text), tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(json.dumps(seal(one.config.to_dict())))
    run.resume(tmp_path / "run", say=lambda sentence: None)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def contents(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write(path, text: str | None) -> None:
    path.unlink() if text is None else path.write_text(text)


DAMAGE = {
    "no checkpoints": (lambda run: shutil.rmtree(run / "checkpoints"), "missing the checkpoints of this run in "),
    "index": (lambda run: write(run / "checkpoints" / "index.json", '{"la'), "wrote to .*index.json, got .*Untermin"),
    "index of a list": (lambda run: write(run / "checkpoints" / "index.json", '["last"]'), "index.json, got .*a list"),
    "no such step": (
        lambda run: write(run / "checkpoints" / "index.json", '{"last": "step-9"}'),
        "index.json, got one without a checksum, as older versions wrote it; .* --set verified=no",
    ),
    "state": (
        lambda run: write(run / "checkpoints" / "step-00000005" / "state.json", '{"step": 5}'),
        "the checkpoint that was written to .*, got other bytes in state.json",
    ),
    "metrics": (
        lambda run: write(run / "metrics.jsonl", '{"kind": "train"\n\n'),
        "metrics.jsonl: line 1: expected valid JSON",
    ),
    "config": (
        lambda run: write(run / "config.json", '{"preset": "paper", "data": []}'),
        "the config of a run of this",
    ),
    "no config": (lambda run: write(run / "config.json", None), "the folder of a run, with config.json"),
}


@pytest.mark.parametrize(("damage", "words"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_run_is_refused_and_loses_nothing_more(text, tmp_path, damage, words):
    folder = tmp_path / "run"
    start(tiny(text), folder, stop_after=5)
    damage(folder)
    before = contents(folder)
    with pytest.raises(Refusal, match=words):
        run.resume(folder, say=lambda sentence: None)
    assert contents(folder) == before


def test_two_do_not_train_in_one_folder(text, tmp_path):
    start(tiny(text), tmp_path / "run", stop_after=5)
    with run.locked(tmp_path / "run", ALONE):
        result = locater("train", "--resume", tmp_path / "run")
    assert result.code == 1 and f"cannot train in {tmp_path / 'run'}: another process trains there" in result.err
    assert locater("train", "--resume", tmp_path / "run").code == 0


def test_a_refused_start_leaves_the_folder_to_the_next(text, tmp_path):
    result = locater("train", *flags(text, accumulate=3), "--out", tmp_path / "run")
    assert result.code == 1 and "change batch or accumulate" in result.err
    assert locater("train", *flags(text, accumulate=2, steps=1), "--out", tmp_path / "run").code == 0


def test_a_run_does_not_become_its_own_data(text, tmp_path):
    result = locater("train", *flags(tmp_path), "--out", tmp_path / "run")
    assert result.code == 1 and "a run outside of the folder that is its data" in result.err
    assert locater("train", *flags(tmp_path, steps=1), "--out", tmp_path / ".run").code == 0  # hidden files are no data
    for name in ("train.txt", "valid.txt"):
        shutil.copy(text, tmp_path / name)
    assert locater("train", *flags(tmp_path, steps=1), "--out", tmp_path / "run").code == 0  # nothing else is read


def test_names_with_brackets_are_shown_as_they_are(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = locater("train", *flags(text, steps=4), "--stop-after", 2, "--out", "run[lr=0.1][/x]")
    assert result.code == 0 and "locater train --resume 'run[lr=0.1][/x]'\n" in result.out


def test_a_folder_that_exists_is_refused(text, tmp_path):
    (tmp_path / "run").mkdir()
    assert locater("train", *flags(text, steps=1), "--out", tmp_path / "run").code == 0  # an empty one is taken
    result = locater("train", *flags(text), "--out", tmp_path / "run")
    assert result.code == 1 and f"--resume {tmp_path / 'run'}, or choose another --out" in result.err.replace("\n", "")
    (tmp_path / "file").write_text("")
    assert locater("train", *flags(text), "--out", tmp_path / "file").code == 1


def test_changed_data_is_noticed_at_resume(text, tmp_path):
    start(tiny(text), tmp_path / "run", stop_after=5)
    text.write_text(text.read_text() + "one line more .\n")
    with pytest.raises(Refusal, match="expected the data that this run began with"):
        run.resume(tmp_path / "run")


BAD = {
    "nothing to do": ([], 2, "give one of --out DIR"),
    "both": (["--out", "x", "--resume", "y"], 2, "give one of --out DIR"),
    "options at resume": (["--resume", "y", "--set", "batch=3", "--steps", "3"], 2, "leave out batch\n"),
    "nothing to let go": (["--set", "mean_until=5", "--out", "x"], 2, "set mean to initial or a number too"),
    "two stabilisers": (["--set", "qk_decay=1", "--strength", "1", "--out", "x"], 2, "leave out strength and mean"),
    "decay": (["--set", "qk_decay=-1", "--out", "x"], 1, "a decay of at least 0"),
    "until": (["--set", "mean=1", "--set", "mean_until=-5", "--out", "x"], 1, "of at least 0 steps"),
    "no run": (["--resume", "/nonexistent"], 1, "the folder of a run, with config.json"),
    "preset": (["--preset", "huge", "--out", "x"], 2, "one of paper, small, gpt2"),
    "no value": (["--set", "norm", "--out", "x"], 2, "--set expects NAME=VALUE, got 'norm'"),
    "no name": (["--set", "nrom=rms", "--out", "x"], 2, "no option called 'nrom': did you mean norm?"),
    "truth": (["--set", "tied=perhaps", "--out", "x"], 2, "tied expects yes or no, got 'perhaps'"),
    "number or word": (["--strength", "much", "--out", "x"], 2, "strength expects a number or one of auto, got 'much'"),
    "choice": (["--set", "norm=batch", "--out", "x"], 2, "norm expects one of layer, rms, got 'batch'"),
    "mean": (["--set", "mean=some", "--out", "x"], 1, "a mean that is free, initial or a number"),
    "rate": (["--set", "learning_rate=-1", "--out", "x"], 1, "a learning rate above 0"),
    "rate that is none": (
        ["--set", "learning_rate=nan", "--out", "x"],
        1,
        "learning_rate to be a finite number",
    ),
    "epochs": (["--set", "epochs=inf", "--out", "x"], 1, "epochs to be a finite number"),
    "moments": (["--set", "beta1=1.5", "--out", "x"], 1, "decays of Adam's moments in [0, 1), got 1.5 and 0.98"),
    "key heads": (["--set", "num_heads=4", "--set", "num_key_heads=-1", "--out", "x"], 1, "key heads of at least 0"),
    "odd width": (["--set", "d_model=129", "--set", "num_heads=3", "--out", "x"], 1, "sinusoidal positions, got 129"),
    "seed": (["--seed", "9223372036854775808", "--out", "x"], 1, "a seed from 0 to below 2^63"),
    "nobody's home": (
        ["--data", "~nobody-has-it/x", "--out", "x"],
        1,
        "or the name of a data set, got ~nobody-has-it/x",
    ),
    "endless name": (["--data", "x" * 300, "--out", "x"], 1, "check the spelling"),
    "steps": (["--steps", "0", "--out", "x"], 1, "steps of at least 1"),
    "device": (["--set", "device=toaster", "--out", "x", "--data", "embedded"], 1, "use device=cpu"),
}


@pytest.mark.parametrize(("arguments", "code", "sentence"), BAD.values(), ids=BAD)
def test_bad_arguments_are_refused(arguments, code, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = locater("train", *arguments, columns=200)
    assert result.code == code and sentence in result.err


def test_a_start_that_fails_leaves_no_folder(tmp_path):
    out = tmp_path / "new" / "run"
    assert locater("train", "--data", tmp_path / "nothing", "--out", out).code == 1
    assert not out.parent.exists()
    out.mkdir(parents=True)  # what was there stays
    assert locater("train", "--data", tmp_path / "nothing", "--out", out).code == 1
    assert out.exists() and not any(out.iterdir())


def test_a_vocabulary_larger_than_the_config_is_refused(text, tmp_path):
    result = locater("train", *flags(text, vocab_size=50), "--out", tmp_path / "run")
    assert result.code == 1 and "data of at most 50 different tokens (vocab_size), got 300; raise it" in result.err
    result = locater("train", *flags(text, batch=3, accumulate=2), "--out", tmp_path / "other")
    assert result.code == 1 and "1 processes and 2 parts divide evenly, got 3" in result.err


def test_a_config_survives_its_file_and_another_version_is_refused():
    config = make_config("gpt2", steps=7, mean="2", norm="rms")
    document = json.loads(json.dumps(config.to_dict()))
    assert Config.from_dict(document) == config
    document["loop"]["further"] = 1
    with pytest.raises(Refusal, match="the config of a run of this version"):
        Config.from_dict(document)


def test_the_schedules():
    options = OptimiserOptions(learning_rate=2.0, warmup=4, schedule="inverse-sqrt")
    assert [learning_rate(step, options, num_steps=100) for step in (0, 1, 3)] == [0.5, 1.0, 2.0]
    assert learning_rate(15, options, num_steps=100) == pytest.approx(1.0)
    cosine = OptimiserOptions(learning_rate=2.0, warmup=0, schedule="cosine", final_share=0.1)
    found = [learning_rate(step, cosine, num_steps=100) for step in (0, 50, 100)]
    assert found == pytest.approx([2.0, 1.1, 0.2])
    constant = OptimiserOptions(learning_rate=2.0, warmup=0, schedule="constant")
    assert learning_rate(77, constant, num_steps=100) == 2.0


def test_epochs_are_steps(text, tmp_path):
    one = trainer(tiny(text, epochs=1.5), tmp_path / "run")
    assert one.num_steps == math.ceil(1.5 * one.data.batches.num_training / 4)


def test_help_needs_no_torch():
    code = "import sys, locater_lab.cli.train; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
def test_compiled_training_stays_close(text, tmp_path):
    """In processes of their own: the compiler cannot trace the checks of shapes that the tests put into functions."""
    for name in ("plain", "compiled"):
        arguments = ["train", *flags(text, steps=10), "--out", tmp_path / name]
        arguments += ["--set", "compile=yes"] if name == "compiled" else []
        command = [sys.executable, "-c", "from locater.cli import main; main()", *map(str, arguments)]
        subprocess.run(command, check=True)
    plain, compiled = weights(tmp_path / "plain"), weights(tmp_path / "compiled")
    assert not all(compiled[name].equal(tensor) for name, tensor in plain.items()), "nothing was compiled"
    for name, tensor in plain.items():
        if not name.endswith("key.bias"):
            torch.testing.assert_close(compiled[name], tensor, atol=1e-4, rtol=1e-3)


def test_the_weights_of_a_run_are_plain_safetensors(text, tmp_path):
    start(tiny(text, steps=2), tmp_path / "run")
    stored = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert "output.weight" not in stored, "a tied output is stored once"
    assert (tmp_path / "run" / "model" / "tokenizer.json").exists()
