import os
import re
import runpy
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

from launch import torchrun, uses_torchrun
from locater.errors import Refusal
from locater.integrations import hugging_face as hf
from locater.integrations import lightning
from locater.stabilisers import LocAteR, Projected, QKClip, WarmUp
from locater.stabilisers.strength import innermost
from stabiliser_models import llama

TESTS = Path(__file__).parents[1]
EXAMPLES = {
    "plain_loop": "qk/layer_01/trace 0.500",
    "penalty_in_loss": "qk/layer_00/trace 1.0",
    "hf_trainer": "qk/layer_01/trace 0.500",
    "lightning_trainer": "qk/layer_01/trace 1.000",
    "sharded_loop": "qk/layer_01/trace 0.500",
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_example_runs_and_holds_the_trace(name, capsys):
    path = TESTS.parent / "examples" / f"{name}.py"
    runpy.run_path(str(path), run_name="__main__")
    assert EXAMPLES[name] in capsys.readouterr().out
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60


def test_every_example_is_tested():
    stabilisers = [p.stem for p in (TESTS.parent / "examples").glob("*.py") if "locater.stabilisers" in p.read_text()]
    assert set(stabilisers) == set(EXAMPLES)


@uses_torchrun
@pytest.mark.parametrize("world", [2, 4])
def test_sharded_models_train_as_one_process_does(world):
    """DDP, FSDP2 by rows and by columns, tensor parallelism, and with four processes FSDP2 with tensor parallelism.

    With two: every rival, Muon and strength="auto", or the sentence by which it is refused.
    """
    output = torchrun("sharded_stabilisers.py", num_processes=world)
    lines = [line for line in output.splitlines() if line.startswith(("ok", "FAILED"))]
    assert len(lines) == (6 + 68 if world == 2 else 7)
    assert all(line.startswith("ok") for line in lines)


@uses_torchrun
def test_the_sharded_example_holds_the_trace_on_two_processes():
    assert EXAMPLES["sharded_loop"] in torchrun("../../examples/sharded_loop.py", num_processes=2)


def hf_run(folder: Path, *, resume: bool = False, stop: int | None = None) -> tuple[nn.Module, hf.StabiliserCallback]:
    torch.manual_seed(0)
    model = llama()
    generator = torch.Generator().manual_seed(1)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 40, (32, 8), generator=generator)]
    arguments = TrainingArguments(
        str(folder),
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        bf16=True,
        save_steps=3,
        logging_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    callback = hf.LocAteRCallback(strength=1e-2, mean=Projected(WarmUp(0.2, steps=6)))
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    logged = [entry for entry in trainer.state.log_history if "qk/layer_00/xi" in entry]
    assert [entry["step"] for entry in logged] == [3, 6]
    return model, callback


def test_the_trainer_of_transformers_resumes_to_the_bit(tmp_path):
    whole, callback = hf_run(tmp_path)
    assert callback.stabiliser.steps == 6
    assert callback.stabiliser.metrics()["qk/layer_00/trace"] == pytest.approx(0.2, rel=1e-4)
    resumed, callback = hf_run(tmp_path, resume=True)
    assert callback.stabiliser.steps == 6
    for one, two in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_trainer_of_transformers_lets_the_strength_choose_itself(tmp_path):
    """Its optimiser is wrapped by accelerate, in one that has no hooks; the choice is that of a plain loop."""
    torch.manual_seed(0)
    model = llama()
    rows = torch.randint(0, 40, (8, 8))
    plain = deepcopy(model)
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        per_device_train_batch_size=8,
        max_grad_norm=0.0,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
    )
    callback = hf.LocAteRCallback(strength="auto")
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    stabiliser = LocAteR(plain, strength="auto", optimizer=optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        plain(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        stabiliser.step()
    assert callback.stabiliser.strength > 0
    assert callback.stabiliser.strength == pytest.approx(stabiliser.strength, rel=1e-4)


def test_in_a_search_of_hyperparameters_the_state_lies_in_the_folder_of_its_trial(tmp_path):
    callback = hf.StabiliserCallback(lambda model, optimizer: QKClip(model))
    callback.stabiliser = LocAteR(llama(), strength=0.1)
    trials = [tmp_path / f"run-{trial}" / "checkpoint-2" for trial in range(2)]
    for age, folder in enumerate(trials):
        folder.mkdir(parents=True)
        os.utime(folder, (age, age))
    state = TrainerState(global_step=2, is_hyper_param_search=True)
    callback.on_save(TrainingArguments(str(tmp_path), report_to=[], use_cpu=True), state, TrainerControl())
    assert [(folder / hf.FILE).exists() for folder in trials] == [False, True]


def test_an_optimiser_without_hooks_is_refused():
    class Wrapper(torch.optim.Optimizer):
        def __init__(self):
            """As accelerate's: without the base's own."""

    with pytest.raises(Refusal, match='an optimiser with hooks, for strength="auto", got Wrapper'):
        innermost(Wrapper())


def test_a_step_that_mixed_precision_skipped_is_skipped():
    class Counting(QKClip):
        steps = 0

        def step(self):
            self.steps += 1

    callback = hf.StabiliserCallback(lambda model, optimizer: Counting(model))
    callback.stabiliser = Counting(llama())
    for skipped in (True, False):
        optimizer = type("Wrapped", (), {"step_was_skipped": skipped})()
        callback.on_optimizer_step(None, None, None, optimizer=optimizer)
    assert callback.stabiliser.steps == 1


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)

    def training_step(self, batch):
        return self.encoder(batch).square().mean() * batch.mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def lightning_run(folder: Path, *, resume: bool = False) -> Regression:
    torch.manual_seed(0)
    module = Regression()
    callback = lightning.LocAteRCallback(model="encoder", strength=1e-2, mean=Projected(WarmUp(0.3, steps=8)))
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(
        max_steps=8, accelerator="cpu", log_every_n_steps=2, callbacks=[callback, saving], **quiet
    )
    # One batch over and over: Lightning itself does not take up the data where it was.
    data = torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(2)).repeat(8, 1, 1)
    trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=folder / "step=3.ckpt" if resume else None)
    assert callback.stabiliser.steps == 8
    assert "qk/layer_00/xi" in trainer.callback_metrics
    return module


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_lightning_resumes_to_the_bit(tmp_path):
    whole = lightning_run(tmp_path)
    resumed = lightning_run(tmp_path, resume=True)
    for one, two in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_page_on_own_stabilisers_runs_and_its_gradient_is_autograds():
    text = (TESTS.parent / "docs" / "own_stabiliser.md").read_text(encoding="utf-8")
    names: dict = {}
    exec("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), names)
    before = names["model"].transformer.h[0].attn.c_attn.weight.detach().clone()
    names["own"].step()
    torch.testing.assert_close(names["model"].transformer.h[0].attn.c_attn.weight.detach(), 0.999 * before)
    query, key = (torch.randn(3, 4, 9, dtype=torch.float64, requires_grad=True) for _ in range(2))
    w = key.mT @ query
    expected = (w - w.mT).square().sum() / 2
    scale = names["Asymmetry"]()
    torch.testing.assert_close(names["penalty"](query, key, scale=scale).sum(), expected)
    found = names["gradient"](query.detach(), key.detach(), scale=scale)
    for one, by in zip(found, torch.autograd.grad(expected, (query, key)), strict=True):
        torch.testing.assert_close(one, by)


@pytest.mark.slow
@uses_torchrun
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_trainer_of_transformers_under_deepspeed(stage, tmp_path):
    """In bf16 on two processes: LocAteR shrinks queries and keys as on one, and the monitor sees smaller logits."""
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: DS_BUILD_OPS=0 pip install deepspeed")
    output = torchrun("trainer_deepspeed.py", stage, tmp_path, num_processes=2, DS_ACCELERATOR="cpu")
    (line,) = [line.split() for line in output.splitlines() if line.startswith(f"stage {stage}: ")]
    held, without, num_reports, small, seen = map(float, line[2:])
    assert held < 0.9 * without and small < 0.8 * seen and num_reports == 4
