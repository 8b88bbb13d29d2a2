"""Runs that diverge, and beside each one that does not: what the alarms say, when, and what is done about it."""

import copy
import io
import itertools
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.optim import lr_scheduler

from locater.monitor import Attach, AttentionMonitor, Checkpoint, RollBack, Stop
from locater.monitor.report import SERIOUS
from locater.stabilisers import LocAteR, QKClip
from locater_lab.train.model import LanguageModel
from locater_lab.train.shape import Shape

pytestmark = pytest.mark.slow
VOCABULARY = 64


@dataclass(frozen=True)
class Run:
    """A small language model in a loop of one's own."""

    learning_rate: float = 1e-3
    num_layers: int = 2
    context: int = 64
    warmup: int = 10
    bf16: bool = False
    num_steps: int = 60

    def batches(self):
        """Words that follow from the one before by a rule, with noise."""
        generator = torch.Generator().manual_seed(0)
        for step in range(self.num_steps):
            start = torch.randint(VOCABULARY, (8, 1), generator=generator)
            texts = (start + 5 * torch.arange(self.context + 1)) % VOCABULARY
            noise = torch.randint(VOCABULARY, texts.shape, generator=generator)
            yield step, noise.where(torch.rand(texts.shape, generator=generator) < 0.2, texts)

    def make(self):
        torch.manual_seed(0)
        shape = Shape(
            vocab_size=VOCABULARY, context=self.context, d_model=32, d_feedforward=64, num_heads=2,
            num_layers=self.num_layers,
        )  # fmt: skip
        model = LanguageModel(shape)
        return model, torch.optim.Adam(model.parameters(), lr=self.learning_rate)

    def begin(self, on_alarm=None, schedule="LambdaLR", with_muon=False):
        model, optimizer = self.make()
        optimizers = [optimizer]
        if with_muon:
            weights = list(model.parameters())
            matrices = [one for one in weights if one.dim() == 2]
            optimizers = [
                torch.optim.Muon(matrices, lr=self.learning_rate),
                torch.optim.Adam([one for one in weights if one.dim() != 2], lr=self.learning_rate),
            ]
        schedulers = [self.schedulers[schedule](self, one) for one in optimizers]
        monitor = AttentionMonitor(model, every=5, optimizer=[*optimizers, *schedulers], on_alarm=on_alarm)
        return Loop(model, optimizers, schedulers, monitor)

    def steps(self, loop, first=0, end=None):
        """From the step `first` to that before `end`, or until an action stops it."""
        for _, texts in itertools.islice(self.batches(), first, end):
            with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                loss = loop.model(texts[:, :-1], texts[:, 1:])
            loss.backward()
            for one in loop.optimizers:
                one.step()
                one.zero_grad()
            loop.losses.append(float(loss.detach()))
            for one in loop.schedulers:
                one.step(*([loop.losses[-1]] if isinstance(one, lr_scheduler.ReduceLROnPlateau) else []))
            report = loop.monitor.step()
            loop.reports += [report] if report else []
            if loop.monitor.should_stop:
                break
        return loop

    def go(self, *given):
        """The losses, serious alarms as (step, kind) in their order, the monitor, what actions said, all reports."""
        loop = self.begin(*given)
        with loop.monitor as monitor:
            reports = self.steps(loop).reports
        alarms = [(report.step, one.kind) for report in reports for one in report.alarms if one.kind in SERIOUS]
        return loop.losses, alarms, monitor, [line for report in reports for line in report.actions], reports

    schedulers = {
        "LambdaLR": lambda self, one: lr_scheduler.LambdaLR(one, lambda n: min(1.0, (n + 1) / max(1, self.warmup))),
        "OneCycleLR": lambda self, one: lr_scheduler.OneCycleLR(
            one, self.learning_rate, total_steps=self.num_steps + 1, pct_start=0.1
        ),
        "ReduceLROnPlateau": lambda self, one: lr_scheduler.ReduceLROnPlateau(one, patience=20),
    }


