"""`AttentionMonitor`: statistics of a live model's attention, whatever kernel computes it, at a bounded cost."""

import weakref
from collections.abc import Sequence
from itertools import chain
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..errors import refusal
from ..models.coverage import spans
from ..models.live.tensors import entry_of
from ..models.live.watch import FirstCall, Sample, is_unwatched, unwatched
from ..models.live.write_check import writers
from ..models.sources import Live
from ..records import State
from .actions import LOG, Actions, Event, OwnLoop, Responses
from .alarms import Alarm, Alarms, Thresholds
from .finding import OF_WEIGHTS
from .hooks import Handle, Hooks
from .observation import Key, Observation
from .places import exchange
from .report import MODULE_INPUTS, LayerReport, Report
from .sinks import Sink
from .tally import MODES, Mode, Scope, Tally
from .trends import Trends, WeightsOfHeads

UNSEEN = (
    "no forward pass was seen: call the model itself, model(…), not a method of it, and give the monitor what "
    "torch.compile gave; a model that is compiled around its hooks is seen from its second pass on, and one that had "
    "run before must be reset with torch.compiler.reset()"
)
Layers = dict[Mode, tuple[LayerReport, ...]]
OUR_NORM = "qk_norm"  # the name of what our own QKNorm adds to a module; of a model's own norms its heads tell


