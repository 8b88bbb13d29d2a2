"""Parts of quantised and GGUF files added, dropped, rescaled, renamed at random: the scan is that of the intended
weights, or it says that it is not."""

import json
import random

import gguf
import numpy as np
import pytest
import torch
from test_quantised import FILES, KEY, QUERY, stored, write

import locater
from locater.errors import Refusal

KINDS = ("rescale", "drop", "rename", "add", "reshape")
# What no part of these files may be called beside the ones that it has: each would change what the codes stand for.
ADDED = ("weight_scale", "weight_scale_inv", "weight_zero_point", "weight.absmax", "scales", "qzeros", "zeros", "bias")
ADDED += ("weight_scale_2", "weight_global_scale", "lora_A.weight", "biases", "weight.quant_map", "pre_quant_scale")
# Parts that weights are proportional to, and how a number of them is doubled.
LINEAR = ("weight_scale", "weight_scale_inv", "scales", "absmax", "SCB", "scale")


def numbers(folder) -> torch.Tensor | None:
    """tr W, η, ξ and the bound of every head; None where the scan refuses or says that something is missing."""
    try:
        scan = locater.scan(folder, length=16)
    except Refusal:
        return None
    if scan.coverage != "COMPLETE" or scan.refused:
        return None
    return torch.tensor([[row.trace, row.eta, row.xi, row.logit_bound] for row in scan.heads], dtype=torch.float64)


def edited(tensors: dict, choose: random.Random) -> tuple[dict, str, float | None]:
    """The parts after one change, what it was, and by how much it multiplies queries or keys, if by anything."""
    parts = dict(tensors)
    side = choose.choice((QUERY, KEY)).removesuffix(".weight")
    name, kind = choose.choice([name for name in parts if name.startswith(side)]), choose.choice(KINDS)
    if kind == "rescale":
        apart = ("nested", "input_scale", "output_scale")  # scales of scales, and of what comes in and goes out
        linear = parts[name].is_floating_point() and name.endswith(LINEAR) and parts[name].dtype.itemsize > 1
        shifted = any("biases" in other or "global" in other for other in parts)
        if not linear or shifted or any(word in name for word in apart):
            return edited(tensors, choose)
        parts[name] = parts[name] * 2
        return parts, f"rescale {name}", 2.0
    if kind == "drop":
        del parts[name]
    elif kind == "rename":
        parts[choose.choice((name + "_old", f"{side}.inner.{name.rpartition('.')[2]}", name + ".1"))] = parts.pop(name)
    elif kind == "reshape":
        if parts[name].dim() == 0 or len(parts[name]) < 2:
            return edited(tensors, choose)
        parts[name] = torch.cat([parts[name]] * 2) if choose.random() < 0.5 else parts[name][:-1].clone()
    else:
        new = f"{side}.{choose.choice(ADDED)}"
        if new in parts:
            return edited(tensors, choose)
        parts[new] = torch.rand(choose.choice((1, 4, 64))) + 0.5
    return parts, f"{kind} {name}", None


