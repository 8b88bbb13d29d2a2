import json
import subprocess
import sys

import numpy
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model
from typer.testing import CliRunner

from locater.attention.layers import observe
from locater.attention.masks import Mask
from locater.attention.statistics import materialised
from locater.cli.program import app
from locater.errors import Refusal
from locater.prediction.numbers import NAMES, Gatherer, distance_bins
from locater.prediction.predict import Effort, Terms, Text, Tokens, predict
from locater.prediction.running import run_model, self_attention
from locater.prediction.windows import split_windows
from locater.quantities import FIRST_QUERY, NEAR
from locater.report.views import views_of
from locater.scanning.scan import scan
from predict_cases import LENGTH, MODELS, VOCABULARY, WORDS, model, save_with_tokenizer, tokens

QUICK = Effort(window=LENGTH, calibration=6, test=2, texts=4)


@pytest.mark.parametrize("name", ["llama", "bert", "gemma2"])
def test_numbers_are_the_statistics_of_attention(name):
    """Against the streamed statistics, and for the near mass against attention that cannot see the first token."""
    layers, _ = self_attention(model(name))
    x = torch.randn(3, LENGTH, 32)
    some = torch.arange(FIRST_QUERY, LENGTH)
    valid = torch.ones(1, LENGTH, dtype=torch.bool)
    valid[:, 0] = False
    for layer in layers:
        whole = observe(layer.heads, x, x, sample=some)
        beheaded = observe(layer.heads, x, x, sample=some, mask=Mask(key_valid=valid))
        for number, head in enumerate(layer.heads):
            gatherer = Gatherer(head, LENGTH)
            for text in x.split(1):
                gatherer.add(gatherer.logits(head, text))
            found = gatherer.numbers()
            assert found.near_mass_beyond_first == pytest.approx(float(beheaded.near_mass[:, number].mean()), abs=1e-5)
            for name in ("normalised_entropy", "sink_mass", "mean_distance"):
                assert getattr(found, name) == pytest.approx(float(getattr(whole, name)[:, number].mean()), rel=1e-4)


def test_profiles_by_distance_add_up():
    head = self_attention(model("llama"))[0][0].heads[1]
    x = torch.randn(2, LENGTH, 32)
    gatherer = Gatherer(head, LENGTH)
    gatherer.add(gatherer.logits(head, x))
    found = gatherer.numbers()
    bins = distance_bins(LENGTH)
    assert sum(found.profile) == pytest.approx(1)
    near = sum(share for share, (_, high) in zip(found.profile, bins, strict=True) if high < NEAR)
    assert near == pytest.approx(found.near_mass_beyond_first, abs=1e-5)
    logits = head.logits(x, x)[:, FIRST_QUERY:].detach()
    at_one = torch.stack([logits[:, row, row + FIRST_QUERY - 1] for row in range(LENGTH - FIRST_QUERY)])
    assert found.logits[1] == pytest.approx(float(at_one.mean()), abs=1e-4)


def test_near_mass_keeps_its_digits_beside_a_huge_sink():
    """Logits that leave the others 1e-30 of the mass: their shares are still right."""
    head = self_attention(model("llama"))[0][0].heads[0]
    gatherer = Gatherer(head, LENGTH)
    logits = torch.zeros(1, LENGTH - FIRST_QUERY, LENGTH)
    logits[..., 0] = 69.0
    gatherer.add(logits)
    expected = (NEAR / torch.arange(FIRST_QUERY, LENGTH)).mean()
    assert gatherer.numbers().near_mass_beyond_first == pytest.approx(float(expected), rel=1e-5)


