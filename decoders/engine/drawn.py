"""Tokens that have not left the device: a row may take its token from what an earlier forward drew.

The host can then plan a forward before it has read the record of the one before. It names the token by its rank (`asks.promise`);
the table on the device has it, since the draw wrote it there.

    forward      rows                          draws       the host reads
    1            .. the cat                    rank 5      -
    2            (what was drawn at rank 5)    rank 6      rank 5, while forward 2 runs
    3            (what was drawn at rank 6)    rank 7      rank 6, while forward 3 runs

Legend: N rows, R answered rows, C cells: some ranks of every slot, and one for draws that mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from torch import Tensor

from draftmill.decoders.engine.asks import FIRST_PROMISE
from draftmill.decoders.engine.packing import Asked, Ints
from draftmill.decoders.engine.parcels import Parcel, Sent
from draftmill.decoders.kernels.switch import is_on

VARIABLE: Final = "DRAFTMILL_AHEAD"
"""The environment variable: 0 has the host read each record before it plans the next forward."""


def plans_ahead(device: torch.device) -> bool:
    """Whether forwards are planned before the record of the last one is read: on a CPU nothing runs meanwhile."""
    return device.type == "cuda" and is_on(VARIABLE)


Read = Callable[[Tensor], Tensor]
"""What was sent -> tokens, [N]."""


def as_sent(token_N: Tensor) -> Tensor:
    """The tokens, where the host knew all of them."""
    return token_N


class Drawn:
    """The tokens drawn last at `num_ranks` neighbouring ranks of every slot, int64 [C]."""

    def __init__(self, num_slots: int, num_ranks: int, device: torch.device) -> None:
        self._num_ranks = num_ranks
        self.nowhere: int = num_slots * num_ranks
        """The cell of draws that mean nothing."""
        self._token_C = torch.zeros(self.nowhere + 1, dtype=torch.int64, device=device)

    def cells(self, slot_R: Ints, rank_R: Ints) -> Ints:
        """The cell of each (slot, rank), [R]."""
        return slot_R * self._num_ranks + rank_R % self._num_ranks

    def located(self, token_N: Ints, slot_N: Ints) -> tuple[Ints, Read]:
        """What to send in place of tokens of which some are promises, [N], and what makes the tokens of it on the device."""
        is_promise_N = token_N <= FIRST_PROMISE
        if not is_promise_N.any():
            return token_N, as_sent
        cell_N = self.cells(slot_N, FIRST_PROMISE - token_N)
        if is_promise_N.all():
            return cell_N, self._all
        return np.where(is_promise_N, cell_N - len(self._token_C), token_N), self._some

    def _all(self, cell_N: Tensor) -> Tensor:
        return self._token_C.index_select(0, cell_N)

    def _some(self, sent_N: Tensor) -> Tensor:
        # A negative index counts from the end.
        return torch.where(sent_N < 0, self._token_C[sent_N.clamp(max=-1)], sent_N)

    def plan(
        self, asked: Asked, part: slice | Ints, parcel: Parcel, size: int | None
    ) -> Callable[[Sent, Tensor], None]:
        """Plan to keep what is drawn from some rows, filled up to `size`."""
        cells_R = self.cells(asked.slot_R[part], asked.rank_R[part])
        cells = parcel.enclose(cells_R, size=size, fill=self.nowhere)

        def note(sent: Sent, token_R: Tensor) -> None:
            self._token_C.index_copy_(0, sent[cells], token_R)

        return note
