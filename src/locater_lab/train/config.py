"""Configuration of a run: dataclasses whose fields are the command's options; knows no torch, so that help is quick."""

from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from locater.errors import BadArguments, refusal
from locater.records import Json

from ..fields import DataOptions, check_fields, option
from .checksums import digest_of
from .methods import (
    ACTIONS,
    ATTACH_QK_CLIP,
    LOCATER,
    NONE,
    QK_DECAY,
    Method,
    method_of,
    read_actions,
    read_method_settings,
)
from .shape import SHAPES, Shape


@dataclass(frozen=True)
class OptimiserOptions:
    """The optimiser and its learning rate."""

    optimizer: Literal["adam", "adamw", "muon"] = option(
        "adam", "AdamW decouples weight decay; Muon takes the layers' matrices, AdamW the rest."
    )
    learning_rate: float = option(1e-3, "The highest learning rate.")
    schedule: Literal["inverse-sqrt", "cosine", "constant"] = option("inverse-sqrt", "What follows the warm-up.")
    warmup: int = option(200, "Steps of linear warm-up.")
    final_share: float = option(0.1, "What cosine leaves of the learning rate at the end.")
    beta1: float = option(0.9, "Decay of Adam's first moment.")
    beta2: float = option(0.98, "Decay of Adam's second moment.")
    muon_momentum: float = option(0.95, "Momentum of Muon.")
    weight_decay: float = option(0.0, "Weight decay of matrices; gains and biases have none.")
    clip: float = option(1.0, "Longest gradient; 0: not clipped.")

    def __post_init__(self):
        check_fields(self)
        if self.learning_rate <= 0:
            raise refusal("a learning rate above 0", self.learning_rate)
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1):
            raise refusal("decays of Adam's moments in [0, 1)", f"{self.beta1} and {self.beta2}")
        if not 0 <= self.muon_momentum < 1:
            raise refusal("a momentum of Muon in [0, 1)", self.muon_momentum)
        if self.warmup < 0 or self.clip < 0 or self.weight_decay < 0 or not 0 <= self.final_share <= 1:
            raise refusal("warm-up, clipping and weight decay of at least 0, a final share in [0, 1]", asdict(self))


@dataclass(frozen=True)
class StabiliserOptions:
    """LocAteR: κ Σ η² beside the loss, and what becomes of the mean; or a rival, with its options."""

    strength: float | Literal["auto"] = option(0.0, "κ of LocAteR, or auto; 0 with a free mean: none.")
    strength_until: int = option(0, "Lower κ linearly to 0 by this step; 0: hold it to the end.")
    mean: str = option("free", "Mean of the eigenvalues: free, initial, or a target for tr W in units of λ.")
    hold: Literal["projection", "penalty"] = option("projection", "Hold the mean exactly, or by a penalty.")
    mean_weight: float = option(1.0, "Weight of that penalty, on ((tr W − target)/λ)².")
    mean_warmup: int = option(100, "Steps in which the mean goes from where it starts to the target.")
    mean_until: int = option(0, "Release the mean after this many steps; 0: hold it to the end.")
    decoupled: bool = option(False, "Shrink after the optimiser's step (as AdamW does) instead of in the loss.")
    qk_decay: float = option(0.0, "Short for stabiliser=qk-decay with this decay.")
    stabiliser: str = option("", "qk-norm, soft-cap, sigma-reparam, … in LocAteR's place; all are listed below.")
    stabiliser_options: str = option("", "Its options, such as threshold=50; all are listed below.")

    def __post_init__(self):
        check_fields(self)
        if self.mean not in ("free", "initial"):
            try:
                float(self.mean)
            except ValueError:
                raise refusal("a mean that is free, initial or a number", repr(self.mean)) from None
        if self.strength_until < 0:
            raise refusal("a step of at least 0 by which κ is 0", self.strength_until)
        if self.strength_until and self.strength in (0, "auto"):
            raise BadArguments("strength_until lowers a given κ: give --strength X with it")
        if self.mean_warmup < 0 or self.mean_until < 0:
            raise refusal("a warm-up and an end of the mean of at least 0 steps", asdict(self))
        if self.mean_until and self.mean == "free":
            raise BadArguments("mean_until lets go of a mean that is held: set mean to initial or a number too")
        if self.qk_decay and self.is_locater:
            raise BadArguments("qk_decay is another stabiliser: leave out strength and mean, or give 0 and free")
        self._check_method()

    def _check_method(self) -> None:
        if self.stabiliser and self.qk_decay:
            raise BadArguments("qk_decay is a stabiliser of its own: leave out stabiliser, or qk_decay")
        if self.stabiliser not in ("", LOCATER) and self.is_locater:
            raise BadArguments(f"strength and mean are LocAteR's: leave them out with stabiliser={self.stabiliser}")
        if self.stabiliser == LOCATER and not self.is_locater:
            raise BadArguments("stabiliser=locater needs strength (auto, or a number), or mean")
        if self.stabiliser_options and not self.stabiliser:
            raise BadArguments("stabiliser_options are those of a stabiliser: name one")
        self.settings  # noqa: B018  # refuses what is none of its options

    @property
    def is_locater(self) -> bool:
        return self.strength != 0 or self.mean != "free"

    def strength_at(self, step: int) -> float:
        """κ before step `step`: κ(1 − step/strength_until), at least 0."""
        assert self.strength != "auto"
        return self.strength * max(0.0, 1 - step / self.strength_until) if self.strength_until else self.strength

    @property
    def name(self) -> str:
        """The stabiliser that all of it amounts to."""
        return self.stabiliser or (QK_DECAY if self.qk_decay else LOCATER if self.is_locater else NONE)

    @property
    def method(self) -> Method:
        return method_of(self.name)

    @property
    def settings(self) -> dict[str, Any]:
        """The options of a rival, defaults included."""
        given = f"decay={self.qk_decay}" if self.qk_decay else self.stabiliser_options
        return read_method_settings(self.name, given)


