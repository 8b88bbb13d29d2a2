"""Every family against the Hugging Face model itself: attention from the stored tensors equals the model's own."""

from collections import defaultdict
from functools import reduce

import pytest
import torch

from family_cases import CASES
from locater import checkpoints
from locater.models import Config, find_family, read_heads
from locater.models.module import find_stack
from locater.models.neighbours import expected_biases, misplaced_bias

AS_STORED = ("timm", "mpt")  # families whose configs do not say which biases there are
ATTRIBUTES = {
    "decoder": ("decoder_attentions", "attentions"),
    "encoder": ("encoder_attentions", "text_model_output.attentions", "attentions"),
    "cross": ("cross_attentions",),
    "vision": ("vision_model_output.attentions", "attentions"),
}


def all_layers(tensors, config):
    config = Config(config)
    family = find_family(config, tensors.names)
    found = [stack for row in family.attention if (stack := find_stack(row, config, tensors))]
    missing = [f"{len(at)} of {at[0].num_layers} layers" for at in found if len(at) < at[0].num_layers]
    missing += [partial] if (partial := family.partial and family.partial(config)) else []
    missing += [misplaced for at in found if family.model_types and (misplaced := misplaced_bias(at))]
    for stack in found if family.model_types and family.name not in AS_STORED else ():
        unsaid = [module for module, has_bias in expected_biases(stack[0]) if has_bias is None]
        assert not unsaid, f"{family.name} does not say whether there is a bias: {unsaid}"
    named = config.get("model_type") not in family.model_types
    whole = f"by its tensor names, as {family.name}, not run" if named else "COMPLETE"
    yield f"PARTIAL: {', '.join(missing)}" if missing else whole
    for stack in found:
        yield from map(read_heads, stack)


def own_attention(model, case):
    """The model's attention probabilities per block, and the input that every module saw."""
    seen, normed = defaultdict(list), []
    hooks = [
        module.register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0]) if args else None)
        for name, module in model.named_modules()
    ]
    norms = (module for module in model.modules() if "norm" in type(module).__name__.lower())
    hooks += [norm.register_forward_hook(lambda _, args, output: normed.append(output)) for norm in norms]
    with torch.no_grad():
        output = model(**case.inputs(model.config), output_attentions=True)
    for hook in hooks:
        hook.remove()
    return output, seen, normed


def of_block(output, block):
    """Attention of every layer that has it: layers of another kind leave no gap."""
    for path in ATTRIBUTES[block]:
        if (found := reduce(lambda part, name: getattr(part, name, None), path.split("."), output)) is not None:
            return iter(found)
    raise AssertionError(f"the model gave no attentions for {block}: {list(output.keys())}")


def check_input_norm(norm, x, normed):
    """Without the norm's gain and bias x is normalised at every token; without a norm, x came out of none."""
    if norm is None:
        assert not any(x.shape == other.shape and torch.equal(x, other) for other in normed)
        return
    plain = (x if norm.bias is None else x - norm.bias) / (1 if norm.gain is None else norm.gain)
    torch.testing.assert_close(plain.square().mean(-1), torch.ones(x.shape[:-1]), atol=2e-3, rtol=0)
    if norm.kind == "layer":
        torch.testing.assert_close(plain.mean(-1), torch.zeros(x.shape[:-1]), atol=2e-3, rtol=0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_attention_from_the_file_is_the_models_own(case, tmp_path):
    model = case.build()
    case.save(model, tmp_path)
    output, seen, normed = own_attention(model, case)
    calls, own = defaultdict(int), {}
    with checkpoints.open(tmp_path) as checkpoint:
        coverage, *layers = all_layers(checkpoint, checkpoint.config)
    assert coverage == case.coverage
    assert layers
    for layer in layers:
        assert not layer.refused
        call = calls[layer.block, layer.query_name]  # a module shared by several layers is called once for each
        calls[layer.block, layer.query_name] += 1
        x_query, x_key = (seen[case.module(name)][call] for name in (layer.query_name, layer.key_name))
        check_input_norm(layer.heads[0].query.input_norm, x_query, normed)
        check_input_norm(layer.heads[0].key.input_norm, x_key, normed)
        theirs = next(own.setdefault(layer.block, of_block(output, layer.block)))
        assert len(layer.heads) == theirs.shape[1]
        assert theirs.std(-1).mean() > 0.02, "attention so uniform that the test would prove nothing"
        for head in layer.heads:
            torch.testing.assert_close(head.attention(x_query, x_key), theirs[:, head.index], atol=1e-5, rtol=0)
            folded = head.folded()
            assert folded.query.input_norm is None
    assert not any(list(left) for left in own.values()), "the model has further layers with attention"
