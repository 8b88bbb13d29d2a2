"""Documents of every kind of page, small, with strange names wherever a stranger may choose one."""

HOSTILE = '</script><img src=x onerror="window.broken=1">'
KINDS = ("scan", "two", "predict", "run", "runs", "study", "compare")


def every_kind(scanned):
    """The documents of each page, around a real scan."""
    tuned = [{**head, "eta": 1.2 * head["eta"]} for head in scanned["heads"]]
    return {
        "scan": [scanned],
        "two": [scanned, {**scanned, "source": "tuned", "heads": tuned}],
        "predict": [scanned, predicted(scanned)],
        "run": [run()],
        "runs": [runs()],
        "study": [study()],
        "compare": [compared(scanned)],
    }


def study():
    plan = dict(x="x", y="y", by="kind", panel="none", logarithmic=True, x_label=HOSTILE, y_label="y")
    rows = [{"x": x, "y": x * x, "kind": kind} for x in (1, 10, 100) for kind in ("a", HOSTILE)]
    facts = {"schema": "locater.study/1", "question": HOSTILE, "answer": ["So."], "failures": []}
    return facts | {"figure": plan, "rows": rows}


def run():
    """Two steps of two heads, an alarm, a note, and losses."""
    alarm = dict(kind=HOSTILE, block="decoder", layer=0, heads=[1], meaning=HOSTILE, remedy=HOSTILE, step=2)
    heads = [{"layer": 0, "head": n, "normalised_entropy": 0.3 * n, "near_mass": 0.2} for n in (0, 1)]
    steps = [{"step": step, "heads": heads} for step in (1, 2)]
    course = {"training loss": [[1, 3.0], [2, 2.0]], HOSTILE: [[1, 1.0], [2, 2.0]]}
    found = {"schema": "locater.steps/1", "source": f"runs/{HOSTILE}", "steps": steps}
    return found | {"alarms": [alarm], "notes": [HOSTILE], "course": course}


def runs():
    number = {"mean": 2.0, "standard_error": 0.1, "seeds": [0, 1], "values": [1.9, 2.1]}
    curve = {"step": [1, 2], "mean": [3.0, 2.0], "standard_error": [0.1, 0.1]}
    parts = {"quantities": {"loss": number}, "differences": {"loss": number}, "curves": {"loss": curve}}
    arms = [{"arm": name, "seeds": [0, 1], **parts} for name in (HOSTILE, "=cmd()")]
    left = [{"run": HOSTILE, "last_step": None}, {"run": "x", "error": HOSTILE}]
    found = {"schema": "locater.runs/1", "folder": HOSTILE, "step": 2, "score": "loss", "against": HOSTILE}
    return found | {"arms": arms, "left_out": left}


def predicted(scanned):
    lines = {"predicted": [0.5, 0.5], "measured": [0.25, 0.75]}
    numbers = {"near_mass_beyond_first": 0.8, "sink_mass": 0.1}
    head = dict(block="encoder", layer=0, head=1, predicted=numbers, measured=numbers)
    head |= dict(attention_profile=lines, logit_profile=lines)
    found = {"schema": "locater.predict/2", "source": scanned["source"], "text": HOSTILE, "window": 2}
    return found | {"left_out": [HOSTILE], "distance_bins": [[0, 0], [1, 1]], "heads": [head]}


def compared(scanned):
    names = ("xi", "eta", "trace", "localisation")
    heads = [
        {name: head[name] for name in ("block", "layer", "head")}
        | {"moved": 0.1, "regime": ["late", "early"]}
        | {name: [head[name], head[name] / 2] for name in names}
        for head in scanned["heads"]
    ]
    facts = {"schema": "locater.compare/1", "sources": [HOSTILE, "b"], "family": HOSTILE, "coverage": [HOSTILE, ""]}
    return facts | {"heads": heads}
