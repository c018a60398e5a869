"""All that a forward and its draws need of the host, as one struct of arrays; and what comes back, cut into answers.

    asks of all samples    pack      numpy arrays: rows, sampled rows, what judges their drafts
    Batch                  pad       up to the size of a captured forward; here and nowhere else
                           to        the same names on the device, sent as one buffer
    record                 answers   float64 numbers of all sampled rows -> an Answer a sample

The last letters of a name say what an array has an entry for:

    G  groups of rows: the slots of the forward (a slot may be named twice, for two canvases of a sample)
    N  rows that carry a token      Q  query rows of an any-subset model
    R  sampled rows                 D  sampled rows that draft under the rejection rule
    B  samples                      P  spans, U  runs, F  the numbers of one
    E  tokens of a row whose logits change      T, U  tiles of rows (seen.py)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.decoders.base import HOLE
from draftmill.decoders.draws import keys
from draftmill.decoders.draws.settings import MIN_P, TOP_K, Uses
from draftmill.decoders.engine.asks import (
    DRAFT,
    DRAFTED,
    FAR,
    JUDGE,
    MOST_STRETCHES,
    NO_DRAFT,
    SCORE,
    SELF,
    SURE,
    TARGET,
    TARGET_ONCE,
    Answer,
    Ask,
    Ints,
    Run,
    Span,
)
from draftmill.decoders.engine.samples import Sample, SlotTable, Tops
from draftmill.decoders.kernels.seen import Tables, Tiling

_SPAN, _RUN = len(Span._fields), len(Run._fields)
_COUNT, _COLUMN, _POSITION, _BELOW, _LAG, _BLOCK, _OWN, _TILL, _NODE = range(_SPAN)
_ROW, _SAMPLED, _RANK, _KIND, _DRAW, _BANK = range(_RUN)
# Rows whose tokens are decided or checked by the target, and rows that the rejection rule draws or judges, by kind.
_IS_VERIFIED_K: Final = np.isin(np.arange(SCORE + 1), (TARGET, JUDGE, SURE))
_BY_RATIO_K: Final = np.isin(np.arange(SCORE + 1), (DRAFT, JUDGE, SURE))
_JUDGES_K: Final = np.isin(np.arange(SCORE + 1), (JUDGE, SURE))


class Layout(NamedTuple):
    """How the rows of a model stand in its cache. `streams`: it has query rows. With `keeps` the rows of a sample stand in
    its slot; else each canvas has one slot for the time of a forward. `by_node`: a slot is named once for each
    canvas of its sample, whose rows see the same columns. A hole reads as `mask_id`, an id above `most_id` as that one.
    `family` says which rows count as verified. `has_flags`: the model says which rows are finite. `notes_drafts`: the
    tokens drawn are kept on the device, where the next rows of their slots find them."""

    family: str
    most_id: int = FAR
    streams: bool = False
    keeps: bool = True
    by_node: bool = False
    mask_id: int | None = None
    has_flags: bool = False
    notes_drafts: bool = False


class Rule(NamedTuple):
    """How rows are drawn. `by_ratio`: under the rejection rule, whose `banks` a slot keep `window` drafts each. `top_k` is the
    job's, the only one that a kernel knows; None where no kernel draws. Each row has `num_notes` notes, for the present draw and
    `ahead` more; `as_arrays`: answers are arrays."""

    by_ratio: bool = False
    window: int = 1
    banks: int = 1
    top_k: int | None = None
    num_notes: int = 0
    ahead: int = 0
    as_arrays: bool = False


@dataclass(slots=True)
class Batch:
    """Arrays as the module says, int64 or float64: numpy on the host, tensors on the device; None where there is nothing to
    say. Row n is token `token_N` at `position_N`; it writes `column_N` of `slot_N` and sees [low_IN, high_IN). It is row
    `line_N` of group `owner_N`. A query at `rank_Q` sees the columns below `limit_Q`. Sampled row r is row (query) `row_R`,
    guided by row `partner_R`; its noise is that of `key_2R`, `place_R` and `draw_R`, `settings_4R` are its sampling settings,
    `token_ER` and `change_3ER` change its logits (Warp), and `scored_R` names the token that is scored. The cell `allowed_R`
    says which tokens it may draw (shaping.py). A token drawn is noted in the cell `note_R`. Of rows under the rejection rule
    `judged_R` have a draft `draft_R`, whose distribution is in `cell_R`; `accept_R` and `uniform_R` are their uniform numbers,
    `owner_R` their samples. The rows `row_D` draft. A sample's first sampled row is `first_B`, and `size_B` rows from it on are
    its chain. A draft head reads `head_5R` (rolls.py), an attention kernel the tiles `few_T` and `many_U`."""

    slots_G: Any = None
    sigma_G: Any = None
    owner_N: Any = None
    line_N: Any = None
    slot_N: Any = None
    token_N: Any = None
    position_N: Any = None
    column_N: Any = None
    low_IN: Any = None
    high_IN: Any = None
    owner_Q: Any = None
    line_Q: Any = None
    rank_Q: Any = None
    limit_Q: Any = None
    row_R: Any = None
    partner_R: Any = None
    key_2R: Any = None
    place_R: Any = None
    draw_R: Any = None
    settings_4R: Any = None
    scored_R: Any = None
    allowed_R: Any = None
    token_ER: Any = None
    change_3ER: Any = None
    note_R: Any = None
    owner_R: Any = None
    judged_R: Any = None
    draft_R: Any = None
    cell_R: Any = None
    accept_R: Any = None
    uniform_R: Any = None
    row_D: Any = None
    first_B: Any = None
    size_B: Any = None
    head_5R: Any = None
    at_R: Any = None
    few_T: Any = None
    many_U: Any = None
    # ---- what only the host knows; `num_tops`: the number of best tokens to record for each row
    layout: Any = Layout("")  # noqa: RUF009 - it never changes
    rule: Any = None
    by_ratio: bool = False
    by_kernel: bool = False
    uses: Uses = Uses()  # noqa: RUF009 - it never changes
    num_tops: int = 0
    is_sure: bool = False
    any_chain: bool = False
    once: bool = False
    reads_all: bool = False
    takes_drafts: bool = False
    num_groups: int = 0
    num_rows: int = 0
    num_sampled: int = 0
    num_lines: int = 0
    num_columns: int = 0
    num_query_lines: int = 0
    longest: int = 0
    slots: slice | None = None
    some_blind: bool = False
    num_verified: int = 0
    is_padded: bool = False
    tile_lines: tuple[int, ...] = ()
    rows_B: Any = None
    sampled_B: Any = None
    asked_R: Any = None
    sample_G: Any = None
    slot_R: Any = None
    rank_R: Any = None
    host_draw_R: Any = None
    judges_R: Any = None

    @property
    def is_whole(self) -> bool:
        """Whether every row draws from the model's logits as they are."""
        return self.allowed_R is None and self.token_ER is None

    @property
    def unknown_R(self) -> NDArray[np.bool_]:  # noqa: N802 - an array is named with its axes
        """The sampled rows that no kernel draws: with a min-p, another top-k than the job's, a constraint or a penalty."""
        unknown_R = (self.settings_4R[MIN_P] > 0) | (self.settings_4R[TOP_K] != self.rule.top_k)
        if self.allowed_R is not None:
            unknown_R |= self.allowed_R > 0
        if self.change_3ER is not None:
            unknown_R |= (self.change_3ER != np.array([0.0, 1.0, 0.0])[:, None, None]).any((0, 1))
        return unknown_R

    def split_off(self) -> Batch | None:
        """Leave the sampled rows to the kernel, and return a batch of those that it can't draw, which torch draws afterwards;
        `at_R` are their numbers. So a row takes neither kernel nor graph from the others. Where the kernel can draw no row, or
        there is none, torch draws all of them, and nothing is split off."""
        if self.by_ratio or (unknown_R := self.unknown_R).all():
            return None
        at_R, others = np.flatnonzero(unknown_R), None
        if len(at_R):
            others = Batch(at_R=at_R, rule=self.rule, uses=self.uses, num_tops=self.num_tops, num_sampled=len(at_R))
            for name in _DRAWN:
                if (array := getattr(self, name)) is not None:
                    setattr(others, name, array[..., at_R])
        self.allowed_R = self.token_ER = self.change_3ER = None
        self.leave_to_kernel()
        return others

    def leave_to_kernel(self) -> None:
        """A kernel draws all rows: by their own temperatures and top-p, and by the job's top-k."""
        assert self.rule.top_k is not None, "there is a kernel"
        self.by_kernel = True
        self.uses = Uses(scales=True, some_greedy=True, top_k=self.rule.top_k, top_p=self.uses.top_p)

    @property
    def num_samples(self) -> int:
        """B."""
        return len(self.sampled_B)

    @property
    def num_sums(self) -> int:
        """How many numbers at the end of a record are sums of rows' states, by which bad ones are found."""
        rows = (self.owner_N, self.owner_Q) if self.layout.has_flags else ()
        return sum(len(owner_N) for owner_N in rows if owner_N is not None)

    @property
    def counts(self) -> dict[str, int]:
        """How long each axis is; with one sampled row more where dead drafts need one."""
        lengths = {"G": self.num_groups, "N": self.owner_N, "Q": self.owner_Q, "D": self.row_D, "B": self.num_samples}
        sizes = {
            axis: rows if isinstance(rows, int) else 0 if rows is None else len(rows) for axis, rows in lengths.items()
        }
        return sizes | {"R": self.num_sampled + self.by_ratio}

    # ---- on its way to the device --------------------------------------------------------------------------------

    def pad(self, sizes: dict[str, int], *, dead_column: int, dead_note: int, dead_cell: int) -> None:
        """Fill every array up to the size of its axis. What fills up means nothing: dead rows are token 0 of slot 0, see
        nothing, and write a column that no row sees; dead sampled rows leave what is kept of them where nobody reads it. At
        least one sampled row is dead, for dead drafts."""
        assert self.num_columns <= dead_column, "a row sees the column of dead rows"
        dead = {
            "line_N": -1, "line_Q": -1, "column_N": dead_column, "settings_4R": 1, "scored_R": NO_DRAFT, "note_R": dead_note,
            "cell_R": dead_cell, "row_D": self.num_sampled,
        }  # fmt: skip
        for name in _ARRAYS:
            array = getattr(self, name)
            if array is not None and (missing := sizes[name[-1]] - array.shape[-1]):
                full = np.full((*array.shape[:-1], missing), dead.get(name, 0), dtype=array.dtype)
                setattr(self, name, np.concatenate([array, full], axis=-1))
        self.num_groups, self.is_padded, self.reads_all = sizes["G"], True, False

    def add_tiles(self, tiling: Tiling) -> None:
        """Cut the rows into tiles, after `pad`; how many there are in a captured forward depends on its sizes alone."""
        lines = [self.line_N] if self.line_Q is None else [self.line_N, self.line_Q]
        line_N, num_runs = np.concatenate(lines), len(lines) * (self.num_groups + 1)
        tables = tiling.cut(line_N)
        if self.is_padded:
            for size, first_T in tables.items():
                tables[size] = np.full(tiling.most_tiles(size, num_runs, len(line_N)), len(line_N))
                tables[size][: len(first_T)] = first_T
        self.tile_lines = tuple(tables)
        self.few_T, self.many_U = [*tables.values(), None, None][:2]

    @property
    def tables(self) -> Tables | None:
        """The tiles on the device, if there are any."""
        first = tuple(tiles for tiles in (self.few_T, self.many_U) if tiles is not None)
        return Tables(self.tile_lines, first) if first else None

    @property
    def signature(self) -> Hashable:
        """What decides which work is done, and on what: names and shapes of the arrays, and facts that the work looks at."""
        shapes = tuple((name, array.shape) for name in _ARRAYS if (array := getattr(self, name)) is not None)
        return shapes, self.by_ratio, self.uses, self.is_sure, self.any_chain, self.takes_drafts, self.tile_lines

    def flat(self) -> Ints:
        """All arrays as one; float64 numbers as their bits. Each begins at a multiple of 16 bytes: kernels are compiled anew for
        others."""
        parts = list[Ints]()
        for name in _ARRAYS:
            array = getattr(self, name)
            if array is not None:
                parts.append(np.ascontiguousarray(array).reshape(-1).view(np.int64))
                if array.size % 2:
                    parts.append(_ODD)
        return np.concatenate(parts)

    def cut(self, buffer: Tensor) -> Batch:
        """The same batch, whose arrays are views of a buffer that holds, or will hold, `flat`."""
        first = 0

        def view(array: NDArray[Any]) -> Tensor:
            nonlocal first
            part = buffer[first : first + array.size]
            first += array.size + array.size % 2
            return (part.view(torch.float64) if array.dtype == np.float64 else part).view(array.shape)

        return self._with(view)

    def to(self, device: torch.device) -> Batch:
        """The same batch on the device, by one transfer; to a CPU nothing has to be copied."""
        if device.type == "cpu":
            return self._with(torch.from_numpy)
        return self.cut(put(self.flat(), device))

    def _with(self, tensor: Any) -> Batch:
        batch = Batch()
        for name in _FACTS:
            setattr(batch, name, getattr(self, name))
        for name in _ARRAYS:
            array = getattr(self, name)
            if array is not None:
                setattr(batch, name, tensor(array))
        return batch


