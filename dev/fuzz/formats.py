"""What a case does: spoil a copy of a seed, knock at a public door, and look at what came of it.

A format gives `spoil(folder, chance) -> words`, `run(folder) -> result`, which raises `Refusal` or returns, and
`check(folder, result, whole) -> complaint`, where `whole` is the result of the seed as it was.
"""

import contextlib
import io
import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import readings
import torch
from mutators import (
    NUMBERS,
    SCALINGS,
    SCRIPT,
    spoil_bytes,
    spoil_document,
    spoil_header,
    spoil_json,
    spoil_pickle,
    spoil_tensors,
    spoil_tree,
    write_document,
)  # fmt: skip
from safetensors.torch import load_file, save_file

import locater
from locater import checkpoints, cli
from locater.errors import Refusal

LENGTH = 24
FLOOR = 1e-30  # of ‖W‖²: below it float32 has no numbers left
# Entries of a config that no head depends on: whatever they become, the numbers stay.
IDLE = ("vocab_size", "intermediate_size", "torch_dtype", "architectures", "tie_word_embeddings", "bos_token_id")


@dataclass(frozen=True)
class Format:
    seed: str
    spoil: Callable[[Path, random.Random], str]
    run: Callable[[Path], Any]
    check: Callable[[Path, Any, Any], str | None] = lambda folder, result, whole: None


# --- checkpoints: every tensor read, and the scan


def read_and_scan(folder: Path) -> Any:
    with checkpoints.open(folder) as opened:
        tensors = {name: opened.read(name) for name in opened.names}
        for name, tensor in tensors.items():
            assert tuple(tensor.shape) == opened.shape(name) and tensor.dtype == opened.entries[name].dtype, name
    return tensors, scan(folder)


def scan(source: Any) -> Any:
    found = locater.scan(source, length=LENGTH)
    json.dumps(found.to_json(), allow_nan=False)
    return found


def as_numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.double().numpy() if not tensor.is_complex() else np.zeros(tensor.shape)


def unlike(found: dict[str, torch.Tensor], expected: dict[str, np.ndarray], *, is_sorted: bool = False) -> str | None:
    for name, numbers in expected.items():
        if name not in found:
            return f"{name[:60]} is in the file and was not read"
        values = as_numbers(found[name])
        values = np.sort(values.ravel()) if is_sorted else values
        if values.shape != numbers.shape or not np.array_equal(values, numbers, equal_nan=True):
            return f"{name[:60]} differs from the file"
    return None


def is_near(row: Any, theirs: np.ndarray, sizes: float) -> bool:
    """To a thousandth of ‖W‖, or what single precision leaves of products that cancel."""
    ours, size = np.array([row.trace, row.trace_of_square, row.frobenius_squared]), max(row.frobenius_squared, FLOOR)
    bounds = 1e-3 * np.array([size**0.5, size, size]) + 1e-6 * np.array([sizes**0.5, sizes, sizes])
    return bool(np.all(np.abs(ours - theirs) <= bounds))


def check_llama(folder: Path, result: Any, tensors: dict[str, np.ndarray]) -> str | None:
    """Every row against the materialised W, and no silence about layers that the file or the config lacks."""
    found, config = result[1], json.loads((folder / "config.json").read_text())
    expected = readings.llama_moments(config, tensors)
    first = found.heads[0]
    # Some kinds of rotary scaling multiply all queries and keys by one number.
    is_stretched = any(config.get(key) for key in ("rope_scaling", "rope_parameters"))
    stretch = (
        (first.frobenius_squared / max(expected[first.layer, first.head][2], FLOOR)) ** 0.5 if is_stretched else 1.0
    )
    for row in found.heads:
        if (row.layer, row.head) not in expected:
            return "a head that is not in the file"
        *theirs, sizes = expected[row.layer, row.head]
        if not is_near(row, np.array(theirs) * [stretch, stretch**2, stretch**2], sizes * stretch**2):
            return "moments that are not the file's"
    stored = {int(name.split(".")[2]) for name in tensors if name.endswith("self_attn.q_proj.weight")}
    told = {row.layer for row in found.heads}
    if (
        not found.refused
        and found.coverage.startswith("COMPLETE")
        and (told != stored or len(told) != config["num_hidden_layers"])
    ):
        return "COMPLETE, with layers missing"
    return None


def check_safetensors(folder: Path, result: Any, whole: Any) -> str | None:
    tensors = readings.safetensors(next(folder.glob("*.safetensors")))
    return unlike(result[0], tensors) or check_llama(folder, result, tensors)


