"""Metrics of texts: exact match, edit similarity, distinct-n, entropy and length; ROUGE, BLEU and chrF by their libraries.

rouge-score and sacrebleu are the extra `metrics`, and are imported when a metric needs them.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from operator import eq
from typing import Any, Final

from draftmill.actors.metrics.base import MeasuredRow, RowByRow, Values, reference_meter
from draftmill.actors.metrics.settings import (
    Bleu,
    Chrf,
    Distinct,
    EditSimilarity,
    Entropy,
    ExactMatch,
    Length,
    MetricBase,
    Rouge,
)

PACKAGES: Final = {"rouge": "rouge_score", "bleu": "sacrebleu", "chrf": "sacrebleu"}
"""The module that each kind of metric needs."""

_WORD: Final = re.compile(r"\w+")
_NUMBER: Final = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")


def exact_match(settings: ExactMatch) -> RowByRow:
    """Whether the text equals one of the references."""
    same = {
        "exact_match": eq,
        "normalised_match": lambda text, other: normalise(text) == normalise(other),
        "number_match": _equal_number,
    }[settings.kind]
    return reference_meter(lambda text, references: (float(any(same(text, reference) for reference in references)),))


def _equal_number(text: str, reference: str) -> bool:
    number = last_number(reference)
    if number is None:
        raise ValueError("the reference has no number")
    return last_number(text) == number


def normalise(text: str) -> str:
    """Lower case, without punctuation and the articles a, an, the, and with single spaces (SQuAD's evaluation script)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def last_number(text: str) -> Decimal | None:
    """The last number in a text, without commas between thousands; None if there is none."""
    numbers = _NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def edit_similarity(settings: EditSimilarity) -> RowByRow:
    """The best similarity to one of the references."""

    def parts(text: str) -> Sequence[str]:
        return text if settings.over == "characters" else text.split()

    return reference_meter(
        lambda text, references: (max(similarity(parts(text), parts(reference)) for reference in references),)
    )


def similarity(text: Sequence[str], reference: Sequence[str]) -> float:
    """1 - distance / length of the longer one; 1 if both are empty."""
    longer = max(len(text), len(reference))
    return 1.0 - distance(text, reference) / longer if longer else 1.0


def distance(text: Sequence[str], reference: Sequence[str]) -> int:
    """The Levenshtein distance, by Myers' algorithm on bit vectors of any length (Hyyro 2003, figure 8)."""
    if not text or not reference:
        return len(text) + len(reference)
    places: dict[str, int] = {}
    for place, part in enumerate(text):
        places[part] = places.get(part, 0) | 1 << place
    full, last = (1 << len(text)) - 1, 1 << (len(text) - 1)
    plus, minus, score = full, 0, len(text)
    for part in reference:
        match = places.get(part, 0)
        zero = (((match & plus) + plus) ^ plus) | match | minus
        up, down = minus | (full & ~(zero | plus)), plus & zero
        score += bool(up & last) - bool(down & last)
        up, down = (up << 1 | 1) & full, (down << 1) & full
        plus, minus = down | (full & ~(zero | up)), up & zero
    return score


def distinct(settings: Distinct) -> RowByRow:
    """The share of different n-grams, for each n; no value for a text with fewer than n parts."""

    def measure(row: MeasuredRow) -> Values | None:
        parts = _parts(row, settings.over)
        if parts is None:
            return None
        grams = [[tuple(parts[start : start + n]) for start in range(len(parts) - n + 1)] for n in settings.n]
        return tuple(len(set(of_n)) / len(of_n) if of_n else None for of_n in grams)

    return RowByRow(measure)


def entropy(settings: Entropy) -> RowByRow:
    """The entropy of the sample's own unigram frequencies, in nats; no value for an empty sample."""

    def measure(row: MeasuredRow) -> Values | None:
        parts = _parts(row, settings.over)
        if not parts:
            return None
        shares = [count / len(parts) for count in Counter(parts).values()]
        return (-math.fsum(share * math.log(share) for share in shares) + 0.0,)

    return RowByRow(measure)


def length(settings: Length) -> RowByRow:
    """The numbers of tokens, characters and words; the latter two have no value without a text."""

    def measure(row: MeasuredRow) -> Values:
        tokens = float(len(row.tokens))
        if row.text is None:
            return tokens, None, None
        return tokens, float(len(row.text)), float(len(row.text.split()))

    return RowByRow(measure)


def _parts(row: MeasuredRow, over: str) -> Sequence[str | int] | None:
    if over == "tokens":
        return row.tokens
    return None if row.text is None else row.text.split()


# ---- n-grams in common with references


class UnicodeWords:
    """A tokenizer for rouge-score that keeps words of any script, in lower case."""

    def tokenize(self, text: str) -> list[str]:
        return _WORD.findall(text.lower())


def rouge(settings: Rouge) -> RowByRow:
    """One value per type; of several references the one with the best F."""
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]

    tokenizer = UnicodeWords() if settings.words == "unicode" else None
    scorer = RougeScorer(list(settings.types), use_stemmer=settings.stemmer, tokenizer=tokenizer)

    def score(text: str, references: Sequence[str]) -> Values:
        scores = scorer.score_multi(list(references), text)
        return tuple(float(scores[kind].fmeasure) for kind in settings.types)

    return reference_meter(score)


def bleu(settings: Bleu) -> RowByRow:
    from sacrebleu.metrics.bleu import BLEU

    return _sentences(BLEU(tokenize=settings.tokenize, effective_order=True).sentence_score)


def chrf(settings: Chrf) -> RowByRow:
    from sacrebleu.metrics.chrf import CHRF

    return _sentences(CHRF(word_order=settings.word_order).sentence_score)


def _sentences(score: Callable[[str, list[str]], Any]) -> RowByRow:
    return reference_meter(lambda text, references: (float(score(text, list(references)).score),))


METERS: Final[Mapping[type[MetricBase], Callable[[Any], RowByRow]]] = {
    ExactMatch: exact_match, EditSimilarity: edit_similarity, Distinct: distinct, Entropy: entropy, Length: length,
    Rouge: rouge, Bleu: bleu, Chrf: chrf,
}  # fmt: skip
"""What makes the meter of a metric of texts, by the class of its settings."""
