"""Words of a scan whose constants the other rotary decoders chose: `python runs/words_left_out.py NAME=SOURCE …`.

docs/evidence.md names the constants. Each word is held against the near mass in runs/studies/words.json, and counted in
runs/studies/words_left_out.json: how often it was right, and how often it was said.
"""

import json
import sys
from pathlib import Path
from statistics import fmean

import locater
from locater.behaviour import looks
from locater.records import write_json
from locater.scanning import estimate
from locater_lab.studies.words import HALF, read_words

ROWS = Path(__file__).parent / "studies"
# By the decoder that is left out: the swing, the first layer's share of it, and the depth from which it is whole.
CHOSEN = {"SmolLM2-135M": (12.0, 0.5, 0.25), "gemma-3-270m": (12.0, 0.5, 0.5), "TinyStories-656K": (14.0, 0.5, 0.5)}


def counts(name: str, source: str) -> dict[str, list[int] | float]:
    """[right, said] of each word, and the mean absolute error of the estimate."""
    whole, first, depth = CHOSEN[name]
    estimate.swing = lambda layer, layers: whole * min(1.0, first + (1 - first) * layer / (depth * layers))
    kept = json.loads((ROWS / "words.json").read_text(encoding="utf-8"))
    places = [(layer, head) for _, layer, head, *_ in kept["models"][name]["heads"]]
    near = dict(zip(places, (head.text.near for head in read_words(kept)[name]), strict=True))
    heads = [head for head in locater.scan(source).heads if head.estimated_near_mass is not None]
    found: dict[str, list[int] | float] = {}
    for word in ("near", "far"):
        said = [near[head.layer, head.head] for head in heads if looks(head.estimated_near_mass) == word]
        found[word] = [sum((mass >= HALF) == (word == "near") for mass in said), len(said)]
    error = fmean(abs((head.estimated_near_mass or 0.0) - near[head.layer, head.head]) for head in heads)
    return found | {"error": round(error, 3)}


if __name__ == "__main__":
    path = ROWS / "words_left_out.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, source in (argument.split("=") for argument in sys.argv[1:]):
        kept[name] = counts(name, source)
        print(name, kept[name])
    write_json(kept, path)
