"""Loss and perplexity on held-out texts, and what the heads do there."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from locater.models.live.tensors import unwrap
from locater.projections import whole
from locater.records import Json

from ..data.sources import Data
from .config import Config, StabiliserOptions
from .model import LanguageModel, WalkModel
from .observe import attention, finite, propagation, spectra
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
        observed, layers = attention(plain, tokens.to(next(plain.parameters()).device))
        heads = spectra(plain, length=config.shape.context)
        row["heads"] = finite([{**head, **seen} for head, seen in zip(heads, observed, strict=True)])
        row["entropy"] = sum(head["normalised_entropy"] for head in observed) / len(observed)
        row["layers"] = layers
    elif isinstance(plain, WalkModel):
        row["heads"] = finite(spectra(plain, length=config.shape.context))
        row["propagation"] = propagation(plain, data.batches)
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
    copy = LanguageModel(module.config) if isinstance(module, LanguageModel) else WalkModel(module.config)  # type: ignore
    attach(copy, stabiliser)
    missing, unexpected = copy.load_state_dict(gathered, strict=False)
    assert set(missing) <= {"output.weight"} and not unexpected, "only a tied weight has no name of its own"
    return copy.train(module.training)
