"""Behaviour estimated from weights: against slow paths, against attention itself, and the words that come of it."""

from dataclasses import replace

import pytest
import torch
import transformers

from locater import scan
from locater.behaviour import APART, ESTIMATED, NOT_ESTIMATED, RECORD, Told, looks
from locater.head import Head
from locater.models.config import SCALED
from locater.positions import Rotary
from locater.projections import Norm, Projection
from locater.quantities import FIRST_QUERY, NEAR
from locater.report.headline import headline
from locater.report.views import views_of
from locater.scanning import direct, estimate
from locater.scanning.batch import HeadBatch, batches
from locater.scanning.products import multiply
from locater.scanning.rows import failures, parse_conditions
from predict_cases import model

pytestmark = pytest.mark.quick

D_MODEL, D_HEAD, NUM_LAYERS = 24, 16, 8


def head(**changed) -> Head:
    parts = dict(bias=0.3 * torch.randn(D_HEAD), input_norm=Norm("rms", torch.rand(D_MODEL), torch.randn(D_MODEL)))
    # Rows that differ as those of trained heads do.
    rows = torch.linspace(0.2, 2, D_HEAD)[torch.randperm(D_HEAD // 2).repeat_interleave(2) * 2][:, None]
    query, key = (Projection(rows * torch.randn(D_HEAD, D_MODEL), **parts) for _ in range(2))
    rotary = Rotary(10_000.0, D_HEAD)  # four of its eight pairs turn within a text
    return Head(0, 0, query, key, **dict(scale=0.3, rotary=rotary, lookahead=0) | changed)


def slow_near(one: Head, *, swing: float) -> float:
    """Pair by pair and query by query, the bias by rotating it."""
    query, key = one.query.folded(), one.key.folded()
    pairs = one.rotary.pairs.tolist()
    strength = [float(query.weight[pair].norm() * key.weight[pair].norm()) for pair in pairs]
    turning = [row for pair in pairs for row in pair]
    still = sum(float(query.weight[r].norm() * key.weight[r].norm()) for r in range(D_HEAD) if r not in turning)
    distances = torch.arange(estimate.LENGTH)
    kernel = torch.zeros(estimate.LENGTH, dtype=torch.float64)
    for frequency, share in zip(one.rotary.frequencies(estimate.LENGTH), strength, strict=True):
        kernel += swing * share / (sum(strength) + still) * (frequency * distances).cos()
    turned = one.rotary.rotate(query.bias.double().expand(estimate.LENGTH, -1), distances, length=estimate.LENGTH)
    still_key = one.rotary.rotate(key.bias.double()[None], torch.zeros(1, dtype=torch.long), length=estimate.LENGTH)[0]
    rows = sorted(turning)
    kernel += turned[:, rows] @ still_key[rows] * one.scale
    near = []
    for position in range(FIRST_QUERY, estimate.LENGTH):
        seen = position + 1 if one.lookback is None else min(position, one.lookback) + 1
        near.append(kernel[:seen].softmax(0)[:NEAR].sum())
    return float(torch.stack(near).mean())


def estimated(*heads: Head) -> list[float | None]:
    return [own for batch in batches(heads) for own in estimated_together(batch)[0]]


def estimated_together(batch: HeadBatch) -> tuple[list[float | None], list[tuple[float, float] | None]]:
    products = multiply(batch, raw=False)
    return estimate.estimate_near_mass(batch, products.grams, products.biases, None, num_layers=NUM_LAYERS)


@pytest.mark.parametrize(
    "changed",
    [
        dict(),
        dict(lookback=40),
        dict(rotary=Rotary(100.0, 8, start=2, interleaved=True)),
    ],
    ids=["all rows", "window", "some rows"],
)
@pytest.mark.parametrize(("layer", "swing"), [(0, 7.0), (2, 10.5), (4, 14.0), (7, 14.0)])
def test_rotary_estimate_is_the_softmax_of_its_kernel(changed, layer, swing):
    torch.manual_seed(3)
    heads = [replace(head(**changed), layer=layer) for _ in range(2)]
    for one, (near,), ((low, high),) in ((one, *estimated_together(HeadBatch((one,)))) for one in heads):
        assert near == pytest.approx(slow_near(one, swing=swing), rel=1e-5)
        assert 0 <= low < near < high <= 1 and high - low <= 2 * estimate.ROTARY_MARGIN + 1e-9


def test_fast_pairs_are_near_and_slow_ones_are_not():
    fast, slow = torch.full((D_HEAD,), 0.01), torch.full((D_HEAD,), 0.01)
    fast[[0, 8]], slow[[7, 15]] = 1.0, 1.0  # the pairs of half-split rows: 0 turns by a radian a token, 7 by 3e-4

    def with_rows(rows):
        weight = rows[:, None] * torch.randn(D_HEAD, D_MODEL, generator=torch.Generator().manual_seed(0))
        return replace(head(), query=Projection(weight), key=Projection(weight))

    found = estimated(with_rows(fast), with_rows(slow))
    uniform = (NEAR / torch.arange(FIRST_QUERY + 1, estimate.LENGTH + 1)).mean()
    assert found[1] == pytest.approx(float(uniform), abs=0.03)
    assert found[0] > found[1]


def test_nothing_is_said_where_nothing_is_known():
    few = Rotary(10_000.0, 8)  # two of its four pairs turn within a text: in a decoder with such heads it did not hold
    for changed in (dict(lookahead=None), dict(block="cross"), dict(rotary=None), dict(rotary=few)):
        assert estimated(head(**changed)) == [None]


def test_nothing_is_estimated_without_the_positions_of_a_model(tmp_path):
    """The paper's model, which the demo trains, has sinusoids that are not stored: its words alone know no distance."""
    from locater_lab.train import run
    from training_cases import tiny

    (tmp_path / "notes.txt").write_text("".join(f"{n} and {n * 37 % 101} .\n" for n in range(2000)))
    run.start(tiny(tmp_path / "notes.txt", steps=2), tmp_path / "run", say=lambda sentence: None)
    found = scan(tmp_path / "run" / "model")
    assert found.heads and all(row.estimated_near_mass is None for row in found.heads)
    assert not [told for told in found.behaviour() if "estimate" in told.sentence]


def test_depth_is_that_of_the_model_not_of_the_layers_that_were_asked_for():
    sizes = dict(vocab_size=60, hidden_size=32, num_attention_heads=2, intermediate_size=48)
    net = transformers.LlamaModel(transformers.LlamaConfig(num_hidden_layers=4, **sizes))
    for layer in net.layers:
        layer.self_attn.q_proj.weight.data *= 200 * torch.linspace(0.1, 2, 8).repeat(4)[:, None]
    rows = {(row.layer, row.head): row for row in scan(net).heads}
    assert all(row.estimated_near_mass is not None for row in rows.values())
    for row in scan(net, layers=[1]).heads:
        assert row.estimated_near_mass == rows[row.layer, row.head].estimated_near_mass
    for layer in net.layers:  # the same weights everywhere: then depth alone tells layers apart
        layer.load_state_dict(net.layers[0].state_dict())
    near = [row.estimated_near_mass for row in scan(net).heads if row.head == 0]
    assert near[0] < near[1] < near[2] == pytest.approx(near[3])


def test_nothing_is_estimated_where_logits_are_small():
    """As early in training; how large they are under QK-norm is the norm's affair."""
    trained = [head(), head()]
    assert None not in estimated(*trained)
    early = [replace(one, scale=one.scale / 1000) for one in trained]
    assert estimated(*early) == [None, None]
    norm = Norm("rms", torch.ones(D_HEAD))
    normed = [replace(one, query=replace(one.query, norm=norm), key=replace(one.key, norm=norm))
              for one in early]  # fmt: skip
    assert None not in estimated(*normed)


@pytest.mark.parametrize("start", ["normal_", "uniform_", "orthogonal_", "xavier_uniform_"])
@pytest.mark.parametrize("heads", [2, 8])
def test_nothing_is_estimated_from_fresh_weights(start, heads):
    """Their pairs are equally strong but for chance, which reads as near; tokens have no part in common yet."""
    sizes = dict(vocab_size=60, hidden_size=64, num_attention_heads=heads, head_dim=16, intermediate_size=48)
    net = transformers.LlamaModel(transformers.LlamaConfig(num_hidden_layers=4, **sizes))
    for layer in net.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj):
            getattr(torch.nn.init, start)(linear.weight)
    assert all(row.estimated_near_mass is None for row in scan(net).heads)


def near_of(attention: torch.Tensor) -> list[float]:
    """Of the heads of a layer (heads, queries, keys), in the words of the estimate; keys farther off weigh as those."""
    near, both = [], bool(attention.triu(1).any())
    far_keys = (direct.SEEN - 2 * NEAR, 256 - 2 * NEAR) if both else (96 - NEAR, 160 - NEAR)
    for own in attention:
        others = own[FIRST_QUERY :: direct.EVERY, 1:] / own[FIRST_QUERY :: direct.EVERY, 1:].sum(-1, keepdim=True)
        distance = torch.arange(FIRST_QUERY, direct.SEEN, direct.EVERY)[:, None] - torch.arange(1, direct.SEEN)
        share = (others * (distance.abs() < NEAR)).sum(-1)
        far = (1 - share) * far_keys[1] / far_keys[0]
        near.append(float((share / (share + far)).mean()))
    return near


IDS = torch.randint(0, 60, (direct.SEEN,), generator=torch.Generator().manual_seed(0))


def test_direct_path_is_the_first_layer_s_attention():
    """Layer 0 of GPT-2 sees exactly embedding plus position through its norm; the model's own attention says so."""
    net = model("gpt2")
    block = net.h[0]
    for parameter in (block.ln_1.weight, block.ln_1.bias, block.attn.c_attn.bias):  # as after training
        parameter.data += 0.5 * torch.randn(parameter.shape)
    with torch.no_grad():
        near = near_of(net(IDS[None], output_attentions=True).attentions[0][0])
    rows = [row for row in scan(net).heads if row.layer == 0]
    assert [row.estimated_near_mass for row in rows] == pytest.approx(near, rel=1e-4)


@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("name", ["Bart", "PLBart", "Pegasus", "Marian", "Blenderbot"])
def test_direct_path_scales_embeddings_as_the_model_does(name, scaled, tmp_path):
    """Encoder and decoder of each, which have tables of their own, in a file as in memory."""
    torch.manual_seed(1)
    sides = {f"{side}_{part}": n for side in ("encoder", "decoder") for part, n in
             (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))}  # fmt: skip
    config = getattr(transformers, f"{name}Config")(
        vocab_size=60, d_model=32, max_position_embeddings=128, scale_embedding=scaled, pad_token_id=1, **sides
    )
    net = getattr(transformers, f"{name}Model")(config).eval()
    net.set_attn_implementation("eager")
    for part, weight in net.named_parameters():
        if weight.dim() == 2 and ("embed" in part or "shared" in part or "q_proj" in part or "k_proj" in part):
            weight.data = torch.randn_like(weight) * (0.1 if "embed" in part or "shared" in part else 0.5)
    with torch.no_grad():
        found = net(IDS[None], decoder_input_ids=IDS[None], output_attentions=True)
    near = {"encoder": near_of(found.encoder_attentions[0][0]), "decoder": near_of(found.decoder_attentions[0][0])}
    net.save_pretrained(tmp_path)
    for source in (net, tmp_path):
        rows = {block: [row for row in scan(source).heads if row.block == block] for block in near}
        assert {block: [row.estimated_near_mass for row in own] for block, own in rows.items()} == {
            block: pytest.approx(own, rel=1e-3) for block, own in near.items()
        }


