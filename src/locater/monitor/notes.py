"""What a report must say besides its numbers: what was thinned out, left out, or not seen at all."""

from collections.abc import Iterable, Sequence

from ..models import spans
from .report import LayerReport

UNSEEN = "no forward pass was seen: a compiled model that had run before must be reset with torch.compiler.reset()"


def make_notes(
    layers: Sequence[LayerReport], refused: Iterable[str], num_cached: int, num_skipped: int
) -> tuple[str, ...]:
    """In sentences, the most important first."""
    notes = [] if layers or num_cached or num_skipped else [UNSEEN]
    notes += sorted(refused)
    thinned = [layer for layer in layers if layer.share_of_queries < 1]
    if thinned:
        least = min(layer.share_of_queries for layer in thinned)
        where = spans(sorted({layer.layer for layer in thinned}))
        notes.append(f"to keep within the budget, {least:.1%} of the queries or more were looked at in layers {where}")
    if num_skipped:
        notes.append(f"the budget was spent: {num_skipped} calls of attention were not looked at")
    if num_cached:
        notes.append(f"{num_cached} calls with cached keys were not looked at: their inputs are gone")
    return tuple(notes)