def check(path, seed: int, folder) -> str:
    tensors, reference, notes = stored(path)
    settings = json.loads(notes.pop("quantization_config"))
    parts, what, factor = edited(tensors, random.Random(f"{path.stem} {seed}"))
    found = numbers(write(folder / f"{seed}", parts, settings, notes))
    if found is None:
        assert factor is None, f"{what}: refused for nothing"
        return what.split()[0]
    truth = numbers(write(folder / "plain", reference, None))
    truth = truth * torch.tensor([factor or 1.0, factor or 1.0, 1.0, factor or 1.0], dtype=torch.float64)
    new = set(parts) - set(tensors)
    assert not (what.startswith("add") and new), f"{what} ({new}): called COMPLETE all the same"
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5, msg=lambda text: f"{path.stem}, {what}: {text}")
    return what.split()[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_edited_quantised_file_is_read_right_or_said_not_to_be(path, tmp_path):
    for seed in range(8):
        check(path, seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_hundreds_of_edited_quantised_files(path, tmp_path):
    for seed in range(8, 208):
        check(path, seed, tmp_path)


WIDTH, HEADS = 64, 4
GGUF_ADDED = ("attn_q.scale", "attn_k.scale", "attn_q.bias", "attn_k.bias", "attn_q_norm.weight", "attn_k_norm.weight")
GGUF_ADDED += ("attn_sinks.weight", "attn_rel_b.weight", "attn_q.weight.lora_a", "attn_gate.weight", "attn_qkv.weight")
GGUF_ADDED += ("attn_q_a.weight", "attn_temp.weight", "attn_norm.bias", "attn_q.input_scale")


def written(path, tensors: dict[str, np.ndarray], architecture="llama", **settings):
    """`settings` by their names without the architecture, dots as two underscores; None leaves one out."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_embedding_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_context_length(128)
    for key, value in ({"rope__dimension_count": WIDTH // HEADS} | settings).items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            kinds[type(value)](f"{architecture}.{key.replace('__', '.')}", value)
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plain_file() -> dict[str, np.ndarray]:
    chance = np.random.default_rng(0)
    tensors = {"token_embd.weight": chance.normal(size=(100, WIDTH)).astype(np.float32)}
    for layer in range(2):
        tensors |= {
            f"blk.{layer}.{name}.weight": chance.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8
            for name in ("attn_q", "attn_k", "attn_v", "attn_output")
        }
        tensors[f"blk.{layer}.attn_norm.weight"] = chance.uniform(0.5, 2, WIDTH).astype(np.float32)
    return tensors


def edited_gguf(choose: random.Random) -> tuple[dict[str, np.ndarray], str, bool]:
    tensors, kind = plain_file(), choose.choice((*KINDS, "rope"))
    layer = choose.randrange(2)
    name = f"blk.{layer}.{choose.choice(('attn_q', 'attn_k', 'attn_norm'))}.weight"
    if kind == "rescale":
        tensors[name] = tensors[name] * np.float32(choose.uniform(0.2, 3))
        return tensors, f"rescale {name}", True
    if kind == "drop":
        for other in [name] if choose.random() < 0.5 else [name.replace(f".{layer}.", f".{n}.") for n in range(2)]:
            del tensors[other]
    elif kind == "rename":
        tensors[choose.choice((name + "_old", name.replace("attn", "attn_2"), name[:-7]))] = tensors.pop(name)
    elif kind == "reshape":
        tensors[name] = np.concatenate([tensors[name]] * 2) if choose.random() < 0.5 else tensors[name][:-1].copy()
    elif kind == "rope":
        tensors["rope_freqs.weight"] = np.linspace(1, 9, WIDTH // HEADS // 2).astype(np.float32)
    else:
        new, shape = choose.choice(GGUF_ADDED), choose.choice(((1,), (WIDTH,), (WIDTH // HEADS,), (WIDTH, WIDTH)))
        tensors[f"blk.{layer}.{new}"] = np.random.default_rng(1).normal(size=shape).astype(np.float32)
        return tensors, f"add {new} {shape}", False
    return tensors, f"{kind} {name}", False


def dense(tensors: dict[str, np.ndarray]) -> list[tuple[float, float]]:
    """tr W and ‖W‖² of every head, by d×d matrices."""
    found = []
    for layer in range(2):
        gain = tensors[f"blk.{layer}.attn_norm.weight"].astype(float)
        query, key = (
            (tensors[f"blk.{layer}.attn_{side}.weight"] * gain).reshape(HEADS, -1, WIDTH) for side in ("q", "k")
        )
        found += [(float((k * q).sum()), float(np.square(k.T @ q).sum())) for q, k in zip(query, key, strict=True)]
    return found


def check_gguf(seed: int, folder) -> str:
    tensors, what, is_whole = edited_gguf(random.Random(seed))
    path = written(folder / f"{seed}.gguf", tensors)
    if numbers(path) is None:
        assert not is_whole, f"{what}: refused for nothing"
        return what.split()[0]
    # A weight whose name has lost its ending may be read, if it is read right.
    assert is_whole or what.startswith("rename"), f"{what}: called COMPLETE all the same"
    tensors = tensors if is_whole else plain_file()
    scan = locater.scan(path, length=16)
    assert scan.coverage == "COMPLETE" and not scan.refused
    for row, (trace, norm) in zip(scan.heads, dense(tensors), strict=True):
        assert row.frobenius_squared == pytest.approx(norm, rel=1e-4)
        assert row.trace == pytest.approx(trace, rel=1e-4, abs=1e-4 * norm**0.5)
    return what.split()[0]


def test_an_edited_gguf_file_is_read_right_or_said_not_to_be(tmp_path):
    assert {check_gguf(seed, tmp_path) for seed in range(60)} == {*KINDS, "rope"}


@pytest.mark.slow
def test_a_thousand_edited_gguf_files(tmp_path):
    for seed in range(60, 1060):
        check_gguf(seed, tmp_path)


# ------------------------------------------------------------- what llama.cpp does where a file of its says nothing
def turns(path) -> list[float]:
    return next(iter(locater.heads(path))).rotary.frequencies(64).tolist()


@pytest.mark.parametrize("kind", [None, "linear", "none"])
def test_positions_are_stretched_as_llama_cpp_stretches_them(kind, tmp_path):
    """Its own default for a file with a factor is linear."""
    plain = turns(written(tmp_path / "plain.gguf", plain_file()))
    stretched = dict(rope__scaling__factor=4.0, rope__scaling__type=kind)
    found = turns(written(tmp_path / "stretched.gguf", plain_file(), **stretched))
    assert found == pytest.approx([one / (1 if kind == "none" else 4) for one in plain])


def test_the_base_of_a_file_that_names_none_is_llama_cpps(tmp_path):
    """transformers' class for SmolLM3 has two millions."""
    found = [
        turns(written(tmp_path / f"{base}.gguf", plain_file(), "smollm3", rope__freq_base=base)) for base in (None, 1e4)
    ]
    assert found[0] == found[1]


SMALL = np.linspace(1, 4, WIDTH // HEADS // 2).astype(np.float32)
UNSAID = {
    "an unknown kind": ({}, dict(rope__scaling__type="mystery", rope__scaling__factor=4.0)),
    "longrope without factors": ({}, dict(rope__scaling__type="longrope")),
    "half of longrope": ({"rope_factors_long.weight": SMALL}, {}),
    "linear, and factors": (
        {"rope_freqs.weight": SMALL},
        dict(rope__scaling__type="linear", rope__scaling__factor=4.0),
    ),
    "heads that turn in part": ({}, dict(rope__dimension_count=8, attention__key_length=16)),
    "no causality": ({}, dict(attention__causal=False)),
}


@pytest.mark.parametrize("what", UNSAID)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "granite"])
def test_settings_that_a_row_takes_for_granted_are_refused_where_the_file_says_otherwise(what, architecture, tmp_path):
    tensors, settings = UNSAID[what]
    path = written(tmp_path / "x.gguf", plain_file() | tensors, architecture, **settings)
    with pytest.raises(Refusal, match="mask of its kind|turn whole|stretched"):
        locater.scan(path)
