"""A scan in plain words: which heads look where, and which stand out."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ..theory.words import LOCALIZED
from .rows import HeadRow

if TYPE_CHECKING:
    from .scan import Scan

# A head stands out when its scale η/λ is this many times the model's median, or that fraction of it.
HOT = 5.0
COLD = 20.0
MOST_OF_A_KIND = 3
LOOKS = {
    "late": "looks at recent tokens",
    "early": "looks at the beginning of the context",
    "middle": "looks at a window in the middle of the context",
    "uniform": "weighs all tokens alike",
    "no-signal": "passes on almost no signal",
    "mixed": "prefers no single stretch of the context",
}


@dataclass(frozen=True)
class Finding:
    """One head and the sentence on it; `healthy` is False where something should be looked into."""

    row: HeadRow
    sentence: str
    healthy: bool


def name(row: HeadRow) -> str:
    """How the tables and sentences call a head."""
    return f"{row.block} {row.layer}.{row.head}"


def regimes(rows: Iterable[HeadRow]) -> str:
    """Counts of regimes, the most frequent first.

    >>> regimes([])
    ''
    """
    counts = Counter(row.regime for row in rows)
    return ", ".join(f"{count} {regime}" for regime, count in counts.most_common())


def outstanding(rows: Sequence[HeadRow]) -> list[Finding]:
    """The heads worth a look: without signal, too hot, without scale, and the most localized ones."""
    scales = {row: row.eta / row.temperature for row in rows}
    usual = median(scales.values())
    found = [_silent(row) for row in rows if row.regime == "no-signal"][:MOST_OF_A_KIND]
    hottest = sorted(rows, key=lambda row: -scales[row])
    found += [_hot(row, scales[row] / usual) for row in hottest if scales[row] > HOT * usual > 0][:MOST_OF_A_KIND]
    found += [_cold(row) for row in reversed(hottest) if scales[row] * COLD < usual][:MOST_OF_A_KIND]
    sharpest = sorted(rows, key=lambda row: -abs(row.xi))
    local = [row for row in sharpest if row.regime in LOCALIZED]
    found += [_local(row) for row in local[:MOST_OF_A_KIND]]
    return list({finding.row: finding for finding in reversed(found)}.values())[::-1]


def _silent(row: HeadRow) -> Finding:
    sentence = (
        f"{LOOKS['no-signal']}: η/λ = {row.eta / row.temperature:.3g} is so large that its softmax saturates on one "
        "token; shrink its spectrum (LocAteR) or clip its logits (QK-Clip)"
    )
    return Finding(row, sentence, healthy=False)


def _hot(row: HeadRow, ratio: float) -> Finding:
    sentence = (
        f"has {ratio:.1f} times the model's usual scale (η/λ = {row.eta / row.temperature:.3g}): its logits run hot, "
        "the way to entropy collapse"
    )
    return Finding(row, sentence, healthy=False)


def _cold(row: HeadRow) -> Finding:
    sentence = (
        f"hardly tells tokens apart (η/λ = {row.eta / row.temperature:.2g}): unused, or on the way to rank collapse"
    )
    return Finding(row, sentence, healthy=False)


def _local(row: HeadRow) -> Finding:
    share = 1 - row.localisation
    sentence = (
        f"{LOOKS[row.regime]}, about {share:.0%} of it (ξ = {row.xi:.2f}, tr W/λ = {row.trace / row.temperature:.3g})"
    )
    return Finding(row, sentence, healthy=True)


def summarise(scan: "Scan") -> str:
    """The whole scan as text."""
    lines = [
        f"{scan.source}: {scan.family}, {len(scan.heads)} heads, {scan.coverage}",
        f"regimes: {regimes(scan.heads)}",
        *(f"{name(finding.row)} {finding.sentence}." for finding in outstanding(scan.heads)),
        *(f"not read: {sentence}" for sentence in scan.refused),
    ]
    return "\n".join(lines)
