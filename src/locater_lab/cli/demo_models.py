"""The second half of `locater demo`: two models trained, scanned and watched, and words made from their numbers."""

import shlex
from pathlib import Path
from textwrap import fill

import typer
from rich.console import Console
from rich.markup import escape

from locater.cli.output import FittedTable, aside, table
from locater.records import Json

TRAINING = """\
[bold]3. Two small models, trained here[/bold]{picture}
Each has one layer with one head of {width} dimensions and learns to guess the next
token of Python's own documentation. They start alike and see the same texts in
the same order, for {steps} steps. One difference: LocAteR adds κη² to the loss of
the second (κ = {strength:g}), so that a large scale η of W has a price.
"""

SCAN = """
[bold]4. What their weights say[/bold]
The spectrum of part 1 again, now of the weights that were just saved:
[bold]locater scan {model} --length {length}[/bold]
The regime is a word about random walks; the entropy above is measured on text.
"""

ATTENTION = """
[bold]5. The attention that each really has[/bold]{picture}
Measured, not predicted: the softmax weights on {num_texts} held-out texts.{maps}
How much of its attention lies close by:
"""
MAPS = """ In the maps
a row is a token that attends, a column one attended to; red is more than an
even share, blue less."""

# Smaller relative differences deserve no word in a single run.
ABOUT = 0.01
NEAR_ZERO = 0.1  # of ξ, as random weights have it
RECENT = (1, 4, 32)
LABELS = {"without": "without LocAteR", "with": "with LocAteR"}


def show_models(console: Console, out: Path, *, quick: bool = False) -> None:
    """Train both, then scan them, look at their attention and say what was seen; quickly without pictures."""
    from ..demo.two_models import compare_models

    training, attention = (None, None) if quick else (out / "training.png", out / "attention.png")
    _train(console, out, training, quick=quick)
    document = compare_models(out)
    if training and attention:
        _draw(document, training, attention)
    console.print()
    console.print(validation_table(document))
    say(console, SCAN.format(model=escape(shlex.quote(str(out / "with" / "model"))), length=document["length"]))
    console.print(scan_table(document))
    words = dict(picture=arrow(attention), num_texts=document["num_texts"], maps=MAPS if attention else "")
    say(console, ATTENTION.format(**words))
    console.print(attention_table(document))
    console.print("\n[bold]What was seen[/bold]")
    for sentence in conclusions(document):
        say(console, fill(sentence, min(80, console.width), initial_indent="· ", subsequent_indent="  "))


def _draw(document: Json, training: Path, attention: Path) -> None:
    from locater.report import figures

    from ..demo import pictures as pictures

    figures.save(pictures.draw_training(document), training)
    figures.save(pictures.draw_attention(document), attention)


def arrow(picture: Path | None) -> str:
    """Behind a heading, where its picture lies."""
    return "" if picture is None else f" → {escape(str(picture))}"


def say(console: Console, text: str) -> None:
    """Lines that were broken by hand stay as they are, however long a path in them is."""
    console.print(text, soft_wrap=True)


def _train(console: Console, out: Path, picture: Path | None, *, quick: bool) -> None:
    """Both models; a signal ends the demo with the exit code that shells give it."""
    from ..demo import two_models

    config = two_models.demo_config("with", quick=quick)
    words = dict(width=config.shape.d_head, steps=config.loop.steps, strength=config.stabiliser.strength)
    say(console, TRAINING.format(picture=arrow(picture), **words))
    for name in two_models.NAMES:
        console.print(f"training {LABELS[name]} …")
        outcome = two_models.train_model(out, name, quick=quick, say=aside)
        if outcome.signal is not None and not outcome.is_done:
            say(console, f"stopped at step {outcome.step} of {outcome.num_steps}")
            say(
                console,
                f"continue with: locater demo {'--quick ' if quick else ''}--out {escape(shlex.quote(str(out)))}",
            )
            raise typer.Exit(128 + outcome.signal)


def validation_table(document: Json) -> FittedTable:
    """The last validations."""
    last = {name: model["validations"][-1] for name, model in document["models"].items()}
    rows = {
        "perplexity (lower: it predicts better)": ("perplexity", "{:.1f}"),
        "entropy of attention (1 even, 0 one token)": ("entropy", "{:.3f}"),
        f"near mass: attention on the last {document['near']}": ("near_mass", "{:.3f}"),
    }
    body = [[words, *(form.format(row[key]) for row in last.values())] for words, (key, form) in rows.items()]
    even = f"{document['even_near_mass']:.3f}"
    body.append(["near mass if all tokens counted alike", even, even])
    return _side_by_side(f"On held-out text, after {document['num_steps']} steps", body)


