"""Quantise two matrices with each method's own tool, and keep what it stores beside what it dequantises to.

    python dev/quantise.py METHOD …      writes tests/quantised/METHOD.safetensors

The tools are not needed to run the tests, which read the files. Install the one that a method names, on a CPU, with
`pip install --no-deps`.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors.torch import save_file

FOLDER = Path(__file__).parents[1] / "tests" / "quantised"
GROUP = 32
NAMES = {"q": "model.layers.0.self_attn.q_proj", "k": "model.layers.0.self_attn.k_proj"}


def originals(seed: int = 0) -> dict[str, torch.Tensor]:
    """Queries of two heads and keys of one, rows and columns of uneven size."""
    generator = torch.Generator().manual_seed(seed)
    uneven = 2 ** torch.randn(64, generator=generator)
    return {
        name: torch.randn(rows, 64, generator=generator) * uneven * 2 ** torch.randn(rows, 1, generator=generator)
        for name, rows in (("q", 64), ("k", 32))
    }


def affine(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points by group of inputs, from the extremes: (out, groups) each."""
    groups = weight.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = ((high - low) / (2**bits - 1)).half().float()
    return scale, (-low / scale).round().clamp(1, 2**bits - 1)


def gptq(bits: int, form: str):
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    def quantise(weight):
        linear = torch.nn.Linear(64, len(weight), bias=False)
        linear.weight.data = weight
        layer = TorchLinear(
            bits=bits, group_size=GROUP, sym=False, desc_act=True, in_features=64, out_features=len(weight), bias=False
        )
        order = torch.randperm(64, generator=torch.Generator().manual_seed(1)) // GROUP
        scale, zero = affine(weight[:, order.argsort(stable=True)], bits)
        layer.pack(linear, scale, zero, order.int())
        layer.post_init()
        stored = {name: getattr(layer, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
        if form == "gptq":  # as the first format is written: one less, word by word
            ones = sum(1 << place for place in range(0, 32, bits))
            stored["qzeros"] = (stored["qzeros"].long() - ones).to(torch.int32)
        layer.scales = layer.scales.float()  # else the products are rounded to float16
        return stored, layer.dequantize_weight().T

    settings = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": True, "checkpoint_format": form}
    return "gptqmodel", settings, quantise


def awq():
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    def quantise(weight):
        linear = torch.nn.Linear(64, len(weight), bias=False)
        linear.weight.data = weight
        scale, zero = affine(weight, 4)
        layer = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scale.T.contiguous(), zeros=zero.T.contiguous())
        stored = {name: getattr(layer, name) for name in ("qweight", "qzeros", "scales")}
        return stored, dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, GROUP).T

    return "autoawq", {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, quantise


def bitsandbytes(kind: str, nested: bool):
    import bitsandbytes.functional as functional

    def quantise(weight):
        codes, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested, blocksize=64)
        stored = {"weight": codes} | {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
        return stored, functional.dequantize_4bit(codes, state)

    return "bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}, quantise


def bitsandbytes_int8():
    import bitsandbytes.functional as functional

    def quantise(weight):
        codes, maxima, _ = functional.int8_vectorwise_quant(weight.half())
        stored = {"weight": codes, "SCB": maxima, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return stored, functional.int8_vectorwise_dequant(codes, maxima)

    return "bitsandbytes", {"quant_method": "bitsandbytes", "load_in_8bit": True}, quantise


def compressed(**arguments):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weights = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    form = infer_module_format(torch.nn.Linear, scheme)

    def quantise(weight):
        step = {"tensor": weight.shape, "channel": (1, 64)}.get(weights.strategy, (1, weights.group_size or 64))
        step = tuple(weights.block_structure or step)
        blocks = weight.unflatten(1, (-1, step[1])).unflatten(0, (-1, step[0]))
        low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        state = {"weight": weight}
        if weights.strategy == "tensor_group":
            state["weight_global_scale"] = generate_gparam(weight.min(), weight.max())
        scale, zero = calculate_qparams(low, high, weights, global_scale=state.get("weight_global_scale"))
        state |= {"weight_scale": scale, "weight_zero_point": zero}
        compressor = BaseCompressor.get_value_from_registry(form.value)
        stored = compressor.compress(state, scheme)
        if "weight_global_scale" in stored:  # its own decompression rounds to bfloat16
            codes = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, dtype=torch.float32)
            scale, whole = stored["weight_scale"].float(), stored["weight_global_scale"]
            return stored, dequantize(x_q=codes, scale=scale, global_scale=whole, args=weights)
        return stored, compressor.decompress(stored, scheme)["weight"].float()

    group = json.loads(scheme.model_dump_json(exclude_none=True))
    settings = {"quant_method": "compressed-tensors", "format": form.value, "config_groups": {"group_0": group}}
    return "compressed-tensors", settings, quantise


def mlx(**arguments):
    import mlx.core as mx
    import numpy

    def quantise(weight):
        found = mx.quantize(mx.array(weight.numpy()), **arguments)
        whole = mx.dequantize(*found, **arguments).astype(mx.float32)
        names = ("weight", "scales", "biases")
        return {
            name: torch.from_numpy(numpy.array(part)) for name, part in zip(names, found, strict=False)
        }, torch.tensor(numpy.array(whole))

    return "mlx", {"group_size": 32, "bits": 4, **arguments}, quantise


def hqq(bits: int, axis: int):
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    def quantise(weight):
        linear = torch.nn.Linear(64, len(weight), bias=False)
        linear.weight.data = weight
        settings = BaseQuantizeConfig(nbits=bits, group_size=GROUP, axis=axis)
        layer = HQQLinear(linear, settings, compute_dtype=torch.float32, device="cpu")
        layer.encoded_state_dict = True
        stored = {name: part for name, part in layer.state_dict().items() if part is not None}
        return stored, layer.dequantize()

    return "hqq", {"quant_method": "hqq", "quant_config": {}}, quantise


def quanto(kind: str):
    from optimum import quanto as tool

    def quantise(weight):
        model = torch.nn.Sequential(torch.nn.Linear(64, len(weight), bias=False))
        model[0].weight.data = weight
        tool.quantize(model, weights=getattr(tool, f"q{kind}"))
        tool.freeze(model)
        stored = {name.removeprefix("0."): part for name, part in model.state_dict().items()}
        return stored, model[0].weight.dequantize()

    return "optimum-quanto", {"quant_method": "quanto", "weights": kind}, quantise


def torchao(make):
    from torchao import quantization
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    def quantise(weight):
        model = torch.nn.Sequential(torch.nn.Linear(64, len(weight), bias=False))
        model[0].weight.data = weight
        quantization.quantize_(model, make(quantization))
        stored, notes = flatten_tensor_state_dict({"0.weight": model[0].weight.data})
        stored = {name.removeprefix("0."): part for name, part in stored.items()}
        return stored, model[0].weight.dequantize(), notes["0.weight"]

    return "torchao", {"quant_method": "torchao"}, quantise


def group_of(quantization):
    return quantization.IntxWeightOnlyConfig(
        weight_dtype=torch.int4,
        granularity=quantization.PerGroup(GROUP),
        mapping_type=quantization.MappingType.ASYMMETRIC,
    )


METHODS = {
    "gptq_4bit": lambda: gptq(4, "gptq"),
    "gptq_8bit": lambda: gptq(8, "gptq"),
    "gptq_v2": lambda: gptq(4, "gptq_v2"),
    "awq": awq,
    "bitsandbytes_nf4": lambda: bitsandbytes("nf4", nested=False),
    "bitsandbytes_nf4_nested": lambda: bitsandbytes("nf4", nested=True),
    "bitsandbytes_fp4": lambda: bitsandbytes("fp4", nested=True),
    "bitsandbytes_int8": bitsandbytes_int8,
    "compressed_int4": lambda: compressed(num_bits=4, strategy="group", group_size=GROUP),
    "compressed_int4_zeros": lambda: compressed(num_bits=4, strategy="group", group_size=GROUP, symmetric=False),
    "compressed_int8": lambda: compressed(num_bits=8, strategy="channel"),
    "compressed_fp8_tensor": lambda: compressed(num_bits=8, type="float", strategy="tensor"),
    "compressed_fp8_row": lambda: compressed(num_bits=8, type="float", strategy="channel"),
    "compressed_fp8_group": lambda: compressed(num_bits=8, type="float", strategy="group", group_size=GROUP),
    "compressed_fp8_block": lambda: compressed(num_bits=8, type="float", strategy="block", block_structure=[16, 32]),
    "compressed_mxfp8": lambda: compressed(
        num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8, zp_dtype=torch.uint8
    ),
    "compressed_nvfp4": lambda: compressed(
        num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn
    ),
    "compressed_mxfp4": lambda: compressed(
        num_bits=4, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8, zp_dtype=torch.uint8
    ),
    "mlx_4bit": lambda: mlx(group_size=32, bits=4),
    "mlx_3bit": lambda: mlx(group_size=32, bits=3),
    "mlx_mxfp4": lambda: mlx(group_size=32, bits=4, mode="mxfp4"),
    "mlx_nvfp4": lambda: mlx(group_size=16, bits=4, mode="nvfp4"),
    "mlx_mxfp8": lambda: mlx(group_size=32, bits=8, mode="mxfp8"),
    "hqq_4bit": lambda: hqq(4, 1),
    "hqq_8bit": lambda: hqq(8, 1),
    "hqq_2bit_columns": lambda: hqq(2, 0),
    "quanto_int8": lambda: quanto("int8"),
    "quanto_int4": lambda: quanto("int4"),
    "quanto_float8": lambda: quanto("float8"),
    "torchao_int8": lambda: torchao(lambda q: q.Int8WeightOnlyConfig(version=2)),
    "torchao_float8": lambda: torchao(lambda q: q.Float8WeightOnlyConfig()),
    "torchao_int4": lambda: torchao(group_of),
}


def made(method: str, weights: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What the tool stores of these weights, what it dequantises that to (`reference.…`), and its notes."""
    tool, settings, quantise = METHODS[method]()
    tensors, notes = {}, {}
    for name, weight in weights.items():
        stored, whole, *note = quantise(weight)
        tensors |= {f"{NAMES[name]}.{part}": value.contiguous().clone() for part, value in stored.items()}
        tensors[f"reference.{name}"] = whole.detach().float().contiguous().clone()
        notes |= {f"{NAMES[name]}.weight": text for text in note}
    made_by = f"{tool} {version(tool)}, torch {torch.__version__}"
    return tensors, notes | {"quantization_config": json.dumps(settings, default=str), "made_by": made_by}


def main() -> None:
    for method in sys.argv[1:] or METHODS:
        tensors, notes = made(method, originals())
        for name, weight in originals().items():
            error = (tensors[f"reference.{name}"] - weight).norm() / weight.norm()
            print(f"{method:24} {name} error {error:.4f}")
        save_file(tensors, FOLDER / f"{method}.safetensors", metadata=notes)


if __name__ == "__main__":
    main()
