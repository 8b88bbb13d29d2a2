"""LoRA adapters merged on reading, against peft's own merge."""

import dataclasses
import json

import peft
import pytest
import torch
from peft.tuners.lora import config as of_lora
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from locater import checkpoints
from locater.errors import Refusal


def tiny_llama(**further):
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    return AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=64, **sizes, **further))


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


# Unusual values of every setting that the installed peft has; names are those of Llama's modules.
UNUSUAL = {
    "peft_type": ["LORA"],
    "task_type": ["CAUSAL_LM"],
    "auto_mapping": [{"base_model_class": "X"}],
    "peft_version": ["0.1"],
    "revision": ["x"],
    "inference_mode": [True],
    "base_model_name_or_path": ["nobody/nothing"],
    "r": [1, 3, 17],
    "target_modules": [
        ["q_proj", "o_proj"],
        ".*_proj",
        "all-linear",
        ["embed_tokens", "q_proj"],
        ["q_proj", "lm_head"],
    ],
    "exclude_modules": [["layers.0.self_attn.q_proj"], ".*layers.1.*"],
    "lora_alpha": [1, 31, -2, 0.5],
    "lora_dropout": [0.3],
    "fan_in_fan_out": [True],
    "bias": ["all", "lora_only"],
    "use_rslora": [True],
    "modules_to_save": [["norm"], ["o_proj", "lm_head"]],
    "init_lora_weights": [False, "gaussian", "olora", "pissa", "pissa_niter_4", "orthogonal", "mica", "eva", "lora_ga"],
    "layers_to_transform": [[1], 0],
    "layers_pattern": ["layers"],
    "rank_pattern": [{"k_proj": 2}, {"^model.layers.0.self_attn.q_proj": 7}],
    "alpha_pattern": [{"k_proj": 2}, {"^model.layers.0.self_attn.q_proj": 7}],
    "megatron_config": [],
    "megatron_core": ["other"],
    "trainable_token_indices": [[1, 2]],
    "loftq_config": [],
    "eva_config": [of_lora.EvaConfig(rho=2.0)],
    "corda_config": [of_lora.CordaConfig()],
    "lora_ga_config": [of_lora.LoraGAConfig()],
    "use_dora": [True],
    "velora_config": [of_lora.VeloraConfig()],
    "alora_invocation_tokens": [[1, 2]],
    "use_qalora": [True],
    "qalora_group_size": [8],
    "monteclora_config": [of_lora.MontecloraConfig()],
    "layer_replication": [[(0, 2), (1, 2)]],
    "runtime_config": [of_lora.LoraRuntimeConfig(ephemeral_gpu_offload=True)],
    "lora_bias": [True],
    "target_parameters": [["mlp.gate_proj.weight"]],
    "use_bdlora": [of_lora.BdLoraConfig(target_modules_bd_a=["k_proj"], target_modules_bd_b=["q_proj"], nblocks=2)],
    "arrow_config": [],
    "kasa_config": [of_lora.KasaConfig()],
    "ensure_weight_tying": [True],
}
COMPANIONS = {"layers_pattern": {"layers_to_transform": [1]}, "eva_config": {"init_lora_weights": "eva"}}
# Settings that peft itself can only make with tools or data that are not here: written into a saved adapter instead.
WRITTEN = [
    ("init_lora_weights", "loftq"), ("init_lora_weights", "corda"), ("megatron_config", {"a": 1}),
    ("arrow_config", {"top_k": 3}), ("init_lora_weights", "a word of tomorrow"), ("a_setting_of_tomorrow", True),
]  # fmt: skip
TO_GPT2 = {"q_proj": "c_attn", "k_proj": "c_proj", "o_proj": "c_fc", "embed_tokens": "wte", "norm": "ln_f"}


