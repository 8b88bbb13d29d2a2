"""One tool on one checkpoint, in a process of its own: `python jobs.py TOOL FOLDER` prints what it cost, as JSON.

The imports are made before the clock starts; what they cost is measured apart.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ |= {name: "1" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")}
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1", "WANDB_MODE": "disabled"}


def locater(*, eigenvalues: bool = False) -> Callable[[Path], int]:
    import torch

    from locater.scanning.scan import scan

    torch.set_num_threads(1)
    return lambda folder: len(scan(folder, details=["eigenvalues"] if eigenvalues else []).heads)


def as_trained() -> Callable[[Path], int]:
    """Estimates of rotary heads are left out where weights are random, as they are here: made all the same."""
    from locater.scanning import estimate

    estimate._is_trained = lambda *given: True
    return locater()


def without_estimate() -> Callable[[Path], int]:
    """The same scan, nothing estimated of what heads do."""
    from locater.scanning import layer

    layer.direct_into = lambda *given: None
    layer.estimate_near_mass = lambda batch, *given, **options: ([None] * len(batch),) * 2
    return locater()


def bare() -> Callable[[Path], int]:
    """What anyone would write: open, core product, eigenvalues; nothing checked, nothing folded, nothing predicted."""
    import torch
    from safetensors import safe_open

    torch.set_num_threads(1)

    def weights(folder: Path):
        index = folder / "model.safetensors.index.json"
        weight_map = json.loads(index.read_text())["weight_map"] if index.exists() else {"": "model.safetensors"}
        for file in sorted(set(weight_map.values())):
            with safe_open(folder / file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  (it cannot be iterated over)
                    if name.endswith("attn.c_attn.weight"):
                        yield opened.get_tensor(name).float().T.chunk(3)[:2]
                    elif name.endswith("q_proj.weight"):
                        names = name, name.replace("q_proj", "k_proj")
                        yield tuple(opened.get_tensor(each).float() for each in names)

    def run(folder: Path) -> int:
        config, count = json.loads((folder / "config.json").read_text()), 0
        heads = config.get("n_head") or config["num_attention_heads"]
        keys = config.get("num_key_value_heads", heads)
        for query, key in weights(folder):
            d_head = query.shape[0] // heads
            for head in range(heads):
                at = head * keys // heads * d_head
                core = key[at : at + d_head] @ query[head * d_head : (head + 1) * d_head].T
                values = torch.linalg.eigvals(core)
                assert len(values) == d_head
                count += 1
        return count

    return run


def weightwatcher() -> Callable[[Path], int]:
    """Only the query and key layers."""
    import warnings

    import torch

    warnings.simplefilter("ignore")
    import weightwatcher as library

    torch.set_num_threads(1)

    def run(folder: Path) -> int:
        watcher = library.WeightWatcher(model=str(folder), log_level="ERROR")
        described = watcher.describe()
        wanted = described[described["longname" if "longname" in described else "name"].str.contains("q_proj|k_proj")]
        details = watcher.analyze(plot=False, layers=[int(number) for number in wanted["layer_id"]])
        return len(details)

    return run


def transformer_lens(*, fold: bool) -> Callable[[Path], int]:
    """Its QK as it stands after loading, or with the norms folded in, which is what locater scans."""
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    torch.set_num_threads(1)

    def run(folder: Path) -> int:
        bridge = TransformerBridge.boot_transformers(str(folder))
        if fold:
            bridge.enable_compatibility_mode(disable_warnings=True)
        return bridge.QK.eigenvalues.shape[:2].numel()

    return run


TOOLS = {
    "locater": locater,
    "locater-eigenvalues": partial(locater, eigenvalues=True),
    "locater-as-trained": as_trained,
    "locater-without-estimate": without_estimate,
    "bare": bare,
    "weightwatcher": weightwatcher,
    "transformer-lens": partial(transformer_lens, fold=True),
    "transformer-lens-unfolded": partial(transformer_lens, fold=False),
}


def peak() -> int:
    """The process's peak memory so far, in bytes; `getrusage` would also count that of the process which started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def measure(tool: str, folder: Path) -> dict[str, float]:
    run = TOOLS[tool]()
    imports = dict(import_cpu=time.process_time(), import_peak=peak())
    cpu, wall = time.process_time(), time.perf_counter()
    heads = run(folder)
    cost = dict(cpu=time.process_time() - cpu, wall=time.perf_counter() - wall, peak=peak(), heads=heads)
    return imports | cost | dict(total_cpu=time.process_time())


if __name__ == "__main__":
    found = measure(sys.argv[1], Path(sys.argv[2]))
    print(json.dumps(found), flush=True)
