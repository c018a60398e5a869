"""The rows of a forward: flat, sample after sample; intervals say which columns of its slot each row sees.

What the host knows of the rows comes along as plain numbers (`RowShape`, `StreamShape`), so that no forward asks the device.

Legend: N rows, B slots of the forward, I intervals of a row; C content rows and Q query rows of a two-stream model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftmill.decoders.kernels.seen import Tables


@dataclass(frozen=True, slots=True)
class RowShape:
    """What the host knows of a forward's rows.

    `num_lines` is the largest number of rows of a slot. No row sees a column at or beyond `num_columns`. `slots` is a slice where
    the slots follow each other, else None. With `num_positions` all rows of a slot see the same columns, and these hold each of
    the positions 0, 1, .. once, up to a number that is at most `num_positions`; None where that may not hold.
    """

    num_slots: int
    num_lines: int
    num_columns: int
    slots: slice | None
    num_positions: int | None = None


@dataclass(frozen=True, slots=True)
class TokenRows:
    """The rows of one forward of a model in which every row carries a token. All tensors are int64, `sigma_N` aside.

    A row stands at `position_N` (what the model's position encoding sees) and writes its keys and values at `column_N` of
    `slot_N`; several columns may hold one position, such as candidates that compete for it. All rows write first, then each
    attends to the columns in any of its intervals [`low_IN`, `high_IN`); one with low >= high is empty. Its own column is among
    them. No two rows write one column of a slot.

    `slots_B` are the forward's slots. A row is row number `line_N` (0, 1, ..) of slot number `owner_N` among them; the rows of a
    slot follow each other. `sigma_B` is the total noise of the canvas that these rows belong to (float, >= 0;
    decoders/draws/schedule.py), for models that are conditioned on it; all others ignore it. A slot may be named twice: its rows
    may have been computed under different noise, or see different columns. `tables` are the tiles of an attention kernel.
    `takes_drafts`: the tokens are those that the model has just drafted, which matters to a draft head (heads/published.py).
    """

    slots_B: Tensor
    owner_N: Tensor
    line_N: Tensor
    slot_N: Tensor
    token_N: Tensor
    position_N: Tensor
    column_N: Tensor
    low_IN: Tensor
    high_IN: Tensor
    shape: RowShape
    sigma_B: Tensor | None = None
    tables: Tables | None = None
    takes_drafts: bool = False

    @property
    def num_rows(self) -> int:
        """N."""
        return self.token_N.shape[0]

    @property
    def fills(self) -> bool:
        """Whether all slots have equally many rows."""
        return self.num_rows == self.shape.num_slots * self.shape.num_lines

    def flat(self) -> tuple[list[int], list[Tensor]]:
        """The same as integers, where -1 stands for None, and int64 arrays of one dimension: noise as the bits of float64,
        empty where there is none. Nothing waits for the device."""
        shape, sigma_B = self.shape, self.token_N[:0] if self.sigma_B is None else self.sigma_B.double()
        first, end = (-1, -1) if shape.slots is None else (shape.slots.start, shape.slots.stop)
        positions = -1 if shape.num_positions is None else shape.num_positions
        lines, tiles = self.tables or Tables((), ())
        assert len(lines) <= 2, "a row is in a tile of one of two kinds"
        facts = [len(self.low_IN), shape.num_slots, shape.num_lines, shape.num_columns, first, end, positions]
        facts += [int(self.takes_drafts), *[*lines, 0, 0][:2]]
        ints = [self.slots_B, self.owner_N, self.line_N, self.slot_N, self.token_N, self.position_N, self.column_N]
        none = self.token_N[:0]
        sights = [self.low_IN.flatten(), self.high_IN.flatten(), sigma_B.view(torch.int64)]
        return facts, [*ints, *sights, *[*tiles, none, none][:2]]

    @classmethod
    def of_flat(cls, facts: Sequence[int], arrays: Sequence[Tensor]) -> TokenRows:
        """The rows that these are `flat` of; views, and the noise is float64."""
        num_intervals, num_slots, num_lines, num_columns, first, end, positions, takes_drafts, *lines = facts
        slots_B, owner_N, line_N, slot_N, token_N, position_N, column_N, low, high, sigma_B, *tiles = arrays
        slots, num_positions = None if first < 0 else slice(first, end), None if positions < 0 else positions
        shape = RowShape(num_slots, num_lines, num_columns, slots, num_positions)
        low_IN, high_IN = low.view(num_intervals, -1), high.view(num_intervals, -1)
        noise_B = sigma_B.view(torch.float64) if len(sigma_B) else None
        kinds = [pair for pair in zip(lines, tiles, strict=True) if pair[0]]
        tables = Tables(tuple(size for size, _ in kinds), tuple(first_T for _, first_T in kinds)) if kinds else None
        ints = slots_B, owner_N, line_N, slot_N, token_N, position_N, column_N
        own = cls(*ints, low_IN, high_IN, shape, sigma_B=noise_B, tables=tables)
        return replace(own, takes_drafts=bool(takes_drafts))


@dataclass(frozen=True, slots=True)
class StreamShape:
    """What the host knows of the rows of a two-stream forward. The slot with the most rows has `num_content` content rows, and
    that with the most `num_queries`. No row sees a column at or beyond `num_columns`; no position of these slots is at or
    beyond `num_positions`. `some_blind`: some query sees no column."""

    num_slots: int
    num_content: int
    num_queries: int
    num_columns: int
    num_positions: int
    slots: slice | None
    some_blind: bool


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one two-stream forward, int64. Columns of a slot are the ranks of its decoding order.

    Content rows carry a token and write its keys and values at `content_column_C`; query rows carry none, stand at the rank
    `query_column_Q`, and predict the token there. A row sees the columns below its limit, a content row its own among them; one
    interval that begins at 0 is all that this kind of model needs. `*_owner` and `*_line` are as in `TokenRows`, for each kind of
    row alone; `tables` are of both kinds, content first.
    """

    slots_B: Tensor
    content_owner_C: Tensor
    content_line_C: Tensor
    content_token_C: Tensor
    content_column_C: Tensor
    content_limit_C: Tensor
    query_owner_Q: Tensor
    query_line_Q: Tensor
    query_column_Q: Tensor
    query_limit_Q: Tensor
    shape: StreamShape
    tables: Tables | None = None


def seen_columns(low_IN: Tensor, high_IN: Tensor, num_columns: int) -> Tensor:
    """Which columns each row sees, bool [N, num_columns]."""
    column_W = torch.arange(num_columns, device=low_IN.device)
    seen_NW = (column_W >= low_IN[0].unsqueeze(1)) & (column_W < high_IN[0].unsqueeze(1))
    for low_N, high_N in zip(low_IN[1:], high_IN[1:], strict=True):
        seen_NW |= (column_W >= low_N.unsqueeze(1)) & (column_W < high_N.unsqueeze(1))
    return seen_NW


def columns_in_order(rows: TokenRows, positions_SW: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
    """The columns that the rows of each slot see, in the order of their positions, [B, num_columns], and how many these are,
    [B]. For rows whose shape has `num_positions`; `positions_SW` are the positions of all columns. What is left over names
    column 0."""
    num_slots, owner_N = rows.shape.num_slots, rows.owner_N
    first_B = owner_N.new_zeros(num_slots + 1)
    first_B.scatter_(0, owner_N.where(rows.line_N == 0, num_slots), torch.arange(rows.num_rows, device=owner_N.device))
    first_B = first_B[:num_slots]
    seen_BW = seen_columns(rows.low_IN[:, first_B], rows.high_IN[:, first_B], rows.shape.num_columns)
    place_BW = positions_SW[rows.slots_B, : rows.shape.num_columns].where(seen_BW, num_columns)
    column_BW = torch.arange(rows.shape.num_columns, device=owner_N.device).expand(num_slots, -1)
    ordered = owner_N.new_zeros(num_slots, num_columns + 1).scatter_(1, place_BW, column_BW)
    return ordered[:, :num_columns], seen_BW.sum(1)


def intervals_of(seen_NW: Tensor) -> tuple[Tensor, Tensor]:
    """The runs of columns that a mask [N, W] lets each row see, as `low_IN`, `high_IN`; unused ones are empty."""
    padded = torch.nn.functional.pad(seen_NW.to(torch.int8), (1, 1)).diff(dim=1)
    starts, ends = (padded == 1).nonzero(), (padded == -1).nonzero()
    counts_N = seen_NW.new_zeros(len(seen_NW), dtype=torch.int64).index_add_(
        0, starts[:, 0], torch.ones_like(starts[:, 0])
    )
    low_IN, high_IN = torch.zeros(
        2, max(1, int(counts_N.max())), len(seen_NW), dtype=torch.int64, device=seen_NW.device
    )
    which = torch.arange(len(starts), device=seen_NW.device) - (counts_N.cumsum(0) - counts_N)[starts[:, 0]]
    low_IN[which, starts[:, 0]], high_IN[which, starts[:, 0]] = starts[:, 1], ends[:, 1]
    return low_IN, high_IN


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
    sigma_B: Tensor | None = None,
) -> TokenRows:
    """Rows of slots that have `counts` rows each; `sight` is (`low_IN`, `high_IN`). For callers outside of the engine: it waits
    for the device."""
    low_IN, high_IN = sight
    owner_N, line_N = number_rows(counts, token_N.device)
    slots_B = torch.tensor(list(slots), dtype=torch.int64, device=token_N.device)
    follow = list(slots) == list(range(slots[0], slots[0] + len(slots)))
    return TokenRows(
        slots_B=slots_B,
        owner_N=owner_N,
        line_N=line_N,
        slot_N=slots_B[owner_N],
        token_N=token_N,
        position_N=position_N,
        column_N=column_N,
        low_IN=low_IN,
        high_IN=high_IN,
        shape=RowShape(
            num_slots=len(slots_B),
            num_lines=max(counts),
            num_columns=int(high_IN.where(low_IN < high_IN, 0).max()),
            slots=slice(slots[0], slots[0] + len(slots)) if follow else None,
        ),
        sigma_B=sigma_B,
    )


def causal_rows(slots: Sequence[int], counts: Sequence[int], firsts: Sequence[int], token_N: Tensor) -> TokenRows:
    """Rows of slots from the columns `firsts` on, which are their positions; each sees its own column and those before it. The
    noise of every canvas is 1."""
    columns = [torch.arange(first, first + count) for count, first in zip(counts, firsts, strict=True)]
    column_N = torch.cat(columns).to(token_N.device)
    sight = torch.zeros_like(column_N).unsqueeze(0), (column_N + 1).unsqueeze(0)
    sigma_B = torch.ones(len(slots), device=token_N.device)
    return token_rows(slots, counts, token_N, column_N, column_N, sight, sigma_B=sigma_B)
