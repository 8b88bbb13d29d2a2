"""From what `--data` names to batches."""

import hashlib
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from locater.errors import Refusal
from locater.records import write

from ..fields import WALK, DataOptions
from .batches import Batches, Walks, Windows
from .cache import Tokens, cache_folder, tokenise
from .text import WIKITEXT, Corpus, download, held_out, read_corpus, read_text

EMBEDDED = "embedded"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Data:
    """Batches, the tokens behind them (none for walks), and the options with `auto` decided."""

    options: DataOptions
    batches: Batches
    tokens: Tokens | None

    @property
    def identity(self) -> str:
        return self.tokens.identity if self.tokens else WALK


def open_data(options: DataOptions, *, length: int, seed: int, say: Say = lambda sentence: None) -> Data:
    """Read and tokenise. `say` hears what the user should know, such as a fall-back."""
    if options.data == WALK:
        return Data(options, Walks(options.walk_width, length, seed), None)
    options, corpus = _corpus(options, say)
    tokens = tokenise(corpus, options)
    return Data(options, Windows(tokens.train, tokens.valid, length, seed), tokens)


def _corpus(options: DataOptions, say: Say) -> tuple[DataOptions, Corpus]:
    match options.data:
        case "embedded":
            return options, embedded()
        case "wikitext-2":
            return options, download()
        case "auto":
            try:
                say("looking for WikiText-2 on the Hugging Face hub …")
                return replace(options, data=WIKITEXT), download()
            except Refusal as reason:
                say(f"WikiText-2 was not found ({reason}): training on Python's own documentation instead")
                return replace(options, data=EMBEDDED), embedded()
    path = Path(options.data)
    with suppress(RuntimeError):  # `~user` that does not exist is kept literally
        path = path.expanduser()
    return replace(options, data=str(path.resolve())), read_corpus(path)


def embedded() -> Corpus:
    """The documentation of Python's standard library, which every machine has; kept, since reading it takes seconds."""
    from locater import texts

    identity = hashlib.sha256(f"{sys.version} {sysconfig.get_path('stdlib')}".encode()).hexdigest()[:16]
    path = cache_folder() / f"embedded-{identity}.txt"
    if not path.exists():
        text = texts.embedded_text()
        write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return held_out("the embedded text", read_text(path))
