"""Draft windows whose tokens stay on the device until all are drawn: from the last forward's rows, or by a model.

A drafting model runs a forward a rank, each of which takes the draft before it from the device. A draft head corrects a row of
the last forward with the tokens that it has not seen, rank after rank. The host knows which tokens it reads, except those that
the window itself drafts; it refers to these by number:

    rank          ..  n-1 | n    n+1  n+2           three drafts after n decided tokens
    read before   ..      | 17   -2   -3            an id, or -2 - r: what sampled row r of this batch drafts

The sampled rows are in the order of ranks, those of all samples together: the head runs the rows of one rank at once.
Legend: see batch.py; B samples, those with the longest windows first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from draftmill.decoders.backbones.heads.files import MAX_DISTANCE
from draftmill.decoders.backbones.heads.markov import DraftHeads
from draftmill.decoders.backbones.invariance import at_least_rows
from draftmill.decoders.backbones.rows import Host
from draftmill.decoders.engine.asks import DRAFT, INDEPENDENT, NO_DRAFT, Answer, Ask, Ints, Roll, Run
from draftmill.decoders.engine.batch import Batch, Draws, Rule, pack, pack_draws
from draftmill.decoders.engine.model_runner import ModelRunner, Started
from draftmill.decoders.engine.sampler import Sampler
from draftmill.decoders.engine.samples import Sample, SlotTable

Drafted = tuple[list[Sample], Started]
"""A forward of a drafting model, and the samples that it drafted for."""


def roll_rows(
    samples: Sequence[Sample],
    asks: Sequence[Roll],
    ran: tuple[Sequence[Sample], Batch[Host], ModelRunner],
    sampler: Sampler,
    slots: SlotTable,
    heads: DraftHeads | None,
) -> Iterator[Answer]:
    """The drafts of these samples, in their order. `ran` are the samples of the last forward, its batch and its runner."""
    runner = ran[2]
    assert len({ask.head for ask in asks}) == 1, "the samples of a decoder roll by the same head"
    order, counts = sorted(range(len(samples)), key=lambda index: -asks[index].num_drafts), None
    whole = runner.is_captured and not sampler.by_ratio
    if whole:
        # All windows are as long as the longest, and their number is filled up with copies of one.
        order += [order[0]] * (runner.size(len(order)) - len(order))
        counts = [asks[order[0]].num_drafts] * len(order)
    rolled, windows = [samples[index] for index in order], [asks[index] for index in order]
    counts = counts or [ask.num_drafts for ask in windows]
    # The record of a draft is its token alone.
    rule = runner.rule._replace(num_notes=0, ahead=0, as_arrays=False)
    draws, parts = _pack(rolled, windows, ran, slots, counts=counts, rule=rule)
    if asks[0].head == INDEPENDENT:
        work = partial(runner.draw, is_target=False)
    else:
        assert heads is not None, "a roll by a head that was not loaded"
        work = partial(draft_by_head, runner, sampler, heads, parts)
    record = runner.more((asks[0].head, len(parts)) if whole else None, draws, work)
    tokens, place = record[: draws.num_sampled].astype(np.int64).tolist(), dict[int, int]()
    for number, index in enumerate(order):
        place.setdefault(index, number)
    for index, ask in enumerate(asks):
        drafts = [tokens[part.start + place[index]] for part in parts[: ask.num_drafts]]
        yield Answer(0, drafts, [0.0] * len(drafts))


def _pack(
    samples: Sequence[Sample],
    asks: Sequence[Roll],
    ran: tuple[Sequence[Sample], Batch[Host], ModelRunner],
    slots: SlotTable,
    *,
    counts: Sequence[int],
    rule: Rule,
) -> tuple[Draws[Host], list[slice]]:
    """The sampled rows of windows with `counts` ranks, rank after rank, and where those of each rank are. What is drawn beyond
    a window is its last rank once more."""
    number, rows_B = {sample.slot: index for index, sample in enumerate(ran[0])}, ran[1].rows_B
    which = [number[sample.slot] for sample in samples]
    going_K = np.array([sum(count > offset for count in counts) for offset in range(counts[0])])
    starts, owner_U = (going_K.cumsum() - going_K).tolist(), np.concatenate([np.arange(going) for going in going_K])
    row_B, rank_B, last_B = np.array([(ask.row, ask.rank, ask.num_drafts - 1) for ask in asks]).T
    offset_U = np.minimum(np.repeat(np.arange(len(going_K)), going_K), last_B[owner_U])
    runs_UF = np.zeros((len(owner_U), len(Run._fields)), dtype=np.int64)
    runs_UF[:, :4] = Run(0, 1, 0, DRAFT)[:4]
    runs_UF[:, 0], runs_UF[:, 2] = row_B[owner_U] + offset_U, rank_B[owner_U] + offset_U
    parts = [slice(first, first + count) for first, count in zip(starts, going_K.tolist(), strict=True)]
    draws = pack_draws(
        runs_UF,
        owner_U,
        np.full(len(owner_U), NO_DRAFT),
        slots,
        rule,
        slot_B=np.array([sample.slot for sample in samples]),
        row_B=(rows_B.cumsum() - rows_B)[which],
        rows_B=rows_B[which],
        when_B=np.array([sample.decided for sample in samples]),
    )
    if asks[0].head != INDEPENDENT:
        draws.head_5R = np.zeros((5, len(owner_U)), dtype=np.int64)
        for place, (sample, ask) in enumerate(zip(samples, asks, strict=True)):
            draws.head_5R[:, [first + place for first in starts[: ask.num_drafts]]] = _read(sample, ask, starts, place)
    draws.reads_all = False  # the states of a graph have padding rows
    if rule.top_k is not None and draws.judging is None:
        draws.leave_to_kernel()  # a draft may ignore a setting that the kernel does not know
    return draws, parts


def _read(sample: Sample, ask: Roll, starts: Sequence[int], place: int) -> Ints:
    """What the head reads of each rank, [5, K]: the token before it, the one before that, how far both are, and how many tokens
    the row has not seen."""

    def token(rank: int) -> int:
        return sample.tokens[rank] if rank < ask.rank else -2 - (starts[rank - ask.rank] + place)

    def distance(rank: int, other: int) -> int:
        away = rank - other if sample.order is None else sample.order[rank] - sample.order[other]
        return max(-MAX_DISTANCE, min(MAX_DISTANCE, away)) + MAX_DISTANCE

    columns = []
    for rank in range(ask.rank, ask.rank + ask.num_drafts):
        prev, before = max(rank - 1, 0), max(rank - 2, 0)
        columns.append((token(prev), token(before), distance(rank, prev), distance(rank, before), rank - ask.limit))
    return np.array(columns, dtype=np.int64).T


def draft_by_head(
    runner: ModelRunner, sampler: Sampler, heads: DraftHeads, parts: list[slice], sent: Draws, hidden_ND: Tensor
) -> Tensor:
    """Drafts rank after rank, each from its row, corrected by the head with the two tokens before it; float64 [R]."""
    assert sent.head_5R is not None, "rows for a draft head"
    drafted_R = torch.zeros(sent.row_R.shape[0], dtype=torch.int64, device=runner.device)
    for part in parts:
        # Ids, or references to drafts, of the token before each rank and of the one before that, one after the other.
        read_E = sent.head_5R[:2, part].flatten()
        own_E = drafted_R.index_select(0, (-2 - read_E).clamp(min=0))
        prev_RD, before_RD = runner.embed(torch.where(read_E <= -2, own_E, read_E).clamp(min=0)).chunk(2)
        numbers = zip(("prev_distance_R", "before_distance_R", "num_unseen_R"), sent.head_5R[2:, part], strict=True)
        others = {"prev_RD": prev_RD, "before_RD": before_RD, **dict(numbers)}
        hidden_RD = hidden_ND.index_select(0, sent.row_R[part])
        states_RD = at_least_rows(runner.backbone.min_rows, heads.markov, hidden_RD, **others)
        drafted_R[part] = sampler.drafts(runner.logits(states_RD), states_RD, sent, part)
    return drafted_R.to(torch.float64)


def roll_model(
    samples: Sequence[Sample],
    asks: Sequence[Roll],
    runner: ModelRunner,
    slots: SlotTable,
    window: int,
    budget: int | None,
) -> tuple[list[Answer], list[Drafted]]:
    """The drafts of these samples, and the forwards that made them; the host waits once, for the last one. Prompts run in
    forwards of their own, `budget` rows each, until the rest is no more than that; a sample that decodes has up to `window` + 1
    rows."""
    catch_up(samples, runner, slots, window, budget)
    ran = list[Drafted]()
    for offset in range(max(ask.num_drafts for ask in asks)):
        going = [sample for sample, ask in zip(samples, asks, strict=True) if offset < ask.num_drafts]
        nexts = [sample.draft_next(sample.decided + offset) for sample in going]
        started = runner.start(pack(going, nexts, slots, runner.layout, runner.rule))
        ran.append((going, started))
    drafts: dict[int, list[int]] = {sample.slot: [] for sample in samples}
    for going, started in reversed(ran):
        record = started.wait()
        assert record is not None, "each forward drafts"
        for sample, token in zip(going, record[: len(going)].astype(np.int64).tolist(), strict=True):
            drafts[sample.slot].append(token)
    tokens = (drafts[sample.slot][::-1] for sample in samples)
    return [Answer(0, each, [0.0] * len(each)) for each in tokens], ran


def catch_up(samples: Sequence[Sample], runner: ModelRunner, slots: SlotTable, window: int, budget: int | None) -> None:
    """Run prompts by the drafting model, whose cache takes over nothing from other samples. See roll_model."""
    while budget is not None:
        long = [sample for sample in samples if sample.decided - sample.cached_draft > window + 1]
        if sum(sample.decided - sample.cached_draft for sample in long) <= budget:
            return
        going, asks, left = list[Sample](), list[Ask](), budget
        for sample in long:
            if count := min(left, sample.decided - sample.cached_draft - 1):
                going.append(sample)
                asks.append(sample.catch_up(count))
                left -= count
        runner.start(pack(going, asks, slots, runner.layout, runner.rule))
