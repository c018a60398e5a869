"""What each sampled row draws from, where samples have constraints or penalties: from trackers on the host to the device.

    row      the cat _            sees `the cat`; `cat` is a draft          known: cat at 1
    tracker  state after `cat`    may be followed by `sat`, `sits`          a set, by its name
    table    cell 7: 0010..       the bits of each set, sent when a row first needs it; rows refer to cells
    entries  the: -0.5, sat: 1.2  how its logits change by penalties, biases and bans (penalties.py)

A row knows what is decided, and the drafts of its forward that it sees. So it draws from the distribution that the sequential
decoder draws from at that place, and whatever is lossless without a constraint is so with one. Legend: see batch.py; C cells,
W bytes of 8 tokens, B values of a byte.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.decoders.backbones.rows import Host, StreamRows, TokenRows
from draftmill.decoders.constraints.trackers import Allowed, Known
from draftmill.decoders.engine.asks import Ints
from draftmill.decoders.engine.batch import Batch, Draws
from draftmill.decoders.engine.penalties import Entries
from draftmill.decoders.engine.samples import Sample

_MOST_BYTES: Final = 1 << 26


class MaskTable:
    """Sets of tokens as bits on the device, the latest ones needed; cell 0 is the set of all."""

    def __init__(self, vocab_size: int, mask_id: int | None, device: torch.device) -> None:
        self.mask_id = mask_id
        self._vocab_size, self._device, width = vocab_size, device, -(-vocab_size // 8)
        self._cells = OrderedDict[Hashable, int]()
        self._most = max(_MOST_BYTES // width, 64)
        self._bits_CW = torch.full((1, width), 255, dtype=torch.uint8, device=device)
        is_set_B8 = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(np.bool_)
        self._floor_B8 = torch.from_numpy(np.where(is_set_B8, np.float32(0.0), np.float32(-np.inf))).to(device)

    def cells(self, sets: Sequence[Allowed]) -> Ints:
        """The cell of each set, [R]; sends new sets to the table."""
        while len(sets) >= self._most:
            self._most *= 2
        news = dict[int, NDArray[np.uint8]]()
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
                # Nothing may follow drafts that break the constraint; such a row's token is not accepted, whatever it is.
                news[cell] = np.packbits(allowed_V if allowed_V.any() else ~allowed_V, bitorder="little")
            self._cells[name] = cell
            self._cells.move_to_end(name)
            cell_R[row] = cell
        if news:
            self._send(news)
        return cell_R

    def _send(self, news: dict[int, NDArray[np.uint8]]) -> None:
        size = len(self._bits_CW)
        if max(news) >= size:
            grown_CW = self._bits_CW.new_zeros(
                min(max(2 * size, max(news) + 1), self._most + 1), self._bits_CW.shape[1]
            )
            grown_CW[:size] = self._bits_CW
            self._bits_CW = grown_CW
        cells = torch.tensor(list(news), device=self._device)
        self._bits_CW[cells] = torch.from_numpy(np.stack(list(news.values()))).to(self._device)

    def floor(self, cell_R: Tensor) -> Tensor:
        """What is added to the logits of rows, by their cells: -inf for what they may not draw, else 0, float32 [R, V]."""
        byte_E = self._bits_CW.index_select(0, cell_R).flatten().to(torch.int32)
        return self._floor_B8.index_select(0, byte_E).view(len(cell_R), -1)[:, : self._vocab_size]


def add_shape(b: Batch[Host], samples: Sequence[Sample], table: MaskTable) -> None:
    """Add which tokens each sampled row of a batch may draw, and how its logits change."""
    rows = b.rows
    owner_R, sample_N = np.repeat(np.arange(len(samples)), b.draws.sampled_B), b.sample_G[b.rows.owner_N]
    sets: list[Allowed] = [None] * len(owner_R)
    entries: list[Entries | None] = [None] * len(owner_R)
    for index, sample in enumerate(samples):
        if not sample.is_shaped:
            continue
        mine, seen = np.flatnonzero(sample_N == index), dict[Hashable, Known]()
        for row in np.flatnonzero(owner_R == index).tolist():
            position, at = int(b.draws.place_R[row]), int(b.draws.row_R[row])
            # Rows of one canvas often see the same.
            sight: Hashable = at
            if isinstance(rows, TokenRows):
                sight = rows.low_IN[:, at].tobytes(), rows.high_IN[:, at].tobytes(), rows.owner_N[at]
            if sight not in seen:
                seen[sight] = known_to(b, sample, at, mine, table.mask_id)
            if sample.tracker is not None:
                sets[row] = sample.tracker.allowed(position, seen[sight])
            if sample.penalties is not None:
                entries[row] = sample.penalties.entries(position, seen[sight])
    if any(allowed is not None for allowed in sets):
        b.draws.allowed_R = table.cells(sets)
    if any(entry is not None for entry in entries):
        _add_entries(b.draws, entries)


def _add_entries(draws: Draws[Host], entries: Sequence[Entries | None]) -> None:
    """The changes of all rows as a rectangle: a row with fewer repeats its first one, or changes nothing."""
    most = max(1, *(len(entry[0]) for entry in entries if entry is not None))
    token_RE, change_R3E = np.zeros((len(entries), most), np.int64), np.zeros((len(entries), 3, most))
    change_R3E[:, 1] = 1.0
    for row, entry in enumerate(entries):
        if entry is None or not len(entry[0]):
            continue
        (tokens, changes), count = entry, len(entry[0])
        token_RE[row, :count], change_R3E[row, :, :count] = tokens, changes
        token_RE[row, count:], change_R3E[row, :, count:] = tokens[0], changes[:, :1]
    draws.token_ER, draws.change_3ER = token_RE.T, change_R3E.transpose(1, 2, 0)


def known_to(b: Batch[Host], sample: Sample, at: int, mine: Ints, mask_id: int | None) -> Known:
    """The drafts that row (query) `at` of a batch sees among the rows `mine` of its sample."""
    rows, columns = b.rows, b.rows.column_N[mine]
    if isinstance(rows, StreamRows):
        positions, sees = np.array(sample.order)[columns], columns < rows.limit_Q[at]
    else:
        positions = rows.position_N[mine]
        sees = ((rows.low_IN[:, at, None] <= columns) & (columns < rows.high_IN[:, at, None])).any(0)
        if not b.layout.keeps:  # one slot a canvas
            sees &= rows.owner_N[mine] == rows.owner_N[at]
    pairs = zip(positions[sees].tolist(), rows.token_N[mine][sees].tolist(), strict=True)
    return [(position, token) for position, token in pairs if token != mask_id and sample.is_open(position)]
