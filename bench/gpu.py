"""What watching costs on a GPU, and whether it is right there: `python bench/gpu.py`, ten minutes on one card.

Each kernel that is installed against a materialised softmax in float32; what a watched step, hooks that do not look and
LocAteR add to a step, as written, compiled and under CUDA graphs; memory. Prints a table to paste. Without a GPU the
same code runs on a few tokens, as a rehearsal, and says so; FlexAttention is not compiled there.
"""

import importlib
import platform
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from locater import LocAteR
from locater.monitor import AttentionMonitor

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
LAYERS, HEADS, SIZE = (12, 12, 64) if CUDA else (2, 2, 16)
TEXTS, TOKENS = (8, 2048) if CUDA else (2, 128)
REPEATS = 20 if CUDA else 2
ALLOWED = 2e-2 if CUDA else 1e-4  # queries and keys are in bfloat16 on a GPU, and so are the reference's
WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "as written": lambda model: model,
    "compiled": torch.compile,
    "CUDA graphs": lambda model: torch.compile(model, mode="reduce-overhead"),
}
Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


# ------------------------------------------------------------------------------------------------------------ kernels
def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True).transpose(1, 2)


def flex(tokens: int) -> Kernel:
    mask = create_block_mask(lambda text, head, query, key: query >= key, None, None, tokens, tokens, device=DEVICE)
    compiled = torch.compile(flex_attention) if CUDA else flex_attention

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(*(part.transpose(1, 2) for part in (q, k, v)), block_mask=mask).transpose(1, 2)  # type: ignore

    return call


def flash(module: str) -> Kernel | None:
    """The function of a flash-attn package, if it is installed."""
    try:
        function = importlib.import_module(module).flash_attn_func
    except (ImportError, OSError, AttributeError):
        return None

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        output = function(q, k, v, causal=True)
        return output[0] if isinstance(output, tuple) else output

    return call


def kernels() -> dict[str, Kernel | None]:
    packages = {"flash 2": "flash_attn", "flash 3": "flash_attn_interface", "flash 4": "flash_attn.cute"}
    return {"SDPA": sdpa, "Flex": flex(TOKENS)} | {name: flash(module) for name, module in packages.items()}


# -------------------------------------------------------------------------------------------------------------- model
class Attention(nn.Module):
    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self.kernel, width = kernel, HEADS * SIZE
        self.norm = nn.RMSNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def sides(self, x: Tensor) -> list[Tensor]:
        x = self.norm(x)
        return [side(x).unflatten(-1, (HEADS, SIZE)) for side in (self.q_proj, self.k_proj, self.v_proj)]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.kernel(*self.sides(x)).flatten(2))


class Model(nn.Module):
    def __init__(self, kernel: Kernel, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(kernel) for _ in range(layers))
        self.to(DEVICE, DTYPE)
        with torch.no_grad():
            for layer in self.layers:
                layer.q_proj.weight.mul_(4.0)  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def inputs() -> Tensor:
    return torch.randn(TEXTS, TOKENS, HEADS * SIZE, device=DEVICE, dtype=DTYPE)


# ---------------------------------------------------------------------------------------------------------- agreement
@torch.no_grad()
def agreement(kernel: Kernel) -> float:
    """The largest difference of an entropy or largest logit per head from a materialised softmax, relative to it."""
    model, x = Model(kernel, layers=1), inputs()
    with AttentionMonitor(model, every=1) as monitor:
        model(x)
        report = monitor.report()
    layer: Any = model.layers[0]
    q, k, _ = (part.transpose(1, 2).float() for part in layer.sides(x))
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=DEVICE).triu(1)
    entropy, largest = [], []
    for head in range(HEADS):
        logits = (q[:, head] @ k[:, head].mT * SIZE**-0.5).masked_fill(hidden, -torch.inf)
        p = logits.softmax(-1)
        entropy.append(float(-torch.xlogy(p, p).sum(-1).mean()))
        largest.append(float(logits.amax()))
    found = report.no_grad[0].statistics
    pairs = [*zip(found["entropy"], entropy, strict=True), *zip(found["max_logit"], largest, strict=True)]
    return max(abs(ours - theirs) / max(1e-6, abs(theirs)) for ours, theirs in pairs)


# --------------------------------------------------------------------------------------------------------------- cost
def seconds(step: Callable[[], object]) -> float:
    taken = []
    for _ in range(REPEATS + 2):
        start = time.perf_counter()
        step()
        if CUDA:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return median(taken[2:])


def peak(step: Callable[[], object]) -> float:
    """Megabytes at most during a step; nothing is measured without a GPU."""
    if not CUDA:
        return float("nan")
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() / 1e6


def cost(kernel: Kernel, way: str, *, has_gradients: bool) -> dict[str, float]:
    """A step alone, with hooks that do not look, watched, and with LocAteR."""
    torch.compiler.reset()
    model, x = Model(kernel), inputs()
    called = WAYS[way](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.set_grad_enabled(has_gradients):
            loss = called(x).float().square().mean()
        if has_gradients:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    found = {"step": seconds(step), "peak": peak(step)}
    with AttentionMonitor(called, every=1) as monitor:

        def watched() -> None:
            step()
            monitor.step()

        found |= {"watched": seconds(watched), "peak watched": peak(watched)}
        monitor.every, monitor.num_steps = 10**9, 1
        found["idle"] = seconds(watched)
    if has_gradients:
        locater = LocAteR(model, strength=1e-3, optimizer=optimizer, sample=x)

        def held() -> None:
            step()
            locater.step()

        found["LocAteR"] = seconds(held)
    return found


def cells(found: dict[str, float]) -> list[str]:
    """Milliseconds of a step, and what the rest is of it."""
    idle, watched = (found[name] / found["step"] for name in ("idle", "watched"))
    held = f"×{found['LocAteR'] / found['step']:.3f}" if "LocAteR" in found else ""
    every = f"×{idle + (watched - idle) / 100:.4f}"
    more = f"{found['peak watched'] - found['peak']:.0f}"
    return [f"{1e3 * found['step']:.1f}", f"×{idle:.4f}", f"×{watched:.2f}", every, held, more]


def main() -> int:
    name = torch.cuda.get_device_name() if CUDA else f"no GPU: a rehearsal on {platform.machine()}, not a measurement"
    print(f"{name}; torch {torch.__version__}, Python {platform.python_version()}; {LAYERS} layers of {HEADS} heads of")
    print(f"{SIZE}, {TEXTS} texts of {TOKENS} tokens, {DTYPE}\n")
    print("| kernel | way | gap to a softmax | step ms | not looking | watched | every 100th | LocAteR | MB more |")
    print("|---|---|---|---|---|---|---|---|---|")
    worst = 0.0
    for kind, kernel in kernels().items():
        if kernel is None:
            print(f"| {kind} | not installed | | | | | | | |")
            continue
        gap = agreement(kernel)
        worst = max(worst, gap)
        for way in WAYS if CUDA or kind != "Flex" else ("as written",):
            found = cost(kernel, way, has_gradients=CUDA or kind != "Flex")
            print(f"| {kind} | {way} | {gap:.1e} | {' | '.join(cells(found))} |", flush=True)
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
