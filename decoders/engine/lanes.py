"""A lane is one model of an engine: it runs packed rows, and times what it runs. One transfer down a forward, one record up.

    plan     on the host: what the rows are goes into the forward's parcel (Run), beside what their answers need (Reading)
    start    on the device: network, output layer, draws; where it can be captured, as one graph (graphs.py)
    finish   on the host: the record becomes answers; other forwards may be started before

Legend: B samples of a forward, R answered rows, N rows, I intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from draftmill.decoders.engine.asks import FAR
from draftmill.decoders.engine.graphs import Graphs, Work
from draftmill.decoders.engine.memory import give
from draftmill.decoders.engine.packing import Asked, Ints, Table
from draftmill.decoders.engine.parcels import Parcel, Sent
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.transfers import Clock, Coming, Laps, put


@dataclass(frozen=True, slots=True)
class Packed:
    """What the samples of a forward ask: their rows, the tokens of these, and the query rows of an any-subset model.

    `longest` is the length of the longest canvas among them. `places_R` are the answered rows' numbers among all rows, where the
    asks name them. A model that diffuses is told `share_B`, the share of masks of each sample's window, or `time_B`, the time of
    each canvas. `num_positions`: where each row's columns are to be read in the order of positions, how many there are.
    """

    slot_B: Ints
    tokens: list[int] | Ints
    table: Table
    queries: Table | None
    longest: int
    places_R: Ints | None = None
    share_B: NDArray[np.float64] | None = None
    time_B: NDArray[np.float64] | None = None
    num_positions: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """The rows of a forward as a lane has planned them.

    `rows` makes them of what was sent, `asked` names the places of the answered ones (None: all). Two runs of one `form`, whose
    parcels have one signature, do the same work; None: this one can't be captured.
    """

    rows: Callable[[Sent], Any]
    asked: str | None
    useful: int
    slot_B: Ints
    form: Hashable = None


_A = TypeVar("_A")


@dataclass(frozen=True, slots=True)
class Reading(Generic[_A]):
    """What becomes of the answered rows: `work` makes the record of their hidden states on the device, `read` the answers of it.

    `work` knows what was sent, and the states; None: nothing is drawn. The record is float64 of any shape. `form` as in Run; with
    one, `read` takes the record flat, and `work` expects `num_rows` states, which are more than were asked for.
    """

    work: Callable[[Sent, Tensor], Tensor] | None
    read: Callable[[NDArray[np.float64]], Iterator[_A]]
    form: Hashable = None
    num_rows: int | None = None


@dataclass(slots=True, eq=False)
class Up:
    """A record on its way to the host. With `slots`, its last number says whether the forwards over these were finite."""

    coming: Coming
    slots: set[int] | None = None


@dataclass(slots=True, eq=False)
class Started(Generic[_A]):
    """A forward whose answers can be read. Without `up` there is no record, and its seconds are read with the next one's.

    `useful` rows were asked for, `computed` were run with padding.
    """

    reading: Reading[_A]
    up: Up | None
    shape: torch.Size | None
    laps: Laps | None
    useful: int
    computed: int


class Lane:
    """A backbone, its cache's size, and the seconds of its forwards. `vocab_size` is the target's: logits get that width."""

    def __init__(self, backbone: Any, vocab_size: int, *, is_target: bool) -> None:
        self.backbone, self.device, self.is_target = backbone, backbone.device, is_target
        self._vocab_size = vocab_size
        self._shape = (0, 0)
        self.clock = Clock(self.device)
        """Times the network, the output layer and draft heads."""
        self._finite: Tensor | None = None
        """Whether the hidden states of all forwards since the last answer are finite, as far as the model says."""
        self._unsure = set[int]()
        """The slots of those forwards."""
        self._ups = list[Up]()
        """Records that were not read yet and tell whether forwards were finite."""
        self.drafted_C: Tensor | None = None
        """The tokens drafted at the last two ranks of each slot, and one for dead rows; None where no row takes its token from
        here. Two, so that a forward may be run again: it does not write what it reads."""
        self._answered = False
        self.useful = self.computed = 0
        """Rows of the last forward: those asked for, and those computed with padding."""
        self.hidden_ND: Tensor | None = None
        """Hidden states of all rows (query rows) of the last forward; a Roll reads them."""
        self.graphs: Graphs | None = None
        """Forwards that were captured; None where none can be."""
        self._source: Work | None = None
        """The graph that ran the last forward; None if none did."""

    # ---- the cache -----------------------------------------------------------------------------------------------

    def resize(self, num_slots: int, num_columns: int) -> None:
        """Give the cache this many slots and columns."""
        for up in list(self._ups) if num_slots else ():
            self.arrived(up)
        self._ups.clear()
        had, self._shape = self._shape, (FAR, FAR)  # until it has succeeded: then any size is less, and is made exactly
        if self.graphs is not None:
            self.graphs.forget()
        self._source = None
        give(self.backbone, num_slots, num_columns, had)
        self._shape = (num_slots, num_columns)

    @property
    def can_capture(self) -> bool:
        """Whether its forwards are small, and drawn by kernels where the model is run by kernels."""
        return False

    @property
    def trash(self) -> int:
        """The column that dead rows write, in slot 0: the last one, which is no sample's."""
        return self._shape[1] - 1

    def size(self, count: int) -> int | None:
        """To how many rows so many are filled up; None where the forward can't be captured."""
        return None if self.graphs is None else self.graphs.size(count)

    def copy_prefix(self, source: int, target: int, num_columns: int) -> None:
        """Copy the first columns of a sound slot onto another, in which nothing has run."""
        self.backbone.copy_prefix(source, target, num_columns)

    def start(self, sample: Sample) -> None:
        """A new sample has its slot."""
        self._settle(sample.slot)

    def _settle(self, slot: int) -> None:
        """Before a slot changes, ask about forwards in it that had no answer, or whose answer was not read."""
        for up in [up for up in self._ups if up.slots and slot in up.slots]:
            self.arrived(up)
        if slot in self._unsure:
            self.record(torch.zeros(0, dtype=torch.float64, device=self.device))

    def is_sound(self, slot: int) -> bool:
        """Whether all that a slot holds is finite; from another one nothing may be copied."""
        self._settle(slot)
        return slot not in getattr(self.backbone, "tainted", ())

    def release(self, slot: int) -> None:
        """A slot has become free."""

    @property
    def cell_bytes(self) -> int:
        """Bytes of a column of a slot."""
        return int(getattr(self.backbone, "cell_bytes", 0))

    def plan(self, packed: Packed, reading: Reading[Any], parcel: Parcel) -> Run:
        """Enclose what the rows are, and which of them are read."""
        raise AssertionError("this lane runs by `look` alone")

    # ---- a forward -----------------------------------------------------------------------------------------------

    def start_run(self, run: Run, reading: Reading[_A], parcel: Parcel) -> Started[_A]:
        """Send the parcel and run the rows, without waiting for their answers."""
        up, shape = self._begun(run, reading, parcel)
        laps = None if up is None else self.clock.cut()
        return Started(reading, up, shape, laps, self.useful, self.computed)

    def _begun(self, run: Run, reading: Reading[Any], parcel: Parcel) -> tuple[Up | None, torch.Size | None]:
        is_sound = not getattr(self.backbone, "tainted", ())
        if self.graphs is not None and is_sound and None not in (run.form, reading.form):
            return self._whole(run, reading, parcel), None
        sent = parcel.send(self.device)
        hidden_ND = self.hidden_ND = self._run(run.rows(sent), run.useful, run.slot_B)
        if reading.work is None:
            return None, None
        hidden_RD = hidden_ND if run.asked is None else hidden_ND.index_select(0, sent[run.asked])
        record = reading.work(sent, hidden_RD)
        return self._up(record), record.shape

    def finish(self, started: Started[_A]) -> Iterator[_A]:
        """Wait for the record of a forward, and read it."""
        if started.up is None:
            return started.reading.read(np.zeros(0))
        host = self.arrived(started.up)
        return started.reading.read(host if started.shape is None else host.reshape(started.shape))

    def seconds(self, started: Started[Any]) -> list[float]:
        """The seconds of its network, output layer and so on; its answers must have been read."""
        return self.laps() if started.laps is None else started.laps.read()

    def _whole(self, run: Run, reading: Reading[Any], parcel: Parcel) -> Up:
        """Run a forward that can be captured; its record is flat."""

        def work(sent: Sent) -> tuple[Tensor, Tensor]:
            assert reading.work is not None and run.asked is not None, "what has a form is read from some rows"
            hidden_ND = self.backbone.forward(run.rows(sent))
            return hidden_ND, reading.work(sent, hidden_ND.index_select(0, sent[run.asked])).flatten()

        return self.replayed((run.form, reading.form), parcel, work, run.useful, run.slot_B)

    def replayed(
        self,
        form: Hashable,
        parcel: Parcel,
        work: Callable[[Sent], tuple[Tensor, Tensor]],
        useful: int,
        slot_B: Ints,
    ) -> Up:
        """Run a forward as a graph, if one was captured; its record is flat. `work` gives hidden states and the record."""
        assert self.graphs is not None, "this model's forwards are captured"
        graphs, notes_finite = self.graphs, hasattr(self.backbone, "finite")

        def whole(sent: Sent) -> Work:
            hidden_ND, record = work(sent)
            if notes_finite:
                record = torch.cat([record, self.backbone.finite.unsqueeze(0)])
            return Work(hidden_ND, record, self.backbone.num_rows_computed)

        done = self.clock.whole(lambda: graphs.run(form, parcel, whole))
        self.hidden_ND, self.useful, self.computed = done.hidden_ND, useful, done.num_computed
        self._source = done if done.stays else None
        if not notes_finite:
            return Up(Coming(done.record))
        record = done.record
        if self._finite is not None:
            record = torch.cat([record[:-1], record[-1:] * self._finite])
        self._unsure.update(slot_B.tolist())
        return self._flagged(record)

    def again(self, row_R: Ints, reading: Reading[_A], parcel: Parcel) -> Iterator[_A]:
        """Read further answers from some rows of the last forward."""
        rows, draw = parcel.enclose(row_R, size=reading.num_rows), reading.work
        assert draw is not None, "something is asked"

        def work(sent: Sent, hidden_ND: Tensor) -> Tensor:
            return draw(sent, hidden_ND.index_select(0, sent[rows]))

        return reading.read(self.after(None if reading.form is None else ("again", reading.form), parcel, work))

    def after(self, form: Hashable, parcel: Parcel, work: Callable[[Sent, Tensor], Tensor]) -> NDArray[np.float64]:
        """The record of more work, on the hidden states of the last forward. With a `form` it may be captured, and is flat."""
        hidden_ND, source = self.hidden_ND, self._source
        assert hidden_ND is not None, "a forward came before"
        if form is None or self.graphs is None or source is None:
            return self.record(work(parcel.send(self.device), hidden_ND))
        graphs, states_ND = self.graphs, source.hidden_ND

        def whole(sent: Sent) -> Work:
            return Work(states_ND, work(sent, states_ND).flatten(), 0)

        return self.record(self.clock.whole(lambda: graphs.run((form, source), parcel, whole)).record)

    @staticmethod
    def _enclosed(place_R: Ints | None, num_rows: int, reading: Reading[Any], parcel: Parcel) -> str | None:
        """Enclose the places of answered rows among all rows; None if they are all of them, in their order."""
        if reading.num_rows is None:
            return None if place_R is None else parcel.enclose(place_R)
        return parcel.enclose(np.arange(num_rows) if place_R is None else place_R, size=reading.num_rows)

    def noting(
        self, asked: Asked, part: slice | Ints, parcel: Parcel, size: int | None = None
    ) -> Callable[[Sent, Tensor], None]:
        """Plan to keep the tokens of some rows, filled up to `size`, where rows of the next forward take them from the device."""
        drafted_C = self.drafted_C
        if drafted_C is None:
            return lambda sent, token_R: None
        cells_R = drafted_cells(asked.slot_R[part], asked.rank_R[part])
        cells = parcel.enclose(cells_R, size=size, fill=len(drafted_C) - 1)

        def note(sent: Sent, token_R: Tensor) -> None:
            drafted_C.index_copy_(0, sent[cells], token_R)

        return note

    def put(self, numbers: Ints) -> Tensor:
        """Bring integers to the device."""
        return put(numbers, self.device)

    def record(self, found: Tensor) -> NDArray[np.float64]:
        """Bring an answer to the host, float64 of any shape: the one transfer up of a forward, and its one wait.

        What the model noted of NaN and infinity comes along: it will wipe the slots of such a forward before it reads them again.
        """
        return self.arrived(self._up(found)).reshape(found.shape)

    def _up(self, found: Tensor) -> Up:
        """Send a record to the host, with what the model noted since the last one."""
        told = found.flatten()
        if self._finite is None:
            return Up(Coming(told))
        return self._flagged(torch.cat([told, self._finite.unsqueeze(0)]))

    def _flagged(self, told: Tensor) -> Up:
        """Send a record whose last number says whether all forwards until now were finite."""
        up = Up(Coming(told), self._unsure)
        self._finite, self._unsure = None, set()
        self._ups.append(up)
        return up

    def arrived(self, up: Up) -> NDArray[np.float64]:
        """Wait for a record; what it says of the slots' soundness is noted once."""
        host = up.coming.numbers()
        self._answered = True
        if up.slots is None:
            return host
        if up in self._ups:
            self._ups.remove(up)
            if not host[-1]:
                self.backbone.taint(up.slots)
        return host[:-1]

    def laps(self) -> list[float]:
        """The seconds of the network, output layer and heads since the last answer; without one they are left for the next."""
        on_gpu = self.device.type == "cuda"
        return [] if on_gpu and not self._answered else self.clock.laps()

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """The raw logits of rows, as wide as the target's vocabulary: what only one of them has is cut off, or impossible."""
        logits_RV = self.clock.timed(lambda: self.backbone.logits(hidden_RD))
        missing = self._vocab_size - logits_RV.shape[1]
        if missing > 0:
            return functional.pad(logits_RV, (0, missing), value=-torch.inf)
        return logits_RV[:, : self._vocab_size] if missing else logits_RV

    def embed(self, tokens_R: Tensor) -> Tensor:
        """The embeddings of tokens, [R, D]."""
        embedded: Tensor = self.backbone.embed(tokens_R)
        return embedded

    def _run(self, rows: Any, useful: int, slot_B: Ints) -> Tensor:
        hidden = self.clock.timed(lambda: self.backbone.forward(rows))
        finite: Tensor | None = getattr(self.backbone, "finite", None)
        if finite is not None:
            self._finite = finite if self._finite is None else self._finite & finite
            self._unsure.update(slot_B.tolist())
        self._answered, self._source = False, None
        self.useful, self.computed = useful, self.backbone.num_rows_computed
        return hidden


def drafted_cells(slot_R: Ints, rank_R: Ints) -> Ints:
    """Where the tokens at some ranks are kept on the device (Lane.drafted_C), [R]."""
    return 2 * slot_R + rank_R % 2


def following(slot_B: Ints) -> slice | None:
    """Slots that follow each other as a slice; None for others."""
    first, last = int(slot_B[0]), int(slot_B[-1])
    ascending = last - first == len(slot_B) - 1 and bool((np.diff(slot_B) == 1).all())
    return slice(first, last + 1) if ascending else None
