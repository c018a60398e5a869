"""The versioned schema of results, and building and reading tables of it. Knows nothing of where files go.

SCHEMA_VERSION grows when a column is added or changed; results of another version are not read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from draftmill.storage.errors import DamagedRun, printable
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
    for name, data in parallel_map(names, store.get):
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


# ---- sums over result rows: a unit's metadata and a run's manifest have them, so that nobody reads the rows for them again


COUNTED = ("prompt_tokens", "new_tokens", "nfe", "nfe_draft", "iterations", "proposed", "accepted")
TRUNCATED = "truncated_tokens"
SUMMED = ("id", "unit", "status", "error_kind", "error", "decode_s", TRUNCATED, *COUNTED)
"""The columns that sums need."""

EXAMPLES = 3
"""Failed samples of each kind that are named."""

SHOWN_CHARS = 100
MOST_CHARS = 1200
"""Characters of a unit's sums as JSON: S3 takes 2 KB of metadata."""


@dataclass(slots=True)
class Sums:
    """Sums over rows. `longest_s` is the decoding time of the slowest sample, `cut_rows` counts those that were truncated.

    `errors` counts failed samples by kind. `examples` has the first few of each kind: unit, id and message.
    """

    rows: int = 0
    ok: int = 0
    failed: int = 0
    skipped: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    nfe: int = 0
    nfe_draft: int = 0
    iterations: int = 0
    proposed: int = 0
    accepted: int = 0
    cut_rows: int = 0
    cut_tokens: int = 0
    longest_s: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[tuple[int, str, str]]] = field(default_factory=dict)

    def add(self, other: Sums) -> None:
        """Add the sums of other rows."""
        for name in _NUMBERS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest_s = max(self.longest_s, other.longest_s)
        for kind, count in other.errors.items():
            self.errors[kind] = self.errors.get(kind, 0) + count
        for kind, named in other.examples.items():
            known = self.examples.get(kind, [])
            self.examples[kind] = sorted([*known, *named], key=lambda example: example[0])[:EXAMPLES]

    def to_json(self) -> dict[str, Any]:
        """As data, without what is zero."""
        return {name: value for name, value in asdict(self).items() if value}

    def to_text(self) -> str:
        """As ASCII text of at most MOST_CHARS, with fewer examples if need be; "" if even that is too long."""
        data = self.to_json()
        while len(text := json.dumps(data, separators=(",", ":"))) > MOST_CHARS:
            if not data.get("examples"):
                return ""
            kind = max(data["examples"], key=lambda kind: len(data["examples"][kind]))
            data["examples"][kind].pop()
            if not data["examples"][kind]:
                del data["examples"][kind]
        return text


_NUMBERS = tuple(item.name for item in fields(Sums) if item.type == "int")


def sums_of_text(text: str) -> Sums:
    """The sums that `to_text` wrote; ValueError or TypeError for any other text."""
    return Sums(**json.loads(text))


def sum_up(tables: Iterable[pa.Table]) -> Sums:
    """Sum up tables with the columns SUMMED."""
    sums = Sums()
    for table in tables:
        statuses = Counter(table.column("status").to_pylist())
        own = Sums(table.num_rows, statuses["ok"], statuses["failed"], statuses["skipped"])
        for name in COUNTED:
            setattr(own, name, pc.sum(table.column(name)).as_py() or 0)
        own.cut_rows = pc.sum(pc.greater(table[TRUNCATED], 0)).as_py() or 0
        own.cut_tokens = pc.sum(table[TRUNCATED]).as_py() or 0
        own.longest_s = pc.max(table.column("decode_s")).as_py() or 0.0
        failed = table.filter(pc.equal(table["status"], "failed")).select(["unit", "id", "error_kind", "error"])
        for row in failed.to_pylist():
            kind = row["error_kind"] or "unknown"
            own.errors[kind] = own.errors.get(kind, 0) + 1
            examples = own.examples.setdefault(kind, [])
            if len(examples) < EXAMPLES:
                examples.append((row["unit"], brief_line(row["id"]), brief_line(row["error"] or "")))
        sums.add(own)
    return sums


def brief_line(text: str, most: int = SHOWN_CHARS) -> str:
    """The text in one line of at most so many characters."""
    text = printable(" ".join(text.split()))
    return text if len(text) <= most else f"{text[: most - 3]}..."
