"""Every study in miniature: its rows against what is known, a planted effect found and a planted null called null."""

import itertools
import json
import math
import random
from pathlib import Path

import numpy
import pytest
import torch

from command import locater
from locater.errors import BadArguments
from locater.theory import closed_form
from locater_lab.studies import (
    collapse,
    depth,
    localisation_helps,
    profiles,
    reconcile,
    sensitivity,
    softmax,
    spectrum_vs_attention,
    trained,
)
from locater_lab.studies.page import BOX, shared_runs, study_page
from locater_lab.studies.statistics import (
    Finding,
    MeanEstimate,
    corrected,
    holm,
    matched_difference,
    paired,
    partial_correlation,
    seed_means,
    spearman_estimate,
    tally,
)
from locater_lab.studies.study import STUDIES, Answer, document, find_study, flat
from locater_lab.studies.synthetic import Spectrum, attend_densely, of_xi_and_eta, tokens

pytestmark = pytest.mark.quick

QUIET = random.Random(0)


def test_paired_interval_is_students():
    from scipy.stats import ttest_rel

    ours, theirs = {0: 1.0, 1: 2.5, 2: 2.0, 9: 7.0}, {0: 0.5, 1: 1.0, 2: 1.8, 8: 7.0}
    found = paired(ours, theirs)
    reference = ttest_rel([1.0, 2.5, 2.0], [0.5, 1.0, 1.8])
    interval = reference.confidence_interval(0.95)
    assert (found.low, found.high, found.count) == (pytest.approx(interval.low), pytest.approx(interval.high), 3)
    assert found.p == pytest.approx(reference.pvalue)
    assert paired({0: 1.0}, {0: 2.0}).low == -math.inf and paired({}, {}).count == 0


def verdict(estimate: MeanEstimate, kind: str = "difference") -> str:
    return Finding("loss", "a", estimate, kind).verdict


def test_words_follow_the_interval():
    lower = paired({n: n - 1.0 + 0.01 * n for n in range(3)}, {n: float(n) for n in range(3)})
    assert verdict(lower) == "lower"
    null = paired(dict(enumerate((1.0, -1.0, 0.1))), dict.fromkeys(range(3), 0.0))
    assert verdict(null) == "no difference seen"
    assert verdict(paired({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.0})) == "too few seeds"
    assert verdict(spearman_estimate(range(9), range(9)), "relation") == "rises"
    assert verdict(spearman_estimate(range(9), [3, 8, 1, 7, 2, 6, 0, 5, 4]), "relation") == "no relation seen"
    assert "no variation" in verdict(spearman_estimate([1.0] * 9, range(9)), "relation")
    many = [Finding("loss", name, lower) for name in "abcd"] + [Finding("loss", "e", null)]
    assert tally(many) == f"lower for 4 of 5, most for a ({lower}); no difference seen for e"
    assert tally(many[:2]) == f"lower for a ({lower}) and b"
    assert tally([Finding("loss", name, null) for name in "ab"]) == "no difference seen for any of 2"
    assert Finding("loss", "a", paired({0: 1.0}, {0: 2.0})).to_json()["low"] is None


def test_pairs_that_agree_exactly_are_not_certain():
    equal = paired({0: 5.1, 1: 6.3, 2: 4.4}, {0: 5.0, 1: 6.2, 2: 4.3})  # 0.1 each, but for rounding
    assert equal.low == -math.inf and equal.p == 1 and not equal.is_seen and verdict(equal) == "no spread to judge by"
    assert str(equal).endswith("(no interval)")
    same = dict(enumerate((5.1, 6.3, 4.4)))
    assert verdict(paired(same, same)) == "no difference seen"


def test_an_estimate_has_as_many_places_as_its_largest_end():
    assert str(MeanEstimate(-0.0599, -0.0609, -0.059, 0.01, 3)) == "-0.0599 [-0.0609, -0.0590]"
    assert (
        str(MeanEstimate(120.4, -3.0, 250.0, 0.5, 3)) == "+120 [-3, +250]"
        and str(MeanEstimate(0, 0, 0, 1, 3)) == "+0 [+0, +0]"
    )


def test_what_is_not_known_is_no_number():
    assert str(spearman_estimate([1.0] * 9, range(9))) == "–" == str(paired({}, {}))


