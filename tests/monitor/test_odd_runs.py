"""Layers that run twice, attention that no row names, and code that was replaced: told apart, or said."""

import pytest
import torch
from test_calls import assert_exact
from test_live_models import Reference
from torch import nn
from torch.nn import functional

from locater.monitor import AttentionMonitor, Scope
from saved_models import case_named

TOKENS = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(5))


def llama():
    model = case_named("llama").build().train()
    model.set_attn_implementation("sdpa")
    return model


def test_layers_that_run_twice_have_numbers_of_their_own():
    model, reference = llama(), Reference()
    first, second = model.model.layers
    model.model.layers = nn.ModuleList([first, second, first, second])
    model.config.num_hidden_layers = 4
    with AttentionMonitor(model, every=1, scope=Scope(near=4)) as monitor, reference:
        model(TOKENS, use_cache=False)
        layers = monitor.report().training
    assert len(layers) == len(reference.logits) == 4
    for layer, logits in zip(layers, reference.logits, strict=True):
        assert_exact(layer, logits)


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **inputs):
        return self.inner(**inputs)


def test_attention_that_no_row_names_is_said():
    model = llama()
    model.model.layers[0].self_attn = Around(model.model.layers[0].self_attn)
    with AttentionMonitor(model, every=1) as monitor:
        model(TOKENS)
        report = monitor.report()
    assert len(report.training) == 1
    assert "`model.layers.0.self_attn.inner` is of no layer that was read" in " ".join(report.notes)


def test_nothing_is_reconstructed_of_a_model_whose_code_was_replaced(monkeypatch):
    model, original = llama(), functional.softmax
    model.set_attn_implementation("eager")
    monkeypatch.setattr(functional, "softmax", lambda x, *rest, **options: original(2 * x, *rest, **options))
    with AttentionMonitor(model, every=1) as monitor:
        model(TOKENS)
        report = monitor.report()
    assert not report.training and "softmax was replaced" in " ".join(report.notes)


@pytest.mark.parametrize("name", ["matmul", "softmax"])
def test_a_function_of_torchs_own_namespace_that_was_replaced_is_named(monkeypatch, name):
    from locater import Live, scan

    model, original = llama(), getattr(torch, name)
    assert str(scan(Live(model), length=12).coverage) == "by the table, not run"
    monkeypatch.setattr(torch, name, lambda *given, **options: original(*given, **options))
    assert f"torch.{name} was replaced" in str(scan(Live(model), length=12).coverage)


@pytest.mark.parametrize("name", ["compile", "load", "set_default_dtype"])
def test_a_replaced_function_that_computes_with_no_tensor_is_passed_over(monkeypatch, name):
    from locater import Live, scan

    monkeypatch.setattr(torch, name, lambda *given, **options: None)  # as lightning does with torch.compile
    assert str(scan(Live(llama()), length=12).coverage) == "by the table, not run"
