"""An outcome -> the columns of its result row: texts, tokens, scores and counts. Pure; knows nothing of plans and units."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from actors.canvas import Canvas, finish_row
from actors.stop_text import StopStrings
from actors.task import Complete, Score, Task
from actors.text import Tokenizer
from decoders.base import Outcome
from storage.errors import RowError
from storage.secrets import redacted

MAX_ERROR_CHARS = 2000
"""A message may quote its row, and a row may be long."""


def decoded(
    task: Task, canvas: Canvas, outcome: Outcome, tokenizer: Tokenizer | None, stops: StopStrings | None = None
) -> dict[str, Any]:
    """The columns that hold what was decoded; `text` and the fills' texts are None without a tokenizer."""
    columns: dict[str, Any] = {
        "tokens": outcome.tokens,
        "prompt_tokens": len(canvas.tokens) - canvas.size.masked,
        "new_tokens": len(outcome.tokens),
        "finish": outcome.finish,
        "logprob": outcome.logprob,
    }
    if isinstance(task, Complete):
        return columns | {"text": completed_text(outcome, tokenizer, stops)}
    if isinstance(task, Score):
        return columns | scored(canvas, outcome, tokenizer)
    finished = finish_row(canvas, outcome.tokens, tokenizer)
    return columns | {"text": finished.text, "fills": finished.fills}


def completed_text(outcome: Outcome, tokenizer: Tokenizer | None, stops: StopStrings | None) -> str | None:
    """The text behind the prompt, without the end token or the stop string that ended it."""
    if tokenizer is None:
        return None
    text = tokenizer.continuation(outcome.tokens[: -1 if outcome.finish == "eos" else None].tolist())
    return text if outcome.finish != "stop" or stops is None else stops.cut(text)


def scored(canvas: Canvas, outcome: Outcome, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The scored text, each token's log-probability, and bits per byte where the text is known."""
    text = canvas.text
    if text is None and tokenizer is not None:
        text = tokenizer.continuation(outcome.tokens.tolist())
    num_bytes = len((text or "").encode())
    metrics = {}
    if num_bytes and outcome.logprob is not None:
        metrics["bits_per_byte"] = -outcome.logprob / math.log(2) / num_bytes
    return {"text": text, "token_logprobs": outcome.token_logprobs, "metrics": metrics}


def counted(outcome: Outcome) -> dict[str, Any]:
    """The columns that hold what the decoder counted and timed."""
    return {
        "nfe": outcome.nfe,
        "nfe_draft": outcome.nfe_draft,
        "nfe_kinds": outcome.nfe_kinds,
        "iterations": outcome.iterations,
        "proposed": outcome.proposed,
        "accepted": outcome.accepted,
        "accept_hist": outcome.accept_hist,
        "wait_s": outcome.wait_s,
        "prefill_s": outcome.prefill_s,
        "decode_s": outcome.decode_s,
        "total_s": outcome.total_s,
        "device_s": outcome.device_s,
        "batch_rows": outcome.batch_rows,
        "pad_fraction": outcome.pad_fraction,
        "started_at": datetime.fromtimestamp(outcome.started_at_s, UTC),
    }


def failed(error: RowError) -> dict[str, Any]:
    """The columns of a failed row: no text, and nothing generated."""
    message = redacted(error.message[: 10 * MAX_ERROR_CHARS])[:MAX_ERROR_CHARS]
    return {"error_kind": error.kind, "error_stage": error.stage, "error": message, "new_tokens": 0}
