"""Metrics of texts: against plain loops, formulas and numbers worked out by hand, and the libraries called directly."""

import math
import random
import time
from contextlib import suppress
from decimal import Decimal

import pytest
import sacrebleu

from draftmill.actors.metrics.base import MeasuredRow, time_limit, try_metric
from draftmill.actors.metrics.settings import Bleu, Chrf, Distinct, EditSimilarity, Entropy, ExactMatch, Length, Rouge
from draftmill.actors.metrics.texts import (
    bleu,
    chrf,
    distance,
    distinct,
    edit_similarity,
    entropy,
    exact_match,
    last_number,
    length,
    normalise,
    rouge,
    similarity,
)
from tests.actors.fakes import answers_of


def row(text: str | None, *references: str, tokens: list[int] | None = None) -> MeasuredRow:
    return MeasuredRow("a", 0, text, tokens or [], references, {}, {})


def value(meter, *rows: MeasuredRow):
    return answers_of(meter.measure(rows))


def test_exact_match_is_as_is_normalised_or_by_the_last_number():
    rows = [
        row("The cat!", "the cat"),
        row("the cat", "the cat"),
        row("a dog", "the cat"),
        row("no reference"),
        row(None, "x"),
    ]
    assert value(exact_match(ExactMatch(kind="exact_match")), *rows) == [(0.0,), (1.0,), (0.0,), None, None]
    assert value(exact_match(ExactMatch(kind="normalised_match")), *rows) == [(1.0,), (1.0,), (0.0,), None, None]
    numbers = exact_match(ExactMatch(kind="number_match"))
    assert value(numbers, row("so 3 + 1,234.5 = 1237.50", "#### 1,237.5")) == [(1.0,)]
    assert value(numbers, row("it is 12", "12", "13"), row("it is 13", "12", "13"), row("none", "12")) == [
        (1.0,),
        (1.0,),
        (0.0,),
    ]
    [error] = value(numbers, row("12", "no number"))
    assert isinstance(error, ValueError)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 42", 42),
        ("-3.50", Decimal("-3.5")),
        ("1,000,000 to 2", 2),
        ("x = 7.", 7),
        ("$1,234", 1234),
        ("none", None),
        ("5-3", -3),
    ],
)
def test_the_last_number_is_found_as_it_is_written(text, number):
    assert last_number(text) == number


def test_normalising_drops_case_punctuation_and_articles():
    assert normalise("  The quick, brown fox -- an animal!\n") == "quick brown fox animal"


def test_the_distance_is_that_of_the_table_of_wagner_and_fischer():
    draw = random.Random(3)
    for _ in range(300):
        one = "".join(draw.choice("abc") for _ in range(draw.randrange(0, 90)))
        other = "".join(draw.choice("abc") for _ in range(draw.randrange(0, 90)))
        assert distance(one, other) == by_table(one, other), (one, other)
    assert distance("kitten", "sitting") == 3


def by_table(one: str, other: str) -> int:
    line = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        above, line = line, [i]
        for j, b in enumerate(other, 1):
            line.append(min(above[j] + 1, line[j - 1] + 1, above[j - 1] + (a != b)))
    return line[-1]


def test_similarity_is_one_less_the_share_of_edits():
    assert similarity("kitten", "sitting") == pytest.approx(1 - 3 / 7)
    assert similarity("", "") == 1.0 and similarity("", "abc") == 0.0
    words = edit_similarity(EditSimilarity(kind="edit_similarity", over="words"))
    assert value(words, row("the cat sat", "the dog sat", "the cat sat on")) == [(pytest.approx(0.75),)]


def test_distinct_is_the_share_of_different_n_grams():
    meter = distinct(Distinct(kind="distinct", n=(1, 2, 4)))
    assert value(meter, row("a b a b a"), row("one"), row(None)) == [(2 / 5, 2 / 4, 1.0), (1.0, None, None), None]
    over_tokens = distinct(Distinct(kind="distinct", n=(1,), over="tokens"))
    assert value(over_tokens, row(None, tokens=[7, 7, 8, 8])) == [(0.5,)]


