"""Unit files, the manifest and `_SUCCESS`: the promises of the run directory (docs/formats.md).

A unit's file is built in memory, re-opened and checked, and then created once; that it exists *is* the commit. Knows
nothing of how rows were made. Names in a run directory:

    data/unit-00000017.parquet      traces/unit-00000017.parquet      _manifest.json      _SUCCESS
    commits/unit-00000017.00000003a1b2c3d4.json     only on a store that ignores conditions: which of a unit's files
                                    counts, recorded by a driver of epoch 3. Of several records the highest epoch's counts
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa

from draftmill.storage.errors import DamagedRun, StoreError
from draftmill.storage.failpoints import failpoint
from draftmill.storage.inputs.kept import KEEP
from draftmill.storage.parquet import parquet_metadata, read_parquet, write_parquet
from draftmill.storage.runs.done import DoneUnits
from draftmill.storage.runs.lease import Lease, LeaseLost
from draftmill.storage.runs.manifest import (
    MANIFEST,
    SUCCESS,
    Manifest,
    all_exact,
    manifest_body,
    read_manifest,
    unit_numbers,
)
from draftmill.storage.runs.records import SCHEMA, SCHEMA_VERSION, damaged
from draftmill.storage.runs.unit_facts import CommittedUnit, UnitFacts, unit_name
from draftmill.storage.stores.interface import AlreadyExists, Body, Conflict, Stat, Store

__all__ = [
    "MANIFEST",
    "SUCCESS",
    "CommittedUnit",
    "ForeignUnit",
    "Manifest",
    "UnitFacts",
    "all_exact",
    "commit_unit",
    "done_units",
    "is_closed",
    "read_manifest",
    "read_record",
    "read_unit",
    "record_commit",
    "trace_name",
    "unit_name",
    "unit_number",
    "unit_numbers",
    "write_manifest",
]

_UNIT_FILE = re.compile(r"(?:data|commits|traces)/unit-(\d{8,})(?:\.[0-9a-f]+)?\.(?:parquet|json)")


class ForeignUnit(StoreError):
    """A unit's name is taken by the file of another job (another fingerprint, unit or pass): nothing was written."""


def trace_name(unit: int) -> str:
    """The name of a unit's decoder trace."""
    return f"traces/unit-{unit:08d}.parquet"


def commit_unit(
    store: Store,
    *,
    unit: int,
    table: pa.Table,
    fingerprint: str,
    code_version: str,
    pass_: int = 1,
    conditional: bool = True,
    attempt: int = 1,
    trace: pa.Table | None = None,
    exact: bool | None = None,
) -> CommittedUnit:
    """A unit is committed once: afterwards its file exists, whole and checked; returns that file's facts.

    If another attempt was first, its file stays and its facts are returned. Raises ForeignUnit if the name is held by
    another job. `conditional=False` (a store that fails `probe`) writes to a name unique to this attempt; then the driver
    decides with `record_commit`. The trace is written before the data, so that a committed unit has one.
    """
    counts = _counts(table) | ({} if exact is None else {"exact": str(exact).lower()})
    identity = {"fingerprint": fingerprint, "unit": str(unit), "pass": str(pass_)}
    described = identity | {"schema_version": str(SCHEMA_VERSION), "code_version": code_version}
    described["attempt"] = str(attempt)
    data = _checked_file(table, described | counts)
    suffix = "" if conditional else f".{secrets.token_hex(8)}"
    if trace is not None:
        _write_trace(store, _suffixed(trace_name(unit), suffix), write_parquet(trace, described))
    name = _suffixed(unit_name(unit), suffix)
    sha256 = hashlib.sha256(data).hexdigest()
    failpoint("commit.before_data")
    try:
        stat = store.create(name, data, metadata=identity | counts | {"sha256": sha256})
    except AlreadyExists:
        return read_unit(store, name, expected=identity)
    failpoint("commit.after_data")
    return _facts(unit, stat, counts, sha256)


def read_unit(store: Store, name: str, *, expected: Mapping[str, str] | None = None) -> CommittedUnit:
    """Return the facts of a committed file, from the store's metadata if it has them, else by reading the file.

    `expected` (fingerprint, unit, pass) must be the file's own, or ForeignUnit. Raises StoreError if it is damaged.
    """
    stat = store.stat(name)
    if stat is None:
        raise StoreError(f"{store.url}/{name} is gone")
    found = stat.metadata
    if "sha256" not in found:
        found = _read_facts(store, name)
    for key, value in (expected or {}).items():
        if found.get(key) != value:
            raise ForeignUnit(
                f"{store.url}/{name} belongs to another job: its {key} is {found.get(key)!r}, not {value!r}"
            )
    return _facts(int(found["unit"]), stat, found, found["sha256"])


def done_units(store: Store, *, conditional: bool = True) -> DoneUnits:
    """Return the committed units, from a single listing, with the names of the objects that commit them.

    Of several records of a unit the last by name counts, which has the highest epoch.
    """
    done = DoneUnits(unit_name)
    for stat in store.list("data/" if conditional else "commits/"):
        if match := _UNIT_FILE.fullmatch(stat.name):
            done.add(int(match[1]), stat.name)
    return done


def record_commit(store: Store, committed: CommittedUnit, *, epoch: int = 0) -> CommittedUnit:
    """The first record of a unit under an epoch stays; returns the recorded facts. Only the driver calls it.

    For a store that ignores conditions: a unit may have several files, and the record says which one counts. No record is
    ever overwritten: a driver that wakes up after its lease was taken over adds one of a lower epoch, which is ignored.
    """
    unit = f"commits/unit-{committed.unit:08d}"
    found = [stat.name for stat in store.list(f"{unit}.")]
    if not found or found[-1] < f"{unit}.{epoch:08x}":
        failpoint("commit.before_record")
        store.put(f"{unit}.{epoch:08x}{secrets.token_hex(4)}.json", _json(asdict(committed)))
        return committed
    return read_record(store, found[-1])


