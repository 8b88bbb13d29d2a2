"""Better LocAteRs and two rivals of this year: `python runs/candidates.py [--out OUT] [--steps N] [--arms A,B,…]`.

The setting of the studies at 3,000 steps; rows are kept in runs/measured/candidates. Every arm is tuned on seed 100,
which is not judged: its strength at the middle rate, then its rate, with half steps; then five seeds. A candidate
survives if its paired interval leaves out 0 against `none` and against `held`. Stop it at any time and start it again:
what is measured is kept.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from locater.stabilisers import LocAteR, QKClip, QKNorm, SigmaReparam, Stabiliser
from locater_lab.studies.floors import ARMS as FLOORS
from locater_lab.studies.small import nothing, result, train_small, trained
from locater_lab.studies.statistics import holm, paired

KEPT = Path(__file__).parent / "measured" / "candidates"
TUNING_SEED, SEEDS = 100, range(5)
RATES = (2.5e-3, 5e-3, 1e-2)


def modules(model: nn.Module) -> list[Any]:
    return [layer.attention for layer in model.layers]  # type: ignore


def blocks(attention: Any) -> tuple[Tensor, Tensor]:
    """Queries and keys by head: (heads, d_head, d)."""
    parts = (attention.query.weight, attention.key.weight)
    query, key = (weight.unflatten(0, (-1, attention.d_head)) for weight in parts)
    return query, key


def moments(attention: Any) -> tuple[Tensor, Tensor]:
    """η² and tr W of every head, in units of λ."""
    query, key = blocks(attention)
    cross, temperature = query @ key.mT, math.sqrt(attention.d_head)
    frobenius = ((query @ query.mT) * (key @ key.mT)).sum((1, 2))
    square, trace = (cross * cross.mT).sum((1, 2)), cross.diagonal(dim1=1, dim2=2).sum(1)
    return (frobenius + square) / 2 / temperature**2, trace / temperature


class Released(Stabiliser):
    """LocAteR whose κ falls to 0 by a quarter of the run."""

    length = 750  # steps

    def __init__(self, model: nn.Module, strength: float) -> None:
        self.inner, self.first, self.count = LocAteR(model, strength=strength), strength, 0

    def penalty(self) -> Tensor:
        self.inner.strength = self.first * max(0.0, 1 - self.count / self.length)
        return self.inner.penalty() if self.inner.strength else torch.zeros(())

    def step(self) -> None:
        self.count += 1


class AboutItsMean(Stabiliser):
    """κ Σ (η² − (tr W)²/d_h)/λ²: the variance of the eigenvalues that are not 0, which does not pull the mean."""

    def __init__(self, model: nn.Module, strength: float) -> None:
        self.attentions, self.strength = modules(model), strength

    def penalty(self) -> Tensor:
        total = torch.zeros(())
        for attention in self.attentions:
            eta, trace = moments(attention)
            total = total + (eta - trace.square() / attention.d_head).sum() * attention.d_head
        return self.strength * total


class Brake(Stabiliser):
    """κ Σ (V − ln T)₊², V the variance over keys of the logits that the pass had."""

    def __init__(self, model: nn.Module, strength: float) -> None:
        self.strength, self.seen = strength, {}
        for attention in modules(model):
            for name in ("query", "key"):
                getattr(attention, name).register_forward_hook(partial(self._keep, attention, name))

    def _keep(self, attention: Any, name: str, module: nn.Module, given: object, output: Tensor) -> None:
        self.seen[attention, name] = output.unflatten(-1, (-1, attention.d_head))

    def penalty(self) -> Tensor:
        total = torch.zeros(())
        for attention in {attention for attention, _ in self.seen}:
            query, key = (self.seen[attention, name] for name in ("query", "key"))
            centred = key - key.mean(1, keepdim=True)
            covariance = torch.einsum("bthi,bthj->hij", centred, centred) / (key.shape[0] * key.shape[1])
            variance = torch.einsum("bthi,hij,bthj->h", query, covariance, query)
            variance = variance / (query.shape[0] * query.shape[1] * attention.d_head)
            total = total + (variance - math.log(key.shape[1])).relu().square().sum()
        return self.strength * total


class Clip(Stabiliser):
    """Queries and keys scaled after the step, so that η ≤ cλ."""

    def __init__(self, model: nn.Module, strength: float) -> None:
        self.attentions, self.highest = modules(model), strength

    @torch.no_grad()
    def step(self) -> None:
        for attention in self.attentions:
            eta = moments(attention)[0].clamp(min=1e-12).sqrt()
            factor = (self.highest / eta).clamp(max=1).sqrt()[:, None, None]
            for block in blocks(attention):
                block.mul_(factor)


class Coupled(Stabiliser):
    """The step of W_Q times ‖W_K(0)‖/‖W_K‖ and the reverse, by head (after arXiv 2511.21377)."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, strength: float) -> None:
        self.attentions, self.power = modules(model), strength
        with torch.no_grad():
            self.first = [[self._norm(block) for block in blocks(one)] for one in self.attentions]
            self.before = [[block.clone() for block in blocks(one)] for one in self.attentions]

    def _norm(self, block: Tensor) -> Tensor:
        return block.norm(dim=(1, 2), keepdim=True)

    @torch.no_grad()
    def step(self) -> None:
        for attention, first, before in zip(self.attentions, self.first, self.before, strict=True):
            now = blocks(attention)
            norms = [self._norm(block) for block in before]
            for place, block in enumerate(now):
                share = (first[1 - place] / norms[1 - place]).clamp(max=1) ** self.power
                block.copy_(before[place] + share * (block - before[place]))
            self.before[self.attentions.index(attention)] = [block.clone() for block in now]


