"""Write src/locater/models/known.json: what transformers' own code stores, and says in configs, for types of tables.

    PYTHONPATH=src:tests python dev/known.py [FAMILY ...]       all of them take some ten minutes

For each family of the tables, tiny models are built of every class of its types, in the settings of tests/family_cases,
and with each switch of the config turned. Kept are the modules that no row reads in any of them (a tree of the parts of
their names, numbers as N), the entries of the config that leave the attention as its row has it when they are changed,
and the entries that some row asks for.
"""

import itertools
import json
import re
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

import twins
from family_cases import CASES
from locater import checkpoints
from locater.models import Config, coverage, open_model
from locater.models.neighbours import MASK, Surroundings, outer_modules, template
from locater.models.proof import twin
from locater.models.registry import FAMILIES
from locater.models.schema import Family
from locater.models.tensors import Held
from locater_lab.train.model import LanguageModel
from locater_lab.train.shape import Shape

KEPT = Path(__file__).parents[1] / "src" / "locater" / "models" / "known.json"
TENSORS = ("weight", "bias", "gamma", "beta")  # what one module has beside each other
ALIKE = {"stablelm-epoch": "stablelm"}  # families that transformers has under another name


def family_of(model_type: str | None, name: str) -> Family:
    """The family of a declared type, or the one of this name."""
    found = [family for family in FAMILIES if model_type in family.model_types]
    return found[0] if found else next(family for family in FAMILIES if family.name == name)


class Names:
    """The modules of one family by their tensors, those that rows read always and those that they do not."""

    def __init__(self) -> None:
        self.unread: set[str] = set()
        self.read: set[str] = set()
        self.ignored: set[str] = set()  # patterns of further names that transformers passes over
        self.entries: set[str] = set()  # of the config's class
        self.asked: set[str] = set()  # paths of entries

    def add(self, family: Family, config: dict[str, Any], tensors: Any, leaves: Iterable[str] = ()) -> None:
        """One model: `leaves` are its modules that hold no others."""
        opened = open_model(Config(config), tensors, family=family)
        self.asked |= coverage.asked_by_rows(family, Config(config), opened.stacks)
        around, leaves = Surroundings.of(opened.modules()), set(leaves)
        prefixes = {*around.prefixes, *(prefix for row in family.attention for prefix in row.prefixes or ())}
        here: dict[bool, set[str]] = {True: set(), False: set()}
        for name in tensors.names:
            if (inner := around.inside(name)) and MASK.search(inner) and name not in around.read:
                continue  # known by its shape
            module, _, kind = name.partition(".parametrizations.")[0].rpartition(".")
            module = f"{module}.{kind}" if ".parametrizations." in name else module
            whole = name if module not in leaves and kind not in TENSORS else module
            here[name in around.read].add(template(whole, prefixes))
        self.unread |= here[False]
        inside = {template(name, prefixes) for name in around.modules - around.named}
        self.read |= {name for name in here[True] - here[False] if not inside.isdisjoint(outer_modules(name))}

    def patterns(self) -> list[str]:
        """What transformers passes over; not what a class passes over of another class's own parts."""
        own = self.unread | self.read
        further = (pattern for pattern in self.ignored if not MASK.search(pattern))
        return sorted(pattern for pattern in further if not any(re.search(pattern, name) for name in own))

    def tree(self) -> dict[str, Any]:
        """Parts of names within each other; of a module that holds others its own tensors."""
        tree: dict[str, Any] = {}
        unread = self.unread - self.read
        holding = {outer for name in unread for outer in outer_modules(name)}
        for name in sorted(unread):
            for whole in [f"{name}.weight", f"{name}.bias"] if name in holding else [name]:
                place = tree
                for part in whole.split("."):
                    place = place.setdefault(part, {})
        return tree


def settings(config: Any) -> dict[str, Any]:
    return json.loads(json.dumps(config.to_dict(), default=str))


def switched(config: Any) -> Iterator[Any]:
    """The config, and with each of its switches turned."""
    values = settings(config)
    yield config
    for key, value in values.items():
        if isinstance(value, bool) or value == []:  # a switch, or a list of layers that are otherwise
            with suppress(Exception):  # its own check
                yield type(config).from_dict(values | {key: [0] if value == [] else not value})


def on_meta(names: Names, family: Family, config: Any, model_class: Any) -> None:
    with suppress(Exception), torch.device("meta"):  # whatever transformers raises: it has no such model
        model = model_class._from_config(type(config).from_dict(settings(config)), attn_implementation="eager")
        tensors = dict(model.state_dict()) | dict(model.named_buffers())
        modules = dict(model.named_modules())
        leaves = (name for name, module in modules.items() if name and not any(module.children()))
        names.add(family, settings(config), Held(tensors), leaves)


