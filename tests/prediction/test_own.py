"""`predict` on attention that no table knows: the windows themselves show its heads."""

import pytest
import torch
from test_predict import assert_measured

from locater import Live
from locater.errors import Refusal
from locater.prediction.numbers import first_query
from locater.prediction.predict import Effort, Tokens, predict
from locater.prediction.windows import split_windows
from written_models import (
    HEADS,
    Einsum,
    Fused,
    Grouped,
    Interleaved,
    Net,
    NormThenRotary,
    NotCausal,
    Own,
    Separate,
    Window,
    WithoutSoftmax,
)

LENGTH = 48
QUICK = Effort(window=LENGTH, calibration=6, test=2, texts=2)


def tokens():
    return torch.randint(50, (8, LENGTH), generator=torch.Generator().manual_seed(2))


def assert_all_measured(net, found):
    """Against the softmax of the logits that the modules themselves keep."""
    start = first_query(LENGTH)
    with torch.no_grad():
        net(split_windows(tokens(), num_test=2).test)
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH))[None, None, start:]
    assert [(row.layer, row.head) for row in found.heads] == [(n, h) for n in range(2) for h in range(HEADS)]
    for row in found.heads:
        logits = net.blocks[row.layer].attn.kept[:, row.head, None, start:]
        assert_measured(row, logits, distance)


KINDS = [Separate, Fused, Interleaved, Grouped, NormThenRotary, NotCausal, Window, Own, Einsum]


@pytest.mark.parametrize("kind", KINDS)
def test_own_attention_is_found_on_the_windows(kind):
    net = Net(kind)
    found = predict(net, text=Tokens(tokens()), effort=QUICK)
    assert_all_measured(net, found)
    for name in ("normalised_entropy", "sink_mass"):
        assert found.calibration_error[name] < 0.1
    assert net.training and not any(module._forward_pre_hooks for module in net.modules())


def test_named_projections():
    """Attention that calls not even softmax: what it is cannot be seen, so it is said."""
    net = Net(WithoutSoftmax)
    with pytest.raises(Refusal, match="name the projections by heads="):
        predict(net, text=Tokens(tokens()), effort=QUICK)
    named = [(f"blocks.{n}.attn.q_proj", f"blocks.{n}.attn.k_proj", HEADS, HEADS) for n in range(2)]
    with pytest.raises(Refusal, match="causal=True or causal=False with heads="):
        predict(Live(net, heads=named), text=Tokens(tokens()), effort=QUICK)
    found = predict(Live(net, heads=named, causal=True), text=Tokens(tokens()), effort=QUICK)
    assert_all_measured(net, found)
    assert any("without positions" in note for note in found.left_out)


@pytest.mark.parametrize("kind", [Separate, NormThenRotary])
def test_projections_are_not_named_where_a_kernel_shows_more(kind):
    """By hand a rotary model would be measured without its rotation."""
    named = [(f"blocks.{n}.attn.q_proj", f"blocks.{n}.attn.k_proj", HEADS, HEADS) for n in range(2)]
    with pytest.raises(Refusal, match="a call of scaled_dot_product_attention; leave heads=… out"):
        predict(Live(Net(kind), heads=named, causal=True), text=Tokens(tokens()), effort=QUICK)


def test_torch_layers_with_the_batch_second():
    """Causal by the mask of the call: what one layer of torch does, as its own weights say."""

    class Second(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.layer = torch.nn.Embedding(50, 32), torch.nn.TransformerEncoderLayer(32, 4, 64)
            self.layer.self_attn.in_proj_weight.data *= 3

        def forward(self, ids):
            mask = torch.nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
            return self.layer(self.embed(ids).transpose(0, 1), src_mask=mask, is_causal=True)

    net = Second().eval()
    found = predict(net, text=Tokens(tokens()), effort=QUICK)
    x = net.embed(split_windows(tokens(), num_test=2).test).transpose(0, 1)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)
    _, p = net.layer.self_attn(x, x, x, attn_mask=mask, average_attn_weights=False)
    expected = p[:, :, first_query(LENGTH) :, 0].mean((0, 2)).tolist()
    assert [row.measured.sink_mass for row in found.heads] == pytest.approx(expected, abs=1e-6)


def test_random_ids_through_an_own_module():
    net = Net(Fused)
    with pytest.raises(Refusal, match="a table of embeddings that ids look up; give windows as Tokens"):
        predict(net, text="random")
    net.get_input_embeddings = lambda: net.embed
    assert len(predict(net, text="random", effort=QUICK).heads) == 2 * HEADS
