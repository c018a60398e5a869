"""Divides a device's memory among the parts of a batch, and so limits its slots and columns. actors/loop/memory.py measures.

The memory that is free after all models are loaded is divided once:

    cache and state     the remainder; a slot takes its columns' bytes and its decoder's state
    prompts             the activations of a forward over prompts, for a limited number of rows
    logits              a part of a forward's logits, with its probabilities, noise and float64 copies; once more for graphs,
                        which keep memory of their own
    noise               what a CPU keeps of it, in bytes; noise that does not fit is recomputed in each forward
    a tenth             fragmentation, kernels' workspaces, and layers that exist twice while the cache grows

A cache has no more slots than samples were inside at one time (and a few ahead), of no more columns than they need. Columns that
are no longer needed are freed when slots need their memory. Where a cache is one pool of cells (SlotCache) each slot has as many
of them as its canvas needs (`Extents`), and where memory was measured all are allocated at once.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from draftmill.decoders.backbones.cache import rounded

_MiB: Final = 1 << 20
_CPU_LOGITS, _GPU_LOGITS = 32 * _MiB, 256 * _MiB
_CPU_NOISE: Final = 256 * _MiB
# The logits of a part and their copies: raw, probabilities, noise, and float64 or int64 twice.
_COPIES: Final = 8
_COLUMN_STEP: Final = 64
# The initial slots of a cache, as far as allowed: adding them one by one would copy the cache each time.
_FEWEST_SLOTS: Final = 8


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose. `slots` and `prompt_rows` are None if memory was not measured: then only `batching` bounds them."""

    logits: int
    noise: int
    slots: int | None = None
    prompt_rows: int | None = None

    @classmethod
    def default(cls, device: torch.device) -> MemoryPlan:
        """For a device whose free memory is unknown."""
        on_cpu = device.type == "cpu"
        return cls(_CPU_LOGITS if on_cpu else _GPU_LOGITS, _CPU_NOISE if on_cpu else 0)

    @classmethod
    def of(cls, device: torch.device, free_bytes: int, *, row_bytes: int, captures: bool = False) -> MemoryPlan:
        """Share out what is free; `row_bytes` are the activations of a token row in a forward. `captures`: forwards are
        captured as graphs."""
        most = cls.default(device)
        logits, prompts = min(most.logits, free_bytes // 64), free_bytes // 8
        noise = min(most.noise, free_bytes // 16)
        slots = free_bytes * 9 // 10 - _COPIES * logits * (2 if captures else 1) - noise - prompts
        return cls(logits, noise, slots, max(1, prompts // max(1, row_bytes)))


class Shape(NamedTuple):
    """The slots and columns of the caches, and the number of slots that fit with this number of columns."""

    slots: int = 0
    columns: int = 0
    possible: int = 0


class Extents:
    """The cells of a pool that each slot has, and those that a free slot had and nobody has taken since."""

    def __init__(self, num_cells: int) -> None:
        self.num_cells = num_cells
        self._taken = list[tuple[int, int]]()  # [first, end) in ascending order
        self._places = dict[int, tuple[int, int]]()

    def room(self, columns: int) -> int:
        """How many slots of this many columns fit into what is free."""
        return sum((end - first) // columns for first, end in self._gaps())

    def take(self, slot: int, columns: int) -> tuple[int, list[int]]:
        """Where a slot gets its cells: those it had last, if they are free, else the smallest gap that is large enough. Also
        which slots have lost what they held: free ones whose cells it takes, and itself where it moves."""
        gaps = [(first, end) for first, end in self._gaps() if end - first >= columns]
        assert gaps, "admit called without room"
        last = self._places.pop(slot, (-1, -1))[0]
        start = min((end - first, first) for first, end in gaps)[1]
        if any(first <= last and last + columns <= end for first, end in gaps):
            start = last
        mine = start, start + columns
        # What overlaps with a gap is not taken.
        lost = [other for other, (first, end) in self._places.items() if first < mine[1] and start < end]
        for other in lost:
            del self._places[other]
        insort(self._taken, mine)
        self._places[slot] = mine
        return start, lost if start == last else [slot, *lost]

    def give_back(self, slot: int) -> None:
        """A slot has become free; what it holds stays until another one takes its cells."""
        self._taken.remove(self._places[slot])

    def _gaps(self) -> list[tuple[int, int]]:
        ends = [0, *(end for _, end in self._taken)]
        return list(zip(ends, [*(first for first, _ in self._taken), self.num_cells], strict=True))


@dataclass(slots=True, kw_only=True)
class Capacity:
    """At most `max_rows` samples and `max_tokens` cached columns, and what the `plan` allows. `columns_of` gives the columns of a
    canvas length, which a cache rounds up to a `multiple`; `slot_bytes` the bytes of a slot with that many columns."""

    max_rows: int
    max_tokens: int
    plan: MemoryPlan
    multiple: int
    columns_of: Callable[[int], int]
    slot_bytes: Callable[[int], int]
    pooled: bool = False

    @property
    def cells(self) -> int:
        """How many columns of all slots together are allocated at once; 0 where caches grow by need."""
        if not self.pooled or self.plan.slots is None:
            return 0
        for_cells = self.plan.slots - self.max_rows * self.slot_bytes(0)
        return max(0, min(self.max_tokens, for_cells // max(1, self.slot_bytes(1) - self.slot_bytes(0))))

    def columns(self, length: int) -> int:
        """How many columns a slot has if the longest canvas has this length."""
        return rounded(self.columns_of(length), self.multiple)

    def most_rows(self, num_columns: int) -> int:
        """How many samples fit with this many columns a slot; 0 if not even one does."""
        most = min(self.max_rows, self.max_tokens // num_columns)
        if self.plan.slots is not None:
            most = min(most, max(self.plan.slots, 0) // max(1, self.slot_bytes(num_columns)))
        return min(most, self.cells // num_columns) if self.cells else most

    def fits(self, num_rows: int, num_columns: int) -> bool:
        """Whether `num_rows` slots fit into memory, whatever the batch limits."""
        return self.plan.slots is None or num_rows * self.slot_bytes(num_columns) <= self.plan.slots

    def shape(self, now: Shape, *, needed: int, longest: int) -> Shape:
        """What `needed` samples get; `now` is the present shape. MemoryError for a sample that does not fit even alone."""
        least = self._least(needed, longest)
        slots, columns = now.slots, max(now.columns, rounded(least, _COLUMN_STEP))
        if self.most_rows(columns) < max(needed, min(slots, self.most_rows(least))):
            columns = least
        possible = max(self.most_rows(columns), needed)
        if slots < needed:
            slots = max(needed, _FEWEST_SLOTS, slots * 3 // 2)
        return Shape(min(slots, possible), columns, possible)

    def spread(self, now: Shape, *, needed: int, longest: int) -> Shape:
        """The same where each slot has columns of its own: all slots, and the columns of the longest one. Where graphs depend on
        these they grow by an eighth or more."""
        least = self._least(1, longest)
        step = max(_COLUMN_STEP, (1 << least.bit_length()) // 8)
        columns = now.columns if least <= now.columns else rounded(least, step)
        return Shape(self.max_rows, columns, max(now.possible, needed))

    def _least(self, needed: int, longest: int) -> int:
        """The columns of the longest canvas; MemoryError if `needed` of them don't fit."""
        least = self.columns(longest)
        if not self.fits(needed, least):
            asked, free = needed * self.slot_bytes(least), max(self.plan.slots or 0, 0)
            raise MemoryError(
                f"a canvas of {longest} tokens does not fit into memory: its batch of {needed} would take {asked:,} bytes, "
                f"and {free:,} are free"
            )
        return least
