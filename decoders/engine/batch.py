"""All that a forward and its draws need of the host, in two halves; and what comes back, cut into answers.

    asks of all samples    pack      numpy arrays: the rows that a model reads, the sampled rows and what judges their drafts
    Batch                  fill_up   up to the size of a captured forward; here and nowhere else
                           to        the same names on the device, sent as one buffer (backbones/rows.py)
    record                 answers   float64 numbers of all sampled rows -> an Answer a sample

The last letters of a name say what an array has an entry for:

    G  groups of rows: the slots of the forward (a slot may be named twice, for two canvases of a sample)
    N  rows that carry a token      Q  query rows of an any-subset model
    R  sampled rows                 D  sampled rows that draft under the rejection rule
    B  samples                      P  spans, U  runs, F  the numbers of one
    E  tokens of a row whose logits change      T, U  tiles of rows (seen.py)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.backbones.rows import A, Host, RowShape, Sent, StreamRows, TokenRows
from draftmill.decoders.base import HOLE
from draftmill.decoders.draws import keys
from draftmill.decoders.draws.settings import MIN_P, TOP_K, Uses
from draftmill.decoders.engine.asks import (
    DRAFT,
    FAR,
    JUDGE,
    MOST_STRETCHES,
    NO_DRAFT,
    SCORE,
    SELF,
    SURE,
    TARGET_ONCE,
    UNREAD,
    Answer,
    Ask,
    Ints,
    Run,
    Span,
)
from draftmill.decoders.engine.samples import Sample, SlotTable, Tops

_SPAN, _RUN = len(Span._fields), len(Run._fields)
_COUNT, _COLUMN, _POSITION, _BELOW, _LAG, _BLOCK, _OWN, _TILL, _NODE = range(_SPAN)
_ROW, _SAMPLED, _RANK, _KIND, _DRAW, _BANK = range(_RUN)
# Rows that the rejection rule draws or judges, by kind.
_BY_RATIO_K: Final = np.isin(np.arange(SCORE + 1), (DRAFT, JUDGE, SURE))
_JUDGES_K: Final = np.isin(np.arange(SCORE + 1), (JUDGE, SURE))


class Layout(NamedTuple):
    """How the rows of a model stand in its cache. `streams`: it has query rows. With `keeps` the rows of a sample stand in
    its slot; else each canvas has one slot for the time of a forward. `by_node`: a slot is named once for each
    canvas of its sample, whose rows see the same columns. A hole reads as `mask_id`, an id above `most_id` as that one.
    `has_flags`: the model says which rows are finite. The tokens drawn are noted on the device, in `num_notes` cells of which
    each slot has two; 0 where no forward reads them there."""

    most_id: int = FAR
    streams: bool = False
    keeps: bool = True
    by_node: bool = False
    mask_id: int | None = None
    has_flags: bool = False
    num_notes: int = 0


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


@dataclass(slots=True, kw_only=True, eq=False)
class Judging(Sent[A]):
    """Sampled rows under the rejection rule: `judged_R` have a draft `draft_R`, whose distribution is in `cell_R`; `accept_R` and
    `uniform_R` are their uniform numbers, `owner_R` their samples. The rows `row_D` draft. A sample's first sampled row is
    `first_B`, and `size_B` rows from it on are its chain. `is_sure`: drafts are certain. `any_chain`: some row is judged."""

    owner_R: A
    judged_R: A
    draft_R: A
    cell_R: A
    accept_R: A
    uniform_R: A
    row_D: A
    first_B: A
    size_B: A
    is_sure: bool
    any_chain: bool


@dataclass(slots=True, kw_only=True, eq=False)
class Draws(Sent[A]):
    """The sampled rows of a forward. Row r is row (query) `row_R`, guided by row `partner_R`; its noise is that of `key_2R`,
    `place_R` and `draw_R`, `settings_4R` are its sampling settings, `token_ER` and `change_3ER` change its logits (Warp), and
    `scored_R` names the token that is scored. The cell `allowed_R` says which tokens it may draw (shaping.py). A token drawn is
    noted in the cell `note_R`. A draft head reads `head_5R` (rolls.py). Of rows that were split off `at_R` are the numbers.

    On the host: their samples have `sampled_B` rows each; rows are of a kind (asks.py), for a slot and a rank, and the host sees
    whether a draft `asked_R` holds; `num_sampled` are no padding. `once`: each rank is asked about once. `reads_all`: these are
    all rows of the forward. `num_tops` best tokens are recorded for each row."""

    rule: Rule
    uses: Uses
    row_R: A
    key_2R: A
    place_R: A
    draw_R: A
    settings_4R: A
    partner_R: A | None = None
    scored_R: A | None = None
    allowed_R: A | None = None
    token_ER: A | None = None
    change_3ER: A | None = None
    note_R: A | None = None
    head_5R: A | None = None
    at_R: A | None = None
    judging: Judging[A] | None = None
    sampled_B: Ints
    kind_R: Ints
    slot_R: Ints
    rank_R: Ints
    host_draw_R: Ints
    asked_R: Ints
    num_sampled: int
    once: bool
    by_kernel: bool = False
    num_tops: int = 0
    reads_all: bool = False

    @property
    def by_rejection(self) -> Judging[A]:
        """What judges these rows, which are under the rejection rule."""
        assert self.judging is not None, "rows of the coupled rule"
        return self.judging

    @property
    def judges_R(self) -> NDArray[np.bool_]:  # noqa: N802 - an array is named with its axes
        """The rows that judge drafts, or follow those that do."""
        return _JUDGES_K[self.kind_R]

    def unknown(self: Draws[Host]) -> NDArray[np.bool_]:
        """The rows that no kernel draws, [R]: with a min-p, another top-k than the job's, a constraint or a penalty."""
        unknown_R = (self.settings_4R[MIN_P] > 0) | (self.settings_4R[TOP_K] != self.rule.top_k)
        if self.allowed_R is not None:
            unknown_R |= self.allowed_R > 0
        if self.change_3ER is not None:
            unknown_R |= (self.change_3ER != np.array([0.0, 1.0, 0.0])[:, None, None]).any((0, 1))
        return unknown_R

    def split_off(self: Draws[Host]) -> Draws[Host] | None:
        """Leave the rows to the kernel, and return those that it can't draw, which torch draws afterwards. So a row takes neither
        kernel nor graph from the others. Where the kernel can draw no row, or there is none, torch draws all of them, and nothing
        is split off."""
        if self.judging is not None or (unknown_R := self.unknown()).all():
            return None
        at_R, others = np.flatnonzero(unknown_R), None
        if len(at_R):
            others = replace(
                self.changed(lambda array: array[..., at_R]), at_R=at_R, num_sampled=len(at_R), reads_all=False
            )
        self.allowed_R = self.token_ER = self.change_3ER = None
        self.leave_to_kernel()
        return others

    def leave_to_kernel(self) -> None:
        """A kernel draws all rows: by their own temperatures and top-p, and by the job's top-k."""
        assert self.rule.top_k is not None, "there is a kernel"
        self.by_kernel = True
        self.uses = Uses(scales=True, some_greedy=True, top_k=self.rule.top_k, top_p=self.uses.top_p)


