"""Spectra of all heads, tool beside tool: `python bench/beside.py` prints a table of medians and spreads.

The same files, a process per run, one thread, environments of their own (`peers/`); every round turns the order round,
so that none always comes after the same one. Processor time of the job, imports apart; shown beside it: with imports.
"""

import argparse
import statistics
import subprocess
import tempfile
from pathlib import Path

import scan
from peers import environments, models

OURS = ("locater-eigenvalues", "locater", "bare")
TOOLS = (*OURS, *environments.PACKAGES)
WORDS = {
    "locater-eigenvalues": "locater, with eigenvalues",
    "locater": "locater, as `scan` is by default",
    "bare": "a bare script: eigenvalues only",
    "weightwatcher": "WeightWatcher: singular values of matrices",
    "transformer-lens": "TransformerLens, norms folded in",
    "transformer-lens-unfolded": "TransformerLens, as it loads: other numbers",
}
SHAPES = {"GPT-2 shape, 144 heads": models.make_gpt2, "415M, grouped keys, 384 heads": models.make_grouped}
Costs = dict[str, list[scan.Cost]]


def measured(folder: Path, tools: tuple[str, ...], *, rounds: int) -> tuple[Costs, dict[str, str]]:
    """Costs of every tool, and why those that did not run did not."""
    costs: Costs = {tool: [] for tool in tools}
    absent: dict[str, str] = {}
    for number in range(rounds):
        for tool in tools if number % 2 else tools[::-1]:
            if tool in absent:
                continue
            try:
                python = environments.python_for(tool) if tool in environments.PACKAGES else None
                costs[tool].append(scan.run(tool, folder, **({"python": python} if python else {})))
            except (OSError, RuntimeError, subprocess.SubprocessError) as reason:
                absent[tool] = (getattr(reason, "stderr", None) or str(reason)).strip().splitlines()[-1][:120]
    return {tool: runs for tool, runs in costs.items() if runs}, absent


def line(tool: str, runs: list[scan.Cost], reference: float) -> str:
    taken = [cost["cpu"] for cost in runs]
    middle, whole = statistics.median(taken), statistics.median(cost["total_cpu"] for cost in runs)
    peak = max(cost["peak"] for cost in runs) / scan.MEGABYTE
    spread = f"{min(taken):.2f} to {max(taken):.2f}"
    return f"| {WORDS[tool]} | {middle:.2f} s | {spread} | {middle / reference:.2f} | {whole:.1f} s | {peak:.0f} MB |"


def show(name: str, costs: Costs, absent: dict[str, str]) -> None:
    reference = statistics.median(cost["cpu"] for cost in costs[OURS[0]])
    print(f"\n| {name} | median | least to most | ÷ locater, with eigenvalues | with imports | peak |")
    print("|---|---|---|---|---|---|")
    for tool, runs in costs.items():
        print(line(tool, runs, reference))
    print()
    for tool, reason in absent.items():
        print(f"not measured: {WORDS[tool]}: {reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one small file, a round, no other tools")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        for number, (name, make) in enumerate(list(SHAPES.items())[: 1 if chosen.quick else None]):
            make(Path(root) / str(number))
            # The peers are asked for the larger file alone: on the smaller one they take most of their time to start.
            tools = OURS if chosen.quick or make is models.make_gpt2 else TOOLS
            show(name, *measured(Path(root) / str(number), tools, rounds=1 if chosen.quick else chosen.rounds))


if __name__ == "__main__":
    main()