def scan_table(document: Json) -> FittedTable:
    """Tabulate the quantities of a scan, from the weights alone."""
    scans = [model["scan"] for model in document["models"].values()]
    rows = {
        "tr W/λ (sum of the eigenvalues)": [scan["trace"] / scan["temperature"] for scan in scans],
        "η/λ (scale of W)": [scan["eta"] / scan["temperature"] for scan in scans],
        "ξ (sum over scale)": [scan["xi"] for scan in scans],
        "L (share of the context left out)": [scan["localisation"] for scan in scans],
    }
    body = [[words, *(f"{number:.3f}" for number in numbers)] for words, numbers in rows.items()]
    return _side_by_side("Scanned from the files", [*body, ["regime", *(scan["regime"] for scan in scans)]])


def attention_table(document: Json) -> FittedTable:
    """Tabulate the share of attention on the most recent tokens."""
    columns = [*(model["within"] for model in document["models"].values()), document["even_within"]]
    numbers = [number for number in RECENT if number < document["length"]]
    body = [[_last(number), *(f"{100 * column[number - 1]:.1f} %" for column in columns)] for number in numbers]
    return _side_by_side("Share of attention", body, further=["if all alike"])


def _last(number: int) -> str:
    return f"on the last {number} tokens" if number > 1 else "on the token itself"


def _side_by_side(title: str, body: list[list[str]], *, further: list[str] | None = None) -> FittedTable:
    return table(["", *LABELS.values(), *(further or [])], body, words=[""], title=title)


def conclusions(document: Json) -> list[str]:
    """State the result, whichever way the numbers fell, and how far to trust it."""
    models = document["models"]
    last = {name: model["validations"][-1] for name, model in models.items()}
    perplexity, entropy = ({name: row[key] for name, row in last.items()} for key in ("perplexity", "entropy"))
    scale = {name: model["scan"]["eta"] / model["scan"]["temperature"] for name, model in models.items()}
    xi = {name: model["scan"]["xi"] for name, model in models.items()}
    recent = min(RECENT[1], document["length"])
    near = {name: f"{100 * model['within'][recent - 1]:.0f} %" for name, model in models.items()}
    return [
        f"With LocAteR the model predicts held-out text {_word(perplexity, 'better', 'worse', 'about as well')}: "
        f"perplexity {perplexity['with']:.1f} against {perplexity['without']:.1f} without.",
        f"The scale of its W is {_word(scale, 'smaller', 'larger', 'about equal')}: η/λ = "
        f"{scale['with']:.2f} against {scale['without']:.2f}. The trace over that scale "
        f"{_trace(xi)}: ξ = {xi['with']:.2f} against {xi['without']:.2f}.",
        f"Its attention is {_word(entropy, 'narrower', 'broader', 'about as broad')}: entropy {entropy['with']:.2f} "
        f"against {entropy['without']:.2f}. {_course(models['with'])} with LocAteR; "
        f"without, {_course(models['without']).lower()}.",
        f"The last {recent} tokens get {near['with']} of its attention, against {near['without']} without.",
        "This is one run each, from one seed, small and short: an illustration, not evidence. Another seed, text or "
        "size may turn out otherwise; locater train takes them all.",
    ]


def _word(numbers: dict[str, float], less: str, more: str, alike: str) -> str:
    """Choose the word that compares `with` to `without`."""
    if abs(numbers["with"] - numbers["without"]) <= ABOUT * abs(numbers["without"]):
        return alike
    return less if numbers["with"] < numbers["without"] else more


def _trace(xi: dict[str, float]) -> str:
    """Compare no two numbers that are both as good as zero."""
    if max(map(abs, xi.values())) < NEAR_ZERO:
        return "stays near 0"
    return f"is {_word(xi, 'smaller', 'larger', 'about equal')}"


def _course(model: Json) -> str:
    """Describe the entropy of attention since it was highest."""
    highest, last = max(model["validations"], key=lambda row: row["entropy"]), model["validations"][-1]
    if last["entropy"] >= (1 - ABOUT) * highest["entropy"]:
        return f"It is about as high as ever at the end, {last['entropy']:.2f},"
    return f"It has fallen from {highest['entropy']:.2f} at step {highest['step']} to {last['entropy']:.2f}"
