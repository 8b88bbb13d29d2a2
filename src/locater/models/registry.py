"""Find a model's family: by its model type, by a tensor name that only one family has, or in a layout file of the user.

Else explain the refusal, with a layout file to start from.
"""

import re
import reprlib
from collections import defaultdict
from collections.abc import Collection
from dataclasses import MISSING, fields
from os import PathLike
from pathlib import Path
from string import Formatter
from typing import Any

from ..errors import Refusal, missing, refusal, within
from ..head import BLOCKS
from ..records import read_yaml
from .config import Config, ask, resolve
from .neighbours import outer_modules
from .schema import Attention, BucketsAt, Family, LowRankAt, NormAt, RotaryAt
from .tables import encoders, frameworks, gpt, latent, llama, seq2seq, vision

# Parts of names by which people call queries and keys; used to suggest, never to scan.
QUERY_WORDS = ("q_proj", "query", "wq", "to_q", "q_lin", "qkv", "c_attn", "in_proj", "wqkv")
KEY_OF = {"q_proj": "k_proj", "query": "key", "wq": "wk", "to_q": "to_k", "q_lin": "k_lin"}
MOST_PATTERNS = 12
EMPTY = "                 # to be filled in"
OPEN = "TO BE FILLED IN"  # no value of these columns: a layout that still holds it is refused
# What configs of many models call the sizes that a layout asks for.
SIZES = {
    "heads": "num_attention_heads|n_head|n_heads|num_heads|nhead",
    "key_heads": "num_key_value_heads|n_kv_heads|num_kv_heads|num_attention_heads|n_head|n_heads|num_heads|nhead",
    "d_head": "head_dim|d_head|d_kv",
}
# How people call the norm before attention, and those of queries and keys.
NORM = re.compile(r"(^|\.)(ln|norm|\w*(norm|ln)_?1|ln_attn|attn_ln|\w*(input|attn|attention|pre)\w*norm)\.weight$")
QK_NORMS = {side: re.compile(rf"(^|[._])({side}|{side[0]}|qk)_?(norm|ln|layernorm)") for side in ("query", "key")}


def unknown_layout(config: Config, names: Collection[str], differs: str | None = None) -> Refusal:
    """One sentence, the patterns of tensor names, and a layout file to start from.

    `differs`: what keeps it from a family that it resembles.
    """
    patterns = _patterns(names)
    listed = [f"  {pattern}  (× {len(numbers)})" for pattern, numbers in list(patterns.items())[:MOST_PATTERNS]]
    if len(patterns) > MOST_PATTERNS:
        listed.append(f"  … and {len(patterns) - MOST_PATTERNS} more")
    model_type = config.get("model_type")
    named = f"the model type {model_type!r}" if model_type else "no model type"
    listed += ["FILE.yaml, to be completed:", _layout(patterns, config)]
    known = "tensors that no family names" if differs is None else f"tensors that only resemble one: {differs}"
    return Refusal(
        f"expected a model of a known family, got {named} and {len(names)} {known}; describe it "
        "with --layout FILE.yaml\nfound:\n" + "\n".join(listed)
    )


def _patterns(names: Collection[str]) -> dict[str, set[str]]:
    """Names with their first number replaced by {layer}, those that look like queries and keys first."""
    patterns: dict[str, set[str]] = defaultdict(set)
    for name in names:
        pattern, replaced = re.subn(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "{layer}", name, count=1)
        patterns[pattern].add(name if replaced else "")
    return dict(sorted(patterns.items(), key=lambda item: (-_likeness(item[0]), item[0])))


def _likeness(pattern: str) -> int:
    wanted = (*QUERY_WORDS, *KEY_OF.values())
    return 2 * any(word in pattern for word in wanted) + ("attn" in pattern or "attention" in pattern)


def _is_projection(pattern: str) -> bool:
    """A weight that is called as queries are, and is no norm (`q_norm`, `query_layernorm`)."""
    module, _, kind = pattern.rpartition(".")
    last = module.rpartition(".")[2]
    return kind == "weight" and any(word in last for word in QUERY_WORDS) and "norm" not in last and "ln" not in last


def _layout(patterns: dict[str, set[str]], config: Config) -> str:
    """YAML with all that names and config tell; what they do not is left to be filled in."""
    query = next((p for p in patterns if "{layer}" in p and _is_projection(p)), None)
    query = (query or "the.name.of.layer.{layer}.query.weight").removesuffix(".weight")
    word = next((word for word in QUERY_WORDS if word in query), "")
    key = query.replace(word, KEY_OF[word]) if word in KEY_OF else query
    key = key if f"{key}.weight" in patterns else EMPTY
    num_layers = len(patterns.get(f"{query}.weight", ())) or EMPTY
    known = {name: _size(config, keys) for name, keys in SIZES.items()}
    sizes = "".join(f"    {name}: {EMPTY if value is None else value}\n" for name, value in known.items())
    fused = "" if word in KEY_OF else "    fused: qkv            # or grouped\n"
    return (
        "  attention:\n"
        "  - block: decoder          # encoder, decoder, cross or vision\n"
        f"    query: {query}\n    key: {key}\n{fused}"
        f"    layers: {num_layers}\n{sizes}{_open_questions(patterns, query)}    prefixes: ['']\n"
        "    lookahead: 0            # causal; leave out if not"
    )


