"""Local part of a pair in this process, for plain tensors and for DTensors (FSDP2, tensor parallelism).

Columns sharded: the d_h×d_h Gram matrices are summed over the ranks. Whole heads sharded: nothing is exchanged but
scalars. Anything else is gathered.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from ...errors import refusal
from ...models.live.masters import current, write_master
from ...projections import whole, widen
from ...spectra import Grams
from .weights import Rows

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class HeadShard:
    """Local heads and columns, in at least float32; sums over `across_columns` or `across_heads` complete them.

    `query` and `key` are the memory of the parameters, or of their masters, where they can be; `commit` writes them
    back. `bases` are what they were cut from.
    """

    name: str
    weights: tuple[Tensor, ...]
    bases: tuple[Tensor, ...]
    query: Float[Tensor, "groups heads d_head columns"]
    key: Float[Tensor, "groups 1 d_head columns"]
    working: tuple[Tensor, ...]
    rows: tuple[Rows, Rows]
    groups: slice = field(default_factory=lambda: slice(None))
    columns: slice = field(default_factory=lambda: slice(None))
    across_columns: Group = None
    across_heads: Group = None

    @property
    def moves(self) -> tuple[bool, bool]:
        """True for queries, and for keys, that are trained."""
        return self.weights[0].requires_grad, self.weights[-1].requires_grad

    def complete(self, grams: Grams) -> Grams:
        """The Gram matrices over all columns: one message for the three of them."""
        if self.across_columns is None:
            return grams
        flat = self.complete_sums(torch.cat([gram.flatten() for gram in grams]))
        parts = flat.split([gram.numel() for gram in grams])
        return Grams(*(part.view(gram.shape) for part, gram in zip(parts, grams, strict=True)))

    def complete_sums(self, sums: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Complete per-head sums over the local columns."""
        if self.across_columns is not None:
            dist.all_reduce(sums, group=self.across_columns)
        return sums

    def total(self, values: Float[Tensor, "*heads"]) -> Float[Tensor, ""]:
        """The sum over all heads of all ranks."""
        value = values.sum()
        if self.across_heads is not None:
            dist.all_reduce(value, group=self.across_heads)
        return value

    def everywhere(self, values: Float[Tensor, "groups heads"]) -> Float[Tensor, "all_groups heads"]:
        """The values of all heads, on every rank."""
        if self.across_heads is None:
            return values
        gathered = [torch.empty_like(values) for _ in range(dist.get_world_size(self.across_heads))]
        dist.all_gather(gathered, values.contiguous(), group=self.across_heads)
        return torch.cat(gathered)

    def traces(self) -> Float[Tensor, "groups heads"]:
        """Compute tr W of the local heads: Σ W_Q∘W_K, one pass over the weights."""
        return self.complete_sums(product_sums(self.query, self.key))

    def scatter(self, by_query: Tensor, by_key: Tensor) -> tuple[Tensor, ...]:
        """Gradients by heads as gradients by the weights, placed as these are."""
        gradients = [self._blank(weight, rows) for weight, rows in zip(self.working, self._shared(), strict=True)]
        self.rows[0].view(gradients[0]).copy_(by_query)
        self.rows[1].view(gradients[-1]).copy_(by_key)
        pairs = zip(gradients, self.weights, strict=True)
        return tuple(_placed_as(gradient.to(weight.dtype), weight) for gradient, weight in pairs)

    def _shared(self) -> list[tuple[Rows, ...]]:
        """The rows of heads in each weight."""
        return [self.rows] if len(self.working) == 1 else [self.rows[:1], self.rows[1:]]

    @staticmethod
    def _blank(weight: Tensor, rows: tuple[Rows, ...]) -> Tensor:
        """Memory for a gradient, zero where no head will be written."""
        blank, covered = torch.empty_like(weight), 0
        for part in rows:
            covered += part.num_rows if part.is_dense and part.first == covered else 0
        blank.narrow(rows[0].row_axis, covered, weight.shape[rows[0].row_axis] - covered).zero_()
        return blank

    def commit(self) -> None:
        """Write heads that were changed in place back to the parameters, where they are copies of them."""
        for working, base, weight in zip(self.working, self.bases, self.weights, strict=True):
            write_master(weight, _placed_as(working, base))


def product_sums(left: Tensor, right: Tensor) -> Float[Tensor, "groups heads"]:
    """Σ L∘R for every head, the rows added up in float64: the trace is small against its terms."""
    return (left * right).sum(-1).double().sum(-1)


