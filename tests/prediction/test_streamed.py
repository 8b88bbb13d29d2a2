"""Random ids through a model that is read layer by layer: the same numbers as through the whole model."""

import json
import subprocess
import sys

import pytest
import torch
import transformers

from command import locater
from locater.prediction import streamed
from locater.prediction.numbers import NAMES
from locater.prediction.predict import predict
from locater.prediction.windows import Effort

VOCABULARY = 120
SIZES = dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48)
SIZES |= dict(max_position_embeddings=128, bos_token_id=0, eos_token_id=0, pad_token_id=0)
GROUPED = SIZES | dict(num_key_value_heads=2)
GPT2 = dict(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0)
FAMILIES = {
    "llama": ("Llama", GROUPED),
    "mistral": ("Mistral", GROUPED | dict(sliding_window=40)),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", GROUPED | dict(head_dim=8)),
    "gemma2": ("Gemma2", GROUPED | dict(head_dim=8, sliding_window=40)),
    "gemma3_text": ("Gemma3", GROUPED | dict(head_dim=8, sliding_window=40)),
    "phi3": ("Phi3", GROUPED),
    "gpt2": ("GPT2", GPT2),
    "gpt_neox": ("GPTNeoX", SIZES),
}
EFFORT = Effort(window=96, calibration=4, test=4, texts=2)


def run(folder, monkeypatch=None):
    """Run from the file; or as a whole, where nothing can be streamed."""
    if monkeypatch is None:
        return predict(folder, text="random", effort=EFFORT)
    with monkeypatch.context() as patched:
        patched.setattr("locater.prediction.predict.streamed", refuse)
        return predict(folder, text="random", effort=EFFORT)


def refuse(place):
    raise streamed.CannotStream("not now")


def save(folder, name: str) -> None:
    kind, sizes = FAMILIES[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **sizes)
    net = transformers.AutoModelForCausalLM.from_config(config)
    assert type(net).__name__.startswith(kind)
    for parameter in net.parameters():  # sharp enough for heads to differ
        parameter.data.mul_(6 if parameter.dim() > 1 else 1).add_(0.1 * torch.randn_like(parameter))
    net.save_pretrained(folder)


def numbers(found) -> dict:
    return {
        (head.block, head.layer, head.head): [
            getattr(side, name) for side in (head.measured, head.predicted) for name in NAMES
        ]
        for head in found.heads
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_pass_is_the_whole_model_s(tmp_path, name, monkeypatch):
    save(tmp_path, name)
    with monkeypatch.context() as patched:  # streamed it must be
        patched.setattr("locater.prediction.predict.load_model", None)
        own = numbers(run(tmp_path))
    whole = numbers(run(tmp_path, monkeypatch))
    assert own.keys() == whole.keys() and len(own) == 12
    for place, values in own.items():
        assert values == pytest.approx(whole[place], abs=1e-4)
    assert len({values[0] for values in own.values()}) == 12  # no head is like another


def test_only_one_layer_is_held(tmp_path):
    save(tmp_path, "llama")
    with streamed.streamed(tmp_path) as model:
        held = []

        def take(number, x):
            held.append([not layer.mlp.up_proj.weight.is_meta for layer in model.module.layers])

        model.run(model.attention, torch.zeros(1, 96, dtype=torch.long), take)
    assert held == [[number == own for own in range(3)] for number in range(3)]
    assert all(layer.mlp.up_proj.weight.is_meta for layer in model.module.layers)


def test_large_tables_are_read_by_their_rows(tmp_path, monkeypatch):
    save(tmp_path, "llama")
    whole = numbers(run(tmp_path))
    monkeypatch.setattr(streamed, "LARGE", 1)
    read, plain = [], streamed.FileWeights.read

    def reading(self, name, rows=None):
        read.append((name, rows))
        return plain(self, name, rows)

    monkeypatch.setattr(streamed.FileWeights, "read", reading)
    assert numbers(run(tmp_path)) == whole
    rows = [rows for name, rows in read if name == "embed_tokens.weight"]
    assert rows and all(rows is not None and rows[1] - rows[0] == 1 for rows in rows)


def test_what_the_file_does_not_hold_goes_through_transformers(tmp_path, monkeypatch):
    config = transformers.BertConfig(**SIZES)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)  # transformers adds a pooler to it
    with pytest.raises(streamed.CannotStream, match="pooler"), streamed.streamed(tmp_path):
        pass
    assert numbers(run(tmp_path)) == numbers(run(tmp_path, monkeypatch))


def test_left_over_tensors_are_not_streamed_over(tmp_path):
    save(tmp_path, "llama")
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(streamed.CannotStream, match=r"q_proj\.bias"), streamed.streamed(tmp_path):
        pass


def test_command(tmp_path):
    model, out = tmp_path / "model", tmp_path / "out.json"
    save(model, "qwen3")
    fast = ("--window", 96, "--calibration", 3, "--test", 1)
    shown = locater("predict", model, "--text", "random", "--layers", "1", *fast, "--json", out)
    assert shown.code == 0 and "random ids" in shown.out and "loss" not in shown.out
    heads = json.loads(out.read_text())["heads"]
    assert len(heads) == 4 and all(0 < head["measured"]["normalised_entropy"] < 1 for head in heads)


PEAK = """
import sys
from locater.prediction.predict import Effort, predict
predict(sys.argv[1], text="random", effort=Effort(window=96, calibration=3, test=1, texts=2))
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_depth(tmp_path):
    """Two layers and ten of the same width, 34 MB each in float32: the peak stays where it is."""
    peaks = []
    for depth in (2, 10):
        sizes = dict(hidden_size=1024, intermediate_size=2048, num_hidden_layers=depth, vocab_size=32_000)
        config = transformers.LlamaConfig(**GROUPED | sizes | dict(num_attention_heads=8))
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / str(depth))
        out = subprocess.run([sys.executable, "-c", PEAK, tmp_path / str(depth)], capture_output=True, check=True)
        peaks.append(int(out.stdout) * 1024)
    assert peaks[1] - peaks[0] < 40 * 2**20  # eight layers more are 268 MB
