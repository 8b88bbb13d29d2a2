"""Folders of the big frameworks: a tiny Hugging Face model in their names and layouts scans as it does in its own."""

import json
from dataclasses import asdict

import pytest
import torch
import torch.distributed.checkpoint as dcp

from locater.errors import Refusal
from locater.scanning.scan import scan
from saved_models import case_named

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
HEADS, KEYS = 4, 2
META = dict(dim=48, n_layers=2, n_heads=HEADS, n_kv_heads=KEYS, norm_eps=1e-6, rope_theta=10_000.0)
MEGATRON = dict(num_attention_heads=HEADS, num_query_groups=KEYS, rotary_base=10_000, layernorm_epsilon=1e-6)
NOT_COMPARED = ("estimated_near_mass", "estimated_near_mass_interval")  # it needs the embedding's name


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny Llama, its scan, and its tensors."""
    case, folder = case_named("llama-base"), tmp_path_factory.mktemp("llama")
    model = case.build()
    case.save(model, folder)
    return scan(folder, length=64), dict(model.state_dict())


def assert_alike(found, expected):
    assert len(found.heads) == len(expected.heads) > 0
    for one, other in zip(found.heads, expected.heads, strict=True):
        one, other = asdict(one), asdict(other)
        for column in set(other) - set(NOT_COMPARED):
            wanted = (
                pytest.approx(other[column], rel=1e-5, abs=1e-7) if isinstance(other[column], float) else other[column]
            )
            assert one[column] == wanted, column


def interleaved(weight, num_heads):
    """Rows in pairs side by side, as Meta turns them; Hugging Face keeps the two halves apart."""
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def as_meta(state):
    names = {"self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv"}
    names |= {"self_attn.o_proj": "attention.wo", "input_layernorm": "attention_norm", "embed_tokens": "tok_embeddings"}
    names |= {"post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1"}
    names |= {"mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3"}
    renamed = {}
    for name, tensor in state.items():
        if "q_proj" in name or "k_proj" in name:
            tensor = interleaved(tensor, HEADS if "q_proj" in name else KEYS)
        for own, meta in names.items():
            name = name.replace(own, meta)
        renamed[name] = tensor
    return renamed


def as_megatron(state, *, stacked=True):
    """q, k, v group by group in one tensor that carries the norm before it; layers along a first axis."""
    layers = []
    for layer in range(2):
        at = f"layers.{layer}."
        q, k, v = (state[f"{at}self_attn.{name}_proj.weight"].unflatten(0, (KEYS, -1)) for name in "qkv")
        layers.append(
            {
                "self_attention.linear_qkv.weight": torch.cat([q, k, v], 1).flatten(0, 1),
                "self_attention.linear_qkv.layer_norm_weight": state[f"{at}input_layernorm.weight"],
                "self_attention.linear_proj.weight": state[f"{at}self_attn.o_proj.weight"],
                "mlp.linear_fc1.layer_norm_weight": state[f"{at}post_attention_layernorm.weight"],
            }
        )
    if stacked:
        return {f"decoder.layers.{name}": torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    return {f"decoder.layers.{n}.{name}": tensor for n, layer in enumerate(layers) for name, tensor in layer.items()}


def settings(folder, values, name="config.json"):
    (folder / name).write_text(json.dumps(values))


def test_metas_file_reads_as_its_model(llama, tmp_path):
    expected, state = llama
    torch.save(as_meta(state), tmp_path / "consolidated.00.pth")
    settings(tmp_path, META, "params.json")
    found = scan(tmp_path, length=64)
    assert (found.family, found.coverage) == ("meta-llama", "by its tensor names, as meta-llama, not run")
    assert_alike(found, expected)


@pytest.mark.parametrize("missing", ["rope_theta", "n_heads"])
def test_what_metas_settings_leave_open_is_asked_for(llama, tmp_path, missing):
    torch.save(as_meta(llama[1]), tmp_path / "consolidated.00.pth")
    settings(tmp_path, {key: value for key, value in META.items() if key != missing}, "params.json")
    with pytest.raises(Refusal, match=f"missing `{missing}` in the config"):
        scan(tmp_path, length=64)


def test_the_factor_of_scaled_frequencies_is_asked_for(llama, tmp_path):
    torch.save(as_meta(llama[1]), tmp_path / "consolidated.00.pth")
    settings(tmp_path, META | dict(use_scaled_rope=True), "params.json")
    with pytest.raises(Refusal, match="`rope_scaling_factor`"):
        scan(tmp_path, length=64)


def test_torchtitans_folder_reads_as_its_model(llama, tmp_path):
    """The model stands at the root, the optimiser's moments beside it."""
    expected, state = llama
    meta = as_meta(state)
    moments = {f"optimizer.state.{name}.exp_avg": torch.ones_like(tensor) for name, tensor in meta.items()}
    dcp.save(meta | moments | {"train_state": {"step": torch.tensor(3)}}, checkpoint_id=tmp_path)
    settings(tmp_path, META)
    found = scan(tmp_path, length=64)
    assert found.format == "distributed" and found.coverage.startswith("by its tensor names, as meta-llama")
    assert_alike(found, expected)