_DRAWN: Final = (
    "row_R", "partner_R", "key_2R", "place_R", "draw_R", "settings_4R", "scored_R", "allowed_R", "token_ER", "change_3ER",
    "note_R",
)  # fmt: skip
"""What the coupled rule reads of a sampled row."""
_ODD: Final = np.zeros(1, dtype=np.int64)
_ARRAYS: Final = tuple(field.name for field in fields(Batch))[: [field.name for field in fields(Batch)].index("layout")]
_FACTS: Final = tuple(field.name for field in fields(Batch))[len(_ARRAYS) :]


def put(numbers: NDArray[np.generic], device: torch.device) -> Tensor:
    """Bring numbers to the device, without waiting for it, as a transfer from pageable memory would."""
    held = torch.from_numpy(numbers)
    return held if device.type == "cpu" else held.pin_memory().to(device, non_blocking=True)


# ---- packing ---------------------------------------------------------------------------------------------------------


def pack(samples: Sequence[Sample], asks: Sequence[Ask], slots: SlotTable, layout: Layout, rule: Rule) -> Batch:
    """The batch of what these samples ask one model."""
    b = Batch(layout=layout, rule=rule)
    slot_B = np.array([sample.slot for sample in samples])
    rows_B = _add_rows(b, samples, asks, slot_B)
    b.rows_B = rows_B = _add_queries(b, asks) if layout.streams else rows_B
    runs_UF, owner_U = _table([ask.runs for ask in asks], _RUN)
    when_B = np.array([sample.decided if ask.when < 0 else ask.when for sample, ask in zip(samples, asks, strict=True)])
    draft_R = _join([ask.drafts for ask in asks])
    row_B = rows_B.cumsum() - rows_B
    add_sampled(b, runs_UF, owner_U, draft_R, slots, slot_B=slot_B, row_B=row_B, rows_B=rows_B, when_B=when_B)
    if any(len(ask.partners) for ask in asks):
        b.partner_R = np.repeat(row_B, b.sampled_B) + _join([ask.partners for ask in asks])
    return b


