"""Models and tokenizers of `locater train`, as the library asks for them by their type."""

from pathlib import Path

from torch import nn

from ..data import vocabulary
from .export import load


def load_model(folder: Path) -> nn.Module:
    """The model of a finished run, ready for inference."""
    return load(folder)


def load_tokenizer(folder: Path) -> "OwnTokenizer":
    """The vocabulary beside the weights."""
    return OwnTokenizer(vocabulary.load(folder))


class OwnTokenizer:
    """The vocabulary of `locater train` under the names that transformers has."""

    unk_token_id: int | None = None

    def __init__(self, vocabulary: vocabulary.Vocabulary) -> None:
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return self.vocabulary.size

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return {"input_ids": self.vocabulary.encode(text).tolist()}
