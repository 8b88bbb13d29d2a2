"""Where one head's rows begin in a tensor that holds queries, keys and values together."""

from typing import Literal, NamedTuple

Layout = Literal["qkv", "grouped", "codegen"]


class Shape(NamedTuple):
    """The sizes that every layout depends on."""

    num_heads: int
    num_key_heads: int
    d_head: int

    @property
    def ratio(self) -> int:
        """Query heads per key head."""
        return self.num_heads // self.num_key_heads


def first_row(layout: Layout | None, head: int, shape: Shape, *, key: bool) -> int:
    """First row of a query head, or of a key head with `key`.

    None: a tensor of its own. `qkv`: all queries, all keys, all values. `grouped`: group by group its
    queries, its key, its value; with one query per key that is q, k, v head by head. `codegen`: four blocks of q, v, k.
    """
    if layout is None:
        return head * shape.d_head
    if layout == "qkv":
        return (head + shape.num_heads * key) * shape.d_head
    if layout == "grouped":
        group, inner = (head, shape.ratio) if key else divmod(head, shape.ratio)
        return (group * (shape.ratio + 2) + inner) * shape.d_head
    per_block = shape.num_heads // 4
    block, inner = divmod(head, per_block)
    return ((3 * block + 2 * key) * per_block + inner) * shape.d_head


def rows_used(layout: Layout, shape: Shape) -> tuple[int, int]:
    """The rows that hold queries and keys: what lies behind the last key need not be read."""
    return 0, first_row(layout, shape.num_key_heads - 1, shape, key=True) + shape.d_head
