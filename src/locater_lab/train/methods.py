"""Values of the option `stabiliser` of `locater train`, a row each; needs torch for defaults only."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from locater.errors import BadArguments

STOP, CHECKPOINT, ROLL_BACK, ATTACH_QK_CLIP = "stop", "checkpoint", "roll-back", "attach-qk-clip"
# An action and the number that it takes, if any: the factor of the learning rate, the threshold of the logits.
ACTIONS: dict[str, float | None] = {STOP: None, CHECKPOINT: None, ROLL_BACK: 0.5, ATTACH_QK_CLIP: 50.0}


def read_actions(text: str) -> dict[str, float | None]:
    """
    >>> read_actions("checkpoint,roll-back=0.25")
    {'checkpoint': None, 'roll-back': 0.25}
    """
    actions = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, number = part.partition("=")
        if name not in ACTIONS or (equals and ACTIONS[name] is None):
            raise BadArguments(f"on_alarm expects some of {', '.join(ACTIONS)}, got {part!r}")
        try:
            actions[name] = float(number) if equals else ACTIONS[name]
        except ValueError:
            raise BadArguments(f"on_alarm={name}=X expects a number, got {number!r}") from None
    if not 0 < (actions.get(ROLL_BACK) or 1.0) <= 1:
        raise BadArguments(f"on_alarm={ROLL_BACK}=X expects a factor in (0, 1], got {actions[ROLL_BACK]}")
    if not 0 < (actions.get(ATTACH_QK_CLIP) or 1.0) < float("inf"):
        raise BadArguments(f"on_alarm={ATTACH_QK_CLIP}=X expects a threshold above 0, got {actions[ATTACH_QK_CLIP]}")
    return actions


Value = float | int | bool
WORDS = {"yes": True, "true": True, "on": True, "no": False, "false": False, "off": False}


@dataclass(frozen=True)
class Setting:
    """One option of a stabiliser; its default is that of the class."""

    kind: type
    help: str

    def read(self, text: str) -> Value:
        """Raises ValueError for what is no value of this kind."""
        if self.kind is not bool:
            return self.kind(text)
        if text.lower() not in WORDS:
            raise ValueError(text)
        return WORDS[text.lower()]

    @property
    def word(self) -> str:
        return {float: "number", int: "whole number", bool: "yes or no"}[self.kind]


@dataclass(frozen=True)
class Method:
    """A class of `locater.stabilisers` and its options.

    `takes_optimizer`: it is made after the optimiser, which it is given. `in_forward`: it changes or watches the calls
    of attention. `stays`: the trained model is not itself without it. `kind` names a class that is made from the
    options and given as `kind`.
    """

    class_name: str
    help: str
    settings: Mapping[str, Setting] = field(default_factory=dict)
    takes_optimizer: bool = False
    in_forward: bool = False
    stays: bool = False
    kind: str = ""

    def defaults(self) -> dict[str, Value | None]:
        """The default of every option, as the class has it; None where it must be given."""
        if not self.settings:
            return {}
        known = inspect.signature(class_of(self.kind or self.class_name).__init__).parameters
        found = {one: known[one].default for one in self.settings}
        return {one: None if value is inspect.Parameter.empty else value for one, value in found.items()}


def class_of(name: str) -> Any:
    """The class of a stabiliser: of the laboratory's arms where it is one, else of the library."""
    from locater import stabilisers

    from .. import rivals

    return getattr(rivals if name in rivals.__all__ else stabilisers, name)


def _weight(of: str) -> dict[str, Setting]:
    return {"weight": Setting(float, f"Weight of {of} in the loss.")}


LOCATER, QK_DECAY, NONE = "locater", "qk-decay", "none"
METHODS: dict[str, Method] = {
    NONE: Method("Stabiliser", "Nothing."),
    LOCATER: Method("LocAteR", "κ Σ η² in the loss, by strength, mean and what follows them."),
    "qk-clip": Method(
        "QKClip",
        "Rescale heads whose largest logit exceeded a threshold in a step.",
        {
            "threshold": Setting(float, "The largest logit allowed."),
            "log_only": Setting(bool, "Measure, change nothing."),
        },
        in_forward=True,
    ),
    "qk-norm": Method("QKNorm", "RMS norm of queries and keys, with a learned gain.", in_forward=True, stays=True),
    "qk-norm-l2": Method(
        "QKNorm",
        "Cosine of query and key, times a learned temperature for each head.",
        {"length": Setting(int, "L of the temperature's start, log₂(L² − L).")},
        in_forward=True,
        stays=True,
        kind="L2",
    ),
    "soft-cap": Method(
        "SoftCap",
        "Logits through c·tanh(ω/c).",
        {"cap": Setting(float, "c, which no logit exceeds.")},
        in_forward=True,
        stays=True,
    ),
    "sigma-reparam": Method(
        "SigmaReparam",
        "Every linear weight as γ W/σ(W).",
        {"gain": Setting(float, "γ at the start; it is learned.")},
    ),
    "spectral-norm": Method("SpectralNorm", "Queries and keys with spectral norm one."),
    "z-loss": Method(
        "ZLoss", "weight · mean (log Σ e^ω)² in the loss.", _weight("the squared log-sum"), in_forward=True
    ),
    "entropy-bonus": Method(
        "EntropyBonus", "−weight · mean entropy in the loss.", _weight("the entropy"), in_forward=True
    ),
    QK_DECAY: Method(
        "QKDecay",
        "Decoupled weight decay of queries and keys alone.",
        {"decay": Setting(float, "Share of a weight taken off, times the learning rate.")},
        takes_optimizer=True,
    ),
    "spectral-initialisation": Method(
        "SpectralInitialisation",
        "Start every head from a chosen ξ and η.",
        {"xi": Setting(float, "tr W / η."), "eta": Setting(float, "η in units of λ.")},
    ),
}


def method_of(name: str) -> Method:
    if name not in METHODS:
        raise BadArguments(f"stabiliser expects one of {', '.join(METHODS)}, got {name!r}")
    return METHODS[name]


def read_method_settings(name: str, text: str) -> dict[str, Any]:
    """All options of a stabiliser, from `name=value` pairs between commas or spaces, and its defaults.

    >>> read_method_settings("qk-clip", "threshold=50")
    {'threshold': 50.0, 'log_only': False}
    """
    settings = method_of(name).settings
    found: dict[str, Any] = dict(method_of(name).defaults())
    for part in text.replace(",", " ").split():
        key, separator, value = part.partition("=")
        key = key.replace("-", "_")
        if not separator or key not in settings:
            known = f"it takes {', '.join(settings)}" if settings else _without_options(name)
            raise BadArguments(f"stabiliser={name} has no option {part!r}: {known}")
        try:
            found[key] = settings[key].read(value)
        except ValueError:
            raise BadArguments(f"{key} of stabiliser={name} expects a {settings[key].word}, got {value!r}") from None
    if missing := [one for one, value in found.items() if value is None]:
        example = ",".join(f"{one}=…" for one in missing)
        raise BadArguments(f"stabiliser={name} needs {' and '.join(missing)}: stabiliser_options={example}")
    return found


def _without_options(name: str) -> str:
    return "it has options of its own, strength and mean" if name == LOCATER else "it takes none"


def written(settings: Mapping[str, Any]) -> str:
    """The pairs that `read_method_settings` takes.

    >>> written({"threshold": 50.0, "log_only": True})
    'threshold=50.0,log_only=yes'
    """
    words = {True: "yes", False: "no"}
    return ",".join(f"{one}={words[value] if isinstance(value, bool) else value}" for one, value in settings.items())
