"""Locate attention in a model without a description: by the calls that its modules make."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ..attention.arguments import num_heads_of, with_four_dimensions
from ..attention.calls import AttentionCall
from ..errors import refusal
from ..head import Block
from ..models.live import AttentionModule
from .hooks import Pass

AGAIN = "#"  # between a module's name and the number of its call, from the second on


def module_name(call: AttentionCall, modules: dict[str, nn.Module]) -> str | None:
    """The innermost of the model's modules that was running."""
    names = {id(module): name for name, module in modules.items()}
    return next((names[id(module)] for module in call.modules if id(module) in names), None)


def discovered(
    call: AttentionCall, run: Pass, modules: dict[str, nn.Module], known: Sequence[AttentionModule]
) -> AttentionModule | None:
    """The site of a call: its innermost module's, or a further one if that calls more than once in a pass."""
    name = module_name(call, modules)
    if name is None:
        return None
    number = run.num_calls[name]
    run.num_calls[name] += 1
    name = call_name(name, number)
    site = next((site for site in known if site.query_name == name), None)
    if site is not None:
        return site
    block = _block(call)
    count = sum(site.block == block for site in known)
    return named_site(block, count, num_heads_of(call), name)


def call_name(name: str, number: int) -> str:
    """Name of the n-th call of a module in a pass."""
    return name if number == 0 else f"{name}{AGAIN}{number}"


def named_site(block: Block, number: int, num_heads: int, name: str) -> AttentionModule:
    return AttentionModule(block, number, name, name, build=_unreadable(name), count=lambda: num_heads)


def repeated(sites: Sequence[AttentionModule]) -> Iterator[str]:
    """Modules that call a kernel several times in a pass, whatever for: chunks, heads, or two maps."""
    times = Counter(site.query_name.split(AGAIN)[0] for site in sites)
    several = [name for name, number in times.items() if number > 1]
    if several:
        more = f" and {len(several) - 1} more call" if len(several) > 1 else " calls"
        yield (
            f"`{several[0]}`{more} a kernel {times[several[0]]} times in a pass: each call is a layer of its own here, "
            "in their order"
        )


def _block(call: AttentionCall) -> Block:
    """Calls that do not look ahead are a decoder's; keys of another number than queries come from elsewhere.

    A single query shows no mask. Where its module was given no sequence as long as the keys, these are from a cache.
    """
    num_queries, num_keys = call.query.shape[-2], call.key.shape[-2]
    if num_queries == 1 and call.lengths and num_keys not in call.lengths:
        return "decoder"
    if num_queries > 1 and not bool(with_four_dimensions(call).admitted(slice(0, 1))[..., -1].any()):
        return "decoder"
    return "encoder" if num_queries == num_keys else "cross"


def _unreadable(name: str) -> Callable[[], NoReturn]:
    def build() -> NoReturn:
        raise refusal("heads that a table names", f"those of `{name}`, of which only the calls are known")

    return build


def silent(modules: dict[str, nn.Module], softmaxes: set[str], calling: set[str]) -> Iterator[str]:
    """Modules that look like attention and called no kernel, in a model of which nothing else is known."""
    names, written = {name.split(AGAIN)[0] for name in calling}, written_out(modules, softmaxes, calling)
    if written:
        yield f"a softmax of its own, and no call of a kernel, in {', '.join(written)}: not looked at; name the heads"
    for name, module in modules.items():
        kind = type(module).__name__.lower()
        if ("attention" in kind or "attn" in kind) and not _is_among(name, names | softmaxes):
            yield f"`{name}` ({type(module).__name__}) looks like attention and called no kernel: it was not looked at"


def outside(names: set[str]) -> Iterator[str]:
    """Attention modules that ran while a step was watched, but in no call of the model itself."""
    if names:
        first, more = min(names), f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"`{first}`{more} ran outside of a call of the model itself, model(…): not looked at there"


def written_out(modules: dict[str, nn.Module], softmaxes: set[str], calling: set[str]) -> list[str]:
    """Modules that compute a softmax over pairs of tokens themselves, and called no kernel."""
    names = {name.split(AGAIN)[0] for name in calling}
    return [f"`{name}` ({type(modules[name]).__name__})" for name in sorted(softmaxes) if not _is_among(name, names)]


def _is_among(name: str, names: set[str]) -> bool:
    """Tell whether a module, one inside it or one around it is named."""
    return any(one == name or one.startswith(f"{name}.") or name.startswith(f"{one}.") for one in names)


def whole_call(
    call: AttentionCall, site: AttentionModule, modules: dict[str, nn.Module]
) -> tuple[AttentionCall, range]:
    """All heads of a call, and which of them this process computes.

    Under tensor parallelism each process has its own, and they are gathered in order.
    """
    every = range(site.num_heads)
    if call.logits is not None or call.query.dim() != 4 or call.query.shape[1] == site.num_heads:
        return call, every
    group, num_own = _shards(modules.get(site.query_name)), call.query.shape[1]
    if group is None or num_own * dist.get_world_size(group) != site.num_heads:
        return call, every
    query, key = (_gathered(part, group) for part in (call.query, call.key))
    first = num_own * dist.get_rank(group)
    return call.changed(query=query, key=key), every[first : first + num_own]


def _shards(projection: nn.Module | None) -> dist.ProcessGroup | None:
    weight = getattr(projection, "weight", None)
    if not isinstance(weight, DTensor):
        return None
    return next(
        (weight.device_mesh.get_group(number) for number, one in enumerate(weight.placements) if one == Shard(0)), None
    )


def _gathered(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.detach().contiguous(), group=group)
    return torch.cat(parts, 1)