@pytest.mark.parametrize("name", SCALED)
def test_types_that_scale_embeddings_by_default(name):
    assert transformers.models.auto.configuration_auto.CONFIG_MAPPING[name]().scale_embedding is True


def test_nothing_is_estimated_behind_a_norm_of_embeddings_that_is_not_read():
    sizes = dict(encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2)
    net = transformers.MBartModel(transformers.MBartConfig(vocab_size=60, d_model=32, **sizes))
    assert all(row.estimated_near_mass is None for row in scan(net).heads)


@pytest.mark.parametrize(("name", "known"), [("llama", False), ("qwen3", False), ("bert", True), ("t5", None)])
def test_scan_estimates_what_it_can(name, known):
    """These decoders have heads of four pairs, too few."""
    found = scan(model(name))
    rows = [row for row in found.heads if row.block != "cross"]
    assert all((row.estimated_near_mass is not None) == (known is not False) for row in rows) or known is None
    assert all(row.estimated_near_mass is None for row in found.heads if row.block == "cross")
    assert all(row.estimated_near_mass is None for row in scan(model(name), raw=True).heads)
    record = found.to_json()["heads"][0]
    assert {"estimated_near_mass", "estimated_near_mass_interval"} <= set(record)


def test_positions_that_were_not_measured_get_no_words():
    """Buckets and ALiBi: an estimate without an interval, of which neither the summary nor the page make words."""
    found = scan(model("t5"))
    rows = [replace(row, estimated_near_mass=0.9) for row in found.heads if row.block == "encoder"]
    assert rows and all(row.estimated_near_mass_interval is None for row in rows)
    assert not [told for told in replace(found, heads=tuple(rows)).behaviour() if "estimate" in told.sentence]
    said = [sentence.text for sentence in headline(views_of([found.to_json()]), [])]
    assert not [sentence for sentence in said if "nearest tokens" in sentence]


