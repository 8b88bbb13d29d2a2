import subprocess
import sys

from locater.texts import embedded_text, passages

HASH = "import hashlib, locater.texts as e; print(hashlib.sha256(e.embedded_text().encode()).hexdigest())"


def test_text_is_large_real_and_the_same_every_time():
    import hashlib

    text = embedded_text()
    assert 1_000_000 < len(text) < 10_000_000
    assert "Assignment statements are used to (re)bind names to values" in text  # a help topic
    assert "JSON (JavaScript Object Notation)" in text  # a docstring
    again = subprocess.run([sys.executable, "-c", HASH], capture_output=True, text=True, check=True).stdout.strip()
    assert again == hashlib.sha256(text.encode()).hexdigest()


def test_nothing_is_imported(tmp_path):
    (tmp_path / "b.py").write_text(f'"""{"A module that must not run. " * 5}"""\nraise SystemExit\n')
    (tmp_path / "a.py").write_text(f'def f():\n    """{"Earlier by its path. " * 5}"""\n')
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "c.py").write_text(f'"""{"Left out, as it is a test. " * 5}"""\n')
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text(f"topics = {{'x': '{'A topic of the help. ' * 5}', 'y': 3}}\n")
    found = list(passages(tmp_path))
    assert [passage[:9] for passage in found] == ["Earlier b", "A module ", "A topic o"]


def test_passages_are_taken_once_and_labels_not_at_all(tmp_path):
    doc = "The same words in two places, long enough to count as a passage of the text, truly."
    (tmp_path / "a.py").write_text(f'"""{doc}"""\nclass A:\n    """{doc}"""\nclass B:\n    """Short."""\n')
    assert list(passages(tmp_path)) == [doc]