def assert_measured(row, logits, distance):
    """A head's measured numbers are those of the softmax of these logits, −inf where a key is not admitted."""
    admitted = logits.isfinite()
    whole, beyond = materialised(logits, admitted, distance), admitted.clone()
    beyond[..., 0] = False
    near = materialised(logits, beyond, distance).near_mass
    assert row.measured.near_mass_beyond_first == pytest.approx(float(near.mean()), abs=1e-5)
    assert row.measured.sink_mass == pytest.approx(float(whole.sink_mass.mean()), abs=1e-5)
    assert row.measured.mean_distance == pytest.approx(float(whole.mean_distance.mean()), rel=1e-4)
    assert row.measured.normalised_entropy == pytest.approx(float(whole.normalised_entropy.mean()), abs=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_measured_is_what_the_model_itself_does(name):
    """Against `output_attentions`, on the windows that predict measures; every family runs, whatever its positions."""
    net, ids = model(name), tokens(8)
    found = predict(net, text=Tokens(ids), effort=QUICK)
    test = ids[[3, 7]]
    with torch.no_grad():
        arguments = {"decoder_input_ids": test} if name == "t5" else {}
        out = net(test, **arguments, output_attentions=True)
    attentions = {"decoder": out.decoder_attentions, "encoder": out.encoder_attentions} if name == "t5" else None
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH))[None, None, FIRST_QUERY:]
    for row in found.heads:
        p = (attentions[row.block] if attentions else out.attentions)[row.layer][:, row.head, FIRST_QUERY:]
        assert_measured(row, p.log()[:, None], distance)
    assert len(found.heads) == (16 if name == "t5" else 8)
    assert bool(found.left_out) == (name == "t5")


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "qwen3"])
def test_prediction_meets_measurement_on_random_models(name):
    """Random heads on random tokens: single tokens say nearly all there is to say."""
    found = predict(model(name), text=Tokens(tokens(24)), effort=Effort(window=LENGTH, calibration=16, test=8))
    for number in ("near_mass_beyond_first", "normalised_entropy"):
        predicted, measured = found.pairs(number)
        assert found.calibration_error[number] < 0.15 * (max(measured) - min(measured))
        # Not by ranks: BERT has heads that are alike, and their order is a matter of rounding.
        assert numpy.corrcoef(predicted, measured)[0, 1] > 0.85


def test_terms_matter_where_positions_do():
    """GPT-2's heads see absolute positions: without means by position and lags, near mass is predicted worse."""
    options = dict(text=Tokens(tokens(24)), effort=Effort(window=LENGTH, calibration=16, test=8))
    net = model("gpt2")
    errors = [
        predict(net, **options, terms=terms).calibration_error["near_mass_beyond_first"]
        for terms in (Terms(), Terms(positions=False, lags=False))
    ]
    assert errors[0] < 0.5 * errors[1]


SINK = 7


def sinks_inside(*, strength: float, bunched: bool = False):
    """A model and windows with a token, never the first, whose key is `strength` above the others' for every query.

    One token in 12 of all windows, or `bunched`, one in 6 of every fourth.
    """
    torch.manual_seed(3)
    sizes = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=1, n_head=4, n_positions=128)
    net = GPT2Model(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)).eval()
    far = torch.tensor([1.0, -1.0] * 16) / 32**0.5
    net.wpe.weight.data *= 0
    net.wte.weight.data = torch.randn(VOCABULARY, 32)
    net.wte.weight.data -= (net.wte.weight.data @ far)[:, None] * far
    net.wte.weight.data[SINK] = 30 * far
    attention = net.h[0].attn.c_attn
    attention.bias.data[:32] = 1.0  # what all queries have in common
    attention.weight.data[:, 32:64] += strength / 32**0.5 / 8**0.5 * far[:, None]
    rate = torch.tensor([1 / 6, 0, 0, 0] * 16 if bunched else [1 / 12] * 64)[:, None]
    rate = rate[torch.randperm(64)]
    ids = torch.where(torch.rand(64, LENGTH) < rate, SINK, torch.randint(8, VOCABULARY, (64, LENGTH)))
    ids[:, 0] = 8
    return net, dict(text=Tokens(ids), effort=Effort(window=LENGTH, calibration=32, test=32, texts=32))


@pytest.mark.parametrize("strength", [6.0, 0.0, -6.0], ids=["sinks", "outliers that no head reads", "avoided"])
def test_sinks_unlike_the_first_token_are_predicted(strength):
    """A kind of token far from all others: it takes most of the mass, or none, as its keys have it.

    All windows have it, so none is kept where it was, and the term for those is off.
    """
    net, options = sinks_inside(strength=strength)
    found = predict(net, **options)
    mean_entropy = sum(head.measured.normalised_entropy for head in found.heads) / 4
    assert (mean_entropy < 0.6) is (strength > 0)
    # Near mass is noisy: the few sinks of a window lie near a query, or not.
    for number, most in {"near_mass_beyond_first": 0.1, "normalised_entropy": 0.04, "sink_mass": 0.01}.items():
        assert found.calibration_error[number] < most
    assert found.heads == predict(net, **options, terms=Terms(sinks=False)).heads


