"""Rows that asks name one by one: their chains, what is refused, and that nothing waits where none is asked about."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from draftmill.decoders.base import ModelInfo
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.algorithm import Algorithm, Notes
from draftmill.decoders.engine.asks import DRAFT, JUDGE, NO_DRAFT, TARGET, WIDE, Named, wide_span
from draftmill.decoders.engine.memory import Account
from draftmill.decoders.engine.named import NamedRows
from draftmill.decoders.engine.named_answers import NamedAnswers
from draftmill.decoders.engine.packing import Table
from draftmill.decoders.engine.parcels import Parcel
from draftmill.decoders.engine.setup import Setup
from tests.decoders.references.token_table import TokenTable

NOTHING = Named([], [], [], [], [], [], 0, 0)


def rows_of(asks: list[Named], num_rows: list[int]) -> NamedRows:
    spans = [number for count in num_rows for number in wide_span(count, 0, 0, count)]
    table = Table(spans, np.arange(len(asks)), len(asks), fields=WIDE)
    return NamedRows.of(asks, table, 10 + np.arange(len(asks)))


def named(rows: list[int], kinds: list[int], drafts: list[int] | None = None, *, first: int = 0) -> Named:
    count = len(rows)
    return Named(rows, list(rows), kinds, drafts or [NO_DRAFT] * count, [0] * count, [1.0] * count, first, 1)


def test_the_rows_that_judge_are_a_chain_wherever_they_stand() -> None:
    asks = [
        named([4, 0, 2], [JUDGE, DRAFT, JUDGE], [7, NO_DRAFT, 8]),
        NOTHING,
        named([1, 1], [DRAFT, TARGET]),
        named([0], [JUDGE], [5]),
    ]
    rows = rows_of(asks, [5, 2, 2, 1])
    chains = rows.chains()
    assert (
        chains.rows_J.tolist() == [0, 2, 5] and chains.size_C.tolist() == [2, 1] and chains.owner_C.tolist() == [0, 3]
    )
    assert chains.accepted(np.array([True, False, True]), 4).tolist() == [1, 0, 0, 1]
    assert chains.accepted(np.array([False, True, False]), 4).tolist() == [0, 0, 0, 0]
    assert rows.place_R.tolist() == [4, 0, 2, 8, 8, 9], "rows are numbered sample after sample"
    assert rows.slot_R.tolist() == [10, 10, 10, 12, 12, 13]
    assert rows.num_checked == 5, "a draft beside a verification waits for the next one"


def test_a_row_that_does_not_run_or_speaks_of_what_is_over_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="does not run"):
        rows_of([named([2], [TARGET]), NOTHING], [2, 5])
    with pytest.raises(AssertionError, match="before the first"):
        rows_of([named([1], [TARGET], first=2)], [2])


def test_a_forward_without_answered_rows_runs_no_output_layer() -> None:
    info = ModelInfo("token_table", 3, 2, None, "blocks", 0, (2,), 0)
    table = TokenTable(vocab_size=3, num_positions=4)
    setup = Setup(backbone=table, info=info, sampling=Sampling(), max_rows=2, max_tokens=9)
    algorithm = Algorithm(decode=lambda sample: iter(()), kind="blocks", notes=Notes())  # type: ignore[arg-type, return-value]
    answers = NamedAnswers(setup, algorithm, account=lambda: Account.unmeasured(torch.device("cpu")))
    lane: Any = None
    reading = answers.named(lane, rows_of([NOTHING, NOTHING], [3, 1]), Parcel())
    assert reading.work is None
    told = list(reading.read(np.zeros(0)))
    assert [(one.accepted, one.tokens) for one in told] == [(0, []), (0, [])]
