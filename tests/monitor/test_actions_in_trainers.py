"""Actions in the Trainers of transformers and Lightning, under three schedulers: done, said, resumed to the bit."""

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as Fit
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import AdamW, lr_scheduler
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from locater.integrations import hugging_face, lightning
from locater.monitor import Attach, RollBack, Stop
from locater.stabilisers import LocAteR, QKClip

pytestmark = pytest.mark.slow

STEPS, BAD, SAVED, RATE = 10, 4, 7, 1e-3
ACTIONS = {
    "roll back": lambda: RollBack(0.2),
    "QKClip": lambda: Attach(QKClip, threshold=20.0),
    "LocAteR": lambda: Attach(LocAteR, strength="auto"),
    "stop": lambda: Stop(),
}
SAID = {"roll back": "rolled back", "QKClip": "attached QKClip", "LocAteR": "attached LocAteR", "stop": "stopped"}
SCHEDULERS = {
    "LambdaLR": lambda one: lr_scheduler.LambdaLR(one, lambda n: min(1.0, (n + 1) / 3)),
    "OneCycleLR": lambda one: lr_scheduler.OneCycleLR(one, RATE, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda one: lr_scheduler.ReduceLROnPlateau(one, patience=0, factor=0.5),
}
each_way = pytest.mark.parametrize("schedule", SCHEDULERS)


def gpt() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    small = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=16, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**small, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0))


def texts():
    return torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(1)).repeat(STEPS, 1)


@torch.no_grad()
def explode(model):
    """Logits that are 1e6 times as large, as by one broken step."""
    model.transformer.h[1].attn.c_attn.weight.mul_(1e3)


class ExplodeInTrainer(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **given):
        if state.global_step == BAD:
            explode(model)


def by_transformers(action, schedule, folder, *, resume=False):
    """Train; give the model, the rates with which each step was scheduled, and how many steps were taken."""
    model = gpt()
    optimizer = AdamW(model.parameters(), lr=RATE)
    rows = [{"input_ids": row, "labels": row} for row in texts()]
    arguments = TrainingArguments(
        str(folder), max_steps=STEPS, per_device_train_batch_size=2, save_steps=SAVED, report_to=[], use_cpu=True,
        disable_tqdm=True, eval_strategy="steps", eval_steps=2, logging_steps=1, seed=0,
        lr_scheduler_type="reduce_lr_on_plateau" if schedule == "ReduceLROnPlateau" else "linear",
    )  # fmt: skip
    watch = hugging_face.AttentionCallback(every=1, on_alarm=ACTIONS[action]())
    chosen = SCHEDULERS[schedule](optimizer)
    trainer = Trainer(
        model, arguments, train_dataset=rows, eval_dataset=rows[:2], callbacks=[ExplodeInTrainer(), watch],
        optimizers=(optimizer, chosen),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED}") if resume else None)
    return model, watch.report, trainer.state.global_step


class Module(LightningModule):
    def __init__(self, schedule):
        super().__init__()
        self.model, self.schedule = gpt(), schedule

    def training_step(self, batch):
        if self.trainer.global_step == BAD:
            explode(self.model)
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = AdamW(self.parameters(), lr=RATE)
        scheduler = SCHEDULERS[self.schedule](optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "monitor": "loss"},
        }


def by_lightning(action, schedule, folder, *, resume=False):
    module = Module(schedule)
    watch = lightning.AttentionCallback(model="model", every=1, on_alarm=ACTIONS[action]())
    saving = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=SAVED, save_top_k=-1)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = Fit(max_steps=STEPS, accelerator="cpu", callbacks=[watch, saving], log_every_n_steps=1, **quiet)
    loader = DataLoader(texts(), batch_size=2)
    trainer.fit(module, loader, ckpt_path=folder / f"step={SAVED}.ckpt" if resume else None, weights_only=False)
    return module.model, watch.report, trainer.global_step


TRAINERS = {"transformers": by_transformers, "Lightning": by_lightning}


@pytest.mark.parametrize("trainer", TRAINERS)
@each_way
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.filterwarnings("ignore")
def test_an_action_is_done_said_and_resumed_to_the_bit(action, schedule, trainer, tmp_path, caplog):
    whole, _, steps = TRAINERS[trainer](action, schedule, tmp_path)
    said = [line for line in caplog.messages if SAID[action] in line]
    caplog.clear()
    assert len(said) == 1 and said[0].startswith(f"step {BAD}: ") and "because of logit explosion" in said[0]
    if action == "stop":
        assert steps == BAD + 1
        return
    assert steps == STEPS
    resumed, _, steps = TRAINERS[trainer](action, schedule, tmp_path, resume=True)
    assert steps == STEPS and SAID[action] not in caplog.text, "it was done before the state was saved"
    for (name, one), other in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
