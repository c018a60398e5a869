"""The columns of a run that comparisons need, in memory: numbers, ids, and a hash in the place of each text."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from draftmill.actors.metrics.settings import KINDS, Better, better_of
from draftmill.jobs.compare.runs import FinishedRun
from draftmill.jobs.results.passes import latest_rows
from draftmill.storage.errors import StoreError
from draftmill.storage.runs.metric_files import metric_sets, read_metrics

COUNTS: Final = ("prompt_tokens", "new_tokens", "nfe", "nfe_draft", "iterations", "proposed", "accepted")
SCORES: Final = ("logprob", "is_greedy")
"""Columns of a scored row that are compared like metrics."""

By = Literal["tokens", "text"]


@dataclass(frozen=True, slots=True)
class RunRows:
    """The rows of a run in plan order, N samples. Counts and seconds are 0 where null; a metric is NaN where a row has none.

    `better` says of each metric which values are better, None where that is not known; the values of `proportions` are 0 or 1 by
    their kind, if a row has one sample. `digest_N` is a 64-bit hash of the
    tokens (or the text) in this process; two different ones are equal with probability 2**-64.
    """

    ids: pa.ChunkedArray
    sample_N: NDArray[np.int32]
    ok_N: NDArray[np.bool_]
    key_N: NDArray[np.uint64]
    digest_N: NDArray[np.int64]
    counts: dict[str, NDArray[np.int32]]
    device_s_N: NDArray[np.float64]
    metrics: dict[str, NDArray[np.float64]]
    better: dict[str, Better | None] = field(default_factory=dict)
    proportions: frozenset[str] = frozenset()

    @property
    def num_rows(self) -> int:
        """Samples of the run."""
        return len(self.sample_N)


def read_rows(run: FinishedRun, *, by: By = "tokens") -> RunRows:
    """Read a run, one unit file at a time. Takes about 80 bytes a sample, its id, and 8 bytes for each metric; twice that while
    it reads.

    Metrics come from the run's `metrics/`, from the column `metrics`, and for scored texts from SCORES.
    """
    scores = [name for name in SCORES if run.plan.spec.task.kind == "score"]
    columns = ["id", "status", "sample", "key", by, *COUNTS, "device_s", "metrics", *scores]
    table = pa.concat_tables(_with_digests(table, by) for table in latest_rows(run.passes, columns=columns))
    ids, sample_N = table["id"].cast(pa.string()), numbers(table, "sample", np.int32)
    metrics = {one.name: _values(pc.struct_field(table["metrics"], one.name)) for one in table["metrics"].type}
    metrics |= {name: _values(table[name]) for name in scores}
    metrics = {name: values for name, values in metrics.items() if not np.isnan(values).all()}
    metrics |= metrics_of_files(run, ids, sample_N)
    known = [metric for metric_set in metric_sets(run.store).values() for metric in metric_set.metrics]
    kinds = {column: str(metric.settings.get("kind")) for metric in known for column in metric.columns}
    return RunRows(
        ids,
        sample_N,
        np.asarray(pc.equal(table["status"], "ok")),
        numbers(table, "key", np.uint64),
        table[by].to_numpy(),
        {name: numbers(table, name, np.int32) for name in COUNTS},
        numbers(table, "device_s", np.float64),
        dict(sorted(metrics.items())),
        {name: better_of(kinds.get(name), name) for name in metrics},
        frozenset(
            name
            for name in metrics
            if name == "is_greedy" or getattr(KINDS.get(kinds.get(name) or ""), "is_proportion", False)
        ),
    )


def _with_digests(table: pa.Table, by: By) -> pa.Table:
    """The table with a 64-bit hash in the place of each list of tokens, or of each text; 0 for null."""
    column = table[by].combine_chunks()
    if by == "tokens":
        offsets, values = column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=False)
        pieces = (values[start:end].tobytes() for start, end in pairwise(offsets))
    else:
        pieces = ((text or "").encode() for text in column.to_pylist())
    digests = [hash(piece) if there else 0 for piece, there in zip(pieces, column.is_valid().to_pylist(), strict=True)]
    return table.set_column(table.column_names.index(by), by, pa.array(digests, pa.int64()))


def numbers(table: pa.Table, name: str, kind: Any) -> NDArray[Any]:
    """A column with 0 in the place of nulls."""
    return np.asarray(table[name].fill_null(0).to_numpy(), dtype=kind)


def _values(column: pa.ChunkedArray) -> NDArray[np.float64]:
    """A column with NaN in the place of nulls."""
    return np.asarray(column.cast(pa.float64()).to_numpy(), np.float64)


def metrics_of_files(
    run: FinishedRun, ids: pa.ChunkedArray, sample_N: NDArray[np.int32]
) -> dict[str, NDArray[np.float64]]:
    """The metrics that `draftmill measure` wrote, in the order of the rows; NaN where a row has none."""
    table = read_metrics(run.store)
    if table is None:
        return {}
    place_N, row_M = positions(ids, sample_N, table["id"], numbers(table, "sample", np.int32))
    if len(row_M) != table.num_rows:
        raise StoreError(f"{run.store.url}/metrics has rows that are not in the run; measure it again")
    columns = {name: np.full(len(sample_N), np.nan) for name in table.column_names[2:]}
    for name, values in columns.items():
        values[place_N] = _values(table[name])[row_M]
    return {name: values for name, values in columns.items() if not np.isnan(values).all()}


def positions(
    ids: pa.ChunkedArray, sample_N: NDArray[np.int32], other_ids: pa.ChunkedArray, other_sample_M: NDArray[np.int32]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where (id, sample) is in both: positions in the first, in its order, and the matching ones in the second."""
    row_N, row_M = row_numbers(ids, ids), row_numbers(ids, other_ids)
    span = max(sample_N.max(initial=0), other_sample_M.max(initial=0)) + 1
    key_N, key_M = row_N * span + sample_N, row_M * span + other_sample_M
    valid_M = np.flatnonzero(row_M >= 0)
    _, place_N, place_M = np.intersect1d(key_N, key_M[valid_M], return_indices=True)
    order = np.argsort(place_N)
    return place_N[order], valid_M[place_M[order]]


def row_numbers(ids: pa.ChunkedArray, of: pa.ChunkedArray) -> NDArray[np.int64]:
    """The number of each of the ids `of` among the distinct `ids`, in their order; -1 where it is not among them."""
    return np.asarray(pc.index_in(of, value_set=pc.unique(ids)).fill_null(-1).to_numpy(), dtype=np.int64)
