"""Every cell of every family row: a changed entry of the config changes heads as it changes the model, or is refused.

A few entries of each type in the ordinary tests; all entries that the reader asks for, in every case, in
`python -m pytest -m slow tests/models/test_cells.py`. `twins.judge(…, opened=…)` holds another reader to the same.
"""

import multiprocessing
import random
import resource
from functools import cache

import pytest
import torch

from family_cases import CASES
from locater.models.registry import FAMILIES
from twins import ABSENT, Verdict, asked_for, changed, flat, forms, judge, unusual, watch

TWINS = [case for case in CASES if hasattr(case, "config")]
FIRST = list({case.config: case for case in reversed(TWINS)}.values())
SAMPLE = 4
# Entries that transformers' own port leaves unread, where the code that its models were published with obeys them:
# `family_cases.published` holds those to a model written after that code.
PUBLISHED = {("mpt", "attn_config.alibi"), ("mpt", "attn_config.alibi_bias_max")}
# Spellings that a row must not take from another family, whatever is sampled.
FOREIGN = {
    "partial_rotary_factor": 0.5,
    "rotary_pct": 0.5,
    "rotary_emb_base": 77,
    "layer_norm_eps": 0.3,
    "norm_eps": 0.3,
}
FOREIGN |= {"layer_norm_epsilon": 0.3, "rms_norm_eps": 0.3, "sliding_window_pattern": 3, "is_causal": False}
FOREIGN["head_dim"] = 8  # not that of any case, which have 12, 16 or the like


@cache
def forms_of(name: str) -> dict:
    return forms(next(case for case in TWINS if case.name == name))


@cache
def examples() -> dict[str, list]:
    """The values that each entry has in the first case of each type."""
    seen: dict[str, list] = {}
    for case in FIRST:
        for values in forms_of(case.name).values():
            for path, value in flat(values).items():
                if value is not None and not isinstance(value, dict) and value not in seen.setdefault(path, []):
                    seen[path].append(value)
    return seen


def edits(case, values: dict, pool: dict[str, list]) -> list:
    """Each entry that the reader asks for, with each of its unusual values."""
    found = []
    for path in sorted(asked_for(values, watch(case, values).tensors)):
        own = [value for value in (flat(values).get(path),) if value is not None]
        found += [(path, value) for value in unusual(path, own + pool.get(path, [])[:2])]
    return found


def wrong(case, values: dict, chosen: list) -> list[str]:
    before = judge(case, values)
    assert before.kind == "right", before
    faults = []
    for path, value in chosen:
        if (case.name.partition("-")[0], path) in PUBLISHED or (new := changed(values, path, value)) is None:
            continue
        verdict: Verdict = judge(case, new, usual=before.coverage)
        if verdict.is_wrong:
            faults.append(f"{path} = {'nothing' if value is ABSENT else value}: {verdict.words} ({verdict.coverage})")
    return faults


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.name)
def test_entries_of_other_families_and_a_sample_of_its_own(case):
    for form, values in forms_of(case.name).items():
        sample = random.Random(f"{case.name} {form}").sample(edits(case, values, {}), SAMPLE)
        assert not wrong(case, values, [*FOREIGN.items(), *sample] if form == "written" else sample)


# Settings that no row has: what transformers' classes take instead is not in the file.
UNSTATED = [
    ("phi3-longrope-8", "max_position_embeddings", ABSENT),
    ("phi3-longrope-16", "original_max_position_embeddings", ABSENT),
    ("t5", "is_encoder_decoder", False),
    ("umt5", "is_encoder_decoder", False),
    ("t5-encoder", "is_decoder", True),
]


@pytest.mark.parametrize("name, path, value", UNSTATED, ids=[f"{name}-{path}" for name, path, _ in UNSTATED])
def test_what_a_file_leaves_to_a_class_is_not_guessed(name, path, value):
    case = next(case for case in TWINS if case.name == name)
    assert not [fault for values in forms_of(name).values() for fault in wrong(case, values, [(path, value)])]


MOST_BYTES = 7 << 30  # with `image_size` left out some towers are built for the published picture


def _judge_all(case, connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    torch.set_num_threads(1)
    faults = [
        f for values in forms_of(case.name).values() for f in wrong(case, values, edits(case, values, examples()))
    ]
    connection.send(faults)


@pytest.mark.slow
@pytest.mark.parametrize("case", TWINS, ids=lambda case: case.name)
def test_every_entry_that_the_reader_asks_for(case):
    """In a process of its own, whose memory is bounded and given back."""
    examples()
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_judge_all, args=(case, sender))
    process.start()
    sender.close()
    faults = receiver.recv()
    process.join()
    assert not faults


def test_every_type_of_the_tables_that_transformers_has_is_held_against_it():
    import transformers

    known = {kind for family in FAMILIES for kind in family.model_types if kind in transformers.CONFIG_MAPPING}
    assert known - {getattr(transformers, case.config).model_type for case in TWINS} <= {"timm_wrapper"}


def test_a_row_that_obeys_what_its_family_does_not_is_found():
    """The test of the test: a reader that takes the fraction from any config is caught."""
    from dataclasses import replace

    from locater.models import Config, open_model
    from locater.models.config import entry
    from locater.models.registry import find_family
    from twins import Opened

    def obeying(values, tensors):
        family = find_family(Config(values), tensors.names)
        row = family.attention[0]
        row = replace(row, rotary=replace(row.rotary, fraction=entry("partial_rotary_factor", 1.0)))
        model = open_model(Config(values), tensors, family=replace(family, attention=(row,)))
        return Opened(str(model.coverage), list(model.layers()))

    case = next(case for case in TWINS if case.name == "llama")
    values = changed(forms_of("llama")["written"], "partial_rotary_factor", 0.5)
    assert judge(case, values).kind == "refused"
    assert judge(case, values, opened=obeying).is_wrong
