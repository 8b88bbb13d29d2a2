"""Live modules: the same heads as from files, as views through which gradients flow; and torch's own attention."""

import json
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from family_cases import gpt, llama, seq2seq, vision
from locater import checkpoints
from locater.errors import Refusal
from locater.models import Config, open_model
from locater.models import live as modules

CASES = [*seq2seq.CASES, *vision.CASES, llama.CASES[0], next(case for case in gpt.CASES if case.name == "gpt2")]
D_MODEL, HEADS, TOKENS = 24, 4, 9


def randomise(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4) if parameter.dim() > 1 else parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double().eval()


PATCHES = {
    "pos_embed": torch.ones(1, 2, 24),
    "patch_embed.proj.weight": torch.ones(2, 3, 4, 4),
}  # what every image model of timm begins with


def from_file(path, tensors, config):
    """The layers of a state dict with a config beside it."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    with checkpoints.open(path) as checkpoint:
        return list(open_model(Config(checkpoint.config), checkpoint).layers())


def tensors_of(projection):
    """Everything that a projection holds, by name."""
    found = {"weight": projection.weight, "bias": projection.bias}
    for name in ("input_norm", "norm"):
        norm = getattr(projection, name)
        found |= {f"{name}.{part}": getattr(norm, part, None) for part in ("gain", "bias", "kind", "epsilon")}
    return found


def assert_same_heads(live, stored):
    live, stored = list(live), list(stored)
    assert [(layer.block, layer.number) for layer in live] == [(layer.block, layer.number) for layer in stored]
    for ours, theirs in zip(live, stored, strict=True):
        assert not ours.refused and len(ours.heads) == len(theirs.heads) > 0
        for one, other in zip(ours.heads, theirs.heads, strict=True):
            for name in ("layer", "index", "key_index", "block", "rotary", "softcap", "lookback", "lookahead"):
                assert getattr(one, name) == getattr(other, name), name
            assert one.scale == pytest.approx(other.scale, rel=1e-15)
            for side in ("query", "key"):
                pairs = zip(*(tensors_of(getattr(head, side)).items() for head in (one, other)), strict=True)
                for (name, mine), (_, stored_one) in pairs:
                    if isinstance(mine, torch.Tensor):
                        assert torch.equal(mine, stored_one), name
                    else:
                        assert mine == stored_one, name
            if one.position_bias is not None:
                distance = torch.arange(-8, 9)[None]
                assert torch.equal(one.position_bias(distance), other.position_bias(distance))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_live_heads_are_the_files_bit_for_bit(case, tmp_path):
    model = case.build()
    case.save(model, tmp_path)
    with checkpoints.open(tmp_path) as checkpoint:
        stored = list(open_model(Config(checkpoint.config), checkpoint).layers())
    assert_same_heads(modules.open_live(model).layers(), stored)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bart", "vit"])
def test_gradients_reach_the_parameters(name):
    """tr W of every head through the views, against the same trace of the parameters alone."""
    model = next(case for case in CASES if case.name == name).build()
    heads = [head for layer in modules.open_live(model).layers() for head in layer.heads]
    parameters = {id(parameter): name for name, parameter in model.named_parameters()}
    for _ in range(2):  # the second time after a step: the views show the new numbers
        model.zero_grad()
        sum((head.query.weight * head.key.weight).sum() for head in heads).backward()
        reached = {parameters[id(parameter)] for parameter in model.parameters() if parameter.grad is not None}
        assert reached and all(any(part in name for part in ("attn", "attention")) for name in reached)
        fresh = [head for layer in modules.open_live(model).layers() for head in layer.heads]
        assert all(torch.equal(old.query.weight, new.query.weight) for old, new in zip(heads, fresh, strict=True))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
    storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    assert all(head.query.weight.untyped_storage().data_ptr() in storages for head in heads)


def test_the_gradient_of_a_trace_is_the_other_weight():
    model = llama.CASES[0].build()
    head = next(modules.open_live(model).layers()).heads[0]
    (head.query.weight * head.key.weight).sum().backward()
    attention = model.model.layers[0].self_attn
    torch.testing.assert_close(attention.q_proj.weight.grad[: head.d_head], head.key.weight.detach())
    assert not attention.q_proj.weight.grad[head.d_head :].any()


def test_wrappers_leave_names_alone():
    case = llama.CASES[0]
    model, plain = case.build(), case.build()
    model.model.layers[0] = torch.compile(model.model.layers[0], backend="eager")
    assert_same_heads(
        modules.open_live(nn.DataParallel(torch.compile(model, backend="eager"))).layers(),
        modules.open_live(plain).layers(),
    )


def test_a_parametrised_weight_is_read_as_it_is_used():
    model = llama.CASES[0].build()
    projection = model.model.layers[0].self_attn.q_proj
    used = 2 * projection.weight.detach().clone()

    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    nn.utils.parametrize.register_parametrization(projection, "weight", Double())
    head = next(modules.open_live(model).layers()).heads[0]
    assert torch.equal(head.query.weight, used[: head.d_head])
    head.query.weight.sum().backward()
    assert projection.parametrizations.weight.original.grad is not None


# ------------------------------------------------------------------------------------- torch's own attention modules
def recorded(model, call):
    """(query, key, weights per head) of every call of nn.MultiheadAttention, by the module's name."""
    seen, hooks = {}, []
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):

            def record(module, args, kwargs, name=name):
                query, key = args[0], args[1]
                own = module.forward(*args, **kwargs | {"need_weights": True, "average_attn_weights": False})[1]
                seen[name] = (query, key, own) if module.batch_first else (query.mT, key.mT, own)

            hooks.append(module.register_forward_pre_hook(record, with_kwargs=True))
    with torch.no_grad():
        call(model)
    for hook in hooks:
        hook.remove()
    return seen


