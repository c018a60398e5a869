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
from draftmill.actors.rows.fim import AskedHole, Infilling, TextPart, together
from draftmill.actors.rows.lengths import LengthSearch
from draftmill.decoders.base import HOLE, JOB_SETTINGS, Decoder, EngineStats, Outcome, Request, RowSettings
from draftmill.decoders.draws.keys import hole_key
from draftmill.storage.errors import RowError


@dataclass(slots=True, eq=False)
class Sample:
    """A row of a unit inside the worker: first it has a canvas or an error, at the end an outcome or an error.

    `index` is its place in the unit. `score_from` is the first position to score, None if tokens are generated; `scored` are all
    of them, if not all from there on.
    `settings` are the row's own; `note` is the UnitIO's data. With an `infilling`, holes are filled one after another:
    `canvas` is the current hole's canvas, `parts` are the holes decoded so far, and `outcome` is their combined outcome. With a
    `search`, canvases of several lengths are tried first. `earlier` are the row's texts in other runs, which draft.
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
    infilling: Infilling | None = None
    search: LengthSearch | None = None
    asked: AskedHole | None = None
    parts: list[TextPart] = field(default_factory=list)
    queued_at_s: float | None = None
    earlier: tuple[NDArray[np.int32], ...] = ()

    def request(self, handle: int) -> Request:
        """The request for a decoder; its outcome has the index `handle`."""
        assert self.canvas is not None, "a row without a canvas is not decoded"
        if self.search is not None and not self.search.is_over:
            return self.search.request(handle)
        key = hole_key(self.key, len(self.parts))
        return Request(
            handle,
            key,
            self.canvas,
            score_from=self.score_from,
            settings=self.settings,
            scored=self.scored,
            earlier=self._earlier_rest(),
        )

    def _earlier_rest(self) -> tuple[NDArray[np.int32], ...]:
        """The texts that draft; of holes that are filled one after another the part that this hole and later ones may have."""
        filled = sum(len(part.outcome.tokens) for part in self.parts)
        return tuple(text[filled:] for text in self.earlier) if filled else self.earlier

    def take(self, outcome: Outcome) -> bool:
        """Store the outcome of a request; returns True if the sample has another request: for its next hole, or another length.

        That request depends only on the row, the key and the fills so far, so it is the same after any failure or retry.
        """
        self.outcome = outcome
        if self.search is not None and outcome.error_kind is None:
            return self._search(self.search, outcome)
        if self.infilling is None or not self.infilling.limits:
            return False
        assert self.asked is not None, "an outcome without a request"
        self.parts.append(TextPart(self.asked, outcome))
        self.outcome = together(self.parts)
        if outcome.error_kind is not None or len(self.parts) == len(self.infilling.limits):
            return False
        self.ask()
        self.queued_at_s = time.perf_counter()
        return True

    def _search(self, search: LengthSearch, outcome: Outcome) -> bool:
        if search.is_over:  # a masked canvas of the length that was taken
            self.outcome = search.result(outcome)
            return False
        goes_on = search.take(outcome)
        self.canvas, self.queued_at_s = search.canvas, time.perf_counter()
        if not goes_on and search.row.bias is None:
            self.outcome = search.result()
            return False
        return True

    @property
    def has_begun(self) -> bool:
        """Whether some of its requests have ended."""
        return bool(self.parts) or (self.search is not None and self.outcome is not None)

    def ask(self) -> None:
        """Make the canvas of the next hole."""
        assert self.infilling is not None, "a sample without an infilling"
        self.asked = self.infilling.ask([part.fill for part in self.parts])
        self.canvas = self.asked.canvas
        if self.infilling.constraints:
            constraint = self.infilling.constraints[len(self.parts)]
            self.settings = dataclasses.replace(self.settings, constraint=constraint)

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
