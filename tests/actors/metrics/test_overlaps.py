"""ROUGE, BLEU and chrF, against known numbers, formulas written out here, and the libraries called directly."""

import math

import pytest
import sacrebleu

from draftmill.actors.metrics.base import MeasuredRow
from draftmill.actors.metrics.settings import Bleu, Chrf, Rouge
from draftmill.actors.metrics.texts import bleu, chrf, rouge
from tests.actors.fakes import answers_of

TEXT, REFERENCE = "the cat sat on the mat", "the cat was on the mat"


def value(meter, text: str, *references: str):
    [found] = answers_of(meter.measure([MeasuredRow("a", 0, text, [], references, {}, {})]))
    return found


def test_rouge_has_the_known_values():
    assert value(rouge(Rouge(kind="rouge")), TEXT, REFERENCE) == pytest.approx((5 / 6, 3 / 5, 5 / 6))


def test_rouge_is_the_librarys_with_every_setting():
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]

    text, reference = "Generated texts were running well", "the generated text runs very well"
    for stemmer in (False, True):
        settings = Rouge(kind="rouge", types=("rouge1", "rougeLsum"), stemmer=stemmer)
        theirs = RougeScorer(["rouge1", "rougeLsum"], use_stemmer=stemmer).score(reference, text)
        assert value(rouge(settings), text, reference) == tuple(theirs[one].fmeasure for one in settings.types)


def test_the_best_of_several_references_counts():
    one = Rouge(kind="rouge", types=("rouge1",))
    assert value(rouge(one), TEXT, "nothing in common", REFERENCE) == value(rouge(one), TEXT, REFERENCE)


def test_words_of_other_scripts_count_if_asked():
    text, reference = "кошка сидела на коврике", "кошка лежала на коврике"
    assert value(rouge(Rouge(kind="rouge", types=("rouge1",))), text, reference) == (0.0,)
    assert value(rouge(Rouge(kind="rouge", types=("rouge1",), words="unicode")), text, reference) == (0.75,)


def test_bleu_is_the_geometric_mean_of_the_precisions():
    """Of 1 to 4 words 5/6, 3/5, 1/4 and none of 3 match; the last counts as 1 / (2 * 3) (exponential smoothing)."""
    expected = 100 * math.exp(sum(math.log(p) for p in (5 / 6, 3 / 5, 1 / 4, 1 / 6)) / 4)
    assert value(bleu(Bleu(kind="bleu")), TEXT, REFERENCE) == (pytest.approx(expected),)


def test_bleu_and_chrf_are_the_librarys():
    for text, references in ((TEXT, [REFERENCE]), ("a b", ["a b c", "b"]), ("", ["x"]), ("One. Two!", ["one two"])):
        assert value(bleu(Bleu(kind="bleu")), text, *references) == (sacrebleu.sentence_bleu(text, references).score,)
        assert value(chrf(Chrf(kind="chrf")), text, *references) == (sacrebleu.sentence_chrf(text, references).score,)
        plus = sacrebleu.sentence_chrf(text, references, word_order=2).score
        assert value(chrf(Chrf(kind="chrf", word_order=2)), text, *references) == (plus,)


def test_chrf_has_the_known_value():
    assert value(chrf(Chrf(kind="chrf")), TEXT, REFERENCE) == (pytest.approx(62.069, abs=5e-4),)