def assert_own_attention(layers, seen, *, tolerance=1e-10):
    layers = list(layers)
    assert len(layers) == len(seen)
    for layer in layers:
        x_query, x_key, own = seen[layer.query_name.removesuffix(".in_proj")]
        assert not layer.refused and len(layer.heads) == own.shape[1]
        for head in layer.heads:
            torch.testing.assert_close(head.attention(x_query, x_key), own[:, head.index], atol=tolerance, rtol=0)
            for side, x in ((head.query, x_query), (head.key, x_key)):
                if side.input_norm is not None:
                    plain = (x - side.input_norm.bias) / side.input_norm.gain
                    torch.testing.assert_close(
                        plain.var(-1, correction=0), torch.ones(x.shape[:-1]).to(x), atol=1e-3, rtol=0
                    )


def transformer(norm_first):
    """In training mode, since the fused inference path calls no attention module; without dropout."""
    settings = dict(dropout=0.0, batch_first=True, norm_first=norm_first, layer_norm_eps=1e-6)
    return randomise(nn.Transformer(D_MODEL, HEADS, 3, 2, 32, **settings)).train()


def run_transformer(model):
    source, target = torch.randn(2, TOKENS, D_MODEL).double(), torch.randn(2, TOKENS - 2, D_MODEL).double()
    mask = nn.Transformer.generate_square_subsequent_mask(TOKENS - 2, dtype=torch.float64)
    return model(source, target, tgt_mask=mask)


def norms(layers):
    return [(layer.block, layer.heads[0].query.input_norm, layer.heads[0].key.input_norm) for layer in layers]


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_attention_of_a_transformer_is_its_own(norm_first, tmp_path):
    model = transformer(norm_first)
    seen = recorded(model, run_transformer)
    live = list(modules.open_live(model).layers())
    assert_own_attention(live, seen)
    config = {"nhead": HEADS, "norm_first": norm_first, "layer_norm_eps": 1e-6}
    stored = from_file(tmp_path, {f"net.{name}": tensor for name, tensor in model.state_dict().items()}, config)
    order = {"encoder": 0, "decoder": 1, "cross": 2}
    assert_same_heads(sorted(live, key=lambda layer: order[layer.block]), stored)
    without = [block for block, query, key in norms(live) if query is None or key is None]
    assert without == ([] if norm_first else ["encoder", "decoder"])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
