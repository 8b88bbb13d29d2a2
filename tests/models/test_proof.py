"""Families by proof: what a twin proves holds for models of other sizes, and what it cannot prove is refused."""

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from test_families import own_attention

from command import locater
from family_cases.base import Case
from locater import Live, attention, checkpoints
from locater.errors import Refusal
from locater.models import Config, open_model
from locater.models import proof as cache
from locater.models.proof import prove, twin
from locater.models.proof.evidence import Evidence
from locater.models.proof.survey import model_types, survey
from locater.models.proof.twin import observe_twin
from locater.models.registry import FAMILIES
from locater.prediction.numbers import Gatherer
from locater.scanning.scan import scan
from twins import differences

SIZES = dict(
    vocab_size=99, hidden_size=48, intermediate_size=40, num_hidden_layers=3, num_attention_heads=6,
    num_key_value_heads=3, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
KINDS = dict(sliding_window=4, layer_types=["sliding_attention", "sliding_attention", "full_attention"])
GEMMA4 = dict(head_dim=16, global_head_dim=24, attention_k_eq_v=True, num_global_key_value_heads=2)
GEMMA4 |= dict(vocab_size_per_layer_input=99, hidden_size_per_layer_input=8)
MIMO = dict(head_dim=18, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, n_group=1)
MIMO |= dict(topk_group=1, mlp_layer_types=["dense", "sparse", "sparse"])
LAGUNA = dict(head_dim=16, num_attention_heads_per_layer=[12, 12, 6], mlp_layer_types=["dense", "sparse", "sparse"])
CASES = [
    Case("glm4", "Glm4Config", "Glm4ForCausalLM", SIZES | dict(head_dim=16, attention_bias=True)),
    Case("olmoe", "OlmoeConfig", "OlmoeForCausalLM", SIZES | EXPERTS),
    Case("ernie4_5", "Ernie4_5Config", "Ernie4_5ForCausalLM", SIZES | dict(head_dim=16, use_bias=True)),
    Case(
        "minimax_m2",
        "MiniMaxM2Config",
        "MiniMaxM2ForCausalLM",
        SIZES | dict(head_dim=16, num_local_experts=4, num_experts_per_tok=2),
    ),
    Case("seed_oss", "SeedOssConfig", "SeedOssForCausalLM", SIZES | dict(head_dim=16)),
    Case(
        "hunyuan_v1_dense",
        "HunYuanDenseV1Config",
        "HunYuanDenseV1ForCausalLM",
        SIZES | dict(head_dim=16, rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=1.0, alpha=1000.0)),
    ),
    Case("nanochat", "NanoChatConfig", "NanoChatForCausalLM", SIZES),
    Case(
        "gemma4_text",
        "Gemma4TextConfig",
        "Gemma4ForCausalLM",
        SIZES | KINDS | GEMMA4,
    ),
    Case("mimo_v2_flash", "MiMoV2FlashConfig", "MiMoV2FlashForCausalLM", SIZES | KINDS | MIMO),
    Case("laguna", "LagunaConfig", "LagunaForCausalLM", SIZES | KINDS | EXPERTS | LAGUNA),
]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("LOCATER_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_proven_row_gives_the_attention_of_a_model_of_other_sizes(case, tmp_path):
    """The twin has sizes of its own: what it proves must hold for the file's, by the model's own probabilities."""
    model = case.build()
    case.save(model, tmp_path)
    output, seen, _ = own_attention(model, case)
    with checkpoints.open(tmp_path) as checkpoint:
        opened = open_model(Config(checkpoint.config), checkpoint)
        layers = list(opened.layers())
    is_gated = case.name == "laguna"
    assert str(opened.coverage).startswith(
        "PARTIAL: 3 of 3 layers, the output gate" if is_gated else "COMPLETE, by the row "
    )
    assert f"with transformers {sys.modules['transformers'].__version__}" in str(opened.coverage)
    assert [layer.number for layer in layers] == [0, 1, 2]
    for layer, theirs in zip(layers, output.attentions, strict=True):
        x = seen[layer.query_name][0]
        assert theirs.std(-1).mean() > 0.02
        for head in layer.heads:
            torch.testing.assert_close(head.attention(x, x), theirs[:, head.index], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "case",
    [
        Case("rembert", "RemBertConfig", "RemBertModel", SIZES),
        Case("layoutlm", "LayoutLMConfig", "LayoutLMModel", SIZES),
    ],
    ids=lambda case: case.name,
)
def test_a_norm_that_runs_in_chunks_is_found(case, tmp_path):
    """The output of the layer before is put together from chunks of tokens: no call of its norm has that shape."""
    model, found = case.build(), []
    for chunk in (0, 1, 3):
        model.config.chunk_size_feed_forward = chunk
        case.save(model, tmp_path / str(chunk))
        with checkpoints.open(tmp_path / str(chunk)) as checkpoint:
            opened = open_model(Config(checkpoint.config), checkpoint)
            found.append([head.folded().query.weight for layer in opened.layers() for head in layer.heads])
        assert opened.coverage.is_complete
    raw = [layer.query.weight for layer in model.modules() if hasattr(layer, "query")]
    assert not torch.allclose(torch.cat(found[0])[-8:], raw[-1][-8:])  # a norm is folded in
    for other in found[1:]:
        torch.testing.assert_close(torch.cat(other), torch.cat(found[0]))


@pytest.mark.parametrize(
    "model_type", ["glm4_moe", "mistral4", "qwen3_vl_text", "altclip_vision_model", "qwen2_vl", "llava"]
)
def test_types_of_this_year_are_proven(model_type):
    proof = prove(model_type)
    assert proof.is_proven, proof.reason
    assert 0 <= proof.error <= 1e-5


@pytest.mark.parametrize(
    ("model_type", "family"),
    [
        ("gpt2", "gpt2"),
        ("bloom", "bloom"),
        ("t5", "t5"),
        ("deepseek_v3", "deepseek"),
        ("gemma2", "gemma2"),
        ("bart", "bart"),
    ],
)
def test_the_proof_finds_the_row_that_the_tables_have(model_type, family):
    proof = prove(model_type)
    assert proof.is_proven, proof.reason
    assert {row.get("family") for row in proof.rows} == {family}
    assert not proof.notes


def gpt_oss(tmp_path):
    """A model with sinks of its own, its heads from the file, the input of each layer and its own attention."""
    window = dict(sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
    settings = SIZES | window | dict(head_dim=16, num_local_experts=4)
    ids = {"input_ids": torch.randint(3, 90, (2, 72), generator=torch.Generator().manual_seed(3))}
    case = Case("gpt_oss", "GptOssConfig", "GptOssForCausalLM", settings, inputs=lambda config: ids)
    model = case.build()
    case.save(model, tmp_path)
    output, seen, _ = own_attention(model, case)
    with checkpoints.open(tmp_path) as checkpoint:
        opened = open_model(Config(checkpoint.config), checkpoint)
        layers = list(opened.layers())
    assert str(opened.coverage).startswith("COMPLETE, by the row ")
    return [(layer, seen[layer.query_name][0], own) for layer, own in zip(layers, output.attentions, strict=True)]


def test_a_learned_sink_takes_its_share_as_in_the_model(tmp_path):
    for layer, x, theirs in gpt_oss(tmp_path):
        for head in layer.heads:
            own = head.attention(x, x)
            torch.testing.assert_close(own, theirs[:, head.index], atol=1e-5, rtol=0)
            assert own.sum(-1).min() < 0.9
            assert not torch.allclose(replace(head, sink=None).attention(x, x), own, atol=1e-3)


def test_statistics_and_prediction_count_the_sink_as_one_more_key(tmp_path):
    """Against the model's own weights: what is missing to 1 is the sink's, and takes part in the entropy."""
    layer, x, theirs = gpt_oss(tmp_path)[1]
    whole = torch.cat([theirs, (1 - theirs.sum(-1, keepdim=True)).clamp(min=0)], -1)
    entropy = torch.special.entr(whole).sum(-1)
    streamed = attention.observe(layer.heads, x, x)
    torch.testing.assert_close(streamed.entropy, entropy, atol=1e-4, rtol=0)
    torch.testing.assert_close(streamed.sink_mass, theirs[..., 0], atol=1e-5, rtol=0)
    for head in layer.heads:
        gatherer = Gatherer(head, x.shape[1])
        gatherer.add(gatherer.logits(head, x))
        queries = gatherer.queries
        normalised = entropy[:, head.index, queries] / (queries + 2).log()
        assert gatherer.numbers().normalised_entropy == pytest.approx(float(normalised.mean()), abs=1e-5)
        assert gatherer.numbers().sink_mass == pytest.approx(float(theirs[:, head.index, queries, 0].mean()), abs=1e-5)


def test_a_decoder_of_other_sizes_than_its_encoder_is_read_by_its_own(tmp_path):
    """The twin's decoder has other numbers of heads and layers too: else the encoder's entries were taken for both."""
    sizes = dict(vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=3, num_experts=2, expert_capacity=64)
    sizes |= dict(encoder_attention_heads=4, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48)
    case = Case("nllb-moe", "NllbMoeConfig", "NllbMoeForConditionalGeneration", sizes)
    model = case.build()
    case.save(model, tmp_path)
    with checkpoints.open(tmp_path) as checkpoint:
        opened = open_model(Config(checkpoint.config), checkpoint)
        layers = list(opened.layers())
    assert str(opened.coverage).startswith("COMPLETE")
    assert Counter((layer.block, len(layer.heads)) for layer in layers) == {
        ("encoder", 4): 2,
        ("decoder", 2): 3,
        ("cross", 2): 3,
    }
    texts = torch.randint(5, 99, (2, 9))
    with torch.no_grad():
        evidence = Evidence(model, observe_twin(model, dict(input_ids=texts, decoder_input_ids=texts)))
    assert list(differences(evidence, layers, is_complete=True)) == []


def test_what_logits_do_not_show_is_named():
    assert any("the difference of two maps" in note and "lambda_q1" in note for note in prove("diffllama").notes)
    assert any("the output gate of `model.layers.{layer}.self_attn`" in note for note in prove("qwen3_5_text").notes)
    assert any(
        "`model.visual.blocks.{layer}.attn`, which the proof did not reach" in note for note in prove("glm4v").notes
    )


def test_a_tower_that_text_does_not_reach_is_proven_by_itself():
    proof = prove("llava")
    assert {row["family"] for row in proof.rows} == {"llama", "clip"}
    assert not proof.notes


def test_a_model_that_does_something_else_is_refused_with_the_place(monkeypatch, tmp_path):
    from transformers.models.glm4 import modeling_glm4

    plain = modeling_glm4.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_glm4, "apply_rotary_pos_emb", lambda q, k, *more: plain(q, k.sin(), *more))
    proof = prove("glm4")
    assert not proof.is_proven
    assert "logits of layer 0, head 0 by" in proof.reason
    assert "nearest: " in proof.reason
    case = CASES[0]
    case.save(case.build(), tmp_path)
    with pytest.raises(
        Refusal, match=r"got the model type 'glm4'.*no row could be proven for it either: `model\.layers"
    ):
        scan(tmp_path)


def test_a_file_with_tensors_that_the_twin_lacks_is_not_called_complete(tmp_path):
    from safetensors.torch import load_file, save_file

    case = CASES[0]
    case.save(case.build(), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | {"model.layers.1.self_attn.sinks": torch.zeros(6)}
    save_file(tensors, path, metadata={"format": "pt"})
    assert "PARTIAL: 3 of 3 layers, tensors that the proof did not see left out (`sinks`)" in scan(tmp_path).coverage


def test_a_file_that_names_code_of_its_own_is_not_called_complete(tmp_path):
    case = CASES[0]
    case.save(case.build(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoModelForCausalLM": "modeling.Mine"}}))
    assert scan(tmp_path).coverage.startswith("PARTIAL: 3 of 3 layers, its own code was not looked at")


@pytest.mark.parametrize("entry", [{"attn_logit_multiplier": 3.0}, {"nested": {"qk_clip_value": 2}}], ids=str)
def test_a_file_with_settings_that_the_twin_does_not_know_is_not_called_complete(entry, tmp_path):
    case = CASES[0]
    case.save(case.build(), tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entry))
    found = scan(tmp_path).coverage
    assert found.startswith("PARTIAL: 3 of 3 layers, not read in the config: ") and [*entry][0] in found


def test_a_live_model_is_read_by_the_same_proof():
    model = CASES[0].build()
    found = scan(model)
    assert len(found.heads) == 18
    assert found.coverage.startswith("by the table, not run, by the row ")
    model.set_attn_implementation("sdpa")
    ran = scan(Live(model, sample=CASES[0].inputs(model.config)))
    assert ran.coverage == "COMPLETE" and len(ran.heads) == 18


def test_a_proof_is_kept_and_read_again(monkeypatch):
    made = cache.recall("glm4")
    monkeypatch.setattr(cache, "prove", lambda *given: pytest.fail("the twin was built again"))
    assert cache.recall("glm4") == made


def test_a_damaged_or_another_proof_is_made_again(monkeypatch):
    made = cache.recall("glm4")
    path = cache.path_of_proof("glm4")
    path.write_text(path.read_text()[:40])
    assert cache.recall("glm4") == made
    assert json.loads(path.read_text())["model_type"] == "glm4"
    assert cache.path_of_proof("glm4", {"rope_theta": 5.0}) != path
    assert cache.path_of_proof("glm4", {"_name_or_path": "elsewhere"}) == path
    monkeypatch.setattr(cache, "version", lambda: "4.0")
    assert cache.path_of_proof("glm4") != path


def test_without_transformers_the_refusal_is_that_of_the_tables(monkeypatch, tmp_path):
    case = CASES[0]
    case.save(case.build(), tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(Refusal, match=r"no family names; describe it with --layout") as refused:
        scan(tmp_path)
    assert "proven" not in str(refused.value)


def test_no_code_from_outside_transformers_is_asked_for(tmp_path):
    config = twin.full_config(
        "glm4", {"model_type": "glm4", "auto_map": {"AutoConfig": "evil.Evil"}, "num_hidden_layers": 2}
    )
    assert type(config).__module__.startswith("transformers.")
    assert not hasattr(config, "auto_map")


def test_a_config_that_its_own_check_throws_out_is_refused_by_what_is_wrong():
    (entry,) = survey(["gemma4_assistant"], update=True)
    assert entry.how == "refused" and "ValueError: hidden_size_per_layer_input must be 0" in entry.reason


def test_a_misspelt_type_is_refused():
    result = locater("families", "lama")
    assert result.code == 2 and "did you mean llama?" in " ".join(result.err.split())


def test_families_lists_how_each_type_is_known(tmp_path):
    path, page = tmp_path / "families.json", tmp_path / "families.md"
    options = ["--update", "--json", str(path), "--markdown", str(page)]
    result = locater("families", "llama", "seed_oss", "mamba", *options)
    assert result.code == 0, result.err
    document = json.loads(path.read_text())
    assert {entry["model_type"]: entry["how"] for entry in document["families"]} == {
        "llama": "table",
        "seed_oss": "proven",
        "mamba": "refused",
    }
    assert "no softmax attention was seen" in document["families"][2]["reason"]
    assert "| seed_oss | proven (" in page.read_text()


def test_types_without_a_proof_of_this_machine_are_listed_from_the_package(monkeypatch):
    monkeypatch.setattr("locater.models.proof.survey.read_proof", lambda path: None)
    proven, refused, table, new = survey(["seed_oss", "mamba", "llama", "a_type_of_tomorrow"])
    assert (proven.how, refused.how, table.how, new.how) == ("proven", "refused", "table", "untried")
    assert proven.listed == refused.listed and re.fullmatch(r"\d+\.\d+\.\d+", proven.listed)
    assert refused.row == "no softmax attention was seen" and not (table.listed or new.listed)


KEPT = Path(__file__).parents[2] / "docs" / "families_table.md"


def kept_table() -> dict[str, str]:
    """docs/families_table.md: model types and how each is known."""
    rows = (line.split(" | ") for line in KEPT.read_text(encoding="utf-8").splitlines() if line.startswith("| "))
    return {cells[0].removeprefix("| "): cells[1].split(" (")[0] for cells in rows if cells[0] != "| model type"}


def test_the_kept_table_lists_what_the_tables_know():
    kept, by_table = kept_table(), {name for family in FAMILIES for name in family.model_types}
    assert {name for name, how in kept.items() if how == "table"} == by_table & {*kept}


def test_the_kept_table_lists_every_type_of_the_transformers_it_was_made_with():
    kept, types = {*kept_table()}, {*model_types()}
    if f"with transformers {transformers.__version__}:" not in KEPT.read_text(encoding="utf-8"):
        new, gone = ", ".join(sorted(types - kept)), ", ".join(sorted(kept - types))
        pytest.skip(f"the table is of another transformers; since then new: {new or 'none'}; gone: {gone or 'none'}")
    assert kept == types


def test_a_sample_of_the_kept_table_is_found_again():
    kept, sample = kept_table(), ["olmoe", "glm4", "gemma3n_text", "rwkv"]
    assert {entry.model_type: entry.how for entry in survey(sample, update=True)} == {
        name: kept[name] for name in sample
    }


@pytest.mark.slow
def test_at_least_150_types_are_read_and_20_of_them_see_or_hear(tmp_path):
    path = tmp_path / "families.json"
    result = locater("families", "--update", "--json", str(path))
    assert result.code == 0, result.err
    document = json.loads(path.read_text())
    assert len(document["families"]) == len(model_types())
    assert document["counts"]["table"] + document["counts"]["proven"] >= 150
    assert document["counts"]["with images or sound"] >= 20
    assert all(entry["error"] <= 1e-5 for entry in document["families"] if entry["how"] == "proven")
