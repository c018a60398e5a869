"""Result rows in the order of the inputs, out of core, for `draftmill export --order input`.

A plan sorts rows by length, but only within a window of the input. So its units form groups that are consecutive in the input:
a group ends after a unit if all rows so far precede all rows of later units. A group is at most a window, 65,536 rows or 2^25
tokens by default, and only one group is in memory at a time. The groups are computed from the plan's row numbers alone,
sixteen bytes per unit.

    units        |  7 3 9  |  4 8 1  |  12 10  |  11 14 |        numbers of rows in the input
    groups       |---------|---------|         |        |        {1 3 4 7 8 9}
                                     |------------------|        {10 11 12 14}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from draftmill.jobs.plan.plan import Plan

ROW_BITS = 40
"""A place in the input is the file's number, and the row's number in the lower 40 bits: enough for 10^12 rows in a file."""

AT_ONCE = 4096
"""Rows of each table that is yielded."""


def in_input_order(plan: Plan, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the rows of `tables`, one for each unit of the plan in the plan's order, in the order of the inputs."""
    units = iter(zip(plan.tables(["file", "row"]), tables, strict=True))
    for count in groups(plan):
        held = list(islice(units, count))
        order = np.argsort(np.concatenate([places(planned) for planned, _ in held]), kind="stable")
        joined = pa.concat_tables([table for _, table in held]).unify_dictionaries()
        del held
        for start in range(0, joined.num_rows, AT_ONCE):
            yield joined.take(pa.array(order[start : start + AT_ONCE]))


def groups(plan: Plan) -> Iterator[int]:
    """Yield the number of units in each group, in order. Groups are as small as possible."""
    spans = [(int(found.min()), int(found.max())) for found in map(places, plan.tables(["file", "row"])) if len(found)]
    firsts, lasts = np.asarray(spans, dtype=np.int64).reshape(-1, 2).T
    to_come = np.minimum.accumulate(firsts[::-1])[::-1]  # the first row that this unit or a later one holds
    so_far = np.maximum.accumulate(lasts)
    ends = np.flatnonzero(np.append(so_far[:-1] < to_come[1:], [True] * (len(lasts) > 0))) + 1
    yield from np.diff(ends, prepend=0).tolist()


def places(planned: pa.Table) -> NDArray[np.int64]:
    """The positions of unit table rows in the input, as numbers that sort in input order; int64 [rows]."""
    files = planned["file"].to_numpy().astype(np.int64)
    return (files << ROW_BITS) + planned["row"].to_numpy()
