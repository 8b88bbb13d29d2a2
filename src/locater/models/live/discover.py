"""Heads found by themselves: one forward pass shows which parameters make the queries and keys of each attention call.

What cannot be explained is refused with the step that could not.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import nn

from ...attention.calls import AttentionCall
from ...attention.capture import Follow
from ...attention.compilation import Eagerly
from ...attention.interception import Interception
from ...errors import Refusal, missing, within
from ..module import AttentionModule, module_of_row, refused_module
from .proving import Search
from .tensors import ModuleTensors, called, named_modules
from .watch import PassRecord, Sample, quietly, recorded, run_sample


def discover(model: nn.Module, sample: Sample, tensors: ModuleTensors | None = None) -> list[AttentionModule]:
    """An attention module for every attention call of the pass, each parameter once; or why it cannot be read.

    The pass runs in evaluation mode, without gradients and outside of compiled code, and changes nothing in the model.
    """
    finder = Finder(tensors or ModuleTensors(model))
    rows = finder.over(sample)
    if not rows:
        kind = type(finder.tensors.model).__name__
        raise missing(f"attention in one pass of {kind} over the sample", "name the projections by heads=…")
    # Each attention once, however often it was called.
    return list({(name, found.query_name, found.row.fused): found for name, found in rows}.values())


class Finder:
    """Explains every attention call of a pass by what was recorded since the one before."""

    def __init__(self, tensors: ModuleTensors) -> None:
        self.tensors, self.watch = tensors, PassRecord()
        # The modules are held: one that is replaced during a pass (BigBird's) would leave its id to another.
        self.modules = named_modules(tensors.model)
        self.names = {id(module): name for name, module in self.modules.items()}

    def over(self, sample: Sample) -> list[tuple[str, AttentionModule]]:
        """Every attention of one pass over a batch, in the order of the calls, with the name of the calling module."""
        rows: list[tuple[str, AttentionModule | None]] = []
        self.run(sample, lambda call: rows.append((self.name_of(call), self.explain(call))))
        return [(name, found) for name, found in rows if found is not None]

    def run(self, sample: Sample, see: Callable[[AttentionCall], None]) -> None:
        """One recorded pass, in evaluation mode, without gradients and outside of compiled code."""
        model = called(self.tensors.given)
        with Eagerly(), quietly(model), self.recording() as follow, Interception(see, written_out=True, follow=follow):
            run_sample(model, sample)

    def recording(self) -> AbstractContextManager[Follow]:
        return recorded(self.tensors, self.watch)

    def explain(self, call: AttentionCall) -> AttentionModule | None:
        """The attention module of a call, or why there is none; None where it is a softmax of something else."""
        if not self.may_be_attention(call):
            return None
        found = self.explained(call)
        self.watch.next_call()  # else an earlier layer's products, equal at the start of a training, would be taken
        return found

    def may_be_attention(self, call: AttentionCall) -> bool:
        """Tell whether a softmax that was written out is over pairs of tokens, after products with parameters."""
        return call.logits is None or (call.logits.dim() == 4 and bool(self.watch.products))

    def name_of(self, call: AttentionCall) -> str:
        """The innermost of the model's modules that was running."""
        return next((self.names[id(module)] for module in call.modules if id(module) in self.names), "")

    def explained(self, call: AttentionCall, watch: PassRecord | None = None) -> AttentionModule:
        """The attention module of a call by what was recorded since the last one, or why it cannot be read."""
        name = self.name_of(call)
        try:
            with (
                within(name or type(self.tensors.model).__name__),
                torch._C.DisableTorchFunction(),
                torch.no_grad(),
                torch.autocast(call.query.device.type, enabled=False),
            ):
                row = Search(call, watch or self.watch, self.tensors).row()
                return replace(module_of_row(row, self.tensors), caller=name)
        except Refusal as reason:
            return refused_module("decoder", (name, name), str(reason))
