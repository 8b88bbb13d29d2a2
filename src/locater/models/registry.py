"""Which family a model is of: by its model type, or by a tensor name that only one family has."""

from collections.abc import Collection

from ..errors import refusal
from .config import Config
from .schema import Family
from .tables import encoders, gemma, gpt, hybrid, latent, llama, own, seq2seq, torch_native, vision
from .unknown import unknown_layout

TABLES = (gpt, llama, gemma, latent, hybrid, encoders, seq2seq, vision, torch_native, own)
FAMILIES: tuple[Family, ...] = tuple(family for table in TABLES for family in table.FAMILIES)


def find_family(config: Config, names: Collection[str]) -> Family:
    """The row of this model; an unknown model is refused, never guessed."""
    model_type = config.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return _checked(family, names)
    if model_type is None:
        for family in FAMILIES:
            if family.signature and _has(family.signature.format(layer=0), names):
                return _checked(family, names)
    raise unknown_layout(config, names)


def _has(signature: str, names: Collection[str]) -> bool:
    return signature in names or any(name.endswith(f".{signature}") for name in names)


def _checked(family: Family, names: Collection[str]) -> Family:
    """The family, unless the names show another kind of attention too."""
    foreign = next((name for name in names for part in family.foreign if part in name), None)
    if foreign is not None:
        remedy = "its attention is of another kind: describe it with --layout"
        raise refusal(f"a {family.name} model without further terms in its attention", f"`{foreign}`", remedy)
    return family
