"""Which tokens each sampled row may draw, where samples have constraints: from trackers on the host to bits on the device.

    row      the cat _            sees `the cat`; `cat` is a draft          known: cat at 1
    tracker  state after `cat`    may be followed by `sat`, `sits`          a set, by its name
    table    cell 7: 0010..       the bits of each set, sent when a row first needs it; rows refer to cells

A row knows what is decided, and the drafts of its forward that it sees. So it draws from the distribution that the sequential
decoder draws from at that place, and whatever is lossless without a constraint is so with one. Legend: see batch.py; C cells,
W words of 32 tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.decoders.constraints.constraint import Allowed, Known
from draftmill.decoders.engine.asks import Ints
from draftmill.decoders.engine.batch import Batch
from draftmill.decoders.engine.samples import Sample

_MOST_BYTES: Final = 1 << 26
_BITS: Final = 32


class MaskTable:
    """Sets of tokens as bits on the device, the latest ones needed; cell 0 is the set of all."""

    def __init__(self, vocab_size: int, mask_id: int | None, device: torch.device) -> None:
        self.mask_id = mask_id
        self._vocab_size, self._width, self._device = vocab_size, -(-vocab_size // _BITS), device
        self._cells = OrderedDict[Hashable, int]()
        self._most = max(_MOST_BYTES // (4 * self._width), 64)
        self._bits_CW = torch.full((1, self._width), -1, dtype=torch.int32, device=device)

    def cells(self, sets: Sequence[Allowed]) -> Ints:
        """The cell of each set, [R]; sends those that are not in the table."""
        while len(sets) >= self._most:
            self._most *= 2
        news = dict[int, NDArray[np.int32]]()
        cell_R = np.zeros(len(sets), dtype=np.int64)
        for row, named in enumerate(sets):
            if named is None:
                continue
            name, compute = named
            cell = self._cells.get(name)
            if cell is None:
                # The set that was not needed for the longest time goes; a step needs fewer than there are cells.
                cell = len(self._cells) + 1 if len(self._cells) < self._most else self._cells.popitem(last=False)[1]
                allowed_V = compute()
                assert allowed_V.any(), "a constraint leaves a token, as long as it can be satisfied"
                news[cell] = self._packed(allowed_V)
            self._cells[name] = cell
            self._cells.move_to_end(name)
            cell_R[row] = cell
        if news:
            self._send(news)
        return cell_R

    def _packed(self, allowed_V: NDArray[np.bool_]) -> NDArray[np.int32]:
        padded = np.zeros(self._width * _BITS, dtype=np.bool_)
        padded[: self._vocab_size] = allowed_V
        return np.packbits(padded, bitorder="little").view(np.int32)

    def _send(self, news: dict[int, NDArray[np.int32]]) -> None:
        size = len(self._bits_CW)
        if max(news) >= size:
            grown_CW = self._bits_CW.new_zeros(min(max(2 * size, max(news) + 1), self._most + 1), self._width)
            grown_CW[:size] = self._bits_CW
            self._bits_CW = grown_CW
        cells = torch.tensor(list(news), device=self._device)
        self._bits_CW[cells] = torch.from_numpy(np.stack(list(news.values()))).to(self._device)

    def allowed(self, cell_R: Tensor) -> Tensor:
        """Which tokens rows may draw, by their cells, bool [R, V]."""
        word_RW1 = self._bits_CW.index_select(0, cell_R).unsqueeze(2)
        bit_RWB = (word_RW1 >> torch.arange(_BITS, dtype=torch.int32, device=self._device)) & 1
        return bit_RWB.flatten(1)[:, : self._vocab_size].to(torch.bool)


def add_allowed(b: Batch, samples: Sequence[Sample], table: MaskTable) -> None:
    """Add which tokens each sampled row of a batch may draw."""
    owner_R, sample_N = np.repeat(np.arange(len(samples)), b.sampled_B), np.asarray(b.sample_G)[b.owner_N]
    sets: list[Allowed] = [None] * len(owner_R)
    for index, sample in enumerate(samples):
        if sample.tracker is not None:
            for row in np.flatnonzero(owner_R == index).tolist():
                known = known_to(b, sample, row, np.flatnonzero(sample_N == index), table.mask_id)
                sets[row] = sample.tracker.allowed(int(b.place_R[row]), known)
    b.allowed_R = table.cells(sets)


def known_to(b: Batch, sample: Sample, row: int, mine: Ints, mask_id: int | None) -> Known:
    """The drafts that a sampled row sees among the rows `mine` of its sample."""
    at = int(b.row_R[row])
    columns = b.column_N[mine]
    if b.layout.streams:
        positions, sees = np.array(sample.order)[columns], columns < b.limit_Q[at]
    else:
        positions = b.position_N[mine]
        sees = ((b.low_IN[:, at, None] <= columns) & (columns < b.high_IN[:, at, None])).any(0)
        if not b.layout.keeps:  # each canvas has a slot of its own
            sees &= b.owner_N[mine] == b.owner_N[at]
    pairs = zip(positions[sees].tolist(), b.token_N[mine][sees].tolist(), strict=True)
    return [(position, token) for position, token in pairs if token != mask_id and sample.is_open(position)]
