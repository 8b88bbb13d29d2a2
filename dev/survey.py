"""Prove forty fixed model types again and hold them against docs/families_table.md; all of them with `--all`.

    python dev/survey.py         a few minutes: one type of nearly every kind of row, some refused, two of the tables
    python dev/survey.py --all   every type of the installed transformers, which takes an hour or two

The table itself is written by `locater families --update --markdown docs/families_table.md`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "families_table.md"
PROVEN = (
    "afmoe", "apertus", "arcee", "beit", "big_bird", "biogpt", "clipseg_vision_model", "cohere2_moe", "cwm",
    "data2vec-audio", "esmc", "gemma4_text", "git", "glm4", "glm_moe_dsa", "gpt_oss", "granitemoeshared",
    "hunyuan_v1_dense", "hy_v3", "imagegpt", "llama4_text", "llava", "mvp", "nanochat", "persimmon", "phimoe", "pixio",
    "qwen2_audio", "qwen3_5_moe_text", "seamless_m4t", "switch_transformers", "t5gemma",
)  # fmt: skip
REFUSED = "align", "blip_2_qformer", "convbert", "gemma4_assistant", "mamba", "rwkv"
BY_TABLE = "RefinedWeb", "llama"


def kept() -> dict[str, tuple[str, str]]:
    """Read the table: how each type is known, and its row; of the refused no reason, which may change."""
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {name: _known(how.split(" (")[0], row) for name, how, _, row in cells}


def survey(types: list[str]) -> dict[str, tuple[str, str]]:
    """Prove the types, in a cache of their own, with this tree's source."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "families.json"
        command = [sys.executable, "-m", "locater.cli", "families", *types, "--update", "--json", str(path)]
        settings = {"PYTHONPATH": str(ROOT / "src"), "LOCATER_CACHE": folder, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=os.environ | settings, stdout=subprocess.DEVNULL)
        entries = json.loads(path.read_text())["families"]
    found = {}
    for entry in entries:
        left_out = f"; PARTIAL: {', '.join(entry['notes'])} left out" if entry["notes"] else ""
        found[entry["model_type"]] = _known(entry["how"], (entry["row"] + left_out).replace("|", "/"))
    return found


def _known(how: str, row: str) -> tuple[str, str]:
    return how, "" if how == "refused" else row


def main() -> int:
    before = kept()
    everything = "--all" in sys.argv[1:]
    after = survey([] if everything else sorted((*PROVEN, *REFUSED, *BY_TABLE)))
    expected = before if everything else {name: before[name] for name in after}
    changed = [name for name in sorted({*expected, *after}) if expected.get(name) != after.get(name)]
    for name in changed:
        print(f"{name}: {expected.get(name, 'not in the table')} -> {after.get(name, 'gone')}")
    numbers = {how: sum(known[0] == how for known in after.values()) for how in ("table", "proven", "refused")}
    print(f"{len(after)} types: {numbers}; {len(changed)} other than in {TABLE.relative_to(ROOT)}")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main())
