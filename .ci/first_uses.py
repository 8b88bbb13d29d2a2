"""What users do first, by the public doors alone: run in the folder and environment that are to be tested."""

import subprocess
import sys
from pathlib import Path

import gguf
import numpy
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import locater
from locater.integrations.hugging_face import LocAteRCallback

TRAIN = "train --preset small --steps 2 --set num_layers=1 --set batch=2 --set tokenizer=bpe"
COMMANDS = (
    "--version",
    "doctor",
    "scan",
    "scan gpt2 --table heads.parquet --json heads.json",
    "scan llama --heads",
    "scan model.gguf",
    "compare gpt2 other",
    "theory --method all --plot profile.png",
    "theory --head llama:1.1",
    "explore -o explore.html",
    "report gpt2 -o page.html",
    "demo --quick",
    f"{TRAIN} --out mine/without",
    f"{TRAIN} --strength 1e-3 --out mine/with",
    "runs mine --against without --plot curves.png",
    "predict mine/with/model",
    "families llama",
)


def save_gguf(path: str) -> None:
    """The attention of a tiny Llama as llama.cpp's own writer stores it."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(16)
    writer.add_context_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("blk.0.attn_norm.weight", numpy.ones(16, dtype=numpy.float32))
    for name in ("q", "k", "v", "output"):
        writer.add_tensor(f"blk.0.attn_{name}.weight", numpy.eye(16, dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def save_models() -> GPT2LMHeadModel:
    sizes = dict(vocab_size=128, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64, **sizes))
    model.save_pretrained("gpt2")
    save_gguf("model.gguf")
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=4, n_embd=64, **sizes)).save_pretrained("other")
    shape = dict(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    LlamaForCausalLM(LlamaConfig(**shape, **sizes)).save_pretrained("llama")
    return model


def watched_and_stabilised(model: GPT2LMHeadModel) -> None:
    """A loop of two steps, as the README has it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stabiliser = locater.LocAteR(model, strength="auto", optimizer=optimizer)
    tokens = torch.randint(0, 128, (4, 32))
    with locater.AttentionMonitor(model, every=1) as monitor:
        for _ in range(2):
            model(input_ids=tokens, labels=tokens).loss.backward()
            report = monitor.step()
            optimizer.step()
            stabiliser.step()
            optimizer.zero_grad()
    assert 0 < report.metrics()["attn/layer_00/entropy"] < 5
    assert len(locater.scan(model).heads) == 8 == len(locater.scan("gpt2").to_frame())


def trained_by_hugging_face(model: GPT2LMHeadModel) -> None:
    data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 128, (8, 16))]
    arguments = TrainingArguments("trainer", max_steps=2, report_to=[], use_cpu=True, save_strategy="no")
    Trainer(model, arguments, train_dataset=data, callbacks=[LocAteRCallback(strength="auto")]).train()


def main() -> int:
    model = save_models()
    watched_and_stabilised(model)
    trained_by_hugging_face(model)
    print("a loop of one's own and Hugging Face's Trainer: work")
    failed = 0
    program = Path(sys.executable).parent / "locater"
    for command in COMMANDS:
        done = subprocess.run([program, *command.split()], capture_output=True, text=True)
        failed += done.returncode != 0
        print(f"locater {command}: {'works' if not done.returncode else 'FAILS: ' + done.stderr[-2000:]}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
