"""Which family a model is of: by its model type, or by a tensor name that only one family has; or what to say of it."""

import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

from ..errors import Refusal, refusal
from .schema import Config, Family
from .tables import encoders, frameworks, gemma, gpt, hybrid, latent, llama, own, seq2seq, torch_native, vision

# Parts of names by which people call queries and keys; used to suggest, never to scan.
QUERY_WORDS = ("q_proj", "query", "wq", "to_q", "q_lin", "qkv", "c_attn", "in_proj", "wqkv")
KEY_OF = {"q_proj": "k_proj", "query": "key", "wq": "wk", "to_q": "to_k", "q_lin": "k_lin"}
MOST_PATTERNS = 12
EMPTY = "                 # to be filled in"
# What configs of many models call the sizes that a layout asks for.
SIZES = {
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "key_heads": ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "num_attention_heads", "n_head", "n_heads"),
    "d_head": ("head_dim", "d_head", "d_kv"),
}


def unknown_layout(config: Config, names: Collection[str]) -> Refusal:
    """One sentence, the patterns of tensor names, and a layout file to start from."""
    patterns = _patterns(names)
    listed = [f"  {pattern}  (× {len(numbers)})" for pattern, numbers in list(patterns.items())[:MOST_PATTERNS]]
    if len(patterns) > MOST_PATTERNS:
        listed.append(f"  … and {len(patterns) - MOST_PATTERNS} more")
    model_type = config.get("model_type")
    named = f"the model type {model_type!r}" if model_type else "no model type"
    listed += ["FILE.yaml, to be completed:", _layout(patterns, config)]
    return Refusal(
        f"expected a model of a known family, got {named} and {len(names)} tensors that no family names; describe it "
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
    """YAML with all that names and config tell; what they do not is left empty."""
    query = next((p for p in patterns if "{layer}" in p and _is_projection(p)), None)
    query = (query or "the.name.of.layer.{layer}.query.weight").removesuffix(".weight")
    word = next((word for word in QUERY_WORDS if word in query), "")
    key = query.replace(word, KEY_OF[word]) if word in KEY_OF else query
    key = key if f"{key}.weight" in patterns else EMPTY
    num_layers = len(patterns.get(f"{query}.weight", ())) or EMPTY
    seen = {name: _seen(config, keys) for name, keys in SIZES.items()}
    sizes = "".join(f"    {name}: {EMPTY if value is None else value}\n" for name, value in seen.items())
    fused = "" if word in KEY_OF else "    fused: qkv            # or grouped\n"
    return (
        "  attention:\n"
        "  - block: decoder          # encoder, decoder, cross or vision\n"
        f"    query: {query}\n    key: {key}\n{fused}"
        f"    layers: {num_layers}\n{sizes}    prefixes: ['']\n"
        "    lookahead: 0            # causal; leave out if not"
    )


def _seen(config: Config, keys: tuple[str, ...]) -> int | None:
    """The first of these that the config has as a number."""
    values = (config.get(key) for key in keys)
    return next((value for value in values if isinstance(value, int) and not isinstance(value, bool)), None)


TABLES = (gpt, llama, gemma, latent, hybrid, encoders, seq2seq, vision, torch_native, frameworks, own)
FAMILIES: tuple[Family, ...] = tuple(family for table in TABLES for family in table.FAMILIES)


def find_family(config: Config, names: Collection[str]) -> Family:
    """The row of this model; an unknown model is refused, never guessed."""
    model_type = config.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return _checked(family, names)
    if model_type is None:
        for family in FAMILIES:
            if family.signature and _has(family.signature.format(layer=0), names) and _has_all(family.needs, names):
                return _checked(family, names)
        if (family := family_of_names(names)) is not None:
            return _checked(family, names)
    raise unknown_layout(config, names)


def family_of_names(names: Collection[str]) -> Family | None:
    """The family whose first row's queries and keys are stored under its usual prefixes, if only one row is so.

    Families that share the row are one here. Used where a config has no model type.
    """
    fitting = [family for family in FAMILIES if not family.signature and _fits(family, names)]
    return fitting[0] if fitting and _reads_alike(fitting) else None


def _fits(family: Family, names: Collection[str]) -> bool:
    row = family.attention[0]
    if row.prefixes is None or row.names is not None:
        return False
    if not _has_all(family.needs, names):
        return False
    return all(
        any(
            f"{prefix}{alternative.format(layer=0, previous=0, head=0)}{end}" in names
            for prefix in row.prefixes
            for alternative in pattern.split("|")
            for end in (".weight", "_weight")
        )
        for pattern in (row.query, row.key)
    )


def _has_all(parts: tuple[str, ...], names: Collection[str]) -> bool:
    return all(any(part in name for name in names) for part in parts)


def _reads_alike(families: list[Family]) -> bool:
    """Whether all of them would read the same numbers: their first rows differ in nothing but where they look."""
    first, *others = (replace(family.attention[0], prefixes=None) for family in families)
    return all(other == first for other in others)


def is_in_tables(model_type: str) -> bool:
    return any(model_type in family.model_types for family in FAMILIES)


def _has(signature: str, names: Collection[str]) -> bool:
    return signature in names or any(name.endswith(f".{signature}") for name in names)


def _checked(family: Family, names: Collection[str]) -> Family:
    """The family, unless the names show another kind of attention too."""
    foreign = next((name for name in names for part in family.foreign if part in name), None)
    if foreign is not None:
        remedy = "its attention is of another kind: describe it with --layout"
        raise refusal(f"a {family.name} model without further terms in its attention", f"`{foreign}`", remedy)
    return family