def _open_questions(patterns: dict[str, set[str]], query: str) -> str:
    """Norms and positions, which neither names nor sizes settle: each must be answered, with null if there is none."""
    block = query.partition("{layer}")[0] + "{layer}."
    inside = [pattern for pattern in patterns if pattern.startswith(block)]
    named = {side: next((p for p in inside if norm.search(p)), None) for side, norm in QK_NORMS.items()}
    before = next((p for p in inside if NORM.search(p) and p not in named.values()), "a.{layer}.norm.weight")
    lines = [f"    input_norm: {OPEN}   # null, or {{kind: layer or rms, name: '{before.removesuffix('.weight')}'}}"]
    for side, name in named.items():
        place = "" if name is None else name.rpartition(".")[0]
        lines += [f"    {side}_norm: {OPEN}   # null, or {{kind: rms or layer, name: '{place}'}}"] if name else []
    lines.append(f"    rotary: {OPEN}   # null, or {{base: 10000.0, interleaved: false}}")
    return "\n".join(lines) + "\n"


def _size(config: Config, keys: str) -> int | None:
    """The whole number that the config has under the first of these keys, wherever in it."""
    try:
        value = config.anywhere(keys)
    except Refusal:  # several: the user knows which
        return None
    return value if isinstance(value, int) else None


TABLES = (gpt, llama, latent, encoders, seq2seq, vision, frameworks)
FAMILIES: tuple[Family, ...] = tuple(family for table in TABLES for family in table.FAMILIES)
WRAPPERS = ("timm_wrapper",)  # types that do not say what is inside
TURNING = re.compile(r"(^|[._])(rotary|rope|inv_freq|freqs)([._]|$)")
POSITIONS = re.compile(r"(^|[._])(wpe|pos(ition(al|s)?)?_?(emb|enc|table)\w*)(\.|$)")


def find_family(config: Config, names: Collection[str]) -> Family:
    """The row of this model; an unknown model is refused, never guessed."""
    model_type, near = config.get("model_type"), None
    for family in FAMILIES:
        if model_type in family.model_types and model_type not in WRAPPERS:
            return family
        is_named = model_type in (None, *WRAPPERS, family.name)
        if is_named and family.signature and _has(family.signature.format(layer=0), names):
            differs = unaccounted(family, config, names)
            if differs is None:
                return family
            near = near or differs
    raise unknown_layout(config, names, near)


def unaccounted(family: Family, config: Config, names: Collection[str]) -> str | None:
    """Explain why a file of undeclared type is not of a family that it resembles; None where nothing speaks against it.

    Every tensor of a block must be one that the family has, and none that it needs may be missing.
    """
    inside, blocks = re.compile(family.inside), _blocks(family, names)
    for name in sorted(names):
        block = next((outer for outer in outer_modules(name) if outer in blocks), None)
        if block is not None and not inside.fullmatch(name[len(block) + 1 :]):
            return f"`{name[:120]}`, which {family.name} does not have"
    for need in ask(family.needs, config) if callable(family.needs) else family.needs:
        within = [f"{block}{need}" for block in sorted(blocks)] if need.startswith(".") else []
        lost = [name for name in within if name not in names] if within else [] if _has(need, names) else [need]
        if lost:
            return f"no `{lost[0][:120]}`, which {family.name} has"
    rotary = family.attention[0].rotary
    turns = isinstance(rotary, RotaryAt) and bool(resolve(rotary.only, config))
    table = next((name for name in sorted(names) if (POSITIONS if turns else TURNING).search(name)), None)
    are = "are rotary" if turns else "are not rotary"
    return None if table is None else f"`{table[:120]}`, where the positions of {family.name} {are}"


def _blocks(family: Family, names: Collection[str]) -> set[str]:
    """The modules, one a layer, that hold the attention of a family's rows."""
    found = set()
    for query in (query for row in family.attention for query in row.query.split("|")):
        before, _, behind = query.partition("{layer}")
        pattern = re.compile(rf"((?:.*\.)?{re.escape(before)}\d+){re.escape(behind)}[._]weight")
        ends = f"{behind}.weight", f"{behind}_weight"
        found |= {match[1] for name in names if name.endswith(ends) and (match := pattern.fullmatch(name))}
    return found


