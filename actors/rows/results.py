"""Turns an outcome into the columns of its result row: texts, tokens, scores and counts. Pure; knows no plans or units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftmill.actors.rows.canvas import Canvas, finish_row
from draftmill.actors.rows.fim import TextPart
from draftmill.actors.rows.stop_text import StopStrings
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Complete, Infill, Score, Task
from draftmill.decoders.base import HOLE, Outcome
from draftmill.storage.errors import RowError
from draftmill.storage.secrets import redacted

MAX_ERROR_CHARS = 2000
"""Limits error messages, which may quote a long row."""


def decoded(
    task: Task, canvas: Canvas, outcome: Outcome, tokenizer: Tokenizer | None, stops: StopStrings | None = None
) -> dict[str, Any]:
    """The columns of a decoded row; `text` and the fills' texts are None without a tokenizer."""
    columns: dict[str, Any] = {
        "tokens": outcome.tokens,
        "prompt_tokens": len(canvas.tokens) - canvas.size.masked,
        "new_tokens": len(outcome.tokens),
        "finish": outcome.finish,
        "logprob": outcome.logprob,
        "endpoint": canvas.endpoint,
    }
    if isinstance(task, Complete | Score):
        columns["truncated_tokens"] = canvas.truncated
    if isinstance(task, Score):
        return columns | scored(canvas, outcome, tokenizer)
    columns |= each_token(canvas, outcome, tokenizer)
    skip = task.skip_special_tokens
    if isinstance(task, Complete):
        own = stops if canvas.settings.stop_text is None else canvas.stops
        return columns | {"text": completed_text(outcome, tokenizer, own, skip_special=skip)}
    finished = finish_row(canvas, outcome.tokens, tokenizer, skip_special=skip)
    return columns | {"text": finished.text, "fills": finished.fills}


def each_token(canvas: Canvas, outcome: Outcome, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The columns with one value per generated token, for a row that asked for them."""
    if not canvas.settings.token_logprobs:
        return {}
    return {"token_logprobs": outcome.token_logprobs, "token_texts": token_texts(outcome, tokenizer)}


def infilled(
    task: Infill, canvas: Canvas, parts: Sequence[TextPart], outcome: Outcome, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The columns of a row whose holes were filled one after another.

    `tokens` has all generated tokens, including end tokens. A fill's start and end are positions in the filled row, which has
    no end tokens. `truncated_tokens` is the largest number of the row's tokens that were cut from a hole's prompt.
    """
    row = canvas.infilling
    assert row is not None, "a row whose holes are all on its canvas"
    fills = [part.fill for part in parts]
    pieces = row.filled(fills)
    ends = np.cumsum([len(piece) for piece in pieces]).tolist()
    filled = np.concatenate(pieces).tolist()
    shown = fills
    if tokenizer is not None and task.skip_special_tokens:
        shown = [fill[~np.isin(fill, list(tokenizer.special))] for fill in fills]
    said = [] if tokenizer is None else [tokenizer.continuation(fill.tolist()) for fill in shown]
    whole = np.concatenate(row.filled(shown)).tolist()
    return each_token(canvas, outcome, tokenizer) | {
        "tokens": outcome.tokens,
        "prompt_tokens": sum(part.asked.num_prompt for part in parts) if parts else len(filled),
        "new_tokens": len(outcome.tokens),
        "finish": outcome.finish,
        "logprob": outcome.logprob,
        "endpoint": canvas.endpoint,
        "text": None if tokenizer is None else _whole(tokenizer, whole, begun=bool(len(row.pieces[0]))),
        "fills": [
            {"start": ends[2 * hole], "end": ends[2 * hole + 1], "text": said[hole] if said else None}
            for hole in range(len(fills))
        ],
        "truncated_tokens": max((part.asked.cut for part in parts), default=0),
    }


def _whole(tokenizer: Tokenizer, ids: list[int], *, begun: bool) -> str:
    """The text of a row; a row that begins with a hole is decoded like a continuation."""
    return tokenizer.decode(ids) if begun else tokenizer.continuation(ids)


def completed_text(
    outcome: Outcome, tokenizer: Tokenizer | None, stops: StopStrings | None, *, skip_special: bool
) -> str | None:
    """The text after the prompt, without the end token or the stop string that ended it."""
    if tokenizer is None:
        return None
    kept = outcome.tokens[: -1 if outcome.finish == "eos" else None].tolist()
    text = tokenizer.continuation(kept, skip_special=skip_special)
    return text if outcome.finish != "stop" or stops is None else stops.cut(text)


def token_texts(outcome: Outcome, tokenizer: Tokenizer | None) -> list[str] | None:
    """The text of each single token, including special ones; bytes that form no character become U+FFFD."""
    return None if tokenizer is None else [tokenizer.continuation([token]) for token in outcome.tokens.tolist()]


def scored(canvas: Canvas, outcome: Outcome, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The scored text, what is known of its score and of its tokens, and bits per byte if the text is known."""
    text, fills, said = canvas.text, None, canvas.text
    if canvas.scored is not None:
        holes = replace(canvas, tokens=_holed(canvas))
        finished = finish_row(holes, outcome.tokens, tokenizer)
        text, fills = finished.text, finished.fills
        said = None if text is None else "".join(fill["text"] for fill in fills)
    elif text is None and tokenizer is not None:
        text = said = tokenizer.continuation(outcome.tokens.tolist())
    # The bytes of a hole are unknown where it begins or ends within a character.
    num_bytes = 0 if said is None or (fills is not None and "\ufffd" in said) else len(said.encode())
    metrics: dict[str, float] = {}
    if num_bytes and outcome.logprob is not None:
        metrics["bits_per_byte"] = -outcome.logprob / math.log(2) / num_bytes
    return {
        "text": text,
        "fills": fills,
        "token_logprobs": outcome.token_logprobs,
        "is_greedy": outcome.is_greedy,
        "logprob_stderr": outcome.logprob_stderr,
        "metrics": metrics or None,
    }


def _holed(canvas: Canvas) -> NDArray[np.int32]:
    """The canvas with HOLE at its scored positions."""
    tokens = canvas.tokens.copy()
    tokens[canvas.scored] = HOLE
    return tokens


_COUNTS = (
    *("nfe", "nfe_draft", "nfe_kinds", "iterations", "proposed", "accepted", "accept_hist"),
    *("wait_s", "prefill_s", "decode_s", "total_s", "device_s", "batch_rows", "pad_fraction"),
)


def counts_of(outcome: Outcome) -> dict[str, Any]:
    """The columns with the decoder's counts and times."""
    columns = {name: getattr(outcome, name) for name in _COUNTS}
    return columns | {"started_at": datetime.fromtimestamp(outcome.started_at_s, UTC)}


def failed(error: RowError) -> dict[str, Any]:
    """The columns of a failed row: no text, and nothing generated."""
    message = redacted(error.message[: 10 * MAX_ERROR_CHARS])[:MAX_ERROR_CHARS]
    return {"error_kind": error.kind, "error_stage": error.stage, "error": message, "new_tokens": 0}
