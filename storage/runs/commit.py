"""Unit files, the manifest and `_SUCCESS`: the promises of the run directory (docs/formats.md).

A unit's file is built in memory, re-opened and checked, and then created once; that it exists *is* the commit. Knows
nothing of how rows were made. Names in a run directory:

    data/unit-00000017.parquet      traces/unit-00000017.parquet      _manifest.json      _SUCCESS
"""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
from pydantic import InstanceOf

from draftmill.storage.errors import DamagedRun, StoreError
from draftmill.storage.failpoints import failpoint
from draftmill.storage.inputs.kept import KEEP
from draftmill.storage.json_text import parse_as, parse_json, shaped
from draftmill.storage.parquet import parquet_metadata, read_parquet, write_parquet
from draftmill.storage.runs.done_units import DoneUnits
from draftmill.storage.runs.lease import Lease, LeaseLost
from draftmill.storage.runs.records import SCHEMA, SCHEMA_VERSION, Sums, damage_error, sum_up
from draftmill.storage.runs.unit_facts import CommittedUnit, UnitFacts, unit_name
from draftmill.storage.stores.store import AlreadyExists, Conflict, NotFound, Stat, Store

MANIFEST = "_manifest.json"
SUCCESS = "_SUCCESS"

FACTS: Final = ("rows", "ok", "failed", "skipped", "bytes")

_LISTED: Final = tuple(name for name in CommittedUnit.__slots__ if name != "sums")
_OPENS: Final = b', "units": ['
_CLOSES: Final = b"]}"
_UNIT_FILE = re.compile(r"data/unit-(\d{8,})\.parquet")


def trace_name(unit: int) -> str:
    return f"traces/unit-{unit:08d}.parquet"


def commit_unit(
    store: Store,
    *,
    unit: int,
    table: pa.Table,
    fingerprint: str,
    code_version: str,
    pass_: int = 1,
    attempt: int = 1,
    trace: pa.Table | None = None,
    exact: bool | None = None,
) -> CommittedUnit:
    """A unit is committed once: afterwards its file exists, whole and checked; returns that file's facts.

    If another attempt was first, its file stays and its facts are returned. Raises StoreError, and writes nothing, if the
    name is held by another job: another fingerprint, unit or pass. The trace is written before the data, so that a committed
    unit has one; the data's metadata has its hash.
    """
    sums = sum_up([table])
    assert sums.ok + sums.failed + sums.skipped == sums.rows, "a row has an unknown status"
    counts = {name: str(getattr(sums, name)) for name in ("rows", "ok", "failed", "skipped")}
    counts |= {} if exact is None else {"exact": str(exact).lower()}
    counts |= {"sums": text} if (text := sums.to_text()) else {}
    identity = {"fingerprint": fingerprint, "unit": str(unit), "pass": str(pass_)}
    versions = {"schema_version": str(SCHEMA_VERSION), "code_version": code_version, "attempt": str(attempt)}
    name, trace_data = unit_name(unit), b""
    if trace is not None:
        failpoint("commit.before_trace")
        trace_data = write_parquet(trace, identity | versions)
        counts["trace_sha256"] = hashlib.sha256(trace_data).hexdigest()
        try:
            store.create(trace_name(unit), trace_data)
        except AlreadyExists as taken:  # by an attempt that has committed nothing yet, unless the data is there
            if not store.exists(name):
                with suppress(Conflict):
                    store.replace(trace_name(unit), trace_data, etag=taken.stat.etag)
    data = _write_checked(table, identity | versions | counts)
    sha256 = hashlib.sha256(data).hexdigest()
    failpoint("commit.before_data")
    try:
        stat = store.create(name, data, metadata=identity | counts | {"sha256": sha256})
    except AlreadyExists:
        return read_unit(store, name, expected=identity)
    failpoint("commit.after_data")
    if trace_data and store.get(trace_name(unit)) != trace_data:  # another attempt wrote at the same time
        store.put(trace_name(unit), trace_data)
    return _facts(unit, stat, counts, sha256)


def read_unit(store: Store, name: str, *, expected: Mapping[str, str] | None = None) -> CommittedUnit:
    """Return the facts of a committed file, from the store's metadata if it has them, else by reading the file.

    `expected` (fingerprint, unit, pass) must be the file's own. Raises StoreError if they are not, or if it is damaged.
    """
    stat = store.stat(name)
    if stat is None:
        raise StoreError(f"{store.url}/{name} is gone")
    metadata = stat.metadata if "sha256" in stat.metadata else _read_metadata(store, name)
    require_identity(store, name, metadata, expected or {})
    return _facts(int(metadata["unit"]), stat, metadata, metadata["sha256"])


