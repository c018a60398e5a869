"""Texts that begin alike: what is noted of a text's beginning, and the order in which such texts come together.

    tokens      shots .............. | question A ..... | end 1
    noted       h h h h h h h h h h h h h h h h h h h        a hash of every 8 tokens, 4 bytes; the rest is not noted

    examples question A end 1        one group: what its texts have in common is computed once (decoders/engine/scheduler.py)
    examples question A end 2
    examples question B end 1        inside of it again groups of what is still alike
    another text                     a group of its own

So a worker orders the samples of its units (loop/runner.py), and the planner the rows of a window
(jobs/plan/packing.py). Two texts with equal hashes by chance stand together for nothing; it changes no result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

LEAST: Final = 16
"""Texts are a group if they have so many tokens in common, and half of what they are on average."""
LEVELS: Final = 8
"""Groups within groups, at most; a task has two or three."""
STRIDE: Final = 8
"""Tokens of a hash: `LEAST` must be a multiple of it."""

BEGINNING = pa.field("beginning", pa.binary(), nullable=False)
"""A column beside ROW_SCHEMA while rows are planned: the hashes of each row's beginning, empty where none are noted."""

_HASH = np.dtype("<u4")
_FACTORS = np.cumprod(np.full(STRIDE, 0x9E3779B97F4A7C15, dtype=np.uint64))
_NONE = np.zeros(0, dtype=np.int32)
_FAR = np.iinfo(np.int64).max


class GroupedTexts(NamedTuple):
    """Texts in an order in which those that begin alike come after one another.

    `depth` says for each of them, in this order, how many groups it shares with the text before it; 0 for the first one.
    """

    order: NDArray[np.int64]
    depth: NDArray[np.int64]


def beginnings(tokens: Sequence[NDArray[np.int32] | None]) -> pa.Array:
    """The column BEGINNING for these tokens; empty for None."""
    whole = [_NONE if ids is None else ids[: len(ids) // STRIDE * STRIDE] for ids in tokens]
    blocks = np.concatenate([_NONE, *whole]).astype(np.uint64).reshape(-1, STRIDE)
    hashes = (blocks @ _FACTORS >> np.uint64(32)).astype(_HASH)
    counts = [0, *(len(ids) // STRIDE for ids in whole)]
    ends = np.cumsum(np.array(counts, dtype=np.int32) * _HASH.itemsize, dtype=np.int32)
    return pa.Array.from_buffers(BEGINNING.type, len(tokens), [None, pa.py_buffer(ends), pa.py_buffer(hashes)])


def group_by_beginning(column: pa.ChunkedArray, rank: NDArray[np.int64], *, large: int = _FAR) -> GroupedTexts:
    """Order the rows of a column BEGINNING; `rank` is each row's place if no rows begin alike, `large` as in `group_texts`."""
    noted = column.combine_chunks()
    starts_bytes = np.frombuffer(noted.buffers()[1], dtype=np.int32, count=len(noted) + 1, offset=4 * noted.offset)
    starts = starts_bytes.astype(np.int64) // _HASH.itemsize
    hashes = np.frombuffer(noted.buffers()[2] or b"", dtype=_HASH)
    length, by_text = np.diff(starts), pc.sort_indices(noted).to_numpy().astype(np.int64)
    first, second = starts[by_text[:-1]], starts[by_text[1:]]
    shorter = np.minimum(length[by_text[:-1]], length[by_text[1:]])
    common = np.zeros(len(shorter), dtype=np.int64)
    alike, place = np.flatnonzero(shorter), 0
    while len(alike):  # the pairs that have `place` hashes in common, and more to compare
        alike = alike[hashes[first[alike] + place] == hashes[second[alike] + place]]
        place += 1
        common[alike] = place
        alike = alike[shorter[alike] > place]
    return group_texts(by_text, common, length, rank, least=LEAST // STRIDE, large=large)


def group_texts(
    by_text: NDArray[np.int64],
    common: NDArray[np.int64],
    length: NDArray[np.int64],
    rank: NDArray[np.int64],
    *,
    least: int,
    large: int,
) -> GroupedTexts:
    """Order texts, which `by_text` sorts by their symbols; each has, with its neighbour there, `common` first symbols in common.

    `length` [texts] are their symbols, `rank` [texts] their places if none begin alike. Groups come in the order of their first
    texts by rank, and so do the texts of a group. Neighbours form a group if their common prefix, beyond the enclosing group's,
    has at least `least` symbols and half their mean length. Groups of `large` or more need only the first.
    """
    length, rank = length[by_text], rank[by_text]
    numbers = np.arange(len(by_text))
    known = np.zeros(len(by_text), dtype=np.int64)  # what the group of each text has in common
    tried = known  # the same, of a set of texts that may not have become a group
    inside = np.ones(len(common), dtype=np.bool_)  # neighbours of one set
    leaders, depth = np.tile(rank, (LEVELS, 1)), known.copy()  # of the groups of each text, from outside in
    for _ in range(LEVELS):
        inside = inside & (common >= known[:-1] + least) & (common > tried[:-1])
        if not inside.any():
            break
        starts = np.flatnonzero(np.concatenate([[True], ~inside]))
        sizes = np.diff(starts, append=len(by_text))
        shared = np.minimum.reduceat(np.append(np.where(inside, common, _FAR), _FAR), starts)
        saved, whole = (shared - known[starts]) * sizes, np.add.reduceat(length - known, starts)
        is_group = (sizes > 1) & ((2 * saved >= whole) | (sizes >= large))
        leader = np.minimum.reduceat(rank, starts)
        set_of = np.repeat(np.arange(len(starts)), sizes)
        tried = np.where(sizes > 1, shared, tried[starts])[set_of]
        known = np.where(is_group[set_of], tried, known)
        ours = numbers[is_group[set_of]]
        leaders[depth[ours], ours] = leader[set_of][ours]
        depth[ours] += 1
    leaders = leaders[: depth.max(initial=0)]
    order = np.lexsort((rank, *leaders[::-1]))
    ordered = leaders[:, order]
    same = np.concatenate([[0], (ordered[:, 1:] == ordered[:, :-1]).sum(axis=0)])[: len(order)]
    return GroupedTexts(by_text[order], same)
