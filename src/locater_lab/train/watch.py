"""The monitor of a run: what its alarms say, and what is done about them. All of it is part of a checkpoint."""

import math
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from locater.attention import queries_and_keys
from locater.attention.capture import inputs_of
from locater.errors import Refusal
from locater.models import live, read_heads
from locater.monitor import AttentionMonitor, Report, Scope
from locater.monitor.report import SERIOUS
from locater.records import Json
from locater.stabilisers import QKClip, Stabiliser

from .config import Config
from .methods import ATTACH_QK_CLIP, CHECKPOINT, ROLL_BACK, STOP, read_actions
from .store import Store

# e^±88 is where float32 overflows: beyond, a softmax holds nothing but its largest logit.
EXPLODED = 88.0


@torch.no_grad()
def diagnose(model: nn.Module, batch: Shaped[Tensor, "samples ..."]) -> str | None:
    """Describe a model's fault on a batch, if it has one; costs a forward pass and its logits."""
    if name := next((name for name, weight in model.named_parameters() if not _is_finite(weight)), None):
        return f"the weights `{name}` are not finite"
    sites = live.open_live(model).sites
    broken: list[str] = []

    def noting(name: str) -> Callable[[nn.Module, object, object], None]:
        def note(module: nn.Module, args: object, output: object) -> None:
            if not _is_finite(output):
                broken.append(name)

        return note

    hooks = [module.register_forward_hook(noting(name)) for name, module in model.named_modules() if name]
    try:
        with inputs_of(dict(model.named_modules()), [site.query_name for site in sites]) as seen:
            model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    for site, x in zip(sites, seen, strict=True):
        if sentence := _exploded(site, x):
            return sentence
    return f"the first output that is not finite is that of `{broken[0]}`" if broken else None


def _exploded(site: live.AttentionModule, x: Tensor) -> str | None:
    """The layer's worst head, if its logits are beyond what a softmax can hold."""
    try:
        heads = read_heads(site).heads
    except Refusal as reason:
        return str(reason)
    queries, keys = queries_and_keys(heads, x, x)
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
    largest = (queries @ keys.mT * heads[0].scale).abs().nan_to_num(math.inf).amax((0, 2, 3))
    worst = int(largest.argmax())
    if largest[worst] <= EXPLODED:
        return None
    size = f"{largest[worst]:.3g}" if math.isfinite(largest[worst]) else "infinity"
    return f"the logits of layer {site.number}, head {worst} exploded (largest: {size})"


def _is_finite(value: object) -> bool:
    return not isinstance(value, Tensor) or not value.is_floating_point() or bool(torch.isfinite(value).all())


MOST_ROLL_BACKS = 3
# Checkpoints that are kept beside the last and the best. A report is of the pass before the step that ends it: its
# state is a candidate, and good once the next report is without serious alarms too. The run's start is good.
GOOD, CANDIDATE, ALARM = "good", "candidate", "alarm"


@runtime_checkable
class Watched(Protocol):
    """A trainer, as far as its watch acts on it."""

    config: Config
    module: nn.Module
    store: Store
    step: int
    say: Callable[[str], None]

    def save(self, *, keep: str, midway: bool) -> None: ...
    def reload(self, which: str) -> int: ...
    def note(self, row: Json) -> None: ...


