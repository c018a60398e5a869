"""The rows of a forward: flat, sample after sample; intervals say which columns of its slot each row sees.

`pack` (engine/batch.py) makes them once: numpy arrays on the host, which go to the device as one buffer (`Sent`). What the host
knows of them stays plain numbers (`RowShape`), so that no forward asks the device.

Legend: N rows that carry a token, Q query rows of a two-stream model, G slots of the forward, I intervals of a row, T tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from types import SimpleNamespace
from typing import Any, Final, Generic

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import TypeVar

from draftmill.decoders.kernels.seen import Tables, Tiling

Host = NDArray[Any]
A = TypeVar("A", bound=Host | Tensor, default=Tensor)
"""The arrays of a `Sent`: numpy on the host, tensors on the device."""
_ODD: Final = np.zeros(1, dtype=np.int64)
_FACTS: Final = ("bool", "Uses", "tuple[int, ...]")


def put(numbers: NDArray[np.generic], device: torch.device) -> Tensor:
    """Bring numbers to the device, without waiting for it, as a transfer from pageable memory would."""
    held = torch.from_numpy(numbers)
    return held if device.type == "cpu" else held.pin_memory().to(device, non_blocking=True)


@dataclass(slots=True, kw_only=True, eq=False)
class Sent(Generic[A]):
    """Arrays that go to the device together: the fields of type A or A | None, int64 or float64, and those of the fields that
    are a Sent themselves. Fields of any other type stay on the host. The last letters of a name say what an array has an entry
    for."""

    def parts(self) -> Iterator[Sent[A]]:
        """This object, and all that it consists of."""
        yield self
        for name in self._fields().parts:
            if (part := getattr(self, name)) is not None:
                yield from part.parts()

    def arrays(self) -> Iterator[tuple[Sent[A], str]]:
        """Where each array that there is stands: a part, and the field's name."""
        for part in self.parts():
            for name in part._fields().arrays:
                if getattr(part, name) is not None:
                    yield part, name

    def changed(self, change: Callable[[Any], Any]) -> Any:
        """The same class, with every array changed."""
        names, new = self._fields(), object.__new__(type(self))
        for name in (*names.others, *names.arrays, *names.parts):
            value = getattr(self, name)
            if value is not None and name not in names.others:
                value = change(value) if name in names.arrays else value.changed(change)
            setattr(new, name, value)
        return new

    @classmethod
    @cache
    def _fields(cls) -> SimpleNamespace:
        """The names of its arrays, parts, all others, and those of them that the work on the arrays may look at (`facts`)."""
        types = {field.name: str(field.type) for field in fields(cls)}
        arrays = tuple(name for name, of in types.items() if of in ("A", "A | None"))
        parts = tuple(name for name, of in types.items() if "[A]" in of)
        others = tuple(name for name in types if name not in (*arrays, *parts))
        facts = tuple(name for name in others if types[name] in _FACTS)
        return SimpleNamespace(arrays=arrays, parts=parts, others=others, facts=facts)

    @property
    def signature(self) -> Hashable:
        """What decides which work is done: names and shapes of the arrays, and all that is a flag or the like."""
        shapes = tuple((name, getattr(part, name).shape) for part, name in self.arrays())
        return shapes, tuple(getattr(part, name) for part in self.parts() for name in part._fields().facts)

    @property
    def num_sums(self) -> int:
        """How many numbers at the end of a record are sums of rows' states, by which bad ones are found."""
        return 0

    def pad(self, sizes: dict[str, int], dead: dict[str, int]) -> None:
        """Fill every array up to the size of its axis, by 0 or what is `dead` by its name."""
        for part, name in self.arrays():
            array = getattr(part, name)
            if missing := sizes[name[-1]] - array.shape[-1]:
                full = np.full((*array.shape[:-1], missing), dead.get(name, 0), dtype=array.dtype)
                setattr(part, name, np.concatenate([array, full], axis=-1))

    def flat(self) -> NDArray[np.int64]:
        """All arrays as one; float64 numbers as their bits. Each begins at a multiple of 16 bytes: kernels are compiled anew for
        others."""
        flat = list[NDArray[np.int64]]()
        for part, name in self.arrays():
            array = getattr(part, name)
            flat.append(np.ascontiguousarray(array).reshape(-1).view(np.int64))
            if array.size % 2:
                flat.append(_ODD)
        return np.concatenate(flat)

    def cut(self, buffer: Tensor) -> Any:
        """The same, whose arrays are views of a buffer that holds, or will hold, `flat`."""
        first = 0

        def view(array: NDArray[Any]) -> Tensor:
            nonlocal first
            part = buffer[first : first + array.size]
            first += array.size + array.size % 2
            return (part.view(torch.float64) if array.dtype == np.float64 else part).view(array.shape)

        return self.changed(view)

    def to(self, device: torch.device) -> Any:
        """The same on the device, by one transfer; to a CPU nothing has to be copied."""
        return self.changed(torch.from_numpy) if device.type == "cpu" else self.cut(put(self.flat(), device))


