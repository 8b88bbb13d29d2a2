"""The Trainer of transformers with a DeepSpeed config, on gloo and a CPU: `torchrun trainer_deepspeed.py STAGE FOLDER`.

Prints the mean norm of the queries' and keys' weights at the end, with LocAteR and without, and what the monitor saw.
"""

import sys

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from locater.integrations.hugging_face import AttentionCallback, LocAteRCallback

STEPS, ROWS = 8, torch.randint(0, 40, (8, 8), generator=torch.Generator().manual_seed(1))


class Seen(AttentionCallback):
    """Keeps the largest logit of every report."""

    def __init__(self, **options):
        super().__init__(**options)
        self.logits: list[float] = []

    def on_step_end(self, args, state, control, **kwargs):
        before = self.report
        super().on_step_end(args, state, control, **kwargs)
        if self.report is not before:
            self.logits.append(max(self.report.training[0].statistics["max_logit"]))


def trained(stage: int, folder: str, *further) -> tuple[float, list[float]]:
    torch.manual_seed(0)
    sizes = dict(n_layer=2, n_head=2, n_embd=16, vocab_size=40, n_positions=8, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0, initializer_range=0.3))
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    arguments = TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=4, bf16=True, use_cpu=True, deepspeed=config, report_to=[],
        disable_tqdm=True, save_strategy="no", learning_rate=1e-2, lr_scheduler_type="constant", max_grad_norm=0.0,
    )  # fmt: skip
    seen = Seen(every=2)
    data = [{"input_ids": row, "labels": row} for row in ROWS]
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[*further, seen])
    trainer.train()
    weights = [block.attn.c_attn.weight for block in model.transformer.h]
    with deepspeed.zero.GatheredParameters(weights):
        norms = [float(weight.detach()[:, :32].float().norm()) for weight in weights]
    return sum(norms) / len(norms), seen.logits


def main() -> None:
    deepspeed.ops.__compatible_ops__ = {}  # compile nothing
    stage, folder = int(sys.argv[1]), sys.argv[2]
    without, seen = trained(stage, folder)
    held, small = trained(stage, folder, LocAteRCallback(strength=0.3))
    if torch.distributed.get_rank() == 0:
        print(f"stage {stage}: {held:.4f} {without:.4f} {len(seen)} {small[-1]:.4f} {seen[-1]:.4f}", flush=True)


if __name__ == "__main__":
    main()
