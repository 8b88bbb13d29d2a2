"""A config as a file that `--config` reads: YAML or JSON, in groups or flat, with all fields or some."""

import difflib
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from locater.errors import BadArguments, refusal, within
from locater.records import Json, read_json, read_yaml

from ..fields import choices_of
from .checksums import SEAL
from .config import GONE, GROUPS, PRESETS, Config
from .methods import METHODS, WORDS, written

HEADING = "# locater train --config FILE reads this; what is left out is the preset's, --set overrides the file.\n"
FIELDS = {one.name: one for kind in GROUPS.values() for one in fields(kind) if one.init}


def to_yaml(config: Config) -> str:
    """Every field in its group, with its help; `read_file` gives the same config."""
    lines = [HEADING, f"preset: {config.preset}\n"]
    for group in GROUPS:
        lines.append(f"{group}:\n")
        for one in _own(group):
            value = getattr(getattr(config, group), one.name)
            style = '"' if isinstance(value, str) and not value.isprintable() else None  # on one line in any case
            text = yaml.safe_dump({one.name: value}, allow_unicode=True, width=math.inf, default_style=style).rstrip()
            choices = () if get_origin(one.type) is not Literal else choices_of(one.type)
            among = f" One of: {', '.join(choices)}." if choices else ""
            lines.append(f"  {text}  # {one.metadata['help']}{among}\n")
    return "".join(lines) + _methods()


def _methods() -> str:
    """Every stabiliser with its options, as comments."""
    lines = ["# Stabilisers, and their stabiliser_options (a=1,b=2):\n"]
    for name, method in METHODS.items():
        lines.append(f"#   {name}: {method.help}\n")
        defaults = method.defaults()
        for option, setting in method.settings.items():
            default = "must be given" if defaults[option] is None else defaults[option]
            lines.append(f"#     {option}: {setting.help} [{default}]\n")
    return "".join(lines)


def read_pairs(pairs: Sequence[str]) -> Json:
    """The fields that `NAME=VALUE` pairs set, each in its field's type; a later pair of one name counts."""
    found: Json = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise BadArguments(f"--set expects NAME=VALUE, got {pair!r:.80}")
        field = known_field(name.strip())
        found[field] = _from_text(field, text)
    return found


def _from_text(name: str, text: str) -> Any:
    kind = FIELDS[name].type
    choices = choices_of(kind)
    if text in choices or kind is str:
        return text
    if kind is bool and text.lower() in WORDS:
        return WORDS[text.lower()]
    for number in (one for one in (kind, *get_args(kind)) if one in (int, float)):
        try:
            return number(text)
        except ValueError:
            break
    words = {int: "a whole number", float: "a number", bool: "yes or no"}
    expected = [words[one] for one in (kind, *get_args(kind)) if one in words]
    expected += [f"one of {', '.join(choices)}"] if choices else []
    raise BadArguments(f"{name} expects {' or '.join(expected)}, got {text!r:.80}")


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
            found |= {known_field(str(one)): each for one, each in values.items() if one not in GONE}
        return preset, {name: typed(name, value) for name, value in found.items()}


def _document(path: Path) -> Json:
    document = read_json(path) if path.suffix == ".json" else read_yaml(path)
    if not isinstance(document, dict):
        raise refusal("names of options with their values", f"{document!r:.60}", "see locater train --print-config")
    return document


def known_field(name: str) -> str:
    """The field of that name, spelled as a flag or as in Python."""
    field = name.replace("-", "_")
    if field in FIELDS:
        return field
    near = difflib.get_close_matches(field, FIELDS, n=1)
    meant = f"did you mean {near[0]}?" if near else "see locater train --print-config"
    raise BadArguments(f"locater train has no option called {name!r}: {meant}")


def typed(name: str, value: Any) -> Any:
    """Convert to the field's type: YAML takes 1e-3 for a word, a mean of 3.5 for a number; options may be a mapping."""
    if name == "stabiliser_options" and isinstance(value, dict):
        return written(value)
    kind = FIELDS[known_field(name)].type
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is str and is_number:
        return str(value)
    if (kind is float or float in get_args(kind)) and (is_number or isinstance(value, str)):
        try:
            return float(value)
        except ValueError:
            return value
    return value
