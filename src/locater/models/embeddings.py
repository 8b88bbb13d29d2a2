"""Scaling of word embeddings before positions are added to them."""

import math

from .config import Config

# Types that multiply embeddings by √d unless their config says otherwise.
SCALED = (
    "bigbird_pegasus", "biogpt", "fsmt", "kosmos_2_text_model", "m2m_100", "nllb-moe", "pegasus_x", "plbart", "xglm",
)  # fmt: skip
# Types whose embeddings pass a norm of their own before the first layer's, which no row of a table reads.
NORMED = ("mbart",)


def embedding_scale(config: Config, d_model: int) -> float | None:
    """Factor of the embeddings where positions are added; None where more than that is done to them.

    >>> embedding_scale(Config({"scale_embedding": True}), 16), embedding_scale(Config({"model_type": "gpt2"}), 16)
    (4.0, 1.0)
    """
    model_type = config.get("model_type")
    if model_type in NORMED:
        return None
    return math.sqrt(d_model) if config.get("scale_embedding", model_type in SCALED) else 1.0
