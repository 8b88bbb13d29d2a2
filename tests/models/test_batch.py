"""Batches of heads: only what can be computed together is, and each head's numbers are those that it has alone."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

import locater
from locater.head import Head
from locater.positions import Alibi, Buckets, Rotary
from locater.projections import LowRank, Norm, Projection, Whole
from locater.scanning.batch import HeadBatch, batches
from locater.scanning.layer import Settings, analyse

pytestmark = pytest.mark.quick

D_HEAD, D_MODEL = 8, 24
INPUT_NORM = Norm("layer", 1 + 0.1 * torch.randn(D_MODEL), 0.1 * torch.randn(D_MODEL))


def side(**changed) -> Projection:
    return Projection(0.3 * torch.randn(D_HEAD, D_MODEL), **(dict(input_norm=INPUT_NORM) | changed))


def layer(num_groups: int = 3, per_group: int = 2, *, of_sides=dict, **changed) -> list[Head]:
    """Heads of one kind; `of_sides` gives the arguments of each projection, `changed` those of each head."""
    keys = [side(**of_sides()) for _ in range(num_groups)]
    return [
        Head(0, n, side(**of_sides()), keys[n // per_group], 0.35, key_index=n // per_group, **changed)
        for n in range(num_groups * per_group)
    ]


def latent() -> dict:
    return dict(low_rank=LowRank(DOWN, torch.randn(D_HEAD, 6), Norm("rms", torch.rand(6))))


DOWN, WHOLE = torch.randn(6, D_MODEL), Whole(torch.randn(3 * D_HEAD, D_MODEL))
KINDS = {
    "plain": dict(),
    "biased": dict(of_sides=lambda: dict(bias=torch.randn(D_HEAD))),
    "rotary": dict(rotary=Rotary(100.0, D_HEAD), lookahead=0, of_sides=lambda: dict(bias=torch.randn(D_HEAD))),
    "normed": dict(of_sides=lambda: dict(norm=Norm("rms", torch.rand(D_HEAD))), rotary=Rotary(100.0, D_HEAD)),
    "layer-normed": dict(of_sides=lambda: dict(norm=Norm("layer", torch.rand(D_HEAD), torch.randn(D_HEAD)))),
    "normed over all": dict(of_sides=lambda: dict(norm=Norm("rms", torch.rand(D_HEAD)), whole=WHOLE)),
    "all layer-normed": dict(of_sides=lambda: dict(norm=Norm("layer", torch.rand(D_HEAD)), whole=WHOLE)),
    "latent": dict(of_sides=latent),
    "capped": dict(softcap=5.0, lookback=7, lookahead=0),
    "transposed": dict(of_sides=lambda: dict(bias=torch.randn(D_HEAD))),
}


@pytest.mark.parametrize("raw", [False, True], ids=["folded", "raw"])
@pytest.mark.parametrize("per_group", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_among_others_has_the_numbers_that_it_has_alone(kind, per_group, raw):
    torch.manual_seed(0)
    heads = layer(3, per_group, **KINDS[kind])
    if kind == "transposed":
        heads = [replace(one, query=replace(one.query, weight=one.query.weight.T.contiguous().T)) for one in heads]
    assert len(list(batches(heads))) == 1
    settings = Settings(64, raw=raw, keep_eigenvalues=True, keep_curves=True)
    together = analyse(heads, settings).rows
    for row, one in zip(together, heads, strict=True):
        (alone,) = analyse([one], settings).rows
        for name, value in alone.to_record().items():
            if isinstance(value, float):
                assert getattr(row, name) == pytest.approx(value, rel=1e-4, abs=1e-5), name
            elif name != "eigenvalues":
                assert getattr(row, name) == value, name
        assert row.curves.keys() == alone.curves.keys()


@pytest.mark.parametrize("position_bias", [lambda: Alibi(float(torch.rand(()))), lambda: Buckets(torch.randn(8), True)])
def test_what_distance_adds_is_each_heads_own(position_bias):
    torch.manual_seed(0)
    heads = [replace(one, position_bias=position_bias()) for one in layer()]
    (batch,) = batches(heads)
    distance = torch.arange(-9, 9).view(2, 9)
    expected = torch.stack([one.position_bias(distance) for one in heads if one.position_bias])
    assert torch.equal(batch.added_by_distance(distance), expected)
    rows = [row for one in heads for row in analyse([one], Settings(64)).rows]
    for row, alone in zip(analyse(heads, Settings(64)).rows, rows, strict=True):
        assert row.logit_bound == pytest.approx(alone.logit_bound)
        assert row.localisation == pytest.approx(alone.localisation, abs=1e-6)


DIFFERENT = {
    "scale": dict(scale=0.5),
    "softcap": dict(softcap=30.0),
    "lookback": dict(lookback=3),
    "lookahead": dict(lookahead=0),
    "rotary": dict(rotary=Rotary(10.0, D_HEAD)),
    "slopes": dict(position_bias=Alibi(0.1)),
    "buckets": dict(position_bias=Buckets(torch.randn(8), True)),
    "layer": dict(layer=1),
    "block": dict(block="encoder"),
}


@pytest.mark.parametrize("name", [*DIFFERENT, "bias", "norm", "input norm", "wide", "float64", "whole"])
def test_heads_that_differ_in_more_than_numbers_are_apart(name):
    one, two = layer(2, 1)
    sides = {
        "bias": dict(bias=torch.randn(D_HEAD)),
        "norm": dict(norm=Norm("rms")),
        "input norm": dict(input_norm=Norm("rms")),
        "wide": dict(weight=torch.randn(2 * D_HEAD, D_MODEL)),
        "float64": dict(weight=torch.randn(D_HEAD, D_MODEL, dtype=torch.float64)),
        "whole": dict(norm=Norm("rms"), whole=WHOLE),
    }
    if name in DIFFERENT:
        other = replace(two, **DIFFERENT[name])
    else:
        query, key = (replace(projection, **sides[name]) for projection in (two.query, two.key))
        other = replace(two, query=query, key=key)
    assert [len(batch) for batch in batches([one, two, other, replace(other, index=7)])] == [2, 2]
    for pair in ([one, other], [other, one]):
        assert [batch.heads for batch in batches(pair)] == [(pair[0],), (pair[1],)]


def test_batches_keep_the_order_and_share_out():
    heads = layer(6, 2)
    assert [head for batch in batches(heads, parts=4) for head in batch.heads] == heads
    assert [batch.num_groups for batch in batches(heads, parts=4)] == [2, 2, 2]
    (batch,) = batches(heads)
    assert [len(single) for single in batch.singles()] == [1] * 12 and isinstance(batch, HeadBatch)
    assert list(batches([])) == []


SIZES = dict(num_hidden_layers=4, hidden_size=128, vocab_size=300, intermediate_size=64)
GROUPED = SIZES | dict(num_attention_heads=16, num_key_value_heads=4, head_dim=8)
SOURCE = str(Path(locater.__file__).parent)


def count_calls(source, layers) -> int:
    """How often functions of the package are entered during a scan, and generators of it resumed."""
    count = 0

    def look(frame, event, argument):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(SOURCE)

    sys.setprofile(look)
    try:
        locater.scan(source, layers=layers)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("make", "most"),
    [
        # A third of what it was when every head was walked through by itself: 123, 91 and 150.
        (lambda: transformers.GPT2Model(transformers.GPT2Config(n_embd=96, n_layer=4, n_head=12, vocab_size=300)), 41),
        (lambda: transformers.LlamaModel(transformers.LlamaConfig(**GROUPED)), 30.3),
        (lambda: transformers.Qwen3Model(transformers.Qwen3Config(**GROUPED)), 50),
    ],
    ids=["gpt2", "llama", "qwen3"],
)
def test_python_is_called_seldom_for_a_head(make, most, tmp_path):
    """Of two layers more: what a file costs once is left out."""
    make().save_pretrained(tmp_path)
    num_heads = len(locater.scan(tmp_path, layers=[2, 3]).heads)
    further = count_calls(tmp_path, range(4)) - count_calls(tmp_path, range(2))
    assert further / num_heads <= most
