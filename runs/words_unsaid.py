"""Measure two words that are not said, on separators and on repeats (induction), for the table in docs/evidence.md.

python runs/words_unsaid.py rows.json MODEL --name NAME --text FILE [--tokenizer DIR] [--by-line] [--window 256]

Adds the model to the rows: for each head two halves of its mass on separators in a text, on the token behind the
earlier copy of the query's own in random ids that come twice, and the same in text that comes twice; all of them are
shares of the mass that is not on the first token. Costs three forward passes over eight or sixteen windows.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from locater.attention import statistics
from locater.head import Head
from locater.prediction.language_model import load_model, load_tokenizer
from locater.prediction.predict import Effort, Text, _fit_window, _read_windows
from locater.prediction.running import run_model, self_attention
from locater.prediction.windows import special_tokens, vocabulary_size

MARKS = frozenset(".,;:!?…")
COPY = 62  # tokens that come twice
NUM_WINDOWS = 16


def is_separator(token: str) -> bool:
    """Tell whether a token ends a line, a clause, a sentence or one side of a reaction, and nothing else."""
    bare = token.strip(" \t▁Ġ")
    return bool(bare) and (not bare.strip("\r\nĊ") or bare in ("<0x0A>", ">>", ">") or {*bare} <= MARKS)


def shares(model, layers, ids: Tensor, queries: Tensor, share: Callable[[Tensor, int], Tensor]) -> dict:
    """Each head's share on two halves of the windows; `share` takes attention and the number of the first window."""
    found: dict = {}
    start = 0

    def take(number: int, x: Tensor) -> None:
        for head in layers[number].heads:
            part = share(attention(head, x.float(), queries), start)
            found.setdefault((layers[number].block, layers[number].number, head.index), []).append(part)

    for part in ids.split(4):
        run_model(model, layers, part, take)
        start += len(part)
    joined = {place: torch.cat(parts) for place, parts in found.items()}
    return {place: [round(float(own[half::2].mean()), 4) for half in (0, 1)] for place, own in joined.items()}


@torch.no_grad()
def attention(head: Head, x: Tensor, queries: Tensor) -> Tensor:
    positions = torch.arange(x.shape[1])
    logits = head.logits(x[:, queries], x, (queries, positions))
    logits = logits.masked_fill(~head.admits(queries, positions), -torch.inf)
    if head.sink is not None:
        logits = torch.cat([logits, head.sink.to(logits).expand(*logits.shape[:-1], 1)], -1)
    return logits.softmax(-1)[..., : x.shape[1]]


def repeats(model, layers, before: Tensor, copied: Tensor) -> dict:
    """The mass behind the earlier copy, for queries of the second."""
    start, length = before.shape[1], copied.shape[1]
    queries = torch.arange(start + length, start + 2 * length - 1)

    def share(p: Tensor, _: int) -> Tensor:
        behind = p[:, torch.arange(len(queries)), queries - length + 1]
        return (behind / (1 - p[..., 0]).clamp(min=1e-6)).mean(-1)

    return shares(model, layers, torch.cat([before, copied, copied], 1), queries, share)


def measured(given: argparse.Namespace) -> dict:
    model = load_model(given.model).eval()
    count = NUM_WINDOWS if given.by_line else NUM_WINDOWS // 2
    effort = _fit_window(Effort(window=given.window, calibration=1, test=count), model)
    tokenizer = load_tokenizer(given.tokenizer or given.model)
    windows, _ = _read_windows(given.model, model, Text(given.text, tokenizer, given.by_line), effort)
    prefix = 0 if given.by_line else len(special_tokens(tokenizer)[0])
    ids, special = windows.test, {*tokenizer.all_special_ids}
    layers, _ = self_attention(model, ids[:1])
    marks = {n: n in special or is_separator(tokenizer.convert_ids_to_tokens(n) or "") for n in ids.unique().tolist()}
    marked = torch.tensor([[marks[n] for n in row] for row in ids.tolist()])

    def on_separators(p: Tensor, start: int) -> Tensor:
        return (statistics.beyond_first(p) * marked[start : start + len(p), None, 1:]).sum(-1).mean(-1)

    queries = torch.arange(min(64, ids.shape[1] // 2), ids.shape[1])
    chance = torch.Generator().manual_seed(0)
    rows = vocabulary_size(model) or 0
    ordinary = torch.tensor([n for n in range(rows) if n not in special and n > min(1000, rows // 10)])
    drawn = torch.stack([ordinary[torch.randperm(len(ordinary), generator=chance)[:COPY]] for _ in range(NUM_WINDOWS)])
    # Where a tokenizer puts nothing before a text, a first token that is part of neither copy.
    before = ids[:1, :prefix] if prefix else ordinary[:1, None]
    found = [
        shares(model, layers, ids, queries, on_separators),
        repeats(model, layers, before.expand(NUM_WINDOWS, -1), drawn),
        repeats(model, layers, before.expand(len(ids), -1), ids[:, prefix : prefix + COPY]),
    ]
    base = round(float(marked[:, 1:].float().mean()), 4)
    return {"separators": base, "heads": [[*place, *(one[place] for one in found)] for place in found[0]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("model")
    for name in ("--name", "--text", "--tokenizer"):
        parser.add_argument(name, required=name != "--tokenizer")
    parser.add_argument("--by-line", action="store_true")
    parser.add_argument("--window", type=int, default=256)
    given = parser.parse_args()
    kept = json.loads(given.rows.read_text()) if given.rows.exists() else {"schema": "locater.unsaid/1", "models": {}}
    kept["models"][given.name] = measured(given)
    given.rows.write_text(json.dumps(kept, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