@dataclass(slots=True, kw_only=True, eq=False)
class Batch(Sent[A]):
    """What a model reads, and what is drawn of it. Groups of rows are of the samples `sample_G`, samples have `rows_B` rows
    (query rows), and all together `num_rows` without padding."""

    rows: TokenRows[A] | StreamRows[A]
    draws: Draws[A]
    layout: Layout
    sample_G: Ints
    rows_B: Ints
    num_rows: int
    is_padded: bool = False

    @property
    def num_sums(self) -> int:
        """How many numbers at the end of a record are sums of rows' states, by which bad ones are found."""
        return sum(map(len, self.rows.lines)) if self.layout.has_flags else 0

    @property
    def counts(self) -> dict[str, int]:
        """How long each axis is; with one sampled row more where dead drafts need one."""
        rows, judging = self.rows, self.draws.judging
        return {
            "G": len(self.sample_G),
            "N": len(rows.line_N),
            "Q": len(rows.rank_Q) if isinstance(rows, StreamRows) else 0,
            "D": 0 if judging is None else len(judging.row_D),
            "B": len(self.rows_B),
            "R": self.draws.num_sampled + (judging is not None),
        }

    def fill_up(self, sizes: dict[str, int], dead: dict[str, int], *, num_positions: int) -> None:
        """Fill every array up to the size of its axis by what is `dead`, else 0, which means nothing: dead rows are token 0 of a
        slot at the pool's begin, see nothing, and write a column that no row sees; dead sampled rows leave what is kept of them
        where nobody reads it. At least one sampled row is dead, for dead drafts. No canvas has more than `num_positions`."""
        rows = self.rows
        self.pad(sizes, dead)
        self.is_padded, self.draws.reads_all = True, False
        longest = num_positions if isinstance(rows, StreamRows) else rows.shape.num_positions
        rows.shape = replace(rows.shape, num_slots=sizes["G"], num_positions=longest)


