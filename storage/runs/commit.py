"""Unit files, the manifest and `_SUCCESS`: the promises of the run directory (docs/formats.md).

A unit's file is built in memory, re-opened and checked, and then created once; that it exists *is* the commit. Knows
nothing of how rows were made. Names in a run directory:

    data/unit-00000017.parquet      traces/unit-00000017.parquet      _manifest.json      _SUCCESS
    commits/unit-00000017.00000003a1b2c3d4.json     only on a store that ignores conditions: which of a unit's files
                                    counts, recorded by a driver of epoch 3. Of several records the highest epoch's counts
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from storage.errors import DamagedRun, StoreError
from storage.failpoints import failpoint
from storage.inputs.kept import KEEP
from storage.parquet import parquet_metadata, read_parquet, write_parquet
from storage.runs.done import DoneUnits
from storage.runs.lease import Lease, LeaseLost
from storage.runs.records import SCHEMA, SCHEMA_VERSION, damaged
from storage.stores.verbs import AlreadyExists, Conflict, Stat, Store

MANIFEST = "_manifest.json"
SUCCESS = "_SUCCESS"

_UNIT_FILE = re.compile(r"(?:data|commits|traces)/unit-(\d{8,})(?:\.[0-9a-f]+)?\.(?:parquet|json)")


class ForeignUnit(StoreError):
    """A unit's name is taken by the file of another job (another fingerprint, unit or pass): nothing was written."""


@dataclass(frozen=True, slots=True)
class CommittedUnit:
    """The facts of one committed unit, as a receipt carries them and the manifest lists them; `bytes` of the file."""

    unit: int
    object: str
    etag: str
    rows: int
    ok: int
    failed: int
    skipped: int
    bytes: int
    sha256: str
    exact: bool | None = None
    """Whether its worker's results have the same bits in any batch; None if unknown (files of earlier versions)."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a finished job holds: every unit once, in order."""

    fingerprint: str
    schema_version: int
    units: tuple[CommittedUnit, ...]

    def total(self, fact: str) -> int:
        """Sum of rows, ok, failed, skipped or bytes over all units."""
        return sum(getattr(unit, fact) for unit in self.units)

    @property
    def exact(self) -> bool | None:
        """Whether every unit's results have the same bits in any batch; None if that is unknown for a unit."""
        return all_exact(unit.exact for unit in self.units)


def all_exact(parts: Iterable[bool | None]) -> bool | None:
    """True if all are, False if one is not, else None (unknown)."""
    found = set(parts)
    return False if False in found else None if None in found or not found else True


def unit_name(unit: int) -> str:
    """The name of a unit's results in its run directory."""
    return f"data/unit-{unit:08d}.parquet"


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
    listed = tuple(sorted(committed, key=lambda item: item.unit))
    manifest = Manifest(fingerprint, SCHEMA_VERSION, listed)
    _check_totals(manifest, units=units, rows=rows)
    failpoint("commit.before_manifest")
    _write_latest(store, MANIFEST, _manifest_json(manifest), lease)
    failpoint("commit.before_success")
    _write_latest(store, SUCCESS, _json({"fingerprint": fingerprint, "units": units, "rows": rows}), lease)
    return manifest


def is_closed(store: Store) -> bool:
    """Whether the manifest and `_SUCCESS` both exist; one of them alone does not count, and is written again."""
    return store.exists(MANIFEST) and store.exists(SUCCESS)


def read_manifest(store: Store) -> Manifest | None:
    """Return the manifest, None if the job has not finished; DamagedRun if it is damaged."""
    if not store.exists(MANIFEST):
        return None
    try:
        found = json.loads(store.get(MANIFEST))
        listed = tuple(CommittedUnit(**unit) for unit in found["units"])
        return Manifest(found["fingerprint"], found["schema_version"], listed)
    except (ValueError, KeyError, TypeError) as error:
        remedy = f"delete it and {SUCCESS}, and `draftmill run` writes them again"
        raise DamagedRun(f"{store.url}/{MANIFEST}", error, remedy) from None


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
    assert len({item.unit for item in manifest.units}) == len(manifest.units), "a unit is listed twice"
    held, rows_held = len(manifest.units), manifest.total("rows")
    if (held, rows_held) != (units, rows):
        raise StoreError(f"not complete: {held} of {units} units and {rows_held} of {rows} rows are committed")
    assert manifest.total("ok") + manifest.total("failed") + manifest.total("skipped") == rows


def _write_latest(store: Store, name: str, data: bytes, lease: Lease | None) -> None:
    """Create, or replace what an earlier driver left; of two drivers at once, one raises LeaseLost.

    It reads the object, checks the lease, then writes if the object is unchanged: however long a driver pauses in between,
    it never replaces what a later one has written.
    """
    found = store.stat(name)
    if found is not None and store.get(name) == data:
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


def _manifest_json(manifest: Manifest) -> bytes:
    """Write one unit per line, so that a large manifest can be searched and compared with plain tools."""
    sums = {fact: manifest.total(fact) for fact in ("rows", "ok", "failed", "skipped", "bytes")}
    totals = {"units": len(manifest.units)} | sums
    head = {"schema_version": manifest.schema_version, "fingerprint": manifest.fingerprint, "exact": manifest.exact}
    head |= {"totals": totals}
    out = io.BytesIO()
    out.write(f'{json.dumps(head)[:-1]}, "units": ['.encode())
    for number, unit in enumerate(manifest.units):
        facts = {name: getattr(unit, name) for name in CommittedUnit.__slots__}  # asdict takes three times as long
        out.write(f"{',' if number else ''}\n{json.dumps(facts)}".encode())
    out.write(b"\n]}\n")
    return out.getvalue()


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, sort_keys=True) + "\n").encode()


def _suffixed(name: str, suffix: str) -> str:
    stem, dot, extension = name.rpartition(".")
    return f"{stem}{suffix}{dot}{extension}"
