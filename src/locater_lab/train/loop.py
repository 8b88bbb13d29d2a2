"""The loop itself. Data, learning rate and random numbers are functions of the step: a state is weights and moments."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import torch
from torch import Tensor, nn

from locater.errors import Refusal, missing, refusal
from locater.models.live.tensors import unwrap
from locater.projections import whole
from locater.records import Json, State

from ..data.sources import Data
from .config import Config
from .loader import model_settings
from .metrics import Metrics, rows_of_run
from .observe import finite, plain_copy, validate
from .parts import attach, learning_rate, lower_strength, make_model, make_optimizer, make_stabiliser
from .processes import Processes, describe_software, distribute, unsynchronised, uses_bf16
from .store import Store, optimiser_state, tensors_of
from .watch import TrainingWatch, diagnose

CHECKPOINTS = "checkpoints"
Tell = Callable[[int, float, float], None]  # step, loss, tokens per second
Validated = Callable[[Json], None]  # loss and the rest of a validation


class Diverged(Refusal):
    """The loss or its gradient is not finite."""


class Trainer:
    """A run in a folder, at the step of its last checkpoint; `advance` moves it on."""

    def __init__(
        self,
        config: Config,
        data: Data,
        folder: Path,
        processes: Processes,
        *,
        before: Config | None = None,
        verified: bool = True,
    ) -> None:
        self.config, self.data, self.processes, self.folder = config, data, processes, folder
        loop = config.loop
        self.share = processes.share(loop.batch, loop.accumulate)
        self.num_steps = math.ceil(loop.epochs * data.batches.num_training / loop.batch) or loop.steps
        model = make_model(config, data).to(processes.device)
        attached = attach(model, config.stabiliser)
        self.model = distribute(model, processes=processes, sharded=loop.parallel == "fsdp")
        self.module: nn.Module = unwrap(self.model)
        self.optimizer = make_optimizer(self.module, config.optimiser)
        self.stabiliser = attached or make_stabiliser(self.module, config.stabiliser, self.optimizer)
        settings = model_settings(model, config.stabiliser)
        known = (before or config).checksum
        self.store = Store(folder / CHECKPOINTS, processes, settings, config=known, verified=verified)
        self.step, self.best, self.best_step, self.loss_sum, self.loss_count = 0, math.inf, 0, 0.0, 0.0
        self.say: Callable[[str], None] = print
        self.watch = TrainingWatch(self)
        kept = self._restore()
        if loop.compile:
            self.module.compile()
        shown = dict(tensorboard=loop.tensorboard, is_first=processes.is_first)
        self.metrics = Metrics(folder, step=self.step, kept=kept, **shown)
        self.since = time.perf_counter(), self.step

    def advance(
        self,
        until: int,
        *,
        tell: Tell = lambda *_: None,
        validated: Validated = lambda row: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Train to that step, or until patience ends; whether it was not asked to stop. Saves where it ends."""
        loop = self.config.loop
        until = min(until, self.num_steps)
        if not self.store.names():
            self.save()  # so that there is always a good state
        self.watch.begin()
        while self.step < until and not self.is_done:
            self._advance()
            at_end, stopping = self.step == self.num_steps, self.processes.any(stop() or self.watch.should_stop)
            if self.step % loop.log_every == 0 or at_end:
                self._log(tell)
            improved = self._validate(validated) if self.step % loop.validate_every == 0 or at_end else False
            if improved or stopping or self.is_done or self.step == until or self.step % loop.save_every == 0:
                self.save(best=improved)
            if stopping:
                return False
        return True

    def _advance(self) -> None:
        """Make one step; skip a diverged step and roll back if possible."""
        try:
            self._train()
        except Diverged as reason:
            if not self.watch.rescue(str(reason)):
                raise
        else:
            self.watch.step()

    @property
    def is_done(self) -> bool:
        """At the last step, or at one where no validation has improved for as long as patience allows."""
        loop = self.config.loop
        validated = self.step - self.step % loop.validate_every
        return self.step >= self.num_steps or 0 < loop.patience <= validated - self.best_step

    def save(self, *, best: bool = False, keep: str = "", midway: bool = False) -> None:
        """A checkpoint of this step; an interrupted interval of metrics is part of it. `midway`: rows of it follow."""
        loss_sum, loss_count = self._sums()
        small = {
            "step": self.step,
            "best": self.best if math.isfinite(self.best) else None,
            "best_step": self.best_step,
            "loss_sum": loss_sum,
            "loss_count": loss_count,
            "data": self.data.identity,
            "made_by": describe_software(self.processes.device),
            "metrics": self.metrics.state() | {"midway": midway},
            "watch": self.watch.state(),
        }
        self.store.save(self._state(), small, keep=["best"] * best + [keep] * bool(keep))

    def reload(self, which: str) -> int:
        """Weights and moments of another checkpoint, whose step is given; nothing else goes back."""
        state = self._state()
        self.store.load(state, which=which)
        self.stabiliser.load_state_dict(state["stabiliser"])
        return self.store.small(which)["step"]

    def note(self, row: Json) -> None:
        """Add a line to the metrics."""
        self.metrics.add(row)

    def _state(self) -> State:
        tensors = tensors_of(self.module)
        moments = optimiser_state(self.optimizer, dict(self.module.named_parameters()))
        return {"model": tensors, "optimiser": moments, "stabiliser": self.stabiliser.state_dict()}

    def _restore(self) -> Json:
        """From the last checkpoint, if there is one; a run that was killed before starts again from its seed.

        Gives what the checkpoint knows of the metrics up to it; nothing where it is not to be verified.
        """
        if not self.store.names():
            if rows_of_run(self.folder):
                remedy = "restore them, or start a new run with --out"
                raise missing(f"the checkpoints of this run in {self.store.folder}", remedy)
            return {}
        self.store.verify()
        small = self.store.small()
        if small["data"] != self.data.identity:
            raise refusal("the data that this run began with", "other data", "restore it, or start a new run")
        now, before = describe_software(self.processes.device), small.get("made_by")
        if self.store.verified and now != before:
            remedy = "install that, or go on with other roundings by --set verified=no"
            raise refusal(f"{before}, which this run was made by", now, remedy)
        state = self._state()
        self.store.load(state)
        self.stabiliser.load_state_dict(state["stabiliser"])
        self.step, self.best = small["step"], math.inf if small["best"] is None else small["best"]
        self.best_step = small.get("best_step", self.step)  # runs of before patience do not have it
        self.loss_sum, self.loss_count = small["loss_sum"], small["loss_count"]
        self.watch.restore(small.get("watch", {}))
        return small.get("metrics", {}) if self.store.verified else {}

    def _train(self) -> None:
        """One step of the optimiser, then of the stabiliser."""
        torch.manual_seed(_mixed(self.config.loop.seed, self.step, self.processes.rank))
        rate = self.watch.rate * learning_rate(self.step, self.config.optimiser, num_steps=self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        lower_strength(self.stabiliser, self.config.stabiliser, self.step)
        self.model.train()
        loss = self._backward()
        norm = self._clip()
        if not (math.isfinite(norm) and (self.processes.count > 1 or math.isfinite(loss))):
            raise self._diverged(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.stabiliser.step()
        self.step += 1
        self.loss_sum, self.loss_count, self.norm = self.loss_sum + loss, self.loss_count + 1, norm

    def _backward(self) -> float:
        """Gradients of this process's share, part by part; a penalty on weights goes with the last."""
        parts, total = self.config.loop.accumulate, 0.0
        for part in range(parts):
            last = part == parts - 1
            with unsynchronised(self.model, last=last):
                with self._precision():
                    loss = self.model(*self._batch(part))
                objective = loss / parts
                if self.stabiliser.of_passes:
                    objective = objective + self.stabiliser.penalty() / parts
                elif last:
                    objective = objective + self.stabiliser.penalty()
                objective.backward()
            total += float(loss.detach()) / parts
        return total

    def _batch(self, part: int) -> tuple[Tensor, ...]:
        loop, rank = self.config.loop, self.processes.rank
        first = self.step * loop.batch + (rank * loop.accumulate + part) * self.share
        return tuple(one.to(self.processes.device) for one in self.data.batches.training(first, self.share))

    def _precision(self) -> torch.autocast:
        device = self.processes.device
        return torch.autocast(device.type, torch.bfloat16, enabled=uses_bf16(self.config.loop.precision, device))

    def _clip(self) -> float:
        """The length of the whole gradient, cut to what the config allows."""
        parameters = [parameter for parameter in self.module.parameters() if parameter.grad is not None]
        longest = self.config.optimiser.clip or math.inf
        return float(whole(nn.utils.clip_grad_norm_(parameters, longest)))

    def _diverged(self, loss: float, *, held_out: bool = False) -> Diverged:
        """Keep the current state, from before any step, if it still gives a finite loss."""
        self.optimizer.zero_grad(set_to_none=True)
        place = self._place(held_out)
        if math.isfinite(loss) and self.processes.count == 1 and self.step:
            self.save()
        where = f"the last good state is {self.store.folder / self.store.names()['last']}"
        on = "loss on held-out text" if held_out else "loss"
        said = f"{on} became" if not math.isfinite(loss) else "gradient of the loss is not finite at loss"
        return Diverged(
            f"the {said} {loss:.4g} in step {self.step}: {place}; {where}; lower learning_rate or raise strength"
        )

    def _place(self, held_out: bool) -> str:
        """Name the broken place, by the first process, which looks at all processes' texts while they wait."""
        plain = plain_copy(self.model, self.processes, self.config.stabiliser)
        found = "the first process says where"
        if plain is not None:
            device = next(plain.parameters()).device
            found = next(filter(None, (diagnose(plain, texts.to(device)) for texts in self._texts(held_out))), None)
        self.processes.wait()
        return found or "all outputs of the model are finite"

    def _texts(self, held_out: bool) -> Iterator[Tensor]:
        """Yield the texts of this step, or all held-out ones, some at a time."""
        batches, batch = self.data.batches, self.config.loop.batch
        first, count = (0, batches.num_validation) if held_out else (self.step * batch, batch)
        read = batches.validation if held_out else batches.training
        for start in range(first, first + count, self.share):
            yield read(start, min(self.share, first + count - start))[0]

    def _sums(self) -> tuple[float, float]:
        """The losses since the last line of metrics, and how many they are: means over processes, of any number."""
        own = torch.tensor([self.loss_sum, self.loss_count], dtype=torch.float64, device=self.processes.device)
        total, count = (self.processes.sum(own) / self.processes.count).tolist()
        return total, count

    def _log(self, tell: Tell) -> None:
        total, count = self._sums()
        loss = total / count
        now, (then, step) = time.perf_counter(), self.since
        tokens = self.config.loop.batch * self.data.batches.tokens_per_sample
        speed = (self.step - step) * tokens / max(now - then, 1e-9)
        rate = self.optimizer.param_groups[0]["lr"]
        row = {"kind": "train", "step": self.step, "loss": loss, "learning_rate": rate, "gradient_norm": self.norm}
        self.metrics.add(row | {"tokens": self.step * tokens, "tokens_per_second": speed})
        self.loss_sum, self.loss_count, self.since = 0.0, 0, (now, self.step)
        tell(self.step, loss, speed)

    def _validate(self, validated: Validated) -> bool:
        """Record a validation; true if it is the best so far."""
        start = time.perf_counter()
        with self._precision():
            row = validate(self.model, self.config, self.data, self.processes, self.share)
        if not math.isfinite(row["loss"]):
            raise self._diverged(row["loss"], held_out=True)
        self.metrics.add(*finite([{"kind": "validation", "step": self.step} | row | self.stabiliser.metrics()]))
        validated(row)
        # Validation is not training time.
        self.since = self.since[0] + time.perf_counter() - start, self.since[1]
        improved = row["loss"] < self.best
        if improved:
            self.best, self.best_step = row["loss"], self.step
        return improved


def _mixed(*numbers: int) -> int:
    """One seed that depends on all of them."""
    return int(numpy.random.SeedSequence(numbers).generate_state(1)[0])