def test_few_points_have_the_p_of_all_their_orders():
    x, y = [3.0, 1.0, 2.0, 5.0, 4.0, 6.0], [2.0, 1.0, 3.0, 4.0, 6.0, 5.0]
    correlations = [numpy.corrcoef(x, order)[0, 1] for order in itertools.permutations(y)]
    expected = sum(abs(one) >= abs(numpy.corrcoef(x, y)[0, 1]) - 1e-9 for one in correlations) / 720
    assert spearman_estimate(x, y).p == pytest.approx(expected)
    assert spearman_estimate(range(4), range(4)).p == pytest.approx(2 / 24), "of four points nothing is seen"
    assert not corrected([Finding("", "", spearman_estimate(range(4), range(4)))])[0].estimate.is_seen


def test_what_a_third_number_explains_is_no_relation():
    """Two numbers that follow the place with noise of their own, and two that share more than the place."""
    draw = random.Random(3)
    places = range(200)

    def made(shared: float) -> float:
        common = [draw.gauss(0, 20) for _ in places]
        ours, theirs = (
            [place + shared * one + draw.gauss(0, 20) for place, one in zip(places, common, strict=True)] for _ in "ab"
        )
        assert spearman_estimate(ours, theirs).value > 0.5
        return partial_correlation(ours, theirs, places)

    assert abs(made(0.0)) < 0.2 and made(1.0) > 0.35
    assert math.isnan(partial_correlation(places, places, places))


def test_spearman_covers_what_it_says():
    """Of samples with a known rank correlation nineteen in twenty intervals hold it."""
    generator = torch.Generator().manual_seed(0)
    true = 6 / math.pi * math.asin(0.6 / 2)  # of a Gaussian pair with correlation 0.6
    held = 0
    for _ in range(300):
        x, noise = torch.randn(2, 40, generator=generator)
        found = spearman_estimate(x.tolist(), (0.6 * x + 0.8 * noise).tolist())
        held += found.low <= true <= found.high
    assert 0.91 <= held / 300 <= 0.985


def test_holm_is_holms():
    estimates = {name: paired(dict(enumerate(values)), dict.fromkeys(range(4), 0.0)) for name, values in PAIRS.items()}
    raw = {name: one.p for name, one in estimates.items()}
    corrected = holm(estimates)
    ordered = sorted(raw, key=raw.__getitem__)
    assert corrected[ordered[0]].adjusted == pytest.approx(min(1, 3 * raw[ordered[0]]))
    assert estimates["weak"].is_seen and not corrected["weak"].is_seen  # seen alone, not among three
    assert corrected["strong"].is_seen
    for name, one in corrected.items():  # p and interval stay those of the comparison itself
        assert (one.p, one.low, one.high) == (raw[name], estimates[name].low, estimates[name].high)
    assert (corrected["weak"].shown_p, estimates["weak"].shown_p) == (f"{corrected['weak'].adjusted:.3f}", "")
    assert "p (Holm)" in Answer("", "", [Finding("loss", "a", corrected["weak"])]).behind().columns


def test_holm_claims_hardly_any_of_many_nulls():
    """Of 100 families of ten planted nulls at most one in ten has a claim."""
    draw = random.Random(5)

    def family() -> bool:
        nulls = {
            str(n): paired({s: draw.gauss(0, 1) for s in range(5)}, dict.fromkeys(range(5), 0.0)) for n in range(10)
        }
        return any(one.is_seen for one in holm(nulls).values())

    assert sum(family() for _ in range(100)) <= 10


def test_a_matched_difference_sees_through_a_confounder():
    """Exposure and outcome both follow the stratum: the crude difference is large, the matched one is nothing."""
    strata = [([True] * 8 + [False] * 2, [True] * 4 + [False]), ([True], [True] + [False] * 9), ([], [True] * 50)]
    ours = [one for exposed, _ in strata[:1] for one in exposed]
    theirs = [one for _, other in strata[1:2] for one in other]
    assert sum(ours) / len(ours) - sum(theirs) / len(theirs) > 0.5
    assert matched_difference(strata[:1] * 3) == pytest.approx(0)
    effect = [([True] * 5 + [False] * 5, [False] * 10), ([True] * 10, [True, False] * 5)]
    assert matched_difference(effect) == pytest.approx(0.5)
    sizes = [([True], [False]), ([False] * 8, [False] * 8)]  # a difference of 1 in two points, of 0 in sixteen
    assert matched_difference(sizes) == pytest.approx(1 / 9)
    assert math.isnan(matched_difference(strata[2:]))


def test_means_over_seeds_leave_one_row_for_each_point():
    rows = [{"x": x, "seed": seed, "y": x + seed} for x in (1, 2) for seed in range(3)]
    assert seed_means(rows, ["x"], ["y"]) == [{"x": 1, "y": 2}, {"x": 2, "y": 3}]


