"""Checks compacted files (jobs/exporting/compact.py) against their manifest and the passes, for `draftmill verify`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import pyarrow as pa

from draftmill.jobs.exporting.compact import (
    FOLDER,
    MANIFEST,
    CompactFile,
    CompactManifest,
    described,
    read_compact,
    source_of,
)
from draftmill.jobs.finished.passes import Pass, PassRows, latest_rows
from draftmill.storage.errors import StoreError
from draftmill.storage.parquet import parquet_groups, parquet_metadata
from draftmill.storage.runs.records import schema_of
from draftmill.storage.stores.interface import Store


def check_compact(store: Store, passes: Sequence[Pass]) -> tuple[str | None, list[str]]:
    """Returns a line about the compacted files (None if there are none) and the problems found.

    Reads and hashes every file, and compares its rows with those of the unit files, value by value. For files made before
    the last pass, checks only the hashes.
    """
    try:
        manifest = read_compact(store)
    except StoreError as error:
        return None, [str(error)]
    if manifest is None:
        return None, []
    line = f"compact: {described(manifest)}"
    problems = [] if manifest.fingerprint == passes[0].plan.fingerprint else [f"{MANIFEST} belongs to another job"]
    problems += [problem for file in manifest.files for problem in _file_problems(store, passes, manifest, file)]
    if manifest.source != source_of(passes, manifest.file_bytes):
        return f"{line}, from before the last pass; run `draftmill compact` to update them", problems
    return line, problems or list(_row_problems(store, manifest, passes))


def _file_problems(store: Store, passes: Sequence[Pass], manifest: CompactManifest, file: CompactFile) -> Iterator[str]:
    schema = schema_of(manifest.schema_version, passes[0].plan.keep)
    try:
        data = store.get(file.object)
        if hashlib.sha256(data).hexdigest() != file.sha256:
            yield f"{file.object}: its SHA-256 differs from the manifest's"
            return
        for group in parquet_groups(data):
            if parquet_metadata(group.schema).get("fingerprint") != manifest.fingerprint:
                yield f"{file.object}: it belongs to another job"
            if not group.schema.remove_metadata().equals(schema):
                yield f"{file.object}: its schema differs from that of the result table"
    except (StoreError, pa.ArrowInvalid, OSError) as error:
        yield f"{file.object}: can't be read: {' '.join(str(error).split())}"


def _row_problems(store: Store, manifest: CompactManifest, passes: Sequence[Pass]) -> Iterator[str]:
    groups = (group for file in manifest.files for group in parquet_groups(store.get(file.object)))
    compacted, row = PassRows(group.replace_schema_metadata(None) for group in groups), 0
    for expected in latest_rows(passes):
        found = compacted.take(expected.num_rows)
        if found is None or not _same(found, expected):
            yield f"{FOLDER}: its rows differ from those of the unit files, from row {row} on"
            return
        row += expected.num_rows
    if compacted.take(1) is not None:
        yield f"{FOLDER}: it has more rows than the run"


def _same(one: pa.Table, other: pa.Table) -> bool:
    """Whether the values are equal, regardless of chunks and dictionary encoding; NaN equals NaN."""
    plain = pa.schema([pa.field(f.name, _plain(f.type)) for f in one.schema])
    if one.num_rows != other.num_rows or one.schema.names != other.schema.names:
        return False
    one, other = one.cast(plain), other.cast(plain)
    return one.equals(other) or repr(one.to_pylist()) == repr(other.to_pylist())


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind
