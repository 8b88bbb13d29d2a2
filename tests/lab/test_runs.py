"""`locater runs` on folders written by hand, whose means and errors were computed on paper, and on two real runs."""

import json
import math
import subprocess
import sys

import pytest

from command import locater
from locater.report.curves import curves
from locater_lab.studies.runs import compare_runs
from training_cases import flags, write_text

HEADS = [
    dict(head=0, trace=2.0, trace_of_square=8.0, eta=4.0, xi=0.5, localisation=0.2, temperature=2.0, near_mass=0.5),
    dict(head=1, trace=6.0, trace_of_square=16.0, eta=4.0, xi=1.5, localisation=0.4, temperature=4.0, near_mass=0.7),
]
LAYERS = [dict(layer=0, residual=0.9, effective_rank=5.0), dict(layer=1, residual=0.4, effective_rank=12.0)]
# At step 20; at step 10 it is twice as much.
PERPLEXITY = {"none": (100.0, 104.0, 108.0), "late": (90.0, 97.0, 101.0)}


def row(step, perplexity, **changed):
    numbers = dict(loss=math.log(perplexity), perplexity=perplexity, entropy=0.8, heads=HEADS, layers=LAYERS)
    return dict(kind="validation", step=step) | numbers | changed


def write_run(folder, rows, *, seed=0):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"loop": {"seed": seed}}))
    lines = [{"kind": "train", "step": 5, "loss": 9.0}, *rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def folder(tmp_path):
    """Two arms of three seeds, beside things that are no runs."""
    for arm, values in PERPLEXITY.items():
        for seed, value in enumerate(values):
            rows = [row(step, value * 20 / step) for step in (10, 20)]
            write_run(tmp_path / "runs" / f"{arm}-seed{seed}", rows, seed=seed)
    (tmp_path / "runs" / "none-seed0.log").write_text("step 20 of 20")
    (tmp_path / "runs" / "pictures").mkdir()
    return tmp_path / "runs"


def document(*arguments):
    result = locater("runs", *arguments, "--json", "-")
    assert result.code == 0, result.err
    return json.loads(result.out)


def arms(found):
    return {arm["arm"]: arm for arm in found["arms"]}


def test_means_and_standard_errors(folder):
    found = document(folder)
    assert (found["schema"], found["step"], found["score"]) == ("locater.runs/1", 20, "perplexity")
    assert [arm["arm"] for arm in found["arms"]] == ["late", "none"], "best first"
    late, none = (arm["quantities"]["perplexity"] for arm in found["arms"])
    assert (none["mean"], none["standard_error"]) == pytest.approx((104, 4 / 3**0.5))
    assert (late["mean"], late["standard_error"]) == pytest.approx((96, (31 / 3) ** 0.5))
    assert late["values"] == [90, 97, 101] and late["seeds"] == [0, 1, 2]
    assert "differences" not in found["arms"][0] and found["against"] is None and found["left_out"] == []


def test_the_training_loss_and_its_difference_on_the_same_texts(tmp_path):
    """In stretches of several logged steps, by seed, over the steps that both have."""
    losses = {"none": {0: (6.0, 4.0), 1: (8.0, 4.0)}, "late": {0: (5.0, 4.0), 1: (5.0, 2.0)}}
    for arm, seeds in losses.items():
        for seed, (early, final) in seeds.items():
            # 64 lines make two to a stretch; seeds differ in the first half and in the second.
            lines = [dict(kind="train", step=n, loss=early if n <= 32 else final) for n in range(1, 65)]
            write_run(tmp_path / f"{arm}-seed{seed}", [*lines[: 64 if arm == "late" else 60], row(64, 100.0)])
    found = arms(document(tmp_path, "--against", "none"))
    assert "difference" not in found["none"]["training"]
    loss, difference = (found["late"]["training"][kind] for kind in ("loss", "difference"))
    assert loss["step"] == [2 * n for n in range(1, 33)] and difference["step"][-1] == 60
    assert (loss["mean"][0], loss["mean"][-1], loss["standard_error"][0]) == (5.0, 3.0, 0.0)
    assert (difference["mean"][0], difference["standard_error"][0]) == (-2.0, 1.0)  # −1 and −3
    assert (difference["mean"][-1], difference["standard_error"][-1]) == (-1.0, 1.0)  # 0 and −2
    panel = curves(compare_runs(tmp_path, against="none")).axes[1]
    assert panel.get_title(loc="left").endswith("minus that of none on the same texts")
    assert curves(compare_runs(tmp_path)).axes[1].get_title(loc="left") == "Training loss"


def test_every_quantity_is_read(folder):
    """Ratios are taken before the mean over heads, and the last layer's row counts."""
    found = arms(document(folder))["none"]["quantities"]
    means = {name: value["mean"] for name, value in found.items() if name not in ("perplexity", "loss")}
    expected = dict(entropy=0.8, trace_over_temperature=1.25, trace_of_square_over_temperature_squared=1.5)
    expected |= dict(eta_over_temperature=1.5, xi=1.0, localisation=0.3, near_mass=0.6)
    assert means == pytest.approx(expected | dict(residual=0.4, effective_rank=12.0))


def test_heads_of_the_best_and_the_worst_arm_as_maps_on_one_scale(tmp_path, monkeypatch):
    """Means over seeds, of what every seed has; one head makes no map, and a pipe has none."""
    for arm, base in (("a", 0.1), ("b", 0.3), ("c", 0.5)):
        for seed in (0, 1):
            entropies = {(0, 0): base, (0, 1): base + 0.2 * seed, (1, 0): 0.9, (1, 1): math.nan if seed else 0.5}
            heads = [dict(layer=at[0], head=at[1], normalised_entropy=value) for at, value in entropies.items()]
            write_run(tmp_path / "many" / f"{arm}-seed{seed}", [row(20, 100 * (1 + base), heads=heads)])
            write_run(tmp_path / "one" / f"{arm}-seed{seed}", [row(20, 100 * (1 + base), heads=heads[:1])])
    found = arms(document(tmp_path / "many"))["a"]["heads"]
    assert [(head["layer"], head["head"]) for head in found] == [(0, 0), (0, 1), (1, 0)]
    assert [head["normalised_entropy"] for head in found] == pytest.approx([0.1, 0.2, 0.9])
    assert "layers ↓" not in locater("runs", tmp_path / "many").out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    printed = locater("runs", tmp_path / "many").out
    assert "a: entropy, how evenly" in printed and "c: entropy, how evenly" in printed and "b: entropy" not in printed
    assert printed.count("0.1 .:-=+*#%@ 0.9") == 2 and "   0 ..::" in printed and "   1 @@  " in printed
    assert "layers ↓" not in locater("runs", tmp_path / "one").out
    assert "heads" not in arms(document(tmp_path / "one"))["a"]


def test_differences_are_paired_by_seed(folder):
    """−10, −7, −7: an error of 1, where the arms' own are 2.3 and 3.2."""
    found = arms(document(folder, "--against", "none"))
    difference = found["late"]["differences"]["perplexity"]
    assert (difference["mean"], difference["standard_error"]) == pytest.approx((-8, 1))
    assert found["late"]["differences"]["entropy"]["mean"] == 0
    assert "differences" not in found["none"]
    printed = locater("runs", folder, "--against", "none").out
    assert "-8.00 ± 1.00" in printed and "96.00 ± 3.21" in printed and "104.00 ± 2.31" in printed
    assert "perplexity − that of none, paired by seed" in printed


def test_only_seeds_that_both_have_are_paired(folder):
    for seed, value in ((1, 100.0), (2, 106.0), (7, 1.0)):
        write_run(folder / f"odd-seed{seed}", [row(20, value)])
    write_run(folder / "stranger-seed9", [row(20, 50.0)])
    write_run(folder / "by-itself", [row(20, 99.0)], seed=1)
    found = arms(document(folder, "--against", "none"))
    difference = found["odd"]["differences"]["perplexity"]
    assert difference["seeds"] == [1, 2] and difference["values"] == [-4, -2]
    assert (difference["mean"], difference["standard_error"]) == pytest.approx((-3, 1))
    assert found["by-itself"]["seeds"] == [1] and found["by-itself"]["differences"]["perplexity"]["values"] == [-5]
    assert found["stranger"]["differences"] == {}
    assert found["stranger"]["quantities"]["perplexity"]["standard_error"] is None, "one seed has no error"
    printed = locater("runs", folder, "--against", "none").out
    assert "odd: only 2 of 3 seeds have a partner" in printed
    assert "stranger: only 0 of 1 seeds have a partner" in printed
    assert "arms have different seeds, and share none\n" in printed


def test_arms_are_compared_on_the_seeds_that_all_have(folder):
    for seed, value in ((1, 100.0), (2, 106.0)):
        write_run(folder / f"odd-seed{seed}", [row(20, value)])
    assert "arms have different seeds: --seeds 1,2 compares them on what all have\n" in locater("runs", folder).out
    found = document(folder, "--seeds", "1-2")
    assert [(arm["arm"], arm["seeds"]) for arm in found["arms"]] == [
        ("late", [1, 2]),
        ("odd", [1, 2]),
        ("none", [1, 2]),
    ]
    assert arms(found)["none"]["quantities"]["perplexity"]["mean"] == 106
    assert "different seeds" not in locater("runs", folder, "--seeds", "2,1").out
    assert set(arms(document(folder, "--arms", "odd,none"))) == {"odd", "none"}
    assert set(arms(document(folder, "--arms", "odd,none", "--seeds", "0"))) == {"none"}


def test_unequal_lengths_are_compared_at_the_last_common_step(folder):
    write_run(folder / "late-seed3", [row(10, 300.0)])
    write_run(folder / "new-seed0", [])
    found = document(folder)
    assert found["step"] == 10
    assert arms(found)["late"]["quantities"]["perplexity"]["mean"] == pytest.approx((180 + 194 + 202 + 300) / 4)
    assert found["left_out"] == [{"run": "new-seed0", "last_step": None}]
    result = locater("runs", folder)
    assert "7 runs in 2 arms at step 10, the last that all reached" in result.out
    assert "left out 1 without step 10: new-seed0 (no validation yet)" in result.out


def test_a_chosen_step_leaves_out_what_has_not_reached_it(folder):
    write_run(folder / "late-seed3", [row(10, 300.0)])
    found = document(folder, "--step", 20)
    assert arms(found)["late"]["seeds"] == [0, 1, 2]
    assert found["left_out"] == [{"run": "late-seed3", "last_step": 10}]
    curve, error = arms(found)["late"]["curves"]["perplexity"], (31 / 3) ** 0.5
    assert curve == {"step": [10, 20], "mean": [192, 96], "standard_error": pytest.approx([2 * error, error])}
    assert "left out 1 without step 20: late-seed3 (reached 10)" in locater("runs", folder, "--step", 20).out
    write_run(folder / "late-seed4", [row(20, 96.0), row(30, 1.0)])
    curve = arms(document(folder, "--step", 20))["late"]["curves"]["perplexity"]
    assert curve["step"] == [20], "only what all seeds have"


def test_half_a_line_of_a_killed_run_is_dropped(folder):
    before = document(folder)
    with (folder / "late-seed1" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "validation", "step": 30, "perpl')
    assert document(folder) == before


def test_a_number_that_a_row_lacks_is_left_out_of_it_alone(folder):
    """One head of one seed exploded: the mean of ξ is over the other seeds, and nothing else changes."""
    heads = [HEADS[0], {name: value for name, value in HEADS[1].items() if name != "xi"}]
    write_run(folder / "none-seed3", [row(20, 104.0, heads=heads, layers=[], entropy=math.nan)])
    found = arms(document(folder))["none"]
    assert all(found["quantities"][name]["seeds"] == [0, 1, 2] for name in ("xi", "residual", "entropy"))
    assert found["quantities"]["eta_over_temperature"]["seeds"] == found["seeds"] == [0, 1, 2, 3]


def test_random_walks_have_no_perplexity(tmp_path):
    spectrum = [{name: value for name, value in head.items() if name != "near_mass"} for head in HEADS]
    for seed, loss in enumerate((2.0, 1.0)):
        write_run(tmp_path / f"walk-seed{seed}", [dict(kind="validation", step=20, loss=loss, heads=spectrum)])
    found = document(tmp_path)
    quantities = found["arms"][0]["quantities"]
    assert found["score"] == "loss" and (quantities["loss"]["mean"], quantities["loss"]["standard_error"]) == (1.5, 0.5)
    assert not {"perplexity", "entropy", "near_mass", "residual"} & quantities.keys()
    result = locater("runs", tmp_path, "--plot", tmp_path / "walk.svg")
    assert "1.5000 ± 0.5000" in result.out and "perplexity" not in result.out and "entropy" not in result.out
    picture = (tmp_path / "walk.svg").read_text()
    assert "Loss on held-out data" in picture and "not measured in these runs" in picture


@pytest.mark.parametrize("arguments", [(), ("--against", "none")], ids=["alone", "against"])
def test_what_is_printed_fits_80_columns_and_a_wide_terminal_has_all(folder, arguments):
    write_run(folder / "a name of many words-and-hyphens, longer than any [bold]table", [row(20, 1e304)])
    narrow, wide = (locater("runs", folder, *arguments, columns=columns) for columns in (80, 160))
    assert max(map(len, narrow.out.splitlines())) <= 80
    assert "1.00e+304" in narrow.out and "[bold]" in narrow.out and "…" not in narrow.out
    assert "in a wider terminal and in --json" in narrow.out
    headings = "arm seeds perplexity course entropy tr W/λ η/λ ξ local rank residual near tr W²/λ²"
    assert " ".join(wide.out.splitlines()[2].split()).replace(" difference", "") == headings
    assert "wider terminal" not in wide.out


def test_the_picture_has_the_arms(folder, tmp_path):
    write_run(folder / "cost$5$-seed0", [row(20, 110.0)])
    picture = tmp_path / "deep" / "course.svg"
    result = locater("runs", folder, "--against", "none", "--plot", picture)
    assert result.code == 0 and f"picture: {picture}" in result.out
    drawn = picture.read_text()
    assert all(words in drawn for words in ("late (3 seeds)", "none (3 seeds)", "5$ (1 seed)"))
    assert "Perplexity on held-out text" in drawn and "training step" in drawn and "Means over seeds" in drawn
    assert curves(compare_runs(folder, seeds=[0])).get_suptitle() == "", "one seed has no mean"


def test_the_picture_shows_differences_at_the_end(tmp_path):
    """A start that is ten times as high does not take the room; a run that stays high gets a logarithmic axis."""
    for arm, last in (("a", 100.0), ("b", 103.0)):
        write_run(tmp_path / f"{arm}-seed0", [row(10, 1000.0), row(20, last + 5), row(30, last)])
    panel = curves(compare_runs(tmp_path)).axes[0]
    low, high = panel.get_ylim()
    assert low < 100 and 108 < high < 115 and panel.get_yscale() == "linear"
    write_run(tmp_path / "stuck-seed0", [row(step, 900.0) for step in (10, 20, 30)])
    panel = curves(compare_runs(tmp_path, step=20)).axes[0]
    assert panel.get_yscale() == "log" and panel.get_ylim()[0] < 100 < 900 < panel.get_ylim()[1]
    assert any(list(line.get_xdata()) == [20, 20] for line in panel.lines), "the step of the table is marked"


def test_two_validations_are_both_in_the_picture(tmp_path):
    write_run(tmp_path / "a-seed0", [row(10, 500.0), row(20, 370.0)])
    low, high = curves(compare_runs(tmp_path)).axes[0].get_ylim()
    assert low < 370 and high > 500


def test_many_arms_look_different(tmp_path):
    for n in range(30):
        write_run(tmp_path / f"arm{n}-seed0", [row(20, 100.0 + n)])
    figure = curves(compare_runs(tmp_path, against="arm7"))
    looks = {(line.get_color(), line.get_marker()) for line in figure.axes[0].lines}
    assert len(looks) == len(figure.legends[0].get_texts()) == 30


BAD_METRICS = {
    "other rows": '{"epoch": 1, "loss": 2.0}\n',
    "no JSON": "step,loss\n1,2.0\n",
    "a list": "[1, 2]\n",
    "bytes": b"\xff\xfe\x00\n",
    "words for numbers": '{"kind": "validation", "step": 20, "perplexity": "low"}\n',
    "a step in words": '{"kind": "validation", "step": "last"}\n',
    "heads in words": '{"kind": "validation", "step": 20, "heads": ["one", "two"]}\n',
    "broken in the middle": '{"kind": "train", "st\n{"kind": "train", "step": 5}\n',
}


@pytest.mark.parametrize("content", BAD_METRICS.values(), ids=BAD_METRICS)
def test_foreign_metrics_are_refused(folder, content):
    path = folder / "late-seed1" / "metrics.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    result = locater("runs", folder)
    assert result.code == 1 and f"expected metrics of locater train in {path}, got " in result.err
    assert result.err.count("\n") == 1 and "move the folder elsewhere" in result.err


@pytest.mark.parametrize("values", [(1.7e308, 1.0), (1e308, 1.7e308)], ids=["huge", "with no sum"])
def test_numbers_that_arithmetic_does_not_hold_are_drawn_or_refused(values, tmp_path):
    rows = [row(step, value) for step, value in zip((10, 20), values, strict=True)]
    for seed in (0, 1):
        write_run(tmp_path / "runs" / f"late-seed{seed}", rows, seed=seed)
    result = locater("runs", tmp_path / "runs")
    assert result.code in (0, 1) and "please report it" not in result.err and result.err.count("\n") <= 1


BAD = {
    "nowhere": (["nowhere"], "expected a folder with runs of locater train, got nowhere"),
    "a file": (["runs/none-seed0.log"], "expected a folder with runs of locater train, got runs/none-seed0.log"),
    "no runs": (["runs/pictures"], "got runs/pictures; make some with locater train --out"),
    "one run": (["runs/none-seed0"], "got runs/none-seed0; give the folder above it"),
    "arm": (["runs", "--against", "nobody"], "--against with an arm that has step 20: late, none, got 'nobody'"),
    "step": (["runs", "--step", "15"], "--step with one that a run was validated at: 10, 20, got 15"),
    "new": (["new"], "expected a run with a validation, got 1 without"),
    "step of new": (["new", "--step", "3"], "validated at: there is none yet, got 3"),
    "arms": (["runs", "--arms", "none,nobody"], "expected --arms among late, none, got nobody"),
    "seed": (["runs", "--seeds", "7-8"], "--seeds with one of 0, 1, 2, got 7, 8"),
    "picture": (["runs", "--plot", "course.gif"], "a picture ending in .png, .svg, .pdf"),
}


@pytest.mark.parametrize(("arguments", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_one_sentence(folder, monkeypatch, arguments, words):
    monkeypatch.chdir(folder.parent)
    write_run(folder.parent / "new" / "arm-seed0", [])
    result = locater("runs", *arguments)
    assert result.code == 1 and words in result.err and result.err.count("\n") == 1


def test_runs_that_cannot_be_told_apart_or_compared_are_refused(folder):
    def refused():
        result = locater("runs", folder)
        assert result.code == 1 and result.err.count("\n") == 1
        return result.err

    lone = write_run(folder / "lone", [row(20, 100.0)])
    (lone / "config.json").write_text("{}")
    assert (
        f"a seed of locater train in {lone / 'config.json'}" in refused() and "name the folder ARM-seedN" in refused()
    )
    lone.rename(folder / "none-seed01")
    assert "one run for each seed of the arm none, got none-seed0, none-seed01, none-seed1" in refused()
    (folder / "none-seed01").rename(folder / "apart-seed0")
    write_run(folder / "late", [row(20, 100.0)], seed=5)
    assert "one run for each seed of the arm late, got late-seed0, late-seed1, late-seed2, late" in refused()
    (folder / "late").rename(folder / "later")
    (folder / "later" / "metrics.jsonl").write_text(json.dumps(row(15, 100.0)) + "\n")
    assert "missing a step that every run was validated at; choose one by --step: 10, 15, 20" in refused()


def test_files_are_written_when_the_reader_leaves(folder, tmp_path):
    """As in `| head`: the table goes nowhere, and nobody complains."""
    files = {"--json": tmp_path / "runs.json", "--plot": tmp_path / "course.svg"}
    arguments = ["runs", folder, *(part for pair in files.items() for part in pair)]
    command = [sys.executable, "-m", "locater.cli", *map(str, arguments)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    running.stdout.close()
    assert running.stderr.read() == b"" and running.wait() == 0
    assert all(path.exists() for path in files.values())


def test_no_torch_is_needed(folder):
    script = (
        f"import sys; sys.argv = ['locater', 'runs', {str(folder)!r}]\n"
        "from locater.cli import main; main()\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0 and "104.00" in result.stdout, result.stderr


def test_real_runs(tmp_path, monkeypatch):
    """What `locater train` writes is what `locater runs` reads, to the last number."""
    monkeypatch.setenv("LOCATER_CACHE", str(tmp_path / "cache"))
    text, out = write_text(tmp_path), tmp_path / "runs"
    short = dict(context=8, steps=4, validate_every=2, save_every=4, validation_windows=4)
    ends = {}
    for arm, strength in (("none", 0.0), ("locater", 1e-2)):
        arguments = flags(text, **short, strength=strength)
        result = locater("train", *arguments, "--out", out / f"{arm}-seed0", "--json", tmp_path / f"{arm}.json")
        assert result.code == 0, result.err
        ends[arm] = json.loads((tmp_path / f"{arm}.json").read_text())["validation"]
    found = document(out, "--against", "none")
    assert found["step"] == 4
    for arm, end in ends.items():
        numbers = {name: value["mean"] for name, value in arms(found)[arm]["quantities"].items()}
        assert len(numbers) == 11
        assert numbers["perplexity"] == end["perplexity"] and numbers["residual"] == end["layers"][-1]["residual"]
        first, second = (head["eta"] / head["temperature"] for head in end["heads"])
        assert numbers["eta_over_temperature"] == pytest.approx((first + second) / 2)
        assert arms(found)[arm]["curves"]["entropy"]["step"] == [2, 4]
    gap = ends["locater"]["perplexity"] - ends["none"]["perplexity"]
    assert arms(found)["locater"]["differences"]["perplexity"]["mean"] == pytest.approx(gap)


def test_the_folder_of_a_sweep_is_as_good_as_that_of_its_runs(tmp_path):
    write_run(tmp_path / "runs" / "none-seed0", [row(20, 100.0)])
    assert "make some with locater train" in locater("runs", tmp_path).err
    (tmp_path / "sweep.json").write_text("{}")
    assert "1 runs in 1 arms" in locater("runs", tmp_path).out