PAIRS = {"strong": (1.0, 1.01, 0.99, 1.0), "weak": (1.0, 0.4, 1.5, 0.5), "none": (1.0, -1.0, 0.5, -0.6)}


def test_a_set_spectrum_is_the_spectrum():
    spectrum = of_xi_and_eta(3.0, 0.5, d_model=32)
    matrix = spectrum.matrix(32, torch.Generator().manual_seed(0))
    square = (matrix @ matrix).trace()
    assert float(matrix.trace() / square.sqrt()) == pytest.approx(3.0)
    assert float(square.sqrt()) == pytest.approx(0.5 * math.sqrt(32))
    profile = closed_form.profile(matrix, torch.eye(32, dtype=torch.float64), length=16)
    torch.testing.assert_close(spectrum.profile(length=16, d_model=32), profile)


def test_attention_of_a_set_matrix_is_causal_and_looks_where_keys_agree():
    x = tokens("walk", count=2, length=12, d_model=16, generator=torch.Generator().manual_seed(0))
    matrix = Spectrum(2.0, 0.0).matrix(16, torch.Generator().manual_seed(0))
    weights = attend_densely(x, matrix)
    assert weights.triu(1).abs().max() == 0
    expected = ((x[1, 9] @ matrix.T) @ x[1, :10].T / 4).softmax(-1)
    torch.testing.assert_close(weights[1, 9, :10], expected)
    assert (attend_densely(x, matrix, sink=True)[:, 3, 0] > weights[:, 3, 0]).all()


def test_profiles_are_the_theory_and_gaps_are_told(tmp_path):
    point = {"xi": 5.0, "eta": 2.5, "length": 16}
    rows = [point | row for row in profiles.measure(point, tmp_path)]
    assert {row["method"] for row in rows} == {"closed", "exact"} and len(rows) == 32
    assert "within 0.05 of the exact law on 1 of the 1" in profiles.conclude(rows).second
    wrong = [row | {"rho": row["rho"] + 0.3 * (row["method"] == "exact")} for row in rows]
    assert "on 0 of the 1" in profiles.conclude(wrong).second and "gap being 0.3" in profiles.conclude(wrong).second


def test_softmax_close_at_small_scale_and_far_at_large(tmp_path):
    points = [{"length": 16, "xi": 0.0, "walks": 60, "eta": eta} for eta in (0.001, 0.01, 0.1, 1.0, 5.0)]
    rows = [point | softmax.measure(point, tmp_path) for point in points]
    assert rows[0]["distance"] < 0.01 and rows[-1]["distance"] > 0.5
    assert "rank correlation over 5 points 1.000" in softmax.conclude(rows).first


@pytest.mark.parametrize(
    ("scale", "planted"),
    [
        ("T·η(1 + |ξ|)/λ", lambda length, eta, xi: length * eta * (1 + abs(xi))),
        ("T·η/λ", lambda length, eta, xi: length * eta),
        ("√T·η/λ", lambda length, eta, xi: math.sqrt(length) * eta),
    ],
)
def test_softmax_names_the_scale_that_orders_the_distance_and_the_word_that_is_lost(scale, planted):
    words = {True: ("middle", "late"), False: ("late", "late")}
    rows = [
        {"length": length, "eta": eta, "xi": xi, "distance": planted(length, eta, xi) / 1000}
        | dict(zip(("regime", "softmax_regime"), words[eta > 0.5], strict=True))
        for length in (16, 64, 256)
        for eta in (0.01, 0.1, 1.0)
        for xi in (0.0, 6.0)
    ]
    found = softmax.conclude(rows)
    assert f"goes with {scale} (rank correlation over 18 points 1.000" in found.first
    assert found.first.count("1.000") == 1, "no other scale orders them"
    assert "*middle* on 0 of 6" in found.second and "on 12 of 18 points" in found.second
    assert [row[:3] for row in found.table.rows] == [["middle", "6", "0"], ["late", "12", "12"]]
    null = softmax.conclude([row | {"distance": QUIET.random()} for row in rows * 8])
    assert abs(float(null.first.split("points ")[1].split(";")[0])) < 0.3


def grid_of_reconcile(residual) -> list[dict]:
    """Rows whose rank residual is a function of deviation and trace, with a little noise for each seed."""
    return [
        {"deviation": deviation, "trace": trace, "layers": 8, "norm": False, "seed": seed, "entropy": 0.7}
        | {"residual": residual(deviation, trace) + QUIET.gauss(0, 0.01)}
        for deviation in (0.01, 0.1, 1.0, 10.0)
        for trace in (0.0, 0.5, 2.0)
        for seed in range(4)
    ]


