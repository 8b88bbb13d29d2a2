"""Plain English: how docstrings begin, words that no native engineer writes, and the length of sentences."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(path for package in ("locater", "locater_lab") for path in (ROOT / "src" / package).rglob("*.py"))
SCRIPTS = sorted(path for package in ("locater", "locater_lab") for path in (ROOT / "src" / package).rglob("*.js"))
PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").rglob("*.md"))

# A docstring begins with an imperative verb or a noun that the code has, never with a free relative clause.
OPENINGS = re.compile(r"(What|Whatever|Whether|How|Where|Which|Who|Whose|Why|When|That|Those|Of|As|So)\b(?!-)")
# The left is what this repository once said, the right is what the field says.
BANNED = {
    "an own": "a custom, your own",
    "at hand": "available, local, given",
    "gone over": "retried",
    "novel cut": "truncated",
    "falls silent": "ignores, prints nothing",
    "what one does not need": "unused",
    "how manieth": "index",
    "is let be": "is ignored",
    "let go": "freed, released, closed",
    "manieth": "index",
    "nobody": "name who or what: unknown, unexpected, without an owner",
    "of now": "current",
    "own one": "a custom one",
    "parted": "split",
    "slip of the finger": "typo",
    "so many": "this many, or the number",
    "somebody": "name who",
    "stranger": "untrusted",
    "strangers": "untrusted",
    "told apart": "distinguished, separated",
    "whatever comes": "always, later",
    "whoever": "name who",
}
WORDS = re.compile(r"\b(" + "|".join(sorted(BANNED, key=len, reverse=True)) + r")\b", re.IGNORECASE)
# Words that what users read does not have, where comments still do: messages, help, pages, documentation.
SHOWN = re.compile(
    r"\bbeside\b|\blet be\b"
    r"|(?<!fall )(?<!left )(?<!are )(?<!steps )\bbehind (?=[a-z`])(?!the others|uniform|all the way)",
    re.IGNORECASE,
)
# Pages whose sentences a newcomer reads first, and how long these are: on average, and each.
READ_FIRST = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
MEAN_WORDS, MOST_WORDS = 20, 25
# A sentence of documentation that is no formula; two pages are written from results, by others.
LONGEST, BY_RESULTS = 40, {"reproduction.md", "studies.md"}
README_LINES, README_COLUMNS, README_WORDS = 90, 120, 700
# What people are promised of each other, and what was said in earlier versions, stay as they are.
EXEMPT = {"CODE_OF_CONDUCT.md", "CHANGELOG.md"}


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every docstring, those below assignments in classes and modules included."""
    for node in ast.walk(ast.parse(source)):
        statements = node.body if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) else []
        for statement in statements:
            match statement:
                case ast.Expr(ast.Constant(str(text))):
                    yield statement.lineno, text.strip()


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every comment and string: docstrings, messages, help."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kinds:
            yield token.start[0], token.string


