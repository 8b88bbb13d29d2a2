"""Run by torchrun: the trainer on several processes. `first FOLDER TEXT` starts runs by DDP and FSDP2 and stops them
in the middle, and has others diverge; `then FOLDER TEXT` resumes copies on whatever number of processes there is."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))

from locater_lab.train import run
from locater_lab.train.config import Config
from locater_lab.train.loop import Diverged
from locater_lab.train.processes import leave
from training_cases import tiny

# No dropout: it draws other numbers on other processes. A stabiliser that moves weights, and parts of batches.
CHANGED = dict(batch=8, accumulate=2, strength=1e-3, mean="1.5", mean_warmup=15, num_layers=2)
KINDS = ("ddp", "fsdp")
STOP = 8  # right behind a validation, which leaves a sharded model in another state than a step does


def quiet(sentence: str) -> None:
    pass


def main(task: str, folder: Path, text: Path) -> None:
    torch.set_num_threads(1)
    for kind in KINDS:
        if task == "first":
            run.start(tiny(text, **CHANGED, parallel=kind), folder / kind, stop_after=STOP, say=quiet)
            diverge(tiny(text, parallel=kind, learning_rate=1e20, clip=0, warmup=0), folder / f"{kind}-diverged")
        else:
            run.resume(folder / kind, say=quiet)


def diverge(config: Config, folder: Path) -> None:
    """What each process says of it, in files beside the run."""
    try:
        run.start(config, folder, say=quiet)
    except Diverged as sentence:
        folder.with_name(f"{folder.name}-{dist.get_rank()}.txt").write_text(str(sentence))


if __name__ == "__main__":
    # Once for all runs: a second group in one process would wait for what the first left in the store.
    dist.init_process_group("gloo")
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    dist.barrier()
    dist.destroy_process_group()
    leave(0)
