"""What a scan costs against its stated bounds and against rivals: `python bench/scan.py`; exits 1 if one is missed.

Every tool runs in a process of its own on one thread, on the same files, turn by turn; the best of its runs counts.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from peers import environments, models

JOBS = Path(__file__).parent / "peers" / "jobs.py"
MEGABYTE = 2**20
ALLOWED_MEGABYTES = 96  # beside the imports and three times the largest tensor
Cost = dict[str, float]


def run(tool: str, folder: Path, *, python: Path | str = sys.executable) -> Cost:
    """One run of one tool on one checkpoint."""
    done = subprocess.run([python, JOBS, tool, folder], capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["no message"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def best(runs: list[Cost]) -> Cost:
    """The least of every cost: what else the machine does can only add."""
    return {name: min(cost[name] for cost in runs) for name in runs[0]}


def verdict(name: str, value: float, bound: float, *, at_least: bool = False) -> bool:
    passed = value >= bound if at_least else value <= bound
    print(f"{'PASS' if passed else 'FAIL'}  {name}: {value:.3g} ({'at least' if at_least else 'at most'} {bound:g})")
    return passed


def show(tool: str, cost: Cost) -> None:
    megabytes = cost["peak"] / MEGABYTE
    own = (cost["peak"] - cost["import_peak"]) / MEGABYTE
    print(
        f"  {tool:26} {cost['cpu']:8.2f} s CPU {cost['wall']:8.2f} s wall {cost['total_cpu']:8.2f} s CPU with imports"
        f" {megabytes:7.0f} MB peak, {own:.0f} MB beyond the imports"
    )


def against_bare(name: str, folder: Path, repeats: int, *, bounds: tuple[float, float]) -> tuple[list[bool], Cost]:
    """The bare script is the least that gives eigenvalues at all; locater also folds, checks and predicts.

    A scan computes eigenvalues on request, so both are held against it: as they are by default, and like with like.
    """
    costs: dict[str, list[Cost]] = {"bare": [], "locater": [], "locater-eigenvalues": []}
    for _ in range(repeats):
        for tool, runs in costs.items():
            runs.append(run(tool, folder))
    bare, ours, full = (best(runs) for runs in costs.values())
    print(f"{name}: {ours['heads']:.0f} heads")
    show("locater", ours)
    show("locater, with eigenvalues", full)
    show("bare script", bare)
    print(f"  default to bare: CPU {ours['cpu'] / bare['cpu']:.2f}, wall {ours['wall'] / bare['wall']:.2f}, "
          f"peak memory {ours['peak'] / bare['peak']:.2f}")  # fmt: skip
    allowed = ALLOWED_MEGABYTES + 3 * models.largest_tensor(folder) / MEGABYTE
    assert ours["heads"] == bare["heads"]
    results = [
        verdict(f"{name}, CPU times the bare script", ours["cpu"] / bare["cpu"], bounds[0]),
        verdict(f"{name}, the same with eigenvalues", full["cpu"] / bare["cpu"], bounds[1]),
        verdict(f"{name}, MB beyond the imports", (ours["peak"] - ours["import_peak"]) / MEGABYTE, allowed),
    ]
    return results, full


def estimate_share(name: str, folder: Path, repeats: int) -> bool:
    """What the estimate of behaviour adds to a scan, turn by turn."""
    costs: dict[str, list[Cost]] = {"locater-as-trained": [], "locater-without-estimate": []}
    for _ in range(repeats):
        for tool, runs in costs.items():
            runs.append(run(tool, folder))
    ours, without = (best(runs) for runs in costs.values())
    return verdict(f"{name}, CPU times the scan without estimates", ours["cpu"] / without["cpu"], 1.15)


def against_rival(tool: str, folder: Path, ours: Cost, *, comparable: bool = True) -> list[bool]:
    """A rival that does less than locater is shown, not judged."""
    try:
        python = environments.python_for(tool)
        theirs = best([run(tool, folder, python=python) for _ in range(2)])
    except (OSError, RuntimeError, subprocess.SubprocessError) as reason:
        detail = (getattr(reason, "stderr", None) or str(reason)).strip().splitlines()[-1]
        print(f"SKIPPED  {tool}: {detail}")
        return []
    show(tool, theirs)
    ratio = {cost: theirs[cost] / ours[cost] for cost in ("cpu", "total_cpu", "wall", "peak")}
    print(f"  ratios to locater: CPU {ratio['cpu']:.1f}, wall {ratio['wall']:.1f}, peak memory {ratio['peak']:.1f}")
    if not comparable:
        return []
    return [
        verdict(f"{tool}, times the CPU of locater", ratio["cpu"], 10, at_least=True),
        verdict(f"{tool}, the same with imports", ratio["total_cpu"], 1, at_least=True),
    ]


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        models.make_gpt2(root / "gpt2")
        results, _ = against_bare("GPT-2 shape", root / "gpt2", repeats=5, bounds=(1.3, 2.1))
        results.append(estimate_share("GPT-2 shape", root / "gpt2", repeats=5))
        models.make_grouped(root / "grouped")
        found, ours = against_bare("415M, grouped keys, bfloat16", root / "grouped", repeats=5, bounds=(1.25, 1.8))
        results += found
        results.append(estimate_share("415M, grouped keys", root / "grouped", repeats=5))
        for tool in environments.PACKAGES:
            results += against_rival(tool, root / "grouped", ours, comparable=not tool.endswith("unfolded"))
        models.make_seven_billion(root / "seven")
        results += against_bare("7B shape, queries and keys", root / "seven", repeats=2, bounds=(1.25, 1.8))[0]
        results.append(estimate_share("7B shape", root / "seven", repeats=2))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