def test_entropy_is_that_of_the_samples_own_frequencies():
    meter = entropy(Entropy(kind="entropy"))
    found = value(
        meter, row(None, tokens=[1, 2, 3, 4]), row(None, tokens=[5, 5, 5]), row(None, tokens=[1, 1, 2]), row("x")
    )
    expected = -(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3)
    assert found == [(pytest.approx(math.log(4)),), (0.0,), (pytest.approx(expected),), None]


def test_length_counts_tokens_characters_and_words():
    meter = length(Length(kind="length"))
    assert value(meter, row("ab c", tokens=[1, 2, 3]), row(None, tokens=[1])) == [(3.0, 4.0, 2.0), (1.0, None, None)]


def test_a_row_that_takes_too_long_fails_alone_though_it_catches_every_exception():
    def one(row: MeasuredRow) -> tuple[float]:
        while row.text == "endless":
            with suppress(Exception):
                time.sleep(0.01)
        return (1.0,)

    with time_limit(0.2):
        timeout, fine = (try_metric(one, row(text)) for text in ("endless", "x"))
    assert isinstance(timeout, TimeoutError) and str(timeout) == "the metric took longer than 0.2 s"
    assert fine == (1.0,)


TEXT, REFERENCE = "the cat sat on the mat", "the cat was on the mat"


def overlap(meter, text: str, *references: str):
    [found] = answers_of(meter.measure([MeasuredRow("a", 0, text, [], references, {}, {})]))
    return found


def test_rouge_has_the_known_values():
    assert overlap(rouge(Rouge(kind="rouge")), TEXT, REFERENCE) == pytest.approx((5 / 6, 3 / 5, 5 / 6))


def test_rouge_is_the_librarys_with_every_setting():
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]

    text, reference = "Generated texts were running well", "the generated text runs very well"
    for stemmer in (False, True):
        settings = Rouge(kind="rouge", types=("rouge1", "rougeLsum"), stemmer=stemmer)
        theirs = RougeScorer(["rouge1", "rougeLsum"], use_stemmer=stemmer).score(reference, text)
        assert overlap(rouge(settings), text, reference) == tuple(theirs[one].fmeasure for one in settings.types)


def test_the_best_of_several_references_counts():
    one = Rouge(kind="rouge", types=("rouge1",))
    assert overlap(rouge(one), TEXT, "nothing in common", REFERENCE) == overlap(rouge(one), TEXT, REFERENCE)


def test_words_of_other_scripts_count_if_asked():
    text, reference = "кошка сидела на коврике", "кошка лежала на коврике"
    assert overlap(rouge(Rouge(kind="rouge", types=("rouge1",))), text, reference) == (0.0,)
    assert overlap(rouge(Rouge(kind="rouge", types=("rouge1",), words="unicode")), text, reference) == (0.75,)


def test_bleu_is_the_geometric_mean_of_the_precisions():
    """Of 1 to 4 words 5/6, 3/5, 1/4 and none of 3 match; the last counts as 1 / (2 * 3) (exponential smoothing)."""
    expected = 100 * math.exp(sum(math.log(p) for p in (5 / 6, 3 / 5, 1 / 4, 1 / 6)) / 4)
    assert overlap(bleu(Bleu(kind="bleu")), TEXT, REFERENCE) == (pytest.approx(expected),)


def test_bleu_and_chrf_are_the_librarys():
    for text, references in ((TEXT, [REFERENCE]), ("a b", ["a b c", "b"]), ("", ["x"]), ("One. Two!", ["one two"])):
        assert overlap(bleu(Bleu(kind="bleu")), text, *references) == (sacrebleu.sentence_bleu(text, references).score,)
        assert overlap(chrf(Chrf(kind="chrf")), text, *references) == (sacrebleu.sentence_chrf(text, references).score,)
        plus = sacrebleu.sentence_chrf(text, references, word_order=2).score
        assert overlap(chrf(Chrf(kind="chrf", word_order=2)), text, *references) == (plus,)


def test_chrf_has_the_known_value():
    assert overlap(chrf(Chrf(kind="chrf")), TEXT, REFERENCE) == (pytest.approx(62.069, abs=5e-4),)