@torch.no_grad()
def shard_of(
    rows: tuple[Rows, Rows], weights: Sequence[Tensor], *, name: str, d_model: int, exact: bool = False
) -> HeadShard:
    """The local part of queries and keys, by how weights are sharded now; FSDP2 changes that between forward and step.

    `exact` takes master weights, where there are any: for what writes. DeepSpeed ZeRO-3 has nothing else.
    """
    parameters = tuple(weights)
    weights = tuple(current(one) if exact or hasattr(one, "ds_id") else one for one in parameters)
    plans = {_axis(weight, rows) for weight, rows in zip((weights[0], weights[-1]), rows, strict=True)}
    axis, mesh_axis = plans.pop() if len(plans) == 1 else ("gathered", -1)
    where: dict[str, Any] = {}
    if axis == "columns" or (axis == "rows" and _holds_whole_groups(rows, weights, mesh_axis)):
        mesh = weights[0].device_mesh  # type: ignore  # sharded, so a DTensor
        local = [weight.to_local() for weight in weights]  # type: ignore
        if axis == "columns":
            columns = _columns(d_model, local[0].shape[1 - rows[0].row_axis], mesh, mesh_axis)
            where = dict(columns=columns, across_columns=mesh.get_group(mesh_axis))
        else:
            count, first = rows[0].num_groups // mesh.size(mesh_axis), mesh.get_local_rank(mesh_axis)
            rows = replace(rows[0], num_groups=count), replace(rows[1], num_groups=count)
            groups = slice(first * count, (first + 1) * count)
            where = dict(groups=groups, across_heads=mesh.get_group(mesh_axis))
    else:
        local = [whole(weight) for weight in weights]
    working = tuple(widen(tensor.detach()) for tensor in local)
    views = rows[0].view(working[0]), rows[1].view(working[-1])
    return HeadShard(name, parameters, weights, *views, working, rows, **where)


def check_not_spread(model: nn.Module) -> None:
    """For what changes a model's parameters: DDP and FSDP know those that there were when they were put around it.

    Gradients of later ones would stay each process's own, and the copies would drift apart without a word. This holds
    for the module inside of a wrapper as well, which knows nothing of it: so every wrapper there is is asked.
    """
    own = {id(one) for one in model.parameters()}
    names = (type(wrapper).__name__ for wrapper in _wrappers() for one in wrapper.parameters() if id(one) in own)
    wrapper = next(names, None)
    if wrapper or any(isinstance(one, DTensor) for one in model.parameters()):
        got = f"one under {wrapper}" if wrapper else "sharded parameters"
        raise refusal("a model that is not spread over processes yet", got, "attach first, then wrap or shard")


def _wrappers() -> Iterator[nn.Module]:
    """All that are in use; without a process group there can be none."""
    if dist.is_available() and dist.is_initialized():
        gc.collect()  # of wrappers that were given up
        first = sys.modules.get("torch.distributed.fsdp.fully_sharded_data_parallel")
        kinds = (nn.parallel.DistributedDataParallel, *([first.FullyShardedDataParallel] if first else []))
        yield from (one for one in gc.get_objects() if issubclass(type(one), kinds))


def _axis(weight: Tensor, rows: Rows) -> tuple[str, int]:
    """Return what the one sharded axis of the mesh holds of this weight: rows, columns, or neither."""
    if not isinstance(weight, DTensor):
        return "gathered", -1
    sharded = [(n, placement) for n, placement in enumerate(weight.placements) if not isinstance(placement, Replicate)]
    number, placement = sharded[0] if len(sharded) == 1 else (-1, None)
    if type(placement) is not Shard:
        return "gathered", -1
    return ("rows" if placement.dim % 2 == rows.row_axis else "columns"), number


def _columns(d_model: int, number: int, mesh: Any, mesh_axis: int) -> slice:
    """Slice of the columns that this rank holds: `Shard` gives every rank ⌈d / n⌉ of them as long as there are any."""
    share = -(-d_model // mesh.size(mesh_axis))
    first = min(share * mesh.get_local_rank(mesh_axis), d_model)
    return slice(first, first + number)


def _holds_whole_groups(rows: tuple[Rows, Rows], weights: tuple[Tensor, ...], mesh_axis: int) -> bool:
    alone = len(weights) == 2 and all(one.is_whole for one in rows)
    return alone and rows[0].num_groups % weights[0].device_mesh.size(mesh_axis) == 0  # type: ignore


def _placed_as(full: Tensor, weight: Tensor) -> Tensor:
    """A tensor that all ranks hold, cut as the weight is; one of the local size is taken to be cut already."""
    if not isinstance(weight, DTensor):
        return full
    if full.shape == weight.shape and weight.to_local().shape != weight.shape:
        mesh = weight.device_mesh
        whole = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return whole.redistribute(mesh, weight.placements)
    return DTensor.from_local(
        full, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
    )