def _add_rows(b: Batch, samples: Sequence[Sample], asks: Sequence[Ask], slot_B: Ints) -> Ints:
    """The rows that carry a token; returns how many each sample has, [B]."""
    layout, count = b.layout, len(asks)
    span_PF, owner_P = _table([ask.spans for ask in asks], _SPAN)
    group_P = owner_P
    if layout.keeps and not layout.by_node:
        b.sample_G = np.arange(count)
    else:
        is_next_P = (np.diff(owner_P, prepend=-1) != 0) | (np.diff(span_PF[:, _NODE], prepend=-1) != 0)
        group_P, b.sample_G = is_next_P.cumsum() - 1, owner_P[is_next_P]
    b.slots_G = slot_B[b.sample_G] if layout.keeps else np.arange(len(b.sample_G))
    b.num_groups, slots = len(b.slots_G), b.slots_G.tolist()
    neighbours = slice(slots[0], slots[0] + len(slots))
    b.slots = neighbours if slots == list(range(neighbours.start, neighbours.stop)) else None
    assert (span_PF[:, _COUNT] > 0).all(), "a span without rows"
    rows_NF, step_N, b.owner_N = _expand(span_PF, _COUNT, group_P)
    b.num_rows = len(rows_NF)
    b.line_N, b.num_lines = _lines(b.owner_N, b.num_groups)
    b.column_N = rows_NF[:, _COLUMN] + step_N
    b.token_N = _join([ask.tokens for ask in asks])
    assert len(b.token_N) == b.num_rows, "a row without a token"
    if layout.mask_id is not None:
        b.token_N = np.where(b.token_N == HOLE, layout.mask_id, b.token_N)
    if layout.most_id < FAR:
        b.token_N = np.minimum(b.token_N, layout.most_id)
    low_IN, high_IN = _sights(rows_NF, b.column_N)
    if len(stretches := _join([ask.stretches for ask in asks])):
        has_P = np.array([len(ask.stretches) > 0 for ask in asks])[owner_P]
        low_IN, high_IN = _with_stretches(low_IN, high_IN, stretches, has_P, span_PF[:, _COUNT])
    b.num_columns = int(high_IN.max(initial=0))
    b.longest = max(len(sample.tokens) for sample in samples)
    b.high_IN = high_IN
    sigmas = [sigma for ask in asks for sigma in ask.sigmas]
    if sigmas:
        # One for each canvas, or one for all canvases of a sample.
        b.sigma_G = np.array(sigmas) if len(sigmas) == b.num_groups else np.array(sigmas)[b.sample_G]
    if not layout.streams:
        b.low_IN, b.position_N, b.slot_N = low_IN, rows_NF[:, _POSITION] + step_N, b.slots_G[b.owner_N]
        b.takes_drafts = bool(b.token_N[0] == DRAFTED)
        assert ((b.token_N == DRAFTED) == b.takes_drafts).all(), "drafts are on the device in all samples, or in none"
        if b.takes_drafts:
            b.token_N = note_cells(b.slot_N, b.position_N)
    return np.bincount(owner_P, span_PF[:, _COUNT], count).astype(np.int64)


