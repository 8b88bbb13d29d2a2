"""Runs that diverge, and beside each one that does not: what the alarms say, when, and what is done about it."""

from dataclasses import dataclass, replace

import pytest
import torch

from locater.monitor import Attach, AttentionMonitor, Checkpoint, RollBack, Stop
from locater.stabilisers import QKClip
from locater.training.model import LanguageModel
from locater.training.shape import Shape
from locater.training.watch import SERIOUS

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

    def go(self, on_alarm=None):
        """The losses, and the serious alarms as (step, kind) in their order."""
        (model, optimizer), losses, alarms = self.make(), [], []
        with AttentionMonitor(model, every=5, optimizer=optimizer, on_alarm=on_alarm) as monitor:
            for step, texts in self.batches():
                rate = min(1.0, (step + 1) / max(1, self.warmup))
                for group in optimizer.param_groups:
                    group["lr"] = self.learning_rate * rate * self.scale(monitor)
                with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
                    loss = model(texts[:, :-1], texts[:, 1:])
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
                report = monitor.step()
                alarms += [(step, alarm.kind) for alarm in report.alarms if alarm.kind in SERIOUS] if report else []
                if monitor.should_stop:
                    break
        return losses, alarms, monitor

    @staticmethod
    def scale(monitor):
        rolled = [action.factor**action.num_done for action in monitor.responses.all() if isinstance(action, RollBack)]
        return rolled[0] if rolled else 1.0


CALM = Run()
PAIRS = {
    "learning rate": (replace(CALM, learning_rate=0.3), CALM),
    "bf16": (replace(CALM, bf16=True, learning_rate=0.3), replace(CALM, bf16=True)),
    "long context": (
        replace(CALM, context=384, learning_rate=0.1, num_steps=40),
        replace(CALM, context=384, num_steps=40),
    ),
}


@pytest.mark.parametrize("kind", PAIRS)
def test_alarms_tell_the_run_that_diverges_from_the_one_that_does_not(kind):
    wild, calm = PAIRS[kind]
    losses, alarms, _ = calm.go()
    assert not alarms and losses[-1] < losses[0]
    lost, raised, _ = wild.go()
    print(f"{kind}: loss {losses[0]:.2f} -> {losses[-1]:.2f}; wild -> {lost[-1]:.2f}, alarms {raised[:3]}")
    assert raised and lost[-1] > losses[-1]


@pytest.mark.parametrize("action", ["stop", "checkpoint", "roll back", "attach"])
def test_actions_end_to_end(action, tmp_path):
    wild = PAIRS["learning rate"][0]
    chosen = {
        "stop": Stop(),
        "checkpoint": Checkpoint(tmp_path / "alarm-{step}.pt"),
        "roll back": RollBack(0.1),
        "attach": Attach(QKClip, threshold=5.0),
    }[action]
    plain, alarms, _ = wild.go()
    losses, acted, monitor = wild.go(chosen)
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
