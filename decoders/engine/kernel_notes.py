"""Draws the tokens of named rows, and tells what decoders want to know of them, by one kernel (decoders/kernels/notes.py).

It stands for a chain of operations in named_answers.py: the distribution, its noise, the token, and numbers that routers and
schedules read. Sums over a distribution at temperature 0 are float64, as there.

Legend: R rows, V vocabulary, F what is told of a row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftmill.decoders.base import ModelInfo
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.algorithm import Notes
from draftmill.decoders.engine.notes import MEASURES, worth_of
from draftmill.decoders.engine.packing import Ints
from draftmill.decoders.engine.parcels import Parcel, Sent
from draftmill.decoders.engine.rings import Places
from draftmill.decoders.engine.row_laws import RowLaws
from draftmill.decoders.engine.transfers import marks
from draftmill.decoders.kernels.find import Note
from draftmill.decoders.kernels.notes_reference import Wanted


def can_tell(sampling: Sampling, notes: Notes) -> bool:
    """Whether the kernel tells these notes: of coupled draws, and of one distribution.

    At temperature 0 a measure is that of the distribution after top-k and top-p, all else is that of the model's own.
    """
    greedy, cut = sampling.temperature == 0.0, sampling.top_k is not None or sampling.top_p is not None
    of_two = greedy and cut and notes.worth is not None
    return not notes.by_ratio and (greedy or sampling.acceptance == "coupled") and not of_two


class KernelNotes:
    """The kernel with the settings and keys of the slots."""

    def __init__(
        self, note: Note, info: ModelInfo, rows: RowLaws, places: Places, notes: Notes, device: torch.device
    ) -> None:
        self._note, self._rows, self._places, self._vocab_size = note, rows, places, info.vocab_size
        self._suppressed_V = marks(info.suppressed, info.vocab_size, device)
        self._worth, self._fresh = notes.worth, notes.fresh
        wanted: list[Wanted] = ["top1", "entropy"] if notes.entropy else ["top1"]
        self._num_told = 2 + len(wanted)
        of: Wanted = MEASURES[notes.worth[0]][0] if notes.worth else "top1"
        self._wanted, self._worth_at = [*wanted, *({of} - set(wanted))], 2 + [*wanted, of].index(of)

    def plan(
        self, slot_R: Ints, position_R: Ints, number_R: Ints, parcel: Parcel, *, size: int | None = None
    ) -> Callable[[Sent, Tensor], Tensor]:
        """Plan what is told of rows, float64 [F, R], from their raw logits.

        Token, log-probability, probability; then entropy and worth, if they are wanted. With `size` so many rows are told of;
        those beyond ours mean nothing.
        """
        keys = parcel.enclose(self._places.key_S2[slot_R].T, size=size)
        positions = parcel.enclose(self._places.positions(slot_R, position_R), size=size)
        numbers = parcel.enclose(number_R, size=size) if self._fresh else None
        each, cuts = parcel.enclose(self._rows.each(slot_R), size=size, fill=1), self._rows.cuts(slot_R)

        def work(sent: Sent, logits_RV: Tensor) -> Tensor:
            warp = self._rows.warp(sent[each], self._suppressed_V, cuts=cuts)
            told_FR = self._note(
                logits_RV,
                warp,
                sent[keys].T,
                sent[positions],
                wanted=self._wanted,
                warped=True,
                step_R=None if numbers is None else sent[numbers],
            )
            if self._worth is None:
                return told_FR
            worth_R = worth_of(*self._worth, told_FR[self._worth_at], self._vocab_size)
            return torch.cat([told_FR[: self._num_told], worth_R.unsqueeze(0)])

        return work
