"""`input.dedupe: ids`: the ids that finished runs of a recurring job have as ok, which a new plan skips.

An id is done in a run if each of its samples is ok there, in the last pass that has it. The truth is in the results. A run whose
results were pruned has its ids in RUN/_ids.parquet.

    BASE/_ledger/2026-11-22.ids.parquet    a cache of a run's hashed ids: its results take 35 times as long
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from draftmill.jobs.formatting import Notes, counted
from draftmill.jobs.plan.id_sets import HASH_BYTES, IdIndex, column_of, hashes_in, hashes_of
from draftmill.jobs.plan.planning import Sift
from draftmill.jobs.results.passes import PRUNED, latest_rows, passes_of
from draftmill.jobs.results.runs import FoundRun
from draftmill.storage.errors import StoreError
from draftmill.storage.failpoints import failpoint
from draftmill.storage.parquet import parquet_metadata, read_parquet, write_parquet
from draftmill.storage.runs.commit import MANIFEST
from draftmill.storage.stores.interface import Store, level_of

IDS = "_ids.parquet"
"""In a pruned run: the hashes of its ids that are ok."""

SCHEMA = pa.schema([("id", pa.binary(HASH_BYTES))])


@contextmanager
def sifting(base: Store, runs: Sequence[FoundRun], display: Notes) -> Iterator[Sift]:
    """During the block, a function that skips the rows whose ids these finished runs have as ok.

    Call it under the lease of the name, since it brings the cache up to date. At the end a note says how many rows were skipped.
    """
    skipped = 0
    with IdIndex() as index:
        for run in runs:
            index.add(hashes_in(ids_of(base, run)["id"]))

        def sift(table: pa.Table) -> pa.Table:
            nonlocal skipped
            is_done = index.has(table["id"].to_pylist())
            skipped += int(is_done.sum())
            return table.filter(pa.array(~is_done))

        yield sift
    display.note(
        f"dedupe: {counted(skipped, 'row')} left out, whose ids {counted(len(runs), 'finished run')} have as ok"
    )


def ids_of(base: Store, run: FoundRun) -> pa.Table:
    """A table of SCHEMA with the hashed ids that are ok in a finished run; enters it into the cache."""
    if PRUNED in run.level.files:
        return read_parquet(run.store.get(IDS)).replace_schema_metadata(None)
    name = f"_ledger/{run.name.replace('/', '~')}.ids.parquet"  # the character between folders is in no date
    facts = _version(run)
    try:
        table = read_parquet(base.get(name))
        if parquet_metadata(table.schema) == facts and table.schema.equals(SCHEMA):
            return table.replace_schema_metadata(None)
    except (StoreError, pa.ArrowInvalid, OSError):  # missing or damaged
        pass
    table = ok_ids(run.store)
    failpoint("ledger.before_cache")
    base.put(name, write_parquet(table, facts))
    return table


def ok_ids(store: Store) -> pa.Table:
    """The same from the run's results."""
    ok, others = [hashes_of([])], [hashes_of([])]
    for table in latest_rows(passes_of(store), columns=["id", "status"]):
        is_ok = pc.equal(table["status"], "ok")
        ok.append(hashes_of(table.filter(is_ok)["id"].to_pylist()))
        others.append(hashes_of(table.filter(pc.invert(is_ok))["id"].to_pylist()))
    # Of several samples of a row one may have failed.
    return pa.table({"id": column_of(np.concatenate(ok), without=np.concatenate(others))}, schema=SCHEMA)


def _version(run: FoundRun) -> dict[str, str]:
    """What a cached table was made of: this run, not another one that had its name, and so many later passes with more ids."""
    assert run.success is not None, run.name
    folders = level_of(run.store, "passes").folders if "passes" in run.level.folders else ()
    passes = sum(MANIFEST in level_of(run.store, f"passes/{name}").files for name in folders)
    return {"format": "1", "success": run.success.etag, "passes": str(passes)}
