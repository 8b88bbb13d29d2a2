"""`python runs/fleet.py`: small runs of six kinds, half of which diverge, and what was tried on those.

Each run is a GPT of one's own, watched by the monitor. Rows go to `runs/measured/fleet`; a run whose row is there is
not run again. `python runs/fleet_score.py` fits thresholds on the even seeds and judges them on the odd ones.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from locater.monitor import AttentionMonitor, Report, RollBack
from locater.monitor.report import SERIOUS
from locater.records import Json
from locater.stabilisers import Auto, LocAteR, QKClip, QKNorm, Stabiliser
from locater.texts import embedded_text

FOLDER = Path(__file__).parent / "measured" / "fleet"
EVERY, SEEDS, VOCABULARY = 10, 6, 96
CLIP = 30.0  # QK-Clip's threshold: below the alarm's at every length here
SLOWER = 0.2  # times the rate, where that is the remedy
ROLL_BACK = "RollBack"


@dataclass(frozen=True)
class Setting:
    """One kind of run: what is common to its calm and its wild one, and a rate for each seed of either."""

    calm: tuple[float, ...]
    wild: tuple[float, ...]
    num_layers: int = 2
    context: int = 48
    batch: int = 8
    steps: int = 160
    warmup: tuple[int, int] = (20, 20)  # of the calm and of the wild one
    is_post: bool = False
    bf16: bool = False
    is_decayed: tuple[bool, bool] = (True, True)  # queries and keys too
    data: str = "text"


RATES = (3e-3, 4e-3, 5e-3, 6e-3, 7e-3, 8e-3), (2.5e-2, 4e-2, 6e-2, 0.1, 0.15, 0.2)
KINDS = {
    "rate": Setting(*RATES),
    "depth without warm-up": Setting(
        (2e-3, 2.5e-3, 3e-3, 4e-3, 5e-3, 6e-3), (1e-2, 1.5e-2, 2e-2, 3e-2, 4e-2, 5e-2),
        num_layers=6, batch=6, warmup=(60, 0), is_post=True,
    ),
    "bf16": Setting(*RATES, bf16=True),
    "long context": Setting(*RATES, context=192, batch=2),
    "no decay of queries and keys": Setting(*RATES, is_decayed=(True, False)),
    "growth that saturates": Setting(
        (4e-3, 5e-3, 7e-3, 1e-2, 1.5e-2, 2e-2), (6e-2, 8e-2, 0.1, 0.12, 0.15, 0.2), steps=200, data="copies"
    ),
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int, is_post: bool) -> None:
        super().__init__()
        self.num_heads, self.is_post = num_heads, is_post
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.feedforward = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        return self.out(scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_post:
            x = self.first(x + self.attend(x))
            return self.second(x + self.feedforward(x))
        x = x + self.attend(self.first(x))
        return x + self.feedforward(self.second(x))


class GPT(nn.Module):
    def __init__(self, setting: Setting, width: int = 32, num_heads: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(setting.context, width)
        self.blocks = nn.ModuleList(Block(width, num_heads, setting.is_post) for _ in range(setting.num_layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@cache
def characters() -> Tensor:
    return torch.tensor([ord(one) % VOCABULARY for one in embedded_text()[:400_000]])


def batches(setting: Setting, seed: int) -> Iterator[Tensor]:
    """Characters of text, or random ones that come again two places later: to copy them, attention must be sharp."""
    generator = torch.Generator().manual_seed(seed)
    text = characters()
    for _ in range(setting.steps):
        if setting.data == "copies":
            yield torch.randint(VOCABULARY, (setting.batch, setting.context + 1), generator=generator)
        else:
            starts = torch.randint(len(text) - setting.context - 1, (setting.batch,), generator=generator)
            yield torch.stack([text[start : start + setting.context + 1] for start in starts.tolist()])


def optimiser(model: GPT, rate: float, is_decayed: bool) -> torch.optim.AdamW:
    named = dict(model.named_parameters())
    free = [value for name, value in named.items() if "qkv" in name and not is_decayed]
    held = [value for name, value in named.items() if "qkv" not in name or is_decayed]
    groups = [{"params": held, "weight_decay": 0.05}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=rate)


Remedy = Callable[[GPT, torch.optim.Optimizer, Tensor], Stabiliser | None]


def _slower(model: GPT, optimizer: torch.optim.Optimizer, sample: Tensor) -> None:
    for group in optimizer.param_groups:
        group["initial_lr"] *= SLOWER


def _norm(model: GPT, optimizer: torch.optim.Optimizer, sample: Tensor) -> Stabiliser:
    norm = QKNorm(model, sample=sample)
    optimizer.add_param_group({"params": norm.parameters(), "initial_lr": optimizer.param_groups[0]["initial_lr"]})
    return norm


REMEDIES: dict[str, Remedy] = {
    "lower rate": _slower,
    "QKClip": lambda model, optimizer, sample: QKClip(model, threshold=CLIP, sample=sample),
    "QKNorm": _norm,
    "LocAteR auto": lambda model, optimizer, sample: LocAteR(
        model, strength="auto", optimizer=optimizer, sample=sample
    ),
    "LocAteR third": lambda model, optimizer, sample: LocAteR(
        model, strength=Auto(share=1 / 3), optimizer=optimizer, sample=sample
    ),
}


def run(kind: str, is_wild: bool, seed: int, remedy: str) -> Json:
    """One run; a remedy comes at its first serious alarm, and only RollBack goes back to an earlier state."""
    setting = KINDS[kind]
    rate = (setting.wild if is_wild else setting.calm)[seed]
    torch.manual_seed(seed)
    model = GPT(setting)
    optimizer = optimiser(model, rate, setting.is_decayed[is_wild])
    for group in optimizer.param_groups:
        group["initial_lr"] = rate
    on_alarm = {kind: back for kind in SERIOUS} if remedy == ROLL_BACK and (back := RollBack(SLOWER)) else None
    monitor = AttentionMonitor(model, every=EVERY, optimizer=optimizer, on_alarm=on_alarm)
    losses, reports, applied, begun = [], [], None, None
    with monitor:
        for step, tokens in enumerate(batches(setting, seed)):
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * min(1.0, (step + 1) / max(1, setting.warmup[is_wild]))
            with torch.autocast("cpu", torch.bfloat16, enabled=setting.bf16):
                scores = model(tokens[:, :-1])
            wanted = tokens[:, 1:] if setting.data == "text" else tokens[:, :-1].roll(2, 1)
            loss = cross_entropy(scores.float()[:, 2:].flatten(0, 1), wanted[:, 2:].flatten())
            losses.append(float(loss.detach()))
            if not math.isfinite(losses[-1]):
                break
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if applied is not None:
                applied.step()
            report = monitor.step()
            if report is not None:
                reports.append(report)
                if remedy and begun is None and any(alarm.kind in SERIOUS for alarm in report.alarms):
                    begun = step
                    applied = REMEDIES[remedy](model, optimizer, tokens[:, :-1]) if remedy in REMEDIES else None
    place = {"kind": kind, "wild": is_wild, "seed": seed, "remedy": remedy, "rate": rate, "begun": begun}
    return place | {"steps": setting.steps, "losses": _thinned(losses), "reports": [_short(one) for one in reports]}


def _thinned(losses: list[float]) -> list[float | None]:
    """Means over EVERY steps; None where one is not finite."""
    means = [fmean(losses[start : start + EVERY]) for start in range(0, len(losses), EVERY)]
    return [_kept(mean) for mean in means]


def _short(report: Report) -> Json:
    """Of each layer: the largest logit of every head, log n, lowest entropy, residual, largest σ₁ and η."""
    layers = []
    for layer in report.training:
        numbers = [min(layer.statistics["normalised_entropy"]), layer.ranks.get("residual", math.nan)]
        numbers += [max(layer.weights.get(name, (math.nan,))) for name in ("sigma_1", "eta")]
        numbers += [layer.log_keys, layer.rows_not_finite]
        layers.append([[_kept(one) for one in layer.statistics["max_logit"]], *map(_kept, numbers)])
    return {"step": report.step, "layers": layers, "alarms": sorted({alarm.kind for alarm in report.alarms})}


def _kept(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None


def points() -> Iterator[tuple[str, bool, int, str]]:
    """Seed by seed, so that half a fleet is one too; the remedies behind the runs that they are for."""
    for seed in range(SEEDS):
        yield from ((kind, is_wild, seed, "") for kind in KINDS for is_wild in (False, True))
    for seed in range(SEEDS):
        yield from ((kind, True, seed, remedy) for kind in KINDS for remedy in (*REMEDIES, ROLL_BACK))


def main(*, folder: Path, seconds: float) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "rows.jsonl"
    kept = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    done = {(row["kind"], row["wild"], row["seed"], row["remedy"]) for row in kept}
    todo = [point for point in points() if point not in done]
    began = time.monotonic()
    for number, point in enumerate(todo, 1):
        if time.monotonic() - began > seconds:
            break
        row = run(*point)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":"), allow_nan=False) + "\n")
        spent = time.monotonic() - began
        print(f"{number} of {len(todo)}, {spent:.0f} s: {point} loss {row['losses'][-1]}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further run after so long")
    main(**vars(parser.parse_args()))