def trained(folder, make, settings):
    """Save a base and an adapter whose every trained number was changed; returns peft's model."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / "base")
    adapted = peft.get_peft_model(model, peft.LoraConfig(**settings))
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.5 * torch.randn_like(parameter))
    adapted.save_pretrained(folder / "adapter")
    return adapted


def check_right_or_refused(folder, adapted) -> str:
    try:
        with checkpoints.open(folder / "base", adapter=folder / "adapter") as checkpoint:
            read = {name: checkpoint.read(name) for name in checkpoint.names}
    except Refusal as reason:
        return str(reason)
    merged = adapted().state_dict()
    assert set(merged) - set(read) <= {"lm_head.weight"}
    for name, weight in read.items():
        torch.testing.assert_close(weight, merged[name], rtol=1e-4, atol=1e-4)
    return "right"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("key", UNUSUAL)
@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_every_setting_of_peft_is_right_or_refused(make, key, tmp_path):
    targets = ["q_proj", "k_proj"]
    for number, value in enumerate(UNUSUAL[key]):
        settings = {"r": 4, "target_modules": targets, **COMPANIONS.get(key, {}), key: value}
        if make is tiny_gpt2:
            settings = {name: for_gpt2(setting) for name, setting in settings.items()}
        with_bias = (lambda: tiny_llama(attention_bias=True)) if make is tiny_llama else make
        folder = tmp_path / str(number)
        try:
            adapted = trained(folder, with_bias, settings | {"peft_type": None})
        except (ValueError, TypeError, RuntimeError, IndexError):  # what peft cannot do with this model
            assert make is tiny_gpt2, f"peft made nothing of {key} = {value!r}"
            continue
        check_right_or_refused(folder, adapted.merge_and_unload)


def for_gpt2(setting):
    if not isinstance(setting, str | list | dict):
        return setting
    text = json.dumps(setting).replace("model.layers", "transformer.h").replace("self_attn", "attn")
    for llama, gpt2 in TO_GPT2.items():
        text = text.replace(llama, gpt2)
    return json.loads(text.replace("layers", "h").replace('_proj"', '_attn"'))


def test_every_setting_of_the_installed_peft_is_tried():
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} == set(UNUSUAL)


EDITS = [
    ("target_modules", ["k_proj"]), ("target_modules", ["self_attn.q_proj"]), ("target_modules", r".*q_proj"),
    ("target_modules", ["model.layers.0.self_attn.q_proj"]), ("target_modules", r"model.layers.0.self_attn.k_proj"),
    ("exclude_modules", ["k_proj"]), ("exclude_modules", r".*q_proj"),
    ("exclude_modules", ["layers.1.self_attn.q_proj"]), ("layers_to_transform", [1]), ("layers_to_transform", 0),
    ("layers_to_transform", [0, 1]), ("layers_to_transform", []), ("bias", "a word of tomorrow"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("key", "value"), EDITS)
def test_factors_that_peft_would_leave_out_are_refused(key, value, tmp_path):
    """The settings are edited behind the factors: peft loads those that it then makes modules for, in silence."""
    trained(tmp_path, tiny_llama, {"r": 4, "target_modules": ["q_proj", "k_proj"]})
    set_config(tmp_path, **{key: value})

    def by_peft():
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        return peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()

    outcome = check_right_or_refused(tmp_path, by_peft)
    assert outcome == "right" or "names alone" in outcome or "as bias" in outcome
    assert (outcome == "right") == ((key, value) in EDITS[10:12])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("key", "value"), WRITTEN)
def test_settings_not_known_to_be_harmless_are_refused_by_name(key, value, tmp_path):
    save("llama", tmp_path)
    set_config(tmp_path, **{key: value})
    with pytest.raises(Refusal, match="one with|as init_lora_weights"):
        checkpoints.open(tmp_path / "base", adapter=tmp_path / "adapter")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ["square", "llama", "gpt2"])
@pytest.mark.parametrize(
    "changes",
    [{"r": 8}, {"lora_alpha": 3}, {"use_rslora": True}, {"fan_in_fan_out": True}, {"fan_in_fan_out": False},
     {"rank_pattern": {"q_proj": 8}}, {"rank_pattern": {"c_attn": 8}}, {"alpha_pattern": {"o_proj": 5}}],
    ids=str,
)  # fmt: skip
def test_edited_settings_are_read_as_peft_reads_them_or_refused(case, changes, tmp_path):
    save(case, tmp_path)
    set_config(tmp_path, **changes)

    def reload():
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        return peft.PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload()

    check_right_or_refused(tmp_path, reload)


def test_square_weights_of_a_mixed_model_are_not_guessed(tmp_path):
    """`fan_in_fan_out` speaks of GPT-2's own modules; the linear layer beside them makes peft save the contrary."""
    torch.manual_seed(0)
    save("gpt2", tmp_path)
    set_config(tmp_path, fan_in_fan_out=False)
    with pytest.raises(Refusal, match="fan_in_fan_out .* the square"):
        checkpoints.open(tmp_path / "base", adapter=tmp_path / "adapter")