def test_reconcile_finds_a_planted_interaction_and_no_other():
    """An effect of the mean at small deviations only is one; effects of both that add up are none."""

    def found(residual) -> Finding:
        return reconcile.conclude(grid_of_reconcile(residual)).findings[0]

    planted = found(lambda deviation, trace: 1.0 if trace and deviation < 0.5 else 0.1)
    assert planted.verdict == "higher" and planted.estimate.value == pytest.approx(0.9, abs=0.05)
    assert found(lambda deviation, trace: 0.3 * trace + 0.2 * (deviation > 0.5)).verdict == "no difference seen"
    assert found(lambda deviation, trace: 0.5).verdict == "no difference seen"
    assert found(lambda deviation, trace: 0.5).estimate.count == 4  # seeds, not points


def test_reconcile_measures_entropy_and_rank(tmp_path):
    points = [{"deviation": d, "trace": 0.0, "layers": 2, "norm": True, "seed": 0} for d in (0.01, 3.0)]
    small, large = (reconcile.measure(point, tmp_path) for point in points)
    assert small["entropy"] > large["entropy"]
    told = reconcile.conclude([points[0] | small | {"residual": 0.01}])
    assert "rank collapses on 1 of 1 points" in told.second


def test_collapse_is_matched_on_the_deviation(tmp_path):
    """Collapse that follows the deviation alone, as the words do in part, makes no difference; one of a word does."""
    point = {"tokens": "walk", "layers": 1, "norm": False, "sink": False, "seed": 0, "rows": 6}
    measured = collapse.measure(point, tmp_path)
    assert len(measured) == 6 * len(collapse.TRACES) and {"late", "uniform"} <= {row["regime"] for row in measured}
    rows = [point | row | {"seed": seed} for row in measured for seed in range(3)]

    def found(collapses) -> dict[str, list[float]]:
        entropies = ({"entropy": 0.1 if collapses(row) else 0.9, "residual": 0.9} for row in rows)
        return collapse._differences([row | entropy for row, entropy in zip(rows, entropies, strict=True)])

    def crude(collapses) -> float:
        near = [row for row in rows if abs(row["trace"]) <= 1]
        shares = [[collapses(row) for row in near if (row["regime"] == "late") == is_late] for is_late in (True, False)]
        return sum(shares[0]) / len(shares[0]) - sum(shares[1]) / len(shares[1])

    def by_deviation(row):
        return row["deviation"] > 0.5

    assert crude(by_deviation) < -0.2  # confounded: few are late where the deviation is large
    assert all(value == 0 for seeds in found(by_deviation).values() for value in seeds)
    planted = found(lambda row: row["regime"] != "late")
    assert planted["late"] == pytest.approx([-1.0] * 3) and planted["early"] == pytest.approx([0.0] * 3)
    told = collapse.conclude([row | {"entropy": 0.1 if row["regime"] != "late" else 0.9} for row in rows])
    assert "in 0 of 1 variants" in told.first and "late -1.00" in told.second


def test_attention_follows_a_planted_spectrum(tmp_path):
    points = [{"tokens": "walk", "xi": xi, "eta": eta, "seed": 0} for xi in (-4.0, 0.0, 4.0) for eta in (0.003, 0.3)]
    rows = [point | spectrum_vs_attention.measure(point, tmp_path) for point in points]
    by_scale = {row["eta"]: row["near_mass"] for row in rows if row["xi"] == 4.0}
    assert by_scale[0.3] > by_scale[0.003]  # a mean above zero looks at the last tokens


def test_an_even_function_of_the_mean_is_seen():
    """Entropy that falls with |ξ| has no monotone relation with ξ; it has one with |ξ|, at each scale."""

    def effects(entropy) -> dict[str, list[float]]:
        points = [
            {"xi": xi, "eta": eta, "entropy": entropy(xi, eta), "near_mass": xi}
            for xi in (-7.0, -4.0, -2.0, -1.0, 0.0, 1.0, 2.0, 4.0, 7.0)
            for eta in (0.003, 0.03, 0.3, 3.0)
        ]
        return spectrum_vs_attention._effects(points)

    even = effects(lambda xi, eta: 1 / (1 + xi**2) - eta)
    assert even["entropy over |ξ|"] == pytest.approx([-1.0] * 3, abs=1e-3)
    assert even["entropy over η"] == pytest.approx([-1.0] * 9, abs=1e-3)
    assert even["near mass over ξ"] == pytest.approx([1.0] * 4, abs=1e-3)
    odd = effects(lambda xi, eta: xi - eta)
    assert odd["entropy over |ξ|"] == pytest.approx([0.0] * 3, abs=0.2)
    draws = [effects(lambda xi, eta: QUIET.random())["entropy over |ξ|"] for _ in range(40)]
    assert abs(sum(map(sum, draws)) / 120) < 0.1  # a planted null


