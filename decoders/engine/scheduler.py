"""Chooses which samples run in the next step, and how many rows of new samples' prompts.

A new sample waits in a line until its prompt has run. Prompts run apart from the others, whole where memory allows it (a few may
run beside them), or in chunks, with a budget of rows beside the decoding samples:

    budget 512          step 1             step 2            step 3
    A  prompt of 300    300, its first ask decodes           decodes
    B  prompt of 900    212 rows           512 rows          176 rows, its first ask

A chunk is leading rows of a prompt of which none is sampled: it writes their columns and raises `cached`, as columns do
that are taken over from another sample. So the decoder's generator starts when only the rest is left, and notices nothing.
The chunks of a prompt and its first ask are one evaluation.

A sample waits for another one's prompt if both have more in common than any slot holds yet: the samples of a row (`sampling.n`)
have one prompt, those of a task the same examples before their questions.

    A  shots | question A     runs, a chunk in each forward where the rows are many
    B  shots | question B     waits until A's columns of the shots are in place; copies them, and runs the rest
    C  other                  runs beside A, as far as the budget of rows allows

What prompts have in common is looked up in a table of the slots (`PrefixCache`):

    slot 0    shots shots question A          its prompt ran: all of its columns are in place
    slot 1    shots shots question B          takes over what it has in common with A, and runs the rest
    slot 2    (free) shots shots question C   what the last sample left there stays good until it is overwritten

Prompts are compared as integers: tokens, or (any-subset) tokens with their positions. Numpy only; the engine copies what is
on the device.

Source of chunks: Agrawal et al., "Sarathi" (2023), section 4. Legend: S slots, C columns, A some slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from draftmill.decoders.base import EngineStats
from draftmill.decoders.engine.algorithm import WHOLE, Algorithm
from draftmill.decoders.engine.asks import FAR, Ask, Ints, Span
from draftmill.decoders.engine.memory import MemoryPlan
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup

LEAST_SHARED: Final = 16
"""The number of rows that waiting for another sample's prompt, and copying its columns, must save, unless it saves all."""
DEVICE_ROWS: Final = 2048
"""Rows of prompts in a forward on a device, unless another number is given. They take several times as long to compute as the
weights take to read (about 300 rows take as long on an H100 in bfloat16, by its data sheet): cutting costs little."""
GATHERED_ROWS: Final = 4 * DEVICE_ROWS
"""The same where new samples gather."""
# At most one new sample in this many joins the others: more of them fill a forward of their own.
_FEW_PROMPTS: Final = 4


class Turn(NamedTuple):
    """The samples of one step. It is the first evaluation of those that are `new`; those in `chunks` run a part of their
    prompts. `num_waiting` samples wait until others' prompts have run."""

    samples: list[Sample]
    new: Sequence[Sample] = ()
    chunks: Sequence[Sample] = ()
    num_waiting: int = 0


@dataclass(slots=True, eq=False)
class Prefill:
    """A sample whose prompt has not run, or not all of it. It waits until `source` has this many `columns` of its own prompt."""

    sample: Sample
    begun: bool = False
    settled: bool = False
    source: Prefill | None = field(default=None, repr=False)
    columns: int = 0
    done: bool = False

    @property
    def waits(self) -> bool:
        """Whether what it waits for is not there yet."""
        source = self.source
        return source is not None and not source.done and source.sample.cached < self.columns


