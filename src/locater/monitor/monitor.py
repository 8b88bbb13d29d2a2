"""`AttentionMonitor`: what a live model's attention does, whatever kernel computes it, at a bounded cost."""

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..attention import NEAR, Blocks, observe, rank, sample_queries
from ..errors import Refusal, refusal
from ..models import spans
from ..models.live import Site, sites
from ..models.live.explicit import Explicit
from ..models.live.tensors import named_modules, unwrap
from .alarms import Thresholds, find_alarms
from .budget import Budget
from .calls import Call, read_mask
from .hooks import Hooks
from .notes import make_notes
from .report import LayerReport, Report
from .sinks import Sink
from .tally import Tally, merge
from .tensors import WholeTensors

RANK_TEXTS = 4  # texts of a batch whose representations are measured
Key = tuple[int, bool]  # a site's index, and whether the model was in training mode


class AttentionMonitor:
    """Watches every `every`-th step; `step()` after each optimiser step ends one, and gives the report if it was due.

    `layers` and `heads` choose what to watch, `per_head` logs every head by itself. `budget` bounds the logits computed
    per report and mode, by looking at a sample of the queries if need be. Forward passes in training and in evaluation
    mode are kept apart. `attention` names the projections of a model that is not known, as `modules.layers` takes them.
    Memory: O(T) and a few blocks of logits.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
        per_head: bool = False,
        budget: float = 2**30,
        near: int = NEAR,
        thresholds: Thresholds | None = None,
        sinks: Sequence[Sink] = (),
        blocks: Blocks | None = None,
        group: dist.ProcessGroup | None = None,
        attention: Sequence[Explicit] = (),
    ):
        if every < 1 or budget < 1:
            raise refusal("`every` and `budget` of at least 1", f"{every} and {budget}")
        self.model = unwrap(model)
        self.every, self.per_head, self.budget, self.near = every, per_head, budget, near
        self.thresholds, self.sinks = thresholds or Thresholds(), tuple(sinks)
        self.blocks, self.group = blocks, group
        self.heads = None if heads is None else tuple(sorted(set(heads)))
        self.sites = self._chosen(sites(model, heads=attention, tensors=WholeTensors(model)), layers)
        self.num_steps = 0
        self.generator = torch.Generator().manual_seed(0)
        self.hooks: Hooks | None = None
        self._begin()

    def attach(self) -> "AttentionMonitor":
        """Put the hooks on. A compiled model must not have run yet, or `torch.compiler.reset()` must come first."""
        if self.hooks is None:
            self.hooks = Hooks(self.model, named_modules(self.model), self.sites, self._observe)
            self.hooks.wanted = self.is_due
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
        """What was seen since the last report, over all processes by one collective call; the sinks get it too."""
        merged = dict(zip(self.tallies, merge(list(self.tallies.values()), self.group), strict=True))
        training, evaluation = self._layers(merged, True), self._layers(merged, False)
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

    def _chosen(self, found: Sequence[Site], layers: Iterable[int] | None) -> list[Site]:
        wanted = None if layers is None else frozenset(layers)
        chosen = [site for site in found if (wanted is None or site.number in wanted) and self._indices(site)]
        if not chosen:
            known = spans(sorted({site.number for site in found}))
            raise refusal(f"layers among {known} with the heads asked for", "none")
        return chosen

    def _indices(self, site: Site) -> tuple[int, ...]:
        every = range(site.num_heads)
        return tuple(every if self.heads is None else (head for head in self.heads if head in every))

    def _layers(self, tallies: dict[Key, Tally], training: bool) -> tuple[LayerReport, ...]:
        found = [(site, tallies[index, training]) for index, site in enumerate(self.sites)]
        return tuple(
            LayerReport.of(site.block, site.number, self._indices(site), tally)
            for site, tally in found
            if tally.has_seen_any
        )

    def _begin(self) -> None:
        device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        keys = [(index, training) for index in range(len(self.sites)) for training in (True, False)]
        self.tallies = {key: Tally.empty(len(self._indices(self.sites[key[0]])), device) for key in keys}
        self.spending = Budget(self.budget, len(self.sites))
        self.refused: set[str] = set()
        if self.hooks is not None:
            self.hooks.num_cached = 0

    def _observe(self, site: Site, call: Call, whole: dict[str, Any]) -> None:
        """Called by the hooks with one attention module's inputs. What cannot be read is noted, never raised."""
        key, indices = (self.sites.index(site), self.model.training), self._indices(site)
        try:
            layer = site.build()
        except Refusal as reason:
            self.refused.add(str(reason))
            return
        heads = [head for head in layer.heads if head.index in indices]
        if len(heads) < len(indices):
            self.refused.update(layer.refused)
            return
        assert call.x_query is not None and call.x_key is not None
        num_texts, num_queries, _ = call.x_query.shape
        num_wanted = self.spending.num_queries(key, heads, (num_texts, num_queries, call.x_key.shape[1]))
        if num_wanted == 0:
            return
        sample = sample_queries(num_queries, num_wanted, self.generator)
        sample = None if sample is None else sample.to(call.x_query.device)
        with torch.no_grad(), torch.autocast(call.x_query.device.type, enabled=False):
            mask, positions = read_mask(call, whole, site.block, indices, is_causal=heads[0].lookahead == 0)
            found = observe(
                heads, call.x_query, call.x_key,
                mask=mask, positions=positions, sample=sample, near=self.near, blocks=self.blocks,
            )  # fmt: skip
            valid = None if mask.query_valid is None else mask.query_valid[:RANK_TEXTS]
            measured = rank(call.x_query[:RANK_TEXTS], valid=valid)
        self.tallies[key].add(found, num_there=num_texts * num_queries, rank=measured)