@dataclass(frozen=True)
class LoopOptions:
    """Duration, intervals, device."""

    steps: int = option(2000, "Steps of the optimiser.")
    epochs: float = option(0.0, "Passes over the data, instead of steps.")
    patience: int = option(0, "End once no validation has improved for this many steps; 0: go on to the last step.")
    batch: int = option(16, "Texts in a step, over all processes.")
    accumulate: int = option(1, "Parts in which each process takes its share of a step.")
    seed: int = option(0, "Seed of everything random.")
    validate_every: int = option(500, "Steps between validations; one more follows the last step.")
    validation_windows: int = option(0, "Texts to validate on; 0: all.")
    save_every: int = option(500, "Steps between checkpoints.")
    log_every: int = option(10, "Steps between lines of metrics.")
    precision: Literal["auto", "float32", "bf16"] = option("auto", "bf16: autocast; auto: where a GPU has it.")
    compile: bool = option(False, "Compile the model first.")
    parallel: Literal["ddp", "fsdp"] = option("ddp", "Under torchrun: replicate the model, or shard it (FSDP2).")
    device: str = option("auto", "cpu, cuda, …; auto: a GPU if there is one.")
    tensorboard: bool = option(False, "Also write TensorBoard files into the run's folder.")
    watch_every: int = option(0, "Steps between looks at attention, for alarms; 0: none.")
    on_alarm: str = option("", f"On a serious alarm: {', '.join(ACTIONS)}; several with commas.")

    def __post_init__(self):
        check_fields(self)
        if self.watch_every < 0:
            raise refusal("steps between looks of at least 0", self.watch_every)
        if read_actions(self.on_alarm) and not self.watch_every:
            raise BadArguments("on_alarm needs someone who looks: set watch_every too")
        if self.compile and ATTACH_QK_CLIP in read_actions(self.on_alarm):
            raise BadArguments(f"on_alarm={ATTACH_QK_CLIP} changes a model that runs: leave out compile")
        for name in ("steps", "batch", "accumulate", "validate_every", "save_every", "log_every"):
            if getattr(self, name) < 1:
                raise refusal(f"{name.replace('_', ' ')} of at least 1", getattr(self, name))
        if min(self.epochs, self.validation_windows, self.patience) < 0:
            got = f"{self.epochs}, {self.validation_windows} and {self.patience}"
            raise refusal("epochs, validation windows and patience of at least 0", got)
        if not 0 <= self.seed < 2**63:
            raise refusal("a seed from 0 to below 2^63", self.seed)


@dataclass(frozen=True)
class Config:
    """A whole run; saved with it as `config.json`."""

    preset: str = "paper"
    shape: Shape = field(default_factory=Shape)
    data: DataOptions = field(default_factory=DataOptions)
    optimiser: OptimiserOptions = field(default_factory=OptimiserOptions)
    stabiliser: StabiliserOptions = field(default_factory=StabiliserOptions)
    loop: LoopOptions = field(default_factory=LoopOptions)

    def to_dict(self) -> Json:
        return asdict(self)

    @property
    def checksum(self) -> str:
        """The same for the same values only."""
        return digest_of(self.to_dict())

    @classmethod
    def from_dict(cls, document: Json) -> "Config":
        """Build from what `to_dict` gave; refuses fields of another version."""
        try:
            groups = {name: _group(kind, document[name]) for name, kind in GROUPS.items()}
            return cls(document["preset"], **groups)
        except (KeyError, TypeError, AttributeError) as reason:
            raise refusal("the config of a run of this version", f"{reason}") from None


GROUPS: dict[str, type] = {
    "data": DataOptions,
    "shape": Shape,
    "optimiser": OptimiserOptions,
    "stabiliser": StabiliserOptions,
    "loop": LoopOptions,
}


GONE = ("model_type", "walk_width")  # of older configs: nothing depends on them


def _group(kind: type, values: Json) -> Any:
    return kind(**{name: value for name, value in values.items() if name not in GONE})


PRESETS = {
    # The paper's experiment: words of WikiText-2, Adam with an inverse square root schedule as in fairseq.
    "paper": Config("paper", SHAPES["paper"], DataOptions(data="auto", tokenizer="words")),
    "small": Config(
        "small",
        SHAPES["small"],
        optimiser=OptimiserOptions(optimizer="adamw", schedule="cosine", weight_decay=0.1),
    ),
    "gpt2": Config(
        "gpt2",
        SHAPES["gpt2"],
        optimiser=OptimiserOptions(
            "adamw", learning_rate=6e-4, schedule="cosine", warmup=700, beta2=0.95, weight_decay=0.1
        ),
        loop=LoopOptions(steps=20_000, batch=64, accumulate=8),
    ),
}


def make_config(preset: str, **overrides: object) -> Config:
    """A preset with some fields changed, whatever group they stand in."""
    if preset not in PRESETS:
        raise BadArguments(f"--preset expects one of {', '.join(PRESETS)}, got {preset!r}")
    config = PRESETS[preset]
    for group, kind in GROUPS.items():
        changed = {one.name: overrides.pop(one.name) for one in fields(kind) if one.name in overrides}
        config = replace(config, **{group: replace(getattr(config, group), **changed)}) if changed else config
    assert not overrides, f"no such options: {overrides}"
    return config
