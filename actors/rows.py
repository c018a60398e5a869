"""What a row says of itself: its id, its key, its text, prompt or messages. Pure; knows the columns and no mask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from actors.task import Columns, Complete, Score
from decoders.draws.keys import sample_key
from storage.errors import RowError, listed
from storage.inputs.lines import is_openai_request

Values = Mapping[str, Any]

Messages = list[dict[str, Any]]
"""A conversation: each message with its `role`, and mostly its `content`."""

MAX_ID_CHARS = 4096


def missing(values: Values, column: str) -> RowError:
    """The error of a row without a value in a column that it needs."""
    what = "is null" if column in values else f"is not there; the row has {listed(values)}"
    return RowError("missing_column", "read", f"the column {column!r} {what}"[:1000])


def row_id(values: Values, columns: Columns) -> str | None:
    """Return the row's own id, None where it has none and needs none (then file and row name it).

    Raises RowError where the spec names a column and the row has no usable value there.
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
    """Return the sample's 64-bit key; a row's own seed stands in for the job's. RowError where it is no 64-bit number.

    A named column comes before the `seed` of an OpenAI request.
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
        raise RowError("bad_row", "read", f"the seed {seed!r} is no 64-bit whole number"[:1000])
    return sample_key(seed, sample_id)


def text_of(values: Values, columns: Columns) -> str:
    """Return the row's text; RowError where there is none."""
    return string_of(values, columns.text or ("text" if "text" in values or "prompt" not in values else "prompt"))


def string_of(values: Values, column: str) -> str:
    """Return the text that stands in a column; RowError where there is none."""
    value = decoded(values.get(column), column)
    if value is None:
        raise missing(values, column)
    if not isinstance(value, str):
        raise RowError("bad_row", "read", f"the column {column!r} holds {type(value).__name__}, not text")
    return checked_text(value, column)


def prompt_of(values: Values, columns: Columns, task: Complete | Score, *, chat: bool) -> str | Messages:
    """Return what the row has in front of what the model is to say: its prompt, or, for a `chat`, its conversation.

    A named column comes first; then, for a chat, a column `messages`; then `prompt`; then, where nothing is scored, `text`.
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
    """The error of an OpenAI request that holds no prompt and no messages."""
    wanted = "an object with prompt or messages"
    if isinstance(body, dict):
        return RowError("missing_column", "read", f"the request's body has {listed(body)}; allowed: {wanted}"[:1000])
    what = "is missing" if body is None else f"is {type(body).__name__}"
    return RowError("bad_request", "read", f"the request's body {what}; allowed: {wanted}")


def messages_of(values: Values, column: str) -> Messages:
    """Return the conversation that stands in a column; RowError where there is none."""
    given = values.get(column)
    if given is None:
        raise missing(values, column)
    fine = isinstance(given, list) and all(
        isinstance(item, dict) and isinstance(item.get("role"), str) for item in given
    )
    if not given or not fine:
        raise RowError("bad_messages", "read", f"the column {column!r} holds no list of messages with a role each")
    return [
        message | {"content": _content(message["content"])} if "content" in message else message for message in given
    ]


def _content(content: Any) -> str | None:
    """What a message says: its text, or its text parts joined. A template would spell anything else out, braces and all."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("bad_messages", "read", f"a message's content is {type(content).__name__}, not text")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RowError(
                "bad_messages", "read", f"a message has a part of type {kind!r}; only text can be read"[:1000]
            )
    return "".join(part["text"] for part in content)


def scored_text(values: Values, columns: Columns) -> tuple[str, bool]:
    """Return the text to score and whether it is a completion, which the row's own `prompt`, if it has one, stands before."""
    own = columns.completion is None and columns.text is None and values.get("completion") is not None
    if columns.completion is not None or own:
        return string_of(values, columns.completion or "completion"), True
    return string_of(values, columns.text or "text"), False


def decoded(value: Any, column: str) -> Any:
    """Return text that is stored as bytes as text, as older writers of Parquet store it; RowError where it is not UTF-8."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError("bad_encoding", "read", f"the column {column!r} is not valid UTF-8: {error.reason}") from None


def checked_text(text: str, column: str) -> str:
    """Return the text; RowError for half of a UTF-16 pair, which has no UTF-8 form and so no tokens."""
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowError("bad_encoding", "read", f"the column {column!r} has no UTF-8 form: {error.reason}") from None
    return text