def require_identity(store: Store, name: str, metadata: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raise StoreError unless a file's metadata has all that is `expected`."""
    for key, value in expected.items():
        if metadata.get(key) != value:
            reason = f"its {key} is {metadata.get(key)!r}, not {value!r}"
            raise StoreError(f"{store.url}/{name} belongs to another job: {reason}")


def done_units(store: Store) -> DoneUnits:
    """Return the committed units, from a single listing."""
    done = DoneUnits()
    for stat in store.list("data/"):
        if (unit := unit_number(stat.name)) is not None:
            done.add(unit)
    return done


def unit_number(name: str) -> int | None:
    """The unit in the name of a unit's file; None for other names."""
    match = _UNIT_FILE.fullmatch(name)
    return int(match[1]) if match and name == unit_name(int(match[1])) else None


def _write_checked(table: pa.Table, metadata: Mapping[str, str]) -> bytes:
    """The table as a Parquet file, read back to verify checksums, schema and row count."""
    own = table.schema.remove(table.schema.get_field_index(KEEP)) if KEEP in table.schema.names else table.schema
    assert own.equals(SCHEMA), "a unit's table has the schema of records.SCHEMA, and columns of the inputs"
    data = write_parquet(table, metadata)
    again = read_parquet(data)
    assert again.num_rows == table.num_rows, "rows were lost in writing"
    assert again.schema.equals(table.schema), "the schema changed in writing"
    assert again.column("id").equals(table.column("id")), "ids changed in writing"
    return data


def _read_metadata(store: Store, name: str) -> dict[str, str]:
    data = store.get(name)
    try:
        metadata = parquet_metadata(read_parquet(data, columns=["id"]).schema)
    except (pa.ArrowInvalid, OSError) as error:
        raise damage_error(store, name, error) from None
    if "unit" not in metadata:
        raise StoreError(f"{store.url}/{name} was not written by draftmill")
    return metadata | {"sha256": hashlib.sha256(data).hexdigest()}


def _facts(unit: int, stat: Stat, counts: Mapping[str, str], sha256: str) -> CommittedUnit:
    rows, ok, failed, skipped = (int(counts[key]) for key in ("rows", "ok", "failed", "skipped"))
    exact = {"true": True, "false": False}.get(counts.get("exact", ""))
    sums = counts.get("sums", "")
    return CommittedUnit(unit, stat.name, stat.etag, rows, ok, failed, skipped, stat.size, sha256, exact, sums)


# ---- the manifest


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a finished job holds: every unit once, in order. `totals` are those that the file has, if it was read.

    `source` says of a job whose input is a run which run that is, and how many of its rows were read and kept. `sums` are those
    over all rows; None if they are unknown. `ways` are the shares of the tokens by what drafted, where the clock chose it.
    """

    fingerprint: str
    schema_version: int
    units: InstanceOf[UnitFacts]
    totals: dict[str, int] | None = field(default=None, compare=False)
    source: dict[str, Any] | None = None
    sums: Sums | None = field(default=None, compare=False)
    ways: dict[str, float] | None = None

    def total(self, fact: str) -> int:
        """Sum of rows, ok, failed, skipped or bytes over all units."""
        return self.units.total(fact)

    @property
    def exact(self) -> bool | None:
        """Whether every unit's results have the same bits in any batch; None if that is unknown for a unit."""
        return all_exact(self.units.exacts())


def all_exact(parts: Iterable[bool | None]) -> bool | None:
    """True if all are, False if one is not, else None (unknown)."""
    values = set(parts)
    return False if False in values else None if None in values or not values else True


def read_manifest(store: Store) -> Manifest | None:
    """Return the manifest, None if the job has not finished; DamagedRun if it is damaged."""
    try:
        data = store.get(MANIFEST)
    except NotFound:
        return None
    units = UnitFacts()
    try:
        return shaped(Manifest, _read_units(data, units) | {"units": units})
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        remedy = f"delete it and {SUCCESS}, and `draftmill run` writes them again"
        raise DamagedRun(f"{store.url}/{MANIFEST}", error, remedy) from None


def _read_units(data: bytes, units: UnitFacts) -> dict[str, Any]:
    """Read the units into `units`, line by line, and return the rest. Raises ValueError, KeyError or TypeError if damaged."""
    lines = io.BytesIO(data)
    first = lines.readline().rstrip(b"\n")
    if not first.endswith(_OPENS):  # written by another program, with other line ends
        manifest: dict[str, Any] = parse_json(data)
        for facts in manifest["units"]:
            units.add(shaped(CommittedUnit, facts))
        return manifest
    for line in (line.removesuffix(b"\n") for line in lines):
        if line == _CLOSES:
            break
        units.add(parse_as(CommittedUnit, line.removesuffix(b",")))
    else:
        raise ValueError("it ends early")
    if lines.read().strip():
        raise ValueError("something follows its end")
    return parse_json(first.removesuffix(_OPENS) + b"}")


def _manifest_bytes(manifest: Manifest) -> bytes:
    """One unit per line, so that it can be searched and compared with plain tools."""
    totals = {"units": len(manifest.units)} | {fact: manifest.total(fact) for fact in FACTS}
    head = {"schema_version": manifest.schema_version, "fingerprint": manifest.fingerprint, "exact": manifest.exact}
    head |= {"totals": totals} | ({} if manifest.sums is None else {"sums": manifest.sums.to_json()})
    head |= {name: value for name in ("source", "ways") if (value := getattr(manifest, name)) is not None}
    lines = io.BytesIO()
    lines.write(json.dumps(head)[:-1].encode() + _OPENS)
    for number, unit in enumerate(manifest.units):
        facts = {name: getattr(unit, name) for name in _LISTED}  # asdict takes three times as long
        lines.write(f"{',' if number else ''}\n{json.dumps(facts)}".encode())
    lines.write(b"\n]}\n")
    return lines.getvalue()


def write_manifest(
    store: Store,
    committed: Iterable[CommittedUnit],
    *,
    fingerprint: str,
    units: int,
    rows: int,
    lease: Lease | None = None,
    source: dict[str, Any] | None = None,
    ways: dict[str, float] | None = None,
) -> Manifest:
    """Write `_manifest.json` and then `_SUCCESS`, or raise StoreError and write neither: totals must equal the plan's.

    `units` and `rows` are the plan's. With `lease`, a driver that has lost it raises LeaseLost and writes nothing, even if
    it lost the lease during the call, since what it read before may have changed. Idempotent.
    """
    facts = committed if isinstance(committed, UnitFacts) else UnitFacts(committed)
    facts.sort()
    manifest = Manifest(fingerprint, SCHEMA_VERSION, facts, source=source, sums=facts.sums, ways=ways)
    _check_totals(manifest, units=units, rows=rows)
    failpoint("commit.before_manifest")
    _write_latest(store, MANIFEST, _manifest_bytes(manifest), lease)
    failpoint("commit.before_success")
    success = json.dumps({"fingerprint": fingerprint, "units": units, "rows": rows}, sort_keys=True)
    _write_latest(store, SUCCESS, f"{success}\n".encode(), lease)
    return manifest


def is_closed(store: Store) -> bool:
    """Whether the manifest and `_SUCCESS` both exist; one of them alone does not count, and is written again."""
    return store.exists(MANIFEST) and store.exists(SUCCESS)


def _check_totals(manifest: Manifest, *, units: int, rows: int) -> None:
    assert len(manifest.units.listed) == len(manifest.units), "a unit is listed twice"
    num_units, num_rows = len(manifest.units), manifest.total("rows")
    if (num_units, num_rows) != (units, rows):
        raise StoreError(f"not complete: {num_units} of {units} units and {num_rows} of {rows} rows are committed")
    assert manifest.total("ok") + manifest.total("failed") + manifest.total("skipped") == rows


def _write_latest(store: Store, name: str, data: bytes, lease: Lease | None, *, again: bool = True) -> None:
    """Create, or replace what an earlier driver left; of two drivers at once, one raises LeaseLost.

    It reads the object, checks the lease, then writes if the object is unchanged: however long a driver pauses in between,
    it never replaces what a later one has written. What a killed driver left half replaced takes a second try.
    """
    before = store.stat(name)
    if before is not None and before.size == len(data) and store.get(name) == data:
        return
    if lease is not None:
        lease.check()
    try:
        if before is None:
            store.create(name, data)
        else:
            store.replace(name, data, etag=before.etag)
    except (AlreadyExists, Conflict):
        if lease is not None and again:
            return _write_latest(store, name, data, lease, again=False)
        raise LeaseLost(f"another driver has written {store.url}/{name} in the meantime") from None