@pytest.mark.parametrize(
    "other",
    [
        lambda name: name.removeprefix("base_model.model."),
        lambda name: name.removeprefix("base_model.model.model."),
        lambda name: name.replace(".weight", ".default.weight"),
        lambda name: name.replace("base_model.model.model.", "base_model.model.transformer."),
    ],
)
def test_two_factors_for_one_weight_are_refused(other, tmp_path):
    """An edited file may name one weight in two spellings; peft reads one of them, and nothing says which."""
    from safetensors.torch import load_file, save_file

    save("llama", tmp_path)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    stored = load_file(path)
    save_file(stored | {other(name): 2 * value for name, value in stored.items()}, path)
    with pytest.raises(Refusal, match="factors of each weight once|the weight it changes in the base"):
        checkpoints.open(tmp_path / "base", adapter=tmp_path / "adapter")


def test_an_adapter_beside_weights_is_not_passed_over(tmp_path):
    """transformers reads such a folder as base and adapter; here both must be named."""
    merged, name = save("llama", tmp_path), "model.layers.0.self_attn.q_proj.weight"
    for file in (tmp_path / "adapter").iterdir():
        file.rename(tmp_path / "base" / file.name)
    with pytest.raises(Refusal, match="adapter_config.json next to model.safetensors"):
        checkpoints.open(tmp_path / "base")
    with checkpoints.open(tmp_path / "base", adapter=tmp_path / "base") as both:
        torch.testing.assert_close(both.read(name), merged[name], rtol=1e-5, atol=1e-5)
    with checkpoints.open(tmp_path / "base" / "model.safetensors") as alone:
        assert not alone.read(name).allclose(merged[name])
    save("llama", tmp_path / "further")
    set_config(tmp_path / "further", base_model_name_or_path=str(tmp_path / "base"))
    with pytest.raises(Refusal, match="a base without an adapter of its own"):
        checkpoints.open(tmp_path / "further" / "adapter")


@pytest.mark.parametrize(("stated", "asked"), [(None, "org/tiny"), ("v1", "org/tiny@v1")])
def test_the_base_on_the_hub_is_of_the_revision_that_the_adapter_names(stated, asked, tmp_path, monkeypatch):
    from locater.checkpoints.bytes import LocalFolder

    locate = checkpoints.locate
    save("llama", tmp_path)
    set_config(tmp_path, base_model_name_or_path="org/tiny", revision=stated)
    places = {asked: (LocalFolder(tmp_path / "base"), None)}
    monkeypatch.setattr(checkpoints, "locate", lambda source: places.get(source) or locate(source))
    assert checkpoints.open(tmp_path / "adapter").config["model_type"] == "llama"


def test_documents_that_people_write_are_of_their_size(tmp_path):
    """A config of millions of lists beside a header of as many tensors would be twice what one document may cost."""
    save("llama", tmp_path)
    many = f'{{"model_type": "llama", "x": [{"[]," * 1_400_000}[]]}}'
    for name in ("adapter/adapter_config.json", "base/config.json"):
        (tmp_path / name).write_text(many)
        with pytest.raises(Refusal, match=r"config.json: expected at most 4194304 json bytes"):
            checkpoints.open(tmp_path / "base", adapter=tmp_path / "adapter")