class Scheduler:
    """The `line` of new samples, in the order in which they came, and what their prompts have in common. `gathers`: new samples
    wait until they have lost as many places in steps as one step has; then their prompts run in one step. Without `prompt_rows`
    prompts run without a budget."""

    def __init__(self, setup: Setup, algorithm: Algorithm, stats: EngineStats, *, gathers: bool) -> None:
        self.algorithm, self._copy_prefix, self._stats = algorithm, setup.backbone.copy_prefix, stats
        self._gathers, self._lost = gathers, 0
        self._vocab_size, self._on_cpu = setup.info.vocab_size, setup.backbone.device.type == "cpu"
        device_rows = GATHERED_ROWS if gathers else DEVICE_ROWS
        self.prompt_rows = setup.prompt_rows or (device_rows if setup.backbone.reads_rows else None)
        self.prefixes = PrefixCache(algorithm.cut_multiple)
        self.line = list[Prefill]()
        self._was_mixed = False

    def start(self, sample: Sample) -> None:
        """A sample has its slot; what the last one left there of its prompt is taken over."""
        if not self.algorithm.has_prompt(sample):
            self.prefixes.forget(sample.slot)
            return
        self.line.append(Prefill(sample))
        if most := self.algorithm.reusable(sample):
            sample.cached = self.prefixes.insert(sample.slot, prompt_of(sample, self._vocab_size), most)
        else:
            self.prefixes.forget(sample.slot)

    def drop(self, samples: Sequence[Sample]) -> None:
        """These samples end before their prompts have run."""
        slots = {sample.slot for sample in samples}
        self.line = [prefill for prefill in self.line if prefill.sample.slot not in slots]
        for prefill in self.line:
            if prefill.source is not None and prefill.source.sample.slot in slots:
                prefill.source, prefill.settled = None, False

    def next(self, everyone: list[Sample], plan: MemoryPlan, *, alternates: bool) -> Turn:
        """Who runs next, while anyone is in line. `alternates`: every other step has no prompts (lengths `auto`)."""
        budget = self._budget(len(everyone), plan, alternates=alternates)
        if budget == 0 or self._is_gathering(len(everyone)):
            return self._turn(everyone, [])
        ready = self._ready()
        if budget is None:
            slots = {prefill.sample.slot for prefill in self.line}
            everyone, budget = [sample for sample in everyone if sample.slot in slots], plan.prompt_rows or FAR
        return self._turn(everyone, schedule_chunks(ready, self.algorithm, budget))

    def _turn(self, everyone: list[Sample], running: list[Sample]) -> Turn:
        """The step of those whose prompts have run, and of `running` ones among those in line."""
        slots = {prefill.sample.slot for prefill in self.line} - {sample.slot for sample in running}
        samples = [sample for sample in everyone if sample.slot not in slots]
        new, chunks = ([prefill for prefill in running if bool(prefill.chunk) is cut] for cut in (False, True))
        self._begin(running)
        return Turn(samples, new, chunks, len(slots))

    def _budget(self, num_samples: int, plan: MemoryPlan, *, alternates: bool) -> int | None:
        """How many rows of prompts may run beside the others' rows now; None if prompts run without the others."""
        num_new, most = len(self.line), plan.prompt_rows or FAR
        if self.prompt_rows is not None:
            most = min(self.prompt_rows, most)
        elif not (self.algorithm.joins_prompts and _FEW_PROMPTS * num_new <= num_samples and self._on_cpu):
            return None
        # Lengths `auto` are measured in steps without prompts: while they are, every other step is one.
        self._was_mixed = num_new < num_samples and not (self._was_mixed and alternates)
        return most if self._was_mixed or num_new == num_samples else 0

    def _is_gathering(self, num_samples: int) -> bool:
        """Whether new samples wait for more of them. Those whose prompts have begun do not."""
        num_new = len(self.line)
        self._lost += num_new
        if self._gathers and self._lost < num_samples - num_new and not any(prefill.begun for prefill in self.line):
            return True
        self._lost = 0
        return False

    def _ready(self) -> list[Sample]:
        """Those that wait for no other one's prompt; columns that others hold are copied into their slots."""
        coming = list[Prefill]()
        for prefill in self.line:
            if not prefill.settled or (prefill.source is not None and not prefill.waits):
                self._settle(prefill, coming)
            if not prefill.waits:
                coming.append(prefill)
        return [prefill.sample for prefill in coming]

    def _settle(self, prefill: Prefill, coming: list[Prefill]) -> None:
        """Copy the columns that are there, and find out whether waiting for a sample that runs before is worth it."""
        prefill.settled, prefill.source = True, None
        sample, most = prefill.sample, self.algorithm.reusable(prefill.sample)
        if not most:
            return
        self._take_over(sample, most)
        columns, slot = self.prefixes.find_pending(sample.slot, most, [source.sample.slot for source in coming])
        if is_worth(columns - sample.cached, columns == most):
            prefill.source = next(source for source in coming if source.sample.slot == slot)
            prefill.columns = columns

    def _take_over(self, sample: Sample, most: int) -> None:
        """Copy what another slot holds of a new sample's prompt."""
        columns, slot = self.prefixes.find(sample.slot, most)
        if is_worth(columns - sample.cached, columns == most):
            self._copy_prefix(slot, sample.slot, columns)
            sample.cached = columns
            self.prefixes.note_held(sample.slot, columns)

    def _begin(self, running: Sequence[Sample]) -> None:
        """These samples run rows of their prompts now; each prompt is counted when it begins."""
        slots = {sample.slot for sample in running}
        for prefill in self.line:
            if prefill.sample.slot in slots and not prefill.begun:
                prefill.begun = True
                if most := self.algorithm.reusable(prefill.sample):
                    self._stats.prompt_rows += columns_left(prefill.sample, most)
                    self._stats.prompt_rows_shared += prefill.sample.cached

    def finish_prompts(self, turn: Turn) -> None:
        """The prompts of new samples are in place; those who wait take them over before a slot has its next sample."""
        for sample in turn.chunks:
            if not sample.is_bad:
                self.prefixes.note_held(sample.slot, sample.cached)
        slots = {sample.slot for sample in turn.new}
        for prefill in self.line:
            if prefill.sample.slot in slots:
                prefill.done = True
                if most := self.algorithm.reusable(prefill.sample):
                    self.prefixes.note_held(prefill.sample.slot, columns_left(prefill.sample, most))
        if turn.new:
            self.line = [prefill for prefill in self.line if not prefill.done]
            for prefill in self.line:
                if prefill.source is not None and prefill.source.done:
                    self._take_over(prefill.sample, self.algorithm.reusable(prefill.sample))