def test_stacks_alone_are_read_from_files_too(tmp_path):
    encoder, decoder = transformer(False).encoder, transformer(True).decoder
    for name, stack, norm_first in (("encoder", encoder, False), ("decoder", decoder, True)):
        path = tmp_path / name
        path.mkdir()
        tensors = {f"lm.stack.{key}": tensor for key, tensor in stack.state_dict().items()}
        stored = from_file(path, tensors, {"nhead": HEADS, "norm_first": norm_first, "layer_norm_eps": 1e-6})
        live = sorted(modules.open_live(stack).layers(), key=lambda layer: layer.block == "cross")
        assert_same_heads(live, stored)
        assert stored[-1].heads[0].key.input_norm is None or name == "encoder"
        with pytest.raises(Refusal, match="`nhead`"):
            from_file(path, tensors, {"norm_first": norm_first})


def test_the_config_says_whether_an_encoder_is_causal(tmp_path):
    encoder = transformer(False).encoder
    layer, *_ = from_file(tmp_path, encoder.state_dict(), {"nhead": HEADS, "causal": True})
    assert layer.heads[0].lookahead == 0


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("bias", [False, True])
def test_multihead_attention_anywhere_in_a_model(dtype, tolerance, bias):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.MultiheadAttention(D_MODEL, HEADS, bias=bias, batch_first=True)
            self.rest = nn.ModuleList([nn.MultiheadAttention(D_MODEL, 3, bias=bias, batch_first=True)])
            self.again = self.first  # the same module under a second name is one module

        def forward(self, x):
            x = x + self.first(x, x, x)[0]
            return self.rest[0](x, x[:, 2:], x[:, 2:])

    model = randomise(Model()).to(dtype)
    seen = recorded(model, lambda model: model(torch.randn(2, TOKENS, D_MODEL, dtype=dtype)))
    live = list(modules.open_live(model).layers())
    assert [layer.number for layer in live] == [0, 1] and {layer.block for layer in live} == {"encoder"}
    assert_own_attention(live, seen, tolerance=tolerance)


def test_a_module_may_be_attention_itself():
    attention = randomise(nn.MultiheadAttention(D_MODEL, HEADS, batch_first=True))
    seen = recorded(attention, lambda model: model(*[torch.randn(2, TOKENS, D_MODEL).double()] * 3))
    assert_own_attention(modules.open_live(attention).layers(), {"in_proj": seen[""]})


def test_layers_of_torch_outside_a_stack_have_unknown_inputs():
    layers = nn.ModuleList([nn.TransformerEncoderLayer(D_MODEL, HEADS), nn.TransformerDecoderLayer(D_MODEL, HEADS)])
    live = {layer.block: layer.heads[0] for layer in modules.open_live(layers).layers()}
    assert live["encoder"].query.input_norm is None and live["decoder"].query.input_norm is None
    assert live["cross"].query.input_norm is not None and live["cross"].key.input_norm is None


def test_an_encoder_without_a_last_norm_ends_in_its_last_layers():
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(D_MODEL, HEADS, batch_first=True), 2)
    model = nn.Transformer(D_MODEL, HEADS, 2, 1, 32, custom_encoder=stack, batch_first=True)
    norm = [layer.heads[0].key.input_norm for layer in modules.open_live(model).layers() if layer.block == "cross"][0]
    assert norm is not None and norm.gain is not None
    assert norm.gain.data_ptr() == stack.layers[1].norm2.weight.data_ptr()
    for layer in stack.layers:
        layer.norm_first = True
    assert all(
        layer.heads[0].key.input_norm is None for layer in modules.open_live(model).layers() if layer.block == "cross"
    )
    model.encoder = nn.Identity()
    assert all(
        layer.heads[0].key.input_norm is None for layer in modules.open_live(model).layers() if layer.block == "cross"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(kdim=8), "one width, got 24, 8 and 24"),
        (dict(vdim=8), "one width, got 24, 24 and 8"),
        (dict(add_bias_kv=True), "a further key .bias_k."),
        (dict(add_zero_attn=True), "a further key .add_zero_attn."),
    ],
)
def test_what_is_not_a_head_is_said(options, message):
    model = nn.ModuleDict(
        {"odd": nn.MultiheadAttention(D_MODEL, HEADS, **options), "even": nn.MultiheadAttention(D_MODEL, 2)}
    )
    odd, even = modules.open_live(model).layers()
    assert not odd.heads and len(even.heads) == 2
    with pytest.raises(Refusal, match=message):
        raise Refusal(odd.refused[0])


