"""Observations of every layer since the last report: calls of kernels, or inputs of modules."""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..attention import Blocks, Statistics, observe, rank, sample_queries
from ..attention.arguments import read
from ..attention.call_statistics import is_shifted, statistics_of_call
from ..attention.calls import AttentionCall
from ..attention.gates import Trail
from ..attention.kernels import packed
from ..errors import Refusal, missing, refusal
from ..head import Block
from ..models import spans
from ..models.live import AttentionModule, Sample, sites
from ..models.live.explicit import Explicit
from ..models.live.tensors import named_modules, unwrap
from .finding import FoundHeads
from .hooks import Pass
from .inputs import Inputs, WholeTensors, fitting, padding, read_mask
from .places import discovered, module_name, whole_call
from .processes import RENAMED, Agreement, has_others
from .report import MODULE_INPUTS
from .tally import MODES, Budget, Mode, Tally, keys_per_query, merge

RANK_TEXTS = 4  # texts of a batch whose representations are measured
Key = tuple[int, Mode]  # a site's index, and what the pass was for


class Observation:
    """Told of every pass by the hooks; `tallies` hold the sums, one per layer and mode.

    `sites` are the layers that are known; in a model that is `unknown`, for the reason given, they are found by their
    calls, in the order of these, and their heads by what came before, on a sample or in the first pass that is watched.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        is_due: Callable[[], bool],
        layers: Iterable[int] | None,
        head_numbers: Iterable[int] | None,
        heads: Sequence[Explicit],
        causal: bool | None,
        budget: float,
        near: int,
        blocks: Blocks | None,
        group: dist.ProcessGroup | None,
        sample: Sample | None,
        weights: bool,
    ) -> None:
        self.model, self.is_due = unwrap(model), is_due
        self.causal, self.is_named = causal, bool(heads)
        self.budget, self.near, self.blocks, self.group = budget, near, blocks, group
        self.head_numbers = None if head_numbers is None else tuple(sorted(set(head_numbers)))
        self.layers = None if layers is None else frozenset(layers)
        self.modules = named_modules(self.model)
        self.unknown: Refusal | None = None
        self.left_out: list[str] = []  # reasons why layers that were found cannot be read
        self.sites = self._find_sites(model, heads)
        self.found = FoundHeads(model, sample, is_wanted=self.unknown is not None and weights)
        self.generator = torch.Generator().manual_seed(0)
        self.lock = threading.Lock()  # passes of several threads add to one tally
        self.agreement = Agreement(self.modules, group)
        self.begin()

    def begin(self) -> None:
        """Nothing seen yet."""
        self.tallies: dict[Key, Tally] = {}
        for index in range(len(self.sites)):
            for mode in MODES:
                self._tally(index, mode)
        self.spending = Budget(self.budget, len(self.sites))
        self.refused = set(self.left_out)
        self.through: dict[int, str] = {}
        self.calling: set[str] = set()  # modules whose calls were seen, where nothing else is known
        self.softmaxes: set[str] = set()  # modules that compute a softmax themselves, where nothing else is known
        self.shown: set[str] = set()  # stabilisers that calls have shown

    def _find_sites(self, model: nn.Module, heads: Sequence[Explicit]) -> list[AttentionModule]:
        try:
            found = sites(model, heads=heads, tensors=WholeTensors(model))
            known = [site for site in found if self._is_wanted(site)]
        except Refusal as reason:
            if heads:
                raise
            self.unknown = reason
            return []
        self.left_out = [reason for site in found if not site.num_heads for reason in site.build().refused]
        if not known and self.left_out:
            raise Refusal(self.left_out[0])
        if not known:
            raise missing(f"layers among {spans(sorted({site.number for site in found}))} with the heads asked for")
        return known

    def recording(self) -> AbstractContextManager[None]:
        """For one pass: while it lasts, what leads to its calls is recorded, if their heads are not known yet."""
        return self.found.recording()

    def written_out(self, call: AttentionCall) -> None:
        """A softmax in a model of which nothing is known: perhaps attention, but of which queries and keys?"""
        name = module_name(call, self.modules)
        if name is not None and call.logits is not None and call.logits.dim() == 4 and min(call.logits.shape[-2:]) > 1:
            self.softmaxes.add(name)

    def _is_wanted(self, site: AttentionModule) -> bool:
        return (self.layers is None or site.number in self.layers) and bool(self.indices(site))

    def indices(self, site: AttentionModule) -> tuple[int, ...]:
        every = range(site.num_heads)
        return tuple(every if self.head_numbers is None else (head for head in self.head_numbers if head in every))

    def by_call(self, site: AttentionModule | None, call: AttentionCall, inputs: Inputs | None, run: Pass) -> bool:
        """One call of a kernel; False where it is not this layer's attention. What cannot be read is noted."""
        with self.lock:
            try:
                return call.is_empty or self._by_call(site, call, inputs, run)
            except Exception as reason:  # whatever it is, to be watched must not end a run
                if call.logits is None:
                    name = (site and site.query_name) or module_name(call, self.modules)
                    self.refused.add(f"a call of {call.through} in `{name}` could not be read: {reason}")
                return False

    def _by_call(self, site: AttentionModule | None, call: AttentionCall, inputs: Inputs | None, run: Pass) -> bool:
        call = packed(call)
        if site is None and (site := self._discover(call, run)) is None:
            return False
        call, own = whole_call(call, site, self.modules)
        given = read(call, site.num_heads)
        num_texts, num_heads, num_queries, num_keys = given.shape
        if given.logits is not None and not (num_heads == site.num_heads and _fits(given.logits, inputs)):
            return False
        if num_heads != site.num_heads:
            raise refusal(f"{site.num_heads} heads", num_heads)
        lookahead = 0 if call.is_causal else call.window[1]
        per_query = num_texts * len(self.indices(site)) * keys_per_query(
            num_keys, lookback=call.window[0], lookahead=lookahead)  # fmt: skip
        key = self.sites.index(site), run.mode
        sample = self._sample(key, num_queries, per_query)
        if isinstance(sample, bool):
            return True
        sample = None if sample is None else sample.to(given.query.device)
        indices = self.indices(site)
        query_valid = fitting(padding(run.given, site.block)[0], num_texts, num_queries)
        statistics = statistics_of_call(
            call, num_heads=site.num_heads, heads=None if len(indices) == num_heads else indices, sample=sample,
            query_valid=query_valid, near=self.near, blocks=self.blocks,
        )  # fmt: skip
        if self.unknown is None and not (run.has_cached_keys and not self.model.training):
            self.found.check(site, call, inputs)
        self.shown |= {"SoftCap"} if call.softcap is not None else set()
        x = call.x if inputs is None or inputs.x_query is None else inputs.x_query
        self._add(key, statistics, num_texts * num_queries, x, query_valid, call.through)
        if call.segments is None:
            shape = num_texts, len(own), num_queries
            run.trails.expect(self._trail(key, call, own, shape, query_valid))
        return True

    def _trail(
        self, key: Key, call: AttentionCall, own: range, shape: tuple[int, int, int], valid: Tensor | None
    ) -> Trail:
        """Follow the call's output: its gate is added to the layer's tally."""
        tally, chosen = self.tallies[key], self.indices(self.sites[key[0]])
        heads = [(row, own.index(head)) for row, head in enumerate(chosen) if head in own]

        def found(gate: Tensor | None) -> None:
            with self.lock:
                tally.add_gate(gate, heads, shape, valid)

        return Trail(shape, not call.tokens_first, found, is_weights=call.logits is not None)

    def by_inputs(self, site: AttentionModule, inputs: Inputs, run: Pass) -> None:
        """One run of an attention module that called no kernel. What cannot be read is noted, never raised."""
        with self.lock:
            try:
                self._by_inputs(site, inputs, run)
            except Exception as reason:  # whatever it is, to be watched must not end a run
                self.refused.add(f"what `{site.query_name}` was given could not be read: {reason}")

    def _by_inputs(self, site: AttentionModule, inputs: Inputs, run: Pass) -> None:
        indices = self.indices(site)
        if self.is_named and self.causal is None:
            self.refused.add(
                f"layer {site.number} (`{site.query_name}`) calls no attention kernel, so whether it looks ahead "
                "cannot be known: say causal=True or causal=False"
            )
            return
        try:
            layer = site.build()
        except Refusal as reason:
            self.refused.add(str(reason))
            return
        heads = [head for head in layer.heads if head.index in indices]
        if len(heads) < len(indices):
            self.refused.update(layer.refused)
            return
        if self.is_named:
            heads = [replace(head, lookahead=0 if self.causal else None) for head in heads]
        assert inputs.x_query is not None and inputs.x_key is not None
        num_texts, num_queries, _ = inputs.x_query.shape
        per_key = keys_per_query(inputs.x_key.shape[1], lookback=heads[0].lookback, lookahead=heads[0].lookahead)
        key = self.sites.index(site), run.mode
        sample = self._sample(key, num_queries, num_texts * len(heads) * per_key)
        if isinstance(sample, bool):
            return
        sample = None if sample is None else sample.to(inputs.x_query.device)
        with torch.no_grad(), torch.autocast(inputs.x_query.device.type, enabled=False):
            mask, positions = read_mask(inputs, run.given, site.block, indices, is_causal=heads[0].lookahead == 0)
            options: Any = dict(mask=mask, positions=positions, sample=sample, near=self.near, blocks=self.blocks)
            statistics = observe(heads, inputs.x_query, inputs.x_key, **options)
        self._add(key, statistics, num_texts * num_queries, inputs.x_query, mask.query_valid, MODULE_INPUTS)

    def _discover(self, call: AttentionCall, run: Pass) -> AttentionModule | None:
        """The layer of a module that no table names: by its name, and the index of this call."""
        known = [site for index, site in enumerate(self.sites) if self.agreement.may_be(index, site)]
        site = discovered(call, run, self.modules, known)
        if site is not None:
            self.calling.add(site.query_name)
            self.found.add(site, call)
            if site not in self.sites:
                self._append(site)
        return site if site is not None and self._is_wanted(site) else None

    def _agree(self) -> None:
        """Make the layers the same on all processes, also on one that made no calls, or holds a stage of a pipeline."""
        if has_others(self.group) and (self.unknown is not None or self.agreement.settled is None):
            self.agreement.agree(self.sites, self._append)
        if self.agreement.is_renamed:
            self.refused.add(RENAMED)

    @property
    def order(self) -> Sequence[int]:
        """The sites in an order that all processes share."""
        return self.agreement.order(len(self.sites))

    def number(self, index: int) -> int:
        """The number of a site's layer over all processes."""
        return self.agreement.numbers.get(index, self.sites[index].number)

    def own_index(self, block: Block, number: int) -> int | None:
        """The site of a layer that this process holds; None for one whose weights another measures."""
        indices = (
            index for index, site in enumerate(self.sites) if (site.block, self.number(index)) == (block, number)
        )
        index = next(indices)
        return None if index in self.agreement.foreign and self.agreement.is_spread else index

    def own_sites(self) -> list[AttentionModule]:
        return [site for index, site in enumerate(self.sites) if index not in self.agreement.foreign]

    def merged(self) -> dict[Key, Tally]:
        """The tallies over all processes, which have agreed on their layers."""
        self._agree()
        keys: list[Key] = [(index, mode) for index in self.order for mode in MODES]
        return dict(zip(keys, merge([self.tallies[key] for key in keys], self.group), strict=True))

    def _append(self, site: AttentionModule) -> None:
        self.sites.append(site)
        for mode in MODES:
            self._tally(len(self.sites) - 1, mode)
        self.spending.num_layers = len(self.sites)

    def _tally(self, index: int, mode: Mode) -> Tally:
        if (index, mode) not in self.tallies:
            device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
            self.tallies[index, mode] = Tally.empty(len(self.indices(self.sites[index])), device)
        return self.tallies[index, mode]

    def _sample(self, key: Key, num_queries: int, logits_per_query: float) -> Tensor | None | bool:
        """Choose queries to look at, None for all; False if the budget is spent."""
        wanted = self.spending.num_queries(key, num_queries=num_queries, logits_per_query=logits_per_query)
        return False if wanted == 0 else sample_queries(num_queries, wanted, self.generator)

    def _add(
        self, key: Key, found: Statistics, num_there: int, x: Tensor | None, valid: Tensor | None, through: str
    ) -> None:
        self.through[key[0]] = through
        measured = None
        if x is not None:
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                valid = None if valid is None or valid.shape[1] != x.shape[1] else valid[:RANK_TEXTS]
                measured = rank(x.detach()[:RANK_TEXTS], valid=valid)
        self.tallies[key].add(found, num_there=num_there, rank=measured)


def _fits(logits: Tensor, inputs: Inputs | None) -> bool:
    """Tell whether a softmax is the module's attention: as many queries and keys as it was given, and not shifted."""
    if inputs is None or inputs.x_query is None or inputs.x_key is None or is_shifted(logits):
        return False
    return logits.shape[-2] == inputs.x_query.shape[1] and logits.shape[-1] >= inputs.x_key.shape[1]
