"""Find a head's gate: the factor of its output between the kernel and the output projection.

The output of a call is followed through reshapes and casts, which move numbers and change none, to a product with
something that was not made of it (a gate: any shape that broadcasts) and on to the output projection. Anything else
that happens to it on the way (a norm, a sum, a difference of two maps) ends the search, and the gate is not known.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

CLOSED = 0.1  # a gate below lets a tenth of the head's output through
MOVES = (
    *(getattr(owner, name) for owner in (torch, Tensor) for name in (
        "transpose", "permute", "reshape", "flatten", "squeeze", "unsqueeze", "swapaxes", "movedim", "unflatten",
        "swapdims", "narrow", "select")),
    Tensor.view, Tensor.view_as, Tensor.reshape_as, Tensor.__getitem__,
    *(vars(torch._C.TensorBase)[name].__get__ for name in ("mT", "T")),
)  # fmt: skip
SAME = (
    Tensor.contiguous, Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type_as,
    Tensor.type, Tensor.clone, torch.clone, Tensor.detach, functional.dropout, torch.dropout,
)  # fmt: skip
TIMES = (torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.mul_, Tensor.__mul__, Tensor.__rmul__)
TIMES = (*TIMES, Tensor.__imul__)
PRODUCTS = (
    functional.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.einsum,
    Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__, functional.conv1d, torch.conv1d,
)  # fmt: skip
Gate = Float[Tensor, "texts heads queries"] | None  # the mean of what the output is multiplied by; None: nothing


@dataclass(frozen=True, eq=False)
class Step:
    """A move, to be made again on other numbers: only where a gate asks which of them belong to which head."""

    func: Any
    args: tuple
    kwargs: dict[str, Any]
    place: int  # of the followed tensor among the arguments

    def again(self, tensor: Tensor) -> Tensor:
        """Numbers may lie otherwise than those that were moved: a view needs them in order."""
        tensor = tensor.contiguous() if self.func in (Tensor.view, Tensor.view_as) else tensor
        return self.func(*self.args[: self.place], tensor, *self.args[self.place + 1 :], **self.kwargs)


@dataclass(frozen=True, eq=False)
class Branch:
    """A tensor that holds the output's numbers, moved and multiplied; `is_weights`: only the softmax so far."""

    at: "weakref.ref[Tensor]"
    is_weights: bool = False
    steps: tuple[Step, ...] = ()
    gate: Gate = None


@dataclass(eq=False)
class Trail:
    """One call's output on its way to the output projection."""

    shape: tuple[int, int, int]  # texts, heads, queries
    heads_first: bool  # whether the output is (texts, heads, queries, d_value)
    found: Callable[[Gate], None]
    is_weights: bool = False  # where attention is written out: the softmax, whose next product is the output
    full: tuple[int, ...] = ()  # the output's shape
    branches: list[Branch] = field(default_factory=list)
    ends: list[Gate] = field(default_factory=list)  # gates with which it came to a product
    is_lost: bool = False  # something else was made of it too

    def fits(self, output: Tensor) -> bool:
        """Tell whether the output is one number per text, query, head and row."""
        texts, heads, queries = self.shape
        shape = (texts, heads, queries) if self.heads_first else (texts, queries, heads)
        self.full, rows = tuple(output.shape), tuple(output.shape[:-1])
        joined = self.heads_first and rows == (texts * heads, queries)  # as bmm takes them
        return rows == shape or joined or (rows == shape[1:] and texts == 1)

    def close(self) -> None:
        """One way to the output projection is an answer; several, of which some are gated, are none."""
        if not self.is_lost and (len(self.ends) == 1 or (self.ends and all(end is None for end in self.ends))):
            self.found(self.ends[0])

    def multiplied(self, branch: Branch, by: Tensor, shape: torch.Size) -> Gate:
        """The gate with one more factor: its mean over each head's numbers."""
        with torch.no_grad():
            index = self._places(branch).expand(shape).reshape(-1).to(by.device)
            values = by.detach().double().expand(shape).reshape(-1)
            sums = values.new_zeros(self.shape).flatten().index_add(0, index, values)
            mean = (sums / self.full[-1]).view(self.shape)
        return mean if branch.gate is None else branch.gate * mean

    def _places(self, branch: Branch) -> Tensor:
        """Compute which (text, head, query) every number of the followed tensor belongs to."""
        index = torch.arange(math.prod(self.shape)).view(self.shape)
        index = index if self.heads_first else index.transpose(1, 2)
        index = index.reshape(self.full[:-1])[..., None].expand(self.full)
        for step in branch.steps:
            index = step.again(index)
        return index


