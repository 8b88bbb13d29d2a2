"""The theory of depth while a model trains: `python runs/alignment.py` writes runs/studies/alignment.json.

At some steps of a small run every head's entropy on held-out texts is measured, and predicted from the kernel of the
layer's inputs and the head's τ, δ and σ alone, as if W were not aligned with them. Two minutes of one core.
"""

from pathlib import Path
from typing import Any

import torch

from locater.records import Json, write_json
from locater.spectra import moments
from locater.theory.depth import layer_of_moments, propagate, token_kernel
from locater_lab.studies.small import Ran, tiny, train_small

STEPS = (0, 10, 30, 100, 300, 1000, 3000)
SEEDS = (0, 1, 2)
TEXTS, DRAWS = 32, 4
ROWS = Path(__file__).parent / "studies" / "alignment.json"


@torch.no_grad()
def rows_of(ran: Ran, seed: int, step: int) -> list[Json]:
    """One row per head: what was measured and what the kernel gives."""
    attentions: list[Any] = [layer.attention for layer in ran.model.layers]
    inputs: list[torch.Tensor] = []
    handles = [one.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for one in attentions]
    ran.model(ran.data.batches.validation(0, TEXTS)[0])
    for handle in handles:
        handle.remove()
    found = []
    for number, (attention, x) in enumerate(zip(attentions, inputs, strict=True)):
        for head in range(attention.query.out_features // attention.d_head):
            place = {"seed": seed, "step": step, "layer": number, "head": head}
            found.append(place | both_entropies(attention, x.double(), head, seed))
    return found


def both_entropies(attention: Any, x: torch.Tensor, head: int, seed: int) -> Json:
    """Measured with all that the head has, and by the theory from its moments and the kernel of its inputs."""
    rows = slice(head * attention.d_head, (head + 1) * attention.d_head)
    query, key = attention.query.weight[rows].double(), attention.key.weight[rows].double()
    layer = layer_of_moments(moments(query, key))
    theory = propagate(token_kernel(x), [layer], num_draws=DRAWS, generator=torch.Generator().manual_seed(seed))
    queries, keys = x @ query.T + attention.query.bias[rows], x @ key.T + attention.key.bias[rows]
    measured = entropy(queries @ keys.mT / attention.d_head**0.5)
    return {**layer._asdict(), "entropy": measured, "theory": float(theory.entropy.mean)}


def entropy(logits: torch.Tensor) -> float:
    """The mean over queries with at least two keys, each over the logarithm of its number of keys."""
    length = logits.shape[-1]
    p = logits.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    counts = torch.arange(2, length + 1).double().log()
    return float((torch.special.entr(p).sum(-1)[:, 1:] / counts).mean())


def measure(seed: int) -> list[Json]:
    config = tiny(seed, num_layers=2, steps=max(STEPS))
    fresh = train_small(config, until=0)
    found = rows_of(fresh, seed, 0)

    def each(step: int, loss: float, model: torch.nn.Module) -> None:
        if step + 1 in STEPS:
            model.eval()
            found.extend(rows_of(Ran(model, fresh.data, fresh.stabiliser, [loss], 0.0), seed, step + 1))  # type: ignore

    train_small(config, each=each)
    return found


if __name__ == "__main__":
    write_json({"schema": "locater.alignment/1", "rows": [row for seed in SEEDS for row in measure(seed)]}, ROWS)
