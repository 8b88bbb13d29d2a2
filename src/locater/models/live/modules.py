"""Rows of the family tables made from live modules, one module each, with the sizes of the module itself.

Of known kinds (torch's transformer layers, `nn.MultiheadAttention`, timm's shape), whose input norm is that of the
modules around it; or of two projections that the user names. Where nothing is known, how to name them.
"""

import inspect
from collections.abc import Iterator
from typing import Any, get_args

import torch
from torch import nn

from ...errors import Refusal, refusal, within
from ...head import Block
from ..module import AttentionModule, module_of_row, refused_module
from ..schema import Attention, Layout, NormAt
from ..tensors import Tensors

TorchLayer = nn.TransformerEncoderLayer | nn.TransformerDecoderLayer


def _norm_at(name: str, module: object) -> NormAt | None:
    """The place of a norm that the tables can read; None for none, or for an identity."""
    if module is None or isinstance(module, nn.Identity):
        return None
    is_rms = isinstance(module, nn.RMSNorm) or "rmsnorm" in type(module).__name__.lower()
    if not isinstance(module, nn.LayerNorm) and not is_rms:
        raise refusal(f"a layer norm or an RMS norm at {name}", type(module).__name__)
    stored = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    epsilon = float(torch.finfo(torch.float32).eps if stored is None else stored)
    return NormAt("rms" if is_rms else "layer", name, epsilon=epsilon, plain=getattr(module, "weight", None) is None)


class Stacks:
    """torch's transformer layers and the stacks they stand in: a post-LN layer's input norm is the one before it."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        self.modules = modules

    def norm(self, owner: str, norm: str) -> NormAt | None:
        name = f"{owner}.{norm}".lstrip(".")
        return _norm_at(name, self.modules.get(name))

    def output_norm(self, layer: str) -> NormAt | None:
        """The norm that ends a post-LN layer."""
        module = self.modules[layer]
        if not isinstance(module, TorchLayer) or module.norm_first:
            return None
        return self.norm(layer, "norm2" if isinstance(module, nn.TransformerEncoderLayer) else "norm3")

    def input_norm(self, layer: str) -> NormAt | None:
        """The layer's own first norm, or the last of the layer before; unknown outside a stack or at its start."""
        if getattr(self.modules[layer], "norm_first", False):
            return self.norm(layer, "norm1")
        stack, _, number = layer.rpartition("layers.")
        owner = self.modules.get(stack.removesuffix("."))
        if not isinstance(owner, nn.TransformerEncoder | nn.TransformerDecoder) or number == "0":
            return None
        return self.output_norm(f"{stack}layers.{int(number) - 1}")

    def memory_norm(self, layer: str) -> NormAt | None:
        """Return the norm that ends the encoder seen by the decoder: known within `nn.Transformer` only."""
        whole, _, _ = layer.rpartition("decoder.layers.")
        if not isinstance(self.modules.get(whole.removesuffix(".")), nn.Transformer):
            return None
        encoder = self.modules.get(f"{whole}encoder")
        if not isinstance(encoder, nn.TransformerEncoder):
            return None
        if encoder.norm is not None:
            return self.norm(f"{whole}encoder", "norm")
        return self.output_norm(f"{whole}encoder.layers.{len(encoder.layers) - 1}")


TIMM_PARTS = {"qkv", "q_norm", "k_norm", "proj", "norm", "gate", "attn_drop", "proj_drop"}


def known_modules(modules: dict[str, nn.Module], tensors: Tensors) -> Iterator[AttentionModule]:
    """Every attention module of a known kind, in the order of the tree."""
    stacks, seen = Stacks(modules), set()
    for name, module in modules.items():
        if id(module) in seen:
            continue  # the same module under a second name
        seen.add(id(module))
        inside = isinstance(modules.get(name.rpartition(".")[0]), TorchLayer)
        if isinstance(module, TorchLayer):
            yield from _layer(name, module, stacks, tensors)
        elif isinstance(module, nn.MultiheadAttention) and not inside:
            yield _found(tensors, _multihead, "encoder", name, module)
        elif _is_timm(module):
            yield _found(tensors, _timm, "vision", name, module, modules.get(name.rpartition(".")[0]))


def _is_timm(module: nn.Module) -> bool:
    """A class of timm's own: people give the same names to attention of other kinds."""
    is_own = type(module).__module__.partition(".")[0] == "timm"
    return is_own and isinstance(getattr(module, "qkv", None), nn.Linear) and hasattr(module, "num_heads")


