"""Options about the data; knows no torch, so that help is quick."""

from dataclasses import dataclass
from typing import Literal

from locater.errors import refusal

from ..fields import check_fields, option

WALK = "random-walk"


@dataclass(frozen=True)
class DataOptions:
    """Choice of the data, and its way to tokens."""

    data: str = option(
        "embedded",
        "A text file or folder (train.txt and valid.txt, or any text), wikitext-2 (downloaded), embedded (Python's own "
        "documentation), auto (wikitext-2 if it can be had, else embedded), or random-walk.",
    )
    tokenizer: Literal["words", "bpe"] = option("bpe", "Words between whitespace, or byte pairs.")
    bpe_size: int = option(4096, "Number of byte-pair tokens.")
    walk_width: int = option(16, "Dimensions of the random walk.")

    def __post_init__(self):
        check_fields(self)
        if self.bpe_size < 257:
            raise refusal("at least 257 byte-pair tokens, one for every byte and one more", self.bpe_size)
        if self.walk_width < 1:
            raise refusal("a walk of at least one dimension", self.walk_width)