def is_in_tables(model_type: str) -> bool:
    return any(model_type in family.model_types for family in FAMILIES)


def _has(signature: str, names: Collection[str]) -> bool:
    return signature in names or any(name.endswith(f".{signature}") for name in names)


# ---------------------------------------------------------- `--layout FILE.yaml`: a row with the columns of the tables
# Columns that hold a row of their own; the rest are numbers, words or names of config entries.
NESTED: dict[str, type] = {
    "input_norm": NormAt,
    "key_input_norm": NormAt,
    "query_norm": NormAt,
    "key_norm": NormAt,
    "norm": NormAt,
    "query_low_rank": LowRankAt,
    "key_low_rank": LowRankAt,
    "rotary": RotaryAt,
    "buckets": BucketsAt,
}
NOT_IN_FILES = ("names", "alibi")  # columns that only code can fill
# Columns that name modules, and what such a name may leave open.
PATTERNS = ("query", "key", "name", "down", "up")
PLACEHOLDERS = ("layer", "previous", "head")
WORDS: dict[str, tuple[object, ...]] = {
    "fused": (None, "qkv", "grouped", "codegen"),
    "kind": ("layer", "rms", "l2"),
    "bare": (None, "layer", "rms"),
    "norm_over": ("head", "projection"),
}
FLAGS = {column.name for kind in (Attention, *NESTED.values()) for column in fields(kind) if column.type is bool}
EXAMPLE = "attention: [{block: decoder, query: 'layers.{layer}.wq', key: 'layers.{layer}.wk', layers: 2, heads: 4}]"


def read_layout(path: str | PathLike[str]) -> Family:
    """The family that a layout file describes; whatever it does not say stands as in `Attention`."""
    with within(str(path)):
        document = read_yaml(Path(path))
        if not isinstance(document, dict) or not isinstance(document.get("attention"), list):
            raise refusal("a list `attention` of blocks", type(document).__name__, f"for example: {EXAMPLE}")
        rows = tuple(_row(Attention, entry, f"attention[{n}]") for n, entry in enumerate(document["attention"]))
        if not rows or any(row.block not in BLOCKS for row in rows):
            raise refusal("blocks among " + ", ".join(BLOCKS), reprlib.repr([row.block for row in rows]))
        return Family(str(document.get("family", "layout")), (), rows)


def _row(kind: type, entry: object, place: str) -> Any:
    """One row of the given kind, refusing columns that it does not have."""
    columns = {field.name: field for field in fields(kind) if field.name not in NOT_IN_FILES}
    if not isinstance(entry, dict):
        raise refusal(f"a table at {place}", reprlib.repr(entry))
    if unknown := set(entry) - set(columns):
        raise refusal(f"columns of {place} among {', '.join(columns)}", ", ".join(map(str, sorted(unknown, key=str))))
    needed = [name for name, field in columns.items() if field.default is MISSING and name not in entry]
    if needed:
        raise missing(f"{', '.join(needed)} in {place}")
    return kind(**{name: _cell(name, value, f"{place}.{name}") for name, value in entry.items()})


def _cell(name: str, value: object, place: str) -> Any:
    if name in NESTED and value is not None:
        return _row(NESTED[name], value, place)
    if name == "prefixes" and isinstance(value, list):
        return tuple(map(str, value))
    if not isinstance(value, str | int | float | bool | None):
        raise refusal(f"a number, a word or the name of a config entry at {place}", reprlib.repr(value))
    if name in PATTERNS or (name in ("first", "sink") and value is not None):
        _check_pattern(value, place)
    return _checked(name, value, place)


def _check_pattern(value: object, place: str) -> None:
    """A name with {layer}, {previous} or {head} in it, and no other way of formatting: one can ask for any length."""
    try:
        fields = [part for part in Formatter().parse(value) if part[1] is not None] if isinstance(value, str) else None
    except ValueError:
        fields = None
    if fields is None or any(part[1] not in PLACEHOLDERS or part[2] or part[3] for part in fields):
        raise refusal(f"the name of a module with {{layer}} in it at {place}", reprlib.repr(value))


def _checked(name: str, value: object, place: str) -> object:
    """A word among those that a column knows, a yes or no where one is asked for."""
    if name in WORDS and value not in WORDS[name]:
        raise refusal(f"one of {', '.join(map(str, WORDS[name]))} at {place}", reprlib.repr(value))
    if name in FLAGS and not isinstance(value, bool):
        raise refusal(f"true or false at {place}", reprlib.repr(value))
    if name == "prefixes" and value is not None:
        raise refusal(f"a list of prefixes at {place}", reprlib.repr(value))
    if name == "config" and not isinstance(value, str | None):
        raise refusal(f"the name of a part of the config at {place}", reprlib.repr(value))
    return value
