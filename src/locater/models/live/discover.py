"""Heads found by themselves: one forward pass shows which parameters make the queries and keys of each attention call.

What cannot be explained is refused with the step that could not.
"""

from contextlib import AbstractContextManager

import torch
from torch import nn

from ...attention.arguments import with_four_dimensions
from ...attention.calls import AttentionCall
from ...attention.compilation import Eagerly
from ...attention.interception import Interception
from ...errors import Refusal, missing, within
from .. import Attention
from .modules import Found
from .proving import Search
from .tensors import ModuleTensors, called, named_modules
from .watch import Sample, Watch, quietly, recorded, run


def discover(model: nn.Module, sample: Sample, tensors: ModuleTensors | None = None) -> list[Found]:
    """A row of the tables for every attention call of the pass, each parameter once; or why there is none.

    The pass runs in evaluation mode, without gradients and outside of compiled code, and changes nothing in the model.
    """
    finder = Finder(tensors or ModuleTensors(model))
    rows = finder.over(sample)
    if not rows:
        kind = type(finder.tensors.model).__name__
        raise missing(f"attention in one pass of {kind} over the sample", "name the projections by heads=…")
    return _distinct(rows)


class Finder:
    """Explains every attention call of a pass by what was recorded since the one before."""

    def __init__(self, tensors: ModuleTensors) -> None:
        self.tensors, self.watch = tensors, Watch()
        self.names = {id(module): name for name, module in named_modules(tensors.model).items()}

    def over(self, sample: Sample) -> list[Found]:
        """Every attention of one pass over a batch, in the order of the calls."""
        rows: list[Found | None] = []
        seeing = Interception(lambda call: rows.append(self.explain(call)), written_out=True)
        model = called(self.tensors.given)
        with Eagerly(), quietly(model), self.recording(), seeing:
            run(model, sample)
        return [row for row in rows if row is not None]

    def recording(self) -> AbstractContextManager[None]:
        return recorded(self.tensors, self.watch)

    def explain(self, call: AttentionCall) -> Found | None:
        """The row of a call, or why there is none; None where it is a softmax of something else."""
        if not self.may_be_attention(call):
            return None
        found = self.explained(call)
        self.watch.next_call()
        return found

    def may_be_attention(self, call: AttentionCall) -> bool:
        """Tell whether a softmax that was written out is over pairs of tokens, after products with parameters."""
        return call.logits is None or (call.logits.dim() == 4 and bool(self.watch.products))

    def name_of(self, call: AttentionCall) -> str:
        """The innermost of the model's modules that was running."""
        return next((self.names[id(module)] for module in call.modules if id(module) in self.names), "")

    def explained(self, call: AttentionCall) -> Found:
        """The row of a call by what was recorded since the last one, or why there is none."""
        return _explained(self.name_of(call), call, self.watch, self.tensors)


def _distinct(rows: list[Found]) -> list[Found]:
    """Each attention once, however often it was called."""
    places = {(one.name, (one.row.query, one.row.fused) if isinstance(one.row, Attention) else ""): one for one in rows}
    return list(places.values())


def _explained(name: str, call: AttentionCall, watch: Watch, tensors: ModuleTensors) -> Found:
    try:
        device = call.query.device.type
        with (
            within(name or type(tensors.model).__name__),
            torch._C.DisableTorchFunction(),
            torch.no_grad(),
            torch.autocast(device, enabled=False),
        ):
            row = Search(with_four_dimensions(call), watch, tensors).row()
            return Found(row.block, name, row)
    except Refusal as reason:
        return Found("decoder", name, reason)
