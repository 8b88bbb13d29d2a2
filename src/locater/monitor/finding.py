"""The heads of layers that only their calls have shown: found on a sample, or in the first pass that is watched."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from ..attention.calls import AttentionCall
from ..attention.capture import Follow
from ..errors import Refusal
from ..head import Head
from ..models import AttentionModule, read_heads, slices
from ..models.live.discover import Finder, difference, is_of_length
from ..models.live.tensors import WholeTensors
from ..models.live.watch import Sample
from ..models.module import refused_module
from ..models.slices import has_qk_norm
from .inputs import ModuleInputs
from .places import call_name

OF_OUTPUTS = ("QKNorm", "SoftCap")  # put their own output in a kernel's place, which only torch's lets them
OF_WEIGHTS = ("QKClip", "LocAteR")  # scale the weights, which a norm behind them undoes
TRIES = 3  # passes, of which the first may show too little: over zeros, or a single token
Place = tuple[str, int]  # a block and a layer's number


class FoundHeads:
    """Projections that made the queries and keys of each call, by layer name; empty where that is not wanted."""

    def __init__(self, model: nn.Module, sample: Sample | None, *, is_wanted: bool) -> None:
        self.tensors = WholeTensors(model)
        self.rows: dict[str, AttentionModule] = {}
        self.was_told, self.num_tries, self.was_cast = False, 0, False
        self.differences: dict[Place, str | None] = {}  # of layers whose heads were held against a call
        self.caps: dict[Place, float] = {}  # soft-caps that calls have and no table names
        self.finder = Finder(self.tensors) if is_wanted else None
        if self.finder is not None and sample is not None:
            self._find(self.finder, sample)

    def _find(self, finder: Finder, sample: Sample) -> None:
        """Every call of a pass over the sample, under the names that the calls of later passes will have."""
        counts: Counter[str] = Counter()
        for name, found in finder.over(sample):
            self.rows[call_name(name, counts[name])] = found
            counts[name] += 1
        self.finder = None

    @contextmanager
    def recording(self) -> Iterator[Follow | None]:
        """For one pass: while it lasts, what leads to its calls is recorded, if it is not known yet.

        Yield what the pass's interception must tell of every operation.
        """
        if (finder := self.finder) is None:
            yield None
            return
        with finder.recording() as follow:
            yield follow
        self.num_tries += bool(self.rows)
        is_found = all(found.reason is None for found in self.rows.values())
        self.finder = None if is_found or self.num_tries == TRIES else self.finder

    def add(self, site: AttentionModule, call: AttentionCall) -> None:
        """A call of a pass that is recorded."""
        if self.finder is None:
            return
        self.was_cast |= torch.is_autocast_enabled(call.query.device.type)
        try:
            found = self.finder.explain(call)
        except Exception as reason:  # whatever it is, the call itself is looked at all the same
            names = site.query_name, site.query_name
            found = refused_module(site.block, names, f"{site.query_name}: {reason}")
        if found is not None:
            self.rows[site.query_name] = found

    def check(self, site: AttentionModule, call: AttentionCall, inputs: ModuleInputs | None) -> None:
        """Once for every layer that was read and not found: do its heads give the logits of its call?"""
        place = site.block, site.number
        if place in self.differences or inputs is None or inputs.x_query is None or inputs.x_key is None:
            return
        try:
            heads, sides = read_heads(site).heads, (inputs.x_query, inputs.x_key)
            if call.softcap is not None and all(head.softcap is None for head in heads):
                heads = tuple(replace(head, softcap=call.softcap) for head in heads)
            words = difference(heads, *sides, call, masks=False) if heads else None  # no mask moves a bound
            norms = (heads[0].query.input_norm, heads[0].key.input_norm) if heads else ()
            modules = self.tensors.model.modules()
            drops = any(isinstance(one, nn.Dropout) and one.training and one.p > 0 for one in modules)
            norms = () if drops else norms  # what dropout leaves is longer than what the norm gave
            if words is None and any(norm and not is_of_length(norm, x) for norm, x in zip(norms, sides, strict=False)):
                words = "its input does not come from its input norm"
        except Refusal:  # a call over other tokens, or weights that cannot be read: the next one may tell
            return
        if words is None and call.softcap is not None:
            self.caps[place] = call.softcap
        self.differences[place] = words

    def difference(self, site: AttentionModule) -> str | None:
        """Describe what a layer's heads do not reproduce of its calls; None where nothing is known to differ."""
        return self.differences.get((site.block, site.number))

    def heads(self, site: AttentionModule) -> tuple[Head, ...]:
        """The heads of a layer as they are now; none where they are not known."""
        try:
            found = self.rows.get(site.query_name)
            layer = read_heads(site if found is None else replace(found, number=site.number))
        except Refusal:  # weights that are not finite, or of a form that no table reads
            return ()
        cap = self.caps.get((site.block, site.number))
        return layer.heads if cap is None else tuple(replace(head, softcap=cap) for head in layer.heads)

    def unfit(self, site: AttentionModule) -> set[str]:
        """Stabilisers that would leave this layer out, be refused by its weights, or change nothing of its logits."""
        found = self.rows.get(site.query_name, site)
        if self.difference(site) is not None and any(head.query.low_rank is not None for head in self.heads(site)):
            return {*OF_OUTPUTS, *OF_WEIGHTS}  # a stabiliser would see the same, and find no others behind factors
        try:
            heads, is_behind_norm = slices(found), has_qk_norm(found)
        except Refusal:  # under autocast stabilisers, which look without it, may find what the pass does not show
            return set() if self.was_cast else {*OF_OUTPUTS, *OF_WEIGHTS}
        parts = {part.parameter for head in heads for part in (head.query, head.key)}
        computed = {"QKClip"} if not all(map(self.tensors.is_stored, parts)) else set()
        return computed | ({"QKNorm", *OF_WEIGHTS} if is_behind_norm else set())

    def unexplained(self) -> Iterator[str]:
        """Tell once why the heads of some layers were not found, with the reason of the first."""
        reasons = [found.reason for found in self.rows.values() if found.reason is not None]
        if reasons and not self.was_told:
            self.was_told = True
            layers = f"{len(reasons)} layer{'s' if len(reasons) > 1 else ''}"
            yield f"nothing is said of the weights of {layers}, whose heads were not found: {reasons[0]}"
