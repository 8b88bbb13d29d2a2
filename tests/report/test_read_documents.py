"""Documents that commands read back: whatever they hold, a page or a sentence comes of it; no name leads outside."""

import json
import random
import re
import shutil
from pathlib import Path

import pytest
from test_runs import row, write_run

from command import locater
from locater import records
from locater.errors import Refusal
from locater_lab.studies.sweep.folder import create

JUNK = [None, True, -1, 0, 3, 10**400, 1.5, 1e300, "", "x", "../../x", "\n", [], [1], [[]], {}, {"a": 1}, [{}], ["x"]]
NOT_BESIDE = [
    "",
    ".",
    "..",
    "../x",
    "a/../../x",
    "/x",
    "~/x",
    "a\\..\\x",
    "C:x",
    "%2e%2e/x",
    "a\0",
    "a\nb",
    "a//b",
    "a/.",
]


@pytest.mark.parametrize("name", [*NOT_BESIDE, None, 3, ["a"], {"a": 1}, "x" * 256, "\ud800"])
def test_a_name_leads_nowhere_else(name):
    with pytest.raises(Refusal, match="names of files next to index.json"):
        records.check_beside(name, "index.json")


@pytest.mark.parametrize("name", ["a", "a b", "a..b", ".metadata", "parts/model-00001-of-2.safetensors", "κ=0.1-seed0"])
def test_a_name_beside(name):
    assert records.check_beside(name, "index.json") == name


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff", b"[" * 10**5, b'{"a": NaN}', b'{"a": 1, "a": 2}', b"[]", b"1" * 5000]
)
def test_what_is_no_object_is_refused(text, tmp_path):
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(Refusal, match="x.json"):
        records.read_json(tmp_path / "x.json")
    (tmp_path / "x.jsonl").write_bytes(b"{}\n" + text + b"\n{}")
    if text:
        with pytest.raises(Refusal, match="x.jsonl: line 2"):
            records.read_lines(tmp_path / "x.jsonl")
    else:
        assert records.read_lines(tmp_path / "x.jsonl") == [{}]


def mutated(document, draw: random.Random):
    """The document with one value replaced by junk, removed, or given twice, at any depth."""
    places = list(_places(document))
    holder, key = draw.choice(places)
    match draw.randrange(4):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, list):
            holder.insert(key, holder[key])
        case 2 if isinstance(holder[key], str | int | float) and isinstance(holder, dict):
            holder[key] = str(holder[key])
        case _:
            holder[key] = draw.choice(JUNK)
    return document


def _places(value):
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield value, key
        yield from _places(inner)


def spoil(path: Path, draw: random.Random) -> None:
    """One value of a document, of a line of it, or some of its bytes."""
    data = bytearray(path.read_bytes())
    if draw.random() < 0.2:
        at = draw.randrange(len(data))
        path.write_bytes(draw.choice([data[:at], data[:at] + b"\xff\x00" + data[at:], data[:at] + data[at + 1 :]]))
    elif path.suffix == ".jsonl":
        lines = data.decode().splitlines()
        number = draw.randrange(len(lines))
        lines[number] = json.dumps(mutated(json.loads(lines[number]), draw))
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text(json.dumps(mutated(json.loads(data), draw)))


def a_sweep(folder: Path) -> Path:
    points = [{"name": f"{arm}-seed{seed}", "arm": arm, "seed": seed} for arm in ("a", "b") for seed in (0, 1)]

    def measure(point, place):
        loss = 3.0 + point["seed"] / 10
        if point["name"] == "b-seed1":
            raise ValueError("it exploded")
        return {"step": 20, "best_step": 20, "best_loss": loss, "course": {"10": 4.0, "20": loss}, "loss": loss}

    sweep = create(folder / "sweep", "train", points)
    sweep.work(measure)
    sweep.place(points[0]).rmdir()
    write_run(sweep.place(points[0]), [row(20, 100.0)])
    return sweep.folder


def a_study(folder: Path) -> Path:
    from locater_lab.studies.study import measure_for, points_of

    sweep = create(folder / "study", "study profiles", points_of("profiles", quick=True)[:3])
    sweep.work(measure_for(sweep))
    assert locater("report", sweep.folder, "-o", folder / "page.html").code == 0
    return sweep.folder


def some_runs(folder: Path) -> Path:
    """Watched ones, with alarms as `watch_every` writes them."""
    heads = [
        dict(row(20, 9.0)["heads"][0], layer=0, head=head, normalised_entropy=0.5, frobenius_squared=9.0)
        for head in (0, 1)
    ]
    for seed in (0, 1):
        alarm = dict(kind="watch", step=15, alarms=["logits grow"], actions=["stop"], notes=[])
        write_run(
            folder / "runs" / f"a-seed{seed}", [alarm, *(row(step, 9.0 + seed, heads=heads) for step in (10, 20))]
        )
    return folder / "runs"


def a_run(folder: Path) -> Path:
    return some_runs(folder) / "a-seed0"


