"""Judges: texts are scored together, longest first, and one that the decoder can't score fails alone."""

from dataclasses import replace

import numpy as np
import pytest

from draftmill.actors.metrics.base import MeasuredRow
from draftmill.actors.metrics.registry import JudgeMeter
from draftmill.actors.rows.canvas import Canvas
from draftmill.decoders.base import Outcome, Request
from tests.actors.fakes import FakeDecoder, answers_of


class Scorer(FakeDecoder):
    """Gives each text -1 for each of its tokens; raises for a batch with the text of `bad` tokens. Three slots."""

    def __init__(self, bad: int = 0) -> None:
        super().__init__(3, trouble=self._note)
        self.bad, self.batches = bad, list[list[int]]()

    def _note(self, requests: list[Request]) -> None:
        self.batches.append([len(request.canvas) for request in requests])
        if self.bad in self.batches[-1]:
            raise RuntimeError("no such kernel")

    def step(self) -> list[Outcome]:
        texts = {index: request.canvas[1:] for index, (request, _, _) in self.inside.items()}
        return [replace(one, tokens=texts[one.index], logprob=-1.0 * len(texts[one.index])) for one in super().step()]


class Maker:
    def make(self, values, key: int) -> Canvas:
        return Canvas(np.zeros(len(values["completion"]), dtype=np.int32), (), score_from=1, text=values["completion"])


def judged(scorer: Scorer, *lengths: int):
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
        "decode_error (decode): RuntimeError: no such kernel",
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
    while not scorer.active:
        next(measuring)
    measuring.close()
    assert not scorer.active