def arms(name: str, quantity: str, effect: float, conditions=("", "deep")) -> list[dict]:
    """Rows of a training study in which every arm but none has this effect, and seeds differ by more."""
    return [
        {"condition": condition, "arm": arm, "seed": seed, "best_step": 10}
        | {quantity: 5.0 + seed + (arm != "none") * (effect + (0.01, -0.012, 0.001)[seed])}
        for condition in conditions
        for arm in ("none", name)
        for seed in range(3)
    ]


@pytest.mark.parametrize("name", ["mechanism", "depth", "sensitivity"])
def test_training_studies_find_what_is_planted_and_no_more(name):
    study = find_study(name)
    conditions = tuple(depth.CONDITIONS)[:2] if name == "depth" else ("as it is", "deep")

    def verdicts(effect: float) -> list[str]:
        rows = [
            row | {"agreement": [0.1], "agreement_at_place": [0.0]}
            for row in arms("locater", "best_loss", effect, conditions)
        ]
        return [one.verdict for one in study.conclude(rows).findings if "loss" in one.what]

    assert verdicts(-0.5).count("lower") == 2 and "higher" not in verdicts(-0.5)
    assert set(verdicts(0.0)) == {"no difference seen"}


def test_a_gain_that_depends_on_a_factor_is_told_from_one_that_does_not():
    rows = arms("locater", "best_loss", -0.5, ("as it is", "pre-LN")) + arms("locater", "best_loss", 0.5, ("rotary",))
    noise = iter(QUIET.gauss(0, 0.01) for _ in rows)
    found = sensitivity.conclude([row | {"best_loss": row["best_loss"] + next(noise)} for row in rows]).findings
    changes = {one.of: one.verdict for one in found if "as it is" in one.what}
    assert changes == {"pre-LN": "no difference seen", "rotary": "higher"}


def test_loss_that_follows_localisation_is_told_from_loss_that_does_not():
    def found(loss, seeds: int = 5) -> str:
        rows = [
            {"condition": "text", "arm": f"window {n}", "kind": "window", "seed": seed, "near_mass": n / 10}
            | {"best_loss": 5 + loss(n) + 1e-3 * QUIET.random(), "entropy": 1 - n / 10}
            for n in range(7)
            for seed in range(seeds)
        ]
        return localisation_helps.conclude(rows).findings[0].verdict

    own = (0.1, 0.4, 0.2, 0.6, 0.3, 0.5, 0.7)  # of each arm, the same on all seeds, and not of where it looks
    assert found(lambda n: n) == "rises" and found(lambda n: own[n]) == "no relation seen"
    assert found(lambda n: QUIET.random()) == "no relation seen"
    assert found(lambda n: n, seeds=2).startswith("too few seeds"), "two seeds make no claim, of no relation either"


def test_a_trained_point_is_what_its_metrics_say(tmp_path, monkeypatch):
    from training_cases import TINY, write_text

    monkeypatch.setenv("LOCATER_CACHE", str(tmp_path / "cache"))
    options = TINY | {"data": str(write_text(tmp_path))}
    point = {"name": "none-seed3", "arm": "none", "seed": 3, "preset": "paper", "options": options}
    found = trained.measure(point, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if row["kind"] == "validation"}
    assert found["best_loss"] == min(losses.values()) == losses[found["best_step"]] and found["step"] == 20
    assert json.loads((tmp_path / "run" / "config.json").read_text())["loop"]["seed"] == 3
    model = trained.load(tmp_path / "run" / "model")
    attention = model.layers[0].attention
    squares = [
        torch.linalg.svdvals(attention.key.weight[rows].T @ attention.query.weight[rows]).square()
        for rows in (slice(0, 8), slice(8, 16))
    ]
    counted = sum((one.sum() ** 2 / one.square().sum()).item() for one in squares) / 2
    assert found["directions"] == pytest.approx(counted, rel=1e-4)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_the_one_shape(name):
    study = find_study(name)
    for quick in (True, False):
        points = study.grid(quick)
        assert json.loads(json.dumps(points)) == points
        assert len({json.dumps(point, sort_keys=True) for point in points}) == len(points)
    assert len(study.grid(True)) <= len(study.grid(False)) and study.question.endswith("?") and study.doubt


