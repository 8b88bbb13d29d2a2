"""Random masks of every kind that attention is given, each with the pairs that it admits, written down by itself."""

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

FLOATS = (-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4)


def causal(q, k, draw):
    return torch.ones(q, k, dtype=torch.bool).tril(k - q)


def anything(q, k, draw):
    return torch.rand(q, k, generator=draw.torch) < draw.choice([0.1, 0.5, 0.9])


def distances(q, k):
    return torch.arange(q)[:, None] + k - q - torch.arange(k)


def window(q, k, draw):
    d = distances(q, k)
    return (d >= -draw.choice([0, 0, 3])) & (d < draw.randint(1, 9))


def dilated(q, k, draw):
    return (distances(q, k) >= 0) & (distances(q, k) % draw.randint(2, 4) == 0)


def strided(q, k, draw):
    """The last few keys, and every so many-th before them."""
    d, step = distances(q, k), draw.randint(2, 5)
    return (d >= 0) & ((d < step) | (torch.arange(k) % step == step - 1))


def grid(q, k, draw):
    """A window in two dimensions over a row-major picture, as neighbourhood attention has it."""
    width, reach = draw.randint(2, 6), draw.randint(1, 2)
    rows, columns = torch.arange(max(q, k)) // width, torch.arange(max(q, k)) % width
    near = (rows[:, None] - rows).abs() <= reach
    return (near & ((columns[:, None] - columns).abs() <= reach))[:q, :k]


def texts(q, k, draw):
    """The number of the packed text that each token belongs to."""
    starts = torch.rand(max(q, k), generator=draw.torch) < 0.2
    return starts.cumsum(0)


def packed(q, k, draw):
    number = texts(q, k, draw)
    same = number[:q, None] == number[:k]
    return same & causal(q, k, draw) if draw.random() < 0.7 else same


def packed_with_global_token(q, k, draw):
    mask = packed(q, k, draw)
    mask[:, 0] = True
    return mask


def shared_prefix(q, k, draw):
    mask, length = packed(q, k, draw), draw.randint(1, max(1, k // 3))
    mask[:, :length] = True
    return mask & (distances(q, k) >= 0) if q == k else mask


def block_diffusion(q, k, draw):
    """Noisy blocks that see themselves and the clean ones before, behind clean ones that see back."""
    size, half = draw.randint(1, 4), max(q, k) // 2
    index = torch.arange(max(q, k))
    is_clean, block = index >= half, torch.where(index >= half, index - half, index) // size
    query, key = block[:, None], block[None]
    own = (query == key) & (is_clean[:, None] == is_clean)
    before = is_clean & (key < query)
    return (own | before)[:q, :k]


def draft_tree(q, k, draw):
    """Tokens that see their ancestors."""
    mask = torch.zeros(max(q, k), max(q, k), dtype=torch.bool)
    for token in range(max(q, k)):
        if token:
            mask[token] = mask[draw.randint(max(0, token - 4), token - 1)]
        mask[token, token] = True
    return mask[:q, :k]


def left_padding(q, k, draw):
    number = draw.randint(1, max(1, k // 2))
    mask = causal(q, k, draw) if draw.random() < 0.7 else torch.ones(q, k, dtype=torch.bool)
    mask[:, :number] = False
    mask[: min(number, q)] = False
    return mask


def right_padding(q, k, draw):
    mask = causal(q, k, draw) if draw.random() < 0.7 else torch.ones(q, k, dtype=torch.bool)
    mask[:, k - draw.randint(0, max(0, k - 1)) :] = False
    return mask


PATTERNS = (
    causal, anything, window, dilated, strided, grid, packed, packed_with_global_token, shared_prefix,
    block_diffusion, draft_tree, left_padding, right_padding,
)  # fmt: skip
KINDS = ("none", "is_causal", "upper left", "lower right", "bool", "float", "flex")


class Draw(random.Random):
    def __init__(self, seed: int):
        super().__init__(seed)
        self.torch = torch.Generator().manual_seed(seed)


@dataclass
class Case:
    """`mask` and `is_causal` as torch's function takes them, `rule` as FlexAttention does; `admitted` is the truth."""

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    admitted: Tensor  # (texts, heads, queries, keys)
    added: Tensor
    mask: Tensor | None = None
    is_causal: bool = False
    rule: object = None
    scale: float | None = None


def draw_case(seed: int, *, kinds: tuple[str, ...] = KINDS, square: bool = False, dtype=torch.float64) -> Case:
    """Sizes, kind, pattern and numbers by one seed."""
    draw = Draw(seed)
    b, h, q = draw.choice([1, 2]), draw.choice([1, 2, 4]), draw.choice([1, 2, 7, 16, 23])
    k = q if square or draw.random() < 0.6 else draw.choice([1, 5, 16, 29])
    ratio, kind = draw.choice([one for one in (1, 2) if h % one == 0]), draw.choice(kinds)
    sizes = (b, h, q, 8), (b, h // ratio, k, 8), (b, h // ratio, k, 8)
    parts = [2 * torch.randn(size, generator=draw.torch, dtype=dtype) for size in sizes]
    full = torch.ones(b, h, q, k, dtype=torch.bool)
    case = Case(kind, *parts, full, torch.zeros(b, h, q, k, dtype=dtype), scale=draw.choice([None, None, 0.3, 0.0]))
    if kind in ("is_causal", "upper left", "lower right"):
        case.admitted = full.tril(k - q if kind == "lower right" else 0)
        case.is_causal = kind == "is_causal"
        if kind != "is_causal":
            case.mask = {"upper left": causal_upper_left, "lower right": causal_lower_right}[kind](q, k)
    elif kind != "none":
        _draw_pattern(case, kind, draw, dtype)
    return case


def _draw_pattern(case: Case, kind: str, draw: Draw, dtype) -> None:
    b, h, q, k = case.admitted.shape
    pattern = draw.choice(PATTERNS)
    texts, heads = draw.choice([(1, 1), (b, 1), (b, h), (1, h)])
    drawn = torch.stack([pattern(q, k, draw) for _ in range(texts * heads)]).view(texts, heads, q, k)
    case.name, case.admitted = f"{kind}, {pattern.__name__}", drawn.expand(b, h, q, k)
    if kind == "bool":
        case.mask = drawn if texts * heads > 1 else drawn[0, 0]
    elif kind == "float":
        low = draw.choice(FLOATS)
        bias = torch.randn(drawn.shape, generator=draw.torch, dtype=dtype) * draw.choice([0, 0, 1])
        case.mask = bias.masked_fill(~drawn, low) if draw.random() < 0.5 else bias + torch.where(drawn, 0.0, low)
        case.mask = case.mask.to(dtype)
        case.added, case.name = case.mask.expand(b, h, q, k), f"{case.name}, {low:.0e}"
    else:
        table = case.admitted
        case.rule = lambda text, head, query, key: table[text, head, query, key]