def check_sharded(folder: Path, result: Any, whole: Any) -> str | None:
    is_index = (folder / "model.safetensors.index.json").is_file()
    tensors = readings.sharded(folder) if is_index else {name: as_numbers(t) for name, t in result[0].items()}
    return unlike(result[0], tensors) or check_llama(folder, result, tensors)


def check_torch(folder: Path, result: Any, whole: Any) -> str | None:
    path = folder / "pytorch_model.bin"
    try:
        tensors = readings.torch_file(path)
    except Exception:  # stricter than we are about what stands beside the tensors
        tensors = {name: as_numbers(tensor) for name, tensor in result[0].items()}
    return unlike(result[0], tensors) or check_llama(folder, result, tensors)


def check_gguf(folder: Path, result: Any, whole: Any) -> str | None:
    """Numbers only; names are the business of the tests of families."""
    stored = sorted(map(tuple, readings.gguf(folder / "model.gguf").values()))
    found = sorted(tuple(np.sort(as_numbers(tensor).ravel())) for tensor in result[0].values())
    return None if len(stored) < len(found) or _same(stored, found) else "numbers that are not the file's"


def _same(one: list, other: list) -> bool:
    return len(one) == len(other) and all(
        len(a) == len(b) and np.allclose(a, b, rtol=1e-5, equal_nan=True) for a, b in zip(one, other, strict=True)
    )


def check_distributed(folder: Path, result: Any, whole: Any) -> str | None:
    """What is read is some tensor that was saved, unless its own bytes were changed."""
    if any((folder / name).read_bytes() != (SEEDS / "distributed" / name).read_bytes() for name in data_files(folder)):
        return None
    saved = [as_numbers(tensor) for tensor in whole[0].values()]
    for name, tensor in result[0].items():
        if not any(np.array_equal(as_numbers(tensor).ravel(), one.ravel()) for one in saved):
            return f"{name[:60]} is none of the saved tensors"
    return check_llama(folder, result, {name: as_numbers(tensor) for name, tensor in result[0].items()})


