"""`docs/studies.md` from kept rows: question, answer, figure, command, budget, and what would change our mind.

`make studies` writes it, by runs/studies.py.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from locater.records import Json, read_json, write

from .statistics import together
from .study import STUDIES, document, flat
from .sweep.folder import Row

HEAD = """# Studies

What readers of the paper are left asking, Q1 to Q10, and some more: a question, its answer, a figure, a small table.
What else was measured is folded. Code writes every answer from the rows in [runs/studies](../runs/studies); `make
studies` writes this page anew. Of Q7, layers that are not trained have [a theory](theory.md#depth).

"""
BOX = '!!! note "Which LocAteR should I use today?"\n\n'  # and what runs/settled.py makes of the long runs
READ = """

<details markdown="1">
<summary>How to read it</summary>

- Floors stand under every table of trained models: the losses of a unigram and of a bigram table of the whole training
  text, of a model without context and of one with uniform attention. Where `none` is not at least 0.05 nats below the
  bigram table and below uniform attention, attention does not matter yet, and nothing is concluded.
- An interval is one of 95 %. "No difference seen" says that it holds zero, not that there is none.
- Differences are paired by seed, and fewer than three seeds make no claim. Intervals are never adjusted; where several
  are compared, p after Holm's correction has its own column, and a verdict needs both. Seeds that agree exactly have no
  interval.
- Holm's correction is over the comparisons of one quantity (or one rate) in one study, not over the page.
- A relation over arms has as many points as arms, whatever the seeds. Of 7 arms or fewer p is that of all orders; of 4
  it is never small.
- Numbers over the points of a grid, which we chose, are effect sizes without interval or verdict: they say how the
  plane looks, not how models are distributed over it. Seeds share the grid, so they do not count as more points.
- Runs that two studies share are said to be shared: they are one result, told twice.
- The training studies are of one small setting, the least in which attention matters (`python runs/setting.py`).
- `--quick` is a miniature of under two minutes; what each took is said with its budget.

</details>

"""
# Q2 is of whole models, and has a page of its own.
REAL_DATA = """## `real-data`

**Q2. What of the random-walk prediction holds on text, and what does each measured moment add?**

Of the random walk alone little holds: ξ runs against the measured near mass in {against} of {rotary} rotary decoders,
and *late*, said of {late} of their heads, is near in {right}. Measured tokens with positions, sinks and lags rank the
heads of each of the {models} checkpoints by near mass with {low:.3f} to {high:.3f} ([each term](prediction.md)).

Its rows are of {models} real checkpoints with {heads:,} heads in all, and stand with their tables in
[evidence.md](evidence.md). Rows: `locater study real-data --model PATH …`.

"""
BEFORE_REAL_DATA = "mechanism"
TIMES = "times.json"
FEW_ROWS, MOST_ROWS = 6, 30  # of a table, open and folded; the rest is in the rows
NOTHING = {"rows": [], "num_points": 0, "quick": False}
SWEEPS = """## Sweeps

```console
$ locater sweep --grid "strength=0,1e-3,1e-2 seed=0,1,2 steps=500 data=notes/" --out sweep --jobs 2
$ locater sweep --resume sweep            # after a stop, a kill, or a loss of power
$ locater runs sweep/runs --against strength=0
$ locater sweep grid.yaml --out sweep --emit slurm && sbatch sweep/array.sh
$ locater sweep grid.yaml --out sweep --on ray --jobs 8            # or --on ray://HOST:6379, a cluster's head
```

A file has `preset` and `grid`, a list of values for each option. Every point has a row in `rows/`, written whole; what
failed is a row too, and `--retry` measures it again. Workers share nothing but the folder: one that dies is replaced,
and its run goes on from its last checkpoint. On Ray every point is a task of one processor, on nodes that share the
folder; `--asha` ends trials early that are behind the others, whose rows then say `"is_done": false`. Rows are the same
whatever the engine.
"""


def keep_rows(kind: str, rows: Sequence[Row], path: Path, *, num_points: int, quick: bool) -> None:
    """Rows in one file, five digits of each number."""
    kept = {"kind": kind, "quick": quick, "num_points": num_points, "rows": _rounded(list(rows))}
    write(path, lambda temporary: temporary.write_text(json.dumps(kept, ensure_ascii=False) + "\n", encoding="utf-8"))


def _rounded(value: object) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


def documents(folder: Path) -> dict[str, Json]:
    """Conclude each study from its kept rows."""
    found = {}
    for name in STUDIES:
        path = folder / f"{name}.json"
        kept = read_json(path) if path.exists() else NOTHING
        rows: Sequence[Row] = kept["rows"]
        also = {"quick": kept["quick"], "note": kept.get("note", "")}
        found[name] = document(name, rows, num_points=kept["num_points"]) | also
    return found


def study_page(folder: Path, *, pictures: str, advice: str) -> str:
    """The whole page; `advice` is what stands in its box."""
    times, parts, shared = quick_times(folder), [HEAD, BOX, advice, READ], shared_runs(folder)
    for name, found in documents(folder).items():
        parts.append(_section(name, found | {"time": times.get(name), "shared": shared.get(name, {})}, pictures))
        parts += [_real_data(folder)] if name == BEFORE_REAL_DATA else []
    return "".join(parts) + SWEEPS


FINGERPRINT = ("seed", "best_loss", "entropy", "near_mass", "largest_logit")


def shared_runs(folder: Path) -> dict[str, dict[str, int]]:
    """Count the runs that studies have in common: all numbers of FINGERPRINT are the same."""
    runs: dict[str, set[tuple[float, ...]]] = {}
    for name in STUDIES:
        path = folder / f"{name}.json"
        rows = flat(read_json(path)["rows"]) if path.exists() else []
        runs[name] = {tuple(row[part] for part in FINGERPRINT) for row in rows if all(p in row for p in FINGERPRINT)}
    return {
        name: {other: len(some & runs[other]) for other in STUDIES if other != name and some & runs[other]}
        for name, some in runs.items()
    }


def quick_times(folder: Path) -> Json:
    """Seconds of `--quick`, study by study, as far as they were measured."""
    path = folder / TIMES
    return read_json(path) if path.exists() else {}


def _real_data(folder: Path) -> str:
    path = folder / "real-data.json"
    models = read_json(path)["models"] if path.exists() else []
    if not models:
        return ""
    rotary = [model for model in models if model["kind"] == "rotary decoders"]
    ranks = [model["prediction"]["near_mass_beyond_first"] for model in models]
    right, late = (sum(model["regimes"]["late"][place] for model in rotary) for place in (0, 1))
    against = sum(model["theory"]["xi"] < 0 for model in rotary)
    numbers = dict(against=against, rotary=len(rotary), right=right, late=late, low=min(ranks), high=max(ranks))
    return REAL_DATA.format(models=len(models), heads=sum(model["heads"] for model in models), **numbers)


def _section(name: str, found: Json, pictures: str) -> str:
    """Question, answer, figure and a small table; all else is folded."""
    number = f"{found['number']}. " if found["number"] else ""
    lines = [f"## `{name}`", "", f"**{number}{found['question']}**", "", " ".join(found["answer"]), ""]
    lines += [f"Floors: {'; '.join(found['floors'])}.", ""] if found["floors"] else []
    if found["rows"]:
        lines += [f"![{name}]({pictures}/{name}.png)", ""]
    rows = _ordered(found["behind"])
    lines += _table(found["behind"], rows[:FEW_ROWS])
    folded = [f"Setting: {found['setting']}.", ""] if found["setting"] else []
    shared = [f"{count} of its runs with `{other}`" for other, count in found["shared"].items()]
    folded += [f"Shares {together(shared)}.", ""] if shared else []
    if len(rows) > FEW_ROWS:
        cut = f"{MOST_ROWS} of {len(rows)} comparisons" if len(rows) > MOST_ROWS else "All comparisons"
        folded += [f"{cut}, those with a verdict first:", "", *_table(found["behind"], rows[:MOST_ROWS])]
    folded += [_made(name, found), ""]
    return "\n".join([*lines, *_fold("How it was measured, and all comparisons", folded), "", ""])


def _fold(title: str, lines: Sequence[str]) -> list[str]:
    return ['<details markdown="1">', f"<summary>{title}</summary>", "", *lines, "</details>"]


def _made(name: str, found: Json) -> str:
    command = f"locater study {name}"
    made = f"`{command} --quick`; the full grid, `{command}`, is open" if found["quick"] else f"`{command}`"
    made = made if found["rows"] or found["floors"] else f"nothing kept yet; open, with `{command}`"
    time = found["time"]
    quick = f"; `--quick` took {time['processor_seconds']:.0f} s of one core" if time else ""
    made += f" ({found['note']})" if found["note"] else ""
    return f"Rows: {made}. Budget: {found['budget']}{quick}. What would change our mind: {found['doubt']}"


def _ordered(table: Json | None) -> list[list[str]]:
    """Order the rows of a table: those with a verdict first."""
    rows = list(table["rows"]) if table else []
    return sorted(rows, key=lambda row: "seen" in row[-1] or "too few" in row[-1])


def _table(table: Json | None, rows: Sequence[Sequence[str]]) -> list[str]:
    if table is None or not rows:
        return []
    parts = (table["columns"], ["---"] * len(table["columns"]), *rows)
    body = [[str(cell).replace("|", "\\|") for cell in row] for row in parts]
    return [*("| " + " | ".join(row) + " |" for row in body), ""]
