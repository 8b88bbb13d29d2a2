"""Attention statistics without the matrix, and the moments of layer inputs."""

from ..quantities import NEAR
from .input_moments import InputMoments, MomentsCollector
from .layers import observe, project, queries_and_keys, sample_queries
from .masks import Mask, Rule
from .statistics import NAMES, QueryMean, Rank, Statistics, materialised, mean_over_queries, rank, residual
from .streaming import Blocks, Scores, stream

__all__ = [
    "NAMES",
    "NEAR",
    "Blocks",
    "InputMoments",
    "Mask",
    "QueryMean",
    "MomentsCollector",
    "Rank",
    "Rule",
    "Scores",
    "Statistics",
    "materialised",
    "mean_over_queries",
    "observe",
    "project",
    "queries_and_keys",
    "rank",
    "residual",
    "sample_queries",
    "stream",
]
