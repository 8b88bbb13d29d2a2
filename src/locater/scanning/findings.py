"""A scan in plain words, of two kinds that are never mixed.

Spectra and regimes are of the random-walk theory and say so. What a head does is said as measured on random ids where
it was, else from the estimate of its behaviour only, with how often such words were right (docs/evidence.md).
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from ..errors import counted
from ..theory.words import MOSTLY_FAR, MOSTLY_NEAR
from .rows import HeadRow

if TYPE_CHECKING:
    from .scan import Scan

# A head stands out when its scale η/λ is this many times the model's median, or that fraction of it.
HOT = 5.0
COLD = 20.0
MOST_OF_A_KIND = 3
LOOKS = {"near": "mostly at near tokens", "far": "mostly beyond the nearest tokens"}
THEORY = "in the random-walk theory"
NORMALISED = (
    "queries or keys are normalised: tr W, η, ξ are of the form behind the norm, whatever the scale of the weights "
    "(--raw: as stored)"
)


@dataclass(frozen=True)
class Finding:
    """One head and the sentence on it; `healthy` is False where something should be looked into."""

    row: HeadRow
    sentence: str
    healthy: bool


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
    """Near mass as measured on random ids; else as estimated, where a model with such positions was measured."""
    if row.probed_near_mass_beyond_first is not None:
        return row.probed_near_mass_beyond_first
    return None if row.estimated_near_mass_interval is None else row.estimated_near_mass


def behaviour(rows: Iterable[HeadRow]) -> list[str]:
    """Count the heads that look near and far: those that were measured, and those that could only be estimated.

    >>> behaviour([])
    []
    """
    known = [row for row in rows if _near_mass(row) is not None]
    measured = [row for row in known if row.probed_near_mass_beyond_first is not None]
    estimated = [row for row in known if row.probed_near_mass_beyond_first is None]
    kinds = {"measured on random ids": measured, "estimated from the weights": estimated}
    return [f"{kind}: {_where(of_kind)}" for kind, of_kind in kinds.items() if of_kind]


def _where(rows: Sequence[HeadRow]) -> str:
    counts = Counter(filter(None, map(looks, rows)))
    verb = {1: "looks"}
    parts = [f"{counts[word]} {verb.get(counts[word], 'look')} {told}" for word, told in LOOKS.items() if counts[word]]
    unsure = len(rows) - sum(counts.values())
    return ", ".join([*parts, *([f"{unsure} either way"] if unsure else [])])


def outstanding(rows: Sequence[HeadRow]) -> list[Finding]:
    """The heads worth a look: those that the theory or their scale sets apart, and the surest to be near or far."""
    rows, others = _once(rows)
    scales = {row: row.eta / row.temperature for row in rows}
    usual = median(scales.values())
    kinds = [[_silent(row) for row in rows if row.regime == "no-signal"]]
    hottest = sorted(rows, key=lambda row: -scales[row])
    kinds.append([_hot(row, scales[row] / usual) for row in hottest if scales[row] > HOT * usual > 0])
    kinds.append([_cold(row) for row in reversed(hottest) if scales[row] * COLD < usual])
    surest = sorted((row for row in rows if looks(row)), key=lambda row: -(_near_mass(row) or 0))
    kinds.append([_looking(row) for row in surest if looks(row) == "near"])
    kinds.append([_looking(row) for row in reversed(surest) if looks(row) == "far"])
    found = [finding for kind in kinds for finding in kind[:MOST_OF_A_KIND]]
    once = {finding.row: _shared(finding, others[finding.row]) for finding in reversed(found)}
    return list(once.values())[::-1]


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


def _silent(row: HeadRow) -> Finding:
    sentence = (
        f"passes on almost no signal {THEORY} (η/λ = {row.eta / row.temperature:.3g}): if its logits are as large in "
        "training (`AttentionMonitor` says so), shrink its spectrum (LocAteR) or clip its logits (QK-Clip)"
    )
    return Finding(row, sentence, healthy=False)


def _hot(row: HeadRow, ratio: float) -> Finding:
    scale = f"η/λ = {row.eta / row.temperature:.3g}"
    sentence = f"has {ratio:.1f} times the model's usual scale ({scale}): {THEORY} the way to entropy collapse"
    return Finding(row, sentence, healthy=False)


def _cold(row: HeadRow) -> Finding:
    scale = f"η/λ = {row.eta / row.temperature:.2g}"
    sentence = f"has a {COLD:.0f}th of the model's usual scale or less ({scale}): {THEORY} the way to rank collapse"
    return Finding(row, sentence, healthy=False)


def _looking(row: HeadRow) -> Finding:
    where = LOOKS[looks(row) or "far"]
    if row.probed_near_mass_beyond_first is not None:
        sentence = f"looks {where} on random ids (near mass {row.probed_near_mass_beyond_first:.2f})"
        return Finding(row, sentence, healthy=True)
    low, high = row.estimated_near_mass_interval or (0.0, 1.0)
    sentence = f"probably looks {where} (estimated near mass {row.estimated_near_mass:.2f}, {low:.2f} to {high:.2f})"
    return Finding(row, sentence, healthy=True)


def summarise(scan: "Scan") -> str:
    """The whole scan as text."""
    lines = [
        f"{scan.source}: {scan.family}, {counted(len(scan.heads), 'head')}, {scan.coverage}",
        *([NORMALISED] if scan.normalised else []),
        f"regimes {THEORY}: {regimes(scan.heads)}",
        *behaviour(scan.heads),
        *(f"{name(finding.row)} {finding.sentence}." for finding in outstanding(scan.heads)),
        *(f"not read: {sentence}" for sentence in scan.refused),
    ]
    return "\n".join(lines)