# --------------------------------------------------------------------------------------------------- timm's shape
class Attention(nn.Module):
    __module__ = "timm.layers.attention"  # people write the same names for other attention, so timm's must be timm's

    def __init__(self, norm):
        super().__init__()
        self.num_heads, self.scale = HEADS, (D_MODEL // HEADS) ** -0.5
        self.qkv = nn.Linear(D_MODEL, 3 * D_MODEL)
        self.q_norm, self.k_norm = norm(D_MODEL // HEADS), norm(D_MODEL // HEADS)
        self.proj = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        self.seen = x, (self.q_norm(q) * self.scale @ self.k_norm(k).mT).softmax(-1)
        return self.proj((self.seen[1] @ v).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, norm, head_norm):
        super().__init__()
        self.norm1, self.attn, self.norm2 = norm(D_MODEL), Attention(head_norm), norm(D_MODEL)
        self.mlp = nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ResPostBlock(Block):
    def forward(self, x):
        x = x + self.norm1(self.attn(x))
        return x + self.norm2(self.mlp(x))


class Image(nn.Module):
    def __init__(self, block, norm, head_norm):
        super().__init__()
        self.blocks = nn.Sequential(*(block(norm, head_norm) for _ in range(3)))

    def forward(self, x):
        return self.blocks(x)


def layer_norm(dims):
    return nn.LayerNorm(dims, eps=1e-6)


def rms_norm(dims):
    return nn.RMSNorm(dims, eps=1e-6)


def identity(dims):
    return nn.Identity()


@pytest.mark.parametrize("block", [Block, ResPostBlock])
@pytest.mark.parametrize(
    ("norm", "head_norm"), [(layer_norm, identity), (layer_norm, layer_norm), (rms_norm, rms_norm)]
)
def test_timms_shape_live_and_stored(block, norm, head_norm, tmp_path):
    model = randomise(Image(block, norm, head_norm))
    model(torch.randn(2, TOKENS, D_MODEL).double())
    live = list(modules.open_live(model).layers())
    name = "vit_base_patch16_rpn_224" if block is ResPostBlock else "vit_medium_patch16_224"
    stored = from_file(
        tmp_path, model.state_dict() | PATCHES, {"architecture": name, "model_args": {"num_heads": HEADS}}
    )
    assert_same_heads(live, stored)
    for layer, own in zip(live, model.blocks, strict=True):
        assert layer.block == "vision" and (layer.heads[0].query.input_norm is None) == (block is ResPostBlock)
        x, weights = own.attn.seen
        for head in layer.heads:
            torch.testing.assert_close(head.attention(x, x), weights[:, head.index], atol=1e-10, rtol=0)


def timm_file(path, config, *, width=24, extra=()):
    tensors = {"blocks.0.attn.qkv.weight": torch.randn(3 * width, width), "blocks.0.norm1.weight": torch.ones(width)}
    return from_file(path, tensors | PATCHES | {name: torch.ones(2) for name in extra}, config)


@pytest.mark.parametrize(
    ("architecture", "width", "num_heads"),
    [
        ("vit_tiny_patch16_224", 192, 3),
        ("deit3_small_patch16_224", 384, 6),
        ("vit_base_patch16_224", 768, 12),
        ("vit_base_patch16_gap_224", 768, 16),
        ("vit_large_patch14_dinov2", 1024, 16),
    ],
)
def test_the_heads_of_timms_architectures(architecture, width, num_heads, tmp_path):
    (layer,) = timm_file(tmp_path, {"architecture": architecture, "num_features": width}, width=width)
    assert len(layer.heads) == num_heads


@pytest.mark.parametrize(
    ("config", "extra", "message"),
    [
        ({}, (), "missing a config.json with `num_heads` or `model_args.num_heads`"),
        ({"architecture": "vit_base_patch16_plus_240", "num_features": 896}, (), "`num_heads`"),
        (
            {"architecture": "vit_base_patch16_rope_224", "num_heads": 4},
            (),
            "plain attention, got vit_base_patch16_rope",
        ),
        ({"architecture": "hiera_tiny_224", "num_heads": 4}, (), "plain attention, got hiera"),
        ({"num_heads": 4}, ("blocks.0.attn.proj_l.weight",), "which timm does not have"),
        ({"num_heads": 4}, ("blocks.0.attn.relative_position_bias_table",), "which timm does not have"),
        ({"num_heads": 5}, (), "multiple of the number of heads"),
    ],
)
def test_a_timm_file_is_not_guessed_at(config, extra, message, tmp_path):
    with pytest.raises(Refusal, match=message):
        timm_file(tmp_path, config, extra=extra)


def test_blocks_of_a_language_model_are_not_taken_for_an_image_models(tmp_path):
    width = 24
    tensors = {"blocks.0.attn.qkv.weight": torch.randn(3 * width, width), "blocks.0.norm1.weight": torch.ones(width)}
    with pytest.raises(Refusal, match="no `patch_embed.proj.weight`, which timm has"):
        from_file(tmp_path, tensors | {"tok_emb.weight": torch.ones(5, width)}, {"num_heads": 4})


def refused_by(attention):
    (layer,) = modules.open_live(nn.ModuleDict({"attn": attention})).layers()
    return layer.refused[0]


def test_live_attention_with_more_to_it_is_refused():
    windowed = Attention(identity)
    windowed.relative_position_bias_table = nn.Parameter(torch.ones(3))
    assert "also relative_position_bias_table" in refused_by(windowed)

    class Turning(Attention):
        __module__ = Attention.__module__

        def forward(self, x, rope=None):
            return x

    assert "also rope" in refused_by(Turning(identity))
    assert "a layer norm or an RMS norm at attn.q_norm, got BatchNorm1d" in refused_by(Attention(nn.BatchNorm1d))
    uneven = Attention(identity)
    uneven.num_heads = 5
    assert "5 heads of one size" in refused_by(uneven)
    uneven.num_heads = "4"
    assert "got '4'" in refused_by(uneven)


# ------------------------------------------------------------------------------------------------ the explicit form
class Own(nn.Module):
    """Attention of a kind that nobody has seen."""

    def __init__(self):
        super().__init__()
        self.to_q, self.to_k, self.to_v = nn.Linear(D_MODEL, 24), nn.Linear(D_MODEL, 12), nn.Linear(D_MODEL, 12)


def test_named_projections_are_heads():
    model = nn.Sequential(Own(), Own())
    entries = [(model[0].to_q, model[0].to_k, 4, 2), ("1.to_q", "1.to_k", 4, 2)]
    first, second = modules.open_live(model, heads=entries).layers()
    assert [first.number, second.number] == [0, 1] and second.query_name == "1.to_q"
    assert len(first.heads) == 4 and [head.key_index for head in first.heads] == [0, 0, 1, 1]
    head = second.heads[3]
    assert torch.equal(head.query.weight, model[1].to_q.weight[18:]) and head.scale == pytest.approx(6**-0.5)
    assert torch.equal(head.key.bias, model[1].to_k.bias[6:])


@pytest.mark.parametrize(("layout", "first_key"), [("qkv", 16), ("grouped", 8)])
def test_one_fused_projection_is_heads(layout, first_key):
    model = nn.ModuleDict({"qkv": nn.Linear(D_MODEL, (4 + 2 * 2) * 4)})
    (layer,) = modules.open_live(model, heads=[("qkv", 4, 2, layout)]).layers()
    assert len(layer.heads) == 4 and torch.equal(layer.heads[0].query.weight, model["qkv"].weight[:4])
    assert torch.equal(layer.heads[0].key.weight, model["qkv"].weight[first_key : first_key + 4])
    if layout == "qkv":
        (same,) = modules.open_live(model, heads=[(model["qkv"], 4, 2)]).layers()
        assert torch.equal(same.heads[3].key.bias, layer.heads[3].key.bias)


def test_names_do_not_make_a_vision_model():
    class FusedAttention(Attention):
        __module__ = "mine"

    with pytest.raises(Refusal, match=r"`attn` \(FusedAttention\): .* locater.Live\(model, sample=batch\)"):
        modules.open_live(nn.ModuleDict({"attn": FusedAttention(identity)})).layers()


def test_conv1d_is_turned():
    model = next(case for case in gpt.CASES if case.name == "gpt2").build()
    projection = model.transformer.h[0].attn.c_proj
    (layer,) = modules.open_live(model, heads=[(projection, model.transformer.h[1].attn.c_proj, 4, 4)]).layers()
    assert torch.equal(layer.heads[1].query.weight, projection.weight.T[12:24])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("0.to_q", "0.to_k", 4), r"entries \(query, key, num_heads, num_key_heads\) or \(fused, num_heads"),
        (("0.to_q", 4), r"entries \(query, key"),
        (("0.to_q", 4, 3), "4 queries, 3 keys and as many values of one size in `0.to_q`, got 24 rows"),
        (("0.to_q", 4, 4, "mixed"), "a layout among qkv, grouped, codegen, got 'mixed'"),
        (("0.to_q", "0.to_q", 4, 4), "a projection of its own"),
        (("0.to_q", "0.to_x", 4, 4), "part of the model, got 0.to_x"),
        (("0.to_q", "0.to_k", 4, 4), "24 rows in `0.to_q` and 12 in `0.to_k`"),
        (("0.to_q", "0.to_k", 5, 2), "5 query heads"),
        (("0.to_q", "0.to_k", True, 2), "positive whole number of heads, got True"),
        (("0", "0.to_k", 4, 2), "a weight of two dimensions, got Own"),
    ],
)
def test_what_cannot_be_named(entry, message):
    with pytest.raises(Refusal, match=message):
        modules.open_live(nn.Sequential(Own()), heads=[entry]).layers()


