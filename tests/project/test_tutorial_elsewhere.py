"""The practitioner's tutorial, typed from top to bottom on other texts, seeds and numbers of threads."""

import inspect
import math
import re
import textwrap
from pathlib import Path

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "practitioner.md"
LIMIT = 10 * math.log(33)  # above every threshold of 10 log n that the page can print


def counting():
    start, stride = torch.randint(0, 64, (8, 1)), torch.randint(1, 8, (8, 1))
    return (start + stride * torch.arange(33)) % 64


def prose():
    """Windows of an English text, its letters as numbers below 64."""
    letters = torch.tensor([ord(one) % 64 for one in inspect.getdoc(textwrap) + textwrap.__doc__ + PAGE.read_text()])
    return torch.stack([letters[start : start + 33] for start in torch.randint(0, len(letters) - 33, (8,)).tolist()])


def typed(seed, batch):
    """The page's blocks one after the other, with another seed and another text; what each loop printed."""
    names, printed = {}, []
    for snippet in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL):
        lines = []
        names["print"] = lambda *given, lines=lines: lines.append(" ".join(map(str, given)))
        exec(compile(snippet.replace("manual_seed(0)", f"manual_seed({seed})"), PAGE.name, "exec"), names)
        names["batch"] = batch
        printed.append("\n".join(lines))
    return [text for text in printed if text]


def figures(text):
    found = re.findall(r"step (\d+): loss ([\d.]+), largest logit (\d+)", text)
    return [int(step) for step, _, _ in found], [float(loss) for _, loss, _ in found], [float(one) for *_, one in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "batch", "num_threads"), [(1, counting, 1), (2, prose, 1), (3, prose, 1), (4, counting, 2)]
)
def test_what_the_page_promises_happens(seed, batch, num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        watched, rolled, held = typed(seed, batch)
    finally:
        torch.set_num_threads(before)
    print(watched, rolled, held, sep="\n")
    steps, losses, largest = figures(watched)
    assert steps == [0, 50, 100, 150] and watched.splitlines()[1] == "no alarm in 2 layers"
    assert largest[0] < LIMIT < min(largest[1:]), "it explodes, and stays so"
    told = re.sub(r"\s+", " ", watched)
    assert "logit explosion: decoder layer" in told and "try RollBack: the last good state with a lower" in told
    assert max(figures(rolled)[2]) < largest[-1], "going back holds the logits"
    _, held_losses, small = figures(held)
    assert max(small) < LIMIT, "the logits stay small"
    if batch is counting:  # of another text the page promises nothing of the loss
        assert held_losses[-1] < losses[-1], "attention was what held the loss up"