@dataclass(frozen=True, slots=True)
class RowShape:
    """What the host knows of a forward's rows.

    `num_lines` is the largest number of rows of a slot. No row sees a column at or beyond `num_columns`. `slots` is a slice where
    the slots follow each other, else None. `num_positions` is given where all rows of a slot see the same columns, and where
    these have the positions 0, 1, .. once each: how many there are in the longest slot, or more.

    Of a two-stream forward `num_lines` are rows that carry a token; the slot with the most query rows has `num_queries`, no
    position of these slots is at or beyond `num_positions`, and some query sees no column if `some_blind`.
    """

    num_slots: int
    num_lines: int
    num_columns: int
    slots: slice | None
    num_positions: int | None = None
    num_queries: int = 0
    some_blind: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Rows(Sent[A]):
    """Rows that carry a token, and write its keys and values at `column_N` of their slots.

    `slots_G` are the forward's slots. A row is row number `line_N` (0, 1, ..) of slot number `owner_N` among them; the rows of a
    slot follow each other. All rows write first, then each attends to the columns that it sees, its own among them. No two rows
    write one column of a slot. `unread_N`: some tokens are on the device alone; each row's is then this one of those noted there
    and, behind them, `token_N` (engine/batch.py). In a cache of one pool each row's slot begins at cell `start_N`. An attention
    kernel reads the tiles `few_T` and `many_U` of `tile_lines` lines (kernels/seen.py).
    """

    slots_G: A
    owner_N: A
    line_N: A
    token_N: A
    column_N: A
    unread_N: A | None = None
    start_N: A | None = None
    few_T: A | None = None
    many_U: A | None = None
    tile_lines: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.token_N)

    @property
    def lines(self) -> tuple[A, ...]:
        """The numbers of all rows in their slots, of each kind of row."""
        return (self.line_N,)

    @property
    def tables(self) -> Tables | None:
        first: Any = tuple(tiles for tiles in (self.few_T, self.many_U) if tiles is not None)
        return Tables(self.tile_lines, first) if first else None

    def add_tiles(self: Rows[Host], tiling: Tiling, *, is_padded: bool = False) -> None:
        """Cut the rows into tiles on the host, after `pad`; how many a captured forward has depends on its sizes alone."""
        line_N, num_runs = np.concatenate(self.lines), len(self.lines) * (len(self.slots_G) + 1)
        tables = tiling.cut(line_N)
        if is_padded:
            for size, first_T in tables.items():
                tables[size] = np.full(tiling.most_tiles(size, num_runs, len(line_N)), len(line_N))
                tables[size][: len(first_T)] = first_T
        self.tile_lines = tuple(tables)
        self.few_T, self.many_U, *_ = [*tables.values(), None, None]


@dataclass(slots=True, kw_only=True, eq=False)
class TokenRows(Rows[A]):
    """The rows of a model in which every row carries a token. All arrays are int64, `sigma_G` aside.

    A row of `slot_N` stands at `position_N`, which the model's position encoding sees; several columns may hold one position,
    such as candidates that compete for it. It sees the columns in any of its intervals [`low_IN`, `high_IN`); one with
    low >= high is empty.

    `sigma_G` is the total noise of the canvas that the rows belong to (float, >= 0; decoders/draws/schedule.py), for models that
    are conditioned on it; all others ignore it. A slot may be named twice: its rows may have been computed under different
    noise, or see different columns. `takes_drafts`: the tokens are those that the model has just drafted, which matters to a
    draft head (heads/published.py).
    """

    slot_N: A
    position_N: A
    low_IN: A
    high_IN: A
    shape: RowShape
    sigma_G: A | None = None
    takes_drafts: bool = False

    def told(self: TokenRows) -> tuple[list[Any], list[Tensor]]:
        """The same on the device as what JSON holds, and int64 arrays of one dimension: noise as the bits of float64. Nothing
        waits for the device."""
        shape, arrays = self.shape, {name: getattr(self, name).flatten() for _, name in self.arrays()}
        slots = None if shape.slots is None else [shape.slots.start, shape.slots.stop]
        sizes = [shape.num_slots, shape.num_lines, shape.num_columns, slots, shape.num_positions]
        flat = [each.double().view(torch.int64) if each.is_floating_point() else each for each in arrays.values()]
        return [list(arrays), len(self.low_IN), sizes, self.takes_drafts, self.tile_lines], flat

    @staticmethod
    def heard(facts: Sequence[Any], flat: Sequence[Tensor]) -> TokenRows:
        """The rows of which these were `told`; views, and the noise is float64."""
        names, num_intervals, sizes, takes_drafts, tile_lines = facts
        num_slots, num_lines, num_columns, slots, num_positions = sizes
        arrays: dict[str, Any] = dict(zip(names, flat, strict=True))
        for name in ("low_IN", "high_IN"):
            arrays[name] = arrays[name].view(num_intervals, -1)
        if "sigma_G" in arrays:
            arrays["sigma_G"] = arrays["sigma_G"].view(torch.float64)
        shape = RowShape(num_slots, num_lines, num_columns, slots and slice(*slots), num_positions)
        return TokenRows(**arrays, shape=shape, takes_drafts=takes_drafts, tile_lines=tuple(tile_lines))