class PerHeadMuon(Stabiliser):
    """Muon whose steps of queries, keys and values are made orthogonal head by head."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, strength: float) -> None:
        self.optimizer, self.velocity, self.plain = optimizer, {}, optimizer.step
        self.weights = [
            (one.weight, attention.d_head)
            for attention in modules(model)
            for one in (attention.query, attention.key, attention.value)
        ]
        optimizer.step = self._step  # type: ignore

    @torch.no_grad()
    def _step(self) -> None:
        gradients = [(weight, weight.grad, d_head) for weight, d_head in self.weights]
        for weight, _, _ in gradients:
            weight.grad = None
        self.plain()
        rate = self.optimizer.param_groups[0]["lr"]
        for weight, gradient, d_head in gradients:
            assert gradient is not None
            velocity = self.velocity.setdefault(weight, torch.zeros_like(weight))
            velocity.lerp_(gradient, 0.05)
            update = orthogonal(gradient.lerp(velocity, 0.95).unflatten(0, (-1, d_head)))
            scale = 0.2 * math.sqrt(max(update.shape[1:]))
            weight.sub_(rate * scale * update.flatten(0, 1))


def orthogonal(blocks: Tensor) -> Tensor:
    """Five steps of Newton and Schulz, as Muon has them."""
    x = blocks / blocks.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


class Arm(NamedTuple):
    make: Callable[..., Stabiliser]  # (model, strength), or (model, optimizer, strength) if late
    strengths: tuple[float, ...] = (0.0,)
    late: bool = False
    optimizer: str = "adam"


ARMS = {
    "none": Arm(lambda model, strength: nothing(model)),
    "uniform attention": Arm(lambda model, strength: FLOORS["uniform attention"](model)),
    "held": Arm(lambda model, strength: LocAteR(model, strength=strength), (1e-4, 1e-3, 1e-2)),
    "released": Arm(Released, (1e-3, 1e-2, 1e-1)),
    "about its mean": Arm(AboutItsMean, (1e-4, 1e-3, 1e-2)),
    "brake": Arm(Brake, (1e-3, 1e-2, 1e-1)),
    "η-clip": Arm(Clip, (0.3, 1.0, math.sqrt(2 * math.log(32)))),
    "QK-norm": Arm(lambda model, strength: QKNorm(model)),
    "coupled rates": Arm(Coupled, (0.5, 1.0, 2.0), late=True),
    "muon": Arm(lambda model, strength: nothing(model), optimizer="muon"),
    "muon by head": Arm(PerHeadMuon, late=True, optimizer="muon"),
}
# Of runs/unstable.py alone.
RIVALS = {
    "QK-Clip": Arm(lambda model, strength: QKClip(model, threshold=strength), (3.0, 10.0, 30.0)),
    "σReparam of queries and keys": Arm(
        lambda model, strength: SigmaReparam(
            nn.ModuleList(one for part in modules(model) for one in (part.query, part.key)), gain=strength
        ),
        (1.0, 2.0, 4.0, 8.0),
    ),
}


class Runs:
    """Measures what is asked for, and keeps it."""

    def __init__(self, out: Path, steps: int) -> None:
        self.out, self.steps = out, steps
        out.mkdir(parents=True, exist_ok=True)
        Released.length = steps // 4

    def loss(self, arm: str, strength: float, rate: float, seed: int) -> float:
        path = self.out / f"{arm.replace(' ', '-')}-{strength:g}-{rate:g}-seed{seed}.json"
        if not path.exists():
            kind = (ARMS | RIVALS)[arm]
            config = trained(seed, self.steps, learning_rate=rate, optimizer=kind.optimizer)
            found = result(train_small(config, lambda *parts: kind.make(*parts, strength), late=kind.late))
            path.write_text(json.dumps({name: float(f"{value:.6g}") for name, value in found.items()}) + "\n")
            print(f"{path.stem}: {found['best_loss']:.4f}", flush=True)
        return json.loads(path.read_text())["best_loss"]

    def tuned(self, arm: str) -> tuple[float, float]:
        """The strength at the middle rate, then the rate, then half steps of it; on the seed that is not judged."""

        def loss(strength: float, rate: float) -> float:
            return self.loss(arm, strength, rate, TUNING_SEED)

        strength = lowest(ARMS[arm].strengths, lambda strength: loss(strength, RATES[1]))
        best = lowest(RATES, lambda rate: loss(strength, rate))
        half_steps = [float(f"{best * factor:.2g}") for factor in (0.5**0.5, 2**0.5)]
        return strength, min([best, *half_steps], key=lambda rate: loss(strength, rate))

    def row(self, arm: str) -> tuple[float, float, dict[int, float]]:
        """Strength, rate and the losses of the judged seeds."""
        strength, rate = self.tuned(arm)
        return strength, rate, {seed: self.loss(arm, strength, rate, seed) for seed in SEEDS}

    def table(self, arms: Iterable[str]) -> Iterator[str]:
        """The table of docs/reproduction.md: every arm at its own strength and rate, paired by seed."""
        rows = {arm: self.row(arm) for arm in arms}
        against = {other: _against(rows, other) for other in ("none", "held")}
        yield "| arm | strength | rate | loss | against `none` [95 %] | p (Holm) | against `held` [95 %] | p (Holm) |"
        yield "|---|---|---|---|---|---|---|---|"
        for arm, (strength, rate, losses) in rows.items():
            mean = sum(losses.values()) / len(losses)
            cells = [cell for found in against.values() for cell in found.get(arm, ("–", "–"))]
            shown = f"{strength:.3g}" if strength else "–"
            yield f"| {arm} | {shown} | {rate:g} | {mean:.4f} | " + " | ".join(cells) + " |"


def _against(rows: Mapping[str, tuple[float, float, dict[int, float]]], other: str) -> dict[str, tuple[str, str]]:
    """Each arm's difference to another and its p; that of `none` to `held` is the other's, and is counted there."""
    theirs = rows[other][2] if other in rows else {}
    own = {arm: paired(losses, theirs) for arm, (_, _, losses) in rows.items() if arm not in ("none", other)}
    return {arm: (str(one), one.shown_p) for arm, one in holm(own).items()}


def lowest(values: tuple[float, ...], loss: Callable[[float], float]) -> float:
    """The value of the least loss; a winner at an edge widens the grid, twice at most."""
    losses = {value: loss(value) for value in values}
    for _ in range(2 if len(values) > 1 else 0):
        best, ordered = min(losses, key=losses.__getitem__), sorted(losses)
        if best not in (ordered[0], ordered[-1]):
            break
        beyond = best * ordered[1] / ordered[0] if best == ordered[-1] else best * ordered[0] / ordered[1]
        beyond = float(f"{beyond:.4g}")
        losses[beyond] = loss(beyond)
    return min(losses, key=losses.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=KEPT)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--arms", default=",".join(ARMS))
    given = parser.parse_args()
    print("\n".join(Runs(given.out, given.steps).table(given.arms.split(","))))


if __name__ == "__main__":
    main()
