"""`docs/studies.md` from kept rows: question, answer, figure, command, budget, and what would change our mind.

`make studies` writes it, by runs/studies.py.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..records import Json, write
from .study import STUDIES, document
from .sweep.folder import Row

HEAD = """# Studies

Every answer below is written by code from the rows in [runs/studies](../runs/studies), and `make studies` writes this
page anew. An interval is one of 95 %. Differences are paired by seed; fewer than three seeds make no claim. Spearman's
correlations are over the points of a grid, which we chose: they say how the plane looks, not how models are distributed
over it. `locater study NAME --quick` takes minutes; without `--quick` it is the full grid, which may be stopped.

"""
NOTHING = {"rows": [], "num_points": 0, "quick": False}
SWEEPS = """## Sweeps

```console
$ locater sweep --grid "strength=0,1e-3,1e-2 seed=0,1,2 steps=500 data=notes/" --out sweep --jobs 2
$ locater sweep --resume sweep            # after a stop, a kill, or a loss of power
$ locater runs sweep/runs --against strength=0
$ locater sweep grid.yaml --out sweep --emit slurm && sbatch sweep/array.sh
```

A file has `preset` and `grid`, a list of values for each option. Every point has a row in `rows/`, written whole; what
failed is a row too, and `--retry` measures it again. Workers share nothing but the folder: one that dies is replaced,
and its run goes on from its last checkpoint. Not there yet: Ray.
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
    """What the kept rows say, study by study."""
    found = {}
    for name in STUDIES:
        path = folder / f"{name}.json"
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else NOTHING
        rows: Sequence[Row] = kept["rows"]
        found[name] = document(name, rows, num_points=kept["num_points"]) | {"quick": kept["quick"]}
    return found


def page(folder: Path, *, pictures: str) -> str:
    """The whole page."""
    return HEAD + "".join(_section(name, found, pictures) for name, found in documents(folder).items()) + SWEEPS


def _section(name: str, found: Json, pictures: str) -> str:
    command = f"locater study {name}"
    small = ["- A miniature (`--quick`): small models and few steps, which say little of larger and longer ones."]
    answer = [f"- {said}" for said in found["answer"]]
    lines = [f"## `{name}`", "", f"**{found['question']}**", "", *(small if found["quick"] else []), *answer, ""]
    if found["rows"]:
        lines += [f"![{name}]({pictures}/{name}.png)", ""]
    made = f"`{command} --quick`; the full grid, `{command}`, is open" if found["quick"] else f"`{command}`"
    made = f"nothing kept yet; open, with `{command}`" if not found["rows"] else made
    lines += [f"Rows: {made}. Budget: {found['budget']}. What would change our mind: {found['doubt']}", "", ""]
    return "\n".join(lines)
