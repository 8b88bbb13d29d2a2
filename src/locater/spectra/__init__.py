"""Moments and eigenvalues of a head's bilinear form W = W_K^T W_Q, through d_h×d_h products only.

Every function takes `query` and `key` of shape (…, d_h, d); leading dimensions broadcast, so grouped keys come as
(groups, 1, d_h, d) beside queries (groups, heads, d_h, d) and their Gram matrix is made once per group.
"""

from .grams import Covariance, Grams, covariance_root, gram_products, grams, whiten
from .moments import ETA_WEIGHTS, Moments, eigenvalues, moments, moments_of, spread
from .rotary import RotaryForms, rotary_forms, rotation
from .singular import (
    largest_singular_value,
    side_norms,
    spectral_entropy,
    stable_rank,
    update_singular_values,
)

__all__ = [
    "Covariance",
    "ETA_WEIGHTS",
    "Grams",
    "Moments",
    "RotaryForms",
    "covariance_root",
    "eigenvalues",
    "gram_products",
    "grams",
    "largest_singular_value",
    "moments",
    "moments_of",
    "rotary_forms",
    "rotation",
    "side_norms",
    "spectral_entropy",
    "spread",
    "stable_rank",
    "update_singular_values",
    "whiten",
]
