"""FlexAttention's block masks: a function of four indices, and a table of blocks that says where it need not be asked.

Compiled, the kernel goes by the blocks first; as written, by the function alone. Where these two disagree, the model
has two masks.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ..errors import refusal
from .calls import Rule

ABSENT, PARTIAL, FULL = range(3)
PROBES = (0.0, -100.0, 100.0)  # logits of which −∞ is made where a place is masked, whatever its logit


def read_rule(block_mask: tuple, buffers: tuple = (), score: Callable[..., Tensor] | None = None) -> Rule:
    """Read a block mask, as FlexAttention's operator is given it. `buffers` are what its function had closed over.

    `score`, the change of logits, masks too: where it makes −∞ of any logit. The rule refuses to answer where its
    blocks say otherwise than its function.
    """
    mask_mod: Callable[..., Tensor] = block_mask[-1]
    table, (q_size, k_size) = _table(block_mask), block_mask[-3:-1]

    def rule(text: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        admitted = mask_mod(text, head, query, key, *buffers)
        if table is not None:
            blocks = table[text % len(table), head % table.shape[1], query // q_size, key // k_size]
            if bool(((blocks == ABSENT) & admitted | (blocks == FULL) & ~admitted).any()):
                remedy = "make it by create_block_mask, or give it the mask_mod that its blocks were made of"
                raise refusal("a block mask whose blocks and mask_mod admit the same", "one that admits others", remedy)
        return admitted if score is None else admitted & ~_hidden(score, text, head, query, key)

    return rule


def _hidden(score: Callable[..., Tensor], *indices: Tensor) -> Tensor:
    """Find the places where a change of logits makes −∞ of any logit."""
    hidden = torch.ones((), dtype=torch.bool, device=indices[0].device)
    for logit in PROBES:
        if bool(hidden.any()):
            hidden = hidden & (score(torch.tensor(logit, device=hidden.device), *indices) == -torch.inf)
    return hidden


def _table(block_mask: tuple) -> Int[Tensor, "batch heads query_blocks key_blocks"] | None:
    """Table of blocks left out, asked about, or admitted whole; None where one block is everything."""
    if not isinstance(block_mask[0], int):  # torch before 2.6 gives no lengths
        return None
    num_queries, num_keys, partial, partial_keys, full, full_keys = block_mask[:6]
    q_size, k_size = block_mask[-3:-1]
    if q_size > num_queries and k_size > num_keys and num_queries == 1:
        return None
    sizes = *partial.shape[:2], -(-num_queries // q_size), -(-num_keys // k_size)
    table = torch.full(sizes, ABSENT, dtype=torch.int8, device=partial.device)
    for kind, counts, keys in ((PARTIAL, partial, partial_keys), (FULL, full, full_keys)):
        if counts is not None:
            _mark(table, kind, counts, keys)
    return table


def _mark(table: Tensor, kind: int, counts: Tensor, keys: Tensor) -> None:
    """The first `counts` entries of each row of `keys` name its blocks; the others mean nothing."""
    there: Any = torch.arange(keys.shape[-1], device=keys.device) < counts[..., None]
    texts, heads, rows, entries = there.nonzero(as_tuple=True)
    table[texts, heads, rows, keys[texts, heads, rows, entries].long()] = kind
