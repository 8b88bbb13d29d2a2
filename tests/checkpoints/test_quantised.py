"""Quantised checkpoints: as each tool wrote them (tests/quantised, made by dev/quantise.py), and by hand."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import locater
from locater import checkpoints
from locater.checkpoints.quantised.weight import count_blocks
from locater.errors import Refusal, Unforeseen

FILES = sorted((Path(__file__).parents[1] / "quantised").glob("*.safetensors"))
QUERY, KEY = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
CONFIG = dict(model_type="llama", hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)


def write(folder: Path, tensors: dict, settings: dict | None, notes: dict | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    config = CONFIG | ({"quantization_config": settings} if settings is not None else {})
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors | {NORM: torch.linspace(0.5, 2, 64)}, folder / "model.safetensors", metadata=notes)
    return folder


def stored(path: Path) -> tuple[dict, dict, dict]:
    """What the tool stored, what it says that means, and its notes."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        notes = file.metadata()
    reference = {QUERY: tensors.pop("reference.q"), KEY: tensors.pop("reference.k")}
    return tensors, reference, notes


def numbers(folder: Path) -> torch.Tensor:
    scan = locater.scan(folder)
    assert scan.coverage == "COMPLETE" and not scan.refused
    return torch.tensor([[row.trace, row.eta, row.xi] for row in scan.heads], dtype=torch.float64)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scan_equals_that_of_what_the_tool_dequantises(path, tmp_path):
    tensors, reference, notes = stored(path)
    settings = json.loads(notes.pop("quantization_config"))
    quantised = write(tmp_path / "quantised", tensors, settings, notes)
    plain = write(tmp_path / "plain", reference, None)
    torch.testing.assert_close(numbers(quantised), numbers(plain), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rows_are_those_of_the_whole(path, tmp_path):
    tensors, reference, notes = stored(path)
    settings = json.loads(notes.pop("quantization_config"))
    with checkpoints.open(write(tmp_path, tensors, settings, notes)) as opened:
        assert opened.names == {QUERY, KEY, NORM}
        for name, whole in reference.items():
            assert opened.shape(name) == whole.shape
            torch.testing.assert_close(opened.read(name), whole, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(opened.read(name, (3, 18)), whole[3:18], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_without_its_config_or_a_part_nothing_is_guessed(path, tmp_path):
    tensors, reference, notes = stored(path)
    settings = json.loads(notes.pop("quantization_config"))
    truth = numbers(write(tmp_path / "plain", reference, None))
    cases = {"silent": (tensors, None)}
    for name in (name for name in tensors if name.startswith(QUERY.removesuffix(".weight"))):
        cases[name] = {other: part for other, part in tensors.items() if other != name}, settings
    for number, (kept, said) in enumerate(cases.values()):
        folder = write(tmp_path / str(number), kept, said, notes)
        try:
            scan = locater.scan(folder)
        except Refusal:
            continue
        if scan.coverage == "COMPLETE" and not scan.refused:
            torch.testing.assert_close(numbers(folder), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_codes_of_another_type_are_refused(path, tmp_path):
    """Bits are read as the method's own type says, or not at all: never as numbers, and never with a traceback."""
    tensors, reference, notes = stored(path)
    settings = json.loads(notes.pop("quantization_config"))
    truth = numbers(write(tmp_path / "plain", reference, None))
    parts = [name for name in tensors if name.startswith(QUERY.removesuffix(".weight"))]
    for number, name in enumerate(name for name in parts if not tensors[name].is_floating_point()):
        folder = write(tmp_path / str(number), tensors | {name: tensors[name].to(torch.float32)}, settings, notes)
        try:
            found = locater.scan(folder)
        except Refusal as cause:
            assert not isinstance(cause, Unforeseen), cause
            continue
        if found.coverage == "COMPLETE" and not found.refused:  # the part says the same in any type
            torch.testing.assert_close(numbers(folder), truth, rtol=1e-5, atol=1e-5)


def entries(settings: dict, path: tuple = ()):
    """Every entry of the settings by its path, tables and what is in them."""
    for key, value in settings.items():
        yield (*path, key), value
        if isinstance(value, dict):
            yield from entries(value, (*path, key))


WORDS = (
    "unheard-of",
    "gptq_v2",
    "gptq",
    "gemv",
    "channel",
    "group",
    "tensor",
    "affine",
    "mxfp4",
    "float",
    "int",
    "sym",
)
SPELLINGS = (
    "bits",
    "w_bit",
    "group_size",
    "q_group_size",
    "num_bits",
    "version",
    "mode",
    "checkpoint_format",
    "format",
)
SPELLINGS += (
    "zero_point",
    "sym",
    "desc_act",
    "weight_block_size",
    "strategy",
    "type",
    "symmetric",
    "quant_algo",
    "axis",
)


def others(value: object) -> list:
    """Values in the place of one: near it, far from it, of other kinds."""
    if isinstance(value, bool):
        return [not value, None, "unheard-of"]
    if isinstance(value, int):
        return [value + 1, value - 1, 2 * value, value // 2, -1, 0, 64 * value, float(value), str(value), None]
    if isinstance(value, str):
        return [word for word in WORDS if word != value] + [value.upper(), 7, None, ""]
    if isinstance(value, list):
        near = [[item + 1 for item in value]] if all(type(item) is int for item in value) else []
        return [*near, [*value, *value], value[::-1], [], None, [33] * len(value)]
    return [None, {}, [], 7, "unheard-of"]


def edited(settings: dict):
    """The settings with one entry changed, taken out, or added under a spelling that some method has."""
    for path, value in entries(settings):
        for other in [*others(value), ...]:
            copy = json.loads(json.dumps(settings))
            *tables, last = path
            place = copy
            for key in tables:
                place = place[key]
            if other is ...:
                del place[last]
            else:
                place[last] = other
            yield ".".join(path), other, copy
    for key in SPELLINGS:
        if key not in settings:
            for value in (33, 16, 8, True, False, "unheard-of", "gptq_v2"):
                yield key, value, settings | {key: value}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_setting_changed_is_right_or_refused(path, tmp_path):
    """A setting that does not fit the stored shapes, or that nobody knows, is never taken for another."""
    tensors, reference, notes = stored(path)
    settings = json.loads(notes.pop("quantization_config"))
    folder = write(tmp_path, tensors, settings, notes)
    config = json.loads((folder / "config.json").read_text())
    wrong = []
    for key, value, changed in edited(settings):
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": changed}))
        try:
            with checkpoints.open(folder) as opened:
                right = all(
                    name in opened.names
                    and opened.shape(name) == whole.shape
                    and torch.allclose(opened.read(name).float(), whole, rtol=1e-4, atol=1e-5)
                    for name, whole in reference.items()
                )
                refused = False if right else refuses(folder)
        except Refusal as cause:
            right, refused = not isinstance(cause, Unforeseen), True
        if not right and not refused and (key, value) not in ONLY_WITNESS:
            wrong.append((key, value))
    assert not wrong


# Where zero points are not symmetric, nothing in a file shows whether they were stored less one: the config says it.
ONLY_WITNESS = {("checkpoint_format", word) for word in ("gptq", "gptq_v2", None, ...)}


@pytest.mark.parametrize(("kind", "stored_zero"), [("gptq", 7), ("gptq_v2", 8)])
def test_symmetric_zero_points_show_the_format(kind, stored_zero, tmp_path):
    tensors, _, _ = stored(next(path for path in FILES if path.stem == "gptq_v2"))
    packed = int(str(stored_zero) * 8, 16)
    packed -= 2**32 if packed >= 2**31 else 0
    zeros = {name: torch.full_like(part, packed) for name, part in tensors.items() if name.endswith("qzeros")}
    settings = dict(quant_method="gptq", bits=4, group_size=32, desc_act=True, sym=True, checkpoint_format=kind)
    with checkpoints.open(write(tmp_path, tensors | zeros, settings)) as opened:
        assert opened.read(QUERY).isfinite().all()
    for other in ("gptq", "gptq_v2", None, "unheard-of"):
        if other != kind and not (other is None and kind == "gptq"):
            folder = write(tmp_path, tensors | zeros, settings | {"checkpoint_format": other})
            with checkpoints.open(folder) as opened, pytest.raises(Refusal):
                opened.read(QUERY)


def test_blocks_are_cut_off_only_where_one_size_alone_fits():
    assert count_blocks((576, 2048), (128, 128)) == (5, 16)
    assert count_blocks((576, 96), (1, 32)) == (576, 3)
    for shape, block in (((64, 64), (1, 33)), ((64, 48), (1, 32)), ((576, 2048), (127, 128))):
        with pytest.raises(Refusal, match="blocks that fit"):
            count_blocks(shape, block)


def refuses(folder: Path) -> bool:
    """Whether a scan of it refuses the heads or says that they are not complete."""
    try:
        scan = locater.scan(folder)
    except Refusal as cause:
        return not isinstance(cause, Unforeseen)
    return bool(scan.refused) or not scan.heads or scan.coverage != "COMPLETE"


def eight_bits(weight: torch.Tensor, block: tuple[int, int], *, exponent: bool = False):
    """FP8 with a scale per block, by loops."""
    height, width = block
    scale = torch.ones(-(-weight.shape[0] // height), -(-weight.shape[1] // width))
    codes = torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scale[i, j] = weight[part].abs().max() / 448
            scale[i, j] = 2 ** torch.ceil(torch.log2(scale[i, j])) if exponent else scale[i, j]
            codes[part] = weight[part] / scale[i, j]
    return codes.to(torch.float8_e4m3fn), scale


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    uneven = 3 ** torch.randn(64, generator=generator)
    return {
        name: torch.randn(rows, 64, generator=generator) * uneven * 3 ** torch.randn(rows, 1, generator=generator)
        for name, rows in ((QUERY, 64), (KEY, 32))
    }


def group(**arguments) -> dict:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": arguments}}}


DECLARED = {
    "blocks of the config": ((64, 16), {"quant_method": "fp8", "weight_block_size": [64, 16]}, None),
    "groups along a row": ((1, 16), group(num_bits=8, type="float", strategy="group", group_size=16), None),
    "exponents": ((1, 32), {"quant_method": "mxfp8"}, "e8m0"),
    "bytes": ((1, 32), {"quant_method": "modelopt", "quant_algo": "MXFP8"}, "uint8"),
    "rows": ((1, 64), {"quant_method": "fbgemm_fp8"}, None),
    "rows, undeclared": ((1, 64), None, None),
}


@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("case", DECLARED)
def test_eight_bit_blocks_by_their_declared_size(case, suffix, tmp_path):
    block, settings, kind = DECLARED[case]
    tensors, reference = {}, {}
    for name, weight in weights().items():
        codes, scale = eight_bits(weight, block, exponent=kind is not None)
        spread = scale.repeat_interleave(block[0], 0)[: len(weight)].repeat_interleave(block[1], 1)[:, :64]
        reference[name] = codes.float() * spread
        if kind == "e8m0":
            scale = scale.to(torch.float8_e8m0fnu)
        elif kind == "uint8":
            scale = (torch.log2(scale) + 127).round().to(torch.uint8)
        tensors |= {name: codes, name + suffix: scale}
    expected = numbers(write(tmp_path / "plain", reference, None))
    torch.testing.assert_close(numbers(write(tmp_path / "eight", tensors, settings)), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "block, settings",
    [
        ((32, 32), None),  # 2×2 scales could be blocks of 32 to 63
        ((32, 32), {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        ((1, 16), {"quant_method": "fp8", "weight_block_size": [16, 16]}),
        ((16, 1), {"quant_method": "fbgemm_fp8"}),
        ((1, 32), group(num_bits=8, type="float", strategy="group", group_size=16)),
        ((1, 32), {"quant_method": "fp8", "weight_block_size": "wide"}),
    ],
)
def test_a_scale_of_another_shape_than_declared_is_refused(block, settings, tmp_path):
    tensors = {}
    for name, weight in weights().items():
        tensors[name], tensors[name + "_scale_inv"] = eight_bits(weight, block)
    with pytest.raises(Refusal, match="scale"):
        locater.scan(write(tmp_path, tensors, settings))


def test_an_unknown_method_is_named(tmp_path):
    with pytest.raises(Refusal, match="`aqlm`; convert the checkpoint to 16 bits"):
        locater.scan(write(tmp_path, weights(), {"quant_method": "aqlm"}))


def test_whole_numbers_are_no_weights(tmp_path):
    codes = {name: (8 * weight).to(torch.int8) for name, weight in weights().items()}
    with pytest.raises(Refusal, match="floating-point numbers of at least 16 bits in .* got torch.int8"):
        locater.scan(write(tmp_path, codes, None))


def test_modelopt_four_bits_multiply_by_the_second_scale(tmp_path):
    """By the published packing: two E2M1 codes a byte, the lower half first, W = code·scale·scale_2."""
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    generator = torch.Generator().manual_seed(3)
    tensors, reference = {}, {}
    for name, rows in ((QUERY, 64), (KEY, 32)):
        codes = torch.randint(16, (rows, 64), generator=generator)
        scale = (0.5 + torch.rand(rows, 4, generator=generator)).to(torch.float8_e4m3fn)
        reference[name] = table[codes] * scale.float().repeat_interleave(16, 1) * 0.25
        tensors |= {name: (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8), name + "_scale": scale}
        tensors[name + "_scale_2"] = torch.tensor(0.25)
    expected = numbers(write(tmp_path / "plain", reference, None))
    settings = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    torch.testing.assert_close(numbers(write(tmp_path / "four", tensors, settings)), expected, rtol=1e-6, atol=1e-6)


def test_quanto_four_bits_by_its_published_packing(tmp_path):
    """Groups of a row one below the other, the upper half of the stack in the upper bits, W = scale·code − shift."""
    generator = torch.Generator().manual_seed(4)
    tensors, reference = {}, {}
    for name, rows in ((QUERY, 64), (KEY, 32)):
        codes = torch.randint(16, (2 * rows, 32), generator=generator)  # two groups of 32 for each row
        scale, shift = (0.1 + torch.rand(2 * rows, 1, generator=generator) for _ in range(2))
        reference[name] = (scale * codes - shift).reshape(rows, 64)
        tensors[f"{name}._data._data"] = (codes[:rows] | codes[rows:] << 4).to(torch.uint8)
        tensors |= {f"{name}._scale": scale, f"{name}._shift": shift}
    expected = numbers(write(tmp_path / "plain", reference, None))
    settings = {"quant_method": "quanto", "weights": "int4"}
    torch.testing.assert_close(numbers(write(tmp_path / "four", tensors, settings)), expected, rtol=1e-6, atol=1e-6)


def test_how_activations_were_quantised_changes_nothing(tmp_path):
    tensors = {}
    for name, weight in weights().items():
        tensors[name], tensors[name + "_scale"] = eight_bits(weight, (1, 64))
    plain = numbers(write(tmp_path / "without", tensors, {"quant_method": "fbgemm_fp8"}))
    about = {name.replace("weight", "input_scale"): torch.tensor(3.0) for name in (QUERY, KEY)}
    assert torch.equal(numbers(write(tmp_path / "with", tensors | about, {"quant_method": "fbgemm_fp8"})), plain)


def test_reading_rows_reads_no_more_than_them(tmp_path, monkeypatch):
    tensors = {}
    for name, weight in weights().items():
        tensors[name], tensors[name + "_scale"] = eight_bits(weight, (1, 64))
    asked = []
    read = checkpoints.base.Checkpoint.read
    monkeypatch.setattr(
        checkpoints.base.Checkpoint, "read", lambda self, *args: asked.append(args) or read(self, *args)
    )
    with checkpoints.open(write(tmp_path, tensors, {"quant_method": "fbgemm_fp8"})) as opened:
        assert not asked
        opened.read(QUERY, (4, 8))
    assert (QUERY, (4, 8)) in asked and (QUERY, None) not in asked


# ------------------------------------------------------------------------------------------------- unknown settings
ROTATED = {"config_groups": {"R1": {"type": "hadamard", "apply": [{"targets": ["q_proj"], "location": "input"}]}}}
ACTING = [dict(transform_config=ROTATED), dict(rotation="hadamard"), dict(pre_quant_scale=True), dict(scale_factor=2.0)]
ACTING += [dict(sparsity_config={"format": "sparse-24-bitmask"}), dict(is_marlin_format=True), dict(adapter={"r": 8})]
ACTING += [dict(hadamard_size=32), dict(clip=0.9), dict(permutation=[1, 0])]
HARMLESS = [
    dict(transform_config={}),
    dict(sparsity_config={"format": "dense"}),
    dict(rotation=None),
    dict(meta={"a": 1}),
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_settings_not_known_to_be_harmless_are_refused_by_name(path, tmp_path):
    tensors, _, notes = stored(path)
    settings = json.loads(notes.pop("quantization_config"))
    for number, entry in enumerate(ACTING):
        with pytest.raises(Refusal, match=f"`{next(iter(entry))}` as well"):
            checkpoints.open(write(tmp_path / f"acting {number}", tensors, settings | entry, dict(notes)))
    for number, entry in enumerate(HARMLESS):
        checkpoints.open(write(tmp_path / f"harmless {number}", tensors, settings | entry, dict(notes))).close()


def test_every_setting_that_transformers_writes_for_a_method_read_here_is_judged():
    import inspect

    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    from locater.checkpoints.quantised import KNOWN, KNOWN_BEGINNINGS, METHODS

    for method in METHODS.keys() & AUTO_QUANTIZATION_CONFIG_MAPPING.keys():
        names = inspect.signature(AUTO_QUANTIZATION_CONFIG_MAPPING[method].__init__).parameters
        left = {name for name in names if not name.startswith(KNOWN_BEGINNINGS)} - KNOWN - {"self", "kwargs"}
        assert not left, f"{method}: {left}"
