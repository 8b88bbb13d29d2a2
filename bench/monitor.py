"""What watching attention costs, against its stated bounds: `python bench/monitor.py`; exits 1 if one is missed.

All on one core and in processor time, so that other work on the machine does not count. `attnspectra` is installed
without its dependencies into a temporary directory, and left out in a sentence where that cannot be done.
"""

import contextlib
import ctypes
import gc
import importlib.util
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from locater.attention import Mask, Scores, stream
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


def megabytes(function: Callable[[], object]) -> float:
    """What the process holds at most while it runs, beyond what it held before."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # or else freed memory that is used again would not count
    forget_peak()
    before = peak_bytes()
    function()
    return (peak_bytes() - before) / 1e6


def memory_of_a_long_text() -> None:
    """Run in a process of its own; prints the megabytes held beyond queries and keys, and the seconds."""
    queries, keys = heads(16_384, 2)
    stream(queries[:, :, :600], keys[:, :, :600], mask=CAUSAL, scores=Scores(SCALE))
    start = time.process_time()
    extra = megabytes(lambda: stream(queries, keys, mask=CAUSAL, scores=Scores(SCALE)))
    print(extra, time.process_time() - start)


def memory() -> bool:
    done = subprocess.run([sys.executable, __file__, "memory"], capture_output=True, text=True, check=True)
    extra, taken = map(float, done.stdout.split())
    print(f"16,384 tokens, 8 heads of 64: {taken:.1f} s; the matrix would hold {8 * 16_384**2 * 4 / 1e9:.1f} GB")
    return verdict("peak extra memory in MB", extra, 64)


class Flexible(torch.nn.Module):
    """Two layers of compiled FlexAttention, 4 heads of 64."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = torch.nn.ModuleList(torch.nn.Linear(256, 768) for _ in range(2))
        self.kernel = torch.compile(flex_attention)

    def forward(self, x: torch.Tensor, mask: Any) -> torch.Tensor:
        for projection in self.projections:
            q, k, v = projection(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
            x = x + self.kernel(q, k, v, block_mask=mask).transpose(1, 2).flatten(2)
        return x


@torch.no_grad()
def memory_under_flex(length: int = 8192) -> None:
    """Run in a process of its own; prints the megabytes of a pass, unwatched and watched: on a CPU forward only."""
    model, x = Flexible(), torch.randn(1, length, 256)
    mask = create_block_mask(lambda text, head, query, key: query >= key, 1, 1, length, length, device="cpu")
    model(x, mask)
    unwatched = megabytes(lambda: model(x, mask))
    with AttentionMonitor(model, every=1) as monitor:
        model(x, mask)
        monitor.report()
        print(unwatched, megabytes(lambda: model(x, mask)))


def flex() -> bool:
    done = subprocess.run([sys.executable, __file__, "flex"], capture_output=True, text=True, check=True)
    unwatched, watched = map(float, done.stdout.split())
    print(f"8,192 tokens, 2 layers of FlexAttention: {unwatched:.0f} MB unwatched, {watched:.0f} MB watched")
    return verdict("more memory of a watched pass under FlexAttention in MB", watched - unwatched, 64)


# -------------------------------------------------------------------------------------------------------------- speed
def speed() -> bool:
    queries, keys, values = heads(2048)

    def watch() -> object:
        return stream(queries, keys, mask=CAUSAL, scores=Scores(SCALE))

    def forward() -> torch.Tensor:
        return scaled_dot_product_attention(queries, keys, values, is_causal=True)

    attention, observed = seconds(forward, watch, repeats=7)
    print(f"2,048 tokens, 8 heads of 64: sdpa {attention:.3f} s, observed {observed:.3f} s")
    return verdict("one observation, times the attention forward", observed / attention, 1.6)


# ----------------------------------------------------------------------------------------------------------- training
def train(*, num_steps: int = 100, length: int = 64) -> bool:
    """The same GPT-2-small twice, step by step in turn: unwatched, and watched every hundredth step."""
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config()).train()
        runs.append((model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)))
    tokens = torch.randint(0, 50_000, (1, length))

    def step(watched: bool) -> float:
        model, optimizer = runs[watched]
        start = time.process_time()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if watched and monitor.hooks is not None:
            monitor.step()
        return time.process_time() - start

    monitor = AttentionMonitor(runs[True][0], every=num_steps)
    for _ in range(2):
        step(False), step(True)
    taken: dict[bool, list[float]] = {False: [], True: []}
    with monitor:
        for number in range(num_steps):
            for watched in (False, True) if number % 2 else (True, False):  # neither always comes second
                taken[watched].append(step(watched))
        monitor.num_steps = 0  # once more, now that there are updates of the weights to measure
        observed = step(True)
    plain, watched = taken[False], taken[True]
    print(f"GPT-2 small, {num_steps} steps of {length} tokens: {sum(plain):.1f} s, watched {sum(watched):.1f} s")
    ratios = torch.tensor(watched[1:]) / torch.tensor(plain[1:])
    error = float(ratios.std()) / len(ratios) ** 0.5
    print(f"idle steps side by side: {float(ratios.mean()):.4f} ± {error:.4f}; a busy machine hides a percent")
    extra, idle = max(0.0, observed - median(plain)), idle_seconds()
    print(f"so by parts: {1000 * idle:.2f} ms in every step, {extra:.2f} s more in the one that is observed")
    ratio = 1 + (idle + extra / num_steps) / median(plain)
    return verdict(f"training watched every {num_steps} steps, times the unwatched run", ratio, 1.005)