def is_worth(saved: int, is_all: bool) -> bool:
    """Whether saving this number of rows is worth a copy of columns, or a step of waiting."""
    return saved >= LEAST_SHARED or (saved > 0 and is_all)


def prompt_of(sample: Sample, vocab_size: int) -> Ints:
    """What the columns of a prompt depend on: its tokens, and their positions where columns are not positions."""
    tokens = np.array(sample.tokens[: sample.prompt], dtype=np.int64)
    return tokens if sample.order is None else tokens + vocab_size * np.array(sample.order[: sample.prompt])


def columns_left(sample: Sample, most: int) -> int:
    """How many columns of a prompt its sample's first ask leaves in the cache."""
    return min(most + 1, sample.prompt)


def schedule_chunks(waiting: Iterable[Sample], algorithm: Algorithm, budget: int) -> list[Sample]:
    """Divide the budget among samples in their order: which of them run rows in the next forward. Those with a `chunk` run that
    many rows of their prompts, the others all that is left. What can't be cut waits until it fits, or runs as the only one:
    something runs in any case."""
    running, left, multiple = list[Sample](), budget, algorithm.cut_multiple
    for sample in waiting:
        # The rows of its prompt that it has still to run, with those that are scored.
        rows, is_first = max((sample.length if algorithm.scores else sample.prompt) - sample.cached, 1), not running
        if rows > left:
            if multiple != WHOLE:
                end = min(sample.cached + (max(left, multiple) if is_first else left), algorithm.reusable(sample))
                sample.chunk = max(end - end % multiple - sample.cached, 0)
            if not (sample.chunk or is_first):
                break
        running.append(sample)
        left -= sample.chunk or rows
        if left <= 0:
            break
    return running