def _sights(rows_NF: Ints, column_N: Ints) -> tuple[Ints, Ints]:
    """The stretches of columns that each row sees by the rule of its span: from .. below .., [I, N] each."""
    end_N = column_N + 1
    if (rows_NF[:, _BLOCK] != 1).any():
        block_N = rows_NF[:, _BLOCK]
        end_N = (column_N // block_N + 1) * block_N
    limit_N, own_N = np.maximum(rows_NF[:, _BELOW], end_N - rows_NF[:, _LAG]), rows_NF[:, _OWN]
    if not len(own_N) or int(own_N.min()) == FAR:
        return np.zeros((1, len(column_N)), dtype=np.int64), limit_N[None]
    own_N = np.where(own_N == SELF, column_N, own_N)
    till_N = np.maximum(column_N + 1, rows_NF[:, _TILL])
    return np.stack([np.zeros_like(own_N), own_N]), np.stack([limit_N, till_N])


def _with_stretches(
    low_IN: Ints, high_IN: Ints, stretches: Ints, has_P: NDArray[np.bool_], count_P: Ints
) -> tuple[Ints, Ints]:
    """The same where the spans `has_P` have stretches of their own in place of the rule."""
    sees_PX, num_rule = stretches.reshape(-1, 2 * MOST_STRETCHES), 2 * len(low_IN)
    used = max(num_rule, 2 * int(sees_PX[:, 1::2].any(0).sum()))
    sees_XN = np.zeros((used, low_IN.shape[1]), dtype=np.int64)
    sees_XN[:num_rule:2], sees_XN[1:num_rule:2] = low_IN, high_IN
    sees_XN[:, np.repeat(has_P, count_P)] = np.repeat(sees_PX[:, :used], count_P[has_P], axis=0).T
    # A kernel reads them one after the other.
    return np.ascontiguousarray(sees_XN[::2]), np.ascontiguousarray(sees_XN[1::2])


def _add_queries(b: Batch, asks: Sequence[Ask]) -> Ints:
    """The query rows of an any-subset model; returns how many each sample has, [B]."""
    span_PF, owner_P = _table([ask.queries for ask in asks], _SPAN)
    rows_QF, step_Q, b.owner_Q = _expand(span_PF, _COUNT, owner_P)
    b.line_Q, b.num_query_lines = _lines(b.owner_Q, len(asks))
    b.rank_Q = rows_QF[:, _COLUMN] + step_Q
    b.limit_Q = np.maximum(rows_QF[:, _BELOW], b.rank_Q + 1 - rows_QF[:, _LAG])
    b.some_blind = bool((b.limit_Q == 0).any())  # queries of an empty prompt
    b.num_columns = max(b.num_columns, int(b.limit_Q.max()))
    b.num_rows += len(rows_QF)
    return np.bincount(owner_P, span_PF[:, _COUNT], len(asks)).astype(np.int64)


def add_sampled(
    b: Batch,
    runs_UF: Ints,
    owner_U: Ints,
    draft_R: Ints,
    slots: SlotTable,
    *,
    slot_B: Ints,
    row_B: Ints,
    rows_B: Ints,
    when_B: Ints,
) -> None:
    """The sampled rows of samples in these slots, whose rows begin at `row_B` and are `rows_B`, and whose draws have the numbers
    `when_B`."""
    layout, rule = b.layout, b.rule
    b.sampled_B = np.bincount(owner_U, runs_UF[:, _SAMPLED], len(slot_B)).astype(np.int64)
    runs_RF, step_R, owner_R = _expand(runs_UF, _SAMPLED, owner_U)
    b.num_sampled = len(owner_R)
    kind_R, row_R = runs_RF[:, _KIND], runs_RF[:, _ROW] + step_R
    assert b.num_sampled == len(draft_R), "an ask has one draft entry for each sampled row"
    assert ((row_R >= 0) & (row_R < rows_B[owner_R])).all(), "a sampled row does not run"
    b.row_R = row_B[owner_R] + row_R
    b.reads_all = b.num_sampled == int(rows_B.sum()) and bool((b.row_R == np.arange(b.num_sampled)).all())
    b.slot_R, b.rank_R, b.draft_R = slot_B[owner_R], runs_RF[:, _RANK] + step_R, draft_R
    b.key_2R = slots.key_S2[b.slot_R].T
    b.place_R = b.rank_R if slots.order_SW is None else slots.order_SW[b.slot_R, b.rank_R]
    b.draw_R = b.host_draw_R = runs_RF[:, _DRAW]
    b.settings_4R, b.uses = slots.settings_4S[:, b.slot_R], slots.uses
    if (kind_R == SCORE).any():
        b.scored_R = np.where(kind_R == SCORE, draft_R, NO_DRAFT)
    b.once = bool((kind_R == TARGET_ONCE).all())
    if layout.notes_drafts:
        b.note_R = note_cells(b.slot_R, b.rank_R)
    b.judges_R = _JUDGES_K[kind_R]
    b.num_verified = _num_verified(b, kind_R, owner_R)
    b.by_ratio = rule.by_ratio and bool(_BY_RATIO_K[kind_R].any())
    if b.by_ratio:
        _add_judging(b, kind_R, owner_R, when_B, runs_RF[:, _BANK])
    else:
        b.draft_R = None
    b.asked_R = draft_R


def _num_verified(b: Batch, kind_R: Ints, owner_R: Ints) -> int:
    """How many rows decide or check tokens that may be committed now: of canvases each, whatever is asked about it. In block
    diffusion these are drafts, too, but beside a verification they wait for the next one."""
    if b.layout.family == "masked":
        return b.num_groups
    if b.layout.family != "blocks":
        return int(_IS_VERIFIED_K[kind_R].sum())
    judges_B = np.bincount(owner_R[b.judges_R], minlength=b.num_samples) > 0
    return int((b.judges_R | ~judges_B[owner_R]).sum())


def _add_judging(b: Batch, kind_R: Ints, owner_R: Ints, when_B: Ints, bank_R: Ints) -> None:
    """What the rejection rule needs: every draw has a random number of its own, new in every draw of a sample (`when_B`)."""
    rule, draft_R = b.rule, b.draft_R
    assert (_BY_RATIO_K[kind_R] | (kind_R == SCORE)).all(), "a decoder that judges has no other rows"
    assert len(set(kind_R[b.judges_R].tolist())) <= 1, "a decoder judges drawn drafts or certain ones, not both"
    b.is_sure = bool((kind_R == SURE).any())
    b.size_B = np.bincount(owner_R[b.judges_R], minlength=b.num_samples)
    b.owner_R, b.any_chain = owner_R, bool(b.size_B.any())
    b.first_B = b.sampled_B.cumsum() - b.sampled_B
    leads_R = np.arange(b.num_sampled) < (b.first_B + b.size_B)[owner_R]
    assert not b.any_chain or (b.judges_R == leads_R).all(), "rows that judge come first"
    b.judged_R = (b.judges_R & (draft_R != NO_DRAFT)).astype(np.int64)
    b.draft_R = np.maximum(draft_R, 0)
    b.cell_R = (b.slot_R * rule.banks + bank_R) * rule.window + b.rank_R % rule.window
    cell_R, rank_R = (each[_BY_RATIO_K[kind_R]] for each in (b.cell_R, b.rank_R))
    held_C = np.zeros(int(cell_R.max()) + 1, dtype=np.int64)
    held_C[cell_R] = rank_R
    assert (held_C[cell_R] == rank_R).all(), "Algorithm.window is too small: two ranks of a forward share a cell"
    purpose_R = np.where(kind_R == DRAFT, keys.DRAFT, np.where(b.judged_R, keys.RESIDUAL, keys.BONUS))
    key_R2, when_R = b.key_2R.T, when_B[owner_R]
    b.uniform_R = keys.uniform_rows(key_R2, b.place_R, purpose_R, when_R)
    b.accept_R = keys.uniform_rows(key_R2, b.place_R, keys.ACCEPT, when_R)
    b.row_D = np.flatnonzero(kind_R == DRAFT)


def note_cells(slot_R: Ints, rank_R: Ints) -> Ints:
    """Where the tokens at some ranks are noted on the device, [R]: those of the last two ranks of a slot. Two, so that a
    forward may be run again: it does not write what it reads."""
    return 2 * slot_R + rank_R % 2


def steps(count_P: Ints) -> Ints:
    """0 .. count - 1 for each entry, one after the other."""
    return np.arange(int(count_P.sum())) - np.repeat(count_P.cumsum() - count_P, count_P)


def _expand(table_PF: Ints, count: int, owner_P: Ints) -> tuple[Ints, Ints, Ints]:
    """Each entry as often as its field `count` says; the number of each copy, and its owner."""
    count_P = table_PF[:, count]
    if (count_P == 1).all():
        return table_PF, np.zeros(len(table_PF), dtype=np.int64), owner_P
    return np.repeat(table_PF, count_P, axis=0), steps(count_P), np.repeat(owner_P, count_P)


def _lines(owner_N: Ints, num_groups: int) -> tuple[Ints, int]:
    """The number of each row among those of its group, which follow each other; how many rows the largest group has."""
    rows_G = np.bincount(owner_N, minlength=num_groups)
    return np.arange(len(owner_N)) - (rows_G.cumsum() - rows_G)[owner_N], int(rows_G.max(initial=0))


def _table(parts: Sequence[Sequence[int] | Ints], width: int) -> tuple[Ints, Ints]:
    """Flat numbers of all samples as rows of `width` numbers, and the sample of each."""
    counts = [len(part) // width for part in parts]
    return _join(parts).reshape(-1, width), np.repeat(np.arange(len(parts)), counts)


def _join(parts: Sequence[Sequence[int] | Ints]) -> Ints:
    """All numbers one after the other, int64."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return np.array(list(chain.from_iterable(parts)), dtype=np.int64)


# ---- answers ---------------------------------------------------------------------------------------------------------


def answers(b: Batch, record: NDArray[np.float64] | None) -> list[Answer]:
    """The answer of each sample, in their order. Without a record nothing was sampled."""
    if record is None:
        nothing: Any = np.zeros((1 + b.rule.ahead, 0)) if b.rule.as_arrays else []
        return [Answer(0, nothing, nothing)] * b.num_samples
    fields_AFR, accepted_B = _split_record(b, record)
    ends, replies = b.sampled_B.cumsum().tolist(), list[Answer]()
    if b.rule.as_arrays:
        token_AR, end_of_notes = fields_AFR[:, 0].astype(np.int64), 2 + b.rule.num_notes
        for first, end in zip([0, *ends], ends, strict=False):
            part = slice(first, end)
            replies.append(
                Answer(0, token_AR[:, part], fields_AFR[:, 1, part], fields_AFR[:, 2:end_of_notes, part].swapaxes(0, 1))
            )
        return replies
    tokens = fields_AFR[0, 0].astype(np.int64).tolist()
    log_ps, *notes = fields_AFR[0, 1 : 2 + b.rule.num_notes].tolist()
    for accepted, first, end in zip(accepted_B, [0, *ends], ends, strict=False):
        replies.append(Answer(accepted, tokens[first:end], log_ps[first:end], [note[first:end] for note in notes]))
    return replies


def best_tokens(b: Batch, record: NDArray[np.float64]) -> Iterator[Tops]:
    """The model's best tokens in each sampled row of each sample."""
    fields_AFR, _ = _split_record(b, record)
    log_p_R, (token_KR, best_KR) = fields_AFR[0, 1], np.split(fields_AFR[0, 2 + b.rule.num_notes :], 2)
    ends = b.sampled_B.cumsum().tolist()
    for first, end in zip([0, *ends], ends, strict=False):
        rows = range(first, end)
        pairs = (zip(token_KR[:, row].astype(int).tolist(), best_KR[:, row].tolist(), strict=True) for row in rows)
        places = zip(b.place_R[first:end].tolist(), log_p_R[first:end].tolist(), strict=True)
        yield {place: [pair for pair in best if pair[1] > -np.inf] for place, best in zip(places, pairs, strict=True)}


def _split_record(b: Batch, record: NDArray[np.float64]) -> tuple[NDArray[np.float64], list[int]]:
    """The fields of each sampled row, [A, F, R], and how many leading drafts of each sample hold."""
    num_fields, num_rows = 2 + b.rule.num_notes + 2 * b.num_tops, b.row_R.shape[-1]
    count = (1 + b.rule.ahead) * num_fields * num_rows
    fields_AFR = record[:count].reshape(-1, num_fields, num_rows)[:, :, : b.num_sampled]
    if b.by_ratio:
        return fields_AFR, record[count : count + b.num_samples].astype(np.int64).tolist()
    draft_R = b.asked_R
    if b.rule.as_arrays or not (draft_R != NO_DRAFT).any():
        return fields_AFR, [0] * b.num_samples
    return fields_AFR, count_leading(fields_AFR[0, 0] == draft_R, b.sampled_B).tolist()


def bad_samples(b: Batch, record: NDArray[np.float64]) -> list[int]:
    """The samples of a forward that have NaN or infinity in their states, or NaN in the fields of their rows."""
    if np.isfinite(record).all():
        return []
    bad = set[int]()
    if b.layout.has_flags:
        owner_N = np.concatenate([b.owner_N, b.owner_Q]) if b.layout.streams else b.owner_N
        bad_G = owner_N[~np.isfinite(record[len(record) - b.num_sums :])]
        bad.update(b.sample_G[bad_G].tolist())
    if np.isnan(record).any():
        fields_AFR, _ = _split_record(b, record)
        rows = np.flatnonzero(np.isnan(fields_AFR).any((0, 1)))
        bad.update(np.searchsorted(b.sampled_B.cumsum(), rows, side="right").tolist())
    return sorted(bad)


def count_leading(good_R: NDArray[np.bool_], size_B: Ints) -> Ints:
    """How many rows of each sample are good before the first that is not, [B]."""
    bad_R1 = np.concatenate([[0], (~good_R).cumsum()])
    first_B = size_B.cumsum() - size_B
    leads_R = bad_R1[1:] == np.repeat(bad_R1[first_B], size_B)
    return np.bincount(np.repeat(np.arange(len(size_B)), size_B), leads_R, len(size_B)).astype(np.int64)