def _layer(name: str, module: TorchLayer, stacks: Stacks, tensors: Tensors) -> Iterator[AttentionModule]:
    at = f"{name}.".lstrip(".")
    block: Block = "encoder" if isinstance(module, nn.TransformerEncoderLayer) else "decoder"
    yield _found(tensors, _multihead, block, f"{at}self_attn", module.self_attn, stacks.input_norm(name))
    if isinstance(module, nn.TransformerDecoderLayer):
        norm = stacks.norm(name, "norm2" if module.norm_first else "norm1")
        parts = module.multihead_attn, norm, stacks.memory_norm(name)
        yield _found(tensors, _multihead, "cross", f"{at}multihead_attn", *parts)


def _found(tensors: Tensors, make, block: Block, name: str, *parts) -> AttentionModule:
    """The module of the row that `make` gives, or its refusal."""
    try:
        with within(name or type(parts[0]).__name__):
            return module_of_row(make(block, f"{name}.".lstrip("."), *parts), tensors)
    except Refusal as reason:
        return refused_module(block, (name, name), str(reason))


def _multihead(
    block: Block, at: str, module: nn.MultiheadAttention, norm: NormAt | None = None, key_norm: NormAt | None = None
) -> Attention:
    if module.in_proj_weight is None:
        sizes = f"{module.embed_dim}, {module.kdim} and {module.vdim}"
        raise refusal("queries, keys and values of one width", sizes, "a head compares vectors of one space")
    if module.bias_k is not None or module.add_zero_attn:
        extra = "add_zero_attn" if module.add_zero_attn else "bias_k"
        remedy = "its softmax runs over more than the tokens"
        raise refusal("keys that all come from the input", f"a further key ({extra})", remedy)
    return Attention(
        block=block,
        query=f"{at}in_proj",
        key=f"{at}in_proj",
        heads=module.num_heads,
        d_head=module.head_dim,
        fused="qkv",
        input_norm=norm,
        key_input_norm=key_norm,
        lookahead=0 if block == "decoder" else None,
    )


def _timm(block: Block, at: str, module: Any, parent: nn.Module | None) -> Attention:
    """Attention of timm's shape: qkv(x), a norm per head, scale · q·k. Its input norm is the `norm1` of its block."""
    _check_timm(module)
    num_heads, qkv = module.num_heads, module.qkv
    d_head, rest = divmod(qkv.out_features, 3 * num_heads)
    if rest:
        raise refusal(f"three times {num_heads} heads of one size", f"{qkv.out_features} rows of qkv")
    # A res-post-norm block has a norm of that name too, but behind its attention.
    before = None if parent is None or "respost" in type(parent).__name__.lower() else getattr(parent, "norm1", None)
    parent_at = at.rstrip(".").rpartition(".")[0]
    return Attention(
        block=block,
        query=f"{at}qkv",
        key=f"{at}qkv",
        heads=num_heads,
        d_head=d_head,
        fused="qkv",
        input_norm=_norm_at(f"{parent_at}.norm1".lstrip("."), before),
        query_norm=_norm_at(f"{at}q_norm", getattr(module, "q_norm", None)),
        key_norm=_norm_at(f"{at}k_norm", getattr(module, "k_norm", None)),
        scale=float(getattr(module, "scale", d_head**-0.5)),
    )


