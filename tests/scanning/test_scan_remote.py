"""A scan over the network moves headers, queries, keys and norms, each once, whatever the family.

Where heads have no rotary positions, also the rows of the embeddings that the estimate looks at: some, not all.
"""

import json

import pytest
from safetensors import safe_open
from test_checkpoints_remote import header_bytes, server  # noqa: F401  (a fixture)
from transformers import GPT2Config, GPT2Model

from locater.scanning import direct
from locater.scanning.scan import scan
from saved_models import case_named

# What of each model its heads are made of; a fused tensor that is stored transposed cannot be cut and counts whole.
NEEDED = {
    "gpt2": ("attn.c_attn.", ".ln_1."),
    "llama": ("q_proj", "k_proj", "input_layernorm"),
    "qwen3": ("q_proj", "k_proj", "q_norm", "k_norm", "input_layernorm"),
    "olmo2": ("q_proj", "k_proj", "q_norm", "k_norm"),
    "bert": ("self.query.", "self.key.", "output.LayerNorm", "embeddings.LayerNorm"),
    "albert": ("attention.query.", "attention.key.", "full_layer_layer_norm"),
    "t5": ("Attention.q.", "Attention.k.", ".layer_norm.", "relative_attention_bias"),
    "bart": ("q_proj", "k_proj", "layer_norm", "layernorm_embedding"),
    "deepseek-v2": ("q_a_proj", "q_b_proj", "q_a_layernorm", "kv_a_", "kv_b_proj", "input_layernorm"),
}
# What the estimate of heads without rotary positions looks at: all of a small table, some rows of a large one.
EMBEDDINGS = {
    "gpt2": ("wte.", "wpe."),
    "bert": ("word_embeddings", "position_embeddings", "token_type_embeddings"),
    "albert": ("word_embeddings", "position_embeddings", "token_type_embeddings"),
    "t5": ("shared.",),
    "bart": ("shared.", "embed_positions"),
}


def bytes_of(folder, parts) -> int:
    """The stored bytes of the tensors whose names hold one of the parts."""
    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors = [opened.get_tensor(name) for name in opened.keys() if any(part in name for part in parts)]  # noqa: SIM118
        count += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return count


@pytest.mark.parametrize("name", NEEDED)
def test_what_travels(name, server):  # noqa: F811
    case_named(name).build().save_pretrained(server.root / "m", max_shard_size="30KB")
    shards = list((server.root / "m").glob("*.safetensors"))
    texts = [server.root / "m" / "config.json", server.root / "m" / "model.safetensors.index.json"]
    headers = sum(map(header_bytes, shards)) + sum(text.stat().st_size for text in texts)
    needed = bytes_of(server.root / "m", NEEDED[name] + EMBEDDINGS.get(name, ()))
    stored = sum(shard.stat().st_size for shard in shards)
    assert len(shards) > 1 and 0 < needed < stored - sum(map(header_bytes, shards))
    found = scan(f"{server.address}/m")
    assert found.to_json()["heads"] == scan(server.root / "m").to_json()["heads"]
    assert server.sent <= 1.02 * (headers + needed)


def test_of_a_large_vocabulary_some_rows_travel(server):  # noqa: F811
    sizes = dict(n_layer=1, n_head=2, n_embd=16, n_positions=512)
    GPT2Model(GPT2Config(vocab_size=8000, **sizes)).save_pretrained(server.root)
    needed = bytes_of(server.root, NEEDED["gpt2"]) + header_bytes(server.root / "model.safetensors")
    config = (server.root / "config.json").stat().st_size
    found = scan(server.address)
    assert all(row.estimated_near_mass is not None for row in found.heads)
    words = positions = direct.SEEN * 16 * 4
    assert 0.9 * words < server.sent - needed - config - positions <= words


def test_some_layers_cost_their_share(server):  # noqa: F811
    case_named("llama").build().save_pretrained(server.root)
    scan(server.address)
    whole, server.sent = server.sent, 0
    scan(server.address, layers=[1])
    parts = [f"layers.0.{part}" for part in ("self_attn.q_proj", "self_attn.k_proj", "input_layernorm")]
    assert whole - server.sent == bytes_of(server.root, parts) > 0


def test_index_and_shards_are_found_by_name(server):  # noqa: F811
    """A web server lists nothing; the index alone says which files there are."""
    case_named("llama").build().save_pretrained(server.root, max_shard_size="30KB")
    index = json.loads((server.root / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert len(scan(f"{server.address}/model.safetensors.index.json").heads) == len(scan(server.root).heads)
