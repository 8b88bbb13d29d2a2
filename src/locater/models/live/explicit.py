"""Attention that the user names: the two projections and their numbers of heads; and how to, where nothing is known."""

from typing import Any, get_args

from torch import nn

from ...errors import refusal
from ..schema import Attention, Layout

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
    form = f'heads=[("{name}.{query}", "{name}.{key}", num_heads, num_key_heads), …]'
    return (
        f"it has {listed or 'no module that looks like attention'}: give a batch by sample=… to find its heads in one "
        f"forward pass, or name the projections by {form}"
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
