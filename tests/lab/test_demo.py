"""`locater demo` as a user runs it, with fewer steps: its words, its files, and what happens if it is stopped."""

import copy
import math
import os
import signal
import sys

import pytest
import torch

from command import locater
from locater.scanning.scan import scan
from locater_lab.cli.demo_models import conclusions
from locater_lab.demo import two_models
from locater_lab.train import loop
from locater_lab.train.config import make_config
from locater_lab.train.loader import load
from locater_lab.train.metrics import read_metrics
from locater_lab.train.run import start
from training_cases import TINY, assert_same_run, write_text

PICTURES = ("one_head.png", "phase_diagram.png", "training.png", "attention.png")
FEW = dict(steps=6, validate_every=3, validation_windows=16, save_every=100)


@pytest.fixture(scope="module")
def few():
    """The very demo, but for a few steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(two_models, "OPTIONS", two_models.OPTIONS | FEW)
        yield


@pytest.fixture(scope="module")
def shown(few, tmp_path_factory):
    out = tmp_path_factory.mktemp("shown") / "demo"
    result = locater("demo", "--out", out)
    assert result.code == 0, result.err
    return out, result.out


@pytest.fixture(scope="module")
def document(shown):
    return two_models.compare_models(shown[0])


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Runs of a second without the theory, where the folder matters and not the words."""
    # By its full name the package gives the function, which hides the module.
    monkeypatch.setattr(sys.modules["locater_lab.cli.demo"], "_show_theory", lambda console, out: None)
    monkeypatch.setattr(two_models, "OPTIONS", TINY | {"data": str(write_text(tmp_path)), "num_heads": 1})
    return tmp_path / "demo"


def test_both_configs_differ_in_the_stabiliser_alone():
    without, with_it = (two_models.demo_config(name).to_dict() for name in two_models.NAMES)
    assert without.pop("stabiliser")["strength"] == 0 < with_it.pop("stabiliser")["strength"]
    assert without == with_it
    assert without["data"]["data"] == "embedded" and without["shape"]["num_heads"] == 1


def test_it_explains_and_leaves_four_pictures(shown):
    out, printed = shown
    for name in PICTURES:
        assert (out / name).read_bytes()[:4] == b"\x89PNG" and (out / name).stat().st_size > 10_000
    assert "Content-Security-Policy" in (out / "report.html").read_text(encoding="utf-8")
    lines = printed.splitlines()
    assert max(len(line.rstrip()) for line in lines if str(out) not in line) <= 80
    for words in ("entropy collapse", "after 6 steps", "Scanned from the files", "one seed", "not evidence"):
        assert words in " ".join(printed.split())
    for place in ("one_head.png, phase_diagram.png", "training.png", "attention.png", f"lies in {out}"):
        assert place in printed[printed.index("What was seen") :]


def test_the_tables_hold_the_runs_own_numbers(shown, document):
    out, printed = shown
    rows = {line[:40].split("  ")[0]: line.split()[-2:] for line in printed.splitlines()}
    last = [read_metrics(out / name / "metrics.jsonl")[-1] for name in two_models.NAMES]
    assert all(row["kind"] == "validation" and row["step"] == 6 for row in last)
    assert rows["perplexity (lower: it predicts better)"] == [f"{row['perplexity']:.1f}" for row in last]
    assert rows["η/λ (scale of W)"] == [f"{row['heads'][0]['eta'] / math.sqrt(128):.3f}" for row in last]
    even = torch.tensor([min(16, n) / n for n in range(1, 65)]).mean()
    assert rows["near mass if all tokens counted alike"] == [f"{even:.3f}"] * 2
    assert rows["regime"] == [row["heads"][0]["regime"] for row in last]
    for model, row in zip(document["models"].values(), last, strict=True):
        head = row["heads"][0]
        for name in ("trace", "eta", "xi", "localisation"):
            assert model["scan"][name] == pytest.approx(head[name], rel=1e-6), name
        assert model["validations"][-1]["near_mass"] == head["near_mass"]
        assert len(model["scan"]["eigenvalues"]) == 128


@pytest.mark.parametrize("name", two_models.NAMES)
def test_attention_is_the_models_own(shown, document, name):
    """Against the softmax written out with the weights as they are stored."""
    model = load(shown[0] / name / "model")
    texts = torch.randint(model.config.vocab_size, (3, 64))
    part = model.layers[0].attention
    with torch.no_grad():
        x = model.embed(texts)
        logits = part.query(x) @ part.key(x).mT / math.sqrt(128)
        expected = logits.masked_fill(torch.ones(64, 64).triu(1).bool(), -math.inf).softmax(-1)
        torch.testing.assert_close(two_models.measure_attention(model, texts), expected)
        mixed = part.output(expected @ part.value(x))
        torch.testing.assert_close(part(x), mixed)  # the model does attend like that
    mean = torch.tensor(document["models"][name]["attention"])
    torch.testing.assert_close(mean.sum(-1), torch.ones(64))
    assert mean.triu(1).eq(0).all() and mean.ge(0).all()
    seen = scan(shown[0] / name / "model", length=64).heads[0]
    assert seen.trace == document["models"][name]["scan"]["trace"]


def test_the_share_of_the_last_tokens():
    first, itself = torch.zeros(4, 4), torch.eye(4)
    first[:, 0] = 1
    assert two_models.share_within(itself).tolist() == [1, 1, 1, 1]
    assert two_models.share_within(first).tolist() == [0, 0, 0.5, 1]  # tokens 3 and 4 look 2 and 3 back