def test_a_document_says_what_is_missing():
    rows = [{"point": {"a": 1}, "error": "no room"}]
    found = document("profiles", rows, num_points=2)
    assert found["answer"] == ["Nothing has been measured yet.", "Open: 2 of 2 points are not measured to their end."]
    assert found["failures"] == rows and flat(rows) == []
    with pytest.raises(BadArguments, match="no study is called"):
        find_study("nothing")


def test_the_command_answers_resumes_and_draws(tmp_path, monkeypatch):
    monkeypatch.setattr(softmax, "STUDY", softmax.STUDY.__class__(**vars(softmax.STUDY) | {"grid": small_softmax}))
    first = locater("study", "softmax", "--quick", "--out", tmp_path / "s", "--json", tmp_path / "s.json")
    assert first.code == 0, first.err
    found = json.loads((tmp_path / "s.json").read_text())
    assert len(found["rows"]) == 4 and found["answer"] and not found["failures"]
    assert (tmp_path / "s" / "figure.png").stat().st_size > 5000
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "s" / "rows").iterdir()}
    assert locater("study", "softmax", "--quick", "--out", tmp_path / "s").code == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "s" / "rows").iterdir()} == before
    assert len(found["answer"]) == 2 and found["behind"]["rows"]
    other = locater("study", "profiles", "--quick", "--out", tmp_path / "s")
    assert other.code == 1 and "the points that" in other.err
    assert "reconcile" in locater("study").out


def test_figures_show_every_panel_name_and_interval():
    from locater.report.curves import study_figure

    plan = dict(x="x", y="y", by="kind", panel="where", x_label="", y_label="", logarithmic=False)
    rows = [{"x": x, "y": x + seed, "kind": "a", "where": n} for n in range(5) for x in (2, 1) for seed in (0, 2)]
    drawn = [one for one in study_figure({"figure": plan, "rows": rows}).axes if one.get_visible()]
    assert [one.get_title(loc="left") for one in drawn] == ["0", "1", "2", "3", "4"]
    assert drawn[4].lines[0].get_xydata().tolist() == [[1, 2], [2, 3]]  # in order, seeds as one mean
    ends = {"a": (0.1, 0.3), "b": (None, None)}
    rows = [{"of": of, "what": "w", "value": 0.2, "low": low, "high": high} for of, (low, high) in ends.items()]
    plan |= dict(x="value", by="of", panel="what", kind="intervals")
    (axes,) = study_figure({"figure": plan, "rows": rows}).axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a", "b"]
    bars = [
        list(line.get_xdata()) for line in axes.lines if line.get_linewidth() == 1.5 and line.get_marker() == "None"
    ]
    assert bars == [[0.1, 0.3]]


def small_softmax(quick: bool) -> list[dict]:
    return [{"length": 8, "xi": 0.0, "walks": 10, "eta": eta} for eta in (0.01, 0.1, 1.0, 3.0)]


def test_the_page_is_what_the_kept_rows_say():
    root = Path(__file__).parents[2]
    written = (root / "docs" / "studies.md").read_text(encoding="utf-8")
    box = written.partition(BOX)[2].partition("\n\n")[0]  # test_settled.py has it
    assert study_page(root / "runs" / "studies", pictures="studies", advice=box) == written, (
        "write it anew with make studies"
    )
    for picture in (root / "docs" / "studies").glob("*.png"):
        assert f"(studies/{picture.name})" in written


def test_runs_that_two_studies_share_are_counted(tmp_path):
    """The same numbers to the last digit are one run; a loss that happens to be the same is not."""
    run = {"best_loss": 4.4, "entropy": 0.6, "near_mass": 0.4, "largest_logit": 9.0}
    kept = {
        "mechanism": [run, run | {"best_loss": 4.5}],
        "metrics": [run, run | {"best_loss": 4.6}],
        "sensitivity": [run | {"entropy": 0.61}],
    }
    for name, results in kept.items():
        rows = [{"point": {"seed": 0}, "result": result} for result in results]
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    found = {name: others for name, others in shared_runs(tmp_path).items() if others}
    assert found == {"mechanism": {"metrics": 1}, "metrics": {"mechanism": 1}}