def data_files(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.distcp") if (SEEDS / "distributed" / path.name).exists()]


def spoil_checkpoint(file: str) -> Callable[[Path, random.Random], str]:
    """Bytes of the file, its header or tensors, the config, or the tree, by turns."""

    def spoil(folder: Path, chance: random.Random) -> str:
        path = folder / file
        kind = chance.randrange(20)
        if kind == 0:
            return "tree " + spoil_tree(folder, chance)
        if kind < 6 and (folder / "config.json").exists():
            return spoil_json(folder / "config.json", chance, extra=scaling)
        if kind < 10 and path.suffix == ".safetensors":
            return spoil_header(path, chance)
        if kind < 15 and path.suffix == ".safetensors":
            tensors = load_file(path)
            name, told = spoil_tensors(tensors, chance)
            save_file(tensors, path)
            return f"{told} {name}"
        if kind < 15 and path.suffix == ".bin":
            saved = torch.load(path, weights_only=True)
            name, told = spoil_tensors(saved["model"], chance)
            torch.save(saved, path, _use_new_zipfile_serialization=path.read_bytes()[:2] == b"PK")
            return f"{told} {name}"
        if kind < 15 and path.name == ".metadata":
            path.write_bytes(spoil_pickle(path.read_bytes(), chance))
            return "opcodes of .metadata"
        if kind < 18 and path.suffix == ".json":
            return spoil_json(path, chance)
        path.write_bytes(spoil_bytes(path.read_bytes(), chance))
        return "bytes"

    return spoil


def scaling(config: Any, chance: random.Random) -> str:
    """Rotary scaling, windows and layer types, which have shapes of their own."""
    key = chance.choice(["rope_scaling", "rope_parameters", "sliding_window", "layer_types", "quantization_config"])
    choices: dict[str, list[Any]] = {
        "sliding_window": [4, 0, -1, "x", {}, 10**9, 2.5],
        "layer_types": [["sliding_attention"], ["full_attention"] * 2, "full", [3, None], {}],
        "quantization_config": [{"quant_method": method, "bits": chance.choice(NUMBERS)} for method in
                                ("gptq", "awq", "fp8", "mlx", "hqq", "unheard", "compressed-tensors", "torchao", 3)],
    }  # fmt: skip
    config[key] = chance.choice(choices.get(key, SCALINGS))
    return f"{key}={str(config[key])[:80]}"


def spoil_adapter(folder: Path, chance: random.Random) -> str:
    if chance.random() < 0.4:
        return spoil_json(folder / "adapter" / "adapter_config.json", chance)
    if chance.random() < 0.2:
        return "base: " + spoil_checkpoint("model.safetensors")(folder / "base", chance)
    return spoil_checkpoint("adapter_model.safetensors")(folder / "adapter", chance)


def run_adapter(folder: Path) -> Any:
    return None, scan(locater.Stored(folder / "base", adapter=folder / "adapter"))


def check_adapter(folder: Path, result: Any, whole: Any) -> str | None:
    """Layers that the adapter does not speak of are those of the base."""
    names = load_file(folder / "adapter" / "adapter_model.safetensors")
    touched = any("layers.1." in name for name in names) or (folder / "base").stat().st_mtime_ns < 0
    same_base = all(
        (folder / "base" / file).read_bytes() == (SEEDS / "adapter" / "base" / file).read_bytes()
        for file in ("config.json", "model.safetensors")
    )
    if touched or not same_base:
        return None
    rows = [[row.trace for row in one[1].heads if row.layer == 1] for one in (result, whole)]
    return None if rows[0] == rows[1] else "another layer than the adapter's has changed"


def spoil_layout(folder: Path, chance: random.Random) -> str:
    path = folder / "layout.yaml"
    if chance.random() < 0.3:
        path.write_bytes(spoil_bytes(path.read_bytes(), chance))
        return "bytes of layout"
    document = json.loads(path.read_text())
    told = spoil_document(document, chance)
    write_document(document, path)
    return told


def check_layout(folder: Path, found: Any, whole: Any) -> str | None:
    """Every row against the W that the layout's own words make of the file's tensors."""
    import yaml

    rows = {row["block"]: row for row in yaml.safe_load((folder / "layout.yaml").read_text())["attention"]}
    tensors = readings.safetensors(folder / "own.safetensors")
    for head in found.heads:
        *theirs, sizes = readings.layout_moments(rows[head.block], tensors, head.layer, head.head)
        if not is_near(head, np.array(theirs), sizes):
            return "moments that are not the layout's"
    return None


# --- one of several models in the seed's folder


def spoil_one(name: str) -> Callable[[Path, random.Random], str]:
    def spoil(folder: Path, chance: random.Random) -> str:
        model = chance.choice(sorted(path.name for path in (SEEDS / name).iterdir()))
        for path in (SEEDS / name / model).iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        before = json.loads((folder / "config.json").read_text())
        told = spoil_checkpoint("model.safetensors")(folder, chance)
        (folder / ".told").write_text(json.dumps({"model": model, "told": told, "config": before}))
        return f"{model}: {told}"

    return spoil


def check_one(folder: Path, result: Any, whole: Any) -> str | None:
    """Where only idle entries of the config or other layers' tensors changed, a row is what it was."""
    note = json.loads((folder / ".told").read_text())
    config = json.loads((folder / "config.json").read_text())
    changed = [key for key in config.keys() | note["config"].keys() if config.get(key) != note["config"].get(key)]
    touched = touched_layers(folder / "model.safetensors", SEEDS / whole["seed"] / note["model"] / "model.safetensors")
    if touched is None or not set(changed) <= set(IDLE):
        return None
    before = [row for row in whole["rows"](note["model"]) if row[1] not in touched]
    after = [row for row in rows_of(result) if row[1] not in touched]
    if touched:  # what cannot be read may be refused layer by layer; what is told must be right
        before = [row for row in before if row[:3] in {one[:3] for one in after}]
    return None if before == after else f"other numbers after a change of {', '.join(changed) or touched or 'nothing'}"


def touched_layers(path: Path, seed: Path) -> set[int] | None:
    """Layers (and experts) whose tensors differ from the seed's; None where others differ, or the set of names."""
    if not path.is_file():
        return None
    ours, theirs = readings.stored(path), readings.stored(seed)
    if ours.keys() != theirs.keys():
        return None
    names = [name for name in ours if ours[name] != theirs[name]]
    if any("output.LayerNorm" in name or "relative_attention_bias" in name for name in names):
        return None  # the next layer's input norm, and a table that all layers share
    numbers = [[int(part) for part in name.split(".") if part.isdigit()] for name in names]
    return None if [] in numbers else {number for one in numbers for number in one}


def rows_of(found: Any) -> list[tuple]:
    return [(row.block, row.layer, row.head, row.trace, row.eta, row.localisation) for row in found.heads]


# --- commands


def command(*arguments: object) -> tuple[str, str]:
    """Run as the shell would; a refusal is raised again, any other end than 0 to 3 too."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["locater", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            cli.main()
        except SystemExit as stop:
            if stop.code in (1, 2):
                check_sentence(err.getvalue())
                raise Refusal(err.getvalue()[:500]) from None
            assert stop.code in (0, 3, None), f"exit {stop.code}"
    return out.getvalue(), err.getvalue()


def check_sentence(text: str) -> None:
    """What a terminal is given of a stranger's text: no control characters, no marks that turn it round, no novel."""
    assert len(text) < 20_000, "a refusal of more than 20,000 letters"
    assert "please report it" not in text, f"the net caught {text[text.find(', got ') + 6 :][:90]}"
    assert not any(ord(letter) < 32 and letter != "\n" or letter in "\x7f\u202e\u2066" for letter in text), "control"


def spoil_report(folder: Path, chance: random.Random) -> str:
    path = folder / chance.choice(["scan.json", "compare.json"])
    told = spoil_json(path, chance)
    (folder / "chosen").write_text(path.name)
    return told


def run_report(folder: Path) -> str:
    command("report", folder / (folder / "chosen").read_text(), "-o", folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


def check_page(folder: Path, page: str, whole: Any) -> str | None:
    return "a script of the document in the page" if SCRIPT in page else None


RUN_FILES = ("metrics.jsonl", "config.json", "checkpoints/index.json", "state")


def spoil_run(folder: Path, chance: random.Random) -> str:
    run = folder / "arm-seed0"
    name = chance.choice(RUN_FILES)
    checkpoint = run / "checkpoints" / json.loads((run / "checkpoints/index.json").read_text())["names"]["last"]
    path = chance.choice(sorted(checkpoint.iterdir())) if name == "state" else run / name
    if path.suffix == ".json" and chance.random() < 0.7:
        return spoil_json(path, chance)
    if path.name == "metrics.jsonl" and chance.random() < 0.7:
        lines = path.read_text().splitlines()
        number = chance.randrange(len(lines))
        row = json.loads(lines[number])
        told = spoil_document(row, chance)
        lines[number] = json.dumps(row)
        path.write_text("\n".join(lines) + "\n")
        return f"metrics {told}"
    path.write_bytes(spoil_bytes(path.read_bytes(), chance))
    return f"bytes of {path.name}"


def run_run(folder: Path) -> Any:
    """Compared, shown, and resumed; what each refuses is fine, what resumes must be the run that was."""
    from locater_lab.train.run import resume

    ends = []
    for arguments in (["runs", folder], ["report", folder / "arm-seed0", "-o", folder / "page.html"]):
        with contextlib.suppress(Refusal):
            command(*arguments)
            ends.append(arguments[0])
    before = (folder / "arm-seed0" / "model" / "model.safetensors").read_bytes()
    # The seed was written elsewhere: its data has moved along with it.
    resume(folder / "arm-seed0", data=str(folder / "text.txt"), say=lambda _: None)
    return before, (folder / "arm-seed0" / "model" / "model.safetensors").read_bytes()


def check_run(folder: Path, result: Any, whole: Any) -> str | None:
    before, after = result
    return "resumed to other weights" if before != after else None


def spoil_tokens(folder: Path, chance: random.Random) -> str:
    with mock.patch.dict(os.environ, LOCATER_CACHE=str(folder / "cache")):
        read_tokens(folder)
    files = sorted(path for path in (folder / "cache").rglob("*") if path.is_file())
    path = chance.choice(files)
    if chance.random() < 0.1:
        return "tree " + spoil_tree(folder / "cache", chance)
    path.write_bytes(spoil_bytes(path.read_bytes(), chance))
    return f"bytes of {path.name}"


def read_tokens(folder: Path) -> Any:
    from locater_lab.data.sources import tokenise
    from locater_lab.data.text import Corpus
    from locater_lab.fields import DataOptions

    words = "the cat and the dog and one owl make seven " * 20
    with mock.patch.dict(os.environ, LOCATER_CACHE=str(folder / "cache")):
        tokens = tokenise(Corpus("x", words, words[:90]), DataOptions(tokenizer="words"))
        return [tokens.train.tolist(), tokens.valid.tolist(), repr(tokens.vocabulary)]


def check_tokens(folder: Path, result: Any, whole: Any) -> str | None:
    return None if result == whole else "other tokens than those of the text"


MOMENTS = {"--moments": "1,2,9", "--temperature": "2"}
OPTIONS = {
    "theory": (*MOMENTS, "--length", "--method"),
    "scan": ("--length", "--layers", "--spectrum", "--fail-on", "--timeout", "--adapter", "--layout"),
}
VALUES = ("nan", "inf", "-inf", "1e308", "0", "-1", "1", "3.5", "x", "", "1e-320", "9" * 400, "64", "[/x]", "exact")
VALUES += (
    "0-1",
    "1-0",
    "0-999999999999",
    "3,1,2",
    "raw,exact",
    "xi<0.5",
    "eta>",
    "xi<nan",
    "\x1b[31m\u202e",
    "..",
    "http://",
    "a" * 5000,
)


def spoil_arguments(folder: Path, chance: random.Random) -> str:
    verb = chance.choice(["theory", "theory", "scan"])
    chosen = chance.sample(OPTIONS[verb], chance.randint(1, 4))
    (folder / "arguments").write_text(json.dumps([verb, {option: chance.choice(VALUES) for option in chosen}]))
    return (folder / "arguments").read_text()[:160]


def arguments_of(folder: Path) -> tuple[str, dict[str, str]]:
    path = folder / "arguments"
    verb, given = json.loads(path.read_text()) if path.exists() else ("theory", {})
    return verb, (MOMENTS if verb == "theory" else {}) | {"--length": "16"} | given


def run_arguments(folder: Path) -> Any:
    verb, given = arguments_of(folder)
    source = [str(SEEDS / "safetensors")] if verb == "scan" else []
    return command(verb, *source, *(part for pair in given.items() for part in pair), "--json", "-")[0]


def check_arguments(folder: Path, result: str, whole: Any) -> str | None:
    """Strict JSON; probabilities that are such, of the moments given; rows of the file, whatever was asked of them."""
    verb, given = arguments_of(folder)
    document = json.loads(result, parse_constant=lambda word: 1 / 0)
    if verb == "theory":
        named = (document["trace"], document["trace_of_square"], document["frobenius_squared"], document["temperature"])
        if list(named) != [*map(float, given["--moments"].split(",")), float(given["--temperature"])]:
            return "other moments than those given"
        profiles = document["profiles"].values()
        is_right = all(len(one) == int(given["--length"]) and 0 <= min(one) <= max(one) <= 1 for one in profiles)
        return None if is_right else "a profile that is none"
    config = json.loads((SEEDS / "safetensors" / "config.json").read_text())
    is_raw = "raw" in given.get("--spectrum", "").split(",")
    tensors = readings.safetensors(SEEDS / "safetensors" / "model.safetensors")
    expected = readings.llama_moments(config, tensors, is_raw=is_raw)
    off = [row for row in document["heads"] if abs(row["trace"] - expected[row["layer"], row["head"]][0]) > 1e-3]
    return "a trace that is not the file's" if off or not document["heads"] else None


SEEDS = Path()
FORMATS = {
    "safetensors": Format("safetensors", spoil_checkpoint("model.safetensors"), read_and_scan, check_safetensors),
    "sharded": Format("sharded", spoil_checkpoint("model.safetensors.index.json"), read_and_scan, check_sharded),
    "torch": Format("torch", spoil_checkpoint("pytorch_model.bin"), read_and_scan, check_torch),
    "legacy": Format("legacy", spoil_checkpoint("pytorch_model.bin"), read_and_scan, check_torch),
    "gguf": Format("gguf", spoil_checkpoint("model.gguf"), read_and_scan, check_gguf),
    "distributed": Format("distributed", spoil_checkpoint(".metadata"), read_and_scan, check_distributed),
    "adapter": Format("adapter", spoil_adapter, run_adapter, check_adapter),
    "layout": Format(
        "layout",
        spoil_layout,
        lambda folder: scan(locater.Stored(folder / "own.safetensors", layout=folder / "layout.yaml")),
        check_layout,
    ),
    "quantised": Format("", spoil_one("quantised"), scan, check_one),
    "families": Format("", spoil_one("families"), scan, check_one),
    "report": Format("documents", spoil_report, run_report, check_page),
    "run": Format("run", spoil_run, run_run, check_run),
    "tokens": Format("", spoil_tokens, read_tokens, check_tokens),
    "arguments": Format("", spoil_arguments, run_arguments, check_arguments),
}
