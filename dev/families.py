"""Write src/locater/models/families.json, for the wheel, from docs/families_table.md: `python dev/families.py`."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE, KEPT = ROOT / "docs" / "families_table.md", ROOT / "src" / "locater" / "models" / "families.json"


def document() -> dict:
    """The rows of the table, with the version of transformers that they were proven with."""
    text = TABLE.read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    families = [
        {"model_type": name, "how": how.partition(" ")[0], "inputs": inputs.replace(" ", "").split(","), "row": row}
        for name, how, inputs, row in rows
    ]
    for family in families:
        family["inputs"] = [name for name in family["inputs"] if name]
    version = re.search(r"with transformers (\S+):", text)
    assert version, "the table names its version"
    return {"schema": "locater.families/1", "transformers": version[1], "families": families}


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(family, ensure_ascii=False) for family in document()["families"])
    head = {name: value for name, value in document().items() if name != "families"}
    KEPT.write_text(f'{json.dumps(head)[:-1]}, "families": [\n{lines}\n]}}\n', encoding="utf-8")
