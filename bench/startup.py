"""Time to the first byte of `locater scan` against `import torch, safetensors`: `python bench/startup.py`.

Both are run in turn in processes of their own, nine times, on one thread; medians are compared. Seconds of the
processor are given beside those of the clock: what else a machine does adds to the clock alone. A first run of each is
not counted: it writes the bytecode, which an installed package has (and PYTHONDONTWRITEBYTECODE would deny this one).
"""

import os
import subprocess
import sys
from statistics import median

REPEATS = 9
BOUND = 1.15
IMPORTS = "import torch, safetensors"
SCAN = """
import sys
sys.argv = ["locater", "scan"]
from locater.cli import main
main()
"""
# What it took until the first byte, told on standard error by a process that then ends at once.
WATCH = """
import io, os, sys, time
class First(io.TextIOWrapper):
    def write(self, text):
        if text:
            print(time.process_time(), time.perf_counter() - START, file=sys.stderr, flush=True)
            os._exit(0)
        return 0
START = time.perf_counter()
sys.stdout = First(sys.stdout.buffer, encoding="utf-8")
"""


def seconds(program: str) -> tuple[float, float]:
    """Seconds of the processor and of the clock until the program writes."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    told = subprocess.run(
        [sys.executable, "-c", WATCH + program + "\nprint('done')"],
        capture_output=True, text=True, check=True, env=env | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    cpu, clock = told.stderr.split()[-2:]
    return float(cpu), float(clock)


def main() -> int:
    runs: dict[str, list[tuple[float, float]]] = {IMPORTS: [], SCAN: []}
    for repeat in range(1 + REPEATS):
        for program, found in runs.items():
            found += [seconds(program)] * (repeat > 0)
    (bare_cpu, bare), (cpu, clock) = ([median(part) for part in zip(*found, strict=True)] for found in runs.values())
    print(f"imports: {bare_cpu:.2f} s CPU, {bare:.2f} s; first byte of a scan: {cpu:.2f} s CPU, {clock:.2f} s")
    for name, ratio in (("CPU", cpu / bare_cpu), ("clock", clock / bare)):
        print(f"{'PASS' if ratio <= BOUND else 'FAIL'}  {name}: {ratio:.2f} (at most {BOUND})")
    return 0 if cpu / bare_cpu <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
