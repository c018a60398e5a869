"""BoundScorer: scores texts under masked diffusion by a mean over random masks (draws/score_masks.py); each mask is a canvas.

The canvases of all texts inside share the forwards: each forward takes the next ones in the order in which their texts came, as
many as fit. A canvas needs one forward and keeps nothing, so no text waits for another, and all slots of the cache are free after
each step. A text ends when its last canvas has run.

    text          tokens that are scored       canvases                     a forward
    A             * * * *                      A0 A1 A2 .. A127             A126 A127 B0 B1
    B             * *                          B0 B1 B2

A canvas's result is the same in any forward, and a text's sums are exact (fsum), so its score does not depend on the batch. NFE
counts the canvases, in the one place where forwards are counted.

Knows nothing of models. Legend: N canvases of a forward, L tokens of a text, R rows that are read, M draws.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum, sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoders.base import Outcome, Request
from decoders.common_settings import DecoderChoice, Estimate
from decoders.draws.score_masks import MaskedGroup
from decoders.engine.scores import Scorer, Scores
from decoders.engine.setup import Setup
from decoders.engine.state import Group, Resident


@dataclass(slots=True, eq=False)
class Text:
    """A text that is being scored: its tokens, the groups of masked ones, and what its canvases have said so far.

    `positions` are those of each group, `alone` those whose probability needs no mask. `per_canvas` masks of each group share a
    canvas. `sampled_M` are each draw's sums over sampled groups, `exact_M` over all other tokens.
    """

    slot: int
    tokens_L: NDArray[np.int64]
    groups: tuple[MaskedGroup, ...]
    positions: tuple[NDArray[np.int64], ...]
    alone: NDArray[np.int64]
    per_canvas: int = 1
    next: int = 0
    done: int = 0
    committed: int = 0
    sampled_M: NDArray[np.float64] = field(init=False)
    exact_M: NDArray[np.float64] = field(init=False)
    token_log_p: dict[int, float] = field(default_factory=dict)
    is_greedy: bool = True

    def __post_init__(self) -> None:
        self.sampled_M, self.exact_M = np.zeros(self.num_draws), np.zeros(self.num_draws)

    @property
    def num_draws(self) -> int:
        """How many masks the group with the most masks has."""
        return max((group.num_masks for group in self.groups), default=1)

    @property
    def num_canvases(self) -> int:
        """How many canvases are run."""
        return -(-self.num_draws // self.per_canvas)

    @property
    def is_exact(self) -> bool:
        """Whether each token's own probability is known: none is masked together with another."""
        return all(group.enumerated and len(group.places_L) == 1 for group in self.groups)

    def canvas(self) -> Canvas:
        """The next canvas."""
        first = self.next * self.per_canvas
        draws = range(first, min(first + self.per_canvas, self.num_draws))
        self.next += 1
        return Canvas(self, tuple(self._draw(number) for number in draws))

    def _draw(self, number: int) -> Draw:
        masked, weights, sampled, share = [], [], [], 0.0
        for group, positions in zip(self.groups, self.positions, strict=True):
            if number < group.num_masks:
                mask = group.mask(number)
                share = mask.share
                masked.append(positions[mask.hidden_L])
                weights.append(np.full(len(masked[-1]), mask.weight))
                sampled.append(np.full(len(masked[-1]), not group.enumerated))
        empty = np.zeros(0, dtype=np.int64)
        hidden = np.concatenate([empty, *masked])
        alone = self.alone if number == 0 else empty
        return Draw(
            number,
            hidden,
            np.concatenate([hidden, alone]),
            np.concatenate([*weights, np.ones(len(alone))]),
            np.concatenate([*sampled, np.zeros(len(alone), dtype=np.bool_)]).astype(np.bool_),
            share,
        )

    def take(self, draw: Draw, log_p_R: NDArray[np.float64], is_first_R: NDArray[np.bool_]) -> None:
        """Add what a draw said of its tokens."""
        each_R = draw.weights_R * log_p_R
        self.sampled_M[draw.number] = fsum(each_R[draw.sampled_R].tolist())
        self.exact_M[draw.number] = fsum(each_R[~draw.sampled_R].tolist())
        if self.is_exact:
            self.token_log_p |= dict(zip(draw.asked_R.tolist(), log_p_R.tolist(), strict=True))
            self.is_greedy = self.is_greedy and bool(is_first_R.all())

    def total(self) -> float:
        """The estimate of the log-probability."""
        return fsum([*self.sampled_M.tolist(), *self.exact_M.tolist()])

    def stderr(self) -> float:
        """Its standard error: from the difference of each pair of masks, which are alike but for chance."""
        sampled_M = self.sampled_M[: len(self.sampled_M) // 2 * 2]
        return sqrt(fsum(((sampled_M[0::2] - sampled_M[1::2]) ** 2).tolist()))


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw of masks: the masked positions, those that are read (the masked ones, and what needs no mask), and their weights.

    `share` is the share of its text's tokens that it stands for.
    """

    number: int
    masked: NDArray[np.int64]
    asked_R: NDArray[np.int64]
    weights_R: NDArray[np.float64]
    sampled_R: NDArray[np.bool_]
    share: float


@dataclass(frozen=True, slots=True)
class Canvas:
    """One row of a forward: some draws of a text."""

    text: Text
    draws: tuple[Draw, ...]


class BoundScorer(Scorer):
    """See the module's docstring; a subclass says which tokens are masked together, and runs canvases."""

    def __init__(self, setup: Setup, settings: DecoderChoice, estimate: Estimate) -> None:
        super().__init__(setup)
        self.kind = settings.estimates[0] if estimate.kind == "auto" else estimate.kind
        self.samples = estimate.samples
        self._row_bytes = int(getattr(self.backbone, "row_bytes", 0))
        # In the order in which they came.
        self._texts: list[Text] = []
        # How many canvases may run at once since memory ran out.
        self._memory_bound: int | None = None

    @abstractmethod
    def _grouped(
        self, request: Request, scored: NDArray[np.int64]
    ) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
        """The scored positions that are masked together, group by group, and those that need no mask."""

    def _per_canvas(self, length: int, positions: Sequence[NDArray[np.int64]]) -> int:
        """How many draws share a canvas; a function of the text alone."""
        return 1

    @abstractmethod
    def _run(self, canvases: Sequence[Canvas], owners: list[int]) -> Tensor:
        """Run one forward; returns the states that predict the asked tokens, canvas after canvas, [R, D]."""

    # ---- admission -----------------------------------------------------------------------------------------------

    def room(self, length: int) -> int:
        """One more text while the next forward has room for its canvases."""
        if not self.active:
            return 1
        most = self._most_canvases(self._columns_at(self._longest_with(length)))
        return int(self._num_pending() < most and self.active < self.max_rows)

    def slot_bytes(self, num_columns: int) -> int:
        """See SlotDecoder; adds a forward over whole canvases."""
        return super().slot_bytes(num_columns) + self._slots_each * num_columns * self._row_bytes

    def _num_pending(self) -> int:
        return sum(text.num_canvases - text.next for text in self._texts)

    def _start(self, slot: int, request: Request) -> None:
        self._put(slot, request)
        scored = request.to_score()
        positions, alone = self._grouped(request, scored)
        groups = tuple(
            MaskedGroup(request.key, number, np.searchsorted(scored, each).astype(np.int64), self.kind, self.samples)
            for number, each in enumerate(positions)
        )
        per_canvas = self._per_canvas(len(request.canvas), positions)
        self._texts.append(
            Text(slot, request.canvas.astype(np.int64), groups, tuple(positions), alone, per_canvas=per_canvas)
        )

    def _move(self, source: int, target: int) -> None:
        # The cache holds nothing between forwards, and may have fewer slots than there are texts.
        self.state.move(source, target)
        self.warps.move(source, target)
        self.counting.counters.move(source, target)
        self._residents[target] = self._residents[source]
        for text in self._texts:
            if text.slot == source:
                text.slot = target

    def _next_group(self) -> Group:
        self._fresh = []
        slots = list(range(self._num_dense))
        return Group(slots, torch.tensor(slots, dtype=torch.int64, device=self.state.device), fresh=False)

    # ---- one forward ---------------------------------------------------------------------------------------------

    def _advance(self, group: Group) -> None:
        columns = self._columns_at(self._longest_with(1))
        self._num_lanes = self._most_canvases(columns)
        count = min(self._num_lanes, self._num_pending())
        before = [(text, text.next) for text in self._texts]
        try:
            self._make_slots(count, columns)
            canvases = self._take(count)
            said = self._look(canvases)
        except (MemoryError, torch.OutOfMemoryError):
            if count == 1:
                raise
            # The canvases need not run together: fewer of them take less memory. From here on no more run at once.
            self._memory_bound = count // 2
            for text, first in before:
                text.next = first
            return
        for (text, draw), (log_p_R, is_first_R) in zip(self._draws(canvases), said, strict=True):
            text.take(draw, log_p_R, is_first_R)
        for canvas in canvases:
            self._ran(canvas.text)

    def _most_canvases(self, num_columns: int) -> int:
        """How many canvases with this many columns may run at once; at least one."""
        most = max(self._most_rows(num_columns), 1)
        return most if self._memory_bound is None else min(most, self._memory_bound)

    def _make_slots(self, count: int, num_columns: int) -> None:
        if self._most_rows(max(num_columns, self._shape[1])) < count:
            self._allocate(count, num_columns)  # narrower than before, and with more slots
        else:
            self._allocate_at_least(count, num_columns)

    def _take(self, count: int) -> list[Canvas]:
        """The next canvases, those of the earliest text first."""
        canvases: list[Canvas] = []
        for text in self._texts:
            while text.next < text.num_canvases and len(canvases) < count:
                canvases.append(text.canvas())
        return canvases

    @staticmethod
    def _draws(canvases: Sequence[Canvas]) -> list[tuple[Text, Draw]]:
        return [(canvas.text, draw) for canvas in canvases for draw in canvas.draws]

    def _look(self, canvases: Sequence[Canvas]) -> list[tuple[NDArray[np.float64], NDArray[np.bool_]]]:
        """Run the canvases; returns the log-probabilities of each draw's tokens, and which of these are the most likely ones."""
        draws = self._draws(canvases)
        hidden_RD = self._run(canvases, [canvas.text.slot for canvas in canvases])
        tokens = np.concatenate([text.tokens_L[draw.asked_R] for text, draw in draws])
        tokens_R = torch.from_numpy(tokens).to(self.state.device)
        scores = self._scores_of(hidden_RD, tokens_R) if len(tokens) else Scores(tokens_R.double(), tokens_R.bool())
        ends = np.cumsum([len(draw.asked_R) for _, draw in draws])[:-1]
        log_p, is_first = (values.to("cpu").numpy() for values in (scores.log_p_R, scores.is_first_R))
        return list(zip(np.split(log_p, ends), np.split(is_first, ends), strict=True))

    def _ran(self, text: Text) -> None:
        """Count a canvas of the text; after the last one the text is finished."""
        state, slot = self.state, text.slot
        text.done += 1
        num_tokens = int(state.length_S[slot] - state.prompt_S[slot])
        committed = num_tokens * text.done // text.num_canvases
        self.stats.committed += committed - text.committed
        text.committed = committed
        if text.done == text.num_canvases:
            state.logprob_S[slot] = text.total()
            state.decided_S[slot] = state.length_S[slot]

    # ---- outcomes ------------------------------------------------------------------------------------------------

    def _outcome(self, slot: int, resident: Resident) -> Outcome:
        outcome = super()._outcome(slot, resident)
        (text,) = (text for text in self._texts if text.slot == slot)
        self._texts.remove(text)
        if outcome.error_kind is not None:
            return outcome
        if text.is_exact:
            ordered = [text.token_log_p[position] for position in sorted(text.token_log_p)]
            outcome.token_logprobs, outcome.is_greedy = np.asarray(ordered, dtype=np.float32), text.is_greedy
        else:
            outcome.logprob_stderr = text.stderr()
        return outcome

    def clear(self) -> list[int]:
        """Free every slot; returns the indices of the requests that were inside."""
        self._texts.clear()
        return super().clear()
