"""A config as a file that `--config` reads: YAML or JSON, in groups or flat, with all fields or some."""

import difflib
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import yaml

from locater.documents import read_json, read_yaml
from locater.errors import BadArguments, refusal, within
from locater.records import Json

from .checksums import SEAL
from .config import GROUPS, PRESETS, Config
from .methods import written

HEADING = "# locater train --config FILE reads this; what is left out is the preset's, and flags go before the file.\n"
FIELDS = {one.name: one for kind in GROUPS.values() for one in fields(kind) if one.init}


def to_yaml(config: Config) -> str:
    """Every field, in its group; `read_file` gives the same config."""
    groups = {group: {one.name: getattr(getattr(config, group), one.name) for one in _own(group)} for group in GROUPS}
    return HEADING + yaml.safe_dump({"preset": config.preset, **groups}, sort_keys=False, allow_unicode=True)


def _own(group: str) -> list[Any]:
    return [one for one in fields(GROUPS[group]) if one.init]


def read_file(path: Path) -> tuple[str | None, Json]:
    """The preset that a file names, if any, and its fields; refuses names that no option has."""
    with within(str(path)):
        document = dict(_document(path))
        preset = document.pop("preset", None)
        document.pop(SEAL, None)  # a run's own config may be changed for another run
        if preset is not None and preset not in PRESETS:
            raise refusal(f"a preset among {', '.join(PRESETS)}", repr(preset))
        found: Json = {}
        for name, value in document.items():
            values = value if name in GROUPS and isinstance(value, dict) else {name: value}
            found |= {_known(str(one)): each for one, each in values.items() if one != "model_type"}
        return preset, {name: _typed(name, value) for name, value in found.items()}


def _document(path: Path) -> Json:
    document = read_json(path) if path.suffix == ".json" else read_yaml(path)
    if not isinstance(document, dict):
        raise refusal("names of options with their values", f"{document!r:.60}", "see locater train --print-config")
    return document


def _known(name: str) -> str:
    """The field of that name, spelled as a flag or as in Python."""
    field = name.replace("-", "_")
    if field in FIELDS:
        return field
    near = difflib.get_close_matches(field, FIELDS, n=1)
    meant = f"did you mean {near[0]}?" if near else "see locater train --help-all"
    raise BadArguments(f"locater train has no option called {name!r}: {meant}")


def _typed(name: str, value: Any) -> Any:
    """As the field wants it: YAML takes 1e-3 for a word and a mean of 3.5 for a number; options may be a mapping."""
    if name == "stabiliser_options" and isinstance(value, dict):
        return written(value)
    kind = FIELDS[name].type
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is str and is_number:
        return str(value)
    if (kind is float or float in get_args(kind)) and (is_number or isinstance(value, str)):
        try:
            return float(value)
        except ValueError:
            return value
    return value
