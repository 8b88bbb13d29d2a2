"""Writes into parameters: by whom, and whether they last.

Master weights are looked for in the optimiser, and hidden ones refused.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...errors import refusal
from .masters import KNOWN, Copy, local_part, master_of
from .tensors import unwrap

HALF = (torch.bfloat16, torch.float16)
TRIES = 3  # steps after which a parameter without an owner is taken to be updated in place
PATIENCE = 10  # steps of ours in which an optimiser that trains has stepped; a loss scaler leaves some out
DEPTH = 4  # of lists and tables within an optimiser that may hold copies
KEPT = "parameters that keep what is written into them"
OVERWRITTEN = "an optimiser that writes a copy of its own over them (master weights)"
NAME_IT = "name the copy as `parameter.main_param`"
Optimizers = Optimizer | Sequence[Optimizer]


def several(optimizer: Optimizers | None) -> list[Optimizer]:
    """One optimiser or more as a list."""
    if optimizer is None:
        return []
    listed = [optimizer] if hasattr(optimizer, "param_groups") else list(optimizer)  # type: ignore[arg-type,list-item]
    if not listed:
        raise refusal("an optimiser, or several", "an empty list", "leave it out to add penalty() to the loss")
    return listed  # type: ignore[return-value]


@dataclass
class Mark:
    """A value put into the first entry of a parameter for one step."""

    entry: Tensor
    before: Tensor
    value: Tensor
    is_owned: bool

    @property
    def is_kept(self) -> bool:
        return bool((self.entry - self.value).abs() < (self.entry - self.before).abs())


class WriteCheck:
    """Finds the masters of parameters that are to be written in the optimiser that steps them.

    In doubt are parameters of half precision whose optimiser is not torch's own and shows no copy after its first step,
    in which copies are often made. One entry of each is set to another value just before the second, and looked at
    after it by `check`: if that is gone, a hidden copy was written over the parameter, and with it what had been
    written after the first step. Then it is refused; else the entry is set back, one update the poorer.
    """

    def __init__(self, parameters: Iterable[Tensor], optimizer: Optimizers | None, remedy: str) -> None:
        self.remedy, self.tries = remedy, 0
        self.stepped: list[Optimizer] = []
        self.marks: list[Mark] = []
        self.hook: Any = None
        self.doubtful = list(parameters)
        optimizers = several(optimizer)
        self.idle = Idle(optimizers)
        for one in optimizers or [None]:
            self.doubtful = in_doubt(self.doubtful, one)
        if self.doubtful:
            note = _weakly(self._before)
            inner = inner_optimizer(optimizers[0]) if len(optimizers) == 1 else None
            # The optimiser's own hooks run in the order in which they came: after those that look at the weights.
            self.hook = register_optimizer_step_pre_hook(note) if inner is None else inner.register_step_pre_hook(note)

    @torch.no_grad()
    def _before(self, optimizer: Optimizer) -> None:
        if self.marks:
            return
        if not any(one is optimizer for one in self.stepped):
            self.stepped.append(optimizer)
            return
        owned = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for parameter in self.doubtful:
            local = local_part(parameter.detach())
            if local.numel():
                entry = local[(0,) * local.dim()]
                self.marks.append(Mark(entry, entry.clone(), entry + 1 + local.abs().amax(), id(parameter) in owned))
                entry.copy_(self.marks[-1].value)

    @torch.no_grad()
    def check(self) -> None:
        """Refuse where the last step undid a change; call it after the optimiser's step, before anything is written."""
        if words := self.idle.check():
            warnings.warn(words, stacklevel=3)
        marks, self.marks, self.tries = self.marks, [], self.tries + 1
        for optimizer in self.stepped if not marks else ():
            self.doubtful = in_doubt(self.doubtful, optimizer)
        for mark in marks:
            if not mark.is_kept:
                self.close()
                raise refusal(KEPT, OVERWRITTEN, f"{self.remedy}, or {NAME_IT}")
            mark.entry.copy_(mark.before)
        if not self.doubtful or (marks and all(mark.is_owned for mark in marks)) or self.tries > TRIES:
            self._settle()

    def close(self) -> None:
        self.idle.close()
        self._settle()

    def _settle(self) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook, self.stepped = None, []


