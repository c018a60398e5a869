"""Asks become the rows that they stand for: against a plain loop over spans, runs and rows. And wrong asks are found."""

import numpy as np
import pytest
import torch

from draftmill.decoders.base import HOLE, ModelInfo, Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import (
    DRAFT,
    FAR,
    JUDGE,
    NO_DRAFT,
    SELF,
    SURE,
    TARGET,
    Ask,
    Decoding,
    Ints,
    Run,
    Span,
)
from draftmill.decoders.engine.batch import Layout, Rule, count_leading, pack
from draftmill.decoders.engine.engine import Engine
from draftmill.decoders.engine.samples import Sample, SlotTable, runs_of
from draftmill.decoders.engine.setup import Setup
from tests.decoders.references.token_table import TokenTable

CAUSAL = Layout()


class Slot:
    """All that packing reads of a sample."""

    def __init__(self, slot: int) -> None:
        self.slot, self.tokens, self.decided = slot, [0] * 60, 5


def packed(asks: list[Ask], layout: Layout = CAUSAL, rule: Rule = Rule()):  # noqa: B008
    """The batch of these asks, whose samples are in the slots from 10 on."""
    samples: list = [Slot(10 + index) for index in range(len(asks))]
    return pack(samples, asks, SlotTable(Sampling(), 20), layout, rule)


def drawn_span(rng: np.random.Generator) -> Span:
    count, column, below, lag, block = (int(number) for number in rng.integers((1, 0, 0, 0, 1), (6, 40, 50, 4, 6)))
    own, till = ((FAR, 0), (SELF, 0), (column, 0), (column, column + count))[rng.integers(0, 4)]
    return Span(count, column, column + 3, below, lag, block, own, till)


