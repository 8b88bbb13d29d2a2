"""Alarms: a few conditions on attention, each with a threshold that does not depend on the length of the text."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from ..attention.calls import SDPA
from ..records import State
from .finding import OF_OUTPUTS
from .report import RESTING, SERIOUS, Alarm, LayerReport
from .tally import Mode
from .trends import Trends

SETTLED = 1000  # steps in which a head that learns anything has distinguished keys
LEARNED = 0.95  # normalised entropy of the median head below: the model is not at its start, where it is about 0.99
ALIKE = 1e-5  # residual of the first layer's input below: a text of one word repeated, in which nothing can collapse
AWAKE = 0.99  # normalised entropy of a head at most: it tells keys apart, which a fresh one hardly does


@dataclass(frozen=True)
class Thresholds:
    """Limits of the alarms. None switches an alarm off; what each means stands in docs/monitor.md."""

    entropy_collapse: float | None = 0.02  # normalised entropy below: n^0.02 keys hold the mass
    rank_collapse: float | None = 0.02  # residual below: 99.96 % of the squared norm is common to all tokens
    logit_explosion: float | None = 10.0  # largest logit above this many log n, each enough to outweigh n keys
    dead_uniform: float | None = 0.9995  # normalised entropy above: logits as good as equal
    dead_sink: float | None = 0.99  # mass on the first token above: whatever the text says
    not_finite: float | None = 0.0  # share of queries above whose logits are NaN or infinite


Unfit = Callable[[LayerReport], Collection[str]]  # names of stabilisers that are no remedy for a layer
# What to try, the first that is not at work already: the name of a stabiliser, or none, and words for it.
Remedies = tuple[tuple[str, str], ...]
# What saved most runs of the fleet (docs/monitor.md): a lower rate alone, in the middle of a divergence, saved none.
BACK = "RollBack: the last good state with a lower learning rate"
SLOWLY = "a longer warm-up"  # too, where growth is so fast that the steps are what is wrong
SHRINK: Remedies = (
    ("RollBack", BACK),
    ("QKNorm", "QKNorm"),
    ("QKClip", "QKClip"),
    ("SoftCap", "SoftCap"),
    ("", "a lower learning rate"),
)
SHARPEN: Remedies = (("RollBack", BACK), ("QKNorm", "QKNorm"), ("", SLOWLY))
REVIVE: Remedies = (("", "less weight decay on queries and keys"),)
REST: Remedies = (("", "an output gate or a learned sink, so that heads can rest without one, or to prune them"),)
SPREAD: Remedies = (("RollBack", BACK), ("", f"{SLOWLY}, larger residual branches or pre-LN"))
RESTART: Remedies = (("RollBack", BACK), ("", "a look at the data, and in front of the first layer named"))


def choose_remedy(remedies: Remedies, layer: LayerReport, unfit: Collection[str]) -> str:
    """Give the first that is not at work already, that this layer's kernel takes, and that would change its logits."""
    unfit = {*unfit, *(() if layer.through in ("", SDPA) else OF_OUTPUTS)}
    return next(words for name, words in remedies if name not in unfit)


class _Condition(NamedTuple):
    """One kind of alarm: figures of a layer by head, a limit, which side of it is wrong, and words."""

    kind: str
    figures: Callable[[LayerReport], dict[int | None, float]]
    limit: Callable[[LayerReport, Thresholds], float | None]
    above: bool
    words: str
    remedies: Remedies

    def worse(self, figure: float, limit: float) -> bool:
        return figure > limit if self.above else figure < limit


def _by_head(name: str) -> Callable[[LayerReport], dict[int | None, float]]:
    """Read one statistic of a layer by head."""
    return lambda layer: dict(zip(layer.heads, layer.statistics[name], strict=True))


# The worst first.
CONDITIONS = (
    _Condition(
        "not finite", lambda layer: {None: layer.rows_not_finite / max(1, layer.num_queries)},
        lambda layer, limits: limits.not_finite, True, "share of queries with NaN or infinite logits", RESTART,
    ),
    _Condition(
        "logit explosion", _by_head("max_logit"),
        lambda layer, limits: limits.logit_explosion and limits.logit_explosion * max(1.0, layer.log_keys),
        True, "largest", SHRINK,
    ),
    _Condition(
        "entropy collapse", _by_head("normalised_entropy"),
        lambda layer, limits: limits.entropy_collapse, False, "lowest normalised entropy", SHARPEN,
    ),
    _Condition(
        "rank collapse", lambda layer: {None: layer.ranks.get("residual", math.nan)},
        lambda layer, limits: limits.rank_collapse, False, "residual", SPREAD,
    ),
    _Condition(
        RESTING[0], _by_head("sink_mass"),
        lambda layer, limits: limits.dead_sink if layer.block != "cross" and layer.log_keys > 1 else None,
        True, "mass on the first token", REST,
    ),
    _Condition(
        RESTING[1], _by_head("normalised_entropy"),
        lambda layer, limits: limits.dead_uniform, True, "normalised entropy", REVIVE,
    ),
)  # fmt: skip


OF_TOKENS = ("rank collapse", RESTING[1])  # of tokens or keys that are alike, which may be the text's doing


