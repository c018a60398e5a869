"""Spans expand to the rows that they stand for: against a plain loop over spans and rows."""

from __future__ import annotations

import numpy as np
import pytest

from draftmill.decoders.base import HOLE, ModelInfo, Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import (
    FAR,
    FIELDS,
    JUDGE,
    NO_DRAFT,
    SELF,
    SURE,
    TARGET,
    WIDE,
    Decoding,
    wide_span,
)
from draftmill.decoders.engine.engine import Engine
from draftmill.decoders.engine.packing import Asked, Table, count_leading
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup
from tests.decoders.references.token_table import TokenTable


def drawn_spans(rng: np.random.Generator, num_samples: int) -> list[list[tuple[int, ...]]]:
    """One to three spans a sample, of one to five rows."""
    found = []
    for _ in range(num_samples):
        spans: list[tuple[int, ...]] = []
        for _ in range(int(rng.integers(1, 4))):
            count, first = int(rng.integers(1, 6)), int(rng.integers(0, 50))
            own = FAR if rng.random() < 0.5 else first
            asked = int(rng.integers(0, count + 1))
            floor, lag = (int(number) for number in rng.integers(0, (9, 3)))
            spans.append((count, first, first + 3, floor, lag, own, asked, first + 1, TARGET))
        if not sum(span[6] for span in spans):
            spans[-1] = (*spans[-1][:6], 1, *spans[-1][7:])
        found.append(spans)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_a_table_has_the_rows_of_a_plain_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = drawn_spans(rng, int(rng.integers(1, 6)))
    flat = [number for spans in samples for span in spans for number in span]
    owners = np.array([index for index, spans in enumerate(samples) for _ in spans])
    table = Table(flat, owners, len(samples))
    rows, answered = [], []
    for owner, spans in enumerate(samples):
        line = 0
        for count, column, position, floor, lag, own, asked, rank, _ in spans:
            for step in range(count):
                at = column + step
                rows.append((owner, line, at, position + step, max(floor, at + 1 - lag), own))
                if step >= count - asked:
                    answered.append((owner, line, rank + step - (count - asked)))
                line += 1
    assert table.num_rows == len(rows) and table.num_lines == max(line for _, line, *_ in rows) + 1
    columns = table.columns()
    assert [*zip(columns, table.positions(), table.limits(columns), table.own(), strict=True)] == [
        row[2:] for row in rows
    ]
    assert [*zip(table.owner_N, table.lines(), strict=True)] == [row[:2] for row in rows]
    first = [owner for owner, *_ in rows].index
    expected = [first(owner) + line for owner, line, _ in answered]
    places = table.asked_places()
    assert (list(range(len(rows))) if places is None else places.tolist()) == expected
    owners_R, lines_R = (np.array([row[part] for row in answered], dtype=np.int64) for part in (0, 1))
    assert table.places(owners_R, lines_R).tolist() == expected
    sizes = [sum(span[6] for span in spans) for spans in samples]
    slots = 10 + np.arange(len(samples))
    asked_rows = Asked.of(table, slots, [NO_DRAFT] * len(answered), sizes, [0] * len(samples))
    assert [*zip(asked_rows.owner_R, asked_rows.rank_R, strict=True)] == [(owner, rank) for owner, _, rank in answered]
    assert (asked_rows.slot_R == 10 + asked_rows.owner_R).all()


@pytest.mark.parametrize("seed", range(10))
def test_a_wide_row_sees_its_block_its_neighbours_or_itself(seed: int) -> None:
    rng = np.random.default_rng(seed)
    spans: list[int] = []
    seen = []
    for _ in range(8):
        count, column, floor, lag, grain = (int(number) for number in rng.integers((1, 0, 0, 0, 1), (6, 40, 50, 4, 6)))
        own, till = ((FAR, 0), (SELF, 0), (column, 0), (column, column + count))[rng.integers(0, 4)]
        spans += wide_span(count, column, column + 2, floor, lag, own=own, till=till, grain=grain)
        for at in range(column, column + count):
            limit = max(floor, (at // grain + 1) * grain - lag)
            first = at if own == SELF else own
            seen.append({*range(limit), *range(first, max(at + 1, till) if own < FAR else 0)})
    table = Table(spans, np.arange(8), 8, fields=WIDE)
    columns = table.columns()
    limits, firsts, ends = table.limits(columns), table.own(), table.till(columns)
    found = [{*range(limit), *range(first, end)} for limit, first, end in zip(limits, firsts, ends, strict=True)]
    assert found == seen


def test_an_ask_that_answers_more_rows_than_it_runs_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="more rows are answered than run"):
        Table([1, 0, 0, 0, 0, FAR, 2, 1, TARGET], np.array([0]), 1)
    assert len([1, 0, 0, 0, 0, FAR, 2, 1, TARGET]) == FIELDS


def test_a_span_without_rows_is_a_mistake() -> None:
    """Beside a span of two rows it would pass for spans of one row each."""
    with pytest.raises(AssertionError, match="a span without rows"):
        Table([*wide_span(2, 0, 0, 0), *wide_span(0, 2, 2, 0)], np.array([0, 0]), 1, fields=WIDE)


def test_leading_rows_are_counted_sample_by_sample() -> None:
    good = np.array([True, True, False, True, False, True, True])
    assert count_leading(good, np.array([3, 1, 1, 2])).tolist() == [2, 1, 0, 2]


def test_drawn_and_certain_drafts_in_one_forward_are_a_mistake() -> None:
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