class AttentionMonitor:
    """Watches every `every`-th step; `step()` after each optimiser step ends one, and gives the report if it was due.

    Made from a model it is attached; `detach()`, or leaving `with monitor:`, ends it.

    What is read is what the attention kernel was given, for any model: known, unknown, compiled, wrapped. Attention
    that goes through no kernel is reconstructed from what its module was given, if the model is known or
    `Live(model, heads=[(query, key, num_heads, num_key_heads), …], causal=…)` names its projections. The heads of a
    model that no table knows are found on the batch of `Live(model, sample=batch)`, or in the first pass watched.

    Forward passes in evaluation mode, in training mode, and in training mode without gradients (old policies,
    references) are kept apart. Memory: O(T) and a few blocks of logits. `scope` says what to look at, and how much
    of it; `group` are the processes whose numbers are taken together.

    `on_alarm` is an action of `monitor.actions`, a function of an `Event`, several, or a table by kind of alarm;
    `optimizer` is what some of them need: one or several, with whatever else is to be saved and put back with them by
    its `state_dict` (schedulers, gradient scalers, averaged weights).
    """

    def __init__(
        self,
        model: nn.Module | Live,
        *,
        every: int = 100,
        scope: Scope | None = None,
        thresholds: Thresholds | None = None,
        sinks: Sequence[Sink] = (),
        on_alarm: Actions | None = None,
        optimizer: Optimizer | Sequence[Any] | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        if every < 1:
            raise refusal("`every` of at least 1", every)
        live = model if isinstance(model, Live) else Live(model)
        self.entry, self.sample = entry_of(live.module), live.sample
        self.every, self.scope, self.group, self.sinks = every, scope or Scope(), group, tuple(sinks)
        ask = weakref.WeakMethod(self.is_due)  # the model's hooks do not keep the monitor alive
        self.seen = Observation(live, self.scope, lambda: (due := ask()) is not None and due(), group)
        self.weights = WeightsOfHeads(self.seen) if self.scope.weights else None
        self.trends, self.responses = Trends(), Responses(on_alarm)
        self.alarms = Alarms(thresholds or Thresholds(), self.trends)
        self.host: Any = OwnLoop.of(self.seen.model, optimizer)
        self.stabilisers: list[Any] = []  # that actions attached
        self.num_steps, self.was_blind = 0, False
        self.failed: set[int] = set()  # sinks whose last report is lost
        self.hooks: Hooks | None = None
        self.first_call: FirstCall | None = None
        self.attach()

    def attach(self) -> "AttentionMonitor":
        """Put the hooks on. A compiled model must be the one that `torch.compile` gave, or not have run yet."""
        if self.hooks is None:
            self.hooks = Hooks(self.entry, self.seen)
            self.first_call = FirstCall(self.entry, self._try_actions) if self.responses.all() else None
            handles = [*self.hooks.handles, *([self.first_call.handle] if self.first_call is not None else ())]
            # One without a reference leaves too: a cell that is run again makes another.
            self.leave = weakref.finalize(self, _leave, handles, self.responses)
            self.leave.atexit = False
        return self

    def _try_actions(self, sample: Sample | None) -> None:
        """Let every action find and try what it will need, at the model's first call: what cannot be is refused now."""
        if self.first_call is not None:
            self.first_call.close()
        with unwatched():
            self.responses.begin(self.seen.model, self.host, sample if self.sample is None else self.sample)
        self.stabilisers += [one for one in self.responses.attached() if one not in self.stabilisers]

    def detach(self) -> None:
        """Take the hooks off: nothing of the monitor and its actions stays in the model but attached stabilisers."""
        if self.hooks is not None:
            self.leave()
            self.hooks = self.first_call = None

    def __enter__(self) -> "AttentionMonitor":
        return self.attach()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()
        for sink in self.sinks:
            sink.close()

    def is_due(self) -> bool:
        """Tell whether the step under way is one to watch."""
        return self.num_steps % self.every == 0 and not is_unwatched()

    def step(self, number: int | None = None) -> Report | None:
        """One optimiser step is done, however many passes it took; `number` says how many are done, if not one more."""
        if self.hooks is None and self.is_due():
            raise refusal("an attached monitor", "one that sees nothing", "write `with monitor:`, or call attach()")
        self.responses.step(self.num_steps, self.host, self.stabilisers)
        report = self.report() if self.is_due() else None
        if report is not None and not self.was_blind and not (report.training or report.no_grad or report.evaluation):
            self.was_blind = True  # once: alarms and actions would stay away in silence
            LOG.warning(f"step {report.step}: nothing of this model's attention was seen: {'; '.join(report.notes)}")
        self.num_steps = self.num_steps + 1 if number is None else number
        return report

    def report(self) -> Report:
        """Make a report since the last one, over all processes by one collective call; the sinks get it too.

        Fails where passes ran and nothing of their attention could be seen.
        """
        merged = self.seen.merged()
        layers: Layers = {mode: self._layers(merged, mode) for mode in MODES}
        has_run = self.hooks is not None and self.hooks.num_passes > 0
        self.seen.check(list(chain(*layers.values())), has_run=has_run)
        # Passes without gradients have the weights of those that train, and stand for them where there are no others.
        trained: Mode = "training" if layers["training"] else "no_grad"
        if self.weights is not None:
            layers[trained] = tuple(self.weights.measured(one, layers["evaluation"]) for one in layers[trained])
        if self.seen.agreement.is_spread:
            layers = {mode: exchange(part, self.group) for mode, part in layers.items()}
        self.trends.add(self.num_steps, layers["training"])
        layers["training"] = tuple(map(self.trends.with_growth, layers["training"]))
        alarms, notes = self._alarms(layers, trained), self._notes(list(chain(*layers.values())))
        report = Report(self.num_steps, **layers, alarms=alarms, notes=notes, per_head=self.scope.per_head)
        self.seen.begin()
        if self.hooks is not None:
            self.hooks.num_cached = self.hooks.num_passes = 0
            self.hooks.outside.clear()
        num_attached = len(self.stabilisers)
        with unwatched():
            report = self.responses.act(Event(report, self.seen.model, self.host, self.stabilisers))
        if len(self.stabilisers) > num_attached:  # whether heads are read rightly may be another question now
            self.seen.found.differences.clear()
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank(self.group) == 0:
            self._write(report)
        return report

    def _write(self, report: Report) -> None:
        """Give sinks the report; one that fails (a full disk, no network) is told of once, until it writes again."""
        for line in report.actions:
            LOG.warning(line)
        for number, sink in enumerate(self.sinks):
            try:
                sink.write(report)
                self.failed.discard(number)
            except Exception as reason:  # whatever it is, to be watched must not end a run
                if number not in self.failed:
                    self.failed.add(number)
                    LOG.warning(f"step {report.step}: {type(sink).__name__} could not write: {reason}")

    def _layers(self, tallies: dict[Key, Tally], mode: Mode) -> tuple[LayerReport, ...]:
        found = []
        for index in self.seen.order:
            site, tally = self.seen.sites[index], tallies[index, mode]
            if tally.has_seen_any:
                module = site.owner if self.seen.is_known else site.query_name
                place = site.block, self.seen.number(index), self.seen.indices(site)
                found.append(LayerReport.of(*place, tally, self.seen.through.get(index, ""), module))
        return tuple(found)

    def _alarms(self, layers: Layers, trained: Mode) -> tuple[Alarm, ...]:
        self.alarms.begin(self.num_steps, list(chain(*layers.values())))
        judged: Layers = {mode: layers[mode] for mode in (trained, "evaluation")}
        attached = self._attached()
        attached |= {*OF_WEIGHTS} if "QKNorm" in attached else set()  # a norm undoes what they do
        return self.alarms.find(judged, lambda layer: attached | self._unfit(layer))

    def _unfit(self, layer: LayerReport) -> set[str]:
        """Stabilisers that are no remedy for a layer; nothing is known of one that another process holds."""
        index = self.seen.own_index(layer.block, layer.layer)
        is_alone = not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1
        late = set() if is_alone else {"QKNorm"}  # DDP and FSDP do not know parameters that come later
        return late if index is None else late | self.seen.found.unfit(self.seen.sites[index])

    def _attached(self) -> set[str]:
        """Stabilisers at work: those that actions attached, those of the model, and what modules and calls show."""
        names = {type(one).__name__ for one in (*self.stabilisers, *self.responses.all())}
        names |= {"QKNorm"} if any(OUR_NORM in one._modules for one in self.seen.model.modules()) else set()
        return names | self.seen.shown | writers(self.seen.model)

    def _notes(self, layers: Sequence[LayerReport]) -> tuple[str, ...]:
        """List remarks that the numbers do not make, the most important first."""
        num_cached, num_skipped = 0, sum(self.seen.spending.skipped.values())
        if self.hooks is not None:
            num_cached = self.hooks.num_cached
            self.seen.refused.update(self.hooks.unseen())
        notes = [] if layers or num_cached or num_skipped or self.seen.refused else [UNSEEN]
        notes += sorted(self.seen.refused)
        if rebuilt := sorted({layer.layer for layer in layers if layer.through == MODULE_INPUTS}):
            notes.append(
                f"layers {spans(rebuilt)} called no attention kernel: reconstructed from their modules' inputs"
            )
        if thinned := {layer.layer for layer in layers if layer.share_of_queries < 1}:
            least, where = min(layer.share_of_queries for layer in layers), spans(sorted(thinned))
            notes.append(
                f"to keep within the budget, {least:.1%} of the queries or more were looked at in layers {where}"
            )
        if num_skipped:
            notes.append(f"the budget was spent: {num_skipped} calls of attention were not looked at")
        if num_cached:
            notes.append(f"{num_cached} calls with cached keys were not looked at: their inputs are gone")
        return tuple(notes)

    @property
    def should_stop(self) -> bool:
        """True if an action asked your training loop to end."""
        return bool(getattr(self.host, "should_stop", False))

    def state_dict(self) -> State:
        """Return the count of steps, trends and actions; observations since the last report are not kept."""
        return {
            "num_steps": self.num_steps,
            "generator": self.seen.generator.get_state(),
            "trends": self.trends.state_dict(),
            **self.alarms.state_dict(),
            "actions": [action.state_dict() for action in self.responses.all()],
            "lines": list(self.responses.lines),
        }

    def load_state_dict(self, state: State) -> None:
        self.num_steps = state["num_steps"]
        self.seen.generator.set_state(state["generator"])
        self.trends.load_state_dict(state.get("trends", {"moments": {}}))
        self.alarms.load_state_dict(state)
        for action, kept in zip(self.responses.all(), state.get("actions", ()), strict=False):
            action.load_state_dict(kept)
            action.resume(self.host)
        self.responses.lines = list(state.get("lines", ()))
        if self.responses.is_pending and (self.sample is not None or self.seen.is_known):  # no need to wait
            self._try_actions(self.sample)


def _leave(handles: Sequence[Handle], responses: Responses) -> None:
    """Take a monitor's hooks and its actions' factors off; nothing here holds the monitor."""
    for handle in handles:
        handle.remove()
    responses.end()
