"""The explorer in a real browser: its mathematics against Python's, its sliders, its story."""

import json
import math

import numpy
import pytest
import torch

from browser import serious_faults
from command import locater
from locater.spectra import Grams, Moments
from locater.theory import closed_form, exact, regimes
from locater.theory.random_walk import Turns
from locater_lab.explorer import page as explorer

HEAD = dict(block="decoder", layer=3, head=1, key_head=1, d_model=64, d_head=16, temperature=4.0, regime="mixed")
HEAD |= dict(trace=6.0, trace_of_square=-2.0, frobenius_squared=40.0, xi=1.2, localisation=0.1, spread=0.1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The page of the command itself, with a scan of one head."""
    folder = tmp_path_factory.mktemp("explore")
    head = HEAD | {"eta": math.sqrt((HEAD["trace_of_square"] + 2 * HEAD["frobenius_squared"]) / 3)}
    facts = {"source": "x", "family": "llama", "format": "x", "coverage": "COMPLETE", "length": 64}
    (folder / "scan.json").write_text(json.dumps({"schema": "locater.scan/1", **facts, "heads": [head]}))
    found = locater("explore", folder / "scan.json", "-o", folder / "explore.html")
    assert found.code == 0, found.err
    return folder / "explore.html"


@pytest.fixture
def opened(browser, made):
    browser.open(made)
    return browser


def test_opens_without_complaint_and_is_accessible(opened, browser, made):
    assert opened.complaints() == [] and opened.requests() == []
    assert serious_faults(opened) == []
    opened.keep("explore-1300-light")
    browser.open(made, width=390, dark=True)
    browser.keep("explore-390-dark")
    assert serious_faults(browser) == [] and browser.run("return document.documentElement.scrollWidth <= innerWidth")


def test_the_closed_form_is_pythons_at_a_thousand_points(opened):
    draws = numpy.random.default_rng(0)
    norm = 10 ** draws.uniform(-6, 4, 1000)
    points = zip(
        draws.normal(size=1000) * 10 ** draws.uniform(-3, 2, 1000),
        norm * draws.uniform(-1, 1, 1000),
        norm,
        draws.integers(1, 5000, 1000).tolist(),
        10 ** draws.uniform(-2, 2, 1000),
        strict=True,
    )
    cases = [
        (*map(float, point[:3]), point[3], float(point[4]), float(draws.integers(1, point[3] + 1))) for point in points
    ]
    shown = opened.run(
        "return arguments[0].map(([trace, square, norm, length, temperature, t]) =>"
        "locater.closedForm({trace, square, norm}, length, temperature, [t])[0])",
        cases,
    )
    truth = []
    for trace, square, frobenius, length, temperature, t in cases:
        found = Moments(
            *(torch.tensor(x, dtype=torch.float64) for x in (trace, square, frobenius)), d_model=1, d_head=1
        )
        at = torch.tensor([t], dtype=torch.float64)
        truth.append(float(closed_form.at(at, found, length=length, temperature=temperature)[0]))
    assert numpy.abs(numpy.array(shown) - truth).max() < 1e-9
    assert sum(0.01 < rho < 0.99 for rho in truth) > 100  # the points are no formality


def test_rotary_positions_are_pythons(opened):
    frequencies = 10_000.0 ** (-torch.arange(32, dtype=torch.float64) / 32)
    pairs = torch.arange(64).reshape(2, 32).T
    for trace, norm, length in ((2.0, 3.0, 64), (-1.0, 0.2, 33), (5.0, 2.0, 256)):
        eye = torch.eye(64, dtype=torch.float64)
        grams = Grams(eye * trace / 64, eye * norm / 64, eye)
        series = closed_form.Series(length, torch.arange(1, length + 1), Turns(pairs, frequencies))
        truth = series.profile(grams, temperature=1.0)
        script = (
            "return locater.rotaryForm({trace: arguments[0], norm: arguments[1]}, arguments[2], 10000, arguments[3])"
        )
        shown = opened.run(script, trace, norm, length, list(range(1, length + 1)))
        assert numpy.abs(numpy.array(shown) - truth.numpy()).max() < 1e-9


def test_the_exact_grid_is_within_the_error_that_it_states(opened):
    stated = opened.run("return locater.explorer.data.grid.error")
    assert stated < 0.015
    draws, worst = numpy.random.default_rng(5), 0.0
    for _ in range(24):
        trace, deviation = float(draws.uniform(-3, 3)), float(10 ** draws.uniform(-2, 0.5))
        length = int(draws.choice(explorer.LENGTHS))
        weights = torch.diag(torch.tensor(explorer._eigenvalues(trace, deviation), dtype=torch.float64))
        form = exact.canonical_form(
            weights, torch.eye(len(weights), dtype=torch.float64), length=length, temperature=1.0
        )
        at = torch.linspace(1, length, explorer.NUM_POSITIONS, dtype=torch.float64)
        knobs = {"trace": trace, "deviation": deviation, "length": length, "symmetry": 1, "base": 0, "temperature": 1}
        script = "const {grid, data} = locater.explorer; return locater.gridProfile(data.grid, grid, arguments[0])"
        shown = opened.run(script, knobs | {"width": explorer.WIDTH})
        worst = max(worst, numpy.abs(numpy.array(shown) - exact.evaluate(form, at).numpy()).max())
    assert 1e-5 < worst < 1.5 * stated


def test_regimes_and_localisation_are_pythons(opened):
    profiles = torch.rand(200, 40, dtype=torch.float64).sort(-1).values * torch.logspace(-2, 0, 200)[:, None]
    profiles[::3] = profiles[::3].flip(-1)
    script = (
        "return arguments[0].map((p) => [locater.regimeOf(p, locater.explorer.data.limits), locater.localisation(p)])"
    )
    shown = opened.run(script, profiles.tolist())
    assert [one[0] for one in shown] == regimes.classify_all(profiles)
    assert [one[1] for one in shown] == pytest.approx(regimes.localisation(profiles).tolist(), abs=1e-12)


def slide(browser, name, value):
    browser.run(
        "const s = document.getElementById('knob-' + arguments[0]); s.value = arguments[1];"
        "s.dispatchEvent(new Event('input'))",
        name,
        value,
    )


def test_the_story_can_be_walked_with_the_sliders(opened):
    moves = [None, ("deviation", math.log(5)), ("trace", math.asinh(0.3 / 0.03)), ("trace", math.asinh(4 / 0.03)),
             ("trace", math.asinh(-1 / 0.03)), ("deviation", math.log(0.05))]  # fmt: skip
    for number, move in enumerate(moves):
        opened.run("document.querySelectorAll('#story button')[arguments[0]].click()", number)
        if move:
            assert not opened.run("return document.getElementById('mark-' + arguments[0]).textContent", number)
            slide(opened, *move)
        assert "done" in opened.run("return document.getElementById('mark-' + arguments[0]).textContent", number)
    opened.run("locater.explorer.begin(0); document.getElementById('next-step').click()")
    assert opened.run("return locater.explorer.step") == 1 and opened.complaints() == []


def test_the_exact_curve_is_there_up_to_the_sliders_ends_and_its_absence_is_said(opened):
    verdict = "return document.getElementById('verdict').textContent"
    for name, low, high in (("deviation", 0.003, 6), ("trace", -6, 6)):
        for value in (low, high):
            opened.run(
                "locater.explorer.set({trace: 0, deviation: 1, [arguments[0]]: arguments[1] * (1 + 1e-12)})",
                name,
                value,
            )
            assert "not drawn" not in opened.run(verdict), (name, value)
    slide(opened, "symmetry", 0.5)
    assert "The exact ρ is not drawn: it is there for T = 64 and 256" in opened.run(verdict)


def test_a_head_of_the_scan_sets_the_sliders(opened):
    opened.run("const s = document.getElementById('knob-head'); s.value = 0; s.dispatchEvent(new Event('change'))")
    assert opened.run("return document.getElementById('value-trace').textContent") == "1.5"
    moments = opened.run("return locater.toyMoments(locater.explorer.knobs)")
    expected = {"trace": 6 / 4, "square": -2 / 16, "norm": 40 / 16}
    assert moments == pytest.approx(expected)


def test_a_slider_let_go_beside_a_head_takes_it_with_its_symmetry(opened):
    """And so does a click beside its dot on the plane; further away the place itself is taken."""
    slide(opened, "deviation", math.log(math.sqrt((-2 + 2 * 40) / 3 - 6**2 / 64) / 4))
    slide(opened, "trace", math.asinh(1.45 / 0.03))
    knobs = "return ['trace', 'symmetry', 'width'].map((name) => locater.explorer.knobs[name])"
    assert opened.run(knobs)[1:] == [1, 8]
    opened.run("document.getElementById('knob-trace').dispatchEvent(new Event('change'))")
    assert opened.run(knobs) == pytest.approx([1.5, -2 / 40, 64])
    assert "Head decoder 3.1" in opened.run("return document.getElementById('verdict').textContent")
    opened.run("locater.explorer.begin(0); locater.explorer.jump(0.01, 0.01)")
    assert opened.run(knobs) == pytest.approx([0.01, 1, 8])
    opened.run("const e = locater.explorer; e.jump(e.heads[0].trace * 1.01, e.heads[0].deviation)")
    assert opened.run(knobs) == pytest.approx([1.5, -2 / 40, 64])
    slide(opened, "symmetry", 0.5)
    assert "Head" not in opened.run("return document.getElementById('verdict').textContent")


def test_planes_of_several_layers_can_be_chosen(opened):
    """With eight bare layers the middle of the plane collapses in rank, with norms it does not."""
    titles = "return [...document.querySelectorAll('#planes h3')].map((title) => title.textContent)"
    assert opened.run(titles)[1] == "Simulated softmax: entropy"
    choose = (
        "const one = document.getElementById('knob-layers'); one.value = '2'; one.dispatchEvent(new Event('change'))"
    )
    opened.run(choose)
    assert opened.run(titles)[1:] == [
        "Theory of depth, 8 layers: entropy",
        "Theory of depth, 8 layers: how distinct tokens stay",
    ]
    planes = opened.run(
        "return window.locater.explorer.plane.deeper.map(({ title, residual }) => [title, residual[0]])"
    )
    middle = {title: row[len(row) // 2] for title, row in planes}
    assert middle["8 layers"] < 0.15 < middle["8 layers with norms"]
    assert dict(planes)["8 layers"][-4] > 0.9  # a mean, and hardly any deviation
    assert opened.complaints() == []
