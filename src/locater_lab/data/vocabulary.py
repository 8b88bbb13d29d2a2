"""Texts to token numbers: words between whitespace, or byte pairs by `tokenizers`."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy

from locater.errors import missing, refusal

END_OF_LINE, UNKNOWN = "<eos>", "<unk>"


@runtime_checkable
class Vocabulary(Protocol):
    """Mapping from text to numbers; `save` writes it next to a model."""

    @property
    def size(self) -> int: ...
    def encode(self, text: str) -> numpy.ndarray: ...
    def text(self, token: int) -> str: ...
    def save(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class Words:
    """The words of the training text, the most frequent first; a line ends in a token of its own."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, text: str) -> "Words":
        counts = Counter(word for line in lines(text) for word in line)
        counts[UNKNOWN] += 0
        return cls(tuple(word for word, _ in counts.most_common()))

    @property
    def size(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> numpy.ndarray:
        numbers = {word: number for number, word in enumerate(self.words)}
        unknown = numbers[UNKNOWN]
        found = (numbers.get(word, unknown) for line in lines(text) for word in line)
        return numpy.fromiter(found, dtype=numpy.uint32)

    def text(self, token: int) -> str:
        """Text of a token, the space before it included."""
        return "\n" if self.words[token] == END_OF_LINE else f" {self.words[token]}"

    def save(self, folder: Path) -> None:
        (folder / "vocabulary.txt").write_text("\n".join(self.words) + "\n", encoding="utf-8")


def lines(text: str):
    """The words of each line and its end; a last line without one counts as well."""
    # Not splitlines: WikiText holds other characters that Python counts as line ends.
    for line in text.removesuffix("\n").split("\n"):
        yield [*line.split(), END_OF_LINE]


@dataclass(frozen=True)
class BytePairs:
    """Byte-level byte pairs, learnt from the training text."""

    tokenizer: Any

    @classmethod
    def of(cls, text: str, size: int) -> "BytePairs":
        try:
            from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
        except ImportError:
            raise missing("the package tokenizers, for byte pairs", "use tokenizer=words", extra="hf") from None
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
        tokenizer.decoder = decoders.ByteLevel()  # type: ignore
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)  # type: ignore
        tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
        return cls(tokenizer)

    @property
    def size(self) -> int:
        return self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> numpy.ndarray:
        pieces = self.tokenizer.encode_batch(text.splitlines(keepends=True))
        return numpy.concatenate([numpy.asarray(piece.ids, dtype=numpy.uint32) for piece in pieces])

    def text(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def save(self, folder: Path) -> None:
        self.tokenizer.save(str(folder / "tokenizer.json"))


def load_vocabulary(folder: Path) -> Vocabulary:
    """Read the vocabulary that `save` wrote."""
    if (folder / "vocabulary.txt").exists():
        text = (folder / "vocabulary.txt").read_text(encoding="utf-8")
        return Words(tuple(text.removesuffix("\n").split("\n")))
    if not (folder / "tokenizer.json").exists():
        remedy = "a run writes it next to its model at the end; name that folder, or go without a text (--text random)"
        raise refusal(f"vocabulary.txt or tokenizer.json in {folder}", "neither", remedy)
    from tokenizers import Tokenizer

    return BytePairs(Tokenizer.from_file(str(folder / "tokenizer.json")))