def of_transformers(names: Names, family: Family, case: Any) -> None:
    """Every class for the case's config, and its own class with each switch turned."""
    own, model_class = getattr(transformers, case.config)(**deepcopy(case.settings)), getattr(transformers, case.model)
    for other in dict.fromkeys(twin.model_classes(own)):
        on_meta(names, family, own, other)
        names.ignored |= set(getattr(other, "_keys_to_ignore_on_load_unexpected", None) or ())
    for config in switched(own):
        on_meta(names, family, config, model_class)
    names.entries |= {*map(str, twin.known_entries(own.model_type, settings(own)))} - {*settings(own)["label2id"]}


def of_locater(names: Names) -> None:
    """The models that `locater train` makes."""
    for positions, norm_first in itertools.product(("learned", "sinusoidal", "rotary"), (True, False)):
        shape = Shape(vocab_size=9, d_model=16, num_heads=2, num_layers=2, positions=positions, norm_first=norm_first)
        names.add(family_of("locater", ""), asdict(shape), Held(dict(LanguageModel(shape).state_dict())))
        names.entries |= asdict(shape).keys()


def all_names(wanted: Collection[str]) -> dict[str, Names]:
    """Of the wanted families, by default of all."""
    found: dict[str, Names] = defaultdict(Names)
    seen = set()
    of_locater(found["locater"])
    for case in CASES:
        if wanted and is_twin(case) and family_of(kind_of(case), "").name not in wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            case.save(case.build(), Path(folder))
            with checkpoints.open(Path(folder)) as stored:
                family = family_of(stored.config.get("model_type"), case.name.partition("-")[0])
                names = found[family.name]
                names.add(family, dict(stored.config), stored)
                names.entries |= stored.config.keys()  # tests/models/test_families.py holds the case to its model
        if is_twin(case) and case.config not in seen:
            seen.add(case.config)
            of_transformers(names, family, case)
    return {name: one for name, one in found.items() if not wanted or name in wanted}


def is_twin(case: Any) -> bool:
    """Tell whether transformers has the model; the others are doubles of files."""
    return hasattr(case, "config")


def kind_of(case: Any) -> str:
    return getattr(transformers, case.config).model_type


def harmless(name: str, names: Names) -> Iterator[str]:
    """Entries with a telling name that no row asks for, and that leave the attention as it is when they are changed."""
    for case in {case.config: case for case in reversed(CASES) if is_twin(case)}.values():
        values = settings(getattr(transformers, case.config)(**deepcopy(case.settings)))
        paths = twins.flat(values) if family_of(kind_of(case), "").name == name else {}
        further = [path for path in paths if coverage.tells(path.rpartition(".")[2]) and path not in names.asked]
        yield from (path.rpartition(".")[2] for path in further if _is_harmless(case, values, path))


def _is_harmless(case: Any, values: dict[str, Any], path: str) -> bool:
    value = twins.flat(values).get(path)
    others = [other for other in twins.unusual(path, [] if value is None else [value])[2:] if other != value][:2]
    edits = (twins.changed(values, path, other) for other in others)
    verdicts = [twins.judge(case, edited) for edited in edits if edited is not None]
    kinds = {verdict.kind for verdict in verdicts} - {"unbuildable"}
    print(case.name, path, value, [(verdict.kind, verdict.words[:60]) for verdict in verdicts], flush=True)
    return kinds == {"right"}


def write(families: dict[str, dict[str, Any]], asked: Iterable[str]) -> None:
    """What every config may hold, or most do, stands once, with what generates text."""
    counts = Counter(entry for one in families.values() for entry in one["entries"])
    common = {*transformers.PretrainedConfig().to_dict(), *transformers.GenerationConfig().to_dict()}
    common |= {entry for entry, count in counts.items() if count > len(families) / 2 and entry not in asked}
    for one in families.values():
        one["entries"] = sorted({*one["entries"]} - common)
    lines = (f"{json.dumps(name)}: {json.dumps(one, separators=(',', ':'))}" for name, one in sorted(families.items()))
    heads = (f'"{name}": {json.dumps(sorted(one))}' for name, one in (("asked", asked), ("common", common)))
    rows = ",\n".join(lines)
    KEPT.write_text(f'{{{", ".join(heads)}, "families": {{\n{rows}\n}}}}\n', encoding="utf-8")


def main() -> None:
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if sys.argv[1:] else {"asked": [], "families": {}}
    found = all_names(sys.argv[1:])
    paths = {path for names in found.values() for path in names.asked if "rope_" not in path}
    families = kept["families"] | {
        name: {"tensors": one.tree(), "ignored": one.patterns(), "entries": sorted(one.entries)}
        for name, one in found.items()
    }
    for alias, name in ALIKE.items():
        families[alias] = families[name]
    asked = {*kept["asked"], *(path.rpartition(".")[2] for path in paths)}
    for name, one in found.items():
        families[name]["entries"] = sorted(entry for entry in one.entries if not coverage.tells(entry))
    write(families, asked)
    for name in found:
        families[name]["entries"] = sorted({*families[name]["entries"], *harmless(name, found[name])})
    write(families, asked)


if __name__ == "__main__":
    main()
