"""What each stabiliser adds to a training step of a GPT-2-small-shaped model at 8 × 512 tokens, as a share of the step.

CPU time on one core, or wall time with --threads 2 on a machine that does nothing else; each round measures all in
turn. What acts on weights is timed alone, as a difference of two long steps would drown it. What changes the forward
pass is the difference of whole steps of a model with one layer, times twelve (not with --quick). Every number is a
median with a 95 % bootstrap interval. Takes about four minutes; exits 1 if a bound is missed.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from locater.stabilisers import (
    L2,
    Constant,
    EntropyBonus,
    LocAteR,
    Penalised,
    Projected,
    QKClip,
    QKDecay,
    QKNorm,
    SigmaReparam,
    SoftCap,
    Stabiliser,
    ZLoss,
)
from locater_lab.rivals import SpectralNorm

BATCH, LENGTH, LAYERS, MOST = 8, 512, 12, 0.004
SMALL, MOST_OF_SMALL = dict(layers=4, words=256, width=128, heads=4, length=128), 0.04
OURS = ("LocAteR, decoupled", "LocAteR, in the loss")
Measures = dict[str, Callable[[], float]]


def timed(function: Callable[[], object]) -> float:
    # One core's own time leaves out whatever else the machine does; several cores wait for each other in it.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    function()
    return clock() - start


class Trainer:
    """A model, its optimiser and one batch; `step` is the loop that everybody has."""

    def __init__(
        self, *, layers: int = LAYERS, words: int = 50257, width: int = 768, heads: int = 12, length: int = LENGTH
    ) -> None:
        torch.manual_seed(0)
        sizes = dict(n_layer=layers, n_embd=width, n_head=heads, vocab_size=words, bos_token_id=0, eos_token_id=0)
        self.model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes))
        self.tokens = torch.randint(0, words, (BATCH, length))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def step(self, stabiliser: Stabiliser) -> None:
        loss = self.model(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss + stabiliser.penalty()
        loss.backward()
        self.optimizer.step()
        stabiliser.step()
        self.optimizer.zero_grad()

    def extra_of(self, make: Callable[[], Stabiliser]) -> Callable[[], float]:
        """A stabiliser that acts on the weights only: its own calls, in the order of a step."""
        stabiliser = make()

        def run() -> None:
            penalty = stabiliser.penalty()
            if penalty.requires_grad:
                penalty.backward()
            stabiliser.step()

        def measure() -> float:
            # Gradients exist when a loss is added to: without them the penalty would pay for their memory.
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            taken = timed(run)
            self.optimizer.zero_grad()
            return taken

        return measure

    def reparametrised(self, make: Callable[[], SigmaReparam | SpectralNorm]) -> Callable[[], float]:
        """A parametrisation: computing every weight, and handing its gradient on to what it was computed from."""

        def measure() -> float:
            stabiliser = make()
            places = stabiliser.places
            arriving = [torch.randn_like(getattr(module, name)) for module, name in places]
            leaves = [leaf for module, _ in places for leaf in module.parametrizations.parameters()]
            taken = timed(lambda: torch.autograd.grad([getattr(m, name) for m, name in places], leaves, arriving))
            stabiliser.detach()
            return taken

        return measure

    def whole_step(self, make: Callable[[], Stabiliser]) -> Callable[[], float]:
        """A step of this model with it, minus one without: of all layers, if this model has one."""

        def measure() -> float:
            bare = timed(lambda: self.step(Stabiliser()))
            stabiliser = make()
            taken = timed(lambda: self.step(stabiliser))
            stabiliser.detach()
            return (taken - bare) * LAYERS

        return measure


def on_weights(trainer: Trainer) -> Measures:
    model, optimizer = trainer.model, trainer.optimizer
    return {
        "LocAteR, decoupled": trainer.extra_of(lambda: LocAteR(model, strength=1e-6, optimizer=optimizer)),
        "LocAteR, in the loss": trainer.extra_of(lambda: LocAteR(model, strength=1e-6)),
        "LocAteR, decoupled, trace projected": trainer.extra_of(
            lambda: LocAteR(model, strength=1e-6, mean=Projected(), optimizer=optimizer)
        ),
        "LocAteR, in the loss, trace penalised": trainer.extra_of(
            lambda: LocAteR(model, strength=1e-6, mean=Penalised(1e-6, Constant(1.0)))
        ),
        "σReparam, all linear layers": trainer.reparametrised(lambda: SigmaReparam(model)),
        "spectral norm on queries and keys": trainer.reparametrised(lambda: SpectralNorm(model)),
        "weight decay on queries and keys": trainer.extra_of(lambda: QKDecay(model, decay=1e-6, optimizer=optimizer)),
    }


def in_the_forward_pass() -> Measures:
    trainer = Trainer(layers=1, words=64)
    trainer.step(Stabiliser())
    model = trainer.model
    return {
        "QK-norm, RMS": trainer.whole_step(lambda: QKNorm(model)),
        "QK-norm, L2": trainer.whole_step(lambda: QKNorm(model, kind=L2(LENGTH))),
        "QK-Clip": trainer.whole_step(lambda: QKClip(model, threshold=100.0)),
        "logit soft-cap": trainer.whole_step(lambda: SoftCap(model, cap=50.0)),
        "attention z-loss": trainer.whole_step(lambda: ZLoss(model, weight=1e-6)),
        "entropy": trainer.whole_step(lambda: EntropyBonus(model, weight=1e-6)),
    }


def of_a_small_model(rounds: int) -> dict[str, tuple[float, float, float]]:
    """LocAteR's shares of a step where Python weighs most, steps and measures in turn."""
    trainer, none = Trainer(**SMALL), Stabiliser()
    weights = {name: measure for name, measure in on_weights(trainer).items() if name in OURS}
    trainer.step(none)
    bare, taken = [], {name: [] for name in weights}
    for _ in range(20 * rounds):
        bare.append(timed(lambda: trainer.step(none)))
        for name, measure in weights.items():
            taken[name].append(measure())
    return {f"{name}, 4 layers of width 128": interval(values, bare) for name, values in taken.items()}


