"""From what `--data` names to batches; tokens are kept on disk by the hash of their text, and memory-mapped."""

import hashlib
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy

from locater.errors import Refusal, failed, refusal
from locater.records import cache_folder, write

from ..fields import DataOptions
from . import vocabulary
from .batches import Batches, WindowBatches
from .text import WIKITEXT, Corpus, download, held_out, read_corpus, read_text
from .vocabulary import BytePairs, Vocabulary, Words

EMBEDDED = "embedded"
Say = Callable[[str], None]
CHECKSUM, ATTEMPTS = "checksum", 3
FORMAT = "1"  # part of every hash: raise it when what is stored changes


@dataclass(frozen=True)
class TokenData:
    """The token numbers of both parts, and the hash that names them."""

    identity: str
    vocabulary: Vocabulary
    train: numpy.ndarray
    valid: numpy.ndarray


@dataclass(frozen=True)
class Data:
    """Batches, the tokens behind them (none for made-up texts), and the options with `auto` decided."""

    options: DataOptions
    batches: Batches
    tokens: TokenData | None

    @property
    def identity(self) -> str:
        assert self.tokens is not None
        return self.tokens.identity


def open_data(options: DataOptions, *, length: int, seed: int, say: Say = lambda sentence: None) -> Data:
    """Read and tokenise. `say` hears what the user should know, such as a fall-back."""
    options, corpus = _corpus(options, say)
    tokens = tokenise(corpus, options)
    return Data(options, WindowBatches(tokens.train, tokens.valid, length, seed), tokens)


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


def tokenise(corpus: Corpus, options: DataOptions) -> TokenData:
    """The tokens of a corpus, from the cache if it was met before."""
    identity = _identity(corpus, options)
    folder = cache_folder() / "tokens" / identity
    for _ in range(ATTEMPTS):  # several processes may find it damaged at once, and one throw away what another made
        if not folder.exists():
            _make(folder, corpus, options)
        try:
            return _read(folder)
        except Exception:  # damaged in whatever way, by a loss of power perhaps: it can be made again
            shutil.rmtree(folder, ignore_errors=True)
    _make(folder, corpus, options)
    return _read(folder)


def _read(folder: Path) -> TokenData:
    if (folder / CHECKSUM).read_text(encoding="ascii") != _checksum(folder):
        raise refusal(f"the tokens that were written to {folder}", "others")
    parts = [numpy.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in ("train", "valid")]
    return TokenData(folder.name, vocabulary.load_vocabulary(folder), *parts)


def _identity(corpus: Corpus, options: DataOptions) -> str:
    setting = f"bpe {options.bpe_size}" if options.tokenizer == "bpe" else "words"
    digest = hashlib.sha256()
    for part in (FORMAT, setting, corpus.train, corpus.valid):
        encoded = part.encode("utf-8")
        digest.update(len(encoded).to_bytes(8, "big"))
        digest.update(encoded)
    return digest.hexdigest()[:32]


def _checksum(folder: Path) -> str:
    """Hash all files and their names: a token changed in place would train as any other."""
    digest = hashlib.blake2b()
    for path in sorted(path for path in folder.iterdir() if path.name != CHECKSUM):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()[:32]


def _make(folder: Path, corpus: Corpus, options: DataOptions) -> None:
    """Write a neighbouring folder, then rename it: no reader ever sees half of it."""
    made = BytePairs.of(corpus.train, options.bpe_size) if options.tokenizer == "bpe" else Words.of(corpus.train)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
        try:
            for name in ("train", "valid"):
                numpy.save(temporary / f"{name}.npy", made.encode(getattr(corpus, name)), allow_pickle=False)
            made.save(temporary)
            (temporary / CHECKSUM).write_text(_checksum(temporary), encoding="ascii")
            temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as reason:
        if folder.exists():
            return  # another process was quicker; its content is the same
        remedy = "free some room, or name another folder by LOCATER_CACHE"
        raise failed(f"write the tokens to {folder}", reason.strerror or reason, remedy) from None
