"""Reads a row's id, key, text, prompt, messages and token ids from its columns. Pure; problems raise RowError."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from draftmill.actors.task import Columns, Complete, Score
from draftmill.decoders.base import HOLE, ModelInfo
from draftmill.decoders.draws.keys import sample_key
from draftmill.storage.errors import RowError, brief, list_names
from draftmill.storage.inputs.lines import is_openai_request, lacks_custom_id

Values = Mapping[str, Any]

Messages = list[dict[str, Any]]
"""A conversation: each message with its `role`, and mostly its `content`."""

MAX_ID_CHARS = 4096


def token_error(kind: str, message: str) -> RowError:
    """The error of a row whose text or tokens do not fit the task or the model; the other errors are of the stage `read`."""
    return RowError(kind, "tokenize", message)


def missing(values: Values, column: str) -> RowError:
    """The error of a row that lacks a value in a require column."""
    what = "is null" if column in values else f"is missing; the row has {list_names(values)}"
    return RowError("missing_column", "read", f"the column {column!r} {what}"[:1000])


def require(values: Values, column: str) -> Any:
    """The value in a column; RowError if there is none."""
    value = values.get(column)
    if value is None:
        raise missing(values, column)
    return value


def row_id(values: Values, columns: Columns) -> str | None:
    """Return the row's own id; None if it has none and needs none (the id is then made of file and row number).

    Raises RowError if the spec names a column and the row has no valid value there.
    """
    if columns.id is None and values.get("id") is None:
        return None
    column = columns.id or "id"
    value = decode_bytes(require(values, column), column)
    text = value if isinstance(value, str) else str(value) if isinstance(value, UUID) else whole_number(value)
    if text is None or text == "":
        raise RowError("bad_row", "read", f"the id {value!r} is neither a string nor a whole number"[:1000])
    text = str(text)
    if len(text) > MAX_ID_CHARS:
        raise RowError("bad_row", "read", f"the id is longer than {MAX_ID_CHARS} characters")
    return text


def row_key(values: Values, columns: Columns, *, job_seed: int, sample_id: str) -> int:
    """Return the sample's 64-bit key; a row's own seed replaces the job's. RowError if the seed is not a 64-bit integer.

    A named column, in csv files of texts, overrides the `seed` of an OpenAI request.
    """
    if columns.seed is not None:
        seed = decode_bytes(require(values, columns.seed), columns.seed)
        if isinstance(seed, str) and re.fullmatch(r"[+-]?[0-9]{1,20}", seed.strip()):
            seed = int(seed)
    else:
        body = values.get("body") if is_openai_request(values) else None
        seed = body.get("seed") if isinstance(body, dict) else None
        if seed is None:
            return sample_key(job_seed, sample_id)
    number = whole_number(seed)
    if number is None or not -(2**63) <= number < 2**63:
        raise RowError("bad_row", "read", f"the seed {seed!r} is not a 64-bit whole number"[:1000])
    return sample_key(number, sample_id)


def whole_number(value: Any) -> int | None:
    """The value of a whole number, which a table may have as a decimal; None for anything else."""
    if is_id(value):
        return int(value)
    is_whole = isinstance(value, Decimal) and value.is_finite() and value == value.to_integral_value()
    return int(value) if is_whole else None


def text_of(values: Values, columns: Columns) -> str:
    """Return the row's text; RowError if it has none."""
    return string_of(values, columns.text or ("text" if "text" in values or "prompt" not in values else "prompt"))


def string_of(values: Values, column: str) -> str:
    """Return the text in a column; RowError if there is none."""
    value = decode_bytes(require(values, column), column)
    if not isinstance(value, str):
        raise RowError("bad_row", "read", f"the column {column!r} holds {type(value).__name__}, not text")
    return check_text(value, column)


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
    if lacks_custom_id(values):
        raise RowError("missing_column", "read", "an OpenAI request without custom_id; allowed: a text of its own")
    if not chat and values.get("messages") is not None:
        raise RowError("missing_column", "read", "the row has messages; task.chat: true reads them")
    raise missing(values, "prompt")


def _asks_nothing(body: Any) -> RowError:
    allowed = "an object with prompt or messages"
    if isinstance(body, dict):
        return RowError(
            "missing_column", "read", f"the request's body has {list_names(body)}; allowed: {allowed}"[:1000]
        )
    what = "is missing" if body is None else f"is {type(body).__name__}"
    return RowError("bad_request", "read", f"the request's body {what}; allowed: {allowed}")