class TrainingWatch:
    """Looks at every `watch_every`-th step. Actions come between two steps, alike on all processes.

    A roll-back needs a good state on disk: a checkpoint is written at every report without serious alarms. The step
    goes on, so that the texts behind an alarm are not met again, at `rate` times the rate that the config says.
    """

    def __init__(self, trainer: Watched) -> None:
        loop = trainer.config.loop
        self.trainer, self.actions = trainer, read_actions(loop.on_alarm)
        self.rate, self.num_roll_backs, self.has_saved, self.should_stop = 1.0, 0, False, False
        self.clip: Stabiliser | None = None
        self.monitor: AttentionMonitor | None = None
        if loop.watch_every:
            self.monitor = AttentionMonitor(trainer.module, every=loop.watch_every, scope=Scope(budget=2**40))
            self.monitor.detach()  # until the run begins

    def begin(self) -> None:
        """Attach the monitor at the trainer's step, and keep a state to roll back to."""
        if self.monitor is not None:
            self.monitor.attach().num_steps = self.trainer.step
        if ROLL_BACK in self.actions and not self._has_good():
            self.trainer.store.keep("last", GOOD)

    def end(self) -> None:
        if self.monitor is not None:
            self.monitor.detach()

    def step(self) -> None:
        """After a step of the optimiser: a report, if one is due, its row of metrics, and what follows from it."""
        if self.clip is not None:
            self.clip.step()
        report = None if self.monitor is None else self.monitor.step(self.trainer.step)
        if report is None:
            return
        serious = [str(alarm) for alarm in report.alarms if alarm.kind in SERIOUS]
        done = self._act("; ".join(serious)) if serious else self._keep()
        self.trainer.note(_row(self.trainer.step, report, done))

    def rescue(self, reason: str) -> bool:
        """After a step whose loss is not finite: whether the run can go on from a good state."""
        if ROLL_BACK not in self.actions or not self._has_good():
            return False
        assert self.monitor is not None
        self.monitor.seen.begin()  # what was seen of the lost step
        done = self._act(reason)
        self.trainer.step += 1
        self.monitor.num_steps = self.trainer.step
        row = {"kind": "watch", "step": self.trainer.step, "alarms": [reason], "actions": done}
        self.trainer.note(row)
        return not self.should_stop

    def _act(self, reason: str) -> list[str]:
        trainer, done = self.trainer, []
        if CHECKPOINT in self.actions and not self.has_saved:
            self.has_saved = True
            trainer.save(keep=ALARM, midway=True)
            done.append(f"checkpoint {trainer.store.names()[ALARM]}")
        if ROLL_BACK in self.actions and self._has_good():
            done.append(self._roll_back())
        if ATTACH_QK_CLIP in self.actions and self.clip is None:
            self._attach()
            done.append("attached QK-clip")
        if STOP in self.actions:
            self.should_stop = True
            done.append("stop")
        trainer.say(f"step {trainer.step}: {reason}" + (f" ({', '.join(done)})" if done else ""))
        return done

    def _has_good(self) -> bool:
        return GOOD in self.trainer.store.names()

    def _keep(self) -> list[str]:
        if ROLL_BACK in self.actions:
            self.trainer.store.keep(CANDIDATE, GOOD)
            self.trainer.save(keep=CANDIDATE, midway=True)
        return []

    def _roll_back(self) -> str:
        if self.num_roll_backs >= MOST_ROLL_BACKS:
            self.should_stop = True
            return f"stop after {MOST_ROLL_BACKS} roll-backs"
        self.num_roll_backs += 1
        self.rate *= self.actions[ROLL_BACK] or 1.0
        step = self.trainer.reload(GOOD)
        self.trainer.store.keep(GOOD, CANDIDATE)
        return f"back to the weights of step {step}, {self.rate:g} times the learning rate"

    def _attach(self) -> None:
        module: nn.Module = self.trainer.module
        self.clip = QKClip(module, threshold=self.actions[ATTACH_QK_CLIP] or 50.0)

    def state(self) -> Json:
        """State that a resumed run must know; empty where nothing is watched."""
        if self.monitor is None:
            return {}
        moments = {
            key: [
                [step, {name: [_number(one) for one in values] for name, values in numbers.items()}]
                for step, numbers in kept
            ]
            for key, kept in self.monitor.trends.moments.items()
        }
        numbers = {"rate": self.rate, "num_roll_backs": self.num_roll_backs, "has_saved": self.has_saved}
        return {**numbers, "has_clip": self.clip is not None, "trends": moments}

    def restore(self, state: Json) -> None:
        if self.monitor is None or not state:
            return
        self.rate, self.num_roll_backs, self.has_saved = (
            state[name] for name in ("rate", "num_roll_backs", "has_saved")
        )
        self.monitor.trends.load_state_dict({"moments": state["trends"]})
        if state["has_clip"] and self.clip is None:
            self._attach()


def _number(value: float) -> float:
    """JSON has no NaN; growth from 0 is none."""
    return value if math.isfinite(value) else 0.0


def _row(step: int, report: Report, done: list[str]) -> Json:
    """One line of metrics: every layer's numbers under their names in logs, the alarms and the actions."""
    numbers = {name: value for name, value in report.metrics().items() if math.isfinite(value)}
    said = {"alarms": [str(one) for one in report.alarms], "actions": done, "notes": list(report.notes)}
    return {"kind": "watch", "step": step, **numbers, **said}
