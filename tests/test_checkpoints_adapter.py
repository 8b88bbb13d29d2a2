"""LoRA adapters merged on reading, against peft's own merge."""

import json

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from locater import checkpoints
from locater.errors import Refusal


def tiny_llama():
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **sizes))


def tiny_gpt2():
    special = dict(bos_token_id=1, eos_token_id=2)
    return AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, **special))


CASES = {
    "llama": (tiny_llama, dict(target_modules=["q_proj", "k_proj"], lora_alpha=7)),
    "square": (tiny_llama, dict(target_modules=["q_proj", "o_proj"])),
    "patterns": (
        tiny_llama,
        dict(target_modules=["q_proj", "v_proj"], rank_pattern={"layers.1.self_attn.q_proj": 2}, use_rslora=True,
             alpha_pattern={"q_proj": 3, r"layers.0.self_attn.v_proj": 11}),
    ),
    "replaced": (tiny_llama, dict(target_modules=["q_proj"], modules_to_save=["lm_head", "norm"])),
    "gpt2": (tiny_gpt2, dict(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    "embedding": (tiny_gpt2, dict(target_modules=["wte"])),
}  # fmt: skip


def save(case: str, folder, *, is_pickle: bool = False):
    """A base and an adapter with random factors; returns what peft merges them to."""
    torch.manual_seed(0)
    make, settings = CASES[case]
    model = make()
    model.save_pretrained(folder / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(**({"r": 4} | settings)))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.5)
    adapted.save_pretrained(folder / "adapter", safe_serialization=not is_pickle)
    if is_pickle:
        from safetensors.torch import load_file

        stored = folder / "adapter" / "adapter_model.safetensors"
        if stored.exists():
            torch.save(load_file(stored), folder / "adapter" / "adapter_model.bin")
            stored.unlink()
    return adapted.merge_and_unload().state_dict()


def set_config(folder, **changes) -> None:
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_merge_is_pefts(case, tmp_path):
    merged = save(case, tmp_path)
    with checkpoints.open(tmp_path / "base", adapter=tmp_path / "adapter") as checkpoint:
        changed = 0
        with checkpoints.open(tmp_path / "base") as base:
            for name in base.names:
                changed += not checkpoint.read(name).equal(base.read(name))
        assert changed > 0
        for name in checkpoint.names:
            torch.testing.assert_close(checkpoint.read(name), merged[name], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(checkpoint.read(name, rows=(3, 13)), merged[name][3:13], rtol=1e-5, atol=1e-5)


def test_pickled_adapter(tmp_path):
    merged = save("llama", tmp_path, is_pickle=True)
    with checkpoints.open(tmp_path / "base", adapter=tmp_path / "adapter") as checkpoint:
        name = "model.layers.1.self_attn.k_proj.weight"
        torch.testing.assert_close(checkpoint.read(name), merged[name], rtol=1e-5, atol=1e-5)


def test_adapter_alone_opens_its_base(tmp_path):
    merged = save("llama", tmp_path)
    set_config(tmp_path, base_model_name_or_path=str(tmp_path / "base"))
    with checkpoints.open(tmp_path / "adapter") as checkpoint:
        assert checkpoint.config["model_type"] == "llama"
        name = "model.layers.0.self_attn.q_proj.weight"
        torch.testing.assert_close(checkpoint.read(name), merged[name], rtol=1e-5, atol=1e-5)
    set_config(tmp_path, base_model_name_or_path=None)
    with pytest.raises(Refusal, match="name base and adapter both"):
        checkpoints.open(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "one with use_dora"),
        ({"peft_type": "LOHA"}, "the kind LORA"),
        ({"lora_alpha": "much"}, "a number as lora_alpha"),
        ({"alpha_pattern": {"(a*)*b": 1}}, "simple patterns"),
        ({"alpha_pattern": {"*": 1}}, "a pattern"),
        ({"alpha_pattern": [1]}, "a mapping as alpha_pattern"),
    ],
)
def test_refusals(tmp_path, changes, message):
    save("llama", tmp_path)
    set_config(tmp_path, **changes)
    with pytest.raises(Refusal, match=message):
        checkpoints.open(tmp_path / "base", adapter=tmp_path / "adapter")


def test_adapter_of_another_model(tmp_path):
    save("llama", tmp_path)
    save("gpt2", tmp_path / "other")
    with pytest.raises(Refusal, match="belong together"):
        checkpoints.open(tmp_path / "other" / "base", adapter=tmp_path / "adapter")
    with pytest.raises(Refusal, match="adapter_config.json in"):
        checkpoints.open(tmp_path / "base", adapter=tmp_path / "base")
