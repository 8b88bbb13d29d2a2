"""Measure what heads do, on text and on random ids, for the table of words in docs/evidence.md.

python runs/words.py rows.json MODEL --text FILE [--by-line] [--window 256]

Adds the model to the rows: a list of numbers per head, in the order of `locater.behaviour.NUMBERS`, measured on two
halves of the windows of a text, and on random ids; then its η/λ. Costs two forward passes over the windows.
"""

import argparse
import json
from pathlib import Path

from locater.behaviour import numbers_of
from locater.prediction.language_model import load_model
from locater.prediction.predict import RANDOM, Effort, Text, _fit_window, _read_windows, measure, predict
from locater.prediction.running import self_attention
from locater.scanning.scan import scan


def measured(source: str, text: str, *, by_line: bool, window: int) -> dict:
    model = load_model(source)
    effort = _fit_window(Effort(window=window, calibration=1, test=8), model)
    if by_line:
        effort = Effort(window=window, calibration=1, test=16)
    windows, _ = _read_windows(source, model, Text(text, by_line=by_line), effort)
    layers, _ = self_attention(model, windows.test[:1])
    gathered, _ = measure(model.eval(), layers, windows.test, batch=effort.batch, step=lambda count: None)
    random = predict(source, text=RANDOM, effort=effort)
    on_ids = {(head.block, head.layer, head.head): head.measured for head in random.heads}
    scales = {(row.block, row.layer, row.head): row.eta / row.temperature for row in scan(source).heads}
    rows = []
    for layer, of_layer in zip(layers, gathered, strict=True):
        for head, gatherer in zip(layer.heads, of_layer, strict=True):
            halves = gatherer.halves() or (gatherer.numbers(),) * 2
            place = layer.block, layer.number, head.index
            sides = (*halves, on_ids[place])
            rows.append([*place, *(_rounded(one) for one in sides), round(scales[place], 4)])
    causal = all(head.lookahead == 0 for layer in layers for head in layer.heads)
    return {"causal": causal, "window": windows.length, "text": Path(text).name, "heads": rows}


def _rounded(numbers) -> list[float]:
    return [round(value, 4) for value in numbers_of(numbers.to_json(), numbers.profile)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("model")
    parser.add_argument("--name")
    parser.add_argument("--text", required=True)
    parser.add_argument("--by-line", action="store_true")
    parser.add_argument("--window", type=int, default=256)
    given = parser.parse_args()
    kept = json.loads(given.rows.read_text()) if given.rows.exists() else {"schema": "locater.words/1", "models": {}}
    name = given.name or Path(given.model).name
    kept["models"][name] = measured(given.model, given.text, by_line=given.by_line, window=given.window)
    given.rows.write_text(json.dumps(kept, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
