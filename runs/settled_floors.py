"""Floors under runs/settle.py, kept in runs/measured/settle/floors.json: `python runs/settled_floors.py DATA`.

The losses, on the validation text, of tables of single tokens and of pairs that are counted from the training text.

They are those of locater_lab.studies.floors without a matrix of all pairs: there are 33,278 words.
"""

import json
import sys
from pathlib import Path

import numpy
from numpy import ndarray

from locater_lab.data.sources import open_data
from locater_lab.fields import DataOptions
from locater_lab.studies.floors import HELD_OUT, WEIGHTS

KEPT = Path(__file__).parent / "measured" / "settle" / "floors.json"
STAGES = {"A": dict(tokenizer="bpe", bpe_size=2048), "B": dict(tokenizer="words")}


def unigram(train: ndarray, words: int) -> ndarray:
    """Shares; every word is counted once more than it stands there."""
    return (numpy.bincount(train, minlength=words) + 1) / (len(train) + words)


def pair_losses(train: ndarray, valid: ndarray, words: int, weights: tuple[float, ...]) -> dict[float, float]:
    """Loss of the pairs of `valid` by those of `train`; behind each word the unigram counts as so many more pairs."""
    keys, counts = numpy.unique(train[:-1] * words + train[1:], return_counts=True)
    wanted = valid[:-1] * words + valid[1:]
    places = numpy.searchsorted(keys, wanted).clip(max=len(keys) - 1)
    seen = numpy.where(keys[places] == wanted, counts[places], 0)
    before = numpy.bincount(train[:-1], minlength=words)[valid[:-1]]
    single = unigram(train, words)[valid[1:]]
    return {weight: -float(numpy.log((seen + weight * single) / (before + weight)).mean()) for weight in weights}


def floors(train: ndarray, valid: ndarray, words: int) -> dict[str, float]:
    """Both tables on `valid`; the weight is the best on a tenth of `train` that was not counted."""
    cut = len(train) - len(train) // HELD_OUT
    tried = pair_losses(train[:cut], train[cut:], words, WEIGHTS)
    weight = min(tried, key=tried.__getitem__)
    alone = -float(numpy.log(unigram(train, words)[valid[1:]]).mean())
    return {"unigram": alone, "bigram": pair_losses(train, valid, words, (weight,))[weight]}


def main() -> None:
    found = {}
    for stage, options in STAGES.items():
        tokens = open_data(DataOptions(data=sys.argv[1], **options), length=128, seed=0).tokens
        assert tokens is not None
        train, valid = (numpy.asarray(part, dtype=numpy.int64) for part in (tokens.train, tokens.valid))
        found[stage] = {name: round(loss, 4) for name, loss in floors(train, valid, tokens.vocabulary.size).items()}
    KEPT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
