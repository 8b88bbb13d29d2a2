"""One small whole example of every format, written once; cases spoil copies of them."""

import contextlib
import io
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
WIDTH, HEADS, KEY_HEADS, SIZE, LAYERS = 16, 4, 2, 4, 2
CONFIG = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    hidden_size=WIDTH,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KEY_HEADS,
    head_dim=SIZE,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling=None,
    max_position_embeddings=64,
    vocab_size=32,
    intermediate_size=24,
    attention_bias=False,
    tie_word_embeddings=True,
    torch_dtype="float32",
)
FAMILIES = ("gpt2", "bert", "t5", "opt", "qwen2", "qwen3", "gemma2", "gemma3", "gpt-neox", "deepseek-v3", "stablelm-2",
            "falcon-7b", "bloom", "mpt", "phi3", "vit", "whisper", "mixtral", "olmo2", "gpt-oss")  # fmt: skip


def weights() -> dict[str, torch.Tensor]:
    """A llama of two layers, no two numbers of it alike."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(32, WIDTH, generator=generator)}
    for layer in range(LAYERS):
        place = f"model.layers.{layer}."
        tensors[place + "self_attn.q_proj.weight"] = torch.randn(HEADS * SIZE, WIDTH, generator=generator)
        tensors[place + "self_attn.k_proj.weight"] = torch.randn(KEY_HEADS * SIZE, WIDTH, generator=generator)
        tensors[place + "input_layernorm.weight"] = torch.rand(WIDTH, generator=generator) + 0.5
    return tensors


def write_config(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))


def write_safetensors(folder: Path) -> None:
    from safetensors.torch import save_file

    write_config(folder)
    save_file(weights(), folder / "model.safetensors")


def write_sharded(folder: Path) -> None:
    from safetensors.torch import save_file

    write_config(folder)
    tensors, places = weights(), {}
    for number, names in enumerate((sorted(tensors)[::2], sorted(tensors)[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        places |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def write_torch(folder: Path, *, is_zip: bool = True) -> None:
    write_config(folder)
    saved = {"model": weights(), "step": 7}
    torch.save(saved, folder / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)


def write_gguf(folder: Path) -> None:
    import gguf

    folder.mkdir(parents=True)
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH * 2)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(SIZE * 2)
    writer.add_rope_freq_base(10_000.0)
    writer.add_context_length(64)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
    random = np.random.default_rng(0)
    writer.add_tensor("token_embd.weight", random.normal(size=(3, WIDTH * 2)).astype(np.float32))
    for layer in range(LAYERS):
        for name, rows in (("attn_q", WIDTH * 2), ("attn_k", WIDTH)):
            values = random.normal(size=(rows, WIDTH * 2)).astype(np.float32)
            if layer:
                writer.add_tensor(f"blk.{layer}.{name}.weight", values)
            else:
                kind = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(f"blk.0.{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(WIDTH * 2, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_distributed(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    write_config(folder)
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        dcp.save({"model": weights(), "step": 1}, checkpoint_id=folder, no_dist=True)


def write_adapter(folder: Path) -> None:
    from safetensors.torch import save_file

    write_safetensors(folder / "base")
    (folder / "adapter").mkdir()
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": None, "use_rslora": False}
    settings |= {"alpha_pattern": {"q_proj": 8}, "fan_in_fan_out": False, "target_modules": ["q_proj"]}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    place = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    factors = {place + "A.weight": torch.randn(2, WIDTH), place + "B.weight": torch.randn(HEADS * SIZE, 2)}
    save_file(factors, folder / "adapter" / "adapter_model.safetensors")


def write_layout(folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    tensors = {
        name.replace("self_attn.q_proj", "wq").replace("self_attn.k_proj", "wk"): t for name, t in weights().items()
    }
    save_file(tensors, folder / "own.safetensors")
    row = {
        "block": "decoder",
        "query": "layers.{layer}.wq",
        "key": "layers.{layer}.wk",
        "layers": LAYERS,
        "heads": HEADS,
        "key_heads": KEY_HEADS,
        "d_head": SIZE,
        "prefixes": ["model."],
        "lookahead": 0,
        "input_norm": {"kind": "rms", "name": "layers.{layer}.input_layernorm", "epsilon": 0.001},
        "rotary": {"base": 10000.0, "fraction": 1.0},
        "d_model": WIDTH,
    }
    (folder / "layout.yaml").write_text(json.dumps({"attention": [row], "family": "own"}))


def write_quantised(folder: Path) -> None:
    """What each method's own tool stored, with its settings as config.json."""
    sys.path[:0] = [str(TESTS), str(TESTS / "checkpoints")]
    from test_quantised import FILES, stored, write

    folder.mkdir(parents=True)
    for path in FILES:
        tensors, _, notes = stored(path)
        write(folder / path.stem, tensors, json.loads(notes.pop("quantization_config")), notes)


def write_families(folder: Path) -> None:
    sys.path.insert(0, str(TESTS))
    import transformers

    from saved_models import case_named

    transformers.logging.set_verbosity_error()
    for name in FAMILIES:
        with contextlib.suppress(StopIteration):
            case = case_named(name)
            (folder / name).mkdir(parents=True)
            case.save(case.build(), folder / name)


def write_documents(folder: Path) -> None:
    """What commands write, for `report`: a scan with curves and a comparison."""
    from locater.records import write_json
    from locater.scanning.compare import follow
    from locater.scanning.scan import scan

    write_safetensors(folder / "model")
    found = scan(folder / "model", length=24, details=["eigenvalues", "curves"])
    write_json(found.to_json(), folder / "scan.json")
    write_json(follow([found, found]).to_json(), folder / "compare.json")


def write_run(folder: Path) -> None:
    """A finished run of a few steps, and the text it read."""
    sys.path.insert(0, str(TESTS))
    from locater_lab.train.run import start
    from training_cases import tiny, write_text

    folder.mkdir(parents=True)
    text = write_text(folder)
    start(tiny(text, steps=4, validate_every=2, log_every=2, save_every=2), folder / "arm-seed0", say=lambda _: None)


WRITERS = {
    "safetensors": write_safetensors,
    "sharded": write_sharded,
    "torch": write_torch,
    "legacy": lambda folder: write_torch(folder, is_zip=False),
    "gguf": write_gguf,
    "distributed": write_distributed,
    "adapter": write_adapter,
    "layout": write_layout,
    "quantised": write_quantised,
    "families": write_families,
    "documents": write_documents,
    "run": write_run,
}


def write_all(folder: Path, names: tuple[str, ...] = tuple(WRITERS)) -> None:
    """Every seed that is not there yet, each whole or not at all."""
    for name in names:
        if not (folder / name).exists():
            WRITERS[name](folder / f".{name}")
            (folder / f".{name}").rename(folder / name)


if __name__ == "__main__":
    write_all(Path(sys.argv[1]), tuple(sys.argv[2:]) or tuple(WRITERS))