def test_sinks_that_few_windows_have_stay_in_them():
    """Shared out, they would be in every text; one window in four has them."""
    net, options = sinks_inside(strength=9.0, bunched=True)
    with_it, without = (predict(net, **options, terms=Terms(sinks=sinks)) for sinks in (True, False))
    assert with_it.calibration_error["normalised_entropy"] < 0.04
    assert without.calibration_error["normalised_entropy"] > 0.2


def test_prediction_is_reproducible_and_leaves_the_model_as_it_was():
    net = model("llama").train()
    first, second = (predict(net, text=Tokens(tokens(8)), effort=QUICK).to_json() for _ in range(2))
    assert first == second
    assert net.training
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_a_rank_bounds_what_is_kept_of_lags():
    options = dict(text=Tokens(tokens(8)))
    whole = predict(model("llama"), **options, effort=QUICK)
    cheap = predict(model("llama"), **options, effort=Effort(window=LENGTH, calibration=6, test=2, texts=4, lag_rank=8))
    assert [head.measured for head in whole.heads] == [head.measured for head in cheap.heads]
    assert cheap.spearman["near_mass_beyond_first"] > 0.7
    assert cheap.heads[0].predicted != whole.heads[0].predicted


def test_each_layer_hands_over_its_input_once():
    net, got = model("bert"), []
    layers, _ = self_attention(net)
    run_model(net, layers, tokens(2), lambda number, x: got.append((number, tuple(x.shape))))
    assert got == [(0, (2, LENGTH, 32)), (1, (2, LENGTH, 32))]


def test_short_texts_are_counted_from_their_middle():
    """A model of 40 tokens: the usual window gives way, and what is measured is what its own softmax does."""
    sizes = dict(n_layer=1, n_head=2, n_embd=32, n_positions=40, vocab_size=64, bos_token_id=0, eos_token_id=0)
    net = GPT2LMHeadModel(GPT2Config(**sizes, attn_implementation="eager")).eval()
    ids = torch.randint(64, (6, 40))
    found = predict(net, text=Tokens(ids), effort=Effort(calibration=4, test=2, texts=2))
    assert found.to_json()["first_query"] == 20
    with torch.no_grad():
        p = net(split_windows(ids, num_test=2).test, output_attentions=True).attentions[0][:, 0, 20:]
    assert found.heads[0].measured.sink_mass == pytest.approx(float(p[..., 0].mean()), abs=1e-5)
    drawn = predict(net, text="random", effort=Effort(calibration=3, test=1))
    assert drawn.length == 40 and all(row.measured.sink_mass > 0 for row in drawn.heads)


