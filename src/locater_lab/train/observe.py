"""Observations of a validation besides the loss: each head's spectrum and attention, and the similarity of tokens."""

import math

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from locater.attention import Statistics, mean_over_queries, rank
from locater.attention.call_statistics import statistics_of_call
from locater.attention.calls import AttentionCall
from locater.attention.capture import inputs_of
from locater.attention.interception import Interception
from locater.models import live
from locater.models.live.tensors import unwrap
from locater.projections import whole
from locater.records import Json
from locater.scanning.scan import scan

from ..data.sources import Data
from .config import Config, StabiliserOptions
from .model import LanguageModel
from .parts import attach
from .processes import Processes, reshard
from .store import tensors_of

# What heads are looked at on: small beside the validation itself.
TOKENS_OBSERVED = 8192


@torch.no_grad()
def validate(model: nn.Module, config: Config, data: Data, processes: Processes, at_once: int) -> Json:
    """The row of one validation, the same on every process; heads and layers are looked at by the first only.

    Where the loss is not finite, the row holds nothing else.
    """
    was_training = model.training
    model.eval()
    loss = _loss(model, config, data, processes, at_once)
    row: Json = {"loss": loss}
    if not math.isfinite(loss):
        return row
    plain = plain_copy(model, processes, config.stabiliser)
    if isinstance(plain, LanguageModel):
        row["perplexity"] = math.exp(min(loss, 700.0))
        texts = max(1, TOKENS_OBSERVED // config.shape.context)
        tokens, _ = data.batches.validation(0, min(texts, data.batches.num_validation))
        observed, layers = observe_attention(plain, tokens.to(next(plain.parameters()).device))
        heads = spectra(plain, length=config.shape.context)
        row["heads"] = finite([{**head, **seen} for head, seen in zip(heads, observed, strict=True)])
        row["entropy"] = sum(head["normalised_entropy"] for head in observed) / len(observed)
        row["layers"] = layers
    model.train(was_training)
    return row


def _loss(model: nn.Module, config: Config, data: Data, processes: Processes, at_once: int) -> float:
    """The mean over texts; processes take blocks in turn, and as many each, since sharded models run in step."""
    available, wanted = data.batches.num_validation, config.loop.validation_windows
    count = min(wanted, available) if wanted else available
    starts = list(range(0, count, at_once))
    sums = torch.zeros(2, dtype=torch.float64, device=processes.device)
    for turn in range(0, len(starts), processes.count):
        number = turn + processes.rank
        first = starts[number] if number < len(starts) else 0
        size = min(at_once, count - first)
        batch = (one.to(processes.device) for one in data.batches.validation(first, size))
        loss = model(*batch)
        if number < len(starts):
            sums += torch.stack([loss.double() * size, torch.tensor(float(size), device=sums.device)])
    reshard(model)
    total: Tensor = processes.sum(sums)
    return float(total[0] / total[1])


def plain_copy(model: nn.Module, processes: Processes, stabiliser: StabiliserOptions) -> nn.Module | None:
    """The model outside of DDP; gathered from its shards on the first process, and None on the others."""
    module = unwrap(model)
    if not isinstance(module, FSDPModule):
        return module if processes.is_first else None
    gathered = {name: whole(tensor.detach()).cpu() for name, tensor in tensors_of(module).items()}
    if not processes.is_first:
        return None
    # FSDP has put a class of its own in front of ours.
    copy = LanguageModel(module.config)  # type: ignore
    attach(copy, stabiliser)
    missing, unexpected = copy.load_state_dict(gathered, strict=False)
    assert set(missing) <= {"output.weight"} and not unexpected, "only a tied weight has no name of its own"
    return copy.train(module.training)


SPECTRUM = (
    "trace",
    "trace_of_square",
    "frobenius_squared",
    "mean",
    "variance",
    "spread",
    "xi",
    "eta",
    "localisation",
    "regime",
    "temperature",
)


@torch.no_grad()
def spectra(model: nn.Module, *, length: int) -> list[Json]:
    """A row per head, from the weights; gains of norms folded in, as a scan does."""
    rows = scan(model, length=length, details=["eigenvalues"]).heads
    return [{"layer": row.layer, "head": row.head} | {name: getattr(row, name) for name in SPECTRUM} for row in rows]


def directions(model: LanguageModel) -> float:
    """(Σσ²)²/Σσ⁴ of W's singular values, which counts them; the mean over heads."""
    counts = []
    for layer in model.layers:
        attention = layer.attention
        assert isinstance(attention, torch.nn.Module)
        query, key = (getattr(attention, name).weight.detach().double() for name in ("query", "key"))
        d_head = getattr(attention, "d_head", len(query))
        group = len(query) // len(key)
        for head, rows in enumerate(query.split(d_head)):
            start = head // group * d_head
            squares = torch.linalg.svdvals(key[start : start + d_head].mT @ rows).square()
            counts.append(float(squares.sum().square() / squares.square().sum()))
    return sum(counts) / len(counts)


@torch.no_grad()
def observe_attention(model: LanguageModel, tokens: Int[Tensor, "batch tokens"]) -> tuple[list[dict], list[dict]]:
    """Rows per head (entropy, sink, near mass, …) and per layer (measures of rank), on some texts.

    Heads as the kernel sees them, behind every stabiliser. The rank rows are of each layer's input, and one more of
    what the output layer sees.
    """
    sites, calls = live.open_live(model).sites, []
    was_training = model.training
    model.eval()
    names = [site.query_name for site in sites]
    with inputs_of(dict(model.named_modules()), names) as seen, Interception(lambda call: _note(call, calls)):
        last = model.hidden(tokens)
    model.train(was_training)
    heads: list[dict] = []
    for statistics in calls:
        means = {name: mean_over_queries(values).value.tolist() for name, values in statistics.numbers()}
        heads += [{name: values[head] for name, values in means.items()} for head in range(model.config.num_heads)]
    layers = []
    for number, x in enumerate([*seen, last]):
        found = {name: float(values.mean()) for name, values in vars(rank(x)).items()}
        layers.append({"layer": number} | {name: value for name, value in found.items() if math.isfinite(value)})
    return heads, layers


def _note(call: AttentionCall, calls: list[Statistics]) -> None:
    """Record one layer's attention; does not change the call."""
    calls.append(statistics_of_call(call))


def finite(rows: list[Json]) -> list[Json]:
    """Without numbers that JSON cannot hold."""
    return [
        {name: value for name, value in row.items() if not isinstance(value, float) or math.isfinite(value)}
        for row in rows
    ]