def a_monitor(folder: Path) -> Path:
    layer = dict(block="decoder", layer=0, heads=[0, 1], statistics={"entropy": [1.0, 2.0]}, weights={"xi": [1.0, 2.0]})
    alarm = dict(kind="entropy collapse", block="decoder", layer=0, heads=[0], meaning="one key", remedy="QKNorm")
    report = dict(schema="locater.monitor/1", training=[layer], evaluation=[], alarms=[alarm], notes=["spent"])
    path = folder / "monitor.jsonl"
    path.write_text("".join(json.dumps(report | {"step": step}) + "\n" for step in (5, 10)))
    return path


def results(folder: Path) -> Path:
    """A scan with everything, and its document of runs, beside each other."""
    assert locater("scan", "--json", folder / "scan.json", "--spectrum", "eigenvalues").code == 0
    assert locater("runs", some_runs(folder), "--json", folder / "runs.json").code == 0
    assert locater("sweep", "--resume", a_sweep(folder), "--json", folder / "rows.json").code == 0
    return folder


CASES = {
    "sweep list": (a_sweep, "sweep.json", [["report"], ["sweep", "--resume"], ["runs"]]),
    "sweep row": (a_sweep, "rows/*.json", [["report"], ["sweep", "--resume"]]),
    "run of a sweep": (a_sweep, "runs/*/metrics.jsonl", [["report"]]),
    "study list": (a_study, "sweep.json", [["report"]]),
    "study row": (a_study, "rows/*.json", [["report"]]),
    "metrics": (some_runs, "*/metrics.jsonl", [["report"], ["runs"], ["runs", "--against", "a"]]),
    "metrics of a run": (a_run, "metrics.jsonl", [["report"]]),
    "config": (some_runs, "*/config.json", [["report"], ["runs"]]),
    "monitor": (a_monitor, "", [["report"]]),
    "scan": (results, "scan.json", [["report"]]),
    "runs": (results, "runs.json", [["report"]]),
    "rows": (results, "rows.json", [["report"]]),
}


def check(case: str, folder: Path, count: int, seed: int) -> None:
    make, pattern, verbs = CASES[case]
    (folder / "whole").mkdir()
    source = make(folder / "whole").relative_to(folder / "whole")
    draw = random.Random(seed)
    for number in range(count):
        shutil.copytree(folder / "whole", place := folder / "spoilt" / "here")
        path = draw.choice(sorted((place / source).glob(pattern)) if pattern else [place / source])
        spoil(path, draw)
        verb, given = draw.choice(verbs), path if make is results else place / source
        done = locater(*verb, given, *(["-o", folder / "page.html"] if verb == ["report"] else []))
        said = f"seed {seed}, number {number}: {path.read_bytes()[:400]} {done.err}"
        assert done.code in (0, 1, 2) and "a fault of locater" not in done.err, said
        assert "Traceback" not in done.err and (done.code == 0 or done.err.count("\n") == 1), said
        assert {entry.name for entry in (folder / "spoilt").iterdir()} == {"here"}, f"written outside: {said}"
        assert {entry.name for entry in folder.iterdir()} <= {"whole", "spoilt", "page.html"}, said
        shutil.rmtree(place.parent)


@pytest.mark.parametrize("case", CASES)
def test_a_spoilt_document_ends_in_a_page_or_a_sentence(case, tmp_path):
    check(case, tmp_path, 8, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("case", CASES)
def test_many_spoilt_documents_end_in_a_page_or_a_sentence(case, seed, tmp_path):
    check(case, tmp_path, 500, seed=seed)


def test_a_watched_run_shows_its_alarms(tmp_path):
    from locater.cli.report import read_source

    assert read_source(str(a_run(tmp_path)))["notes"] == ["step 15: logits grow"]


# A value that was written a moment ago, a word of the command line, a format whose header was read before, and a table
# that comes with the package.
PARSE_THEMSELVES = {
    "locater/reference.py",
    "locater_lab/studies/sweep/folder.py",
    "locater_lab/cli/sweep.py",
    "locater/checkpoints/quantised/packed.py",
}


def test_there_is_one_reader():
    """Whoever reads JSON or YAML from disk goes through `locater.records`."""
    source = Path(__file__).parents[2] / "src"
    parse = re.compile(r"\b(json\.loads?|yaml\.\w*load\w*)\(")
    found = {str(path.relative_to(source)) for path in source.rglob("*.py") if parse.search(path.read_text("utf-8"))}
    assert found - PARSE_THEMSELVES == {"locater/records.py"}


def test_a_document_beyond_the_budget_is_refused_before_it_is_read(tmp_path):
    document = tmp_path / "scan.json"
    with document.open("wb") as file:
        file.truncate(33 * 2**20)
    result = locater("report", document, "-o", tmp_path / "page.html")
    assert result.code == 1 and "at most 33554432 result bytes, got 34603008" in " ".join(result.err.split())
    assert not (tmp_path / "page.html").exists()
