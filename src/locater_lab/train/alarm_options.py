"""Values of the option `on_alarm` of `locater train`; knows no torch, so that help is quick."""

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
