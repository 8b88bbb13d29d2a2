"""`AttentionMonitor`: what a live model's attention does, whatever kernel computes it, at a bounded cost."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..attention import NEAR, Blocks
from ..errors import Refusal, refusal
from ..models.live import Sample, at_work
from ..models.live.explicit import Explicit
from ..models.live.first_call import FirstCall
from ..models.live.tensors import entry_of
from ..records import State
from .actions import LOG, Actions, Event, OwnLoop, Responses
from .alarms import Alarm, Said, Thresholds, find_alarms
from .hooks import Hooks
from .host import part
from .observation import Key, Observation
from .places import outside, repeated, silent, written_out
from .processes import exchange
from .report import LayerReport, Report, make_notes, standing_bounds, unfollowed
from .sinks import Sink
from .tally import MODES, Mode, Tally
from .trends import GROWING, Awake, Trends
from .weights import Weights

QK_NORMS = ("qk_norm", "q_norm", "query_norm", "q_layernorm", "query_layernorm")  # ours, and what models call theirs


class AttentionMonitor:
    """Watches every `every`-th step; `step()` after each optimiser step ends one, and gives the report if it was due.

    Made from a model it is attached; `detach()`, or leaving `with monitor:`, ends it.

    What is read is what the attention kernel was given, for any model: known, unknown, compiled, wrapped. Attention
    that goes through no kernel is reconstructed from what its module was given, if the model is known or its
    projections are named by `heads=[(query, key, num_heads, num_key_heads), …]`; then `causal` must be said. The heads
    of a model that no table knows are found on `sample`, a batch as it takes them, or in the first pass watched.

    `layers` and `head_numbers` choose what to watch, `per_head` logs every head by itself. `budget` bounds the logits
    computed per report and mode, by looking at a sample of the queries if need be. Forward passes in evaluation mode,
    in training mode, and in training mode without gradients (old policies, references) are kept apart. Memory: O(T) and
    a few blocks of logits.

    `weights` measures the heads' weights and their updates at each report, and keeps a copy of them for it.
    `on_alarm` is an action of `monitor.actions`, a function of an `Event`, several, or a table by kind of alarm;
    `optimizer` is what some of them need: one or several, with whatever else is to be saved and put back with them by
    its `state_dict` (schedulers, gradient scalers, averaged weights). `stabilisers` at work already are not advised.
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
        sample: Sample | None = None,
        causal: bool | None = None,
        weights: bool = True,
        on_alarm: Actions | None = None,
        optimizer: Optimizer | Sequence[Any] | None = None,
        stabilisers: Sequence[object] = (),
    ):
        if every < 1 or budget < 1:
            raise refusal("`every` and `budget` of at least 1", f"{every} and {budget}")
        self.entry = entry_of(model)
        self.every, self.per_head, self.group = every, per_head, group
        self.thresholds, self.sinks = thresholds or Thresholds(), tuple(sinks)
        self.seen = Observation(
            model, is_due=self.is_due, layers=layers, head_numbers=head_numbers, heads=heads, causal=causal,
            budget=budget, near=near, blocks=blocks, group=group, sample=sample, weights=weights,
        )  # fmt: skip
        self.weights: dict[int, Weights] | None = {} if weights else None
        self.trends, self.responses = Trends(), Responses(on_alarm)
        self.awake, self.said, self.sample = Awake(), Said(), sample
        self.host: Any = OwnLoop(self.seen.model, *part(optimizer))
        self.stabilisers, self.num_given = list[Any](stabilisers), len(stabilisers)
        self.responses.check_forecast(self.thresholds.steps_ahead)
        self.num_steps, self.was_told_of_gates = 0, False
        self.hooks: Hooks | None = None
        self.first_call, self.is_trying = None, False
        self.attach()

    def attach(self) -> "AttentionMonitor":
        """Put the hooks on. A compiled model must be the one that `torch.compile` gave, or not have run yet."""
        if self.hooks is None:
            self.hooks = Hooks(self.entry, self.seen.modules, () if self.seen.unknown else self.seen.sites, self.seen)
            self.first_call = FirstCall(self.entry, self._try_actions) if self.responses.all() else None
        return self

    def _try_actions(self, sample: Sample | None) -> None:
        """Let every action find and try what it will need, at the model's first call: what cannot be is refused now."""
        if self.first_call is not None:
            self.first_call.close()
        self.is_trying = True
        try:
            self.responses.begin(self.seen.model, self.host, sample if self.sample is None else self.sample)
        finally:
            self.is_trying = False
        self.stabilisers += [one for one in self.responses.attached() if one not in self.stabilisers]

    def detach(self) -> None:
        """Take the hooks off: nothing of the monitor and its actions stays in the model but attached stabilisers."""
        if self.hooks is not None:
            self.hooks.remove()
            self.hooks = None
            self.responses.end()
        if self.first_call is not None:
            self.first_call.close()

    def __enter__(self) -> "AttentionMonitor":
        return self.attach()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.detach()
        for sink in self.sinks:
            sink.close()

    def is_due(self) -> bool:
        """Tell whether the step under way is one to watch."""
        return self.num_steps % self.every == 0 and not self.is_trying

    def step(self, number: int | None = None) -> Report | None:
        """One optimiser step is done, however many passes it took; `number` says how many are done, if not one more."""
        if self.hooks is None and self.is_due():
            raise refusal("an attached monitor", "one that sees nothing", "write `with monitor:`, or call attach()")
        self.responses.step(self.num_steps, self.host, self.stabilisers, self.num_given)
        report = self.report() if self.is_due() else None
        self.num_steps = self.num_steps + 1 if number is None else number
        return report

    def report(self) -> Report:
        """Make a report since the last one, over all processes by one collective call; the sinks get it too.

        Fails where passes ran and nothing of their attention could be seen.
        """
        merged = self.seen.merged()
        training, no_grad, evaluation = (self._layers(merged, mode) for mode in MODES)
        self._check_seen((*training, *no_grad, *evaluation))
        if training:
            training = tuple(self._with_weights(layer, evaluation) for layer in training)
        else:
            no_grad = tuple(self._with_weights(layer, evaluation) for layer in no_grad)
        if self.seen.agreement.is_spread:
            training, no_grad, evaluation = (exchange(part, self.group) for part in (training, no_grad, evaluation))
        self.trends.add(self.num_steps, training)
        training = tuple(self._with_growth(layer) for layer in training)
        alarms, notes = self._alarms(training, no_grad, evaluation), self._notes((*training, *no_grad, *evaluation))
        report = Report(self.num_steps, training, evaluation, alarms, notes, no_grad, per_head=self.per_head)
        self._begin()
        report = self.responses.act(Event(report, self.seen.model, self.host, self.stabilisers))
        if not (dist.is_available() and dist.is_initialized()) or dist.get_rank(self.group) == 0:
            for line in report.actions:
                LOG.warning(line)
            for sink in self.sinks:
                sink.write(report)
        return report

    def _alarms(
        self, training: tuple[LayerReport, ...], no_grad: tuple[LayerReport, ...], evaluation: tuple[LayerReport, ...]
    ) -> tuple[Alarm, ...]:
        """List the alarms of this report, which say since when if the last one had them.

        Passes without gradients have the same weights as those that train, and are judged where there are no others.
        """
        self.awake.add(self.num_steps, (*training, *no_grad, *evaluation), self.thresholds.dead_uniform)
        may_begin = partial(self.awake.may_begin, step=self.num_steps)
        options: Any = dict(attached=self._attached(), may_begin=may_begin)
        alarms = find_alarms(training, self.thresholds, trends=self.trends, **options)
        alarms += find_alarms(() if training else no_grad, self.thresholds, mode="no_grad", **options)
        alarms += find_alarms(evaluation, self.thresholds, mode="evaluation", **options)
        return tuple(self.said.mark(alarms, self.num_steps))

    def _notes(self, seen: tuple[LayerReport, ...]) -> tuple[str, ...]:
        """List remarks that the numbers do not make; unknown gates are mentioned once."""
        num_cached, skipped = 0, sum(self.seen.spending.skipped.values())
        if self.hooks is not None:
            num_cached = self.hooks.num_cached
            self.seen.refused.update((*outside(self.hooks.outside), *self.hooks.unseen()))
        lost = () if self.was_told_of_gates else tuple(unfollowed(seen))
        self.was_told_of_gates |= bool(lost)
        return (*make_notes(seen, self.seen.refused, num_cached, skipped), *lost)

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
            "awake": self.awake.state_dict(),
            "said": {key: [since, list(heads)] for key, (since, heads) in self.said.known.items()},
            "actions": [action.state_dict() for action in self.responses.all()],
            "lines": list(self.responses.lines),
        }

    def load_state_dict(self, state: State) -> None:
        self.num_steps = state["num_steps"]
        self.seen.generator.set_state(state["generator"])
        self.trends.load_state_dict(state.get("trends", {"moments": {}}))
        self.awake.load_state_dict(state.get("awake", {"first": None, "ever": {}}))
        self.said.known = {key: (since, list(heads)) for key, (since, heads) in state.get("said", {}).items()}
        for action, kept in zip(self.responses.all(), state.get("actions", ()), strict=False):
            action.load_state_dict(kept)
        self.responses.lines = list(state.get("lines", ()))
        if self.responses.is_pending and (self.sample is not None or self.seen.unknown is None):  # no need to wait
            self._try_actions(self.sample)

    def _layers(self, tallies: dict[Key, Tally], mode: Mode) -> tuple[LayerReport, ...]:
        return tuple(
            LayerReport.of(
                site.block,
                self.seen.number(index),
                self.seen.indices(site),
                tally,
                self.seen.through.get(index, ""),
                site.query_name if self.seen.unknown is not None else site.owner,
            )  # fmt: skip
            for index, site in ((index, self.seen.sites[index]) for index in self.seen.order)
            if (tally := tallies[index, mode]).has_seen_any
        )

    def _with_weights(self, layer: LayerReport, evaluation: Sequence[LayerReport]) -> LayerReport:
        """The layer with what its heads' weights say, where they are known."""
        if self.weights is None:
            return layer
        if (index := self.seen.own_index(layer.block, layer.layer)) is None:
            return layer
        heads = self.seen.found.heads(self.seen.sites[index])
        self.seen.shown |= {"QKNorm"} if any(head.query.norm is not None for head in heads) else set()
        now = Weights.of([head for head in heads if head.index in layer.heads])
        if now is None or len(now.query) != len(layer.heads):
            return layer
        before, self.weights[index] = self.weights.get(index), replace(now, heads=())
        try:
            numbers = {name: tuple(values.tolist()) for name, values in now.numbers(before).items()}
        except Refusal as reason:  # so large that their moments overflow: that is for the alarms to tell
            self.seen.refused.add(f"{layer.block} layer {layer.layer}: {reason}")
            return layer
        others = [one for one in evaluation if (one.block, one.layer) == (layer.block, layer.layer)]
        differs = self.seen.found.difference(self.seen.sites[index])
        bounds, note = standing_bounds(numbers["logit_bound"], (layer, *others), differs)
        self.seen.refused.update(note)
        return replace(layer, weights=numbers | {"logit_bound": bounds})

    def _with_growth(self, layer: LayerReport) -> LayerReport:
        rates = {f"{name}_growth": tuple(self.trends.growth(layer, name)) for name in GROWING}
        known = {name: values for name, values in rates.items() if not all(map(math.isnan, values))}
        return replace(layer, weights=layer.weights | known)

    def _attached(self) -> set[str]:
        """Stabilisers at work: those given, those that actions attached, and what modules and calls show."""
        names = {type(one).__name__ for one in (*self.stabilisers, *self.responses.all())}
        modules = (name.rpartition(".")[2] for name, _ in self.seen.model.named_modules())
        names |= {"QKNorm"} if any(name in QK_NORMS for name in modules) else set()
        return names | self.seen.shown | at_work.names(self.seen.model)

    def _check_seen(self, seen: Sequence[LayerReport]) -> None:
        ran = self.hooks is not None and self.hooks.num_passes > 0
        if self.seen.unknown is not None and ran and not seen:
            if self.seen.refused:
                raise Refusal("; ".join(sorted(self.seen.refused)))
            written = written_out(self.seen.modules, self.seen.softmaxes, self.seen.calling)
            instead = f", but a softmax of its own in {', '.join(written)}" if written else ""
            raise refusal(
                "attention that calls a kernel (scaled_dot_product_attention, FlexAttention, flash-attn, "
                "nn.MultiheadAttention), or a model that is known",
                f"neither in {type(self.seen.model).__name__}{instead}",
                "name its projections by heads=[(query, key, num_heads, num_key_heads), …] and say causal=…",
            )
        if self.seen.unknown is not None and seen:
            self.seen.refused.update(silent(self.seen.modules, self.seen.softmaxes, self.seen.calling))
            self.seen.refused.update(repeated(self.seen.own_sites()))
            self.seen.refused.update(self.seen.found.unexplained())

    def _begin(self) -> None:
        self.seen.begin()
        if self.hooks is not None:
            self.hooks.num_cached = self.hooks.num_passes = 0
            self.hooks.outside.clear()
