"""What a scan and a step with LocAteR cost for models that no machine here holds: `python bench/scale.py`.

The model exists on torch's meta device only: its tensors have names, shapes and types, and no memory. A checkpoint made
of these counts what a scan asks of it and answers with random numbers. One layer is really scanned; the others cost the
same, so the whole is that times their number.
"""

import argparse
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from locater.checkpoints.base import Checkpoint, Entry, Rows
from locater.models import Config, open_model
from locater.models.reader import read_heads
from locater.scanning.layer import Settings, analyse

GIGABYTE = 1e9
MODELS = {
    "llama-405b": dict(
        model_type="llama", hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, vocab_size=128256,
        num_attention_heads=128, num_key_value_heads=8, tie_word_embeddings=False,
    ),
    "latent-1t": dict(
        model_type="deepseek_v3", hidden_size=7168, intermediate_size=18432, moe_intermediate_size=2048,
        vocab_size=163840, num_hidden_layers=61, num_attention_heads=64, num_key_value_heads=64,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=384, num_experts_per_tok=8, first_k_dense_replace=1, n_group=1, topk_group=1,
    ),
}  # fmt: skip


class Imagined(Checkpoint):
    """A checkpoint without a file: random numbers of the right shape, and a count of what was asked for."""

    format = "imagined"

    def __init__(self, settings: dict) -> None:
        config = AutoConfig.for_model(**settings)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        entries = {name: Entry(tuple(tensor.shape), tensor.dtype) for name, tensor in model.state_dict().items()}
        super().__init__(entries, config=config.to_dict(), place="nowhere")
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.num_bytes = 0

    def fetch(self, name: str, rows: Rows | None) -> Tensor:
        entry = self.entry(name)
        shape = entry.shape if rows is None else (rows[1] - rows[0], *entry.shape[1:])
        tensor = torch.empty(shape, dtype=entry.dtype).normal_(std=0.02)
        self.num_bytes += tensor.numel() * tensor.element_size()
        return tensor


@contextmanager
def clock(into: dict[str, float], name: str) -> Iterator[None]:
    start = time.process_time()
    yield
    into[name] = time.process_time() - start


def measure(name: str) -> dict[str, float]:
    """One layer scanned; the whole model by multiplication."""
    checkpoint, cost = Imagined(MODELS[name]), {}
    model = open_model(Config(checkpoint.config), checkpoint)
    number = model.stacks[0][-1].number
    with clock(cost, "making_numbers"):
        layer = read_heads(model.modules({number})[0])
    with clock(cost, "scan_layer_seconds"):
        rows = analyse(layer.heads, Settings(1024)).rows
    num_layers, num_heads = len(model.stacks[0]), len(rows)
    head = layer.heads[0]
    product = 2 * head.d_head**2 * head.d_model
    return cost | {
        "parameters": checkpoint.num_parameters,
        "heads": num_heads * num_layers,
        "checkpoint_gigabytes": 2 * checkpoint.num_parameters / GIGABYTE,
        "transfer_gigabytes": checkpoint.num_bytes * num_layers / GIGABYTE,
        "scan_cpu_minutes": cost["scan_layer_seconds"] * num_layers / 60,
        "peak_gigabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIGABYTE,
        # Seven d_h×d_h×d products per head and step, against six operations per parameter and token.
        "locater_teraflop_per_step": 7 * product * num_heads * num_layers / 1e12,
        "locater_share_at_4m_tokens": 7 * product * num_heads * num_layers / (6 * checkpoint.num_parameters * 4e6),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    torch.set_num_threads(1)
    for name in parser.parse_args().models:
        print(json.dumps({"model": name} | {key: round(value, 6) for key, value in measure(name).items()}, indent=1))


if __name__ == "__main__":
    main()