def seen_by(span: Span, column: int) -> set[int]:
    """The columns that a row sees, from the words of Span."""
    first = column if span.own == SELF else span.own
    block_end = (column // span.block + 1) * span.block
    own = range(first, max(column + 1, span.till)) if span.own != FAR else ()
    return {*range(max(span.below, block_end - span.lag)), *own}


def columns_seen(low_IN: Ints, high_IN: Ints) -> list[set[int]]:
    return [{at for low, high in zip(lows, highs, strict=True) for at in range(low, high)}
            for lows, highs in zip(low_IN.T.tolist(), high_IN.T.tolist(), strict=True)]  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_a_batch_has_the_rows_of_a_plain_loop(seed):
    rng = np.random.default_rng(seed)
    asks, rows, sampled = list[Ask](), list[tuple[int, ...]](), list[tuple[int, ...]]()
    seen = list[set[int]]()
    for owner in range(int(rng.integers(1, 6))):
        spans = [drawn_span(rng) for _ in range(int(rng.integers(1, 4)))]
        first, runs, line = len(rows), list[int](), 0
        for span in spans:
            for step in range(span.num_rows):
                rows.append((owner, line, 10 + owner, span.column + step, span.position + step))
                seen.append(seen_by(span, span.column + step))
                line += 1
        for _ in range(int(rng.integers(0 if owner else 1, 3))):
            row, rank = int(rng.integers(0, line)), int(rng.integers(0, 50))
            count = int(rng.integers(1, line - row + 1))
            runs += Run(row, count, rank, TARGET, draw=rank + 1)
            sampled += [(first + row + step, 10 + owner, rank + step, rank + 1) for step in range(count)]
        tokens = rng.integers(0, 9, line).tolist()
        num_sampled = sum(runs[1::6])
        asks.append(Ask(tokens, [number for span in spans for number in span], runs, [NO_DRAFT] * num_sampled))
    b = packed(asks)
    found = zip(b.rows.owner_N, b.rows.line_N, b.rows.slot_N, b.rows.column_N, b.rows.position_N, strict=True)
    assert [tuple(map(int, row)) for row in found] == rows
    assert b.rows.token_N.tolist() == [token for ask in asks for token in ask.tokens]
    assert columns_seen(b.rows.low_IN, b.rows.high_IN) == seen
    assert b.rows.shape.num_columns >= max(max(one, default=-1) for one in seen) + 1
    told = zip(b.draws.row_R, b.draws.slot_R, b.draws.rank_R, b.draws.draw_R, strict=True)
    assert [tuple(map(int, row)) for row in told] == sampled
    assert b.rows.shape.num_lines == max(line for _, line, *_ in rows) + 1 and b.num_rows == len(rows)
    assert b.draws.sampled_B.sum() == len(sampled) and b.draws.reads_all == (
        [one[0] for one in sampled] == [*range(len(rows))]
    )


def test_rows_may_name_the_stretches_that_they_see():
    sees = (0, 2, 5, 6, 0, 0, 0, 0, 0, 0), (4, 9, 0, 0, 0, 0, 0, 0, 0, 0)
    ask = Ask([1, 2, 3], [*Span(2, 0, 0), *Span(1, 7, 7)], (), (), stretches=[*sees[0], *sees[1]])
    b = packed([ask])
    assert columns_seen(b.rows.low_IN, b.rows.high_IN) == [{0, 1, 5}, {0, 1, 5}, {4, 5, 6, 7, 8}]
    assert len(b.rows.low_IN) == 2, "stretches that no row uses are left out"


def test_queries_are_rows_of_their_own_to_which_runs_refer():
    layout = Layout(streams=True, keeps=True)
    ask = Ask([7, 8], Span(2, 3, 3, 3), Run(1, 2, 6, TARGET), [NO_DRAFT] * 2, queries=Span(3, 5, 5, lag=1))
    empty = Ask([], (), Run(0, 1, 0, TARGET), [NO_DRAFT], queries=Span(1, 0, 0, lag=1))
    b = packed([ask, empty], layout)
    assert b.rows.rank_Q.tolist() == [5, 6, 7, 0] and b.rows.limit_Q.tolist() == [5, 6, 7, 0]
    assert b.rows.shape.some_blind
    assert b.rows.owner_Q.tolist() == [0, 0, 0, 1] and b.rows.line_Q.tolist() == [0, 1, 2, 0]
    assert b.draws.row_R.tolist() == [1, 2, 3] and b.num_rows == 6
    assert columns_seen(np.zeros((1, 2), np.int64), b.rows.limit_N[None]) == [{0, 1, 2, 3}, {0, 1, 2, 3, 4}]


def test_canvases_of_a_sample_are_groups_and_slots_of_their_own_where_nothing_is_kept():
    def canvases(*nodes: int) -> Ask:
        spans = [number for node in nodes for number in Span(2, 0, 0, 2, FAR, node=node)]
        return Ask([HOLE, 1] * len(nodes), spans, (), ())

    b = packed([canvases(0, 1), canvases(0), canvases(0)], Layout(keeps=False, by_node=True, mask_id=9))
    assert b.rows.slots_G.tolist() == [0, 1, 2, 3] and b.sample_G.tolist() == [0, 0, 1, 2]
    assert b.rows.shape.slots == slice(0, 4)
    assert b.rows.token_N.tolist() == [9, 1] * 4 and b.rows.owner_N.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    kept = packed([canvases(0, 1), canvases(0)], Layout(by_node=True, mask_id=9))
    assert kept.rows.slots_G.tolist() == [10, 10, 11] and kept.rows.shape.slots is None


def test_the_rows_that_judge_are_a_chain_wherever_they_stand():
    rule = Rule(by_ratio=True, window=4, banks=2)
    rows = [*Span(5, 0, 0)]
    asks = [
        Ask([0] * 5, rows, [*Run(4, 1, 4, JUDGE), *Run(2, 1, 2, JUDGE, bank=1), *Run(0, 1, 1, DRAFT)], [7, 8, NO_DRAFT]),
        Ask([0] * 5, rows, (), ()),
        Ask([0] * 5, rows, Run(0, 2, 0, DRAFT), [NO_DRAFT] * 2, when=3),
        Ask([0] * 5, rows, Run(0, 1, 0, JUDGE), [NO_DRAFT]),
    ]  # fmt: skip
    b = packed(asks, CAUSAL, rule)
    judging = b.draws.by_rejection
    assert b.draws.row_R.tolist() == [4, 2, 0, 10, 11, 15] and judging.owner_R.tolist() == [0, 0, 0, 2, 2, 3]
    assert judging.first_B.tolist() == [0, 3, 3, 5] and judging.size_B.tolist() == [2, 0, 0, 1]
    assert judging.row_D.tolist() == [2, 3, 4]
    assert judging.judged_R.tolist() == [1, 1, 0, 0, 0, 0] and not judging.is_sure and judging.any_chain
    assert judging.cell_R.tolist() == [80 + 0, 80 + 4 + 2, 80 + 1, 96 + 0, 96 + 1, 104 + 0]


def test_the_number_of_a_sampled_row_stays_its_own_where_runs_are_made_of_arrays():
    rng = np.random.default_rng(0)
    for _ in range(50):
        count = int(rng.integers(0, 9))
        row_R, rank_R, draw_R = (rng.integers(0, 3, count).cumsum() for _ in range(3))
        runs_UF = runs_of(row_R, rank_R, TARGET, draw_R).reshape(-1, 6)
        rows = [(run[0] + j, run[2] + j, run[4]) for run in runs_UF.tolist() for j in range(run[1])]
        assert rows == [*zip(row_R.tolist(), rank_R.tolist(), draw_R.tolist(), strict=True)]


def test_a_batch_is_the_same_after_its_way_through_one_buffer():
    rule = Rule(by_ratio=True, window=4)
    ask = Ask([1, 2, 3], Span(3, 0, 0), [*Run(0, 1, 1, JUDGE), *Run(1, 2, 2, DRAFT)], [5, NO_DRAFT, NO_DRAFT])
    b = packed([ask, ask], rule=rule)
    sent = b.cut(torch.from_numpy(b.flat()))
    both = list(zip(b.arrays(), sent.arrays(), strict=True))
    assert len(both) == 9 + 5 + 9, "of the rows, of those that are sampled, and of what judges them"
    for (part, name), (sent_part, same_name) in both:
        held, there = getattr(part, name), getattr(sent_part, same_name)
        assert name == same_name and there.tolist() == held.tolist(), name
        assert there.is_floating_point() == (held.dtype == np.float64), name
    assert sent.rows.shape.num_lines == b.rows.shape.num_lines and sent.signature == b.signature


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (Ask([1], Span(1, 0, 0), Run(0, 2, 1, TARGET), [NO_DRAFT] * 2), "a sampled row does not run"),
        (Ask([1], Span(1, 0, 0), Run(-1, 1, 1, TARGET), [NO_DRAFT]), "a sampled row does not run"),
        # Beside a span of two rows it would pass for spans of one row each.
        (Ask([1, 2], [*Span(2, 0, 0), *Span(0, 2, 2)], (), ()), "a span without rows"),
        (Ask([1], Span(2, 0, 0), (), ()), "a row without a token"),
        (Ask([1], Span(1, 0, 0), Run(0, 1, 1, TARGET), ()), "one draft entry for each sampled row"),
    ],
)  # fmt: skip
def test_a_wrong_ask_is_a_mistake(ask, message):
    # A neighbour has the row that is missing.
    with pytest.raises(AssertionError, match=message):
        packed([ask, Ask([1, 2, 3], Span(3, 0, 0), (), ())])


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ((DRAFT, JUDGE), "rows that judge come first"),
        ((JUDGE, SURE), "drawn drafts or certain ones, not both"),
        ((JUDGE, TARGET), "has no other rows"),
    ],
)
def test_rows_that_the_rejection_rule_cannot_judge_are_a_mistake(kinds, message):
    runs = [number for row, kind in enumerate(kinds) for number in Run(row, 1, row, kind)]
    with pytest.raises(AssertionError, match=message):
        packed([Ask([1, 2], Span(2, 0, 0), runs, [5, 6])], rule=Rule(by_ratio=True, window=4))


