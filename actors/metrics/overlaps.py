"""ROUGE (rouge-score), BLEU and chrF (sacrebleu): n-grams in common with references. The libraries are an extra, `metrics`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from draftmill.actors.metrics.base import RowByRow, Values, compared
from draftmill.actors.metrics.settings import Bleu, Chrf, Rouge

PACKAGES: Final = {"rouge": "rouge_score", "bleu": "sacrebleu", "chrf": "sacrebleu"}
"""The module that each kind of metric needs."""

_WORD: Final = re.compile(r"\w+")


class UnicodeWords:
    """A tokenizer for rouge-score that keeps words of any script, in lower case."""

    def tokenize(self, text: str) -> list[str]:
        """The words of a text."""
        return _WORD.findall(text.lower())


def rouge(settings: Rouge) -> RowByRow:
    """One value per type; of several references the one with the best F."""
    from rouge_score.rouge_scorer import RougeScorer  # type: ignore[import-untyped]

    tokenizer = UnicodeWords() if settings.words == "unicode" else None
    scorer = RougeScorer(list(settings.types), use_stemmer=settings.stemmer, tokenizer=tokenizer)
    field = {"f": "fmeasure", "precision": "precision", "recall": "recall"}[settings.score]

    def score(text: str, references: Sequence[str]) -> Values:
        found = scorer.score_multi(list(references), text)
        return tuple(float(getattr(found[one], field)) for one in settings.types)

    return compared(score)


def bleu(settings: Bleu) -> RowByRow:
    """Sentence BLEU."""
    from sacrebleu.metrics.bleu import BLEU

    return _sentences(
        BLEU(lowercase=settings.lowercase, tokenize=settings.tokenize, effective_order=True).sentence_score
    )


def chrf(settings: Chrf) -> RowByRow:
    """Sentence chrF."""
    from sacrebleu.metrics.chrf import CHRF

    return _sentences(CHRF(word_order=settings.word_order, lowercase=settings.lowercase).sentence_score)


def _sentences(score: Callable[[str, list[str]], Any]) -> RowByRow:
    return compared(lambda text, references: (float(score(text, list(references)).score),))
