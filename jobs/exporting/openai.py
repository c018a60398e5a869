"""The output of the OpenAI batch API, one line a request; the samples of a row (`sampling.n`) are the choices of its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from typing import Any

import pyarrow as pa

from draftmill.actors.rows.requests import CHAT
from draftmill.jobs.exporting.rows import Target, json_line, plain_rows
from draftmill.storage.inputs.kept import KEEP

OPENAI_COLUMNS = (
    "id", "sample", "status", "error_kind", "error", "text", "prompt_tokens", "new_tokens", "finish", "model", "key",
    "started_at", "endpoint", "token_logprobs", "token_texts", "request_model",
)  # fmt: skip

FINISH_REASONS = {"eos": "stop", "stop": "stop", "filled": "stop", "length": "length"}
"""Our `finish` -> OpenAI's `finish_reason`."""


class OpenAISink:
    """Writes a line for each row of the inputs, when its `count` samples are there; incomplete ones are written at the end.

    Rows are incomplete where others of their samples go to another file, because they failed. Only these are kept in memory
    until then, since the samples of a row stand close together.
    """

    def __init__(self, file: Target, *, count: int, chat: bool, keep: pa.Schema | None = None) -> None:
        self._file, self._count, self._chat, self._keep = file, count, chat, keep
        self._held: dict[str, list[Mapping[str, Any]]] = {}

    def add(self, table: pa.Table) -> None:
        """See Sink."""
        for row in plain_rows(table, self._keep):
            samples = self._held.setdefault(row["id"], [])
            samples.append(row)
            if len(samples) == self._count:
                self._write(self._held.pop(row["id"]))

    def close(self) -> None:
        """See Sink."""
        for samples in self._held.values():
            self._write(samples)
        self._held.clear()

    def abandon(self) -> None:
        """See Sink."""

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
        return answer | {"response": None, "error": _error(samples, count)}
    endpoint = first.get("endpoint")
    body = _body(good, name, chat if endpoint is None else endpoint == CHAT)
    response = {"status_code": 200, "request_id": f"req_{name}", "body": body}
    return answer | {"response": response, "error": None}


def _number(row: Mapping[str, Any]) -> int:
    return row.get("sample") or 0


def _error(samples: Sequence[Mapping[str, Any]], count: int) -> dict[str, Any]:
    first = samples[0]
    message = first["error"] or first["status"]
    if len(samples) < count:
        message = f"{len(samples)} of {count} samples failed: {message}"
    return {"code": first["error_kind"] or first["status"], "message": message}


def _body(samples: Sequence[Mapping[str, Any]], name: str, chat: bool) -> dict[str, Any]:
    first = samples[0]
    given, new = first["prompt_tokens"] or 0, sum(row["new_tokens"] or 0 for row in samples)
    return {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{name}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(datetime.fromisoformat(first["started_at"]).timestamp()) if first["started_at"] else 0,
        "model": first.get("request_model") or shown_model(first["model"]),
        "choices": [_choice(row, chat) for row in samples],
        "usage": {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new},
    }


def shown_model(path: str) -> str:
    """The name of a job's model for answers whose requests name none: a path on this machine or in a bucket is its last part."""
    is_place = "://" in path or path.startswith(("/", ".", "~"))
    return path.rstrip("/").rpartition("/")[2] if is_place else path


def _choice(row: Mapping[str, Any], chat: bool) -> dict[str, Any]:
    said = {"message": {"role": "assistant", "content": row["text"]}} if chat else {"text": row["text"]}
    reason = FINISH_REASONS.get(row["finish"], row["finish"])
    return {"index": _number(row), **said, "logprobs": _logprobs(row, chat), "finish_reason": reason}


def _logprobs(row: Mapping[str, Any], chat: bool) -> dict[str, Any] | None:
    """The log-probabilities of the generated tokens in the endpoint's format; None if the request did not ask for them."""
    scores, texts = row.get("token_logprobs"), row.get("token_texts")
    if scores is None or texts is None:
        return None
    if chat:
        told = zip(texts, scores, strict=True)
        content = [
            {"token": text, "logprob": score, "bytes": list(text.encode()), "top_logprobs": []} for text, score in told
        ]
        return {"content": content, "refusal": None}
    offsets = [0, *accumulate(map(len, texts))][: len(texts)]
    return {"tokens": texts, "token_logprobs": scores, "top_logprobs": None, "text_offset": offsets}