@pytest.mark.parametrize("stacked", [True, False])
def test_megatrons_folder_reads_as_its_model(llama, tmp_path, stacked):
    expected, state = llama
    dcp.save(as_megatron(state, stacked=stacked), checkpoint_id=tmp_path)
    torch.save({"args": 1}, tmp_path / "common.pt")  # what stands beside it is no model
    settings(tmp_path, MEGATRON)
    found = scan(tmp_path, length=64)
    assert found.family == "megatron-core" and found.coverage.startswith("by its tensor names")
    assert_alike(found, expected)


@pytest.mark.parametrize("missing", ["num_attention_heads", "rotary_base"])
def test_what_megatrons_settings_leave_open_is_asked_for(llama, tmp_path, missing):
    dcp.save(as_megatron(llama[1]), checkpoint_id=tmp_path)
    settings(tmp_path, {key: value for key, value in MEGATRON.items() if key != missing})
    with pytest.raises(Refusal, match=missing):
        scan(tmp_path, length=64)


def test_wrong_numbers_of_heads_do_not_fit_megatrons_rows(llama, tmp_path):
    dcp.save(as_megatron(llama[1]), checkpoint_id=tmp_path)
    settings(tmp_path, MEGATRON | dict(num_query_groups=1))
    with pytest.raises(Refusal, match="disagree"):
        scan(tmp_path, length=64)


def test_a_gain_stored_less_one_is_read_so(llama, tmp_path):
    expected, state = llama
    stacked = as_megatron(state)
    stacked["decoder.layers.self_attention.linear_qkv.layer_norm_weight"] -= 1
    dcp.save(stacked, checkpoint_id=tmp_path)
    settings(tmp_path, MEGATRON | dict(layernorm_zero_centered_gamma=True))
    assert_alike(scan(tmp_path, length=64), expected)


WHISPER_NAMES = {
    "model.": "", "layers.": "blocks.", "self_attn_layer_norm": "attn_ln", "encoder_attn_layer_norm": "cross_attn_ln",
    "self_attn.": "attn.", "encoder_attn.": "cross_attn.", "q_proj": "query", "k_proj": "key", "v_proj": "value",
    "out_proj": "out", "encoder.layer_norm": "encoder.ln_post", "fc1": "mlp.0", "fc2": "mlp.2",
    "final_layer_norm": "mlp_ln", "embed_positions.weight": "positional_embedding",
}  # fmt: skip


def test_whispers_own_file_reads_as_its_model(tmp_path):
    case = case_named("whisper")
    model = case.build()
    case.save(model, tmp_path)
    renamed = {}
    for name, tensor in model.state_dict().items():
        for theirs, own in WHISPER_NAMES.items():
            name = name.replace(theirs, own)
        renamed[name] = tensor
    config = model.config
    dims = dict(n_audio_state=config.d_model, n_audio_head=config.encoder_attention_heads)
    dims |= dict(n_audio_layer=config.encoder_layers, n_text_state=config.d_model)
    dims |= dict(n_text_head=config.decoder_attention_heads, n_text_layer=config.decoder_layers)
    (tmp_path / "own").mkdir()
    torch.save({"dims": dims, "model_state_dict": renamed}, tmp_path / "own" / "tiny.pt")
    found = scan(tmp_path / "own" / "tiny.pt", length=64)
    assert found.family == "openai-whisper" and found.coverage.startswith("by its tensor names")
    assert_alike(found, scan(tmp_path, length=64))


@pytest.mark.parametrize(
    ("file", "kind"), [("flax_model.msgpack", "Flax"), ("_CHECKPOINT_METADATA", "Orbax"), ("model.keras", "Keras")]
)
def test_weights_of_other_frameworks_are_named(tmp_path, file, kind):
    (tmp_path / file).write_bytes(b"x")
    with pytest.raises(Refusal, match=f"of {kind}; load it with {kind} and save"):
        scan(tmp_path)