def messages_of(values: Values, column: str) -> Messages:
    """Return the conversation in a column; RowError if there is none."""
    given = require(values, column)
    fine = isinstance(given, list) and all(
        isinstance(item, dict) and isinstance(item.get("role"), str) for item in given
    )
    if not given or not fine:
        raise RowError("bad_messages", "read", f"the column {column!r} is not a list of messages that each have a role")
    return [
        message
        | ({"content": _content(message["content"])} if "content" in message else {})
        | (
            {"tool_calls": [_call(call) for call in calls]}
            if isinstance(calls := message.get("tool_calls"), list)
            else {}
        )
        for message in given
    ]


def _call(call: Any) -> Any:
    """A tool call with its arguments as an object, as templates read them; OpenAI's have them as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        reason = f"the arguments of a tool call are not JSON: {brief(function['arguments'])}"
        raise RowError("bad_messages", "read", reason) from None
    return call | {"function": function | {"arguments": arguments}}


def _content(content: Any) -> str | None:
    """A message's text, or its text parts joined. Rejects other content, which a template would print as Python code."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("bad_messages", "read", f"a message's content is {type(content).__name__}, not text")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            reason = f"a message has a part of type {kind!r}; only text is supported"
            raise RowError("bad_messages", "read", reason[:1000])
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


def decode_bytes(value: Any, column: str) -> Any:
    """Decode text that is stored as bytes, as older writers of Parquet do; RowError if it is not UTF-8."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError("bad_encoding", "read", f"the column {column!r} is not valid UTF-8: {error.reason}") from None


def check_text(text: str, column: str) -> str:
    """Return the text; RowError for an unpaired UTF-16 surrogate, which has no UTF-8 encoding and so no tokens."""
    try:
        if not text.isascii():
            text.encode("utf-8")
    except UnicodeEncodeError as error:
        reason = f"the column {column!r} can't be encoded in UTF-8: {error.reason}"
        raise RowError("bad_encoding", "read", reason) from None
    return text


def id_hashes(ids: Iterable[str]) -> bytes:
    """blake2b of each id, 16 bytes each, one after the other: planning finds an id that occurs twice by these."""
    hashed = hashlib.blake2b
    return b"".join([hashed(text.encode(), digest_size=16).digest() for text in ids])


def is_id(value: Any) -> bool:
    """Whether a value is an integer of Python or numpy; bool does not count."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def given_ids(values: Values, column: str, info: ModelInfo, *, nulls: bool) -> NDArray[np.int32]:
    """Return the row's own ids, int32; with `nulls`, each null becomes HOLE."""
    given = require(values, column)
    if not isinstance(given, list | tuple | np.ndarray):
        raise token_error("bad_tokens", f"{column!r} is {type(given).__name__}, not a list of ids")
    for token in given:
        if not is_id(token) and not (nulls and token is None):
            hint = "" if nulls else " (null is allowed only with mask kind given)"
            raise token_error("bad_tokens", f"{token!r} is not a token id{hint}")
    check_ids([0 if token is None else min(int(token), 2**62) for token in given], info)
    return np.asarray([HOLE if token is None else int(token) for token in given], dtype=np.int32)


def check_ids(ids: Sequence[int], info: ModelInfo) -> NDArray[np.int32]:
    """Return the ids as int32; RowError if the model lacks one of them."""
    wide = np.asarray(ids, dtype=np.int64)
    wrong = wide[(wide < 0) | (wide >= info.vocab_size)]
    if len(wrong):
        raise token_error("bad_tokens", f"id {wrong[0]}; the model's ids are 0 to {info.vocab_size - 1}")
    return wide.astype(np.int32)


def check_scored(tokens: NDArray[np.int32], scored: NDArray[np.int64], info: ModelInfo) -> None:
    """Raise RowError if a token to score has no probability, or if a given one is the mask, which would be filled."""
    without = tokens[scored][np.isin(tokens[scored], info.suppressed)]
    if len(without):
        raise token_error("bad_tokens", f"id {without[0]} is never generated by the model, so it has no probability")
    if info.mask_id is not None and bool((tokens == info.mask_id).any()):
        reason = f"id {info.mask_id} is the model's mask, which is not allowed in a text to score"
        raise token_error("bad_tokens", reason)


def check_length(length: int, info: ModelInfo) -> None:
    """Raise RowError if a canvas is longer than the model allows."""
    if info.max_length is not None and length > info.max_length:
        raise token_error("too_long", f"{length} tokens; the model's limit is {info.max_length}")