def test_refusals():
    net = model("llama")
    with pytest.raises(Refusal, match="at least two windows of tokens, got 1"):
        predict(net, text=Tokens(tokens(1)))
    with pytest.raises(Refusal, match="a tokenizer for a live model"):
        predict(net)
    with pytest.raises(Refusal, match="layers among 0-1, all that this model has, got 7"):
        predict(net, text=Tokens(tokens(4)), layers=[7])
    with pytest.raises(Refusal, match="windows of at least 32 tokens, got 31"):
        Effort(window=31)
    with pytest.raises(Refusal, match="windows of at least 32 tokens, got 16"):
        predict(net, text=Tokens(tokens(4, length=16)))
    with pytest.raises(Refusal, match="at least one window"):
        Effort(test=0)
    with pytest.raises(Refusal, match="a rank of at least 1"):
        Effort(lag_rank=0)
    with pytest.raises(Refusal, match="at most 128 tokens, the model's longest, got 200"):
        predict(net, text=Tokens(tokens(4, length=200)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    save_with_tokenizer(place)
    return place


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Sentences of the words that the tokenizer knows, in an order that never repeats."""
    place = tmp_path_factory.mktemp("text") / "text.txt"
    order = torch.randint(len(WORDS), (4000,), generator=torch.Generator().manual_seed(3))
    place.write_text(" ".join(WORDS[number] for number in order.tolist()))
    return place


QUICKLY = ["--window", "96", "--calibration", "6", "--test", "2"]


def test_command(folder, text, tmp_path):
    json_path, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = [
        "predict",
        str(folder),
        "--text",
        str(text),
        *QUICKLY,
        "--json",
        str(json_path),
        "--plot",
        str(picture),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "predicted from 576 tokens (6 windows of 96)" in result.output
    assert "measured on 192 others" in result.output
    assert not [line for line in result.output.splitlines() if "/" not in line and len(line) > 80]
    document = json.loads(json_path.read_text())
    assert document["schema"] == "locater.predict/2"
    assert len(document["heads"]) == 8
    for row in document["heads"]:
        assert set(row) >= {"layer", "head", "predicted", "measured"}
        assert tuple(row["predicted"]) == tuple(row["measured"]) == NAMES
    assert set(document["spearman"]) == set(document["ceiling"]) == set(NAMES)
    assert "ceiling" in result.output
    badly = [rho for rho in document["spearman"].values() if rho is not None and rho < 0.9]
    said = " ".join(result.output.split())  # beneath the table, wrapped
    assert badly and said.count("not predicted well here") == len(document["warnings"]) == len(badly)
    assert document["tokens"] == {"calibration": 576, "test": 192}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_command_on_the_embedded_text_by_head(folder):
    result = CliRunner().invoke(app, ["predict", str(folder), *QUICKLY, "--heads", "--layers", "1", "--json", "-"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["text"] == "Python's docstrings"
    assert [row["layer"] for row in document["heads"]] == [1] * 4
    assert "decoder 1.3" in result.stderr


def test_command_refuses(folder, text, tmp_path):
    def refusal(*arguments):
        return CliRunner().invoke(app, ["predict", *map(str, arguments)]).exception

    assert "windows of at least 32" in str(refusal(folder, "--window", 10))
    assert "a readable text at" in str(refusal(folder, "--text", tmp_path / "none.txt"))
    short = tmp_path / "short.txt"
    short.write_text("the name of the object")
    assert "a text of 32 windows of 96 tokens, got 22 characters" in str(
        refusal(folder, "--text", short, "--window", 96)
    )
    (tmp_path / "bare").mkdir()
    assert "a model that transformers can load" in str(refusal(tmp_path / "bare"))
    model("llama").save_pretrained(tmp_path / "bare")
    assert "a tokenizer in" in str(refusal(tmp_path / "bare"))
    assert "a GGUF file that exists" in str(refusal(tmp_path / "none.gguf"))
    assert "a directory, a hub id or a GGUF file" in str(refusal(folder / "config.json"))


def test_tokenizer_from_elsewhere(folder, text, tmp_path):
    model("llama").save_pretrained(tmp_path)
    effort = Effort(window=LENGTH, calibration=3, test=1, texts=1)
    found = predict(tmp_path, text=Text(text, tokenizer=str(folder)), effort=effort)
    assert len(found.heads) == 8
    assert "8 heads predicted from 288 tokens" in found.summary()


def test_frame():
    pytest.importorskip("pandas")
    frame = predict(model("llama"), text=Tokens(tokens(8)), effort=QUICK).to_frame()
    assert len(frame) == 8
    assert {"layer", "head", "predicted_near_mass_beyond_first", "measured_sink_mass"} <= set(frame.columns)


def test_help_needs_no_torch():
    code = "import sys; import locater.cli.program; import locater.cli.predict; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_packaged_model_keeps_the_name_that_was_given_so_that_a_page_joins_its_scan():
    found = predict("pip:locater", text="random", effort=Effort(window=64, calibration=2, test=2))
    scanned = scan("pip:locater")
    assert found.source == "pip:locater" == scanned.to_json()["source"]
    (view,) = views_of([scanned.to_json(), found.to_json()])
    assert {"xi", "measured_near_mass_beyond_first"} <= view.columns.keys() and view.name == "locater"
