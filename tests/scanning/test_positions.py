"""From heads to rows: what positions do to the regime, beyond what a scan's tests cover."""

from dataclasses import replace

import pytest
import torch

from locater.head import Head
from locater.positions import Alibi, Buckets
from locater.projections import Projection
from locater.scanning.layer import Settings, analyse

pytestmark = pytest.mark.quick


@pytest.fixture
def plain():
    """A head whose eigenvalues average to zero, small enough to be uniform."""
    query, key = 0.05 * torch.randn(2, 8, 16)
    return Head(0, 0, Projection(query), Projection(key - (query * key).sum() / query.square().sum() * query), 8**-0.5)


def regime(head, length=256):
    (row,) = analyse([head], Settings(length)).rows
    return row.regime


def test_a_slope_makes_a_uniform_head_late(plain):
    assert regime(plain) == "uniform"
    assert regime(replace(plain, position_bias=Alibi(0.25))) == "late"
    assert regime(replace(plain, position_bias=Alibi(-0.25))) == "early"
    assert regime(replace(plain, position_bias=Alibi(1e-6))) == "uniform"


def test_buckets_that_favour_near_keys_make_it_late(plain):
    near = torch.linspace(40, -40, 32)
    assert regime(replace(plain, position_bias=Buckets(near, bidirectional=False)), length=96) == "late"
    assert regime(replace(plain, position_bias=Buckets(torch.ones(32), bidirectional=False))) == "uniform"


def test_heads_of_one_layer_keep_their_own_slopes(plain):
    heads = [replace(plain, index=n, position_bias=Alibi(slope)) for n, slope in enumerate((0.25, 1e-6, -0.25))]
    assert [row.regime for row in analyse(heads, Settings(256)).rows] == ["late", "uniform", "early"]
