"""What each stabiliser adds to a training step of a GPT-2-small-shaped model at 8 × 512 tokens, as a share of the step.

CPU time on one core, or wall time with --threads 2 on a machine that does nothing else. Every round times the bare
step and then each stabiliser. What acts on weights is timed alone, as a difference of two long steps would drown it;
what changes the forward pass, as a whole step minus the bare one (not with --quick). Exits 1 if a bound is missed.
"""

import argparse
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
    SpectralNorm,
    Stabiliser,
    ZLoss,
)

BATCH, LENGTH, MOST = 8, 512, 0.005
Measures = dict[str, Callable[[], float]]


def timed(function: Callable[[], object]) -> float:
    # One core's own time leaves out whatever else the machine does; several cores wait for each other in it.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    function()
    return clock() - start


class Trainer:
    """A model, its optimiser and one batch; `step` is the loop that everybody has."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = GPT2LMHeadModel(GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
        self.tokens = torch.randint(0, 50257, (BATCH, LENGTH))
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
        def measure() -> float:
            stabiliser = make()
            taken = timed(lambda: self.step(stabiliser))
            stabiliser.detach()
            return taken

        return measure


def contenders(
    trainer: Trainer, *, quick: bool
) -> tuple[dict[str, Callable[[], float]], dict[str, Callable[[], float]]]:
    model, optimizer = trainer.model, trainer.optimizer
    hold = Projected()
    alone = {
        "LocAteR, decoupled": trainer.extra_of(lambda: LocAteR(model, strength=1e-6, optimizer=optimizer)),
        "LocAteR, in the loss": trainer.extra_of(lambda: LocAteR(model, strength=1e-6)),
        "LocAteR, decoupled, trace projected": trainer.extra_of(
            lambda: LocAteR(model, strength=1e-6, mean=hold, optimizer=optimizer)
        ),
        "LocAteR, in the loss, trace penalised": trainer.extra_of(
            lambda: LocAteR(model, strength=1e-6, mean=Penalised(1e-6, Constant(1.0)))
        ),
        "σReparam, all linear layers": trainer.reparametrised(lambda: SigmaReparam(model)),
        "spectral norm on queries and keys": trainer.reparametrised(lambda: SpectralNorm(model)),
        "weight decay on queries and keys": trainer.extra_of(lambda: QKDecay(model, decay=1e-6, optimizer=optimizer)),
    }
    whole = {
        "QK-norm, RMS": trainer.whole_step(lambda: QKNorm(model)),
        "QK-norm, L2": trainer.whole_step(lambda: QKNorm(model, kind=L2(LENGTH))),
        "QK-Clip": trainer.whole_step(lambda: QKClip(model, threshold=100.0)),
        "logit soft-cap": trainer.whole_step(lambda: SoftCap(model, cap=50.0)),
        "attention z-loss": trainer.whole_step(lambda: ZLoss(model, weight=1e-6)),
        "entropy": trainer.whole_step(lambda: EntropyBonus(model, weight=1e-6)),
    }
    return alone, {} if quick else whole


def graph_numbers(model: torch.nn.Module) -> int:
    """Numbers that the graph of the penalty keeps beside the parameters."""
    parameters, kept = {parameter.data_ptr() for parameter in model.parameters()}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        LocAteR(model, strength=1e-6).penalty()
    return sum(tensor.numel() for tensor in kept if tensor.data_ptr() not in parameters)


def main(*, rounds: int, threads: int, quick: bool) -> int:
    torch.set_num_threads(threads)
    trainer = Trainer()
    alone, whole = contenders(trainer, quick=quick)
    none = Stabiliser()
    trainer.step(none)  # the optimiser makes its state
    bare: list[float] = []
    taken: dict[str, list[float]] = {name: [] for name in (*alone, *whole)}
    for number in range(rounds):
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
        bare.append(timed(lambda: trainer.step(none)))
        for name, measure in alone.items():
            taken[name] += [measure() for _ in range(3)]
        for name, measure in whole.items():
            taken[name].append(measure() - bare[-1])
    step = statistics.median(bare)
    print(f"bare step: {step:.2f} s (median of {rounds}; {min(bare):.2f} to {max(bare):.2f})")
    shares = {name: statistics.median(values) / step for name, values in taken.items()}
    for name, share in shares.items():
        print(f"{name:40s} {share * step * 1e3:9.1f} ms  {share:8.2%}")
    return report(shares, graph_numbers(trainer.model) / (3 * 64 * 64 * 144))


def report(shares: dict[str, float], matrices: float) -> int:
    """The stated bounds, each with its verdict."""
    ours, rival = list(shares)[:2], shares["σReparam, all linear layers"]
    checks = {f"{name} at most {MOST:.1%} of a step": shares[name] <= MOST for name in ours}
    checks |= {f"{name} no more than σReparam": shares[name] <= rival for name in ours}
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