def test_leading_rows_are_counted_sample_by_sample():
    good = np.array([True, True, False, True, False, True, True])
    assert count_leading(good, np.array([3, 1, 1, 2])).tolist() == [2, 1, 0, 2]


def test_drawn_and_certain_drafts_in_one_forward_are_a_mistake():
    """A certain draft has no kept distribution, and all drafts of a forward are judged alike."""

    def decode(s: Sample) -> Decoding:
        n = s.decided
        s.tokens[n] = 0
        yield s.causal(n + 1, 2, SURE if s.request.index else JUDGE, [0, NO_DRAFT])

    backbone, info = TokenTable(vocab_size=3, num_positions=5), ModelInfo("token_table", 3, None, None, "causal", 0)
    setup = Setup(backbone=backbone, info=info, sampling=Sampling(acceptance="rejection"), max_rows=2, max_tokens=99)
    engine = Engine(setup, Algorithm(decode=decode, window=3, keeps_laws=True))
    engine.admit([Request(index, index, np.array([1, HOLE, HOLE, HOLE], dtype=np.int32)) for index in range(2)])
    with pytest.raises(AssertionError, match="drawn drafts or certain ones, not both"):
        engine.step()


def test_a_forward_without_sampled_rows_runs_no_output_layer(monkeypatch):
    heard = []

    def decode(s: Sample) -> Decoding:
        heard.append((yield Ask(s.tokens[:2], Span(2, 0, 0), (), ())))
        s.cached = 2
        _, tokens, log_ps, _ = yield s.causal(3, 1, TARGET, [NO_DRAFT])
        s.commit(tokens, log_ps, 1)

    table, info = TokenTable(vocab_size=3, num_positions=4), ModelInfo("token_table", 3, None, None, "causal", 0)
    setup = Setup(backbone=table, info=info, sampling=Sampling(), max_rows=2, max_tokens=99)
    asked, whole = list[int](), table.logits

    def counted(hidden_RD: torch.Tensor) -> torch.Tensor:
        asked.append(len(hidden_RD))
        return whole(hidden_RD)

    monkeypatch.setattr(table, "logits", counted)
    engine = Engine(setup, Algorithm(decode=decode, has_prompt=lambda s: False))
    engine.admit([Request(index, index, np.array([1, 0, 0, HOLE], dtype=np.int32)) for index in range(2)])
    engine.step()
    assert not asked and len(heard) == 2
    assert len(engine.step()) == 2
    assert asked == [2] and [(one.accepted, one.tokens) for one in heard] == [(0, []), (0, [])]
