"""The formats of `draftmill export`: JSON lines, CSV, Parquet, and the output of the OpenAI batch API.

A sink takes tables of result rows and writes them to an open binary file, or to the files of a folder. Knows nothing of runs.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import accumulate
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from draftmill.actors.rows.row import CHAT
from draftmill.storage.errors import StoreError
from draftmill.storage.inputs.kept import KEEP, plain, to_json
from draftmill.storage.parquet import parquet_writer
from draftmill.storage.stores.store import is_local

if TYPE_CHECKING:  # it imports boto3
    from draftmill.storage.stores.upload import Upload

    Target: TypeAlias = IO[bytes] | Upload

GROUP_BYTES = 32 * 2**20
"""Arrow bytes of a row group."""

SUCCESS = "_SUCCESS"
"""The mark beside files of which the last has been written; readers of Parquet folders skip names that begin with _."""


class Sink:
    """A file that is being written."""

    def add(self, table: pa.Table) -> None:
        """Write the rows of a table."""
        raise NotImplementedError

    def close(self) -> None:
        """Write buffered rows and the footer; the file itself stays open."""

    def abandon(self) -> None:
        """Give up the file: never write to it again."""


class LineSink(Sink):
    """One JSON object per line and row. `keep` has the fields of the struct `keep`, if there is one."""

    def __init__(self, file: Target, *, keep: pa.Schema | None = None) -> None:
        self._file = file
        self._keep = keep

    def add(self, table: pa.Table) -> None:
        for row in plain_rows(table, self._keep):
            self._file.write(json_line(row))


class CsvSink(Sink):
    """A header line and records; null is an empty field, and lists and mappings are JSON.

    Each field of the struct `keep` is a separate column, `keep.NAME`.
    """

    def __init__(self, file: Target, columns: Sequence[str], *, keep: pa.Schema | None = None) -> None:
        self._file = file
        self._keep = keep
        inner = [] if keep is None else [f"{KEEP}.{name}" for name in keep.names]
        self._write([[name for column in columns for name in (inner if column == KEEP else [column])]])

    def add(self, table: pa.Table) -> None:
        self._write([[_field(value) for value in self._flat(row)] for row in plain_rows(table, self._keep)])

    def _flat(self, row: Mapping[str, Any]) -> Iterator[Any]:
        for column, value in row.items():
            if column == KEEP and self._keep is not None:
                yield from ((value or {}).get(name) for name in self._keep.names)
            else:
                yield value

    def _write(self, records: Sequence[Sequence[str]]) -> None:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(records)
        self._file.write(text.getvalue().encode())


class ParquetSink(Sink):
    """Row groups of at most `group_bytes` (of Arrow), or of one row, in the format of the run's own files."""

    def __init__(
        self, file: Target, schema: pa.Schema, metadata: Mapping[str, str], *, group_bytes: int = GROUP_BYTES
    ) -> None:
        self._schema, self._metadata, self._group_bytes = schema, metadata, group_bytes
        self._held: list[pa.Table] = []
        self._bytes = 0
        self._begin(file)

    def _begin(self, file: Target) -> None:
        self._file = file
        self._writer = parquet_writer(file, self._schema, self._metadata)

    def add(self, table: pa.Table) -> None:
        if table.nbytes > self._group_bytes and (half := table.num_rows // 2):
            self.add(table.slice(0, half))
            self.add(table.slice(half))
            return
        if self._held and self._bytes + table.nbytes > self._group_bytes:
            self._flush()
        self._held.append(table)
        self._bytes += table.nbytes

    def close(self) -> None:
        if self._held:
            self._flush()
        self._writer.close()

    def abandon(self) -> None:
        """An open writer would try to finish the file when it is garbage-collected, and print an error."""
        with suppress(OSError, ValueError, StoreError, pa.ArrowException):
            self._writer.close()
        self._writer.is_open = False

    def _flush(self) -> None:
        group = pa.concat_tables(self._held).unify_dictionaries().combine_chunks().cast(self._schema)
        self._writer.write_table(group, row_group_size=max(1, group.num_rows))
        self._held, self._bytes = [], 0


class PartsSink(ParquetSink):
    """Files of about `file_bytes` at most, part-00000.parquet and so on; a file is much larger only if a single row is.

    Memory holds one file. Each appears whole; `names` has those that did.
    """

    def __init__(
        self, put: Callable[[str, bytes], object], schema: pa.Schema, metadata: Mapping[str, str], file_bytes: int
    ) -> None:
        self._write, self._file_bytes, self._largest = put, file_bytes, 0
        self.names: list[str] = []
        super().__init__(io.BytesIO(), schema, metadata, group_bytes=min(GROUP_BYTES, file_bytes))

    def _flush(self) -> None:
        before = self._file.tell()
        super()._flush()
        self._largest = max(self._largest, self._file.tell() - before)
        if self._file.tell() + self._largest > self._file_bytes:
            self._put()

    def _put(self) -> None:
        assert isinstance(self._file, io.BytesIO)
        self._writer.close()
        name = f"part-{len(self.names):05d}.parquet"
        self._write(name, self._file.getvalue())
        self.names.append(name)
        self._largest = 0  # of the row groups of this file
        self._begin(io.BytesIO())

    def close(self) -> None:
        if self._held:
            self._flush()
        if self._largest or not self.names:
            self._put()
        self._writer.close()


def json_line(value: Mapping[str, Any]) -> bytes:
    """A JSON object and a line break."""
    return f"{json.dumps(value, ensure_ascii=False, allow_nan=False)}\n".encode()


def plain_rows(table: pa.Table, keep: pa.Schema | None = None) -> list[dict[str, Any]]:
    """The rows as JSON values: times as ISO 8601, and null for NaN and infinity.

    `keep` has the fields of the struct `keep`, whose JSON texts are parsed; a kept column may also stand by itself.
    """
    own = {field.name: pa.schema([field]) for field in keep or () if field in table.schema}

    def plain_values(field: pa.Field, values: list[Any]) -> list[Any]:
        name, kind = field.name, getattr(field.type, "value_type", field.type)
        if name == KEEP and keep is not None:
            return [to_json(value, keep) for value in values]
        if name in own:
            return [(to_json({name: value}, own[name]) or {})[name] for value in values]
        if pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_boolean(kind):
            return values
        return [plain(value) for value in values]

    columns = [plain_values(table.field(place), column.to_pylist()) for place, column in enumerate(table.columns)]
    names = table.column_names
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _field(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)


OPENAI_COLUMNS = (
    "id", "sample", "status", "error_kind", "error", "text", "prompt_tokens", "new_tokens", "finish", "model", "key",
    "started_at", "endpoint", "token_logprobs", "token_texts", "request_model", "top_logprobs",
)  # fmt: skip

FINISH_REASONS = {"eos": "stop", "stop": "stop", "filled": "stop", "length": "length"}
"""Our `finish` -> OpenAI's `finish_reason`."""


class OpenAISink(Sink):
    """Writes a line for each row of the inputs, when its `count` samples are there; incomplete ones are written at the end.

    Rows are incomplete where others of their samples go to another file, because they failed. Only these are kept in memory
    until then, since the samples of a row stand close together.
    """

    def __init__(self, file: Target, *, count: int, chat: bool, keep: pa.Schema | None = None) -> None:
        self._file, self._count, self._chat, self._keep = file, count, chat, keep
        self._held: dict[str, list[Mapping[str, Any]]] = {}

    def add(self, table: pa.Table) -> None:
        for row in plain_rows(table, self._keep):
            samples = self._held.setdefault(row["id"], [])
            samples.append(row)
            if len(samples) == self._count:
                self._write(self._held.pop(row["id"]))

    def close(self) -> None:
        for samples in self._held.values():
            self._write(samples)
        self._held.clear()

    def _write(self, samples: Sequence[Mapping[str, Any]]) -> None:
        self._file.write(json_line(openai_answer(samples, chat=self._chat, count=self._count)))


def openai_answer(samples: Sequence[Mapping[str, Any]], *, chat: bool, count: int = 1) -> dict[str, Any]:
    """The result rows of one row's samples as a line of a batch's output file, or of its error file if none of them is ok.

    The row's request names the endpoint that defines the format; `chat` decides for rows that name none. `count` is the
    number of samples of a row, which an error names if not all of them failed.
    """
    samples = sorted(samples, key=_number)
    first = samples[0]
    name = f"{first['key'] or 0:016x}"
    answer: dict[str, Any] = {"id": f"batch_req_{name}", "custom_id": first["id"]}
    if KEEP in first:
        answer[KEEP] = first[KEEP]
    good = [row for row in samples if row["status"] == "ok"]
    if not good:
        part = f"{len(samples)} of {count} samples failed: " if len(samples) < count else ""
        error = {
            "code": first["error_kind"] or first["status"],
            "message": f"{part}{first['error'] or first['status']}",
        }
        return answer | {"response": None, "error": error}
    endpoint = first.get("endpoint")
    body = _body(good, name, chat if endpoint is None else endpoint == CHAT)
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return answer | {"response": response, "error": None}


def _number(row: Mapping[str, Any]) -> int:
    return row.get("sample") or 0


def _body(samples: Sequence[Mapping[str, Any]], name: str, chat: bool) -> dict[str, Any]:
    first = samples[0]
    given, new = first["prompt_tokens"] or 0, sum(row["new_tokens"] or 0 for row in samples)
    model = first["model"]
    if not is_local(model) or model.startswith(("/", ".", "~")):  # a path on this machine or in a bucket: its last part
        model = model.rstrip("/").rpartition("/")[2]
    choices = []
    for row in samples:
        content = {"message": {"role": "assistant", "content": row["text"]}} if chat else {"text": row["text"]}
        reason = FINISH_REASONS.get(row["finish"], row["finish"])
        choices.append({"index": _number(row), **content, "logprobs": _logprobs(row, chat), "finish_reason": reason})
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(datetime.fromisoformat(first["started_at"]).timestamp()) if first["started_at"] else 0,
        "model": first.get("request_model") or model,
        "choices": choices,
        "usage": {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new},
    }


def _logprobs(row: Mapping[str, Any], chat: bool) -> dict[str, Any] | None:
    """The log-probabilities of the generated tokens in the endpoint's format; None if the request did not ask for them."""
    scores, texts, tops = row.get("token_logprobs"), row.get("token_texts"), row.get("top_logprobs")
    if scores is None or texts is None:
        return None
    if chat:
        content = [
            {**_scored(text, score), "top_logprobs": [_scored(each["text"], each["logprob"]) for each in best]}
            for text, score, best in zip(texts, scores, tops or [[]] * len(texts), strict=True)
        ]
        return {"content": content, "refusal": None}
    offsets = [0, *accumulate(map(len, texts))][: len(texts)]
    # Of two tokens with one text (bytes that form no character) the better one is told.
    best = tops and [{each["text"]: each["logprob"] for each in reversed(one)} for one in tops]
    return {"tokens": texts, "token_logprobs": scores, "top_logprobs": best, "text_offset": offsets}


def _scored(text: str, score: float) -> dict[str, Any]:
    return {"token": text, "logprob": score, "bytes": list(text.encode())}