# ---- OpenAI batch requests as rows: a request's endpoint, and which keys of its body are supported
#
# A body is accepted as a whole or not at all. A key that changes the text must be supported (row_settings.py) or have its neutral
# value; otherwise the row fails, and the error names the key. No key is ignored silently. Pure; knows no model.

COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

HONOURED: Final = frozenset(
    {"prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "logprobs"}
    | {"response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"}
    | {"top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words"}
    | {"min_tokens", "stop_token_ids", "top_logprobs"}
    | {"chat_template_kwargs"}
)
"""Keys of a body that are supported; the last one only with messages."""

WITHOUT_EFFECT: Final = frozenset(
    {"model", "user", "metadata", "store", "service_tier", "stream_options", "parallel_tool_calls", "prediction"}
    | {"safety_identifier", "prompt_cache_key", "priority", "request_id"}
)
"""Keys that have no effect on the text."""

_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("n", "best_of", "length_penalty"), (1,)),
    **dict.fromkeys(("echo", "stream", "use_beam_search", "early_stopping", "include_stop_str_in_output"), (False,)),
    **dict.fromkeys(("continue_final_message", "return_tokens_as_token_ids", "return_token_ids"), (False,)),
    **dict.fromkeys(("spaces_between_special_tokens", "add_generation_prompt", "detokenize"), (True,)),
    **dict.fromkeys(("tools", "functions", "documents"), ([],)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    "suffix": ("",),
    "modalities": (["text"],),
    "verbosity": ("medium",),
}
"""Keys that can change the answer, with their neutral values; null is always neutral."""

_INSTEAD: Final = {
    "n": "set sampling.n for the whole job",
    "best_of": "repeat the request with other ids and seeds",
    "stream": "a batch can't be streamed",
    "ignore_eos": "set task.ignore_eos for the whole job",
    "skip_special_tokens": "set task.skip_special_tokens for the whole job",
}
"""What to do instead of using a rejected key."""


def body_of(values: Values) -> Mapping[str, Any] | None:
    """The body of an OpenAI batch request; None if the row is not one, or its body is not an object."""
    if not is_openai_request(values):
        return None
    body = values.get("body")
    return body if isinstance(body, dict) else None


def model_of(values: Values) -> str | None:
    """The model that an OpenAI request names; None if the row is not one, or names none. It has no effect on the text."""
    name = (body_of(values) or {}).get("model")
    return name if isinstance(name, str) and name else None


def endpoint_of(values: Values, body: Mapping[str, Any]) -> str:
    """The endpoint of a request: decided by its body, or by its url if the body has both a prompt and messages.

    RowError if the url names another API.
    """
    url = values.get("url")
    path = str(url).partition("?")[0].rstrip("/")
    if url is not None and not path.endswith("/completions"):
        raise RowError(
            "bad_request", "read", f"url: {brief(str(url))} is not supported; allowed: {COMPLETIONS}, {CHAT}"
        )
    if body.get("messages") is not None and body.get("prompt") is not None:
        return CHAT if path.endswith("/chat/completions") else COMPLETIONS
    return CHAT if body.get("messages") is not None else COMPLETIONS


def problems_of(body: Mapping[str, Any], own: dict[str, tuple[Any, ...]], endpoint: str) -> Iterator[str]:
    """Why a body is rejected, one sentence per key; `own` are the values that the job fixes for some keys."""
    neutral = _NEUTRAL | {"add_special_tokens": (endpoint != CHAT,)} | own
    stray = ("prompt",) if endpoint == CHAT else ("messages", "chat_template_kwargs")
    for key, value in body.items():
        if value is None or (key, value) == ("chat_template_kwargs", {}) or key in WITHOUT_EFFECT:
            continue
        if key in HONOURED and key not in stray:
            continue
        if key in stray:
            yield f"{key}: does not belong to {endpoint}; allowed: null, or leave it out"
        elif key not in neutral:
            yield f"{key}: {brief(str(value))} is not supported for a single request; allowed: null, or leave it out"
        elif not any(isinstance(value, bool) == isinstance(other, bool) and value == other for other in neutral[key]):
            allowed = ", ".join(json.dumps(one) if one in (None, True, False) else repr(one) for one in neutral[key])
            instead = f"; {_INSTEAD[key]}" if key in _INSTEAD else ""
            yield f"{key}: {brief(str(value))} is not supported for a single request; allowed: {allowed}{instead}"
