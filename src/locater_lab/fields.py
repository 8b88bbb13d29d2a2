"""Fields of configs with their help, and what a value of one may be."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_origin

from locater.errors import refusal


def option(default: object, help: str) -> Any:
    """A field with the sentence that documents it, which is also the command's help."""
    return field(default=default, metadata={"help": help})


# What JSON and a shell may give for a field of each type.
KINDS: dict[Any, type | tuple[type, ...]] = {float: (float, int), int: int, bool: bool, str: str}


def choices_of(kind: Any) -> tuple[str, ...]:
    """The words that a field of this type may be, if any."""
    alone = get_args(kind) if get_origin(kind) is Literal else ()
    return alone or tuple(word for part in get_args(kind) for word in choices_of(part))


def check_fields(options: Any) -> None:
    """Refuse what no field of a config can be: another type, an unknown choice, NaN or infinity."""
    for one in fields(options):
        value, choices = getattr(options, one.name), choices_of(one.type)
        kinds: list[Any] = [kind for kind in (one.type, *get_args(one.type)) if kind in KINDS]
        names = ["finite number" if kind is float else kind.__name__ for kind in kinds]
        fits = value in choices or any(isinstance(value, KINDS[kind]) for kind in kinds)
        if not fits or isinstance(value, float) and not math.isfinite(value):
            said = [f"a {' or '.join(names)}"] * bool(names) + [f"one of {', '.join(choices)}"] * bool(choices)
            raise refusal(f"{one.name} to be {', or '.join(said)}", repr(value))


@dataclass(frozen=True)
class DataOptions:
    """Choice of the data, and its way to tokens."""

    data: str = option(
        "embedded",
        "A text file or folder (train.txt and valid.txt, or any text), wikitext-2 (downloaded), embedded (Python's own "
        "documentation), or auto (wikitext-2 if it can be had, else embedded).",
    )
    tokenizer: Literal["words", "bpe"] = option("bpe", "Words between whitespace, or byte pairs.")
    bpe_size: int = option(4096, "Number of byte-pair tokens.")

    def __post_init__(self):
        check_fields(self)
        if self.bpe_size < 257:
            raise refusal("at least 257 byte-pair tokens, one for every byte and one more", self.bpe_size)
