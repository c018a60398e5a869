"""The versioned schema of results, and building and reading tables of it. Knows nothing of where files go.

SCHEMA_VERSION grows when a column is added or changed; results of another version are not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from draftmill.storage.errors import DamagedRun
from draftmill.storage.inputs.kept import KEEP
from draftmill.storage.parquet import read_parquet
from draftmill.storage.stores.parallel import parallel_map
from draftmill.storage.stores.store import NotFound, Store

SCHEMA_VERSION = 1

_WORDS = pa.dictionary(pa.int32(), pa.string())
_METRICS = pa.struct([pa.field("bits_per_byte", pa.float64())])


def _fields(kind: pa.DataType, names: str, *, nullable: bool = True) -> list[pa.Field]:
    return [pa.field(name, kind, nullable=nullable) for name in names.split()]


_NFE_KINDS = pa.struct(_fields(pa.int32(), "prefill draft verify commit"))
_LIKELY = pa.struct(
    [
        *_fields(pa.int32(), "token", nullable=False),
        *_fields(pa.float32(), "logprob", nullable=False),
        pa.field("text", pa.string()),
    ]
)
_FILL = pa.struct([*_fields(pa.int32(), "start end", nullable=False), pa.field("text", pa.string())])

SCHEMA: pa.Schema = pa.schema(
    [
        *_fields(pa.string(), "id", nullable=False),
        *_fields(pa.int32(), "unit pass attempt", nullable=False),
        *_fields(pa.string(), "status", nullable=False),
        *_fields(pa.string(), "error_kind error_stage error text"),
        pa.field("fills", pa.list_(_FILL)),
        pa.field("tokens", pa.list_(pa.int32())),
        *_fields(pa.int32(), "prompt_tokens new_tokens"),
        pa.field("finish", pa.string()),
        pa.field("logprob", pa.float64()),
        *_fields(_WORDS, "decoder model drafter"),
        pa.field("key", pa.uint64()),
        *_fields(pa.int32(), "nfe nfe_draft iterations proposed accepted"),
        pa.field("accept_hist", pa.list_(pa.int32())),
        *_fields(pa.float64(), "wait_s prefill_s decode_s total_s device_s"),
        *_fields(pa.float32(), "batch_rows pad_fraction"),
        *_fields(_WORDS, "worker node"),
        pa.field("started_at", pa.timestamp("us", tz="UTC")),
        pa.field("metrics", _METRICS),
        pa.field("token_logprobs", pa.list_(pa.float32())),
        pa.field("nfe_kinds", _NFE_KINDS),
        pa.field("truncated_tokens", pa.int32()),
        pa.field("endpoint", _WORDS),
        pa.field("token_texts", pa.list_(pa.string())),
        pa.field("sample", pa.int32()),
        pa.field("is_greedy", pa.bool_()),
        pa.field("logprob_stderr", pa.float64()),
        pa.field("request_model", _WORDS),
        pa.field("top_logprobs", pa.list_(pa.list_(_LIKELY))),
        pa.field("length_logprob", pa.float64()),
        pa.field("constraint", pa.string()),
        *_fields(pa.int32(), "lengths_tried reused"),
    ]
)
"""One row per sample; docs/formats.md says what each column means."""


def schema_of(keep: pa.Schema | None = None) -> pa.Schema:
    """The schema of results, with the struct `keep` of these fields, if there are any."""
    return SCHEMA if keep is None else pa.schema([*SCHEMA, pa.field(KEEP, pa.struct(list(keep)))])


def without_dictionaries(schema: pa.Schema) -> pa.Schema:
    """The schema with plain columns, which other programs read more easily."""
    plain = (item.with_type(item.type.value_type) if pa.types.is_dictionary(item.type) else item for item in schema)
    return pa.schema(list(plain))


TRACE_SCHEMA: pa.Schema = pa.schema(
    [
        *_fields(pa.string(), "id", nullable=False),
        *_fields(pa.int32(), "unit pass iteration", nullable=False),
        pa.field("nfe", pa.int32()),
        *_fields(pa.list_(pa.int32()), "proposed committed positions"),
        pa.field("sample", pa.int32()),
    ]
)
"""One row per decoder iteration of a sample, for `trace: steps`; token ids and canvas positions."""

TIMING_COLUMNS = frozenset(
    {"attempt", "wait_s", "prefill_s", "decode_s", "total_s", "device_s", "batch_rows", "pad_fraction"}
    | {"worker", "node", "started_at"}
)
"""The columns that may differ between two runs of one job; all others are equal to the byte."""


def table_from_rows(rows: Sequence[Mapping[str, Any]], *, schema: pa.Schema = SCHEMA) -> pa.Table:
    """Return rows (column -> Python value; a missing column is null) as a table of exactly `schema`.

    An unknown column or field of a struct, or a null in a required column, is a bug of ours: AssertionError.
    """
    names = set(schema.names)
    for row in rows:
        assert names.issuperset(row), f"not columns of the schema: {sorted(set(row) - names)}"
    columns = [_column([row.get(field.name) for row in rows], field) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _column(values: list[Any], field: pa.Field) -> pa.Array:
    if field.type in (_METRICS, _NFE_KINDS):
        known = {inner.name for inner in field.type}
        assert all(known.issuperset(value) for value in values if value is not None), f"{field.name} has {known}"
    elif field.type in (pa.string(), _WORDS):
        # Lone surrogates come from broken input (in ids and error messages) and have no UTF-8 form.
        values = [
            text if text is None or text.isascii() else text.encode("utf-8", "replace").decode() for text in values
        ]
    array = pa.array(values, type=field.type)
    assert field.nullable or not array.null_count, f"{field.name} may not be null"
    return array


def read_results(
    store: Store, *, objects: Iterable[str] | None = None, columns: Sequence[str] | None = None
) -> Iterator[pa.Table]:
    """Yield one table per unit file, checksums verified, one table in memory at a time, and a few files from S3.

    `objects` are the files to read (the manifest's), by default all that lie in `data/`, in the order of units. Raises
    DamagedRun, which names the file and a remedy, where one is damaged or missing.
    """
    names = objects if objects is not None else (stat.name for stat in store.list("data/"))
    for name, data in parallel_map(store, names, store.get):
        try:
            table = read_parquet(data.result(), columns=columns)
        except NotFound:
            raise damage_error(store, name, "it does not exist") from None
        except (pa.ArrowInvalid, OSError) as error:
            raise damage_error(store, name, error) from None
        yield table


REMEDY = "delete it, _manifest.json and _SUCCESS, and the next run repeats its unit"


def damage_error(store: Store, name: str, reason: object) -> DamagedRun:
    """The error of a unit's file that can't be read."""
    return DamagedRun(f"{store.url}/{name}", reason, REMEDY)
