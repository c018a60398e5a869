"""`draftmill compact`: rewrites the results of a finished run into files of a chosen size, with their own manifest.

    RUN/compact/part-00000-1f3a9c2e.parquet      every row once, in the plan's order, from the last pass that has it
    RUN/compact/_manifest.json                   written after all files; only the files it lists count

The unit files stay: resuming, verifying and further passes need them. A file's name contains a hash of its sources, so
compacting again, after another pass or to another size, never changes a file that is being read. Traces stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

import draftmill
from draftmill.jobs.driving.driver import StopFlag
from draftmill.jobs.driving.lease_keeper import kept_lease
from draftmill.jobs.exit_codes import INTERRUPTED, OK
from draftmill.jobs.finished.passes import Pass, finished, latest_rows, passes_of
from draftmill.jobs.formatting import counted
from draftmill.storage.errors import DamagedRun, StoreError
from draftmill.storage.parquet import parquet_groups, parquet_writer
from draftmill.storage.runs.lease import Lease, LeaseHeld, LeaseLost
from draftmill.storage.stores.interface import S3Options, Store
from draftmill.storage.stores.store import open_store

FOLDER = "compact/"
MANIFEST = f"{FOLDER}_manifest.json"
GROUP_BYTES = 32 * 2**20
"""Arrow bytes of a row group. Compacting and checking hold one row group in memory, besides the current file."""

MIB = 2**20


@dataclass(frozen=True, slots=True)
class CompactFile:
    """The facts of one file, as the manifest lists them; `bytes` is the file's size."""

    object: str
    etag: str
    rows: int
    ok: int
    failed: int
    skipped: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CompactManifest:
    """The contents of a compacted run. `source` is a hash of the passes it was made from and the file size."""

    fingerprint: str
    schema_version: int
    passes: int
    file_bytes: int
    source: str
    files: tuple[CompactFile, ...]


def compact(run_dir: str, *, file_mb: int, s3: S3Options | None = None) -> int:
    """Write the run's rows into files of at most `file_mb` MiB, roughly; returns the exit code. Raises UserError if the run
    is not finished.
    """
    store = open_store(run_dir, s3=s3)
    finished(passes_of(store, s3=s3))
    stop = StopFlag()
    try:
        with kept_lease(store, stop.set) as lease:
            passes = finished(passes_of(store, s3=s3))
            found = current(store, source_of(passes, file_mb * MIB))
            found = found or write_compact(store, passes, file_bytes=file_mb * MIB, lease=lease)
            sweep(store, found, lease)
    except (LeaseHeld, LeaseLost) as error:
        print(f"draftmill: {error}", file=sys.stderr)
        return INTERRUPTED
    units = sum(len(one.manifest.units) for one in passes if one.manifest is not None)
    print(f"{store.url}/{FOLDER}: {described(found)}, from {units:,} unit files of {_counted_passes(found.passes)}")
    return OK


def current(store: Store, source: str) -> CompactManifest | None:
    """The existing compaction, if it was made from this `source` and its files are intact; otherwise None."""
    try:
        found = read_compact(store)
        if found is None or found.source != source or not all(_is_sound(store, file) for file in found.files):
            return None
    except StoreError:  # damaged or missing
        return None
    return found


def _is_sound(store: Store, file: CompactFile) -> bool:
    stat = store.stat(file.object)
    if stat is None or stat.size != file.bytes:
        return False
    return stat.etag == file.etag or hashlib.sha256(store.get(file.object)).hexdigest() == file.sha256


def source_of(passes: Sequence[Pass], file_bytes: int) -> str:
    """A hash over the unit files of the finished passes and the chosen file size."""
    made = hashlib.sha256(b"[[")  # the SHA-256 of JSON, which is not built as a whole: there may be millions of units
    for number, manifest in enumerate(one.manifest for one in passes if one.manifest is not None):
        made.update(b",[" if number else b"[")
        for place, unit in enumerate(manifest.units):
            made.update(f"{',' if place else ''}{json.dumps(unit.sha256)}".encode())
        made.update(b"]")
    made.update(f"],{file_bytes}]".encode())
    return made.hexdigest()


def write_compact(
    store: Store, passes: Sequence[Pass], *, file_bytes: int, lease: Lease | None = None
) -> CompactManifest:
    """Write and check the files, then write the manifest, which makes them count. With `lease`, raises LeaseLost if another
    driver has taken it.
    """
    plan, source = passes[0].plan, source_of(passes, file_bytes)
    version = plan.results["schema_version"]
    metadata = {"fingerprint": plan.fingerprint, "schema_version": str(version), "code_version": draftmill.__version__}
    parts = Parts(plan.schema, metadata | {"passes": str(len(passes))}, file_bytes)
    files = []
    for number, part in enumerate(parts.of(latest_rows(passes))):
        name = f"{FOLDER}part-{number:05d}-{source[:8]}.parquet"
        stat = store.put(name, part.data)
        counts = {status: part.statuses[status] for status in ("ok", "failed", "skipped")}
        sha256 = hashlib.sha256(part.data).hexdigest()
        files.append(CompactFile(name, stat.etag, part.rows, **counts, bytes=len(part.data), sha256=sha256))
    manifest = CompactManifest(plan.fingerprint, version, len(passes), file_bytes, source, tuple(files))
    if lease is not None:
        lease.check()
    store.put(MANIFEST, _json(manifest))
    return manifest