def pack(samples: Sequence[Sample], asks: Sequence[Ask], slots: SlotTable, layout: Layout, rule: Rule) -> Batch[Host]:
    """The batch of what these samples ask one model."""
    slot_B = np.array([sample.slot for sample in samples])
    rows, sample_G, rows_B = _pack_rows(samples, asks, layout, slot_B, slots.start_S)
    num_rows = sum(map(len, rows.lines))
    runs_UF, owner_U = _table([ask.runs for ask in asks], _RUN)
    when_B = np.array([sample.decided if ask.when < 0 else ask.when for sample, ask in zip(samples, asks, strict=True)])
    row_B = rows_B.cumsum() - rows_B
    draws = pack_draws(
        runs_UF,
        owner_U,
        _join([ask.drafts for ask in asks]),
        slots,
        rule,
        slot_B=slot_B,
        row_B=row_B,
        rows_B=rows_B,
        when_B=when_B,
        notes=layout.num_notes > 0,
    )
    if any(len(ask.partners) for ask in asks):
        draws.partner_R = np.repeat(row_B, draws.sampled_B) + _join([ask.partners for ask in asks])
    return Batch(rows=rows, draws=draws, layout=layout, sample_G=sample_G, rows_B=rows_B, num_rows=num_rows)


def _pack_rows(
    samples: Sequence[Sample], asks: Sequence[Ask], layout: Layout, slot_B: Ints, start_S: Ints | None
) -> tuple[TokenRows[Host] | StreamRows[Host], Ints, Ints]:
    """The rows; the sample of each group; how many rows (query rows) each sample has, [B]."""
    count = len(asks)
    span_PF, owner_P = _table([ask.spans for ask in asks], _SPAN)
    group_P, sample_G = owner_P, np.arange(count)
    if not layout.keeps or layout.by_node:
        is_next_P = (np.diff(owner_P, prepend=-1) != 0) | (np.diff(span_PF[:, _NODE], prepend=-1) != 0)
        group_P, sample_G = is_next_P.cumsum() - 1, owner_P[is_next_P]
    slots_G = slot_B[sample_G] if layout.keeps else np.arange(len(sample_G))
    numbers = slots_G.tolist()
    neighbours = slice(numbers[0], numbers[0] + len(numbers))
    slots = neighbours if numbers == list(range(neighbours.start, neighbours.stop)) else None
    assert (span_PF[:, _COUNT] > 0).all(), "a span without rows"
    rows_NF, step_N, owner_N = _expand(span_PF, _COUNT, group_P)
    line_N, num_lines = _lines(owner_N, len(slots_G))
    column_N = rows_NF[:, _COLUMN] + step_N
    token_N = _join([ask.tokens for ask in asks])
    assert len(token_N) == len(rows_NF), "a row without a token"
    if layout.mask_id is not None:
        token_N = np.where(token_N == HOLE, layout.mask_id, token_N)
    if layout.most_id < FAR:
        token_N = np.minimum(token_N, layout.most_id)
    low_IN, high_IN = _sights(rows_NF, column_N)
    if len(stretches := _join([ask.stretches for ask in asks])):
        has_P = np.array([len(ask.stretches) > 0 for ask in asks])[owner_P]
        low_IN, high_IN = _with_stretches(low_IN, high_IN, stretches, has_P, span_PF[:, _COUNT])
    num_columns, longest = int(high_IN.max(initial=0)), max(len(sample.tokens) for sample in samples)
    all_rows: dict[str, Any] = {
        "slots_G": slots_G,
        "owner_N": owner_N,
        "line_N": line_N,
        "token_N": token_N,
        "column_N": column_N,
    }
    slot_N, position_N, is_unread_N = slots_G[owner_N], rows_NF[:, _POSITION] + step_N, token_N == UNREAD
    if is_unread_N.any():
        own_N = layout.num_notes + np.arange(len(token_N))
        all_rows["unread_N"] = np.where(is_unread_N, note_cells(slot_N, position_N), own_N)
    if start_S is not None:
        all_rows["start_N"] = start_S[slot_N]
    if layout.streams:
        return _pack_queries(asks, all_rows, high_IN[0], (slots, num_columns, num_lines, longest), start_S)
    sigmas = [sigma for ask in asks for sigma in ask.sigmas]
    # One for each canvas, or one for all canvases of a sample.
    sigma_G = np.array(sigmas) if len(sigmas) in (0, len(slots_G)) else np.array(sigmas)[sample_G]
    # Only nodes beside a canvas have positions in other columns than their own.
    num_positions = longest if layout.by_node and len(slots_G) > count else None
    rows = TokenRows(
        **all_rows,
        slot_N=slot_N,
        position_N=position_N,
        low_IN=low_IN,
        high_IN=high_IN,
        shape=RowShape(len(slots_G), num_lines, num_columns, slots, num_positions),
        sigma_G=sigma_G if sigmas else None,
        takes_drafts=bool(is_unread_N.all()),
    )
    return rows, sample_G, np.bincount(owner_P, span_PF[:, _COUNT], count).astype(np.int64)


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


