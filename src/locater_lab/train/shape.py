"""`Shape`: the sizes and choices of the small transformer language model; knows no torch, so that help is quick."""

from dataclasses import asdict, dataclass, field
from typing import Literal

from locater.errors import refusal
from locater.records import Json

from ..fields import check_fields, option


@dataclass(frozen=True)
class Shape:
    """Everything that a checkpoint must say to be rebuilt; stored as `config.json` beside the weights."""

    vocab_size: int = option(0, "Words that the model knows; 0: as many as the data has.")
    context: int = option(128, "T, the longest text that the model sees at once.")
    num_layers: int = option(1, "Number of layers.")
    num_heads: int = option(1, "Query heads of a layer.")
    num_key_heads: int = option(0, "Key heads, each shared by a group of query heads; 0: one for each.")
    d_model: int = option(128, "Width of the embedding and of all layers.")
    d_feedforward: int = option(128, "Width inside the feed-forward part.")
    norm_first: bool = option(False, "Norms before attention and feed-forward (pre-LN) instead of after (post-LN).")
    norm: Literal["layer", "rms"] = option("layer", "Kind of norm.")
    epsilon: float = option(1e-5, "What norms add to the variance.")
    positions: Literal["learned", "sinusoidal", "rotary"] = option("sinusoidal", "How the model knows positions.")
    rotary_base: float = option(10_000.0, "Base of the rotary frequencies.")
    activation: Literal["relu", "gelu", "gelu-tanh"] = option("relu", "Activation of the feed-forward part.")
    bias: bool = option(True, "Biases in projections and norms.")
    tied: bool = option(True, "The output layer is the embedding.")
    scaled_embedding: bool = option(True, "Multiply the embedding by √d, as fairseq does.")
    dropout: float = option(0.0, "Dropout of embeddings and both parts of a layer; of attention, see below.")
    attention_dropout: float | Literal["same"] = option("same", "Dropout of attention weights; same: as the rest.")
    qkv_gain: float = option(1.0, "Factor on the initial queries, keys and values; fairseq: 0.7071.")
    model_type: str = field(default="locater", init=False)

    def __post_init__(self):
        check_fields(self)
        for name in ("context", "num_layers", "num_heads", "d_model", "d_feedforward"):
            if getattr(self, name) < 1:
                raise refusal(f"{name} of at least 1", getattr(self, name))
        if self.vocab_size < 0 or self.num_key_heads < 0 or not 0 <= self.dropout < 1:
            got = f"{self.vocab_size}, {self.num_key_heads}, {self.dropout}"
            raise refusal("a vocabulary and key heads of at least 0 and a dropout in [0, 1)", got)
        if not 0 <= self.attention_drop < 1 or self.qkv_gain <= 0:
            got = f"{self.attention_dropout} and {self.qkv_gain}"
            raise refusal("an attention dropout in [0, 1) and a gain of queries, keys and values above 0", got)
        if self.d_model % self.num_heads or self.num_heads % self.key_heads:
            expected = "a width that is a multiple of the heads, and these of the key heads"
            raise refusal(expected, f"{self.d_model}, {self.num_heads} and {self.key_heads}")
        for positions, width in (("rotary", self.d_head), ("sinusoidal", self.d_model)):
            if self.positions == positions and width % 2:
                raise refusal(f"an even width for {positions} positions", width)

    @property
    def key_heads(self) -> int:
        return self.num_key_heads or self.num_heads

    @property
    def d_head(self) -> int:
        return self.d_model // self.num_heads

    @property
    def attention_drop(self) -> float:
        return self.dropout if self.attention_dropout == "same" else self.attention_dropout

    def to_dict(self) -> Json:
        """Return the stored form; the key heads are written out, since a reader need not know what 0 means."""
        return asdict(self) | {"num_key_heads": self.key_heads}

    @classmethod
    def from_dict(cls, values: Json) -> "Shape":
        return cls(**{name: value for name, value in values.items() if name != "model_type"})


SHAPES = {
    # The paper's model, in fairseq's manner: post-LN, ReLU, sinusoidal positions, a scaled and tied embedding, and
    # queries, keys and values that start with Xavier's gain 1/√2.
    "paper": Shape(qkv_gain=0.7071),
    "small": Shape(
        num_layers=4,
        num_heads=4,
        d_feedforward=512,
        norm_first=True,
        positions="rotary",
        activation="gelu",
        scaled_embedding=False,
    ),
    "gpt2": Shape(
        vocab_size=50257,
        context=1024,
        num_layers=12,
        num_heads=12,
        d_model=768,
        d_feedforward=3072,
        norm_first=True,
        positions="learned",
        activation="gelu-tanh",
        scaled_embedding=False,
        dropout=0.1,
    ),
}
