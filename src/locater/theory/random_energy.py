"""The entropy of the true softmax over independent tokens: the random-energy law, which knows no clipping.

Where tokens hardly depend on each other, the n logits of a query are independent Gaussians of variance V, and e^ω are
the Boltzmann weights of Derrida's random energies (1981). As n → ∞ the entropy is ln n − V/2 up to V = 2 ln n, and
beyond it stays finite: attention is frozen on a few tokens. At the lengths of texts that border is a slow crossover,
so the mean entropy is computed for finite n too. Behind a norm (‖x‖² = d) V is ‖W‖²/λ², less what tokens share.
A random walk's tokens are not independent: `depth` follows those.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import refusal
from .depth import AttentionLayer

# Both integrals are of analytic functions that fall off doubly exponentially: the trapezoidal rule errs by e^{−π²/h}.
SPACING = 0.4
TAIL = 9.0  # standard deviations; a Gaussian is beyond them with 2e-19
LARGEST = 1e3  # of V: a second of work; the entropy is below 0.2 there


def border(num_keys: int) -> float:
    """Return 2 ln n, the variance at which infinitely many independent logits freeze.

    >>> round(border(128), 2)
    9.7
    """
    return 2 * math.log(_check_keys(num_keys))


def mean_entropy(variance: Float[Tensor, "*shape"], num_keys: int) -> Float[Tensor, "*shape"]:
    """Return the mean entropy, in nats, of the softmax of n independent Gaussian logits of variance V.

    With Z = Σ e^ω: E ln Z − V (1 − E Σp²), by E Σ p ω = V E Σ p(1 − p). Both expectations are integrals of the Laplace
    transform φ(s) = E exp(−s e^ω): E ln Z = ∫ (e^{−s} − φ^n) ds/s and E Σp² = n ∫ s E[e^{2ω} exp(−s e^ω)] φ^{n−1} ds.
    Cost O(V) for each variance, whatever n.
    """
    count = _check_keys(num_keys)
    if not bool(((variance >= 0) & (variance <= LARGEST)).all()):
        raise refusal(f"variances of logits from 0 to {LARGEST:g}", variance.tolist())
    values = [_mean_entropy(math.sqrt(one), count) for one in variance.double().flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).reshape(variance.shape)


def _mean_entropy(deviation: float, count: int) -> float:
    num_energies = math.ceil(2 * TAIL * max(deviation, 10.0) / SPACING) + 1
    normal = torch.linspace(-TAIL, TAIL, num_energies, dtype=torch.float64)
    weight = torch.exp(-normal.square() / 2)
    weight /= weight.sum()
    # ln s runs from where no energy is felt to where the smallest is: ln Z lies between both with certainty.
    reach = TAIL * deviation
    lowest, highest = -(math.log(count) + reach + 30), reach + 5
    logs = torch.linspace(lowest, highest, math.ceil((highest - lowest) / SPACING) + 1, dtype=torch.float64)
    free_energy = second = 0.0
    for part in logs.split(1024):
        exponents = part[:, None] + deviation * normal
        felt = torch.exp(-torch.exp(exponents))
        transform = felt @ weight
        squares = (torch.exp(2 * exponents) * felt).nan_to_num(0.0) @ weight
        free_energy += float((torch.exp(-torch.exp(part)) - transform**count).sum())
        second += count * float((squares * transform ** (count - 1)).sum())
    width = float(logs[1] - logs[0])
    return max(0.0, width * free_energy - deviation**2 * (1 - width * second))


def collapse_variance(num_keys: int, share: float) -> float:
    """Return the variance V beyond which the mean entropy is below `share` of ln n, by bisection."""
    count = _check_keys(num_keys)
    if not 0 < share < 1:
        raise refusal("a share of ln n between 0 and 1", share)
    low, high = 0.0, 1.0
    while _mean_entropy(high, count) > share * math.log(count):
        low, high = high, 2 * high
    while high - low > 1e-4 * high:  # of the deviation √V
        middle = (low + high) / 2
        above = _mean_entropy(middle, count) > share * math.log(count)
        low, high = (middle, high) if above else (low, middle)
    return ((low + high) / 2) ** 2


def logit_variances(
    kernel: Float[Tensor, "*batch length length"], layer: AttentionLayer
) -> Float[Tensor, "*batch length"]:
    """Return the expected variance of each query's logits over its keys, for tokens of kernel K.

    V_t = δ² R_tt (mean_s R_ss − mean_{s,u} R_su) + τ² var_s R_ts over the keys s, u of t: what all keys share cancels.
    """
    kernel = kernel.double()
    lengths = kernel.diagonal(dim1=-2, dim2=-1)
    read = kernel / (lengths[..., None] * lengths[..., None, :]).sqrt() if layer.norm else kernel
    mask = torch.ones_like(read).tril() if layer.causal else torch.ones_like(read)
    share = mask / mask.sum(-1, keepdim=True)
    own = read.diagonal(dim1=-2, dim2=-1)
    shared = (share @ read * share).sum(-1)
    noise = own * ((share * own[..., None, :]).sum(-1) - shared)
    mean = (share * read).sum(-1)
    spread = (share * read.square()).sum(-1) - mean.square()
    return (layer.deviation**2 * noise + layer.trace**2 * spread).clamp_min(0)


def _check_keys(num_keys: int) -> int:
    if num_keys < 2:
        raise refusal("at least two keys", num_keys)
    return num_keys
