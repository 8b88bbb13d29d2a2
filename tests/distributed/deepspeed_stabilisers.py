"""Stabilisers under DeepSpeed itself, on gloo and a CPU: `torchrun deepspeed_stabilisers.py STAGE`.

Prints one line for each stabiliser: its effect after forty steps in bf16, with AdamW in fp32, and without it.
"""

import os
import sys
import warnings
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).parents[1]))

import deepspeed  # noqa: E402
import torch  # noqa: E402

from locater.stabilisers import LocAteR, QKClip, QKDecay  # noqa: E402
from master_weights import plain  # noqa: E402
from stabiliser_models import TOKENS, llama  # noqa: E402

STEPS = 40
ARMS = {
    "LocAteR": lambda model, optimizer: LocAteR(model, strength=1.0, optimizer=optimizer),
    "Projected": lambda model, optimizer: LocAteR(model, strength=0.3, optimizer=optimizer, mean="initial"),
    "QKDecay": lambda model, optimizer: QKDecay(model, decay=8.0, optimizer=optimizer),
    "QKClip": lambda model, optimizer: QKClip(model, threshold=0.02),
    "none": lambda model, optimizer: None,
}


def effect(model) -> float:
    """Σ η over layers."""
    watch = LocAteR(model, strength=0.0)
    metrics = watch.metrics()
    watch.detach()
    return sum(value for key, value in metrics.items() if key.endswith("eta"))


def make(dtype: torch.dtype):
    torch.manual_seed(0)
    return llama(tie_word_embeddings=False).to(dtype)


def run(model, optimizer, backward, step, stabiliser) -> float:
    for number in range(STEPS + 1):  # the last step is the optimiser's
        backward(model(TOKENS, labels=TOKENS.flip(1)).loss)
        step()
        if stabiliser is not None and number < STEPS:
            stabiliser.step()
    return effect(model)


def in_fp32(build) -> float:
    model = make(torch.float32)
    optimizer = plain(model.parameters())

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return run(model, optimizer, torch.Tensor.backward, step, build(model, optimizer))


def under_deepspeed(build, stage: int) -> float:
    model = make(torch.float32)
    config = {
        "train_micro_batch_size_per_gpu": len(TOKENS),
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=plain(model.parameters()), config=config)
    return run(engine.module, optimizer, engine.backward, engine.step, build(engine.module, optimizer))


def main() -> None:
    deepspeed.ops.__compatible_ops__ = {}  # compile nothing
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    stage = int(sys.argv[1])
    without = in_fp32(ARMS["none"])
    for name in sys.argv[2:] or list(ARMS):
        expected, found = in_fp32(ARMS[name]), under_deepspeed(ARMS[name], stage)
        if torch.distributed.get_rank() == 0:
            print(f"stage {stage}: {name} {found:.5f} {expected:.5f} {without:.5f}", flush=True)


if __name__ == "__main__":
    main()