def told(document, *, perplexity, entropies, eta, near, plain_eta=1.0):
    """The closing words on numbers of our own, with LocAteR; without it they are 100, 0.5, 1 and 0.5."""
    document = copy.deepcopy(document)
    for name, values in {
        "without": (100.0, [0.5, 0.5], plain_eta, 0.5),
        "with": (perplexity, entropies, eta, near),
    }.items():
        model = document["models"][name]
        steps = enumerate(values[1], start=1)
        model["validations"] = [{"step": n, "perplexity": values[0], "entropy": entropy} for n, entropy in steps]
        model["scan"] |= {"eta": values[2], "xi": 1 / values[2], "temperature": 1.0}
        model["within"] = [values[3]] * 64
    return conclusions(document)


def test_the_closing_words_follow_the_numbers(document):
    better = told(document, perplexity=90.0, entropies=[0.8, 0.7], eta=0.5, near=0.4)
    assert "predicts held-out text better: perplexity 90.0 against 100.0" in better[0]
    assert "scale of its W is smaller: η/λ = 0.50 against 1.00" in better[1] and "that scale is larger" in better[1]
    assert "attention is broader: entropy 0.70 against 0.50" in better[2]
    assert "fallen from 0.80 at step 1 to 0.70 with LocAteR" in better[2] and "as high as ever" in better[2]
    assert "40 % of its attention, against 50 %" in better[3]
    worse = told(document, perplexity=110.0, entropies=[0.2, 0.3], eta=2.0, near=0.4)
    assert "predicts held-out text worse: perplexity 110.0 against 100.0" in worse[0]
    assert "scale of its W is larger" in worse[1] and "that scale is smaller" in worse[1]
    assert "attention is narrower: entropy 0.30 against 0.50" in worse[2] and "fallen" not in worse[2]
    alike = told(document, perplexity=100.4, entropies=[0.5, 0.501], eta=1.0, near=0.4)
    assert "about as well" in alike[0] and "about equal" in alike[1] and "about as broad" in alike[2]
    assert (
        "stays near 0: ξ = 0.05 against 0.01"
        in told(document, perplexity=90.0, entropies=[0.5], eta=20.0, near=0.4, plain_eta=100.0)[1]
    )
    for words in (better, worse, alike):
        assert "one seed" in words[-1] and "not evidence" in words[-1]


def test_a_second_demo_trains_nothing_anew(shown, monkeypatch):
    out, printed = shown
    monkeypatch.setattr(loop.Trainer, "_train", lambda self: pytest.fail("trained again"))
    again = locater("demo", "--out", out)
    assert again.code == 0, again.err
    assert again.out == printed


def test_stopped_by_a_signal_it_goes_on_where_it_was(tiny, tmp_path, monkeypatch):
    whole = tmp_path / "whole"
    assert locater("demo", "--out", whole).code == 0
    train, counted = loop.Trainer._train, iter(range(10**6))

    def interrupted(self):
        train(self)
        if next(counted) == TINY["steps"] + 4:  # in the second model
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(loop.Trainer, "_train", interrupted)
    stopped = locater("demo", "--out", tiny)
    assert stopped.code == 128 + signal.SIGINT
    assert "stopped at step 5 of 20" in stopped.out and f"locater demo --out {tiny}" in stopped.out
    assert "What was seen" not in stopped.out
    monkeypatch.setattr(loop.Trainer, "_train", train)
    assert locater("demo", "--out", tiny).code == 0
    for name in two_models.NAMES:
        assert_same_run(tiny / name, whole / name)


@pytest.mark.parametrize("name", two_models.NAMES)
def test_another_run_in_its_place_is_refused_at_once(tiny, tmp_path, name):
    start(make_config("paper", **two_models.OPTIONS | {"steps": 1, "seed": 7}), tiny / name)
    refused = locater("demo", "--out", tiny)
    assert refused.code == 1 and not refused.out
    assert f"{tiny / name}, a run of another config; choose another --out" in refused.err
    (tiny / name / "config.json").write_text("{}")
    assert "a run of another config; choose another --out" in locater("demo", "--out", tiny).err


def test_threads_are_given_back(tiny):
    torch.set_num_threads(2)
    try:
        two_models.train_model(tiny, "without")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_the_quick_one_needs_no_extra_and_draws_nothing(tiny, monkeypatch):
    """The whole one refuses before it has done anything."""
    for name in ("matplotlib", "tokenizers", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    absent = lambda name: None if name in ("matplotlib", "tokenizers") else object()  # noqa: E731
    monkeypatch.setattr(sys.modules["locater_lab.cli.demo"], "find_spec", absent)
    refused = locater("demo", "--out", tiny, columns=200)
    assert refused.code == 1 and not refused.out and not tiny.exists()
    assert 'missing the packages tokenizers and matplotlib; pip install "locater[hf,plot]"' in refused.err
    shown = locater("demo", "--quick", "--out", tiny)
    assert shown.code == 0, shown.err
    assert "for 30 steps" in shown.out and "What was seen" in shown.out and "→" not in shown.out
    assert sorted(path.name for path in tiny.iterdir()) == ["report.html", "with", "without"]
    assert max(map(len, shown.out.replace(str(tiny), "").splitlines())) <= 80
