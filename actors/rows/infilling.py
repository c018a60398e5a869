"""A row whose holes a causal model fills one after another: each hole's request, and the combined outcome. Pure.

    row       t0 [hole] t1 [hole] t2
    first     P = t0                S = t1 t2
    second    P = t0 fill t1        S = t2

A hole sees the fills of the holes before it. Holes after it are skipped: the texts around them are joined. If P and S
exceed the model's limit, they are cut at the ends that are farthest from the hole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from draftmill.actors.rows.fim import Template
from draftmill.decoders.base import HOLE, Outcome, TraceStep

IDS = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AskedHole:
    """One hole's canvas: the prompt, int32, then a HOLE for each token the hole may have; `cut` tokens did not fit."""

    canvas: IDS
    cut: int

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return int((self.canvas != HOLE).sum())


@dataclass(frozen=True, slots=True)
class TextPart:
    """One hole's request and its outcome."""

    asked: AskedHole
    outcome: Outcome

    @property
    def fill(self) -> IDS:
        """The hole's tokens, without the end token."""
        return self.outcome.tokens[: -1 if self.outcome.finish == "eos" else None]


@dataclass(frozen=True, slots=True)
class Infilling:
    """A row's visible `pieces`, one more than its holes; the `limits` of its holes in tokens; the model's `max_length`."""

    template: Template
    pieces: tuple[IDS, ...]
    limits: tuple[int, ...]
    max_length: int | None

    @property
    def longest(self) -> int:
        """The maximum length of this row's canvases, in tokens."""
        length = self.template.num_tokens + sum(map(len, self.pieces)) + sum(self.limits)
        return length if self.max_length is None else min(length, self.max_length)

    @property
    def room(self) -> int | None:
        """Tokens of prefix and suffix that fit next to the largest hole; None if there is no limit."""
        if self.max_length is None or not self.limits:
            return None
        return self.max_length - self.template.num_tokens - max(self.limits)

    def ask(self, fills: Sequence[IDS]) -> AskedHole:
        """The canvas of the next hole, after those that have `fills`; empty if the row has no holes."""
        if not self.limits:
            return AskedHole(np.zeros(0, dtype=np.int32), 0)
        hole = len(fills)
        before = _joined(self.filled(fills)[: 2 * hole + 1])
        after = _joined(self.pieces[hole + 1 :])
        total = len(before) + len(after)
        if self.max_length is not None:
            before, after = cut(before, after, self.max_length - self.template.num_tokens - self.limits[hole])
        prompt = self.template.prompt(before, after)
        holes = np.full(self.limits[hole], HOLE, dtype=np.int32)
        return AskedHole(np.append(prompt, holes), total - len(before) - len(after))

    def filled(self, fills: Sequence[IDS]) -> list[IDS]:
        """The row's pieces and the fills between them, in order."""
        found = [self.pieces[0]]
        for fill, piece in zip(fills, self.pieces[1:], strict=False):
            found += [fill, piece]
        return [*found, *self.pieces[len(fills) + 1 :]]


def cut(before: IDS, after: IDS, room: int) -> tuple[IDS, IDS]:
    """The tokens nearest to the hole: each side gets half of the room, plus what the other side does not use of its half."""
    front = min(len(before), max(room - len(after), room - room // 2))
    return before[len(before) - front :], after[: room - front]


def together(parts: Sequence[TextPart]) -> Outcome:
    """One outcome for all holes so far. Counts and times are sums; `batch_rows` and `pad_fraction` are means over forwards.

    `finish` is `eos` if every hole ended so, else `length`. If a hole failed, so did the row.
    """
    outcomes = [part.outcome for part in parts]
    last = outcomes[-1]
    if len(outcomes) == 1:
        return last
    nfe = sum(one.nfe for one in outcomes)
    failed = last.error_kind is not None
    return replace(
        last,
        tokens=last.tokens if failed else np.concatenate([one.tokens for one in outcomes]),
        finish="eos" if all(one.finish == "eos" for one in outcomes) else "length",
        logprob=_sum([one.logprob for one in outcomes]),
        nfe=nfe,
        nfe_draft=sum(one.nfe_draft for one in outcomes),
        iterations=sum(one.iterations for one in outcomes),
        proposed=sum(one.proposed for one in outcomes),
        accepted=sum(one.accepted for one in outcomes),
        accept_hist=_added([one.accept_hist for one in outcomes]),
        wait_s=sum(one.wait_s for one in outcomes),
        prefill_s=sum(one.prefill_s for one in outcomes),
        decode_s=sum(one.decode_s for one in outcomes),
        total_s=sum(one.total_s for one in outcomes),
        device_s=sum(one.device_s for one in outcomes),
        batch_rows=sum(one.batch_rows * one.nfe for one in outcomes) / max(1, nfe),
        pad_fraction=sum(one.pad_fraction * one.nfe for one in outcomes) / max(1, nfe),
        started_at_s=outcomes[0].started_at_s,
        trace=_traces(outcomes),
        token_logprobs=None if failed else _scores(outcomes),
    )


def _joined(parts: Sequence[IDS]) -> IDS:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _scores(outcomes: Sequence[Outcome]) -> NDArray[np.float32] | None:
    scores = [one.token_logprobs for one in outcomes if one.token_logprobs is not None]
    return np.concatenate(scores) if len(scores) == len(outcomes) else None


def _added(histograms: Sequence[list[int]]) -> list[int]:
    total = [0] * max(map(len, histograms))
    for histogram in histograms:
        for place, count in enumerate(histogram):
            total[place] += count
    return total


def _traces(outcomes: Sequence[Outcome]) -> list[TraceStep] | None:
    """The steps of all holes, numbered consecutively; positions refer to each hole's own canvas."""
    if outcomes[0].trace is None:
        return None
    steps: list[TraceStep] = []
    nfe = 0
    for outcome in outcomes:
        first = len(steps)
        for step in outcome.trace or ():
            steps.append(replace(step, iteration=first + step.iteration, nfe=nfe + step.nfe))
        nfe += outcome.nfe
    return steps