def graph_numbers(model: torch.nn.Module) -> int:
    """Numbers that the graph of the penalty keeps beside the parameters."""
    parameters, kept = {parameter.data_ptr() for parameter in model.parameters()}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        LocAteR(model, strength=1e-6).penalty()
    return sum(tensor.numel() for tensor in kept if tensor.data_ptr() not in parameters)


def interval(taken: list[float], bare: list[float]) -> tuple[float, float, float]:
    """The median of one over the median of the other, and where 95 % of resampled ones lie."""
    draw = random.Random(0)
    medians = [
        statistics.median(draw.choices(taken, k=len(taken))) / statistics.median(draw.choices(bare, k=len(bare)))
        for _ in range(2000)
    ]
    low, *_, high = statistics.quantiles(medians, n=40)
    return statistics.median(taken) / statistics.median(bare), low, high


def main(*, rounds: int, threads: int, quick: bool) -> int:
    torch.set_num_threads(threads)
    trainer = Trainer()
    weights, forward = on_weights(trainer), {} if quick else in_the_forward_pass()
    none = Stabiliser()
    trainer.step(none)  # the optimiser makes its state
    bare: list[float] = []
    taken: dict[str, list[float]] = {name: [] for name in (*weights, *forward)}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        bare.append(timed(lambda: trainer.step(none)))
        for name, measure in weights.items():
            taken[name] += [measure() for _ in range(5)]
        for name, measure in forward.items():
            taken[name] += [measure() for _ in range(2)]
    print(f"bare step: {statistics.median(bare):.2f} s (median of {rounds}; {min(bare):.2f} to {max(bare):.2f})")
    shares = {name: interval(values, bare) for name, values in taken.items()}
    for name, (share, low, high) in shares.items():
        print(f"{name:40s} {statistics.median(taken[name]) * 1e3:9.1f} ms  {share:7.2%}  [{low:.2%}, {high:.2%}]")
    small = of_a_small_model(rounds)
    for name, (share, low, high) in small.items():
        print(f"{name:53s} {share:7.2%}  [{low:.2%}, {high:.2%}]")
    found = {name: share for name, (share, _, _) in (shares | small).items()}
    return report(found, list(small), graph_numbers(trainer.model))


def report(shares: dict[str, float], small: list[str], numbers: int) -> int:
    """The stated bounds, each with its verdict."""
    matrices = numbers / (3 * 64 * 64 * LAYERS * 12)
    rival = shares["σReparam, all linear layers"]
    checks = {f"{name} at most {MOST:.1%} of a step": shares[name] <= MOST for name in OURS}
    checks |= {f"{name} at most {MOST_OF_SMALL:.0%} of a step": shares[name] <= MOST_OF_SMALL for name in small}
    checks |= {f"{name} no more than σReparam": shares[name] <= rival for name in OURS}
    checks[f"the graph keeps {3 * matrices:.2f} d_h×d_h matrices per head, at most 3"] = matrices <= 1.001
    for name, good in checks.items():
        print(f"{'PASS' if good else 'FAIL'}  {name}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    sys.exit(main(**vars(parser.parse_args())))