class Idle:
    """Tells of an optimiser that does not step: perhaps another was made, which trains in its place."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        inner = {one: inner_optimizer(one) for one in optimizers}
        self.names = {own: f"optimiser {n} ({type(own).__name__})" for n, own in enumerate(inner.values()) if own}
        self.since = dict.fromkeys(self.names, 0)
        self.handles = [own.register_step_pre_hook(_weakly(self._stepped)) for own in self.names]

    def _stepped(self, optimizer: Optimizer) -> None:
        self.since[optimizer] = 0

    def check(self) -> str:
        """Name each, once, that has not stepped in PATIENCE calls of this."""
        self.since = {own: count + 1 for own, count in self.since.items()}
        idle = [self.names[own] for own, count in self.since.items() if count == PATIENCE + 1]
        words = f"has not stepped for {PATIENCE} steps: is it the one that trains?"
        return f"{', '.join(idle)} {words}" if idle else ""

    def close(self) -> None:
        while self.handles:
            self.handles.pop().remove()


def in_doubt(parameters: Iterable[Tensor], optimizer: Optimizer | None) -> list[Tensor]:
    """Trained parameters of half precision that may have a hidden copy; those that are seen become known."""
    halves = {id(one): one for one in parameters if one.dtype in HALF and one.requires_grad}
    doubtful = [one for one in halves.values() if master_of(one) is None]
    if optimizer is None:
        return doubtful
    is_plain = type(optimizer).__module__.startswith("torch.optim")  # these update their parameters in place
    owned = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for parameter in doubtful:
        if (master := find_copy(parameter, optimizer)) is not None:
            KNOWN[parameter] = master
    return [one for one in doubtful if master_of(one) is None and not (is_plain and id(one) in owned)]


class RestoreCheck:
    """Tells of an optimiser whose next step brings back the values from before parameters were set back."""

    def __init__(self, parameters: Iterable[Tensor], optimizer: Optimizer, tell: Callable[[str], None]) -> None:
        self.tell, self.num_steps = tell, 0
        self.before = [(one, one.detach().clone()) for one in in_doubt(parameters, optimizer)]
        self.hook: Any = None

    def begin(self, optimizer: Optimizer) -> None:
        """Call it when they are set back."""
        self.after = [one.detach().clone() for one, _ in self.before]
        if self.before and (inner := inner_optimizer(optimizer)) is not None:
            self.hook = inner.register_step_pre_hook(self._look)

    def _look(self, *given: object) -> None:
        """At the second step: wrappers copy after the optimiser inside of them has stepped."""
        self.num_steps += 1
        if self.num_steps < 2:
            return
        self.hook.remove()
        for (parameter, before), after in zip(self.before, self.after, strict=True):
            now = local_part(parameter.detach()).float()
            distances = [float((now - local_part(values).float()).norm()) for values in (before, after)]
            if distances[0] < distances[1]:
                self.tell(str(refusal(KEPT, OVERWRITTEN, NAME_IT)))
                return


def _weakly(method: Callable[[Optimizer], None]) -> Callable[..., None]:
    """A hook that does not keep its owner alive."""
    reference = weakref.WeakMethod(method)

    def hook(optimizer: Optimizer, *further: object) -> None:
        if (living := reference()) is not None:
            living(optimizer)

    return hook


def inner_optimizer(optimizer: Any) -> Optimizer | None:
    """The optimiser that has hooks: accelerate, and so transformers' Trainer, wraps it in one that has none."""
    while optimizer is not None and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer


def find_copy(parameter: Tensor, optimizer: Optimizer) -> Copy | None:
    """The one fp32 tensor within an optimiser that rounds to the parameter; None for none or several."""
    state = optimizer.state.get(parameter, {})
    for key, value in state.items() if isinstance(state, Mapping) else ():
        if isinstance(value, Tensor) and _is_copy(value, parameter):
            # Looked up each time: loading a state puts another tensor there.
            return Copy(parameter, lambda key=key: optimizer.state[parameter][key])
    copies = {id(one): one for one in _tensors(vars(optimizer), DEPTH) if _is_copy(one, parameter)}
    if len(copies) != 1:
        return None
    (copy,) = copies.values()
    return Copy(parameter, lambda: copy)


def _is_copy(tensor: Tensor, parameter: Tensor) -> bool:
    if tensor.dtype != torch.float32 or tensor.shape != parameter.shape or tensor.device != parameter.device:
        return False
    copy, own = local_part(tensor.detach()), local_part(parameter.detach())
    first, everything = slice(1), slice(None)  # few tensors come past the first row
    return all(torch.equal(copy[part].to(own.dtype), own[part]) for part in (first, everything))


def _tensors(value: object, depth: int) -> Iterator[Tensor]:
    """Tensors in lists and tables within each other; those of the state have their parameter as the key."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(one, depth - 1)
    elif depth and type(value).__name__ == "AmpOptimizerState":  # Apex keeps its lists there
        yield from _tensors(vars(value), depth - 1)


# ---------------------------------------------------------------------------------------------------------- who writes
_WRITERS: "WeakKeyDictionary[nn.Module, WeakSet]" = WeakKeyDictionary()


def note_writer(model: nn.Module, stabiliser: object) -> None:
    """Note a stabiliser that is at work on a model, so that no alarm suggests it again; nothing is kept alive."""
    _WRITERS.setdefault(unwrap(model), WeakSet()).add(stabiliser)


def forget_writer(stabiliser: object) -> None:
    for known in _WRITERS.values():
        known.discard(stabiliser)


def writers(model: nn.Module) -> set[str]:
    """Class names of the stabilisers at work."""
    return {type(one).__name__ for one in _WRITERS.get(unwrap(model), ())}
