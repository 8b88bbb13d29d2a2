"""Text to tokens to batches: counts, caches, damage, and that a batch depends on its number alone."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy
import pytest
import torch

from locater.errors import Refusal
from locater_lab.data import sources
from locater_lab.data.batches import WindowBatches, draws
from locater_lab.data.sources import open_data
from locater_lab.data.text import Corpus, download, held_out, read_corpus
from locater_lab.data.vocabulary import BytePairs, Words, load_vocabulary
from locater_lab.fields import DataOptions

TEXT = "".join(f" line {n} tells of {n * n} things \n" for n in range(200))
WIKITEXT = Path(__file__).parents[3] / "shared" / "data" / "wikitext-2"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCATER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_words_end_every_line_and_know_what_they_do_not_know():
    words = Words.of("a b a\n\nb a")
    assert words.size == 4
    decoded = [words.words[number] for number in words.encode("a c\n\nb")]
    assert decoded == ["a", "<unk>", "<eos>", "<eos>", "b", "<eos>"]
    assert words.words[:2] == ("a", "<eos>")  # the most frequent first; ties in the order met


def test_byte_pairs_give_any_text_back(tmp_path):
    pairs = BytePairs.of(TEXT, 300)
    assert pairs.size == 300
    strange = "näher 你好\n\n\ttabs\x0b"
    assert pairs.tokenizer.decode(pairs.encode(strange).tolist()) == strange
    pairs.save(tmp_path)
    assert numpy.array_equal(load_vocabulary(tmp_path).encode(TEXT), pairs.encode(TEXT))


@pytest.mark.parametrize("tokenizer", ["words", "bpe"])
def test_tokens_are_made_once_and_then_mapped(text_file, tokenizer, monkeypatch):
    options = DataOptions(str(text_file), tokenizer, bpe_size=300)
    first = open_data(options, length=16, seed=0)
    monkeypatch.setattr(sources, "_make", lambda *_: pytest.fail("made twice"))
    second = open_data(options, length=16, seed=0)
    assert isinstance(second.tokens.train, numpy.memmap)
    assert numpy.array_equal(first.tokens.train, second.tokens.train)
    assert first.identity == second.identity
    assert second.tokens.vocabulary.size == first.tokens.vocabulary.size


def test_other_text_or_other_settings_have_another_place(text_file):
    def identity(**changed):
        return open_data(DataOptions(str(text_file), **changed), length=16, seed=0).identity

    words, pairs, more = identity(tokenizer="words"), identity(bpe_size=300), identity(bpe_size=301)
    text_file.write_text(TEXT + " more \n")
    assert len({words, pairs, more, identity(bpe_size=300)}) == 4


def test_a_half_written_cache_is_never_read(text_file, monkeypatch):
    """The power goes while the second part is written: nothing is left under the final name, and the next run works."""
    real, calls = numpy.save, []

    def fail_second(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(*args, **kwargs)

    monkeypatch.setattr(numpy, "save", fail_second)
    with pytest.raises(Refusal, match="No space left on device; free some room"):
        open_data(DataOptions(str(text_file), "words"), length=16, seed=0)
    assert not list((sources.cache_folder() / "tokens").iterdir())
    assert len(open_data(DataOptions(str(text_file), "words"), length=16, seed=0).tokens.train) > 0


DAMAGE = {
    "empty": ("words", "train.npy", b""),
    "cut": ("words", "valid.npy", b"\x93NUMPY"),
    "gone": ("words", "train.npy", None),
    "no words": ("words", "vocabulary.txt", None),
    "no pairs": ("bpe", "tokenizer.json", None),
    "half of the pairs": ("bpe", "tokenizer.json", b"{"),
}


@pytest.mark.parametrize(("tokenizer", "name", "left"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_cache_is_made_again(text_file, tokenizer, name, left):
    options = DataOptions(str(text_file), tokenizer, bpe_size=300)
    whole = open_data(options, length=16, seed=0)
    tokens, path = numpy.array(whole.tokens.train), sources.cache_folder() / "tokens" / whole.identity / name
    path.unlink()
    if left is not None:
        path.write_bytes(left)
    again = open_data(options, length=16, seed=0)
    assert numpy.array_equal(again.tokens.train, tokens)
    assert again.tokens.vocabulary.size == whole.tokens.vocabulary.size


def test_the_cache_stands_where_the_user_says(monkeypatch, tmp_path):
    assert sources.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("LOCATER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert sources.cache_folder() == tmp_path / "xdg" / "locater"


def windows(length=10, num_tokens=105, seed=0):
    train = numpy.arange(num_tokens, dtype=numpy.uint32)
    return WindowBatches(train, train[:41], length, seed)


def test_an_epoch_sees_each_window_once_and_targets_follow():
    data = windows()
    assert (data.num_training, data.num_validation) == (9, 4)
    x, y = data.training(0, 9)
    assert torch.equal(y, x + 1)
    assert x.flatten().unique().numel() == 90
    other, _ = data.training(9, 9)
    assert not torch.equal(x, other)
    assert other.flatten().unique().numel() == 90


def test_a_sample_depends_on_its_number_alone():
    """Across an epoch's end, in any division among processes, in any order of asking."""
    data = windows()
    whole = data.training(5, 12)[0]
    parts = [data.training(first, 3)[0] for first in (14, 11, 5, 8)]
    assert torch.equal(torch.cat([parts[2], parts[3], parts[1], parts[0]]), whole)
    assert torch.equal(windows().training(5, 12)[0], whole)
    assert not torch.equal(windows(seed=1).training(5, 12)[0], whole)


def test_validation_windows_are_in_order():
    x, y = windows().validation(1, 2)
    assert x[:, 0].tolist() == [10, 20] and y[:, -1].tolist() == [20, 30]