@dataclass
class Loop:
    """What trains, and what came of it."""

    model: nn.Module
    optimizers: list
    schedulers: list
    monitor: AttentionMonitor
    losses: list = field(default_factory=list)
    reports: list = field(default_factory=list)

    @property
    def parts(self):
        """In the order in which they are loaded."""
        return [self.monitor, self.model, *self.optimizers, *self.schedulers]

    def saved(self):
        """As a file holds it."""
        file = io.BytesIO()
        torch.save([part.state_dict() for part in self.parts], file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    def load(self, states):
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
        return self

    def bits(self):
        """Every weight to the bit, NaN too."""
        return [one.detach().view(torch.int32).clone() for one in self.model.parameters()]


class Series(nn.Module):
    """Next values of four sensors: a transformer of one's own, which no table knows and whose input is no word."""

    def __init__(self, d_model=32, num_sensors=4):
        super().__init__()
        self.embed, self.head = nn.Linear(num_sensors, d_model), nn.Linear(d_model, num_sensors)
        self.positions = nn.Parameter(0.1 * torch.randn(64, d_model))
        self.blocks = nn.ModuleList(Block(d_model) for _ in range(2))
        self.norm = nn.LayerNorm(d_model)

    def forward(self, values, following):
        x = self.embed(values) + self.positions[: values.shape[1]]
        for block in self.blocks:
            x = block(x)
        return mse_loss(self.head(self.norm(x)), following)


class Block(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(d_model),
            nn.Linear(d_model, 3 * d_model),
            nn.Linear(d_model, d_model),
        )
        self.feedforward = nn.Sequential(
            nn.LayerNorm(d_model), nn.Linear(d_model, 64), nn.GELU(), nn.Linear(64, d_model)
        )

    def forward(self, x):
        parts = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.feedforward(x)


@dataclass(frozen=True)
class Sensors(Run):
    """Waves with noise; from step 42 on `bad` happens to some batches."""

    learning_rate: float = 3e-3
    num_steps: int = 100
    bad: str = ""

    def batches(self):
        generator = torch.Generator().manual_seed(0)
        for step in range(self.num_steps):
            rate, phase = torch.rand(2, 8, 1, 4, generator=generator)
            waves = torch.sin((0.1 + 0.5 * rate) * torch.arange(65)[None, :, None] + 6 * phase)
            values = waves + 0.1 * torch.randn(8, 65, 4, generator=generator)
            if self.bad == "not a number" and step == 42:
                values[0, 20, 1] = torch.nan
            if self.bad == "offset" and 42 <= step < 60:
                values = values + 100.0
            yield step, values

    def make(self):
        torch.manual_seed(0)
        model = Series()
        return model, torch.optim.Adam(model.parameters(), lr=self.learning_rate)


CALM = Run()
DEEP = replace(CALM, num_layers=6, learning_rate=1e-2, num_steps=80)
PAIRS = {
    "learning rate": (replace(CALM, learning_rate=0.3), CALM),
    "bf16": (replace(CALM, bf16=True, learning_rate=0.3), replace(CALM, bf16=True)),
    "long context": (
        replace(CALM, context=384, learning_rate=0.1, num_steps=40),
        replace(CALM, context=384, num_steps=40),
    ),
    "depth without warm-up": (replace(DEEP, warmup=0), replace(DEEP, warmup=40)),
    "bad data: not a number": (Sensors(bad="not a number"), Sensors()),
    "bad data: offset": (Sensors(bad="offset"), Sensors()),
}
# Which serious alarm comes first, and by which step.
FIRST = {
    "learning rate": ("logit explosion", 5),
    "bf16": ("logit explosion", 5),
    "long context": ("logit explosion", 10),
    "depth without warm-up": ("rank collapse", 5),
    "bad data: not a number": ("not finite", 45),
    "bad data: offset": ("rank collapse", 45),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_alarms_tell_the_run_that_diverges_from_the_one_that_does_not(kind):
    wild, calm = PAIRS[kind]
    losses, alarms, _, _, reports = calm.go()
    assert not alarms and losses[-1] < losses[0]
    assert sum(bool(report.alarms) for report in reports) <= 0.05 * len(reports), "of whatever kind"
    lost, raised, *_ = wild.go()
    print(f"{kind}: loss {losses[0]:.2f} -> {losses[-1]:.3f}; wild -> {lost[-1]:.3f}, {len(raised)}: {raised[:3]}")
    assert raised[0][::-1] == FIRST[kind]
    assert not lost[-1] <= losses[-1], "NaN, or higher"


@pytest.mark.parametrize("kind", ["depth without warm-up", "bad data: not a number"])
def test_roll_back_saves_other_kinds_too(kind):
    wild, calm = PAIRS[kind]
    (plain, *_), (safe, *_) = wild.go(), calm.go()
    action = RollBack(0.3)
    losses, alarms, *_ = wild.go(action)
    print(f"{kind}: {action.num_done} roll-backs, {len(alarms)} alarms, loss {losses[-1]:.3f}, without {plain[-1]:.3f}")
    assert 1 <= action.num_done <= 3 and len(losses) == wild.num_steps and not plain[-1] <= losses[-1]
    assert losses[-1] < safe[-1] + 0.2


@pytest.mark.parametrize("action", ["stop", "checkpoint", "roll back", "attach"])
def test_actions_end_to_end(action, tmp_path):
    wild = PAIRS["learning rate"][0]
    chosen = {
        "stop": Stop(),
        "checkpoint": Checkpoint(tmp_path / "alarm-{step}.pt"),
        "roll back": RollBack(0.1),
        "attach": Attach(QKClip, threshold=5.0),
    }[action]
    plain, alarms, *_ = wild.go()
    losses, acted, monitor, *_ = wild.go(chosen)
    print(f"{action}: alarms {len(alarms)} -> {len(acted)}, loss {plain[-1]:.2f} -> {losses[-1]:.2f}")
    if action == "stop":
        assert len(losses) == acted[0][0] + 1 < wild.num_steps
    elif action == "checkpoint":
        assert [path.name for path in tmp_path.iterdir()] == [f"alarm-{acted[0][0]}.pt"]
    elif action == "roll back":
        assert chosen.num_done >= 1 and losses[-1] < plain[-1]
    else:
        largest = [layer.mean("max_logit") for layer in monitor.report().training] or [0.0]
        assert chosen.stabiliser is not None and len(largest) >= 1
        explosions = [sum(kind == "logit explosion" for _, kind in found) for found in (alarms, acted)]
        assert explosions[1] < explosions[0]


SAID = {"roll back": "rolled back", "QKClip": "attached QKClip", "LocAteR": "attached LocAteR", "stop": "stopped"}


@pytest.mark.parametrize("with_muon", [False, True], ids=["Adam", "Muon and Adam"])
@pytest.mark.parametrize("schedule", Run.schedulers)
@pytest.mark.parametrize("action", SAID)
@pytest.mark.parametrize("kind", [kind for kind in PAIRS if kind != "bad data: offset"])
@pytest.mark.filterwarnings("ignore:Muon's steps")
def test_every_action_on_every_kind_ends_as_documented(kind, action, schedule, with_muon):
    """Only Stop ends a run; whatever is done is said, with the step and the reason."""
    wild = PAIRS[kind][0]
    chosen = {
        "roll back": RollBack(0.2),
        "QKClip": Attach(QKClip, threshold=20.0),
        "LocAteR": Attach(LocAteR, strength="auto"),
        "stop": Stop(),
    }[action]
    losses, alarms, _, lines, _ = wild.go({kind: chosen for kind in SERIOUS}, schedule, with_muon)
    if kind == "bad data: not a number" and action in ("QKClip", "LocAteR"):
        (line,) = lines
        assert line.startswith(f"step {alarms[0][0]}: not attached {action}: the weights are not finite")
        assert len(losses) == wild.num_steps
        return
    acted = [line for line in lines if SAID[action] in line]
    assert bool(alarms) == bool(acted) and all("because of" in line for line in acted)
    if alarms:
        assert acted[0].startswith(f"step {alarms[0][0]}: ")
    assert len(losses) == (alarms[0][0] + 1 if action == "stop" and alarms else wild.num_steps)


AGAIN = {
    "roll back": RollBack(0.2),
    "QKClip": Attach(QKClip, threshold=20.0),
    "LocAteR": Attach(LocAteR, strength="auto"),
    "stop": Stop(),
}


@pytest.mark.parametrize(("action", "with_muon"), [*((name, False) for name in AGAIN), ("roll back", True)])
@pytest.mark.parametrize("kind", PAIRS)
def test_every_kind_is_resumed_to_the_bit(kind, action, with_muon):
    """Saved just before its first alarm, and again some steps after what was done about it, and taken up elsewhere."""
    wild, schedule = PAIRS[kind][0], "LambdaLR"
    alarm = wild.steps(wild.begin(Stop(), schedule, with_muon)).reports[-1].step
    saves = [alarm - 2] if action == "stop" else [alarm - 2, alarm + 8]
    end = alarm + 18
    whole, kept = wild.begin(copy.deepcopy(AGAIN[action]), schedule, with_muon), []
    for first, last in itertools.pairwise([0, *saves, end]):
        wild.steps(whole, first, last)
        kept.append(whole.saved())
    lines = [line for report in whole.reports for line in report.actions]
    assert lines or with_muon, "something was done; Muon holds the deep run, which is resumed all the same"
    for save, states in zip(saves, kept, strict=False):
        resumed = wild.begin(copy.deepcopy(AGAIN[action]), schedule, with_muon).load(states)
        wild.steps(resumed, save, end)
        assert all(map(torch.equal, resumed.bits(), whole.bits()))
        late = [report for report in whole.reports if report.step >= save]
        assert [report.step for report in resumed.reports] == [report.step for report in late]
        for one, other in zip(resumed.reports, late, strict=True):
            assert (one.alarms, one.actions) == (other.alarms, other.actions)
            assert repr([layer.statistics for layer in one.training]) == repr(
                [layer.statistics for layer in other.training]
            )


@pytest.mark.parametrize("kind", [kind for kind in PAIRS if kind != "bad data: not a number"])
def test_a_checkpoint_of_an_alarm_goes_on_as_the_run_did(kind, tmp_path):
    """What `Checkpoint` saved is the state after that step: with the schedule's, the next ten steps are the same."""
    wild = PAIRS[kind][0]
    whole = wild.steps(wild.begin(Checkpoint(tmp_path / "alarm-{step}.pt")))
    (path,) = tmp_path.iterdir()
    step = int(path.stem.removeprefix("alarm-"))
    assert step == next(report.step for report in whole.reports if report.actions)
    saved = torch.load(path, weights_only=False)
    again = wild.begin()
    again.model.load_state_dict(saved["model"])
    again.optimizers[0].load_state_dict(saved["optimizer"])
    for part, state in zip(again.schedulers, saved["others"], strict=True):
        part.load_state_dict(state)
    assert wild.steps(again, step + 1, step + 11).losses == whole.losses[step + 1 : step + 11]
