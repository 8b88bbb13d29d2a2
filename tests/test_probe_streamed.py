"""Random ids through a model that is read layer by layer: the same numbers as through the whole model."""

import json
import subprocess
import sys

import pytest
import torch
import transformers

from command import locater
from locater import scan
from locater.prediction import streamed
from locater.prediction.numbers import NAMES
from locater.prediction.probe import probe, probe_stored, probe_whole
from locater.prediction.settings import Effort

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
EFFORT = Effort(window=96)


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
        (head.block, head.layer, head.head): [getattr(head.numbers, name) for name in NAMES] for head in found.heads
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_pass_is_the_whole_model_s(tmp_path, name):
    save(tmp_path, name)
    one, other = (run(tmp_path, layers=None, effort=EFFORT) for run in (probe_stored, probe_whole))
    own, whole = numbers(one), numbers(other)
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

        model.run(model.wanted(None), torch.zeros(1, 96, dtype=torch.long), take)
    assert held == [[number == own for own in range(3)] for number in range(3)]
    assert all(layer.mlp.up_proj.weight.is_meta for layer in model.module.layers)


def test_large_tables_are_read_by_their_rows(tmp_path, monkeypatch):
    save(tmp_path, "llama")
    whole = numbers(probe_stored(tmp_path, layers=None, effort=EFFORT))
    monkeypatch.setattr(streamed, "LARGE", 1)
    read, plain = [], streamed.Weights.read

    def reading(self, name, rows=None):
        read.append((name, rows))
        return plain(self, name, rows)

    monkeypatch.setattr(streamed.Weights, "read", reading)
    assert numbers(probe_stored(tmp_path, layers=None, effort=EFFORT)) == whole
    rows = [rows for name, rows in read if name == "embed_tokens.weight"]
    assert rows and all(rows is not None and rows[1] - rows[0] == 1 for rows in rows)


def test_what_the_file_does_not_hold_goes_through_transformers(tmp_path):
    config = transformers.BertConfig(**SIZES)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)  # transformers adds a pooler to it
    with pytest.raises(streamed.CannotStream, match="pooler"):
        probe_stored(tmp_path, layers=None, effort=EFFORT)
    assert numbers(probe(tmp_path, effort=EFFORT)) == numbers(probe_whole(tmp_path, layers=None, effort=EFFORT))


def test_left_over_tensors_are_not_streamed_over(tmp_path):
    save(tmp_path, "llama")
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(32)
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(streamed.CannotStream, match=r"q_proj\.bias"):
        probe_stored(tmp_path, layers=None, effort=EFFORT)


def test_scan_takes_the_columns_over(tmp_path):
    save(tmp_path, "llama")
    found = probe(tmp_path, effort=EFFORT).onto(scan(tmp_path))
    own = numbers(probe_whole(tmp_path, layers=None, effort=EFFORT))
    for row in found.heads:
        values = own[row.block, row.layer, row.head]
        assert [row.probed_near_mass_beyond_first, row.probed_normalised_entropy, row.probed_sink_mass] == values[:3]
    assert "probed_sink_mass" not in scan(tmp_path).heads[0].to_record()


def test_command(tmp_path):
    model, out = tmp_path / "model", tmp_path / "out.json"
    save(model, "qwen3")
    shown = locater("scan", model, "--probe", "--layers", "1", "--json", out)
    assert shown.code == 0 and "random ids, not on text" in shown.out
    assert "measured on random ids: " in shown.out and "near?" not in shown.out and "estimated" not in shown.out
    heads = json.loads(out.read_text())["heads"]
    assert len(heads) == 4 and all(0 < head["probed_normalised_entropy"] < 1 for head in heads)
    refused = locater("scan", model, "--fail-on", "probed_sink_mass>0.1")
    assert refused.code == 2 and "needs --probe" in refused.err
    assert locater("scan", model, "--probe", "--fail-on", "probed_sink_mass>=0").code == 3
    refused = locater("scan", model, "--probe", "--adapter", "x")
    assert refused.code == 2 and "--probe goes without" in refused.err


PEAK = """
import sys
from locater.prediction.probe import probe_stored
from locater.prediction.settings import Effort
probe_stored(sys.argv[1], layers=None, effort=Effort(window=96))
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
