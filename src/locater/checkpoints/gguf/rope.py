"""Rotary scaling that GGUF files keep as tensors of factors, back to the settings it came from."""

import math
from collections.abc import Callable, Collection

import torch
from jaxtyping import Float
from torch import Tensor

from ...errors import refusal
from ...records import Json

# Llama 3's settings; only the factor differs between its releases.
LOW, HIGH, ORIGINAL = 1.0, 4.0, 8192


def add_factors(config: Json, names: Collection[str], read: Callable[[str], Tensor]) -> None:
    """Put `rope_scaling` into the configuration where the file holds factors and the settings said nothing."""
    if "rope_scaling" in config:
        return
    full = (config.get("rope_parameters") or {}).get("full_attention", {})
    if full.get("rope_type") == "proportional":
        full["partial_rotary_factor"] = share_that_turns(
            read("rope_freqs.weight") if "rope_freqs.weight" in names else None
        )
        return
    if "rope_freqs.weight" in names:
        factors = read("rope_freqs.weight").float()
        scaling = llama3_settings(factors, theta=config.get("rope_theta", 10_000.0))
        if scaling is None and bool((factors != 1).any()):
            remedy = "scan the model's safetensors, which say how its positions are stretched"
            raise refusal("Llama 3's factors in rope_freqs.weight", "others", remedy)
        config |= {"rope_scaling": scaling} if scaling else {}
    if {"rope_factors_long.weight", "rope_factors_short.weight"} <= set(names):
        long, short = (read(f"rope_factors_{kind}.weight").float().flatten().tolist() for kind in ("long", "short"))
        config["rope_scaling"] = {"rope_type": "longrope", "long_factor": long, "short_factor": short}


def share_that_turns(factors: Float[Tensor, "..."] | None) -> float:
    """Gemma 4's full layers: frequencies of the first pairs as they are, those of the rest divided by 1e30."""
    turns = torch.zeros(0, dtype=torch.bool) if factors is None else factors.flatten() == 1
    number = int(turns.sum())
    if factors is None or not number or not turns[:number].all() or bool((factors.flatten()[number:] < 1e29).any()):
        remedy = "scan the model's safetensors, which say which pairs turn"
        raise refusal("rope_freqs.weight of ones, then of 1e30", "others" if number else "no ones", remedy)
    return number / len(turns)


def llama3_settings(factors: Float[Tensor, "..."], *, theta: object) -> Json | None:
    """The settings whose factors these are; none if Llama 3's rule does not give them."""
    largest = factors.max().item() if factors.numel() else 0.0
    if factors.ndim != 1 or not isinstance(theta, float | int) or not theta > 0 or not 1 < largest < math.inf:
        return None
    if not torch.allclose(llama3_factors(len(factors), theta=float(theta), factor=largest), factors, rtol=1e-3):
        return None
    return {
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": ORIGINAL,
    }


def llama3_factors(pairs: int, *, theta: float, factor: float) -> Float[Tensor, " pairs"]:
    """Divisors of the frequencies: 1 for short waves, `factor` for long ones, and a smooth passage between."""
    waves = 2 * math.pi * theta ** (torch.arange(pairs) / pairs)
    smooth = ((ORIGINAL / waves - LOW) / (HIGH - LOW)).clamp(0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
