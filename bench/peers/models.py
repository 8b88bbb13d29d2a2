"""Random checkpoints of known shape, written layer by layer so that making them needs little memory."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

GPT2 = dict(model_type="gpt2", n_layer=12, n_head=12, n_embd=768, n_positions=1024, vocab_size=50_257)
GROUPED = dict(
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    hidden_size=1024,
    intermediate_size=4096,
    num_hidden_layers=24,
    num_attention_heads=16,
    num_key_value_heads=4,
    vocab_size=24_576,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
)
SEVEN_BILLION = dict(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=11_008,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=32,
    vocab_size=32_000,
    rms_norm_eps=1e-5,
    max_position_embeddings=4096,
)
Tensors = dict[str, torch.Tensor]


def make_gpt2(folder: Path) -> None:
    """GPT-2's smallest, in float32, one file."""
    tensors = {"wte.weight": normal(50_257, 768), "wpe.weight": normal(1024, 768)}
    for layer in range(GPT2["n_layer"]):
        at = f"h.{layer}."
        tensors |= {
            f"{at}attn.c_attn.weight": normal(768, 3 * 768),
            f"{at}attn.c_attn.bias": normal(3 * 768),
            f"{at}attn.c_proj.weight": normal(768, 768),
            f"{at}attn.c_proj.bias": normal(768),
            f"{at}mlp.c_fc.weight": normal(768, 4 * 768),
            f"{at}mlp.c_fc.bias": normal(4 * 768),
            f"{at}mlp.c_proj.weight": normal(4 * 768, 768),
            f"{at}mlp.c_proj.bias": normal(768),
            **{f"{at}{norm}.{part}": 1 + normal(768) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")},
        }
    write(folder, GPT2, [tensors])


def make_grouped(folder: Path) -> None:
    """415 million parameters in bfloat16, three shards."""
    layers = [llama_layer(GROUPED, layer, whole=True) for layer in range(GROUPED["num_hidden_layers"])]
    ends = {
        f"{name}.weight": normal(GROUPED["vocab_size"], 1024).bfloat16() for name in ("model.embed_tokens", "lm_head")
    }
    ends["model.norm.weight"] = torch.ones(1024).bfloat16()
    write(folder, GROUPED, (merged(part) for part in ([ends, *layers[:6]], layers[6:15], layers[15:])))
    write_tokenizer(folder)


def make_seven_billion(folder: Path) -> None:
    """The queries, keys and norms of a model of Llama-2's 7B shape in bfloat16, eight shards: over 2 GB."""
    per_shard = SEVEN_BILLION["num_hidden_layers"] // 8
    shards = (range(start * per_shard, (start + 1) * per_shard) for start in range(8))
    write(folder, SEVEN_BILLION, (merged(llama_layer(SEVEN_BILLION, layer) for layer in shard) for shard in shards))


def llama_layer(config: dict, layer: int, *, whole: bool = False) -> Tensors:
    width, at = config["hidden_size"], f"model.layers.{layer}."
    d_head, inner = width // config["num_attention_heads"], config["intermediate_size"]
    keys = config["num_key_value_heads"] * d_head
    shapes = {"self_attn.q_proj": (width, width), "self_attn.k_proj": (keys, width)}
    if whole:
        shapes |= {"self_attn.v_proj": (keys, width), "self_attn.o_proj": (width, width)}
        shapes |= {"mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    tensors = {f"{at}{name}.weight": normal(*shape).bfloat16() for name, shape in shapes.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    return tensors | {f"{at}{norm}.weight": (1 + normal(width)).bfloat16() for norm in norms}


def normal(*shape: int) -> torch.Tensor:
    return torch.empty(shape).normal_(std=shape[-1] ** -0.5)


def merged(parts) -> Tensors:
    return {name: tensor for part in parts for name, tensor in part.items()}


def write(folder: Path, config: dict, shards: Iterator[Tensors] | list[Tensors]) -> None:
    """Safetensors, with an index where there are several."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards):
        file = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if len(set(weight_map.values())) == 1:
        (folder / "model-00000.safetensors").rename(folder / "model.safetensors")
    else:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))


def write_tokenizer(folder: Path) -> None:
    """The least that a tool takes which insists on one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="a"))
    special = dict(bos_token="<s>", eos_token="</s>", pad_token="</s>")
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(folder)


def largest_tensor(folder: Path) -> int:
    """Bytes of the largest stored tensor."""
    largest = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        spans = (entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
        largest = max(largest, *(stop - start for start, stop in spans))
    return largest
