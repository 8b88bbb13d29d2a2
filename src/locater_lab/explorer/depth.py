"""Planes of the explorer for several layers, by the theory of depth."""

from collections.abc import Sequence

from locater.records import Json

LENGTH, NUM_DRAWS = 32, 8
# What can be chosen: the layer that is shown, and whether layers have a residual stream and norms.
CHOICES = {"2 layers": (2, False), "4 layers": (4, False), "8 layers": (8, False), "8 layers with norms": (8, True)}


def depth_planes(traces: Sequence[float], deviations: Sequence[float]) -> list[Json]:
    """Entropy in the last layer and rank residual behind it, at most 1, at every point of the plane. Some seconds."""
    found = {norm: [[_layers(x, y, norm) for x in traces] for y in deviations] for norm in (False, True)}
    planes = []
    for title, (last, norm) in CHOICES.items():
        plane: Json = {"title": title, "length": LENGTH}
        for name in ("entropy", "residual"):
            plane[name] = [[point[name][last - 1] for point in row] for row in found[norm]]
        planes.append(plane)
    return planes


def _layers(trace: float, deviation: float, norm: bool) -> dict[str, list[float]]:
    """Both numbers layer by layer, with the same draws at every point: what differs is the plane."""
    import torch

    from locater.theory.depth import AttentionLayer, propagate, walk_kernel

    deepest = max(layers for layers, _ in CHOICES.values())
    layers = [AttentionLayer(trace, deviation, norm=norm)] * deepest
    generator = torch.Generator().manual_seed(0)
    passed = propagate(walk_kernel(LENGTH), layers, num_draws=NUM_DRAWS, generator=generator)
    numbers = {"entropy": passed.entropy.mean, "residual": passed.residual.mean}
    return {name: [round(value, 4) for value in values.clamp(0, 1).tolist()] for name, values in numbers.items()}
