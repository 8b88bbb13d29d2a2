"""One self-contained page of HTML from any results: no network, no third-party code, same input, same bytes."""

import base64
import gzip
import hashlib
import html
import json
import math
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy

from ..errors import shown
from ..quantities import GLOSSARY, QUANTITIES, REGIME_WORDS, REGIMES, THEORY, WEIGHTS, is_shown, quantity
from ..records import Json, write
from .does import does, legend
from .headline import headline, verdict
from .stories import Sentence
from .views import MOST_CHARACTERS, Document, View, all_shown, last_part, views_of

TITLE = "Self-attention Networks Localize When QK-eigenspectrum Concentrates"
PAPER = f'<a href="https://arxiv.org/abs/2402.02098" rel="noreferrer">Bao, Hataya, Karakida: {TITLE}, ICML 2024</a>'
SCRIPTS = ("data", "elements", "palette", "theory", "chart", "save", "map", "head", "table", "curves", "page")
CLICK = '<p class="small hint">Click a sentence to see its heads on the map.</p>'
NONE = 255
ALIGNMENT = 8
HALF_RANGE = 32_767


class Pack:
    """Collects arrays; the document refers to each by type, place and count."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def add(self, values: object, kind: str) -> Json:
        """Kinds as NumPy spells them, little-endian: f8, f4, i2, u2, u1; None among f8 is NaN."""
        data = numpy.ascontiguousarray(values, dtype=f"<{kind}").tobytes()
        place = {"kind": kind, "at": self.size, "count": len(data) // int(kind[1])}
        padded = data + bytes(-len(data) % ALIGNMENT)
        self.parts.append(padded)
        self.size += len(padded)
        return place

    def add_scaled(self, rows: object) -> Json:
        """Rows of numbers in 16 bits: each is off by at most 1/65534 of its row's largest magnitude.

        A row that is not known throughout has no unit (NaN).
        """
        table = numpy.atleast_2d(numpy.asarray(rows, dtype=numpy.float64))
        largest = numpy.abs(table).max(axis=1, initial=0)
        unit = numpy.where(largest == 0, 1, largest) / HALF_RANGE
        whole = numpy.nan_to_num(numpy.rint(table / unit[:, None]))
        return {"values": self.add(whole, "i2"), "units": self.add(unit, "f8")}

    def text(self, document: Json) -> str:
        """Length of the JSON, the JSON padded, the columns; gzip without a date; base64."""
        head = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
        head += b" " * (-len(head) % ALIGNMENT)
        whole = len(head).to_bytes(8, "little") + head + b"".join(self.parts)
        return base64.b64encode(gzip.compress(whole, compresslevel=9, mtime=0)).decode("ascii")


def save_page(documents: Sequence[Document], path: Path, **options: Any) -> None:
    """The page at `path`, whole or not at all."""
    text = page(documents, **options)
    write(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def page(
    documents: Sequence[Document],
    *,
    title: str | None = None,
    facts: dict[str, str] | None = None,
    note: str | None = None,
) -> str:
    """The page's text; `facts` are shown under "How this page was made", `note` is the sender's, above all else."""
    cleaned = [all_shown(document) for document in documents]
    views, runs = views_of(cleaned), [one for one in cleaned if one["schema"] == "locater.runs/1"]
    studies = [one for one in cleaned if one["schema"] == "locater.study/1"]
    said = verdict(views)
    sentences = [one for one in headline(views, [*runs, *studies]) if one.text not in said]
    title = shown(title or _title(views, [*runs, *studies]), MOST_CHARACTERS)
    sources = {view.name: "; ".join(f"{name}: {value}" for name, value in view.facts.items()) for view in views}
    pack = Pack()
    data = {
        "title": title,
        "behaviours": legend(),
        "views": [_packed(view, pack) for view in views],
        "quantities": _quantities(views),
        "regimes": [{"name": name, **word._asdict()} for name, word in REGIME_WORDS.items()],
        "sentences": [sentence.to_json() for sentence in sentences],
        "runs": runs,
        "studies": [{name: one.get(name) for name in ("figure", "rows", "behind")} for one in studies],
    }
    parts = {
        "title": html.escape(title),
        "verdict": f'<p class="verdict">{html.escape(said)}</p>' if said else "",
        "basis": "".join(f'<p class="basis">{html.escape(one)}</p>' for one in _bases(views)),
        "note": f'<p class="note">{html.escape(shown(note))}</p>\n' if note else "",
        "sentences": "\n".join(_sentence(number, one) for number, one in enumerate(sentences)),
        "click": CLICK if any(one.heads and len(views[one.view].heads) > 1 for one in sentences) else "",
        "made": definitions(all_shown(facts or {}) | sources),
        "glossary": definitions(GLOSSARY),
        "primer": _primer(views) if views else "",
        "paper": PAPER,
        "data": pack.text(data),
    }
    return assemble(asset("page.html"), [asset(f"{name}.js") for name in SCRIPTS], parts)


MAP = """The map has a cell for each head, one row per layer. Its colour says what the head does, where that is
known. The menu above the map colours it by a number instead."""
ONE = "There is one head here; its numbers are below."


def _primer(views: list[View]) -> str:
    """The explanation, whose theory is open where the page has numbers of W."""
    has_spectra = any(name in view.columns for view in views for name in ("xi", "eta"))
    many = any(len(view.heads) > 1 for view in views)
    return (
        asset("primer.html")
        .replace("{{theory}}", " open" if has_spectra else "")
        .replace("{{map}}", MAP if many else ONE)
    )


def _bases(views: list[View]) -> list[str]:
    """List the texts that views rest on, each with its model's name where there are several."""
    several = len(views) > 1
    return [f"{view.name}: {view.basis}" if several else view.basis for view in views if view.basis]