class Trails:
    """The outputs under way in one pass, told of every operation. Known by weak references: no tensor is held."""

    def __init__(self) -> None:
        self.expected: Trail | None = None
        self.open: Trail | None = None

    def expect(self, trail: Trail) -> None:
        """The output of the call that is being handled is to be followed."""
        self.expected = trail

    def begin(self, output: object) -> None:
        """A call has given its output."""
        self.close()
        trail, self.expected = self.expected, None
        output = output[0] if isinstance(output, tuple) and output else output
        if trail is None or type(output) is not Tensor or output.is_nested:
            return
        if trail.is_weights or trail.fits(output):
            trail.branches.append(Branch(weakref.ref(output), trail.is_weights))
            self.open = trail

    def nothing_else(self) -> None:
        """torch's own module: its output projection comes next, out of sight."""
        if self.open is not None:
            self.open.ends.append(None)
        self.close()

    def close(self) -> None:
        """Another attention begins, or the pass is over."""
        trail, self.open = self.open, None
        if trail is not None:
            trail.close()

    def follow(self, func: Any, args: tuple, kwargs: dict[str, Any], output: object) -> None:
        """One operation of the pass: what it does to the output that is under way, if anything."""
        trail = self.open
        if trail is None or not isinstance(output, Tensor):
            return
        for place, one in enumerate(_operands(func, args)):
            own = getattr(one, "_local_tensor", one)  # this process's part of a tensor that is spread over several
            branch = next((b for b in trail.branches if own is not None and b.at() is own), None)
            if branch is not None:
                try:
                    further = _step(trail, branch, func, args, kwargs, place, output)
                except (RuntimeError, TypeError, IndexError, ValueError):  # to be watched never ends a run
                    trail.is_lost, further = True, None
                trail.branches = [b for b in trail.branches if b.at() is not None] + ([further] if further else [])
                return


def _step(
    trail: Trail, branch: Branch, func: Any, args: tuple, kwargs: dict[str, Any], place: int, output: Tensor
) -> Branch | None:
    """The branch that an operation makes of another; None where the output's numbers are no longer in it."""
    moved = replace(branch, at=weakref.ref(output))
    if func in PRODUCTS:
        if branch.is_weights and trail.fits(output):
            return replace(moved, is_weights=False)
        if not branch.is_weights:
            trail.ends.append(branch.gate)
        return None
    if func in SAME or (func in MOVES and branch.is_weights):
        return moved
    if branch.is_weights or (func not in MOVES and func not in TIMES):
        trail.is_lost |= not branch.is_weights
        return None
    if func in MOVES:
        step = Step(func, (*args[:place], None, *args[place + 1 :]), kwargs, place)
        return replace(moved, steps=(*branch.steps, step))
    by = args[1 - place]
    if not isinstance(by, Tensor):
        return moved
    if any(one.at() is by for one in trail.branches):  # a product of two of its own
        trail.is_lost = True
        return None
    spread = Step(Tensor.expand, (None, output.shape), {}, 0)
    return replace(moved, gate=trail.multiplied(branch, by, output.shape), steps=(*branch.steps, spread))


def _operands(func: Any, args: tuple) -> tuple:
    """List the operands of a product: einsum takes them behind a pattern, or as a list."""
    return tuple(args[1]) if func is torch.einsum and len(args) == 2 and isinstance(args[1], list | tuple) else args
