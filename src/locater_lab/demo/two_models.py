"""Two small models on one text, without and with LocAteR: trained, scanned from their files, seen attending.

One seed each: an illustration of what LocAteR does, not evidence for it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locater.attention import NEAR
from locater.attention.capture import inputs_of
from locater.errors import Refusal, refusal
from locater.models import live, read_heads
from locater.records import Json
from locater.scanning.scan import scan

from ..data.sources import Data, open_data
from ..train.config import Config, make_config
from ..train.loader import load
from ..train.metrics import read_metrics
from ..train.model import LanguageModel
from ..train.run import CONFIG, MODEL, Outcome, Say, read_run_config, resume, start

# Small enough that both models train in about a minute on two cores.
OPTIONS: Json = dict(
    data="embedded",
    tokenizer="bpe",
    bpe_size=1024,
    context=64,
    steps=400,
    batch=32,
    warmup=100,
    validate_every=50,
    validation_windows=256,
    save_every=100,
    device="cpu",
)
# Seconds instead, and nothing beyond the package itself: byte pairs would need `tokenizers`.
QUICK: Json = dict(
    tokenizer="words", context=32, steps=30, batch=8, warmup=10, validate_every=10, validation_windows=32
)
STABILISERS: dict[str, Json] = {"without": {}, "with": {"strength": 2.5e-3}}
NAMES = tuple(STABILISERS)
NUM_TEXTS = 128
NUM_WORDS = 12  # of the one example


def demo_config(name: str, *, quick: bool = False) -> Config:
    """The run of that name: the paper's model on the embedded text. Both differ in the stabiliser only."""
    return make_config("paper", **OPTIONS | (QUICK if quick else {}), **STABILISERS[name])


def check_folder(out: Path, *, quick: bool = False) -> None:
    """Refuse a folder that holds runs of another config, before any time is spent."""
    for name in NAMES:
        folder = out / name
        if (folder / CONFIG).exists() and _known(folder) != demo_config(name, quick=quick):
            expected = "a new folder, or one that this demo began to fill"
            raise refusal(expected, f"{folder}, a run of another config", "choose another --out")


def _known(folder: Path) -> Config | None:
    try:
        return read_run_config(folder)
    except Refusal:
        return None


def train_model(out: Path, name: str, *, quick: bool = False, say: Say = print) -> Outcome:
    """Train one of the two, or go on where an earlier call stopped; a finished run takes no further step."""
    check_folder(out, quick=quick)
    folder = out / name
    with _one_thread():
        if (folder / CONFIG).exists():
            return resume(folder, say=say)
        return start(demo_config(name, quick=quick), folder, say=say)


@contextmanager
def _one_thread() -> Iterator[None]:
    """On a busy machine two threads that wait for each other took ten times as long over these small steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare_models(out: Path) -> Json:
    """Compare the two finished runs in a folder, as one document."""
    config = read_run_config(out / NAMES[0])
    length = config.shape.context
    data = open_data(config.data, length=length, seed=config.loop.seed)
    texts, _ = data.batches.validation(0, min(NUM_TEXTS, data.batches.num_validation))
    example = _example(data, texts)
    even = torch.ones(length, length).tril()
    return {
        "schema": "locater.two-models/1",
        "length": length,
        "num_steps": config.loop.steps,
        "num_texts": len(texts),
        "near": NEAR,
        "even_near_mass": sum(min(NEAR, n) / n for n in range(1, length + 1)) / length,
        "words": _words(data, texts[example, -NUM_WORDS:]),
        "even_within": share_within(even / even.sum(-1, keepdim=True)).tolist(),
        "models": {name: _model(out / name, texts, example) for name in NAMES},
    }


def _model(folder: Path, texts: Int[Tensor, "batch tokens"], example: int) -> Json:
    """One run: its validations, the scan of its file, and its attention on the texts."""
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["kind"] == "validation"]
    (row,) = scan(folder / MODEL, length=texts.shape[1], details=["eigenvalues"]).heads
    maps = measure_attention(_load(folder), texts)
    mean = maps.mean(0)
    return {
        "folder": str(folder),
        "validations": [_validation(row) for row in rows],
        "scan": row.to_record(),
        "attention": mean.tolist(),
        "within": share_within(mean).tolist(),
        "on_words": maps[example, -1, -NUM_WORDS:].tolist(),
    }


def _validation(row: Json) -> dict[str, float]:
    (head,) = row["heads"]
    found = {name: row[name] for name in ("step", "perplexity", "entropy")}
    return found | {name: head[name] for name in ("near_mass", "trace", "eta")}


def _load(folder: Path) -> LanguageModel:
    model = load(folder / MODEL)
    assert isinstance(model, LanguageModel), "the config says so"
    return model


def _words(data: Data, tokens: Int[Tensor, " words"]) -> list[str]:
    """The pieces of text that the tokens stand for."""
    assert data.tokens is not None, "the config says so"
    return [data.tokens.vocabulary.text(token) for token in tokens.tolist()]


def _example(data: Data, texts: Int[Tensor, "batch tokens"]) -> int:
    """The first text whose last token begins a word, chosen by the text alone; else the first."""
    lasts = _words(data, texts[:, -1])
    return next((number for number, word in enumerate(lasts) if word[:1] == " " and word[1:].isalpha()), 0)


@torch.no_grad()
def measure_attention(model: LanguageModel, texts: Int[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens tokens"]:
    """The weights that the model's one head really gives: its causal softmax, materialised, query by key."""
    (site,) = live.open_live(model).sites
    with inputs_of(dict(model.named_modules()), [site.query_name]) as seen:
        model.hidden(texts)
    (head,) = read_heads(site).heads
    return head.attention(seen[0], seen[0])


def share_within(weights: Float[Tensor, "tokens tokens"]) -> Float[Tensor, " tokens"]:
    """The share of attention on the last 1, 2, … tokens, itself included.

    The mean over the queries of the second half, which have a past to choose from.
    """
    length = len(weights)
    steps_back = torch.arange(length)[:, None] - torch.arange(length)
    by_distance = torch.stack([(weights * (steps_back == n)).sum(-1) for n in range(length)], -1)
    return by_distance[length // 2 :].mean(0).cumsum(0)
