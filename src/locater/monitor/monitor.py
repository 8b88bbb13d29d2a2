"""`AttentionMonitor`: what a live model's attention does, whatever kernel computes it, at a bounded cost."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..attention import NEAR, Blocks, Statistics, observe, rank, sample_queries
from ..attention.call_statistics import is_shifted, read, statistics_of_call
from ..attention.calls import AttentionCall
from ..errors import Refusal, refusal
from ..models import spans
from ..models.live import Site, sites
from ..models.live.explicit import Explicit
from ..models.live.tensors import named_modules, unwrap
from .alarms import Thresholds, find_alarms
from .hooks import Hooks, Pass
from .inputs import Inputs, WholeTensors, fitting, padding, read_mask
from .places import discovered, entry_of, named_site, silent, whole_call
from .report import MODULE_INPUTS, LayerReport, Report, make_notes
from .sinks import Sink
from .tally import Budget, Tally, keys_per_query, merge

RANK_TEXTS = 4  # texts of a batch whose representations are measured
Key = tuple[int, bool]  # a site's index, and whether the model was in training mode


class AttentionMonitor:
    """Watches every `every`-th step; `step()` after each optimiser step ends one, and gives the report if it was due.

    What is read is what the attention kernel was given, for any model: known, unknown, compiled, wrapped. Attention
    that goes through no kernel is reconstructed from what its module was given, if the model is known or its
    projections are named by `heads=[(query, key, num_heads, num_key_heads), …]`; then `causal` must be said.

    `layers` and `head_numbers` choose what to watch, `per_head` logs every head by itself. `budget` bounds the logits
    computed per report and mode, by looking at a sample of the queries if need be. Forward passes in training and in
    evaluation mode are kept apart. Memory: O(T) and a few blocks of logits.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        layers: Iterable[int] | None = None,
        head_numbers: Iterable[int] | None = None,
        per_head: bool = False,
        budget: float = 2**30,
        near: int = NEAR,
        thresholds: Thresholds | None = None,
        sinks: Sequence[Sink] = (),
        blocks: Blocks | None = None,
        group: dist.ProcessGroup | None = None,
        heads: Sequence[Explicit] = (),
        causal: bool | None = None,
    ):
        if every < 1 or budget < 1:
            raise refusal("`every` and `budget` of at least 1", f"{every} and {budget}")
        self.entry, self.model = entry_of(model), unwrap(model)
        self.every, self.per_head, self.budget, self.near = every, per_head, budget, near
        self.thresholds, self.sinks = thresholds or Thresholds(), tuple(sinks)
        self.blocks, self.group, self.causal, self.is_named = blocks, group, causal, bool(heads)
        self.head_numbers = None if head_numbers is None else tuple(sorted(set(head_numbers)))
        self.layers = None if layers is None else frozenset(layers)
        self.modules = named_modules(self.model)
        self.unknown: Refusal | None = None  # why the model is not known, if it is not: then its calls alone are read
        self.sites = self._find_sites(model, heads)
        self.num_steps = 0
        self.generator = torch.Generator().manual_seed(0)
        self.hooks: Hooks | None = None
        self._begin()

    def attach(self) -> "AttentionMonitor":
        """Put the hooks on. A compiled model must be the one that `torch.compile` gave, or not have run yet."""
        if self.hooks is None:
            self.hooks = Hooks(self.entry, self.modules, () if self.unknown else self.sites, self)
        return self

    def detach(self) -> None:
        """Take the hooks off: nothing of the monitor stays in the model."""
        if self.hooks is not None:
            self.hooks.remove()
            self.hooks = None

    def __enter__(self) -> "AttentionMonitor":
        return self.attach()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()
        for sink in self.sinks:
            sink.close()

    def is_due(self) -> bool:
        """Whether the step under way is one to watch."""
        return self.num_steps % self.every == 0

    def step(self, number: int | None = None) -> Report | None:
        """One optimiser step is done, however many passes it took; `number` says how many are done, if not one more."""
        report = self.report() if self.is_due() else None
        self.num_steps = self.num_steps + 1 if number is None else number
        return report

    def report(self) -> Report:
        """What was seen since the last report, over all processes by one collective call; the sinks get it too.

        Fails where passes ran and nothing of their attention could be seen.
        """
        self._agree()
        merged = dict(zip(self.tallies, merge(list(self.tallies.values()), self.group), strict=True))
        training, evaluation = self._layers(merged, True), self._layers(merged, False)
        self._check_seen((*training, *evaluation))
        alarms = find_alarms(training, self.thresholds)
        alarms += find_alarms(evaluation, self.thresholds, mode="evaluation")
        num_cached = 0 if self.hooks is None else self.hooks.num_cached
        notes = make_notes((*training, *evaluation), self.refused, num_cached, sum(self.spending.skipped.values()))
        report = Report(self.num_steps, training, evaluation, tuple(alarms), notes, per_head=self.per_head)
        self._begin()
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank(self.group) == 0:
            for sink in self.sinks:
                sink.write(report)
        return report

    def state_dict(self) -> dict[str, Any]:
        """Where the count of steps stands; what was seen since the last report is not kept."""
        return {"num_steps": self.num_steps, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]
        self.generator.set_state(state["generator"])

    def _find_sites(self, model: nn.Module, heads: Sequence[Explicit]) -> list[Site]:
        try:
            found = sites(model, heads=heads, tensors=WholeTensors(model))
            known = [site for site in found if self._is_wanted(site)]
        except Refusal as reason:
            if heads:
                raise
            self.unknown = reason
            return []
        if not known:
            raise refusal(
                f"layers among {spans(sorted({site.number for site in found}))} with the heads asked for", "none"
            )
        return known

    def _is_wanted(self, site: Site) -> bool:
        return (self.layers is None or site.number in self.layers) and bool(self._indices(site))

    def _indices(self, site: Site) -> tuple[int, ...]:
        every = range(site.num_heads)
        return tuple(every if self.head_numbers is None else (head for head in self.head_numbers if head in every))

    def _layers(self, tallies: dict[Key, Tally], training: bool) -> tuple[LayerReport, ...]:
        found = [(index, site, tallies[index, training]) for index, site in enumerate(self.sites)]
        return tuple(
            LayerReport.of(site.block, site.number, self._indices(site), tally, self.through.get(index, ""))
            for index, site, tally in found
            if tally.has_seen_any
        )

    def _check_seen(self, seen: Sequence[LayerReport]) -> None:
        ran = self.hooks is not None and self.hooks.num_passes > 0
        if self.unknown is not None and ran and not seen:
            raise refusal(
                "attention that calls a kernel (scaled_dot_product_attention, FlexAttention, flash-attn, "
                "nn.MultiheadAttention), or a model that is known",
                f"neither in {type(self.model).__name__}",
                "name its projections by heads=[(query, key, num_heads, num_key_heads), …] and say causal=…",
            )
        if self.unknown is not None and seen:
            self.refused.update(silent(self.modules, self.calling))

    def _begin(self) -> None:
        keys = [(index, training) for index in range(len(self.sites)) for training in (True, False)]
        self.tallies: dict[Key, Tally] = {}
        for index, training in keys:
            self._tally(index, training)
        self.spending = Budget(self.budget, len(self.sites))
        self.refused: set[str] = set()
        self.through: dict[int, str] = {}
        self.calling: set[str] = set()
        if self.hooks is not None:
            self.hooks.num_cached = self.hooks.num_passes = 0

    def _tally(self, index: int, training: bool) -> Tally:
        if (index, training) not in self.tallies:
            device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
            self.tallies[index, training] = Tally.empty(len(self._indices(self.sites[index])), device)
        return self.tallies[index, training]

    def by_call(self, site: Site | None, call: AttentionCall, inputs: Inputs | None, run: Pass) -> bool:
        """One call of a kernel; False where it is not this layer's attention. What cannot be read is noted."""
        if site is None and (site := self._discover(call, run)) is None:
            return False
        try:
            call = whole_call(call, site, self.modules)
            given = read(call, site.num_heads)
        except (Refusal, RuntimeError):
            return False
        num_texts, num_heads, num_queries, num_keys = given.shape
        if num_heads != site.num_heads or (given.logits is not None and not _fits(given.logits, inputs)):
            return False
        lookahead = 0 if call.is_causal else call.window[1]
        per_query = num_texts * len(self._indices(site)) * keys_per_query(
            num_keys, lookback=call.window[0], lookahead=lookahead)  # fmt: skip
        sample = self._sample(site, num_queries, per_query)
        if sample is False:
            return True
        sample = None if sample is None else sample.to(given.query.device)
        indices = self._indices(site)
        query_valid = fitting(padding(run.given, site.block)[0], num_texts, num_queries)
        statistics = statistics_of_call(
            call, num_heads=site.num_heads, heads=None if len(indices) == num_heads else indices, sample=sample,
            query_valid=query_valid, near=self.near, blocks=self.blocks,
        )  # fmt: skip
        x = call.x if inputs is None or inputs.x_query is None else inputs.x_query
        self._add(site, statistics, num_texts * num_queries, x, query_valid, call.through)
        return True

    def by_inputs(self, site: Site, inputs: Inputs, run: Pass) -> None:
        """One run of an attention module that called no kernel. What cannot be read is noted, never raised."""
        indices = self._indices(site)
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
        sample = self._sample(site, num_queries, num_texts * len(heads) * per_key)
        if sample is False:
            return
        sample = None if sample is None else sample.to(inputs.x_query.device)
        with torch.no_grad(), torch.autocast(inputs.x_query.device.type, enabled=False):
            mask, positions = read_mask(inputs, run.given, site.block, indices, is_causal=heads[0].lookahead == 0)
            options: Any = dict(mask=mask, positions=positions, sample=sample, near=self.near, blocks=self.blocks)
            statistics = observe(heads, inputs.x_query, inputs.x_key, **options)
        self._add(site, statistics, num_texts * num_queries, inputs.x_query, mask.query_valid, MODULE_INPUTS)

    def _discover(self, call: AttentionCall, run: Pass) -> Site | None:
        """The layer of a module that no table names: by its name, and the how manieth of its calls this is."""
        site = discovered(call, run, self.modules, self.sites)
        if site is not None:
            self.calling.add(site.query_name)
            if site not in self.sites:
                self._append(site)
        return site if site is not None and self._is_wanted(site) else None

    def _agree(self) -> None:
        """Layers that were found by their calls are the same on all processes, also on one that made none yet."""
        if self.unknown is None or not _has_others(self.group):
            return
        lists: list[Any] = [None] * dist.get_world_size(self.group)
        own = [(site.block, site.number, site.num_heads, site.query_name) for site in self.sites]
        dist.all_gather_object(lists, own, group=self.group)
        for block, number, num_heads, name in max(lists, key=len)[len(own) :]:
            self._append(named_site(block, number, num_heads, name))

    def _append(self, site: Site) -> None:
        self.sites.append(site)
        for training in (True, False):
            self._tally(len(self.sites) - 1, training)
        self.spending.num_layers = len(self.sites)

    def _sample(self, site: Site, num_queries: int, logits_per_query: float) -> Tensor | None | bool:
        """Which queries to look at, None for all; False if the budget is spent."""
        key = self.sites.index(site), self.model.training
        wanted = self.spending.num_queries(key, num_queries=num_queries, logits_per_query=logits_per_query)
        return False if wanted == 0 else sample_queries(num_queries, wanted, self.generator)

    def _add(
        self, site: Site, found: Statistics, num_there: int, x: Tensor | None, valid: Tensor | None, through: str
    ) -> None:
        index = self.sites.index(site)
        self.through[index] = through
        measured = None
        if x is not None:
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                valid = None if valid is None or valid.shape[1] != x.shape[1] else valid[:RANK_TEXTS]
                measured = rank(x.detach()[:RANK_TEXTS], valid=valid)
        self.tallies[index, self.model.training].add(found, num_there=num_there, rank=measured)


def _has_others(group: dist.ProcessGroup | None) -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1


def _fits(logits: Tensor, inputs: Inputs | None) -> bool:
    """Whether a softmax is the module's attention: of as many queries and keys as it was given, and not shifted."""
    if inputs is None or inputs.x_query is None or inputs.x_key is None or is_shifted(logits):
        return False
    return logits.shape[-2] == inputs.x_query.shape[1] and logits.shape[-1] >= inputs.x_key.shape[1]
