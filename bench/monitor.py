"""What watching attention costs, against its stated bounds: `python bench/monitor.py`; exits 1 if one is missed.

All on one core and in processor time, so that other work on the machine does not count. `attnspectra` is installed
without its dependencies into a temporary directory, and left out in a sentence where that cannot be done.
"""

import contextlib
import gc
import importlib
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import GPT2Config, GPT2LMHeadModel

from locater.attention import Blocks, Mask, compiled, stream
from locater.monitor import AttentionMonitor

CAUSAL, SCALE, PEER = Mask(lookahead=0), 64**-0.5, "attnspectra==0.1.3"


def seconds(*functions: Callable[[], object], repeats: int = 5) -> list[float]:
    """The best of several runs of each, taken in turn, after a warm-up."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(repeats + 1):
        for function, taken in zip(functions, times, strict=True):
            start = time.process_time()
            function()
            taken.append(time.process_time() - start)
    return [min(taken[1:]) for taken in times]


def verdict(name: str, value: float, bound: float) -> bool:
    passed = value <= bound
    print(f"{'PASS' if passed else 'FAIL'}  {name}: {value:.3f} (at most {bound:g})", flush=True)
    return passed


def heads(length: int, number: int = 3) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(1, 8, length, 64, generator=generator) for _ in range(number))


# ------------------------------------------------------------------------------------------------------------- memory
def peak_bytes() -> int:
    """The most that this process has held, in bytes; Linux can be told to forget what came before."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return 1024 * int(status.read_text().split("VmHWM:")[1].split()[0])


def forget_peak() -> None:
    with contextlib.suppress(OSError):  # then the peak of the imports stands, and what follows is measured on top of it
        Path("/proc/self/clear_refs").write_text("5")


def memory_of_a_long_text() -> None:
    """Run in a process of its own; prints the bytes held beyond queries and keys, and the seconds."""
    queries, keys = heads(16_384, 2)
    stream(queries[:, :, :600], keys[:, :, :600], mask=CAUSAL, scale=SCALE)
    gc.collect()
    forget_peak()
    before, start = peak_bytes(), time.process_time()
    found = stream(queries, keys, mask=CAUSAL, scale=SCALE)
    assert found.entropy.shape == (1, 8, 16_384)
    print(peak_bytes() - before, time.process_time() - start)


def memory() -> bool:
    done = subprocess.run([sys.executable, __file__, "memory"], capture_output=True, text=True, check=True)
    extra, taken = map(float, done.stdout.split())
    print(f"16,384 tokens, 8 heads of 64: {taken:.1f} s; the matrix would hold {8 * 16_384**2 * 4 / 1e9:.1f} GB")
    return verdict("peak extra memory in MB", extra / 1e6, 64)


# -------------------------------------------------------------------------------------------------------------- speed
def speed() -> bool:
    queries, keys, values = heads(2048)
    fused = compiled()

    def watch(blocks: Blocks | None) -> Callable[[], object]:
        return lambda: stream(queries, keys, mask=CAUSAL, scale=SCALE, blocks=blocks)

    def forward() -> torch.Tensor:
        return scaled_dot_product_attention(queries, keys, values, is_causal=True)

    attention, eager, quick = seconds(forward, watch(None), watch(fused), repeats=7)
    print(f"2,048 tokens, 8 heads of 64: sdpa {attention:.3f} s, observed {eager:.3f} s, compiled {quick:.3f} s")
    eager_passed = verdict("one observation, times the attention forward", eager / attention, 3)
    return verdict("one observation compiled, times the attention forward", quick / attention, 2) & eager_passed


# ----------------------------------------------------------------------------------------------------------- training
def train(*, num_steps: int = 100, length: int = 64) -> bool:
    """Two runs of one GPT-2-small, step by step in turn: unwatched, and watched every hundredth step."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, 50_000, (1, length))

    def step() -> None:
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    monitor, plain, watched, observed = AttentionMonitor(model, every=num_steps), 0.0, 0.0, 0.0
    for _ in range(3):
        step()
    for number in range(num_steps):
        start = time.process_time()
        step()
        middle = time.process_time()
        with monitor:
            step()
            report = monitor.step()
        end = time.process_time()
        plain, watched = plain + middle - start, watched + end - middle
        if report is not None:
            observed = end - middle
            assert number == 0 and len(report.training) == 12
    print(f"GPT-2 small, {num_steps} steps of {length} tokens: {plain:.1f} s, watched {watched:.1f} s")
    print(f"the step that is observed: {observed * num_steps / plain:.2f} times a plain one, report included")
    return verdict(f"training watched every {num_steps} steps, times the unwatched run", watched / plain, 1.01)


# --------------------------------------------------------------------------------------------------------------- peer
def beside_peer(directory: str) -> None:
    """Entropy and distance of every head of a GPT-2-shaped model: theirs from eager attention, ours under sdpa."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", directory, PEER]
    if subprocess.run(command, capture_output=True).returncode:
        print(f"{PEER} could not be installed, so it is not measured here")
        return
    sys.path.insert(0, directory)
    try:
        peer = importlib.import_module("attnspectra")
    except ImportError as reason:
        print(f"{PEER} could not be imported ({reason}), so it is not measured here")
        return
    models = {}
    for kind in ("eager", "sdpa"):
        torch.manual_seed(0)
        config = GPT2Config(n_layer=2)
        config._attn_implementation = kind
        models[kind] = GPT2LMHeadModel(config).eval()
    tokens = torch.randint(0, 50_000, (1, 512), generator=torch.Generator().manual_seed(1))
    adapter = peer.HFTransformerAdapter(models["eager"], None, architecture="decoder")
    adapter._decode_tokens = lambda ids: list(map(str, ids))
    found = {}

    def theirs() -> None:
        with torch.no_grad():
            attention = torch.stack(adapter.capture_from_ids(tokens, peer.CaptureConfig()).attentions)
            found["theirs"] = peer.attention_entropy(attention[:, 0]), peer.attention_distance(attention[:, 0])

    def their_all() -> None:
        peer.capture_and_compute(adapter, tokens)

    def ours() -> None:
        with AttentionMonitor(models["sdpa"], every=1) as monitor, torch.no_grad():
            models["sdpa"](tokens)
            found["ours"] = monitor.report()

    def bare() -> None:
        with torch.no_grad():
            models["sdpa"](tokens)

    without, mine, two, everything = seconds(bare, ours, theirs, their_all, repeats=1)
    entropy = torch.tensor([layer.statistics["entropy"] for layer in found["ours"].evaluation])
    gap = float((entropy - found["theirs"][0].reshape_as(entropy)).abs().max())
    print(f"2 layers of GPT-2 on 512 tokens, forward pass alone under sdpa {without:.2f} s")
    print(f"  locater, 7 statistics and 4 ranks, no matrix      {mine:8.2f} s")
    print(
        f"  {PEER}, entropy and distance          {two:8.2f} s (all its metrics {everything:.2f} s), keeps the matrices"
    )
    print(f"  largest difference between the two entropies {gap:.1e}")


def main() -> int:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["memory"]:
        memory_of_a_long_text()
        return 0
    passed = [memory(), speed(), train()]
    with tempfile.TemporaryDirectory() as directory:
        beside_peer(directory)
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