def test_an_unknown_model_is_described():
    with pytest.raises(Refusal, match=r'`0` \(Own\), .* and 2 more: .*heads=\[\("0.to_q", "0.to_k", num_heads'):
        modules.open_live(nn.Sequential(*(Own() for _ in range(6)))).layers()
    with pytest.raises(Refusal, match="no module that looks like attention"):
        modules.open_live(nn.Linear(2, 2)).layers()


def test_an_unknown_config_is_not_searched():
    """A model type that no table knows may have further attention that a search would miss."""
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(D_MODEL, HEADS)})
    model.config = {"model_type": "unheard-of"}
    with pytest.raises(Refusal, match=r"unheard-of.*`attn` \(MultiheadAttention\)"):
        modules.open_live(model).layers()


def test_a_config_may_be_a_dataclass():
    @dataclass
    class Settings:
        model_type: str = "llama"
        num_hidden_layers: int = 2
        num_attention_heads: int = 4
        num_key_value_heads: int = 2
        hidden_size: int = 48
        rms_norm_eps: float = 1e-6

    model = llama.CASES[0].build()
    held = nn.ModuleDict({"model": model.model})
    held.config = Settings()
    assert_same_heads(modules.open_live(held).layers(), modules.open_live(model).layers())


def test_tensors_of_a_module():
    tensors = modules.ModuleTensors(nn.DataParallel(nn.Linear(3, 2)))
    assert set(tensors.names) == {"weight", "bias"} and tensors.shape("weight") == (2, 3)
    assert tensors.read("weight", (1, 2)).data_ptr() == tensors.read("weight")[1:].data_ptr()
    with pytest.raises(Refusal, match="a tensor in Linear, got other"):
        tensors.read("other")