def _check_timm(module: Any) -> None:
    """Refuse attention that has more to it than the shape says."""
    own = {name.partition(".")[0] for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    further = sorted(own - TIMM_PARTS) + [
        name for name in inspect.signature(module.forward).parameters if "rope" in name
    ]
    if further or isinstance(module.num_heads, bool) or not isinstance(module.num_heads, int):
        expected = "attention with `qkv`, `num_heads` and at most `q_norm`, `k_norm`"
        raise refusal(expected, f"also {', '.join(further)}" if further else repr(module.num_heads))


# ------------------------------------------------------------------------------------------- named by the user
# The query's and the key's projection, as modules or by name, and how many heads each has; or one projection that holds
# both: its two numbers of heads, and how they share it ("qkv" unless told, or "grouped": see `slices.first_rows`).
Explicit = (
    tuple[nn.Module | str, nn.Module | str, int, int]
    | tuple[nn.Module | str, int, int]
    | tuple[nn.Module | str, int, int, Layout]
)
QUERIES, KEYS = ("q_proj", "query", "to_q", "wq", "q", "q_lin"), ("k_proj", "key", "to_k", "wk", "k", "k_lin")
FORM = "(query, key, num_heads, num_key_heads) or (fused, num_heads, num_key_heads)"


def explicit_row(entry: Explicit, modules: dict[str, nn.Module]) -> Attention:
    """The row of one attention module from its projections; positions, norms and masks are taken to be absent."""
    if not isinstance(entry, tuple | list) or len(entry) not in (3, 4):
        raise refusal(f"entries {FORM}", repr(entry))
    given: list[Any] = list(entry)
    if isinstance(given[1], int) and not isinstance(given[1], bool):
        fused = given[3] if len(given) == 4 else "qkv"
        if fused not in get_args(Layout):
            raise refusal(f"a layout among {', '.join(get_args(Layout))}", repr(fused))
        given[1:] = given[0], *given[1:3]
    elif len(given) == 3:
        raise refusal(f"entries {FORM}", repr(entry))
    else:
        fused = None
    (query_name, query), (key_name, key) = (_projection(part, modules) for part in given[:2])
    if query is key and fused is None:
        own = "a projection of its own for queries and for keys"
        raise refusal(own, f"`{query_name}` for both", f"name it by {FORM}")
    num_heads, num_key_heads = map(_count, given[2:])
    (rows, transposed), (key_rows, _) = rows_of_weight(query), rows_of_weight(key)
    d_head, rest = divmod(rows, num_heads + 2 * num_key_heads if fused else num_heads)
    if rest and fused:
        expected = f"{num_heads} queries, {num_key_heads} keys and as many values of one size in `{query_name}`"
        raise refusal(expected, f"{rows} rows")
    if not fused and (rest or key_rows != num_key_heads * d_head):
        expected = f"{num_heads} query heads and {num_key_heads} key heads of one size"
        raise refusal(expected, f"{rows} rows in `{query_name}` and {key_rows} in `{key_name}`")
    return Attention(
        block="decoder",
        query=query_name,
        key=key_name,
        heads=num_heads,
        key_heads=num_key_heads,
        d_head=d_head,
        fused=fused,
        transposed=transposed,
    )


def describe_modules(modules: dict[str, nn.Module]) -> str:
    """Describe the modules that look like attention, and the way to name them."""
    likely = [name for name, module in modules.items() if name and _is_likely(module)]
    known = next(((name, pair) for name in likely if (pair := _pair(modules[name]))), None)
    name, (query, key) = known or ("layer", ("q_proj", "k_proj"))
    listed = ", ".join(f"`{name}` ({type(modules[name]).__name__})" for name in likely[:4])
    listed += f" and {len(likely) - 4} more" if len(likely) > 4 else ""
    form = f'locater.Live(model, heads=[("{name}.{query}", "{name}.{key}", num_heads, num_key_heads), …])'
    return (
        f"it has {listed or 'no module that looks like attention'}: give a batch to find its heads in one forward "
        f"pass, locater.Live(model, sample=batch); or name the projections, {form}"
    )


def _is_likely(module: nn.Module) -> bool:
    kind = type(module).__name__.lower()
    return ("attention" in kind or "attn" in kind or _pair(module) is not None) and any(
        True for _ in module.parameters()
    )


def _pair(module: nn.Module) -> tuple[str, str] | None:
    return next(((q, k) for q, k in zip(QUERIES, KEYS, strict=True) if hasattr(module, q) and hasattr(module, k)), None)


def _projection(part: nn.Module | str, modules: dict[str, nn.Module]) -> tuple[str, nn.Module]:
    found = [(name, module) for name, module in modules.items() if name == part or module is part]
    if not found:
        raise refusal("a projection that is part of the model", part if isinstance(part, str) else type(part).__name__)
    return found[0]


def rows_of_weight(module: nn.Module) -> tuple[int, bool]:
    """Rows of the weight as (out, in), and whether it is stored the other way, as transformers' Conv1D does."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.dim() != 2:
        raise refusal("a projection with a weight of two dimensions", type(module).__name__)
    transposed = type(module).__name__ == "Conv1D"
    return weight.shape[1 if transposed else 0], transposed


def _count(part: object) -> int:
    if isinstance(part, bool) or not isinstance(part, int) or part < 1:
        raise refusal("a positive whole number of heads", repr(part))
    return part