def test_a_folder_with_parts_uses_them_and_any_other_is_cut(tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "train.txt").write_text("one\n")
    (folder / "valid.txt").write_text("two\n")
    assert read_corpus(folder) == Corpus(str(folder), "one\n", "two\n")
    (folder / "valid.txt").unlink()
    (folder / "sub").mkdir()
    (folder / "sub" / "more.md").write_text("\n".join(map(str, range(100))))
    (folder / ".hidden").write_bytes(b"\xff")
    corpus = read_corpus(folder)
    assert corpus.train + corpus.valid == "\n".join(map(str, range(100))) + "\n" + "one\n"
    assert corpus.train.endswith("\n")


def test_a_line_that_is_far_from_the_end_is_no_place_to_cut():
    """A title and one long line, two long lines, no blank at all: always about a twentieth is held out."""
    words = "word " * 4000
    for text in (f"Title\n{words}", f"{words}\n{words}", "x" * 20_000):
        corpus = held_out("here", text)
        assert corpus.train + corpus.valid == text
        assert 0.05 <= len(corpus.valid) / len(text) < 0.051
    assert held_out("here", f"{words}\n{words}").train.endswith(" ")


def test_numbers_of_large_seeds_differ():
    numbers = {(seed, number): draws(seed, number).random() for seed in (2**63 + 5, 2**63 + 6) for number in range(3)}
    assert len(set(numbers.values())) == 6


def test_a_text_without_lines_is_cut_too():
    corpus = held_out("x", "abcdefghijklmnopqrstuvwxyz")
    assert (corpus.train, corpus.valid) == ("abcdefghijklmnopqrstuvwx", "yz")


BAD = {
    "empty": (b"", "an empty file"),
    "blank": (b" \n \n", "nothing but whitespace"),
    "latin-1": (b"caf\xe9 ol\xe9", "the byte 0xe9 at position 3; convert it"),
    "one letter": (b"a", "enough text"),
    "short": (b"a few words\n" * 4, "tokens of training text, got"),
}


@pytest.mark.parametrize(("raw", "sentence"), BAD.values(), ids=BAD)
def test_bad_text_is_refused_in_a_sentence(tmp_path, raw, sentence):
    path = tmp_path / "bad.txt"
    path.write_bytes(raw)
    with pytest.raises(Refusal, match=sentence):
        open_data(DataOptions(str(path), "words"), length=16, seed=0)


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(Refusal, match="check the spelling"):
        open_data(DataOptions(str(tmp_path / "none")), length=16, seed=0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(Refusal, match="got no files"):
        open_data(DataOptions(str(tmp_path / "empty")), length=16, seed=0)
    with pytest.raises(Refusal, match="at least 257"):
        DataOptions(bpe_size=10)


@pytest.fixture
def silent_hub(monkeypatch, tmp_path):
    """No answer, and nothing downloaded before."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", f"http://127.0.0.1:{closed_port()}")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    return datasets


def closed_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_auto_says_that_it_falls_back(monkeypatch, silent_hub):
    monkeypatch.setattr(sources, "embedded", lambda: held_out("the embedded text", TEXT))
    said = []
    data = open_data(DataOptions("auto", "words"), length=16, seed=0, say=said.append)
    assert data.options.data == "embedded"
    assert "WikiText-2 was not found" in said[-1] and "documentation instead" in said[-1]
    with pytest.raises(Refusal, match="name a folder with train.txt and valid.txt by --data PATH"):
        open_data(DataOptions("wikitext-2"), length=16, seed=0)


class Refusing(BaseHTTPRequestHandler):
    """A hub that answers, if only with an error."""

    def do_HEAD(self):
        self.send_error(404)

    def log_message(self, format, *args):
        pass


def test_a_silent_hub_is_not_asked_again(monkeypatch, silent_hub):
    """Offline is for the call only; a hub that answers, even with an error, is asked."""
    asked = []

    def load_dataset(*_, **__):
        asked.append(silent_hub.config.HF_HUB_OFFLINE)
        return {"train": {"text": ["", " a b \n", "", " b \n"]}, "validation": {"text": [" b \n"]}}

    monkeypatch.setattr(silent_hub, "load_dataset", load_dataset)
    assert download() == Corpus("wikitext-2", "\n a b \n\n b \n", " b \n")
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(silent_hub.config, "HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        download()
        server.shutdown()
    assert asked == [True, False] and not silent_hub.config.HF_HUB_OFFLINE


def test_the_embedded_text_is_long_enough_and_made_once(monkeypatch):
    corpus = sources.embedded()
    assert len(corpus.train) > 500_000 and len(corpus.valid) > 20_000
    monkeypatch.setattr("locater.texts.embedded_text", lambda: pytest.fail("made twice"))
    assert sources.embedded() == corpus


@pytest.mark.skipif(not WIKITEXT.exists(), reason="WikiText-2 is not kept in the repository")
def test_wikitext_2_has_the_sizes_of_the_paper(monkeypatch, silent_hub):
    """From a folder, and with rows as the hub has them: a line each, but for blank ones, which are empty."""
    names = {"train": "train.txt", "validation": "valid.txt"}
    lines = {part: (WIKITEXT / name).read_text(encoding="utf-8").split("\n")[:-1] for part, name in names.items()}
    rows = {part: {"text": [f"{one}\n" if one.strip() else "" for one in every]} for part, every in lines.items()}
    monkeypatch.setattr(silent_hub, "load_dataset", lambda *_: rows)
    for source in (str(WIKITEXT), "wikitext-2"):
        data = open_data(DataOptions(source, "words"), length=128, seed=0)
        assert (len(data.tokens.train), len(data.tokens.valid)) == (2_088_628, 217_646)
        assert data.tokens.vocabulary.size == 33_278