def _pack_queries(
    asks: Sequence[Ask],
    all_rows: dict[str, Any],
    limit_N: Ints,
    known: tuple[slice | None, int, int, int],
    start_S: Ints | None,
) -> tuple[StreamRows[Host], Ints, Ints]:
    """The same of an any-subset model, by its query rows; `known` of the others are the slots, the columns and lines, and of all
    the length of the longest canvas."""
    slots, num_columns, num_lines, longest = known
    span_PF, owner_P = _table([ask.queries for ask in asks], _SPAN)
    rows_QF, step_Q, owner_Q = _expand(span_PF, _COUNT, owner_P)
    line_Q, num_queries = _lines(owner_Q, len(asks))
    rank_Q = rows_QF[:, _COLUMN] + step_Q
    limit_Q = np.maximum(rows_QF[:, _BELOW], rank_Q + 1 - rows_QF[:, _LAG])
    shape = RowShape(
        num_slots=len(asks),
        num_lines=num_lines,
        num_columns=max(num_columns, int(limit_Q.max())),
        slots=slots,
        num_queries=num_queries,
        num_positions=longest,
        some_blind=bool((limit_Q == 0).any()),  # queries of an empty prompt
    )
    of_queries: dict[str, Any] = {"owner_Q": owner_Q, "line_Q": line_Q, "rank_Q": rank_Q, "limit_Q": limit_Q}
    if start_S is not None:
        of_queries["start_Q"] = start_S[all_rows["slots_G"][owner_Q]]
    rows = StreamRows(**all_rows, **of_queries, limit_N=limit_N, shape=shape)
    return rows, np.arange(len(asks)), np.bincount(owner_P, span_PF[:, _COUNT], len(asks)).astype(np.int64)