class Alarms:
    """Finds the alarms of a report, and remembers what it takes to word and to excuse them.

    An alarm of the same heads, or of some of them, as in the last report says since when. At its start a model's logits
    are nearly equal, and heads begin to learn one by one: a head is dead that distinguished keys before, that has not
    done so for SETTLED steps, or whose model had learned before it was first seen.
    """

    def __init__(self, thresholds: Thresholds, trends: Trends | None = None) -> None:
        self.thresholds, self.trends = thresholds, trends or Trends()
        self.step, self.first = 0, None
        self.layers: Sequence[LayerReport] = ()  # of the report under way
        self.awake: dict[str, list[int]] = {}  # heads that have ever told keys apart
        self.had_learned = False  # before the first report
        self.known: dict[str, tuple[int, list[int]]] = {}  # alarms of the last report: since when, and of which heads

    def begin(self, step: int, layers: Sequence[LayerReport]) -> None:
        """Look at all layers of a report before any is judged."""
        self.step, self.layers = step, layers
        values = [value for layer in layers for value in layer.statistics["normalised_entropy"] if value == value]
        if self.first is None and values:
            self.first, self.had_learned = step, median(values) < LEARNED

    def find(self, judged: Mapping[Mode, Sequence[LayerReport]], unfit: Unfit = lambda layer: ()) -> tuple[Alarm, ...]:
        """List the alarms of the layers of each mode, heads together, the worst first; `unfit` are no remedies."""
        found: list[Alarm] = []
        for mode, layers in judged.items():
            alike = {one.block for one in layers if not one.layer and one.ranks.get("residual", 1) < ALIKE}
            entries = [
                (rank, -_distance(condition, alarm), replace(alarm, mode=mode))
                for layer in layers
                for rank, condition in enumerate(CONDITIONS)
                if condition.kind not in OF_TOKENS or layer.block not in alike
                for alarm in self._judge_layer(layer, condition, unfit, self.trends if mode == "training" else Trends())
            ]
            found += [alarm for *_, alarm in sorted(entries, key=lambda entry: entry[:2])]
        if not any(alarm.kind in SERIOUS for alarm in found):  # what an explosion tells apart may be undone
            self._note_awake()
        return self._mark(found)

    def _note_awake(self) -> None:
        """Note the heads that tell keys apart."""
        for layer in self.layers:
            heads = zip(layer.heads, layer.statistics["normalised_entropy"], strict=True)
            told = {head for head, value in heads if value <= AWAKE}
            self.awake[layer.key] = sorted(told | {*self.awake.get(layer.key, ())})

    def _judge_layer(self, layer: LayerReport, condition: _Condition, unfit: Unfit, trends: Trends) -> Iterator[Alarm]:
        limit, figures = condition.limit(layer, self.thresholds), condition.figures(layer)
        if limit is None:
            return
        wrong = {head: figure for head, figure in figures.items() if condition.worse(figure, limit)}
        if condition.kind == RESTING[1]:
            wrong = {head: figure for head, figure in wrong.items() if not self._may_begin(layer, head)}
        if not wrong:
            return
        remedy, trend = choose_remedy(condition.remedies, layer, unfit(layer)), ""
        if condition.kind == "logit explosion":
            trend, is_fast = trends.describe(layer, "max_logit", wrong)
            remedy = f"{remedy}, or {SLOWLY}" if is_fast else remedy
        yield _alarm(layer, condition, wrong, limit, remedy=remedy, trend=trend)

    def _may_begin(self, layer: LayerReport, head: int | None) -> bool:
        """Tell whether this head may simply not have learned anything yet."""
        settled = self.first is not None and self.step - self.first >= SETTLED
        return not (settled or self.had_learned or head in self.awake.get(layer.key, ()))

    def _mark(self, alarms: Sequence[Alarm]) -> tuple[Alarm, ...]:
        """Say of alarms that the last report had since when they are."""
        marked, known = [], {}
        for alarm in alarms:
            key = f"{alarm.mode} {alarm.kind} {alarm.block} {alarm.layer}"
            since, heads = self.known.get(key, (self.step, []))
            is_old = key in self.known and {*alarm.heads} <= {*heads}
            marked.append(replace(alarm, since=since if is_old else None))
            known[key] = (since, heads) if is_old else (self.step, list(alarm.heads))
        self.known = known
        return tuple(marked)

    def state_dict(self) -> State:
        known = {key: [since, list(heads)] for key, (since, heads) in self.known.items()}
        awake = {"first": self.first, "ever": self.awake, "had_learned": self.had_learned}
        return {"awake": awake, "said": known}

    def load_state_dict(self, state: State) -> None:
        awake = state.get("awake", {"first": None, "ever": {}})
        self.first, self.awake = awake["first"], {key: list(heads) for key, heads in awake["ever"].items()}
        self.had_learned = awake.get("had_learned", False)
        self.known = {key: (since, list(heads)) for key, (since, heads) in state.get("said", {}).items()}


def _alarm(
    layer: LayerReport, condition: _Condition, wrong: dict[Any, float], limit: float, *, remedy: str, trend: str
) -> Alarm:
    worst = (max if condition.above else min)(wrong.values())
    heads = tuple(head for head in wrong if head is not None)
    meaning = f"{condition.words} {worst:.4g}, threshold {limit:.4g}"
    return Alarm(condition.kind, layer.block, layer.layer, heads, worst, limit, meaning, remedy, trend)


def _distance(condition: _Condition, alarm: Alarm) -> float:
    """Distance beyond the threshold."""
    return (alarm.figure - alarm.threshold) * (1 if condition.above else -1) / max(1e-12, abs(alarm.threshold))