@torch.no_grad()
def idle_seconds() -> float:
    """What hooks that are not looking cost a forward pass: as many layers, but so narrow that it can be told apart."""
    model = GPT2LMHeadModel(GPT2Config(n_embd=24, vocab_size=64)).eval()
    tokens, monitor = torch.zeros(1, 4, dtype=torch.long), AttentionMonitor(model, every=2)
    monitor.num_steps = 1
    taken: dict[bool, list[float]] = {False: [], True: []}
    for number in range(40):
        attached = bool(number % 2)
        if attached:
            monitor.attach()
        for _ in range(10):
            start = time.process_time()
            model(tokens)
            taken[attached].append(time.process_time() - start)
        monitor.detach()
    return median(taken[True]) - median(taken[False])


# --------------------------------------------------------------------------------------------------------------- peer
def import_peer(directory: str) -> Any:
    """The other library from a directory of its own, or None with a sentence."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", directory, PEER]
    if subprocess.run(command, capture_output=True).returncode:
        return print(f"{PEER} could not be installed, so it is not measured here")
    sys.path.insert(0, directory)
    if importlib.util.find_spec("IPython") is None:  # it asks for a notebook's display when it is imported
        sys.modules["IPython.display"] = sys.modules["IPython"] = SimpleNamespace(display=print)  # type: ignore
    try:
        return importlib.import_module("attnspectra")
    except ImportError as reason:
        return print(f"{PEER} could not be imported ({reason}), so it is not measured here")


def gpt2(kind: str) -> GPT2Model:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=2, n_positions=2048)
    config._attn_implementation = kind
    return GPT2Model(config).eval()


@torch.no_grad()
def beside_peer(peer: Any) -> None:
    """Entropy and distance of every head of a GPT-2-shaped model: theirs from eager attention, ours under sdpa."""
    eager, fused = gpt2("eager"), gpt2("sdpa")
    tokens = torch.randint(0, 50_000, (1, 2048), generator=torch.Generator().manual_seed(1))
    adapter = peer.HFTransformerAdapter(eager, None, architecture="decoder")
    adapter._decode_tokens = lambda ids: list(map(str, ids))
    found = {}

    def theirs() -> None:
        attention = torch.cat(list(adapter.capture_from_ids(tokens, peer.CaptureConfig()).attentions))
        found["theirs"] = peer.attention_entropy(attention), peer.attention_distance(attention)

    def ours() -> None:
        with AttentionMonitor(fused, every=1) as monitor:
            fused(tokens)
            found["ours"] = monitor.report()

    bare_eager, two, bare, mine = seconds(lambda: eager(tokens), theirs, lambda: fused(tokens), ours, repeats=2)
    entropy = torch.tensor([layer.statistics["entropy"] for layer in found["ours"].evaluation])
    gap = float((entropy - found["theirs"][0].reshape_as(entropy)).abs().max())
    print("2 layers of GPT-2 on 2,048 tokens, forward pass included:")
    print(f"  locater, 7 statistics and 4 ranks: {mine:.2f} s beside {bare:.2f} s under sdpa, {megabytes(ours):.0f} MB")
    print(f"  {PEER}, entropy and distance: {two:.2f} s beside {bare_eager:.2f} s eager, {megabytes(theirs):.0f} MB")
    print(f"  largest difference between the two entropies {gap:.1e}")


def main() -> int:
    torch.set_num_threads(1)
    if sys.argv[1:] == ["memory"]:
        memory_of_a_long_text()
        return 0
    if sys.argv[1:] == ["flex"]:
        memory_under_flex()
        return 0
    passed = [memory(), flex(), speed(), train()]
    with tempfile.TemporaryDirectory() as directory:
        peer = import_peer(directory)
        if peer is not None:
            beside_peer(peer)
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
