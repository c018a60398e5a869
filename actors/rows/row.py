"""Reads a row's id, key, text, prompt and messages from its columns. Pure; knows no masks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from draftmill.actors.task import Columns, Complete, Score
from draftmill.decoders.draws.keys import sample_key
from draftmill.storage.errors import RowError, listed
from draftmill.storage.inputs.lines import is_openai_request

Values = Mapping[str, Any]

Messages = list[dict[str, Any]]
"""A conversation: each message with its `role`, and mostly its `content`."""

MAX_ID_CHARS = 4096


def missing(values: Values, column: str) -> RowError:
    """The error of a row that lacks a value in a required column."""
    what = "is null" if column in values else f"is missing; the row has {listed(values)}"
    return RowError("missing_column", "read", f"the column {column!r} {what}"[:1000])


def row_id(values: Values, columns: Columns) -> str | None:
    """Return the row's own id; None if it has none and needs none (the id is then made of file and row number).

    Raises RowError if the spec names a column and the row has no valid value there.
    """
    column = columns.id or "id"
    value = values.get(column)
    if value is None and columns.id is None:
        return None
    if value is None:
        raise missing(values, column)
    value = decoded(value, column)
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise RowError("bad_row", "read", f"the id {value!r} is neither a string nor a whole number"[:1000])
    text = str(value)
    if len(text) > MAX_ID_CHARS:
        raise RowError("bad_row", "read", f"the id is longer than {MAX_ID_CHARS} characters")
    return text


def row_key(values: Values, columns: Columns, *, job_seed: int, sample_id: str) -> int:
    """Return the sample's 64-bit key; a row's own seed replaces the job's. RowError if the seed is not a 64-bit integer.

    A named column overrides the `seed` of an OpenAI request.
    """
    if columns.seed is not None:
        seed = values.get(columns.seed)
        if seed is None:
            raise missing(values, columns.seed)
    else:
        body = values.get("body") if is_openai_request(values) else None
        seed = body.get("seed") if isinstance(body, dict) else None
        if seed is None:
            return sample_key(job_seed, sample_id)
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**63:
        raise RowError("bad_row", "read", f"the seed {seed!r} is not a 64-bit whole number"[:1000])
    return sample_key(seed, sample_id)


def text_of(values: Values, columns: Columns) -> str:
    """Return the row's text; RowError if it has none."""
    return string_of(values, columns.text or ("text" if "text" in values or "prompt" not in values else "prompt"))


def string_of(values: Values, column: str) -> str:
    """Return the text in a column; RowError if there is none."""
    value = decoded(values.get(column), column)
    if value is None:
        raise missing(values, column)
    if not isinstance(value, str):
        raise RowError("bad_row", "read", f"the column {column!r} holds {type(value).__name__}, not text")
    return checked_text(value, column)


def prompt_of(values: Values, columns: Columns, task: Complete | Score, *, chat: bool) -> str | Messages:
    """Return the row's prompt, or, for a `chat`, its conversation.

    Looks first in a named column; then, for a chat, in `messages`; then in `prompt`; then, unless it scores, in `text`.
    """
    completes = isinstance(task, Complete)
    named = columns.prompt or (columns.text if completes else None)
    if columns.messages is not None:
        return messages_of(values, columns.messages)
    if named is not None:
        return string_of(values, named)
    if chat and values.get("messages") is not None:
        return messages_of(values, "messages")
    for column in ("prompt", "text") if completes else ("prompt",):
        if values.get(column) is not None:
            return string_of(values, column)
    if is_openai_request(values):
        raise _asks_nothing(values.get("body"))
    if not chat and values.get("messages") is not None:
        raise RowError("missing_column", "read", "the row has messages; task.chat: true reads them")
    raise missing(values, "prompt")


def _asks_nothing(body: Any) -> RowError:
    """The error of an OpenAI request that has no prompt and no messages."""
    wanted = "an object with prompt or messages"
    if isinstance(body, dict):
        return RowError("missing_column", "read", f"the request's body has {listed(body)}; allowed: {wanted}"[:1000])
    what = "is missing" if body is None else f"is {type(body).__name__}"
    return RowError("bad_request", "read", f"the request's body {what}; allowed: {wanted}")


def messages_of(values: Values, column: str) -> Messages:
    """Return the conversation in a column; RowError if there is none."""
    given = values.get(column)
    if given is None:
        raise missing(values, column)
    fine = isinstance(given, list) and all(
        isinstance(item, dict) and isinstance(item.get("role"), str) for item in given
    )
    if not given or not fine:
        raise RowError("bad_messages", "read", f"the column {column!r} is not a list of messages that each have a role")
    return [
        message | {"content": _content(message["content"])} if "content" in message else message for message in given
    ]


def _content(content: Any) -> str | None:
    """A message's text, or its text parts joined. Rejects other content, which a template would print as Python code."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("bad_messages", "read", f"a message's content is {type(content).__name__}, not text")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RowError(
                "bad_messages", "read", f"a message has a part of type {kind!r}; only text is supported"[:1000]
            )
    return "".join(part["text"] for part in content)


def scored_text(values: Values, columns: Columns) -> tuple[str, bool]:
    """Return the text to score, and whether it is a completion; then the row's own `prompt`, if any, comes before it.

    A reference is scored like a completion, if no other column is named.
    """
    if columns.completion is None and columns.text is None and columns.reference is not None:
        return string_of(values, columns.reference), True
    own = columns.completion is None and columns.text is None and values.get("completion") is not None
    if columns.completion is not None or own:
        return string_of(values, columns.completion or "completion"), True
    return string_of(values, columns.text or "text"), False


def decoded(value: Any, column: str) -> Any:
    """Decode text that is stored as bytes, as older writers of Parquet do; RowError if it is not UTF-8."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError("bad_encoding", "read", f"the column {column!r} is not valid UTF-8: {error.reason}") from None


def checked_text(text: str, column: str) -> str:
    """Return the text; RowError for an unpaired UTF-16 surrogate, which has no UTF-8 encoding and so no tokens."""
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError(
            "bad_encoding", "read", f"the column {column!r} can't be encoded in UTF-8: {error.reason}"
        ) from None
    return text


def id_hashes(ids: Iterable[str]) -> bytes:
    """blake2b of each id, 16 bytes each, one after the other: planning finds an id that occurs twice by these."""
    hashed = hashlib.blake2b
    return b"".join([hashed(text.encode(), digest_size=16).digest() for text in ids])
