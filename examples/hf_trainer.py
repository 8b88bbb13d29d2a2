"""LocAteR in the Trainer of Hugging Face transformers: one argument more."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from locater.integrations.hugging_face import LocAteRCallback
from locater.stabilisers import Projected, WarmUp

torch.manual_seed(0)
sizes = dict(hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64)
model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=128))
tokens = torch.randint(0, 128, (64, 32))
data = [{"input_ids": row, "labels": row} for row in tokens]

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        max_steps=12,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=6,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    locater = LocAteRCallback(strength="auto", mean=Projected(WarmUp(0.5, steps=10)))
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[locater])
    trainer.train()

for name, value in trainer.state.log_history[-2].items():
    if name.startswith("qk/"):
        print(f"{name} {value:.3f}")