def unit_number(name: str) -> int | None:
    """The unit in the name of a unit's file; None for other names."""
    match = _UNIT_FILE.fullmatch(name)
    return int(match[1]) if match else None


def read_record(store: Store, name: str) -> CommittedUnit:
    """The facts of a unit that `record_commit` wrote; DamagedRun if they are damaged."""
    try:
        return CommittedUnit(**json.loads(store.get(name)))
    except (ValueError, TypeError) as error:
        raise DamagedRun(f"{store.url}/{name}", error, "delete it, and the next run repeats its unit") from None


def write_manifest(
    store: Store,
    committed: Iterable[CommittedUnit],
    *,
    fingerprint: str,
    units: int,
    rows: int,
    lease: Lease | None = None,
) -> Manifest:
    """Write `_manifest.json` and then `_SUCCESS`, or raise StoreError and write neither: totals must equal the plan's.

    `units` and `rows` are the plan's. With `lease`, a driver that has lost it raises LeaseLost and writes nothing, even if
    it lost the lease during the call, since what it read before may have changed. Idempotent.
    """
    facts = committed if isinstance(committed, UnitFacts) else UnitFacts(committed)
    manifest = Manifest(fingerprint, SCHEMA_VERSION, facts.ordered())
    _check_totals(manifest, units=units, rows=rows)
    failpoint("commit.before_manifest")
    with manifest_body(manifest) as body:
        _write_latest(store, MANIFEST, body, lease)
    failpoint("commit.before_success")
    _write_latest(store, SUCCESS, _json({"fingerprint": fingerprint, "units": units, "rows": rows}), lease)
    return manifest


def is_closed(store: Store) -> bool:
    """Whether the manifest and `_SUCCESS` both exist; one of them alone does not count, and is written again."""
    return store.exists(MANIFEST) and store.exists(SUCCESS)


def _counts(table: pa.Table) -> dict[str, str]:
    by_status = Counter(table.column("status").to_pylist())
    assert set(by_status) <= {"ok", "failed", "skipped"}, f"unknown status in {sorted(by_status)}"
    statuses = {status: str(by_status[status]) for status in ("ok", "failed", "skipped")}
    return {"rows": str(table.num_rows)} | statuses


def _checked_file(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    """The table as a Parquet file, read back to verify checksums, schema and row count."""
    own = table.schema.remove(table.schema.get_field_index(KEEP)) if KEEP in table.schema.names else table.schema
    assert own.equals(SCHEMA), "a unit's table has the schema of records.SCHEMA, and columns of the inputs"
    data = write_parquet(table, metadata)
    again = read_parquet(data)
    assert again.num_rows == table.num_rows, "rows were lost in writing"
    assert again.schema.equals(table.schema), "the schema changed in writing"
    assert again.column("id").equals(table.column("id")), "ids changed in writing"
    return data


def _write_trace(store: Store, name: str, data: bytes) -> None:
    failpoint("commit.before_trace")
    with suppress(AlreadyExists):  # an earlier attempt's trace of the same tokens
        store.create(name, data)


def _read_facts(store: Store, name: str) -> dict[str, str]:
    data = store.get(name)
    try:
        found = parquet_metadata(read_parquet(data, columns=["id"]).schema)
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged(store, name, error) from None
    if "unit" not in found:
        raise ForeignUnit(f"{store.url}/{name} was not written by draftmill")
    return found | {"sha256": hashlib.sha256(data).hexdigest()}


def _facts(unit: int, stat: Stat, counts: Mapping[str, str], sha256: str) -> CommittedUnit:
    rows, ok, failed, skipped = (int(counts[key]) for key in ("rows", "ok", "failed", "skipped"))
    exact = {"true": True, "false": False}.get(counts.get("exact", ""))
    return CommittedUnit(unit, stat.name, stat.etag, rows, ok, failed, skipped, stat.size, sha256, exact)


def _check_totals(manifest: Manifest, *, units: int, rows: int) -> None:
    numbers = unit_numbers(manifest)
    assert len(np.unique(numbers)) == len(numbers), "a unit is listed twice"
    held, rows_held = len(manifest.units), manifest.total("rows")
    if (held, rows_held) != (units, rows):
        raise StoreError(f"not complete: {held} of {units} units and {rows_held} of {rows} rows are committed")
    assert manifest.total("ok") + manifest.total("failed") + manifest.total("skipped") == rows


def _write_latest(store: Store, name: str, data: Body, lease: Lease | None) -> None:
    """Create, or replace what an earlier driver left; of two drivers at once, one raises LeaseLost.

    It reads the object, checks the lease, then writes if the object is unchanged: however long a driver pauses in between,
    it never replaces what a later one has written.
    """
    found = store.stat(name)
    if found is not None and found.size == len(data) and _is_same(store, name, data):
        return
    if lease is not None:
        lease.check()
    try:
        if found is None:
            store.create(name, data)
        else:
            store.replace(name, data, etag=found.etag)
    except (AlreadyExists, Conflict):
        raise LeaseLost(f"another driver has written {store.url}/{name} in the meantime") from None


def _is_same(store: Store, name: str, data: Body) -> bool:
    if isinstance(data, bytes):
        return store.get(name) == data
    at = 0
    for part in data.chunks():
        if store.get_range(name, at, len(part)) != part:
            return False
        at += len(part)
    return True


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, sort_keys=True) + "\n").encode()


def _suffixed(name: str, suffix: str) -> str:
    stem, dot, extension = name.rpartition(".")
    return f"{stem}{suffix}{dot}{extension}"
