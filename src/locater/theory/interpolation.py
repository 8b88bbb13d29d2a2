"""A smooth function at many points from few evaluations: Chebyshev interpolation, piecewise where it is sharp."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

# Intervals of the nested grids that are tried on a piece before it is cut in two.
GRIDS = (16, 32, 64)
# A piece with no more points than this is evaluated at all of them.
FEW = 24

Function = Callable[[Tensor], Tensor]


def adaptive(
    function: Function, positions: Float[Tensor, " positions"], *, guide: Function, tolerance: float
) -> Float[Tensor, " positions"]:
    """f at ascending `positions`, from as few evaluations as give the tolerance; from all of them at tolerance 0.

    The error of a grid is read off at its own new points, against the interpolant of the grid half as fine; the grid
    itself is then far better than that, since convergence is geometric. A `guide` that shares the features of f and
    costs nothing says where to start and where to cut, lest a feature between the first points be missed.
    """
    if tolerance == 0 or len(positions) <= FEW:
        return function(positions)
    piece = _one_piece(function, positions, guide=guide, tolerance=tolerance)
    if piece is not None:
        return piece
    halves = positions.tensor_split(2)
    return torch.cat([adaptive(function, half, guide=guide, tolerance=tolerance) for half in halves])


def _one_piece(
    function: Function, positions: Float[Tensor, " positions"], *, guide: Function, tolerance: float
) -> Float[Tensor, " positions"] | None:
    """The first grid that fits the guide and then the function itself; None if there is none."""
    values, wanted = None, guide(positions)
    for num_intervals in GRIDS:
        nodes = _nodes(positions, num_intervals)
        fits = float((interpolate(nodes, guide(nodes), positions) - wanted).abs().max()) <= tolerance
        if num_intervals + 1 >= len(positions) or not (fits or values is not None):
            continue
        values = function(nodes) if values is None else _refined(values, function(nodes[1::2]))
        coarse = interpolate(nodes[::2], values[::2], nodes[1::2])
        if float((coarse - values[1::2]).abs().max()) <= tolerance:
            return interpolate(nodes, values, positions)
    return None


def _refined(values: Float[Tensor, " coarse"], between: Float[Tensor, " gaps"]) -> Float[Tensor, " fine"]:
    """The values on a grid twice as fine, whose new points lie between the old ones."""
    finer = values.new_empty(len(values) + len(between))
    finer[::2], finer[1::2] = values, between
    return finer


def interpolate(
    nodes: Float[Tensor, " nodes"], values: Float[Tensor, " nodes"], positions: Float[Tensor, " positions"]
) -> Float[Tensor, " positions"]:
    """The barycentric formula at Chebyshev–Lobatto points; O(nodes × positions), stable at any degree."""
    sign = 1.0 - 2.0 * (torch.arange(len(nodes), device=nodes.device) % 2)
    sign[0], sign[-1] = sign[0] / 2, sign[-1] / 2
    gaps = positions[:, None] - nodes
    hit = gaps == 0
    weights = sign / gaps.where(~hit, 1)
    smooth = (weights @ values) / weights.sum(-1)
    return torch.where(hit.any(-1), values[hit.long().argmax(-1)], smooth)


def _nodes(positions: Float[Tensor, " positions"], num_intervals: int) -> Float[Tensor, " nodes"]:
    first, last = positions[0], positions[-1]
    angle = torch.arange(num_intervals + 1, device=positions.device, dtype=positions.dtype) * (math.pi / num_intervals)
    return (first + last) / 2 - (last - first) / 2 * torch.cos(angle)