def ask_of_chunk(sample: Sample, algorithm: Algorithm) -> Ask:
    """The rows of the chunk that the sample runs now, as its prompt has them."""
    start, count = sample.cached, sample.chunk
    block = algorithm.cut_multiple if algorithm.kind == "blocks" else 1
    return Ask(sample.tokens[start : start + count], Span(count, start, start, block=block), (), ())


class PrefixCache:
    """The prompt of each slot's sample, also of one that has left, and how many of its columns the cache holds. What is taken
    over is a multiple of `multiple` columns."""

    def __init__(self, multiple: int) -> None:
        self._multiple = multiple
        self._prompt_SC = np.zeros((0, 0), dtype=np.int64)
        self._length_S, self._held_S = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)

    def resize(self, num_slots: int, num_columns: int) -> None:
        """The cache has another size: what fits into it is still there."""
        prompt_SC, length_S, held_S = self._prompt_SC, self._length_S, self._held_S
        slots, columns = min(num_slots, prompt_SC.shape[0]), min(num_columns, prompt_SC.shape[1])
        self._prompt_SC = np.zeros((num_slots, num_columns), dtype=np.int64)
        self._length_S, self._held_S = np.zeros(num_slots, dtype=np.int64), np.zeros(num_slots, dtype=np.int64)
        self._prompt_SC[:slots, :columns] = prompt_SC[:slots, :columns]
        self._length_S[:slots] = length_S[:slots]
        self._held_S[:slots] = np.where(length_S[:slots] <= columns, held_S[:slots], 0)

    def insert(self, slot: int, prompt: Ints, most: int) -> int:
        """A new sample comes into a slot; returns how many columns, at most `most`, the last one left there for it."""
        own, length = np.array([slot]), len(prompt)
        differ = np.flatnonzero(self._prompt_SC[slot, :most] != prompt[:most])
        common_A = np.minimum(int(differ[0]) if len(differ) else most, self._held_S[own])
        columns = int(self._whole(common_A, own, length)[0])
        self._prompt_SC[slot, :length] = prompt
        self._length_S[slot], self._held_S[slot] = length, columns
        return columns

    def note_held(self, slot: int, count: int) -> None:
        """The first `count` columns of the prompt in a slot are in place."""
        self._held_S[slot] = count

    def forget(self, slot: int) -> None:
        """Nothing in a slot can be taken over."""
        self._held_S[slot] = 0

    def find(self, slot: int, most: int) -> tuple[int, int]:
        """How much of the prompt in `slot` another holds, at most `most` columns, and which slot; 0 and -1 if none does."""
        others = np.flatnonzero(self._held_S)
        return self._longest(slot, most, others[others != slot], self._held_S)

    def find_pending(self, slot: int, most: int, coming: list[int]) -> tuple[int, int]:
        """How much of it one of these slots will hold when its own prompt has run."""
        return self._longest(slot, most, np.array(coming, dtype=np.int64), self._length_S)

    def _longest(self, slot: int, most: int, some_A: Ints, limit_S: Ints) -> tuple[int, int]:
        # Most prompts that differ do so at once.
        some_A = some_A[self._prompt_SC[some_A, 0] == self._prompt_SC[slot, 0]]
        if not len(some_A):
            return 0, -1
        same_AC = self._prompt_SC[some_A, :most] == self._prompt_SC[slot, :most]
        common_A = np.minimum(np.where(same_AC.all(1), most, same_AC.argmin(1)), limit_S[some_A])
        common_A = self._whole(common_A, some_A, int(self._length_S[slot]))
        best = int(common_A.argmax())
        return (int(common_A[best]), int(some_A[best])) if common_A[best] else (0, -1)

    def _whole(self, common_A: Ints, some_A: Ints, length: int) -> Ints:
        """What a prompt of this length can take over of what it has in common with these slots' prompts."""
        if self._multiple == WHOLE:
            return np.where((common_A == length) & (self._length_S[some_A] == length), length, 0)
        return common_A - common_A % self._multiple