def assemble(template: str, scripts: Sequence[str], parts: dict[str, str]) -> str:
    """The template with style, scripts and parts in their places, and a policy that lets nothing else run or load."""
    style = asset("page.css")
    script = '"use strict";\n(() => {\n' + "\n".join(scripts) + "\n})();\n"
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    filled = {"policy": policy, "style": style, "script": script, **parts}
    # In one pass: a title that says {{data}} stays a title.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: filled[place[1]], template)


def asset(name: str, package: str = __package__ or "") -> str:
    """The text of a file among the assets of a package, this one unless named."""
    return resources.files(package).joinpath("assets", name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _title(views: list[View], others: list[Document]) -> str:
    """Name the models, the folder of runs, or the question."""
    if views:
        names = list(dict.fromkeys(view.name for view in views if not view.is_pair)) or [views[0].name]
        return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
    first = others[0] if others else {}
    return first.get("question") or f"Runs in {last_part(first.get('folder', 'a folder'))}"


def _sentence(number: int, sentence: Sentence) -> str:
    text = html.escape(sentence.text)
    if sentence.heads:
        text = f'<button type="button" class="link" title="Show these heads" data-sentence="{number}">{text}</button>'
    return f'<li class="{sentence.tone}">{text}</li>'


def definitions(entries: dict[str, str]) -> str:
    rows = (f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>" for name, value in entries.items())
    return f"<dl>{''.join(rows)}</dl>"


def _quantities(views: list[View]) -> list[Document]:
    """List the quantities that any view has: what heads do first, then the weights' and the theory's, then others."""
    present = dict.fromkeys(name for view in views for name in view.columns if is_shown(name, view.columns))
    known = [name for name in QUANTITIES if name in present]
    ordered = sorted(known, key=lambda name: QUANTITIES[name].basis in (WEIGHTS, THEORY))
    return [quantity(name).to_json() for name in [*ordered, *(name for name in present if name not in QUANTITIES)]]


def _packed(view: View, pack: Pack) -> Document:
    blocks = sorted({key[0] for key in view.heads})
    doing, names = does(view), [word["name"] for word in legend()]
    codes = [[sum(1 << names.index(word) for word in words or ()) for words in frame] for frame in doing.words]
    regimes = {name: code for code, name in enumerate(REGIMES)}
    found: Document = {
        "name": view.name,
        "facts": view.facts,
        "frames": view.frames,
        "blocks": blocks,
        "block": pack.add([blocks.index(key[0]) for key in view.heads], "u1"),
        "layer": pack.add([key[1] for key in view.heads], "u2"),
        "head": pack.add([key[2] for key in view.heads], "u2"),
        "columns": {name: pack.add(frames, "f8") for name, frames in view.columns.items()},
        "does": pack.add(codes, "u2"),
        "source": doing.source,
        "regime": pack.add([[regimes.get(regime or "", NONE) for regime in frame] for frame in view.regimes], "u1"),
        "alarms": view.alarms,
        "is_pair": view.is_pair,
        "length": view.length,
        "course": view.course,
        "bins": view.bins,
        "distances": view.distances,
    }
    return found | _curves(view.records, pack)


def _curves(records: list[Document], pack: Pack) -> Document:
    """Pack curves that only some heads may have: eigenvalues and lines over position or distance, 16 bits each."""
    found: Document = {}
    if any(record.get("eigenvalues") for record in records):
        widest = max(len(record.get("eigenvalues") or ()) for record in records)
        rows = numpy.zeros((len(records), 2 * widest))
        for row, record in zip(rows, records, strict=True):
            values = numpy.array(record.get("eigenvalues") or [], dtype=float).reshape(-1)
            row[: len(values)] = values
        counts = [len(record.get("eigenvalues") or ()) for record in records]
        found["eigenvalues"] = pack.add_scaled(rows) | {"counts": pack.add(counts, "u2")}
    for group in ("profiles", "expected_logits", "attention_profile", "logit_profile"):
        names = dict.fromkeys(name for record in records for name in record.get(group) or {})
        lines = {name: [record.get(group, {}).get(name) for record in records] for name in names}
        # A head without a line has NaN: zeros would be drawn as if measured.
        blank = {name: [math.nan] * max(len(row) for row in rows if row) for name, rows in lines.items()}
        found[group] = {name: pack.add_scaled([row or blank[name] for row in rows]) for name, rows in lines.items()}
    return found
