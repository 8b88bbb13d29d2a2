"""Which family a model is of: by its model type, or by a tensor name that only one family has."""

from collections.abc import Collection

from ..errors import refuse
from . import encoders, gpt, llama, seq2seq, vision
from .config import Config
from .schema import Family

TABLES = (gpt, llama, encoders, seq2seq, vision)
FAMILIES: tuple[Family, ...] = tuple(family for table in TABLES for family in table.FAMILIES)


def find_family(config: Config, names: Collection[str]) -> Family:
    """The row of this model; an unknown model is refused, never guessed."""
    model_type = config.get("model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    if model_type is None:
        for family in FAMILIES:
            if family.signature is not None and family.signature.format(layer=0) in names:
                return family
    raise refuse("a known family", f"model type {model_type!r}")