def sentences(page: str) -> list[str]:
    """List the sentences of a page's paragraphs: no code, tables, headings or list markers."""
    text = re.sub(r"^```.*?^```", "\n\n", page, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^[ \t]*(?:[|#].*|!\[.*)$", "\n", text, flags=re.MULTILINE)
    text = re.sub(r"^[ \t]*(?:[-*]|\d+\.) ", "\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks = [" ".join(block.split()) for block in re.split(r"\n\s*\n", text)]
    parts = [part for block in blocks for part in re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\d])", block)]
    return [part for part in parts if len(part.split()) > 2]


def mean_words(page: str) -> float:
    """Mean number of words in the page's sentences."""
    counts = [len(sentence.split()) for sentence in sentences(page)]
    return sum(counts) / len(counts)


def test_docstrings_begin_with_a_verb_or_a_noun():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in SOURCES
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        if OPENINGS.match(text)
    ]
    assert not wrong, "\n".join(wrong)


def test_comments_and_messages_use_words_of_the_field():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {match[1]!r}: {BANNED[match[1].lower()]}"
        for path in SOURCES
        for line, text in prose(path.read_text(encoding="utf-8"))
        for match in WORDS.finditer(text)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", [*PAGES, *SCRIPTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_use_words_of_the_field(path):
    wrong = [
        f"{number}: {match[1]!r}: {BANNED[match[1].lower()]}"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for match in WORDS.finditer(line)
    ]
    assert path.name in EXEMPT or not wrong, "\n".join(wrong)


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every string of several words that is no docstring."""
    tree = ast.parse(source)
    bodies = (node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list))
    documentation = {id(statement.value) for body in bodies for statement in body if isinstance(statement, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value


def test_what_users_read_says_next_to_and_after():
    """Not *beside* and *behind*, which this repository once said for both and for much else."""
    templates = sorted((ROOT / "src").rglob("*.html"))
    shown = {
        path: enumerate(path.read_text(encoding="utf-8").splitlines(), 1) for path in [*PAGES, *SCRIPTS, *templates]
    }
    shown |= {path: messages(path.read_text(encoding="utf-8")) for path in SOURCES}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip()}"
        for path, lines in shown.items()
        for line, text in lines
        if path.name not in {*EXEMPT, "migration.md"} and SHOWN.search(text)
    ]
    assert not wrong, "\n".join(wrong)
    assert [text for _, text in messages('"""Put it beside."""\nf("it is " "beside it")') if SHOWN.search(text)]


@pytest.mark.parametrize("path", READ_FIRST, ids=lambda path: path.name)
def test_sentences_are_short_on_pages_read_first(path):
    page = path.read_text(encoding="utf-8")
    assert mean_words(page) <= MEAN_WORDS
    assert [sentence for sentence in sentences(page) if len(sentence.split()) > MOST_WORDS] == []


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_sentences_of_the_documentation_are_short(path):
    page = path.read_text(encoding="utf-8")
    assert mean_words(page) <= MEAN_WORDS
    long = [sentence for sentence in sentences(page) if len(sentence.split()) > LONGEST]
    assert path.name in BY_RESULTS or long == []


def test_the_readme_is_short():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(page.splitlines()) <= README_LINES and len(page.split()) <= README_WORDS
    assert [line for line in page.splitlines() if len(line) > README_COLUMNS] == []


def test_the_lint_finds_what_it_bans():
    source = 'X = 1\n"""What X is."""\n\n\ndef f():\n    """Of all heads."""\n    # a stranger\'s file\n'
    assert [OPENINGS.match(text)[0] for _, text in docstrings(source)] == ["What", "Of"]
    assert [match[1] for _, text in prose(source) for match in WORDS.finditer(text)] == ["stranger"]
    page = "# A heading of its own\n\nOne two three. Four five six seven.\n\n```python\nx = 1\n```\n\n| a | table |\n"
    assert sentences(page) == ["One two three.", "Four five six seven."]
    assert mean_words(page) == 3.5


def misworded(source: str) -> Iterator[tuple[int, str]]:
    """Refusals of another form than the three: something missing or a failed action told as a value."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or len(node.args) < 2:
            continue
        if node.func.id in ("refusal", "bad_value"):
            expected, got = (ast.unparse(argument).lstrip("f").strip("'\"") for argument in node.args[:2])
            if expected.startswith("to ") or re.match(r"(none|no such)\b(?!-)", got):
                yield node.lineno, f"expected {expected}, got {got}"


def test_errors_have_three_forms_and_name_extras_in_one_place():
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text}: use failed or missing"
        for path in SOURCES
        for line, text in misworded(path.read_text(encoding="utf-8"))
    ]
    hints = [path.name for path in SOURCES if 'pip install "locater[' in path.read_text(encoding="utf-8")]
    assert not wrong and hints == ["errors.py"], "\n".join(wrong + hints)
    said = [text for _, text in misworded('refusal("a head", "none")\nrefusal(f"to write {x}", y)\nrefusal("a", b)')]
    assert said == ["expected a head, got none", "expected to write {x}, got y"]


def test_private_functions_are_verbs_or_nouns_and_begin_with_no_preposition():
    def badly_named(source: str) -> list[str]:
        functions = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef))
        return [one.name for one in functions if re.fullmatch(r"_(of|in|at|into|beside|beneath)(_\w+)?", one.name)]

    library = [path for path in SOURCES if "locater_lab" not in path.parts]
    wrong = {path.name: found for path in library if (found := badly_named(path.read_text(encoding="utf-8")))}
    assert not wrong and badly_named("def _of_heads(): ...\ndef _offer(): ...") == ["_of_heads"]