@dataclass(slots=True, kw_only=True, eq=False)
class StreamRows(Rows[A]):
    """The rows of a two-stream model, int64. Columns of a slot are the ranks of its decoding order.

    Query rows carry no token, stand at the rank `rank_Q`, and predict the token there. A row sees the columns below its limit;
    one interval that begins at 0 is all that this kind of model needs. `owner_Q` and `line_Q` number query rows alone; tiles are
    of both kinds of rows, queries last.
    """

    limit_N: A
    owner_Q: A
    line_Q: A
    rank_Q: A
    limit_Q: A
    shape: RowShape
    start_Q: A | None = None

    @property
    def lines(self) -> tuple[A, ...]:
        return self.line_N, self.line_Q


def seen_columns(low_IN: Tensor, high_IN: Tensor, num_columns: int) -> Tensor:
    """Which columns each row sees, bool [N, num_columns]."""
    column_W = torch.arange(num_columns, device=low_IN.device)
    seen_NW = (column_W >= low_IN[0].unsqueeze(1)) & (column_W < high_IN[0].unsqueeze(1))
    for low_N, high_N in zip(low_IN[1:], high_IN[1:], strict=True):
        seen_NW |= (column_W >= low_N.unsqueeze(1)) & (column_W < high_N.unsqueeze(1))
    return seen_NW


def columns_in_order(rows: TokenRows, positions_SW: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """The columns that the rows of each slot see, in the order of their positions, [G, num_columns], and how many these are,
    [G]. For rows whose shape has `num_positions`; `positions_SW` are the positions of all columns. What is left over names
    column 0."""
    num_slots, owner_N = rows.shape.num_slots, rows.owner_N
    first_G = owner_N.new_zeros(num_slots + 1)
    first_G.scatter_(0, owner_N.where(rows.line_N == 0, num_slots), torch.arange(rows.num_rows, device=owner_N.device))
    first_G = first_G[:num_slots]
    seen_GW = seen_columns(rows.low_IN[:, first_G], rows.high_IN[:, first_G], rows.shape.num_columns)
    place_GW = positions_SW[rows.slots_G, : rows.shape.num_columns].where(seen_GW, num_columns)
    column_GW = torch.arange(rows.shape.num_columns, device=owner_N.device).expand(num_slots, -1)
    ordered = owner_N.new_zeros(num_slots, num_columns + 1).scatter_(1, place_GW, column_GW)
    return ordered[:, :num_columns], seen_GW.sum(1)


def number_rows(counts: Sequence[int], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """The owner and the line of every row, int64 [N] each; the slots have `counts` rows."""
    counts_B = torch.tensor(list(counts), dtype=torch.int64)
    owner_N = torch.arange(len(counts_B)).repeat_interleave(counts_B)
    line_N = torch.arange(len(owner_N)) - (counts_B.cumsum(0) - counts_B)[owner_N]
    return owner_N.to(device), line_N.to(device)


def token_rows(
    slots: Sequence[int],
    counts: Sequence[int],
    token_N: Tensor,
    position_N: Tensor,
    column_N: Tensor,
    sight: tuple[Tensor, Tensor],
    *,
    sigma_G: Tensor | None = None,
) -> TokenRows:
    """Rows of slots that have `counts` rows each; `sight` is (`low_IN`, `high_IN`). For callers outside of the engine: it waits
    for the device."""
    low_IN, high_IN = sight
    owner_N, line_N = number_rows(counts, token_N.device)
    slots_G = torch.tensor(list(slots), dtype=torch.int64, device=token_N.device)
    follow = list(slots) == list(range(slots[0], slots[0] + len(slots)))
    return TokenRows(
        slots_G=slots_G,
        owner_N=owner_N,
        line_N=line_N,
        slot_N=slots_G[owner_N],
        token_N=token_N,
        position_N=position_N,
        column_N=column_N,
        low_IN=low_IN,
        high_IN=high_IN,
        shape=RowShape(
            num_slots=len(slots_G),
            num_lines=max(counts),
            num_columns=int(high_IN.where(low_IN < high_IN, 0).max()),
            slots=slice(slots[0], slots[0] + len(slots)) if follow else None,
        ),
        sigma_G=sigma_G,
    )


def causal_rows(slots: Sequence[int], counts: Sequence[int], firsts: Sequence[int], token_N: Tensor) -> TokenRows:
    """Rows of slots from the columns `firsts` on, which are their positions; each sees itself and those before; noise 1."""
    columns = [torch.arange(first, first + count) for count, first in zip(counts, firsts, strict=True)]
    column_N = torch.cat(columns).to(token_N.device)
    sight = torch.zeros_like(column_N).unsqueeze(0), (column_N + 1).unsqueeze(0)
    sigma_G = torch.ones(len(slots), device=token_N.device)
    return token_rows(slots, counts, token_N, column_N, column_N, sight, sigma_G=sigma_G)
