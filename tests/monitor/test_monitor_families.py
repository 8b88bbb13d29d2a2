"""The monitor on models that run under `sdpa` against what the same weights' own eager attention shows."""

from functools import reduce

import pytest
import torch

from family_cases import CASES
from locater.attention import materialised
from locater.monitor import AttentionMonitor, Scope
from locater.monitor.hooks import Hooks

WANTED = (
    "gpt2", "gpt2-cross", "llama", "mistral", "qwen2-layer-types", "qwen3", "gemma2", "gemma3-text", "olmo2", "cohere2",
    "phi3", "smollm3", "bloom", "falcon-40b", "mpt", "gpt-neox", "opt", "bert", "bert-decoder", "modernbert", "albert",
    "distilbert", "deberta-v2", "t5", "bart", "whisper", "deepseek-v2", "deepseek-v3", "granite-hybrid", "lfm2",
    "qwen3-next", "vit", "clip", "wav2vec2",
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}
LIVE = [case.name for case in CASES if hasattr(case, "config")]  # the others are doubles of files, without a config
ATTRIBUTES = {
    "decoder": ("decoder_attentions", "attentions"),
    "encoder": ("encoder_attentions", "text_model_output.attentions", "attentions"),
    "cross": ("cross_attentions",),
    "vision": ("vision_model_output.attentions", "attentions"),
}
FROM_PROBABILITIES = ("entropy", "normalised_entropy", "sink_mass", "near_mass", "mean_distance", "participation")


def pair(case):
    """The same weights, once under sdpa and once with attention to be seen; some models have no sdpa of their own."""
    eager = case.build()
    config = type(eager.config).from_dict(eager.config.to_dict())
    try:
        fused = type(eager)._from_config(config, attn_implementation="sdpa")
    except ValueError:
        fused = type(eager)._from_config(config, attn_implementation="eager")
    fused = fused.float()
    fused.load_state_dict(eager.state_dict())
    return eager.eval(), fused.eval()


def padded(inputs):
    """The second text is shorter, where the model takes a mask at all."""
    if "input_ids" not in inputs:
        return inputs, None
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, -4:] = 0
    return inputs | {"attention_mask": mask}, mask.bool()


def own_attentions(model, inputs, block):
    with torch.no_grad():
        output = model(**inputs, output_attentions=True)
    for path in ATTRIBUTES[block]:
        if (found := reduce(lambda part, name: getattr(part, name, None), path.split("."), output)) is not None:
            return [attention for attention in found if attention is not None]
    raise AssertionError(block)


def of_probabilities(attention, *, near, query_valid, first=0):
    """The statistics of a matrix of probabilities: keys of probability 0 are those that were not admitted."""
    admitted = attention > 0
    if query_valid is not None:
        admitted = admitted & query_valid[:, None, :, None]
    distance = torch.arange(attention.shape[-2])[:, None] - torch.arange(attention.shape[-1])
    found = materialised(attention.double().log(), admitted, distance[None, None], near=near)
    return {name: numbers for name, numbers in found.numbers() if name in FROM_PROBABILITIES}


def assert_same(layer, attention, *, near, query_valid):
    expected = of_probabilities(attention, near=near, query_valid=query_valid)
    for name, numbers in expected.items():
        if name not in layer.statistics:
            assert layer.block == "cross"
            continue
        theirs = numbers.nanmean((0, 2))
        size = attention.shape[-1] if name in ("mean_distance", "participation") else 1
        torch.testing.assert_close(
            torch.tensor(layer.statistics[name], dtype=torch.float64) / size, theirs / size, atol=1e-5, rtol=0
        )


# Every family with padding, the first text of two being whole; some without, where models pass no mask at all.
@pytest.mark.parametrize(
    ("name", "padding"), [(name, True) for name in LIVE] + [(name, False) for name in WANTED], ids=str
)
def test_statistics_are_those_of_the_models_own_attention(name, padding):
    case = BY_NAME[name]
    eager, fused = pair(case)
    inputs, valid = case.inputs(eager.config), None
    if padding:
        inputs, valid = padded(inputs)
    with AttentionMonitor(fused, every=1, scope=Scope(near=4)) as monitor, torch.no_grad():
        fused(**inputs)
        report = monitor.report()
    assert not report.training and not report.notes
    blocks = {layer.block for layer in report.evaluation}
    for block in blocks:
        attentions = own_attentions(eager, inputs, block)
        layers = [layer for layer in report.evaluation if layer.block == block]
        assert len(layers) == len(attentions)
        two_sided = "decoder_input_ids" in inputs
        query_valid = None if block == "vision" or (two_sided and block != "encoder") else valid
        for layer, attention in zip(layers, attentions, strict=True):
            assert_same(layer, attention, near=4, query_valid=query_valid)


def test_the_models_do_run_under_a_fused_kernel(monkeypatch):
    """At least twelve families: counted by the calls of the kernel itself."""
    calls = []
    kernel = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: (calls.append(1), kernel(*a, **k))[1]
    )
    fused = []
    for name in WANTED:
        calls.clear()
        model = pair(BY_NAME[name])[1]
        with torch.no_grad():
            model(**BY_NAME[name].inputs(model.config))
        fused += [name] if calls else []
    assert len(fused) >= 20, fused


@pytest.mark.parametrize("name", WANTED)
def test_calls_and_module_inputs_say_the_same(name, monkeypatch):
    """Both ways to every family that is known: what its kernel was given, and what its table makes of module inputs."""
    case = BY_NAME[name]
    model = pair(case)[1]
    inputs = case.inputs(model.config)
    reports = []
    for by_call in (Hooks._call, lambda *given: None):
        monkeypatch.setattr(Hooks, "_call", by_call)
        with AttentionMonitor(model, every=1, scope=Scope(near=4)) as monitor, torch.no_grad():
            model(**inputs)
            reports.append(monitor.report())
    called, rebuilt = (report.evaluation for report in reports)
    assert {layer.through for layer in rebuilt} == {"module inputs"} and "reconstructed" in reports[1].notes[0]
    assert "module inputs" not in {layer.through for layer in called}
    for one, other in zip(called, rebuilt, strict=True):
        for statistic, values in one.statistics.items():
            if statistic == "max_logit" and name in ("bloom", "mpt"):
                continue  # their ALiBi counts keys from the first, ours from the query: a constant for each query
            assert values == pytest.approx(other.statistics[statistic], abs=2e-4, rel=2e-4), statistic
