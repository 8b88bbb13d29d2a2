"""A scan in plain words, of two kinds that are never mixed.

Behaviour is said from the estimate, with the record in docs/evidence.md. Spectra and regimes are of the paper's
random-walk theory, come last, and say so.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..behaviour import in_layers, look_random
from ..errors import counted
from ..theory.words import MOSTLY_FAR, MOSTLY_NEAR
from .rows import HeadRow

if TYPE_CHECKING:
    from .scan import Scan

MOST_OF_A_KIND = 3
LOOKS = {"near": "mostly at the 16 nearest tokens", "far": "mostly beyond the 16 nearest tokens"}
THEORY = "in the paper's theory (a random walk: its words are not what heads do)"
RANDOM = "the weights look random, not trained: no head's tr W is larger than chance makes it"
NORMALISED = (
    "queries or keys are normalised: tr W, η, ξ describe W after that norm, so the scale of the weights cancels "
    "(--spectrum raw: as stored)"
)


@dataclass(frozen=True)
class Finding:
    """One head and the sentence on it."""

    row: HeadRow
    sentence: str


def name(row: HeadRow) -> str:
    """Name of a head in tables and sentences."""
    return f"{row.block} {row.layer}.{row.head}"


def regimes(rows: Iterable[HeadRow]) -> str:
    """Counts of regimes, the most frequent first.

    >>> regimes([])
    ''
    """
    counts = Counter(row.regime for row in rows)
    return ", ".join(f"{count} {regime}" for regime, count in counts.most_common())


def looks(row: HeadRow) -> str | None:
    """`near` or `far`: where the head looks mostly; None where its near mass is not known or tells neither."""
    near = _near_mass(row)
    if near is None or MOSTLY_FAR < near < MOSTLY_NEAR:
        return None
    return "near" if near >= MOSTLY_NEAR else "far"


def _near_mass(row: HeadRow) -> float | None:
    """Near mass as estimated, where a model with such positions was measured."""
    return None if row.estimated_near_mass_interval is None else row.estimated_near_mass


def behaviour(rows: Iterable[HeadRow]) -> list[str]:
    """Count the heads that probably look near and far.

    >>> behaviour([])
    []
    """
    known = [row for row in rows if _near_mass(row) is not None]
    return [f"estimated from the weights: {_where(known)}"] if known else []


def _where(rows: Sequence[HeadRow]) -> str:
    places = [(row.block, row.layer, row.head) for row in rows]
    heads = {word: [n for n, row in enumerate(rows) if looks(row) == word] for word in LOOKS}
    parts = [
        f"{len(found)} {'looks' if len(found) == 1 else 'look'} {LOOKS[word]}{in_layers(places, found)}"
        for word, found in heads.items()
        if found
    ]
    unsure = len(rows) - sum(map(len, heads.values()))
    return f"of {counted(len(rows), 'head')}, " + "; ".join([*parts, *([f"{unsure} unclear"] if unsure else [])])


def is_random(rows: Sequence[HeadRow]) -> bool:
    """Tell whether the weights are as random as before any training."""
    return look_random([(row.trace, row.frobenius_squared, row.d_model) for row in _once(rows)[0]])


def outstanding(rows: Sequence[HeadRow]) -> list[Finding]:
    """The heads to look at first: the surest to look near, and the surest to look far."""
    rows, others = _once(rows)
    surest = sorted((row for row in rows if looks(row)), key=lambda row: -(_near_mass(row) or 0))
    kinds = [[row for row in surest if looks(row) == "near"], [row for row in reversed(surest) if looks(row) == "far"]]
    return [_shared(_looking(row), others[row]) for kind in kinds for row in kind[:MOST_OF_A_KIND]]


def _once(rows: Sequence[HeadRow]) -> tuple[list[HeadRow], dict[HeadRow, list[int]]]:
    """Heads that are the same in all their numbers, as in layers that share their weights, once; and where else."""
    first: dict[HeadRow, HeadRow] = {}
    others: dict[HeadRow, list[int]] = {}
    for row in rows:
        kept = first.setdefault(replace(row, layer=0), row)
        others.setdefault(kept, []).extend([] if kept is row else [row.layer])
    return list(others), others


def _shared(finding: Finding, layers: list[int]) -> Finding:
    if not layers:
        return finding
    where = f"layer {layers[0]}" if len(layers) == 1 else f"layers {', '.join(map(str, layers))}"
    return replace(finding, sentence=f"{finding.sentence}; the same in {where}")


def _looking(row: HeadRow) -> Finding:
    where = LOOKS[looks(row) or "far"]
    low, high = row.estimated_near_mass_interval or (0.0, 1.0)
    sentence = f"probably looks {where} (estimated near mass {row.estimated_near_mass:.2f}, {low:.2f} to {high:.2f})"
    return Finding(row, sentence)


def summarise(scan: "Scan") -> str:
    """The whole scan as text."""
    lines = [
        f"{scan.source}: {scan.family}, {counted(len(scan.heads), 'head')}, {scan.coverage}",
        *([RANDOM] if is_random(scan.heads) else []),
        *behaviour(scan.heads),
        *(f"{name(finding.row)} {finding.sentence}." for finding in outstanding(scan.heads)),
        f"{THEORY}: {regimes(scan.heads)}",
        *([NORMALISED] if scan.normalised else []),
        *(f"not read: {sentence}" for sentence in scan.refused),
    ]
    return "\n".join(lines)
