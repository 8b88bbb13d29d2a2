"""Hooks on a model's attention modules: they see the inputs of the query and key projections, and change nothing."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..errors import refusal
from ..models.live import Site
from .calls import Call, arguments, has_cached_keys
from .tensors import whole

PACKED = "in_proj"  # nn.MultiheadAttention holds its projections as bare parameters


@dataclass
class Owner:
    """An attention module, the sites it serves (several where layers share it), and the call under way."""

    module: nn.Module
    sites: list[Site] = field(default_factory=list)
    call: Call | None = None
    num_calls: int = 0


Observe = Callable[[Site, Call, dict[str, Any]], None]


class Hooks:
    """Attached for as long as `handles` are kept. `wanted()` says, before each call, whether anyone is looking.

    A pass is counted once: calls made within backward, where activations are computed again, are not looked at.
    """

    def __init__(self, root: nn.Module, modules: dict[str, nn.Module], sites: Iterable[Site], observe: Observe):
        self.observe = observe
        self.wanted: Callable[[], bool] = lambda: True
        self.whole: dict[str, Any] = {}
        self.has_cached_keys, self.num_cached = False, 0
        self.handles: list[RemovableHandle] = []
        self.owners: dict[str, Owner] = {}
        for site in sites:
            name = owner_name(site)
            if name not in modules:
                raise refusal(f"a module `{name}` around the queries of layer {site.number}", "none")
            self.owners.setdefault(name, Owner(modules[name])).sites.append(site)
        self._register(root, modules)

    def _register(self, root: nn.Module, modules: dict[str, nn.Module]) -> None:
        keep = self.handles.append
        keep(root.register_forward_pre_hook(_hidden(self._begin_pass), with_kwargs=True))
        for owner in self.owners.values():
            keep(owner.module.register_forward_pre_hook(_hidden(self._begin(owner)), with_kwargs=True))
            keep(owner.module.register_forward_hook(_hidden(self._end(owner)), always_call=False))
            sides = defaultdict(set)
            for site in owner.sites:
                sides[site.query_name].add("x_query")
                sides[site.key_name].add("x_key")
            for name, attributes in sides.items():
                if not name.endswith(PACKED):
                    hook = _hidden(self._capture(owner, attributes))
                    keep(modules[name].register_forward_pre_hook(hook, with_kwargs=True))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _looking(self) -> bool:
        # Within backward only recomputed activations run forward: their first run was counted.
        return torch._C._current_graph_task_id() == -1 and self.wanted()

    def _begin_pass(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._looking():
            self.whole = arguments(module, args, kwargs)
            self.has_cached_keys = has_cached_keys(self.whole)
            for owner in self.owners.values():
                owner.num_calls = 0

    def _begin(self, owner: Owner) -> Callable[..., None]:
        def begin(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            owner.call = None
            if not self._looking():
                return
            given = arguments(module, args, kwargs)
            config = getattr(module, "config", None)
            is_flash = "flash" in str(getattr(config, "_attn_implementation", ""))
            owner.call = Call(given, is_flash)
            if isinstance(module, nn.MultiheadAttention):
                _unpack(owner.call, module)

        return begin

    def _capture(self, owner: Owner, attributes: Iterable[str]) -> Callable[..., None]:
        def capture(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            given = args[0] if args else next(iter(kwargs.values()), None)
            if owner.call is not None and isinstance(given, Tensor):
                for attribute in attributes:
                    setattr(owner.call, attribute, whole(given.detach()))

        return capture

    def _end(self, owner: Owner) -> Callable[..., None]:
        def end(module: nn.Module, args: tuple, output: object) -> None:
            call, owner.call = owner.call, None
            if call is None or call.x_query is None or call.x_key is None:
                return
            site = owner.sites[owner.num_calls % len(owner.sites)]
            owner.num_calls += 1
            if site.block != "cross" and self.has_cached_keys:
                self.num_cached += 1
            else:
                self.observe(site, call, self.whole)

        return end


def owner_name(site: Site) -> str:
    """The attention module: what the two projections have in common."""
    if site.query_name.endswith(PACKED):
        return site.query_name[: -len(PACKED)].rstrip(".")
    query, key = (name.split(".")[:-1] for name in (site.query_name, site.key_name))
    common = [one for one, other in zip(query, key, strict=False) if one == other]
    return ".".join(common)


def _hidden(hook: Callable[..., None]) -> Callable[..., None]:
    """Compiled models step out of their graph for it."""
    return torch.compiler.disable(hook)  # pyright: ignore[reportReturnType]


def _unpack(call: Call, module: nn.MultiheadAttention) -> None:
    """torch's own module: texts first, and masks that say what is admitted instead of what is not."""
    x_query, x_key = call.given["query"].detach(), call.given["key"].detach()
    if x_query.dim() == 2:
        x_query, x_key = x_query[None], x_key[None]
    elif not module.batch_first:
        x_query, x_key = x_query.transpose(0, 1), x_key.transpose(0, 1)
    call.x_query, call.x_key = x_query, x_key
    mask, padding = call.given.get("attn_mask"), call.given.get("key_padding_mask")
    if mask is not None:
        shape = (-1, module.num_heads, *mask.shape[-2:]) if mask.dim() == 3 else (1, 1, *mask.shape)
        call.given["mask"] = _admitted(mask).reshape(shape)
    call.key_valid = None if padding is None else _admitted(padding).reshape(len(x_key), -1)


def _admitted(mask: Tensor) -> Tensor:
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else ~mask
