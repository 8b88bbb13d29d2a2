"""The page of evidence: agreement counted by hand, and a model from end to end."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from command import locater
from locater import heads as locater_heads
from locater import scan
from locater.behaviour import RECORD
from locater.errors import Refusal
from locater.prediction.windows import Effort, cut_lines
from locater_lab.studies import real_data
from locater_lab.studies.real_data import Reading, compared, real_data_page
from predict_cases import model, save_with_tokenizer


def test_words_and_ranks_are_counted():
    row = scan(model("llama")).heads[0]
    cells = [(0.9, "late"), (0.8, "early"), (0.1, "late"), (0.5, "mixed")]
    rows = [
        replace(row, head=n, xi=float(n), estimated_near_mass=v, estimated_near_mass_interval=(v - 0.3, v), regime=r)
        for n, (v, r) in enumerate(cells)
    ]
    measured = [[0.9, 0.1, 0.0], [0.4, 0.2, 0.1], [0.2, 0.3, 0.2], [0.6, 0.4, 0.3]]
    found = compared("x", rows, measured=measured, probed=measured[::-1], predicted=measured)
    assert found["words"] == {"near": (1, 2), "far": (1, 1)}
    assert found["regimes"] == {"late": (1, 2), "early": (1, 1)}
    assert found["prediction"]["normalised_entropy"] == pytest.approx(1)
    assert found["probe"]["normalised_entropy"] == pytest.approx(-1)
    assert found["theory"]["xi"] == pytest.approx(-0.4)
    assert found["estimate_error"] == pytest.approx((0 + 0.4 + 0.1 + 0.1) / 4)
    assert found["covered"] == (1, 4)
    shown = real_data_page([found | {"kind": "rotary decoders"}])
    assert "| x | 4 | -0.40 |" in shown and "1 of 2 (50%)" in shown and ", 25%)" in shown
    assert "Taken alone, a word is right of fewer than four in five in: x (near, 1 of 2)." in shown


def test_shorter_windows_are_more_windows():
    assert Reading().effort == Effort()
    effort = Reading(window=128).effort
    assert (effort.window, effort.calibration, effort.test) == (128, 48, 16)


def test_the_estimate_is_judged_in_texts_as_long_as_the_measured_ones(tmp_path, monkeypatch):
    """Of 128 tokens, of which fewer are far: a causal head that is half near in 256 has more there."""
    net = model("gpt2")
    row = replace(scan(net).heads[0], estimated_near_mass=0.5, estimated_near_mass_interval=(0.25, 0.75))
    head = next(iter(locater_heads(net)))
    assert real_data._of_length(row, 256, head) is row
    shorter = real_data._of_length(row, 128, head)
    odds = (64 + 256 - 32) / (64 + 128 - 32)  # of far keys, on average
    assert shorter.estimated_near_mass == pytest.approx(odds / (1 + odds))
    low, high = shorter.estimated_near_mass_interval
    assert 0.25 < low < shorter.estimated_near_mass < high and high > 0.75


def test_command_goes_on_where_it_was(tmp_path, monkeypatch):
    folder, out = tmp_path / "tiny", tmp_path / "out"
    save_with_tokenizer(folder)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, again and again. " * 400)
    net = model("llama")
    net.config.max_position_embeddings = 512
    net.save_pretrained(folder)
    arguments = ["study", "real-data", "--out", out, "--model", folder, "--text", text, "--window", 96]
    first = locater(*arguments, "--json", tmp_path / "rows.json")
    assert first.code == 0, first.err
    assert "| model | heads |" in first.out and "| tiny | 8 |" in first.out and "*rotary decoders*" in first.out
    (row,) = json.loads((tmp_path / "rows.json").read_text())["models"]
    assert row["window"] == 96 and row["text"] == "text.txt"
    monkeypatch.setattr(real_data, "predict", None)  # what was measured is not measured again
    assert locater(*arguments).out == first.out
    assert locater("study", "real-data", "--out", out).out == first.out
    assert locater("study", "real-data", "--out", tmp_path / "none").code == 2
    assert "real-data" in locater("study").out


def test_every_line_is_a_text():
    class Letters:
        unk_token_id, bos_token_id = None, None

        def __call__(self, text, add_special_tokens=True, **options):
            ids = [ord(letter) for letter in text if letter != " "]
            return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}

    windows, special = cut_lines("A B C D E\n\nF G\nH I J K\n", Letters(), length=4, most=9)
    assert windows.tolist() == [[1, 65, 66, 67], [1, 70, 71, 2], [1, 72, 73, 74]] and special == [0]
    windows, special = cut_lines("A B\nF G\n", Letters(), length=4, most=9)  # whole lines keep their end
    assert windows.tolist() == [[1, 65, 66, 2], [1, 70, 71, 2]] and special == [0, -1]
    with pytest.raises(Refusal, match="at least two lines of 5 tokens"):
        cut_lines("A B C D E\nF G\n", Letters(), length=5, most=9)


COUNTED = {4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight", 9: "nine", 10: "ten", 11: "eleven", 12: "twelve"}
PAGE, ROWS = Path("docs/evidence.md"), Path("runs/studies/real-data.json")


def test_the_page_is_that_of_the_kept_rows():
    root = Path(__file__).parents[2]
    rows = json.loads((root / ROWS).read_text(encoding="utf-8"))["models"]
    assert real_data_page(rows) in (root / PAGE).read_text(encoding="utf-8"), (
        f"write it anew: python runs/studies.py ({PAGE})"
    )


def test_words_by_constants_of_the_other_decoders_are_those_of_the_kept_rows():
    root = Path(__file__).parents[2]
    kept = json.loads((root / "runs" / "studies" / "words_left_out.json").read_text(encoding="utf-8"))
    page = " ".join((root / PAGE).read_text(encoding="utf-8").split())
    for row in kept.values():
        shown = ", ".join("{} of {}".format(*row[word]) if row[word][1] else "–" for word in ("near", "far"))
        assert f"{row['error']:.2f} | {shown} |" in page
    near, far = (
        [sum(part) for part in zip(*(row[word] for row in kept.values()), strict=True)] for word in ("near", "far")
    )
    assert "*near* is right of {} of {} heads and *far* of {} of {}.".format(*near, *far) in page and len(kept) == 3


def test_the_record_that_a_scan_quotes_is_that_of_the_kept_rows():
    rows = json.loads((Path(__file__).parents[2] / ROWS).read_text(encoding="utf-8"))["models"]
    near, far = (
        [sum(part) for part in zip(*(row["words"][word] for row in rows), strict=True)] for word in ("near", "far")
    )
    assert "for {} of {} heads (near) and {} of {} (far)".format(*near, *far) in RECORD and len(rows) == 10
    share = (near[1] + far[1]) / sum(row["heads"] for row in rows)
    assert f"cover {share:.0%} of the heads" in RECORD


def test_words_are_right_of_four_in_five_of_every_kind():
    """What findings say of a head: a word that falls below it for a kind of positions may not be said of that kind."""
    root = Path(__file__).parents[2]
    rows = json.loads((root / ROWS).read_text(encoding="utf-8"))["models"]
    for kind in {row["kind"] for row in rows}:
        for word in ("near", "far"):
            counts = [row["words"][word] for row in rows if row["kind"] == kind]
            right, called = (sum(part) for part in zip(*counts, strict=True))
            assert right >= real_data.ENOUGH * called, (kind, word, right, called)
