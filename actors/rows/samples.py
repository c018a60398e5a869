"""Sample: a row of a unit inside a worker. Meter: sums up the work of the decode loop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftmill.actors.messages import Effort, Tally
from draftmill.actors.rows.fim import Infilling, Requests, TextPart, fill_holes, together
from draftmill.actors.rows.lengths import LengthSearch, OpenLengths
from draftmill.decoders.base import HOLE, JOB_SETTINGS, Decoder, EngineStats, Outcome, Request, RowSettings
from draftmill.storage.errors import RowError


@dataclass(slots=True, eq=False)
class Sample:
    """A row of a unit inside the worker: first it has a canvas or an error, at the end an outcome or an error.

    `index` is its place in the unit. `score_from` is the first position to score, None if tokens are generated; `scored` are all
    of them, if not all from there on.
    `settings` are the row's own; `note` is the UnitIO's data. `earlier` are the row's texts in other runs, which draft.
    A sample may take several requests, one after the other (`fill`, `find_lengths`). `canvas` is then that of the current one,
    and `outcome` what there is so far. `parts` are the holes filled one after another, `search` tries several lengths.
    """

    index: int
    key: int = 0
    canvas: NDArray[np.int32] | None = None
    score_from: int | None = None
    settings: RowSettings = JOB_SETTINGS
    scored: NDArray[np.int64] | None = None
    error: RowError | None = None
    outcome: Outcome | None = None
    note: Any = None
    parts: list[TextPart] = field(default_factory=list)
    search: LengthSearch | None = None
    queued_at_s: float | None = None
    earlier: tuple[NDArray[np.int32], ...] = ()
    _requests: Requests | None = None
    _asked: Request | None = None

    def fill(self, row: Infilling) -> None:
        """Fill the holes of this row one after another."""
        self._begin(fill_holes(row, self.key, self.settings, self.parts))

    def find_lengths(self, row: OpenLengths) -> None:
        """Find the lengths of this row's holes, and fill them."""
        self.search = LengthSearch(row, self.key, self.settings)
        self._begin(self.search.requests())

    def _begin(self, requests: Requests) -> None:
        self._requests, self._asked = requests, next(requests)
        self.canvas = self._asked.canvas

    def request(self, handle: int) -> Request:
        """The request for a decoder; its outcome has the index `handle`."""
        assert self.canvas is not None, "a row without a canvas is not decoded"
        if self.search is not None and not self.search.is_over:
            earlier: tuple[NDArray[np.int32], ...] = ()
        else:  # of holes that are filled one after another, the part of the texts that this hole and later ones may have
            filled = sum(len(part.outcome.tokens) for part in self.parts)
            earlier = tuple(text[filled:] for text in self.earlier)
        if self._asked is not None:
            return dataclasses.replace(self._asked, index=handle, earlier=earlier)
        places = self.score_from, self.settings, self.scored
        return Request(handle, self.key, self.canvas, None, *places, earlier=earlier)

    def take(self, outcome: Outcome) -> bool:
        """Store the outcome of a request; returns True if the sample has another one."""
        self.outcome = outcome
        if self._requests is None or (self.search is not None and outcome.error_kind is not None):
            return False
        try:
            self._asked = self._requests.send(outcome)
        except StopIteration as end:
            self.outcome = end.value
            if self.search is not None:
                self.canvas = self.search.row.canvas(self.search.taken)
            return False
        if self.parts:
            self.outcome = together(self.parts)
        self.canvas, self.queued_at_s = self._asked.canvas, time.perf_counter()
        return True

    @property
    def has_begun(self) -> bool:
        """Whether some of its requests have ended."""
        return self._requests is not None and self.outcome is not None

    @property
    def num_given(self) -> int:
        """The number of tokens given, before any are generated or scored; summed over several prompts."""
        if self.parts:
            return sum(part.asked.num_prompt for part in self.parts)
        if self.canvas is None:
            return 0
        if self.scored is not None:
            return len(self.canvas) - len(self.scored)
        return int((self.canvas != HOLE).sum()) if self.score_from is None else self.score_from


class LoopMeter:
    """Sums up the work of the loop between two calls of `take`."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._before = decoder.stats + EngineStats()
        self._since_s: float | None = None
        self._step = (0, 0)
        self._wall_s = 0.0
        self._tail_s = 0.0
        self._samples: list[Sample] = []

    def start(self, busy: bool) -> None:
        """Note the start of a step; if the loop holds units (`busy`), the time since the last step counts too."""
        if self._since_s is None or not busy:
            self._since_s = time.perf_counter()
        self._step = (self._decoder.stats.slot_steps, self._decoder.stats.active_slot_steps)

    def stop(self, *, drained: bool) -> float:
        """Note the end of a step and return the seconds that count for it; `drained` if no sample was waiting that could have
        filled an idle slot.
        """
        now_s = time.perf_counter()
        took_s = now_s - (self._since_s or now_s)
        slots = self._decoder.stats.slot_steps - self._step[0]
        active = self._decoder.stats.active_slot_steps - self._step[1]
        self._wall_s += took_s
        self._tail_s += took_s * (1 - active / slots) if drained and slots else 0.0
        self._since_s = now_s
        return took_s

    def count(self, sample: Sample) -> None:
        """Note that a sample has ended."""
        self._samples.append(sample)

    def take(self) -> tuple[Effort, Tally]:
        """Differences since the last call."""
        now = self._decoder.stats + EngineStats()
        effort = Effort(now - self._before, self._wall_s, self._tail_s)
        tally = tally_of(self._samples)
        self._before, self._wall_s, self._tail_s, self._samples = now, 0.0, 0.0, []
        return effort, tally


def tally_of(samples: Sequence[Sample]) -> Tally:
    """Sum up samples that have ended."""
    fine = [sample.outcome for sample in samples if sample.error is None and sample.outcome is not None]
    counts = ("nfe", "nfe_draft", "iterations", "proposed", "accepted")
    return Tally(
        rows=len(samples),
        ok=len(fine),
        failed=len(samples) - len(fine),
        prompt_tokens=sum(sample.num_given for sample in samples if sample.error is None),
        new_tokens=sum(len(outcome.tokens) for outcome in fine),
        **{name: sum(getattr(outcome, name) for outcome in fine) for name in counts},
    )


def length_of(sample: Sample) -> int:
    """Tokens of the sample's canvas, 0 if it has none."""
    return 0 if sample.canvas is None else len(sample.canvas)
