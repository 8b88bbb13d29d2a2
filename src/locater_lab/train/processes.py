"""One process or many: who takes part, what each takes of a batch, and how the model is spread over them."""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from locater import __version__
from locater.errors import refusal


@dataclass(frozen=True)
class Processes:
    """This process among all of them; the only one unless `torchrun` started it."""

    rank: int
    count: int
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        if self.count > 1:
            dist.barrier()

    def sum(self, values: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(values)
        return values

    def any(self, flag: bool) -> bool:
        """Tell whether the flag is set in one of them."""
        if self.count == 1:
            return flag
        return bool(self.sum(torch.tensor(float(flag), device=self.device)))

    def share(self, batch: int, parts: int) -> int:
        """Texts that a process takes at once."""
        size, rest = divmod(batch, self.count * parts)
        if rest or not size:
            expected = f"a batch that {self.count} processes and {parts} parts divide evenly"
            raise refusal(expected, batch, "change batch or accumulate")
        return size


@contextmanager
def process_group(device: str) -> Iterator[Processes]:
    """The process group of all that torchrun started, by gloo or nccl, as long as the block lasts."""
    count, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    place = choose_device(device)
    if count == 1 or dist.is_initialized():
        yield Processes(rank, count, place)
        return
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    try:
        yield Processes(rank, count, place)
        dist.barrier()  # a process that leaves early takes the others' connections with it
    finally:
        dist.destroy_process_group()


def leave(code: int) -> NoReturn:
    """End a process of several whose process group is destroyed, without finalising the interpreter.

    gloo's threads outlive `destroy_process_group` as long as anything refers to the group, and DTensor's caches always
    do. One that lets go of its last tensor while Python is finalised aborts a process whose work is done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def choose_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as reason:
        raise refusal("a device that this machine has", f"{name} ({reason!s:.80})", "use device=cpu") from None
    if device.type == "cuda" and "LOCAL_RANK" in os.environ:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    return device


def distribute(model: nn.Module, *, processes: Processes, sharded: bool) -> nn.Module:
    """The model as the loop calls it: itself, replicated (DDP), or sharded in place (FSDP2)."""
    if processes.count == 1:
        return model
    if not sharded:
        return DistributedDataParallel(model)
    mesh = init_device_mesh(processes.device.type, (processes.count,))
    for layer in getattr(model, "layers", []):
        if type(layer).forward is not nn.Module.forward:  # one that is called, so that its weights are gathered then
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def unsynchronised(model: nn.Module, *, last: bool) -> AbstractContextManager:
    """Let gradients of all but the last part of a batch stay where they are."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    elif isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


def reshard(model: nn.Module) -> None:
    """After a forward pass without a backward one, FSDP2 leaves its outermost weights gathered: shard them again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def describe_software(device: torch.device) -> str:
    """Describe what decides the last bits besides config and data."""
    return f"locater {__version__} and torch {torch.__version__} on {device.type}"


def uses_bf16(precision: str, device: torch.device) -> bool:
    """Tell whether autocast is on: as asked, or with `auto` where a GPU computes in bfloat16."""
    if precision == "auto":
        return device.type == "cuda" and has_bf16(device)
    return precision == "bf16"


def has_bf16(device: torch.device) -> bool:
    """Tell whether the hardware computes in bfloat16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
