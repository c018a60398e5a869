"""The inputs of the finished runs of a recurring job.

The truth is in the runs: a run with `_SUCCESS` has done the inputs of its `_plan.json`. BASE/_ledger/ caches the inputs of
each plan, since a plan also lists every unit. What is missing or stale there is read from the plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from draftmill.jobs.plan.plan import load_plan
from draftmill.jobs.recurring.runs_below import FoundRun
from draftmill.storage.errors import StoreError
from draftmill.storage.failpoints import failpoint
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.parquet import parquet_metadata, read_parquet, write_parquet
from draftmill.storage.stores.interface import Store
from draftmill.storage.stores.parallel import parallel_map

FOLDER = "_ledger/"
FORMAT = "1"

LEDGER = pa.schema(
    [
        ("uri", pa.string()),
        ("name", pa.string()),
        ("size", pa.int64()),
        ("etag", pa.string()),
        ("mtime_s", pa.float64()),
        ("sha256", pa.string()),
    ]
)


def done_inputs(base: Store, runs: Sequence[FoundRun], *, keep: bool) -> pa.Table:
    """A table of LEDGER with the inputs of these runs, which are finished. With `keep`, plans that are read enter the cache."""
    tables = [LEDGER.empty_table()]
    for _, table in parallel_map(base, runs, lambda run: _inputs_of(base, run, keep=keep)):
        tables.append(table.result())
    return pa.concat_tables(tables)


def ledger_name(run: FoundRun, kind: str) -> str:
    """The cache's object for a run; `kind` is inputs or ids. The character between folders is in no date."""
    return f"{FOLDER}{run.name.replace('/', '~')}.{kind}.parquet"


def table_of(files: Sequence[InputFile]) -> pa.Table:
    """Inputs as a table of LEDGER."""
    columns = {name: [getattr(file, name) for file in files] for name in LEDGER.names}
    return pa.table(columns, schema=LEDGER)


def cached(base: Store, run: FoundRun, kind: str, schema: pa.Schema, *, passes: str = "") -> pa.Table | None:
    """A table of the cache; None if it is missing, damaged, or of another run that had this name (or had fewer `passes`)."""
    try:
        table = read_parquet(base.get(ledger_name(run, kind)))
    except (StoreError, pa.ArrowInvalid, OSError):
        return None
    if parquet_metadata(table.schema) != _described(run, passes) or not table.schema.equals(schema):
        return None
    return table.replace_schema_metadata(None)


def cache(base: Store, run: FoundRun, kind: str, table: pa.Table, *, passes: str = "") -> None:
    """Put a table into the cache."""
    failpoint("ledger.before_cache")
    base.put(ledger_name(run, kind), write_parquet(table, _described(run, passes)))


def _described(run: FoundRun, passes: str) -> dict[str, str]:
    assert run.success is not None, run.name
    return {"format": FORMAT, "success": run.success.etag, "passes": passes}


def _inputs_of(base: Store, run: FoundRun, *, keep: bool) -> pa.Table:
    table = cached(base, run, "inputs", LEDGER)
    if table is None:
        plan = load_plan(run.store)
        table = table_of(() if plan is None else plan.files)  # the run was deleted in this moment
        if keep and plan is not None:
            cache(base, run, "inputs", table)
    return table
