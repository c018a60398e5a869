"""OpenAI batch requests as rows: a request's endpoint, and which keys of its body are supported.

A body is accepted as a whole or not at all. A key that changes the text must be supported (row_settings.py) or have its neutral
value; otherwise the row fails, and the error names the key. No key is ignored silently. Pure; knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from draftmill.actors.rows.row import Values
from draftmill.storage.errors import RowError, brief
from draftmill.storage.inputs.lines import is_openai_request

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
