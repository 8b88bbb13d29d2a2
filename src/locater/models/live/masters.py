"""Master weights: fp32 copies that optimisers for half precision keep, and write over the parameters at every step.

A change of a parameter alone is undone there. `current` and `write` are the door for all that changes parameters: they
read and write the copy too. DeepSpeed and Megatron name it on the parameter, others are found in the optimiser by its
values; where there is one that cannot be found, `write_check.py` refuses.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ...errors import refusal


class Master(ABC):
    """The fp32 copy of one parameter."""

    @abstractmethod
    def read(self) -> Tensor:
        """All entries in fp32, of the parameter's shape; the copy's own memory where that can be."""

    @abstractmethod
    def write(self, value: Tensor) -> None:
        """Set the copy."""

    @property
    def owned(self) -> Tensor | None:
        """The tensor that the optimiser has in its groups in place of the parameter, if it is of the same shape."""
        return None

    def second_moment(self) -> Tensor | None:
        """Adam's mean of squared gradients where it is not under `owned` in the optimiser's state."""
        return None


@dataclass(frozen=True)
class Copy(Master):
    """A tensor of the parameter's shape, or (Megatron's distributed optimiser) a run of its entries."""

    parameter: Tensor
    get: Callable[[], Tensor]

    @property
    def owned(self) -> Tensor | None:
        return self.get() if self.get().shape == self.parameter.shape else None

    def read(self) -> Tensor:
        copy = self.get().detach()
        if copy.shape == self.parameter.shape:
            return copy
        entries = self.parameter.detach().float().flatten()
        entries[self._run()] = copy.flatten()
        return entries.view(self.parameter.shape)

    def write(self, value: Tensor) -> None:
        copy = self.get().detach()
        if copy.shape == self.parameter.shape:
            local_part(copy).copy_(local_part(value))
        else:
            copy.copy_(value.flatten()[self._run()].view(copy.shape))

    def _run(self) -> slice:
        """The entries of the parameter that the copy holds: those that it rounds to."""
        entries, held = self.parameter.detach().flatten(), self.get().detach().flatten().to(self.parameter.dtype)
        last = len(entries) - len(held)
        for start in (entries[: last + 1] == held[0]).nonzero().flatten().tolist() if len(held) else ():
            if torch.equal(entries[start : start + len(held)], held):
                return slice(start, start + len(held))
        if not len(held):
            return slice(0, 0)
        raise refusal("a master weight with the values of its parameter", "other values", "write before anything else")


@dataclass(frozen=True)
class DeepSpeed(Master):
    """ZeRO stages 1 and 2 and the bf16 optimiser: a flat copy, cut into partitions; every process must come by here."""

    parameter: Any

    def read(self) -> Tensor:
        return self.parameter.get_full_hp_param()

    def write(self, value: Tensor) -> None:
        self.parameter.set_full_hp_param(value)

    def second_moment(self) -> Tensor | None:
        return self.parameter.get_full_hp_param("exp_avg_sq")


@dataclass(frozen=True)
class DeepSpeed3(Master):
    """ZeRO stage 3: the parameter itself is an empty placeholder between passes."""

    parameter: Any

    @property
    def optimizer(self) -> Any:
        if not self.parameter.requires_grad:
            raise refusal("a trained parameter", "a frozen one that DeepSpeed ZeRO-3 has partitioned", "use stage 2")
        if getattr(self.parameter, "_z3_optimizer", None) is None:
            remedy = "attach after deepspeed.initialize"
            raise refusal("a parameter with an optimiser", "one that DeepSpeed ZeRO-3 has partitioned", remedy)
        return self.parameter._z3_optimizer

    def read(self) -> Tensor:
        return self.optimizer.get_full_hp_param(self.parameter)

    def write(self, value: Tensor) -> None:
        part = self.parameter.ds_tensor  # this process's entries, padded at the end
        number = torch.distributed.get_rank(self.parameter.ds_process_group)
        entries = value.flatten()[number * part.numel() : (number + 1) * part.numel()]
        padded = torch.nn.functional.pad(entries, (0, part.numel() - len(entries)))
        self.optimizer.set_local_hp_param(padded, self.parameter)
        part.data.copy_(padded)

    def second_moment(self) -> Tensor | None:
        try:
            return self.optimizer.get_full_hp_param(self.parameter, "exp_avg_sq")
        except KeyError:  # before the first step
            return None


KNOWN: Any = WeakTensorKeyDictionary()  # masters that were found in optimisers


def master_of(parameter: Tensor) -> Master | None:
    """The parameter's fp32 copy; None where there is none, or none that is known."""
    if hasattr(parameter, "ds_id"):
        return DeepSpeed3(parameter)
    if hasattr(parameter, "_hp_mapping"):
        return DeepSpeed(parameter)
    if isinstance(getattr(parameter, "main_param", None), Tensor):
        return Copy(parameter, lambda: parameter.main_param)  # type: ignore[attr-defined]
    return KNOWN.get(parameter)


def current(parameter: Tensor) -> Tensor:
    """The parameter at the precision at which it is trained: its master, or itself."""
    master = master_of(parameter)
    return parameter.detach() if master is None else master.read()


@torch.no_grad()
def write_master(parameter: Tensor, value: Tensor) -> None:
    """Set a parameter, and its master; a sharded one by a value that is sharded alike, or by its own part of it."""
    master = master_of(parameter)
    if master is not None:
        master.write(value)
    target, source = local_part(parameter.detach()), local_part(value)
    if target.numel() and (target.data_ptr() != source.data_ptr() or target.dtype != source.dtype):
        target.copy_(source)


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