def read_compact(store: Store) -> CompactManifest | None:
    """Read the manifest of the compacted files; None if there is none, DamagedRun if it is invalid."""
    if not store.exists(MANIFEST):
        return None
    try:
        found = json.loads(store.get(MANIFEST))
        del found["totals"]
        return CompactManifest(**found | {"files": tuple(CompactFile(**file) for file in found["files"])})
    except (ValueError, KeyError, TypeError) as error:
        remedy = "delete it and run `draftmill compact` again"
        raise DamagedRun(f"{store.url}/{MANIFEST}", error, remedy) from None


def sweep(store: Store, manifest: CompactManifest, lease: Lease) -> None:
    """Delete the files in the folder that do not count: those of an earlier size or pass, or of an interrupted compaction."""
    counting = {MANIFEST, *(file.object for file in manifest.files)}
    for name in [stat.name for stat in store.list(FOLDER) if stat.name not in counting]:
        lease.check()  # without the lease delete nothing: the files may belong to our successor
        store.delete(name)


# ---- files


@dataclass(slots=True)
class FilePart:
    """A complete file that was read back, and its counts."""

    data: bytes
    rows: int
    statuses: Counter[str]


@dataclass(slots=True)
class Parts:
    """Cuts tables into files of at most `file_bytes`, or more if a single row group is larger."""

    schema: pa.Schema
    metadata: dict[str, str]
    file_bytes: int
    _sink: Any = None
    _writer: Any = None
    _rows: int = 0
    _largest: int = 0
    _statuses: Counter[str] = field(default_factory=Counter)

    def of(self, tables: Iterable[pa.Table]) -> Iterator[FilePart]:
        """Yield the files, one at a time."""
        for group in _groups(tables, min(GROUP_BYTES, self.file_bytes)):
            self._write(group)
            if self._sink.tell() + self._largest > self.file_bytes:
                yield self._closed()
        if self._writer is not None:
            yield self._closed()

    def _write(self, group: pa.Table) -> None:
        if self._writer is None:
            self._sink = pa.BufferOutputStream()
            self._writer = parquet_writer(self._sink, self.schema, self.metadata)
            self._rows, self._largest, self._statuses = 0, 0, Counter()
        before = self._sink.tell()
        self._writer.write_table(group.cast(self.schema), row_group_size=group.num_rows)
        self._largest = max(self._largest, self._sink.tell() - before)
        self._rows += group.num_rows
        self._statuses.update(group["status"].to_pylist())

    def _closed(self) -> FilePart:
        self._writer.close()
        self._writer = None
        data = bytes(self._sink.getvalue().to_pybytes())
        again = sum(group.num_rows for group in parquet_groups(data))  # checks every page's checksum
        assert again == self._rows, "rows were lost in writing"
        return FilePart(data, self._rows, self._statuses)


def _groups(tables: Iterable[pa.Table], group_bytes: int) -> Iterator[pa.Table]:
    held: list[pa.Table] = []
    num_bytes = 0
    for table in tables:
        held.append(table)
        num_bytes += table.nbytes
        if num_bytes >= group_bytes:
            yield _joined(held)
            held, num_bytes = [], 0
    if held:
        yield _joined(held)


def _joined(tables: list[pa.Table]) -> pa.Table:
    return pa.concat_tables(tables).unify_dictionaries().combine_chunks()


def described(manifest: CompactManifest) -> str:
    """Rows, files and bytes, in words."""
    rows, size = sum(file.rows for file in manifest.files), sum(file.bytes for file in manifest.files)
    return f"{counted(rows, 'row')} in {counted(len(manifest.files), 'file')}, {size:,} bytes"


def _counted_passes(count: int) -> str:
    return "one pass" if count == 1 else f"{count} passes"


def _json(manifest: CompactManifest) -> bytes:
    """JSON with one file per line, like the units in the run's own manifest."""
    totals = {
        fact: sum(getattr(file, fact) for file in manifest.files)
        for fact in ("rows", "ok", "failed", "skipped", "bytes")
    }
    head = {key: value for key, value in asdict(manifest).items() if key != "files"} | {"totals": totals}
    lines = ",\n".join(json.dumps(asdict(file)) for file in manifest.files)
    return f'{json.dumps(head)[:-1]}, "files": [\n{lines}\n]}}\n'.encode()
