"""A finished run as the input of a job (`input.run`): its rows, filtered, as Parquet files in the job's own run directory.

    RUN/input/1f3a9c2e4b5d/rows-00000.parquet    rows that are ok, from the last pass that has them, with their metrics
    RUN/input/1f3a9c2e4b5d/source.json           which run they are from, and how many of its rows these are

The folder's name is a digest of the run's state and the filter, so that planning again after a crash writes the same files. A
later pass or measurement of that run is another state: a job that was planned with the earlier one is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.plan.fingerprint import digest
from draftmill.jobs.plan.resolve import Resolved, copied_folder
from draftmill.jobs.results.passes import Pass, finished_passes, joined, latest_rows, passes_of
from draftmill.storage.errors import DamagedRun, UserError
from draftmill.storage.inputs.inputs import list_inputs
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.inputs.where import parse_where
from draftmill.storage.json_text import parse_json
from draftmill.storage.parquet import write_parquet
from draftmill.storage.runs.metric_files import KEYS, read_metrics
from draftmill.storage.runs.records import without_dictionaries
from draftmill.storage.stores.store import AlreadyExists, Store, open_store

BATCH_ROWS: Final = 65_536
"""About how many rows of the run are read for one file."""

SOURCE: Final = "source.json"


def with_run_rows(resolved: Resolved, store: Store) -> Resolved:
    """The job with the rows of its `input.run` as inputs, which are written into `store`; a job with other inputs as it is.

    For a run directory, call it under the lease. UserError, and nothing is written, if no row is left, or if the filter does not
    fit the columns.
    """
    settings = resolved.spec.input
    if settings.run is None or resolved.plan is not None:
        return resolved
    run = resolved.results["input"]["run"]
    folder = f"input/{digest([run, settings.where])[:12]}"
    passes = finished_passes(passes_of(open_store(resolved.spec.place(settings.run))))
    several = passes[0].plan.spec.sampling.n > 1  # ids must be unique
    rows = kept = files = 0
    for table in run_rows(passes):
        chosen = _filtered(table, settings.where)
        if several:
            chosen = chosen.set_column(chosen.schema.get_field_index("id"), "id", _names(chosen))
        rows, kept = rows + table.num_rows, kept + chosen.num_rows
        if chosen.num_rows:
            _create(store, f"{folder}/rows-{files:05d}.parquet", write_parquet(chosen, {}))
            files += 1
    if not kept:
        asked = "rows that are ok" if settings.where is None else f"rows with {settings.where!r}"
        raise UserError(
            f"{settings.run} has no {asked}, of {rows:,}", field="input.where" if settings.where else "input.run"
        )
    source = {"run": settings.run, **run, "where": settings.where, "rows": rows, "kept": kept}
    _create(store, f"{folder}/{SOURCE}", (json.dumps(source) + "\n").encode())
    return replace(resolved, inputs=list_inputs(store.place.below(folder)))


def source_of(spec: JobSpec, files: Sequence[InputFile], store: Store) -> dict[str, Any] | None:
    """Which run the rows in these files of a run directory are from, and how many it has; None if the input is no run."""
    if spec.input.run is None:
        return None
    name = f"{copied_folder(files)}/{SOURCE}"
    try:
        source: dict[str, Any] = parse_json(store.get(name))
        return {"run": str(source["run"]), "rows": int(source["rows"]), "kept": int(source["kept"])} | source
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise DamagedRun(f"{store.url}/{name}", error, "use another output.path") from None


def run_rows(passes: Sequence[Pass]) -> Iterator[pa.Table]:
    """Yield all rows of a finished run, with a column for each metric, in tables of about BATCH_ROWS.

    UserError if a metric has the name of a column.
    """
    metrics = read_metrics(passes[0].store)
    plain = (table.cast(without_dictionaries(table.schema)) for table in latest_rows(passes))
    for table in joined(plain, BATCH_ROWS):
        if metrics is None:
            yield table
            continue
        names = [name for name in metrics.column_names if name not in KEYS.names]
        if clash := [name for name in names if name in table.column_names]:
            raise UserError(f"the run has a metric with the name of a column, {clash[0]!r}", field="input.run")
        places = pc.index_in(_names(table), value_set=_names(metrics).combine_chunks())
        columns = [*table.columns, *(metrics[name].take(places) for name in names)]
        yield pa.table(columns, names=[*table.column_names, *names])


def _names(table: pa.Table) -> pa.ChunkedArray:
    """ID:SAMPLE of each row."""
    return pc.binary_join_element_wise(table["id"], pc.cast(table["sample"], pa.string()), ":")


def _filtered(table: pa.Table, where: str | None) -> pa.Table:
    """The rows that are ok, and for which the filter is true."""
    fine = pc.field("status") == "ok"
    try:
        return table.filter(fine if where is None else fine & parse_where(where))
    except (pa.ArrowException, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"{where!r}: {reason}; the run has the columns {', '.join(table.column_names)}", field="input.where"
        ) from None


def _create(store: Store, name: str, data: bytes) -> None:
    with suppress(AlreadyExists):  # of a driver that was interrupted
        store.create(name, data)
