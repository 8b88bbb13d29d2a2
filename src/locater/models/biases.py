"""Biases and norms that a row expects: what is lost in all layers looks as if it never was, so the row must say it."""

from collections.abc import Iterator

from .places import Places
from .schema import Cell, NormAt, NormCell, resolve


def misplaced_bias(places: Places) -> str | None:
    """In words, the first bias that should be stored and is not, or is and should not be; None where all is well."""
    for layer in places.layers:
        for module, expected in expected_biases(places, layer):
            if expected is None or places.stored(module) is None:
                continue
            bias = places.stored(module, "bias")
            if expected and bias is None:
                return f"`{module[:120]}.bias` is not in the file"
            if bias is not None and not expected:
                return f"`{bias[:120]}` is in the file, where the model has none"
    return None


def lost_norm(places: Places) -> str | None:
    """The norm of what cross-attention looks at may be missing together with all that it belongs to, not alone."""
    at = places.row.key_input_norm
    if not isinstance(at, NormAt) or not at.optional:
        return None
    name = places.name(at.name, places.layers[0])
    stack = f"{places.prefix}{at.name.partition('.')[0]}."
    alone = places.stored(name) is None and any(other.startswith(stack) for other in places.tensors.names)
    return f"`{name}.weight` is not in the file" if alone else None


def expected_biases(places: Places, layer: int) -> Iterator[tuple[str, bool | None]]:
    """Modules of the row, and whether they have a bias; None: as stored."""
    row, config = places.row, places.config
    shared = row.query == row.key
    yield places.name(row.query, layer), resolve(row.query_bias, config, layer)
    yield places.name(row.key, layer), resolve(row.query_bias if shared else row.key_bias, config, layer)
    for low_rank in (row.query_low_rank, row.key_low_rank):
        if low_rank is not None:
            yield places.name(low_rank.up, layer), False
            yield from _of_norm(places, low_rank.norm, layer)
    for norm in (row.input_norm, row.key_input_norm, row.query_norm, row.key_norm):
        yield from _of_norm(places, norm, layer)


def _of_norm(places: Places, cell: NormCell, layer: int) -> Iterator[tuple[str, bool | None]]:
    at = cell(places.config, layer) if callable(cell) else cell
    if at is None or (pattern := at.at(layer)) is None:
        return
    for head in range(places.shape(layer).num_heads if "{head}" in pattern else 1):
        yield places.name(pattern, layer, head=head), has_bias(at, places, layer)


def has_bias(at: NormAt, places: Places, layer: int) -> bool | None:
    """Read whether the norm has a bias, from itself or else from its kind; None where the file tells the kind."""
    if at.bare is not None:
        return None
    stated: Cell = at.biased
    return at.kind == "layer" if stated is None else resolve(stated, places.config, layer)
