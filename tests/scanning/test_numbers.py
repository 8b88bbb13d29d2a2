"""The scan's numbers against dense matrices, full profiles and simulation."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from locater.errors import Refusal
from locater.head import BLOCKS
from locater.scanning.scan import scan
from locater.spectra import moments
from locater.theory import closed_form, monte_carlo, regimes
from locater.theory.random_walk import Turns
from saved_models import by_place, case_named, heads_of

HEAD_KEYS = [
    "block", "layer", "head", "key_head", "d_model", "d_head", "temperature", "trace", "trace_of_square",
    "frobenius_squared", "mean", "variance", "mean_nonzero", "variance_nonzero", "spread", "xi", "eta", "localisation",
    "regime",
    "sigma", "symmetry", "logit_bound", "estimated_near_mass", "estimated_near_mass_interval",
]  # fmt: skip
DEFAULT_KEYS = [name for name in HEAD_KEYS if name != "spread"]  # it needs the eigenvalues
# Fused and apart, grouped, latent, with rotary positions of any kind, with biases, with every kind of norm.
DENSE = ["gpt2", "codegen", "falcon-40b", "llama", "llama-yarn", "gemma2", "deepseek-v2", "olmo2", "bert", "t5", "clip"]


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """The folder of a case's model."""
    made = {}

    def folder(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            case_named(name).save(case_named(name).build(), made[name])
        return made[name]

    return folder


def dense_form(head, *, raw):
    """W = W_K^T W_Q as a d×d matrix in float64, by the slow path through the head itself."""
    if raw:
        return (head.key.weight.double().T @ head.query.weight.double()).numpy()
    folded = head.folded()
    query, key = (side.linearised().double() for side in (folded.query, folded.key))
    if head.rotary is not None:
        amplitude = torch.ones(head.d_head, dtype=torch.float64)
        amplitude[head.rotary.pairs.flatten()] = head.rotary.amplitude
        query, key = amplitude[:, None] * query, amplitude[:, None] * key
    return (key.T @ query).numpy()


@pytest.mark.parametrize("raw", [False, True], ids=["folded", "raw"])
@pytest.mark.parametrize("name", DENSE)
def test_moments_and_eigenvalues_are_those_of_dense_matrices(name, raw, saved):
    heads, rows = heads_of(saved(name)), by_place(scan(saved(name), raw=raw, details=["eigenvalues"]))
    assert list(rows) == list(heads)
    for place, head in heads.items():
        dense, row = dense_form(head, raw=raw), rows[place]
        values = np.linalg.eigvals(dense)
        scale, size = np.linalg.norm(dense), head.d_head
        mean = values.mean()
        near = partial(near_to, scale=scale)
        assert (row.d_model, row.d_head, row.key_head) == (head.d_model, size, head.key_index)
        assert row.trace == near(np.trace(dense))
        assert row.trace_of_square == near(np.trace(dense @ dense), 2)
        assert row.frobenius_squared == near(scale**2, 2)
        assert row.mean == near(mean.real)
        assert row.variance == near(((values - mean) ** 2).mean().real, 2)
        assert row.spread == near((abs(values - mean) ** 2).mean(), 2)
        kept = values[np.argsort(-abs(values))[:size]]
        assert row.mean_nonzero == near(kept.mean().real)
        assert row.variance_nonzero == near(((kept - kept.mean()) ** 2).mean().real, 2)
        eta = math.sqrt((np.trace(dense @ dense) + 2 * scale**2) / 3)
        assert row.eta == near(eta) and row.xi == pytest.approx(np.trace(dense) / eta, abs=1e-4)
        assert row.sigma == near(np.linalg.norm(dense, 2)) and -1 <= row.symmetry <= 1
        assert row.symmetry == pytest.approx(np.trace(dense @ dense) / scale**2, abs=1e-4)
        ours = np.array([complex(*pair) for pair in row.eigenvalues])
        assert_same_spectrum(ours, kept, tolerance=2e-3 * scale)


def near_to(expected, power=1, *, scale):
    return pytest.approx(expected, rel=1e-4, abs=1e-5 * scale**power)


def assert_same_spectrum(ours, theirs, *, tolerance):
    """Each of ours has a partner of its own among theirs."""
    left = list(theirs)
    for value in ours:
        nearest = min(range(len(left)), key=lambda index: abs(left[index] - value))
        assert abs(left.pop(nearest) - value) < tolerance
    assert not left


@pytest.mark.parametrize("raw", [False, True])
def test_gains_are_folded_by_hand(raw, saved):
    """Nothing but tensor names and arithmetic."""
    tensors = load_file(saved("llama") / "model.safetensors")
    at = "model.layers.1."
    query, key = (tensors[f"{at}self_attn.{side}_proj.weight"].double() for side in "qk")
    gain = torch.ones(query.shape[1]) if raw else tensors[f"{at}input_layernorm.weight"].double()
    config = json.loads((saved("llama") / "config.json").read_text())
    num_heads, num_keys = config["num_attention_heads"], config["num_key_value_heads"]
    rows = by_place(scan(saved("llama"), raw=raw))
    for number, part in enumerate((query * gain).chunk(num_heads)):
        shared = (key * gain).chunk(num_keys)[number * num_keys // num_heads]
        row = rows["decoder", 1, number]
        assert row.trace == pytest.approx(float((part * shared).sum()), rel=1e-4, abs=1e-5)
        assert row.frobenius_squared == pytest.approx(float((shared.T @ part).square().sum()), rel=1e-4)


def full_profile(head, *, length, temperature=None):
    """ρ_1 … ρ_T by the slow path: linearised weights in float64, every position."""
    folded = head.folded()
    query, key = (side.linearised().double() for side in (folded.query, folded.key))
    given = dict(length=length, temperature=head.temperature if temperature is None else temperature)
    if head.rotary is not None:
        turning = dict(turns=Turns(head.rotary.pairs, head.rotary.frequencies(length)))
        rows = torch.ones(head.d_head, dtype=torch.float64)
        rows[head.rotary.pairs.flatten()] = head.rotary.amplitude
        return closed_form.rotary_profile(rows[:, None] * query, rows[:, None] * key, **given, **turning)
    bias = head.position_bias and head.position_bias(torch.arange(length - 1, -1, -1)[None])[0]
    return closed_form.from_moments(moments(query, key), bias=bias, **given)


# Norms per head and over all heads, of both kinds; inner norms; biases by distance; rotary positions of any kind.
PROFILES = [
    "llama", "llama-yarn", "gptj", "gpt2", "bloom", "mpt-foundry", "t5", "mpnet", "qwen3", "olmo2", "cohere",
    "phi-qk-norm", "deepseek-v2", "deepseek-v3", "mpt-foundry-grouped", "stablelm-2",
]  # fmt: skip


@pytest.mark.parametrize("name", PROFILES)
def test_profiles_are_the_slow_paths(name, saved):
    """At a length within the number of positions the scan's profile is the whole one."""
    heads, rows = heads_of(saved(name)), by_place(scan(saved(name), length=48))
    for place, head in heads.items():
        expected = full_profile(head, length=48)
        assert rows[place].localisation == pytest.approx(float(regimes.localisation(expected)), abs=2e-4)
        assert rows[place].regime == regimes.classify(expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sampled_positions_stand_for_all(name, saved):
    heads, rows = heads_of(saved(name)), by_place(scan(saved(name), length=1000))
    for place, head in heads.items():
        expected = full_profile(head, length=1000)
        assert rows[place].localisation == pytest.approx(float(regimes.localisation(expected)), abs=0.03)


def test_a_rotary_head_agrees_with_simulation(saved):
    heads, rows = heads_of(saved("llama")), by_place(scan(saved("llama"), length=32, temperature=40.0))
    head = heads["decoder", 0, 1].folded()
    given = dict(length=32, turns=Turns(head.rotary.pairs, head.rotary.frequencies(32)), temperature=40.0)
    chance = torch.Generator().manual_seed(0)
    walks = monte_carlo.profile(head.query.weight, head.key.weight, num_walks=4000, generator=chance, **given)
    found = float(regimes.localisation(walks.mean))
    assert rows["decoder", 0, 1].localisation == pytest.approx(found, abs=0.06)


def test_the_temperature_replaces_each_heads_own(saved):
    heads, rows = heads_of(saved("bert")), by_place(scan(saved("bert"), length=40, temperature=0.5))
    for place, head in heads.items():
        expected = full_profile(head, length=40, temperature=0.5)
        assert rows[place].localisation == pytest.approx(float(regimes.localisation(expected)), abs=2e-4)
        assert rows[place].temperature == 0.5


@pytest.mark.parametrize("name", ["bart", "t5", "whisper", "clip", "gpt2-cross", "jamba"])
def test_rows_come_by_block_layer_and_head(name, saved):
    rows = scan(saved(name)).heads
    places = [(BLOCKS.index(row.block), row.layer, row.head) for row in rows]
    assert places == sorted(set(places))
    assert set(heads_of(saved(name))) == {(row.block, row.layer, row.head) for row in rows}


def test_the_document_has_the_keys_of_its_schema(saved):
    found = scan(saved("llama"))
    document = found.to_json()
    assert list(document) == ["schema", "source", "family", "format", "coverage", "length", "heads"]
    assert document["schema"] == "locater.scan/1" and document["source"] == str(saved("llama"))
    assert (document["family"], document["format"], document["coverage"]) == ("llama", "safetensors", "COMPLETE")
    assert all(list(head) == DEFAULT_KEYS for head in document["heads"])
    kept = scan(saved("llama"), layers=[0], details=["eigenvalues"]).to_json()["heads"]
    assert all(list(head) == [*HEAD_KEYS, "eigenvalues"] for head in kept)
    assert all(len(head["eigenvalues"]) == head["d_head"] for head in kept)
    assert json.loads(json.dumps(document, allow_nan=False))["heads"][0]["layer"] == 0


def test_layers_can_be_chosen(saved):
    whole, some = scan(saved("gpt2")), scan(saved("gpt2"), layers=[2, 0])
    assert some.heads == tuple(row for row in whole.heads if row.layer in (0, 2))
    for layers in ([3], [0, 99], []):
        with pytest.raises(Refusal, match="layers among 0-2"):
            scan(saved("gpt2"), layers=layers)


@pytest.mark.parametrize(("given", "message"), [(dict(length=0), "a length"), (dict(temperature=-1.0), "temperature")])
def test_senseless_settings_are_refused(given, message, saved):
    with pytest.raises(Refusal, match=message):
        scan(saved("llama"), **given)


def damage(folder, copy, *, name, rows, value):
    """The same model with one entry replaced."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name][rows, 3] = value
    save_file(tensors, copy / "model.safetensors")
    (copy / "config.json").write_text((folder / "config.json").read_text())
    return copy


DAMAGES = [
    ("model.layers.1.self_attn.q_proj.weight", 20, math.nan, [1], "finite weights"),
    ("model.layers.1.self_attn.q_proj.weight", 0, math.inf, [0], "finite weights"),
    ("model.layers.1.self_attn.k_proj.weight", 0, math.nan, [0, 1], "finite weights"),
    ("model.layers.1.self_attn.q_proj.weight", 40, 3e25, [3], "finite moments"),
]


@pytest.mark.parametrize(("name", "row", "value", "lost", "reason"), DAMAGES)
def test_a_damaged_head_is_named_and_the_rest_scanned(name, row, value, lost, reason, saved, tmp_path):
    whole = scan(saved("llama"))
    d_head, num_heads = whole.heads[0].d_head, 1 + max(row.head for row in whole.heads)
    assert (d_head, num_heads) == (12, 4) or pytest.fail("the rows above are of another shape")
    found = scan(damage(saved("llama"), tmp_path, name=name, rows=row, value=value))
    assert len(found.refused) == len(lost)
    for number, sentence in zip(lost, found.refused, strict=True):
        assert sentence.startswith(f"decoder layer 1, head {number}: ") and reason in sentence
    rest = {place: row for place, row in by_place(whole).items() if place not in {("decoder", 1, n) for n in lost}}
    assert by_place(found).keys() == rest.keys()
    for place, row in by_place(found).items():
        assert row.trace == pytest.approx(rest[place].trace, rel=1e-5) and row.regime == rest[place].regime
    assert found.to_json()["refused"] == list(found.refused)
    assert f"not read: {found.refused[0]}" in found.summary()


def test_a_model_without_a_sound_head_is_refused(saved, tmp_path):
    tensors = {name: tensor * math.nan for name, tensor in load_file(saved("llama") / "model.safetensors").items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((saved("llama") / "config.json").read_text())
    with pytest.raises(Refusal, match="decoder layer 0, head 0: expected (finite weights|a finite bias)"):
        scan(tmp_path)


def test_several_threads_give_the_same_and_are_given_back(saved):
    alone = scan(saved("gemma2"))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        together = scan(saved("gemma2"))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert [(row.layer, row.head) for row in together.heads] == [(row.layer, row.head) for row in alone.heads]
    for one, other in zip(together.heads, alone.heads, strict=True):
        assert one.trace == pytest.approx(other.trace, rel=1e-5, abs=1e-6) and one.regime == other.regime


def test_progress_is_told(saved):
    told = []
    scan(saved("bart"), progress=lambda done, total: told.append((done, total)))
    assert told == [(number, len(told)) for number in range(len(told))] and len(told) > 3


def test_frames_and_summaries(saved):
    found = scan(saved("bart"))
    frame = found.to_frame()
    assert len(frame) == len(found.heads) and list(frame["trace"]) == [row.trace for row in found.heads]
    assert set(frame.columns) == set(DEFAULT_KEYS)
    assert f"bart, {len(found.heads)} heads, COMPLETE" in found.summary() and "In the paper's theory" in found.summary()