def pack_draws(
    runs_UF: Ints,
    owner_U: Ints,
    draft_R: Ints,
    slots: SlotTable,
    rule: Rule,
    *,
    slot_B: Ints,
    row_B: Ints,
    rows_B: Ints,
    when_B: Ints,
    notes: bool = False,
) -> Draws[Host]:
    """The sampled rows of samples in these slots, whose rows begin at `row_B` and are `rows_B`, and whose draws have the numbers
    `when_B`."""
    sampled_B = np.bincount(owner_U, runs_UF[:, _SAMPLED], len(slot_B)).astype(np.int64)
    runs_RF, step_R, owner_R = _expand(runs_UF, _SAMPLED, owner_U)
    kind_R, row_R = runs_RF[:, _KIND], runs_RF[:, _ROW] + step_R
    assert len(kind_R) == len(draft_R), "an ask has one draft entry for each sampled row"
    assert ((row_R >= 0) & (row_R < rows_B[owner_R])).all(), "a sampled row does not run"
    row_R = row_B[owner_R] + row_R
    slot_R, rank_R, draw_R = slot_B[owner_R], runs_RF[:, _RANK] + step_R, runs_RF[:, _DRAW]
    draws = Draws(
        rule=rule,
        uses=slots.uses,
        row_R=row_R,
        key_2R=slots.key_S2[slot_R].T,
        place_R=rank_R if slots.order_SW is None else slots.order_SW[slot_R, rank_R],
        draw_R=draw_R,
        settings_4R=slots.settings_4S[:, slot_R],
        scored_R=np.where(kind_R == SCORE, draft_R, NO_DRAFT) if (kind_R == SCORE).any() else None,
        note_R=note_cells(slot_R, rank_R) if notes else None,
        sampled_B=sampled_B,
        kind_R=kind_R,
        slot_R=slot_R,
        rank_R=rank_R,
        host_draw_R=draw_R,
        asked_R=draft_R,
        num_sampled=len(kind_R),
        once=bool((kind_R == TARGET_ONCE).all()),
        reads_all=len(row_R) == int(rows_B.sum()) and bool((row_R == np.arange(len(row_R))).all()),
    )
    if rule.by_ratio and _BY_RATIO_K[kind_R].any():
        draws.judging = _pack_judging(draws, owner_R, when_B, runs_RF[:, _BANK])
    return draws


def _pack_judging(draws: Draws[Host], owner_R: Ints, when_B: Ints, bank_R: Ints) -> Judging[Host]:
    """What the rejection rule needs: every draw has a random number of its own, new in every draw of a sample (`when_B`)."""
    rule, kind_R, draft_R, judges_R = draws.rule, draws.kind_R, draws.asked_R, draws.judges_R
    assert (_BY_RATIO_K[kind_R] | (kind_R == SCORE)).all(), "a decoder that judges has no other rows"
    assert len(set(kind_R[judges_R].tolist())) <= 1, "a decoder judges drawn drafts or certain ones, not both"
    sampled_B = draws.sampled_B
    size_B, first_B = np.bincount(owner_R[judges_R], minlength=len(sampled_B)), sampled_B.cumsum() - sampled_B
    any_chain, leads_R = bool(size_B.any()), np.arange(len(kind_R)) < (first_B + size_B)[owner_R]
    assert not any_chain or (judges_R == leads_R).all(), "rows that judge come first"
    judged_R = (judges_R & (draft_R != NO_DRAFT)).astype(np.int64)
    cell_R = (draws.slot_R * rule.banks + bank_R) * rule.window + draws.rank_R % rule.window
    mine_R, rank_R = (each[_BY_RATIO_K[kind_R]] for each in (cell_R, draws.rank_R))
    held_C = np.zeros(int(mine_R.max()) + 1, dtype=np.int64)
    held_C[mine_R] = rank_R
    assert (held_C[mine_R] == rank_R).all(), "Algorithm.window is too small: two ranks of a forward share a cell"
    purpose_R = np.where(kind_R == DRAFT, keys.DRAFT, np.where(judged_R, keys.RESIDUAL, keys.BONUS))
    key_R2, when_R = draws.key_2R.T, when_B[owner_R]
    return Judging(
        owner_R=owner_R,
        judged_R=judged_R,
        draft_R=np.maximum(draft_R, 0),
        cell_R=cell_R,
        accept_R=keys.uniform_rows(key_R2, draws.place_R, keys.ACCEPT, when_R),
        uniform_R=keys.uniform_rows(key_R2, draws.place_R, purpose_R, when_R),
        row_D=np.flatnonzero(kind_R == DRAFT),
        first_B=first_B,
        size_B=size_B,
        is_sure=bool((kind_R == SURE).any()),
        any_chain=any_chain,
    )


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


