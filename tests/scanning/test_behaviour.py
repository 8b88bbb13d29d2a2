"""Words for what heads do: held against attention that is written down pair by pair."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch

from locater import reference
from locater.behaviour import MOST_HEADS, VOCABULARY, MeanAttention, describe_heads, numbers_of, spoken, words_of
from locater.head import Head
from locater.prediction.numbers import Gatherer
from locater.prediction.result import HeadPrediction, Prediction
from locater.projections import Projection
from locater.report.headline import headline
from locater.report.views import views_of
from locater_lab.studies import words

pytestmark = pytest.mark.quick
LENGTH = 256
ROOT = Path(__file__).parents[2]
ROWS = json.loads((ROOT / "runs" / "studies" / "words.json").read_text(encoding="utf-8"))


def numbers(probabilities: torch.Tensor):
    """The numbers of a causal head whose attention is this matrix."""
    weight = Projection(torch.zeros(4, 4))
    head = Head(0, 0, weight, weight, 0.5, lookahead=0)
    gatherer = Gatherer(head, LENGTH)
    gatherer.add(probabilities.clamp(min=1e-30).log()[None, gatherer.queries])
    return gatherer.numbers()


def causal(weight) -> torch.Tensor:
    """Rows of probabilities from a function of query, key and distance."""
    query, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    p = weight(query, key, query - key).float() * (key <= query)
    return p / p.sum(-1, keepdim=True).clamp(min=1e-30)


CASES = {
    "first token": lambda q, k, d: (k == 0) * 9.0 + (d == 3),
    "itself": lambda q, k, d: (d == 0) * 9.0 + 1 / 256,
    "adjacent": lambda q, k, d: (d == 1) * 9.0 + 1 / 256,
    "one token": lambda q, k, d: d == 7,
    "broad": lambda q, k, d: torch.ones_like(d),
    "near": lambda q, k, d: d < 12,
    "far": lambda q, k, d: (d > 30) & (d < 50) & (k > 0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_word_holds_of_attention_that_is_so_and_of_no_other(name):
    found = numbers(causal(CASES[name]))
    attention = numbers_of(found.to_json(), found.profile)
    assert name in [word.name for word in VOCABULARY if word.holds(attention)]
    opposite = {"broad": "one token", "one token": "broad", "near": "far", "far": "near", "first token": "itself"}
    assert opposite.get(name, "first token") not in [word.name for word in VOCABULARY if word.holds(attention)]


def test_every_word_has_a_case_and_the_rule_is_the_number():
    assert [word.name for word in VOCABULARY] == [*CASES]
    for word in VOCABULARY:
        for value in (0.0, word.limit, 1.0):
            attention = MeanAttention(**{n: 0.5 for n in MeanAttention._fields} | {"first": 0.0} | {word.number: value})
            assert word.holds(attention) == (value <= word.limit if word.is_low else value >= word.limit)
    resting = MeanAttention(near=0.9, entropy=0.5, first=0.6, itself=0.9, adjacent=0.6)
    assert [word.name for word in VOCABULARY if word.holds(resting)] == ["first token"]


def test_even_attention_is_broad_and_not_far():
    """As an untrained model has it: most tokens are not among the nearest, so most of even attention is not there."""
    found = numbers(causal(CASES["broad"]))
    even = numbers_of(found.to_json(), found.profile)
    assert even.near < 0.3 and [word.name for word in words_of(even)] == ["broad"] and not words_of(even, "random ids")


def made(*names: str) -> Prediction:
    """A prediction of a head per layer, each with the attention of a case."""
    rows = []
    for layer, name in enumerate(names):
        found = numbers(causal(CASES[name]))
        rows.append(HeadPrediction("decoder", layer, 0, found, found))
    return Prediction("model", "text", LENGTH, 1, 1, tuple(rows))


def test_sentences_count_heads_say_their_layers_and_where_to_look_first():
    found = made(*["broad"] * 6, "first token", "first token", "first token", "adjacent")
    sentences = [told.sentence for told in found.behaviour()]
    assert "3 of 10 heads rest on the first token, from layer 6 on (on the text measured)." in sentences
    assert "1 of 10 heads looks at an adjacent token, in layer 9." in sentences
    assert sentences[-1].startswith("Look first at decoder 9.0, which looks at an adjacent token (")
    assert all(sentence in found.summary() for sentence in sentences)
    assert found.to_json()["behaviour"] == sentences
    assert found.to_json()["heads"][9]["words"][0] == "adjacent"


def test_random_ids_say_fewer_words_and_need_a_margin():
    found = replace(made("first token", "broad", "near", "far", "adjacent"), text="random ids")
    sentences = [told.sentence for told in found.behaviour()]
    assert any("nearest tokens" in sentence for sentence in sentences) and sentences[0].endswith("(on random ids).")
    assert not any("first token" in sentence or "spreads" in sentence for sentence in sentences)
    barely = MeanAttention(near=0.72, entropy=0.5, first=0.0, itself=0.1, adjacent=0.1)
    assert [word.name for word in words_of(barely)] == ["near"] and not words_of(barely, "random ids")


def test_a_page_says_the_same_with_the_accuracy_next_to_it():
    found = made("near", "far", "broad", "adjacent")
    said = [sentence.text for sentence in headline(views_of([found.to_json()]), [])]
    assert {*(told.sentence for told in found.behaviour()), *found.accuracy()} <= {*said}
    assert sum("on the text measured" in text for text in said) == 1


def test_words_are_said_as_the_kept_rows_allow():
    """A word without enough held-out heads is never said, whatever a head does; near and far also from random ids."""
    models = words.read_words(ROWS)
    for word in VOCABULARY:
        assert word.is_rare != words.may_be_said(words.left_out(word, models, "text"), fewest=words.FEWEST["text"])
        is_told = words.may_be_said(words.left_out(word, models, "random ids"))
        every = [head for heads in models.values() for head in heads]
        assert word.margin == (words.margin_of(word, every) if is_told else None)
    every_word = MeanAttention(near=0.9, entropy=0.05, first=0.0, itself=0.97, adjacent=0.6)
    for text in ("x", "random ids"):
        said = {word.name for word in (*spoken(text), *words_of(every_word, text))}
        source = "random ids" if text == "random ids" else "text"
        judged = {word.name: words.left_out(word, models, source) for word in VOCABULARY}
        assert all(words.may_be_said(judged[name], fewest=words.FEWEST[source]) for name in said)


def test_the_page_of_evidence_has_the_tables_of_the_kept_rows():
    text = (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert words.words_page(ROWS) in text
    name = next(iter(ROWS["models"]))
    fewer = ROWS["models"] | {name: ROWS["models"][name] | {"heads": ROWS["models"][name]["heads"][1:]}}
    assert words.words_page({"models": fewer}) not in text


def test_no_head_has_a_scale_worth_a_warning():
    """As docs/evidence.md says where it tells why a scan does not warn."""
    for kept in ROWS["models"].values():
        scales = [row[6] for row in kept["heads"]]
        assert max(scales) <= 5 * median(scales) and min(scales) >= median(scales) / 20


def test_precision_counts_what_was_planted():
    """Ten heads whose random ids say near; on text eight are, in two models that the others choose the margin for."""
    near, far = MeanAttention(0.9, 0.5, 0.0, 0.1, 0.1), MeanAttention(0.1, 0.5, 0.0, 0.1, 0.1)
    (word,) = [word for word in VOCABULARY if word.name == "near"]
    heads = [words.Measured((one, one), near) for one in [near] * 8 + [far] * 2]
    judged = words.judge(word, heads, "random ids")
    assert (judged.said, judged.right, judged.holds, judged.heads) == (10, 8, 8, 10)
    models = {name: heads for name in "abc"}
    assert not words.may_be_said(words.left_out(word, models, "random ids"))  # right of 80 %, as by chance
    mixed = {name: heads[:8] + [words.Measured((far, far), far)] * 8 for name in "abc"}
    assert words.may_be_said(words.left_out(word, mixed, "random ids"))
    assert words.interval(words.left_out(word, mixed, "random ids")) == (1.0, 1.0)


def test_heads_without_a_word_are_counted_and_a_one_token_that_is_the_first_is_named():
    resting, plain = MeanAttention(0.5, 0.0, 0.99, 0.0, 0.0), MeanAttention(0.5, 0.5, 0.0, 0.0, 0.0)
    told = describe_heads([("decoder", n, 0) for n in range(4)], [resting, plain, plain, plain], text="x")
    (without,) = [one for one in told if "none" in one.sentence]
    assert without.sentence == "3 of 4 heads fit none of these words." and without.heads == (1, 2, 3)
    elsewhere = resting._replace(first=0.6)
    named = [
        describe_heads([("decoder", n, 0) for n in range(3)], [one, plain, plain._replace(first=0.6)], text="x")[-1]
        for one in (resting, elsewhere)
    ]
    assert ["keeps to one token, the first (entropy" in one.sentence for one in named] == [True, False]
    own = MeanAttention(near=1.0, entropy=0.05, first=0.01, itself=0.97, adjacent=0.02)
    told = describe_heads([("decoder", n, 0) for n in range(4)], [resting, own, own, plain], text="x")
    (counted,) = [one.sentence for one in told if "keep to one token" in one.sentence]
    assert counted == "3 of 4 heads keep to one token, up to layer 2 (the query's own in 2, the first in 1)."


def test_no_reader_is_sent_to_a_head_that_is_like_all_others():
    attentions = [MeanAttention(0.9, 0.5, 0.0, 0.1, 0.1)] * 4
    told = describe_heads([("decoder", n, 0) for n in range(4)], attentions, text="x")
    assert [one.sentence for one in told] == [
        "All 4 heads look mostly at the 16 nearest tokens (on the text measured)."
    ]
    assert len(told[0].heads) == 4 and MOST_HEADS == 3


def test_results_and_heads_are_short_in_a_session():
    found = made("near", "far")
    assert repr(found).startswith("Prediction(model: 2 heads predicted") and len(repr(found)) < 250
    weight = Projection(torch.zeros(4, 16))
    assert repr(Head(3, 1, weight, weight, 0.5)) == "Head(decoder layer 3, head 1, 4 of 16, λ = 2)"


def test_what_no_reference_model_does_is_called_unusual_with_the_range():
    resting = MeanAttention(near=0.5, entropy=0.5, first=0.9, itself=0.0, adjacent=0.0)
    places = [("decoder", layer, head) for layer in range(4) for head in range(5)]
    said = [one.sentence for one in describe_heads(places, [resting] * 20, text="x")]
    assert "Unusual: 100% of the heads rest on the first token; in 6 reference decoders it is 0% to 28%." in said
    assert not any("Unusual" in one.sentence for one in describe_heads(places, [resting] * 20, text="random ids"))
    few = describe_heads(places[:8], [resting] * 8, text="x")  # a share of eight heads means little
    mixed = describe_heads([("encoder", 0, 0), *places[1:]], [resting] * 20, text="x")
    assert not any("Unusual" in one.sentence for one in [*few, *mixed])


def test_no_reference_model_is_unusual_beside_itself_and_the_table_is_of_the_kept_rows():
    assert reference.reference_table() == words.reference(ROWS)
    for one in reference.reference_table().values():
        counts = {word.name: one[word.name] for word in VOCABULARY}
        assert reference.unusual({one["block"]}, one["heads"], counts) == []


def test_words_are_held_against_the_other_half_of_the_windows():
    near, far = numbers(causal(CASES["near"])), numbers(causal(CASES["far"]))
    rows = [HeadPrediction("decoder", 0, n, near, near, halves) for n, halves in enumerate([(near, near), (near, far)])]
    found = Prediction("model", "text", LENGTH, 1, 2, tuple(rows))
    assert found.accuracy()[0] == (
        "The text measured was split in two: 50% of these words, said of heads on one half, came "
        "out the same on the other."
    )
    assert all(sentence in found.summary() for sentence in found.accuracy())


def test_words_that_are_not_said_have_their_numbers_on_the_page():
    kept = json.loads((ROOT / "runs" / "studies" / "words_unsaid.json").read_text(encoding="utf-8"))
    table = words.unsaid_table(kept)
    assert table in (ROOT / "docs" / "evidence.md").read_text(encoding="utf-8")
    assert [line.split("|")[-2].strip() for line in table.splitlines()[2:]] == ["no"] * len(words.UNSAID)
    heads = [["decoder", 0, n, [0.9, 0.9], [0.9, 0.1], [0.1, 0.1]] for n in range(10)]
    others = [["decoder", 1, n, [0.1, 0.1], [0.1, 0.1], [0.1, 0.1]] for n in range(10)]
    planted = words.unsaid_table({"models": {name: {"heads": [*heads, *others]} for name in "abc"}})
    assert "60 of 60" in planted and planted.count("| yes |") == 1 and "0 of 30" in planted
