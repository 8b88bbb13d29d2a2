"""Every family's tensors under every other family's type: read as one of the two, or not called COMPLETE.

A few pairs in the ordinary tests; all of them in `python -m pytest -m slow tests/models/test_other_mechanisms.py`.
"""

import random
from functools import cache

import pytest
import torch
import transformers
from test_cells import FIRST, forms_of
from test_edited_tensors import Held

from locater.errors import Refusal
from locater.models.proof.evidence import Evidence
from locater.models.proof.twin import observe_twin
from twins import CannotBuild, by_reader, differences, watch

SAMPLE = 6
AT_ODDS = ("architectures", "auto_map", "model_type")  # what would tell at once


@cache
def stored(name: str) -> tuple[dict, Evidence]:
    """The config that transformers saves with a case's model, and a pass of it."""
    case, values = next(case for case in FIRST if case.name == name), forms_of(name)["saved"]
    return values, watch(case, values)


def loaded(mechanism, values: dict, tensors: dict) -> Evidence:
    """A pass of the model of the other type, with as many of the tensors as fit it."""
    model = watch(mechanism, values).model
    sizes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    fitting = {name: tensor for name, tensor in tensors.items() if sizes.get(name) == tensor.shape}
    model.load_state_dict(fitting, strict=False)
    with torch.no_grad():
        return Evidence(model, observe_twin(model, mechanism.inputs(model.config)))


def fault(names, mechanism) -> str | None:
    """In words, what is wrong with a reading that is called COMPLETE; None for any other."""
    values, evidence = stored(names.name)
    tensors, kind = dict(evidence.model.state_dict()), getattr(transformers, mechanism.config).model_type
    values = {key: value for key, value in values.items() if key not in AT_ODDS} | {"model_type": kind}
    try:
        coverage, layers = by_reader(values, Held(tensors))
    except Refusal:
        return None
    if not coverage.startswith("COMPLETE") or any(layer.refused for layer in layers):
        return None
    if next(differences(evidence, layers, is_complete=True), None) is None:
        return None
    try:
        evidence = loaded(mechanism, values, tensors)
    except CannotBuild:  # no model of this type has these settings
        return None
    if any(layer.query_name not in evidence.module_names for layer in layers):  # it would not find them by these names
        return None
    return next(differences(evidence, layers, is_complete=True), None)


@pytest.mark.parametrize("mechanism", FIRST, ids=lambda case: case.name)
def test_tensors_of_some_families(mechanism):
    for names in random.Random(mechanism.name).sample(FIRST, SAMPLE):
        assert (words := fault(names, mechanism)) is None, f"{names.name}: {words}"


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", FIRST, ids=lambda case: case.name)
def test_tensors_of_every_family(mechanism):
    faults = {names.name: words for names in FIRST if (words := fault(names, mechanism)) is not None}
    assert not faults