def answers(b: Batch[Host], record: NDArray[np.float64] | None) -> list[Answer]:
    """The answer of each sample, in their order. Without a record nothing was sampled."""
    if record is None:
        nothing: Any = np.zeros((1 + b.draws.rule.ahead, 0)) if b.draws.rule.as_arrays else []
        return [Answer(0, nothing, nothing)] * len(b.rows_B)
    fields_AFR, accepted_B = _split_record(b, record)
    ends, replies = b.draws.sampled_B.cumsum().tolist(), list[Answer]()
    if b.draws.rule.as_arrays:
        token_AR, end_of_notes = fields_AFR[:, 0].astype(np.int64), 2 + b.draws.rule.num_notes
        for first, end in zip([0, *ends], ends, strict=False):
            part = slice(first, end)
            replies.append(
                Answer(0, token_AR[:, part], fields_AFR[:, 1, part], fields_AFR[:, 2:end_of_notes, part].swapaxes(0, 1))
            )
        return replies
    tokens = fields_AFR[0, 0].astype(np.int64).tolist()
    log_ps, *notes = fields_AFR[0, 1 : 2 + b.draws.rule.num_notes].tolist()
    for accepted, first, end in zip(accepted_B, [0, *ends], ends, strict=False):
        replies.append(Answer(accepted, tokens[first:end], log_ps[first:end], [note[first:end] for note in notes]))
    return replies


def best_tokens(b: Batch[Host], record: NDArray[np.float64]) -> Iterator[Tops]:
    """The model's best tokens in each sampled row of each sample."""
    fields_AFR, _ = _split_record(b, record)
    log_p_R, (token_KR, best_KR) = fields_AFR[0, 1], np.split(fields_AFR[0, 2 + b.draws.rule.num_notes :], 2)
    ends = b.draws.sampled_B.cumsum().tolist()
    for first, end in zip([0, *ends], ends, strict=False):
        rows = range(first, end)
        pairs = (zip(token_KR[:, row].astype(int).tolist(), best_KR[:, row].tolist(), strict=True) for row in rows)
        places = zip(b.draws.place_R[first:end].tolist(), log_p_R[first:end].tolist(), strict=True)
        yield {place: [pair for pair in best if pair[1] > -np.inf] for place, best in zip(places, pairs, strict=True)}


def _split_record(b: Batch[Host], record: NDArray[np.float64]) -> tuple[NDArray[np.float64], list[int]]:
    """The fields of each sampled row, [A, F, R], and how many leading drafts of each sample hold."""
    num_fields, num_rows = 2 + b.draws.rule.num_notes + 2 * b.draws.num_tops, b.draws.row_R.shape[-1]
    count = (1 + b.draws.rule.ahead) * num_fields * num_rows
    fields_AFR = record[:count].reshape(-1, num_fields, num_rows)[:, :, : b.draws.num_sampled]
    if b.draws.judging is not None:
        return fields_AFR, record[count : count + len(b.rows_B)].astype(np.int64).tolist()
    draft_R = b.draws.asked_R
    if b.draws.rule.as_arrays or not (draft_R != NO_DRAFT).any():
        return fields_AFR, [0] * len(b.rows_B)
    return fields_AFR, count_leading(fields_AFR[0, 0] == draft_R, b.draws.sampled_B).tolist()


def bad_samples(b: Batch[Host], record: NDArray[np.float64]) -> list[int]:
    """The samples of a forward that have NaN or infinity in their states, or NaN in the fields of their rows."""
    if np.isfinite(record).all():
        return []
    bad = set[int]()
    if b.layout.has_flags:
        rows = b.rows
        owner_N = np.concatenate([rows.owner_N, rows.owner_Q]) if isinstance(rows, StreamRows) else rows.owner_N
        bad_G = owner_N[~np.isfinite(record[len(record) - b.num_sums :])]
        bad.update(b.sample_G[bad_G].tolist())
    if np.isnan(record).any():
        fields_AFR, _ = _split_record(b, record)
        row_R = np.flatnonzero(np.isnan(fields_AFR).any((0, 1)))
        bad.update(np.searchsorted(b.draws.sampled_B.cumsum(), row_R, side="right").tolist())
    return sorted(bad)


def count_leading(good_R: NDArray[np.bool_], size_B: Ints) -> Ints:
    """How many rows of each sample are good before the first that is not, [B]."""
    bad_R1 = np.concatenate([[0], (~good_R).cumsum()])
    first_B = size_B.cumsum() - size_B
    leads_R = bad_R1[1:] == np.repeat(bad_R1[first_B], size_B)
    return np.bincount(np.repeat(np.arange(len(size_B)), size_B), leads_R, len(size_B)).astype(np.int64)