def test_qk_norm_gains_move_the_estimate():
    torch.manual_seed(0)
    sizes = dict(vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    net = transformers.Qwen3Model(transformers.Qwen3Config(**sizes, intermediate_size=48, head_dim=16))
    near = {}
    for pair in ((2, 10), (6, 14)):  # one that turns by a tenth of a radian a token, one by a thousandth
        for norm in (net.layers[0].self_attn.q_norm, net.layers[0].self_attn.k_norm):
            norm.weight.data[:] = 0.05
            norm.weight.data[list(pair)] = 1.0
        near[pair] = [row.estimated_near_mass for row in scan(net).heads]
    assert all(fast > slow + 0.1 for fast, slow in zip(*near.values(), strict=True))


def test_words_of_behaviour_come_from_the_estimate_only():
    rows = list(scan(model("llama")).heads)
    near, far = (replace(rows[0], head=n, estimated_near_mass=v, estimated_near_mass_interval=(0.0, 1.0))
                 for n, v in enumerate((0.9, 0.1)))  # fmt: skip
    unsure, unknown = replace(near, head=2, estimated_near_mass=0.5), replace(near, head=3, estimated_near_mass=None)
    assert [looks(row.estimated_near_mass) for row in (near, far, unsure, unknown)] == ["near", "far", None, None]
    whole = scan(model("llama"))
    told = [one.sentence for one in replace(whole, heads=(near, far, unsure, unknown)).behaviour()]
    assert told == [
        f"1 of 3 heads probably looks mostly at the 16 nearest tokens ({ESTIMATED}, {APART}).",
        "1 of 3 heads probably looks mostly beyond the 16 nearest tokens.",
        "1 head is too close to call; 1 has no estimate.",
        RECORD,
        "Look first at decoder 0.0, which probably looks mostly at the 16 nearest tokens (90%, likely 0% to "
        "100%); decoder 0.1, which probably looks mostly beyond the 16 nearest tokens (90%, likely 0% to 100%): "
        "the surest estimates.",
    ]
    told = [one.sentence for one in replace(whole, heads=(near, far, unknown)).behaviour()]
    assert told[2:4] == ["1 head has no estimate.", RECORD]
    assert replace(whole, heads=(unknown,)).behaviour() == [Told(NOT_ESTIMATED, ())]
    unjudged = replace(near, estimated_near_mass_interval=None)  # no model with such positions was measured
    assert replace(whole, heads=(unjudged,)).behaviour() == [Told(NOT_ESTIMATED, ())]


def test_layers_that_share_their_weights_are_shown_once():
    whole = scan(model("llama"))
    (near, *_) = whole.heads
    rows = [replace(near, layer=n, estimated_near_mass=0.9, estimated_near_mass_interval=(0.0, 1.0)) for n in range(4)]
    (*_, first) = replace(whole, heads=tuple(rows)).behaviour()
    assert first.heads == (0,)
    (*_, first) = replace(whole, heads=(*rows, replace(rows[0], head=1, estimated_near_mass=0.95))).behaviour()
    assert first.heads == (4, 0)


def test_conditions_on_estimates_skip_what_is_not_known():
    row = scan(model("llama")).heads[0]
    known, unknown = replace(row, estimated_near_mass=0.2), replace(row, estimated_near_mass=None)
    (condition,) = parse_conditions("estimated_near_mass<0.3")
    assert failures([condition], [known, unknown]) == {condition: [known]}
