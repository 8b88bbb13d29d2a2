"""All heads of a layer together against `Head.logits`, head by head."""

import pytest
import torch

from locater.attention import materialised, observe, queries_and_keys
from locater.errors import Refusal
from locater.head import Head
from locater.positions import Alibi, Buckets, Rotary
from locater.projections import LowRank, Norm, Projection, Whole

pytestmark = pytest.mark.quick

WIDTH, ROWS = 12, 4


def random(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def plain(number, *, bias=False):
    return [Projection(random(ROWS, WIDTH), random(ROWS) if bias else None) for _ in range(number)]


def normed(number, kind, *, whole=False, shift=False):
    weights, biases = random(number, ROWS, WIDTH), random(number, ROWS)
    shared = Whole(weights.flatten(0, 1), biases.flatten()) if whole else None
    return [
        Projection(
            weights[i], biases[i], norm=Norm(kind, random(ROWS), random(ROWS) if shift else None, 1e-5), whole=shared
        )
        for i in range(number)
    ]


def latent(number):
    """Two rows of each head through a shared inner norm, two direct ones that all heads share."""
    down, direct, norm = random(3, WIDTH), random(2, WIDTH), Norm("rms", random(3))
    made = []
    for _ in range(number):
        low_rank = LowRank(down, random(2, 3), norm)
        made.append(Projection(torch.cat([low_rank.weight, direct]), low_rank=low_rank))
    return made


def layer(queries, keys, **more):
    ratio = len(queries) // len(keys)
    own = more.pop("own", [{}] * len(queries))
    return [
        Head(1, i, query, keys[i // ratio], 0.6, key_index=i // ratio, **more, **own[i])
        for i, query in enumerate(queries)
    ]


LAYERS = {
    "plain": lambda: layer(plain(4), plain(4)),
    "grouped with biases": lambda: layer(plain(4, bias=True), plain(2, bias=True), lookahead=0),
    "one key": lambda: layer(plain(4), plain(1), lookahead=0, lookback=5),
    "norm per head": lambda: layer(normed(4, "rms"), normed(2, "rms"), lookahead=0),
    "norm with bias": lambda: layer(normed(4, "layer", shift=True), normed(4, "layer", shift=True)),
    "l2 norm": lambda: layer(normed(2, "l2"), normed(2, "l2")),
    "norm over all": lambda: layer(normed(4, "rms", whole=True), normed(2, "rms", whole=True), lookahead=0),
    "layer norm over all": lambda: layer(normed(4, "layer", whole=True), normed(4, "layer", whole=True)),
    "latent": lambda: layer(latent(4), latent(4), rotary=Rotary(50.0, 2, start=2), lookahead=0),
    "rotary": lambda: layer(plain(4), plain(2), rotary=Rotary(50.0, ROWS), lookahead=0),
    "soft-cap": lambda: layer(plain(4), plain(2), softcap=3.0, lookahead=0),
    "alibi": lambda: layer(
        plain(2), plain(2), lookahead=0, own=[{"position_bias": Alibi(slope)} for slope in (0.5, 0.1)]
    ),
    "buckets": lambda: layer(
        plain(2), plain(2), own=[{"position_bias": Buckets(random(8), True, 10)} for _ in range(2)]
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_layer_is_its_heads(name):
    heads = LAYERS[name]()
    x = random(2, 20, WIDTH)
    positions = torch.arange(20)
    distance = positions[:, None] - positions
    logits = torch.stack([head.logits(x, x) for head in heads], 1)
    admitted = heads[0].admits(positions, positions)[None, None]
    expected = materialised(logits, admitted, distance[None, None])
    chosen = torch.tensor([0, 3, 4, 11, 19])
    for sample, found in ((slice(None), observe(heads, x, x)), (chosen, observe(heads, x, x, sample=chosen))):
        for (_, ours), (_, theirs) in zip(found.numbers(), expected.numbers(), strict=True):
            torch.testing.assert_close(ours, theirs[..., sample], equal_nan=True, atol=1e-6, rtol=1e-6)


def test_shared_keys_are_projected_once_and_some_heads_are_enough():
    heads = LAYERS["grouped with biases"]()
    x = random(1, 6, WIDTH)
    assert [part.shape[1] for part in queries_and_keys(heads, x, x)] == [4, 2]
    assert [part.shape[1] for part in queries_and_keys([heads[1], heads[2]], x, x)] == [2, 2]
    assert [part.shape[1] for part in queries_and_keys([heads[0], heads[1], heads[2]], x, x)] == [3, 3]
    whole = observe(heads, x, x)
    for some in ([0], [1, 2], [0, 1, 2], [3, 0]):
        part = observe([heads[i] for i in some], x, x)
        torch.testing.assert_close(part.entropy, whole.entropy[:, some])


def test_own_positions_turn_each_text_alone():
    heads = LAYERS["rotary"]()
    x = random(2, 7, WIDTH)
    positions = torch.stack([torch.arange(7), torch.tensor([0, 1, 2, 0, 1, 2, 3])])
    found = observe(heads, x, x, positions=(positions, positions))
    for text in range(2):
        alone = torch.stack(
            [head.attention(x[text : text + 1], x[text : text + 1]) if text == 0 else
             turned(head, x[text : text + 1], positions[text]) for head in heads], 1
        )  # fmt: skip
        torch.testing.assert_close(found.entropy[text : text + 1], torch.special.entr(alone).sum(-1))


def turned(head, x, positions):
    """Causality by order, rotation by the positions given."""
    logits = head.logits(x, x, (positions, positions))
    return logits.masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf).softmax(-1)


def test_heads_of_two_layers_are_refused():
    first, second = LAYERS["plain"]()[0], LAYERS["soft-cap"]()[0]
    with pytest.raises(Refusal, match="expected heads of one layer"):
        observe([first, second], random(1, 3, WIDTH), random(1, 3, WIDTH))
    with pytest.raises(Refusal, match="at least one head"):
        observe([], random(1, 3, WIDTH), random(1, 3, WIDTH))
