"""Judges: texts are scored together, longest first, and one that the decoder can't score fails alone."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftmill.actors.metrics.base import MeasuredRow
from draftmill.actors.metrics.registry import JudgeMeter
from draftmill.actors.rows.canvas import Canvas
from draftmill.decoders.base import Request
from tests.actors.fakes import answers_of


class Scorer:
    """Gives each text -1 for each of its tokens; raises for a batch with the text of `bad` tokens. Three slots."""

    def __init__(self, bad: int = 0) -> None:
        self.bad, self.held, self.batches = bad, list[Request](), list[list[int]]()

    @property
    def active(self) -> int:
        return len(self.held)

    def room(self, length: int) -> int:
        return 3 - len(self.held)

    def admit(self, requests: Sequence[Request], **_: Any) -> None:
        self.held += requests

    def step(self) -> list[Any]:
        lengths = [len(request.canvas) for request in self.held]
        self.batches.append(lengths)
        if self.bad in lengths:
            raise RuntimeError("no such kernel")
        done, self.held = self.held, []
        return [
            SimpleNamespace(
                index=one.index, error_kind=None, error=None, logprob=1.0 - len(one.canvas), tokens=one.canvas[1:]
            )
            for one in done
        ]

    def clear(self) -> list[int]:
        dropped, self.held = self.held, []
        return [request.index for request in dropped]


class Maker:
    def make(self, values: Any, key: int) -> Canvas:
        return Canvas(np.zeros(len(values["completion"]), dtype=np.int32), (), score_from=1, text=values["completion"])


def judged(scorer: Scorer, *lengths: int) -> Any:
    rows = [MeasuredRow(str(length), 0, "x" * length, [], (), {}, {}) for length in lengths]
    return answers_of(JudgeMeter(scorer, Maker(), None).measure(rows))  # type: ignore[arg-type]


def test_texts_are_scored_together_longest_first():
    scorer = Scorer()
    found = judged(scorer, 2, 5, 3, 4)
    assert [one[0] for one in found] == [-1.0, -4.0, -2.0, -3.0] and [one[2] for one in found] == [1.0, 4.0, 2.0, 3.0]
    assert found[0][1] == pytest.approx(np.e) and scorer.batches == [[5, 4, 3], [2]]


def test_a_text_that_the_decoder_can_not_score_fails_alone():
    found = judged(Scorer(bad=4), 2, 5, 3, 4, 6)
    assert [one[0] if isinstance(one, tuple) else str(one) for one in found] == [
        -1.0,
        -4.0,
        -2.0,
        "no such kernel",
        -5.0,
    ]


def test_a_lost_device_ends_the_worker():
    scorer = Scorer()
    scorer.step = lambda: (_ for _ in ()).throw(RuntimeError("CUDA error: device-side assert triggered"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="CUDA error"):
        judged(scorer, 2, 3)


def test_a_judge_that_is_given_up_between_steps_leaves_its_decoder_empty():
    scorer = Scorer()
    scorer.step = list  # type: ignore[method-assign]
    measuring = JudgeMeter(scorer, Maker(), None).measure([MeasuredRow("a", 0, "xxx", [], (), {}, {})])  # type: ignore[arg-type]
    next(measuring)
    assert scorer.active
    measuring.close()
    assert not scorer.active
