"""How fast training is: `python bench/training.py`; exits 1 if a bound is missed.

Against a bare PyTorch loop of the same model, and against the Hugging Face Trainer with a GPT-2 of the same shape, in
turn and in one process. `--data DIR` names WikiText-2; without it words are drawn at random, which costs the same.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import torch
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, TrainerCallback, TrainingArguments
from transformers import Trainer as HuggingFaceTrainer

from locater_lab.data.batches import WindowBatches
from locater_lab.data.sources import Data, TokenData, open_data
from locater_lab.data.vocabulary import Words
from locater_lab.fields import DataOptions
from locater_lab.train.config import Config, make_config
from locater_lab.train.loop import Trainer
from locater_lab.train.model import LanguageModel
from locater_lab.train.processes import Processes

ALONE = Processes(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class Case:
    """One shape to train; `steps` is how many each contestant takes in a turn."""

    name: str
    words: int
    steps: int
    options: dict

    def config(self) -> Config:
        quiet = dict(validate_every=10**9, save_every=10**9, steps=10**6, log_every=10)
        return make_config("paper", **quiet, **self.options)


GPT = dict(num_layers=4, num_heads=4, d_feedforward=512, norm_first=True, positions="learned", activation="gelu-tanh")
CASES = {
    "words": Case("33k words, the paper's model", 33_278, 2, dict(batch=8)),
    "small": Case("4k tokens, 4 layers", 4096, 6, dict(**GPT, scaled_embedding=False, batch=8)),
}


def random_data(case: Case, length: int) -> Data:
    random = numpy.random.default_rng(0)
    train, valid = (random.zipf(1.3, size).clip(max=case.words) - 1 for size in (400_000, 10_000))
    words = Words(tuple(map(str, range(case.words))))
    tokens = TokenData("random", words, train.astype(numpy.uint32), valid.astype(numpy.uint32))
    return Data(DataOptions(), WindowBatches(tokens.train, tokens.valid, length, 0), tokens)


Turn = Callable[[], float]  # takes its steps, and gives the seconds of the processor that they took


def timed(run: Callable[[], object]) -> Turn:
    def turn() -> float:
        start = time.process_time()
        run()
        return time.process_time() - start

    return turn


def ours(case: Case, data: Data, folder: Path) -> Turn:
    trainer = Trainer(case.config(), data, folder, ALONE)
    trainer.save = lambda **_: None  # type: ignore  # the end of a turn is not the end of the run
    return timed(lambda: trainer.advance(trainer.step + case.steps))


def plain_loss(model: LanguageModel, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def own_loss(model: LanguageModel, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return model(tokens, targets)


def bare(case: Case, data: Data, loss_of: Callable[..., torch.Tensor]) -> Turn:
    """What a user would write: forward, loss, backward, clip, step."""
    config = case.config()
    model = LanguageModel(replace(config.shape, vocab_size=case.words))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    position = 0

    def run() -> None:
        nonlocal position
        for _ in range(case.steps):
            loss = loss_of(model, *data.batches.training(position, config.loop.batch))
            position += config.loop.batch
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return timed(run)


class Clock(TrainerCallback):
    """From the first step's start to the last one's end: setting up is not training."""

    def on_step_begin(self, args, state, control, **kwargs):
        self.start = time.process_time() if state.global_step == 0 else self.start

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds = time.process_time() - self.start


def hugging_face(case: Case, data: Data, folder: Path) -> Turn:
    shape = case.config().shape
    sizes = dict(n_embd=shape.d_model, n_layer=shape.num_layers, n_head=shape.num_heads, n_inner=shape.d_feedforward)
    sizes |= dict(n_positions=shape.context, vocab_size=case.words, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    batch = case.config().loop.batch
    tokens, _ = data.batches.training(0, 64 * batch)
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    clock = Clock()
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        max_steps=case.steps,
        learning_rate=1e-4,
        save_strategy="no",
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = HuggingFaceTrainer(model, arguments, train_dataset=rows, callbacks=[clock])  # type: ignore
    trainer.remove_callback(PrinterCallback)

    def turn() -> float:
        trainer.train()
        return clock.seconds

    return turn


def measure(turns: dict[str, Turn], *, tokens: int, rounds: int) -> dict[str, float]:
    """How many times as fast as each rival ours is: the median of rounds, in each of which all take their turn."""
    for turn in turns.values():
        turn()  # the first pays for allocations
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(rounds):
        order = list(turns) if number % 2 else list(turns)[::-1]
        for name in order:
            seconds[name].append(turns[name]())
    for name, taken in seconds.items():
        print(f"  {name}: {tokens / statistics.median(taken):,.0f} tokens per second of the processor")
    own = seconds.pop("locater")
    return {
        name: statistics.median(theirs / mine for theirs, mine in zip(taken, own, strict=True))
        for name, taken in seconds.items()
    }


def compare(name: str, data_folder: str | None, rounds: int) -> bool:
    case, length = CASES[name], CASES[name].config().shape.context
    print(f"{case.name}:")
    is_words = name == "words" and data_folder
    data = (
        open_data(DataOptions(str(data_folder), "words"), length=length, seed=0)
        if is_words
        else random_data(case, length)
    )
    with tempfile.TemporaryDirectory() as folder:
        turns = {
            "locater": ours(case, data, Path(folder) / "run"),
            "bare loop": bare(case, data, plain_loss),
            "bare loop with our loss": bare(case, data, own_loss),
            "Hugging Face Trainer": hugging_face(case, data, Path(folder) / "hf"),
        }
        tokens = case.steps * case.config().loop.batch * length
        ratios = measure(turns, tokens=tokens, rounds=rounds)
    bounds = {"bare loop": 0.97, "bare loop with our loss": 0.97, "Hugging Face Trainer": 1.0}
    return all([verdict(rival, ratio, bounds[rival]) for rival, ratio in ratios.items()])


def verdict(rival: str, ratio: float, bound: float) -> bool:
    print(f"{'PASS' if ratio >= bound else 'FAIL'}  times as fast as the {rival}: {ratio:.3f} (at least {bound:g})")
    return ratio >= bound


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", help="a folder with WikiText-2: train.txt and valid.txt")
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    results = [compare(name, chosen.data, chosen.rounds) for name in CASES]
    sys.exit(0 if all(results) else 1)
