"""RowUnitIO: the part of a worker that handles rows, text and files.

Opening a unit reads its rows from the inputs, tokenizes them and makes their canvases. Closing it turns outcomes into result
rows (texts, tokens, scores and counts) and commits the unit's file. An exception of one row becomes that row's error and
affects no other row.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from draftmill.actors.job import Job, RowRecipe
from draftmill.actors.messages import Receipt, WorkUnit
from draftmill.actors.rows.canvas import Canvas, finish_row
from draftmill.actors.rows.constraints import ConstraintMaker
from draftmill.actors.rows.fim import TextPart
from draftmill.actors.rows.makers import maker_for
from draftmill.actors.rows.prompts import read_columns
from draftmill.actors.rows.row import Values, model_of, row_id, row_key
from draftmill.actors.rows.samples import Sample, tally_of
from draftmill.actors.rows.stop_text import StopStrings, stop_strings
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Complete, Infill, Score, Task
from draftmill.decoders.base import HOLE, ModelInfo, Outcome, StopText
from draftmill.decoders.common_settings import DrafterPlace
from draftmill.decoders.draws.keys import nth_key, sample_key
from draftmill.storage.errors import ChangedInput, RowError, StoreError, brief
from draftmill.storage.failpoints import failpoint
from draftmill.storage.inputs.kept import KEEP, kept_values, names_read
from draftmill.storage.inputs.reader import fetch_ahead, read_rows
from draftmill.storage.inputs.rows import InputFile, Row, default_id
from draftmill.storage.runs.commit import commit_unit
from draftmill.storage.runs.records import TRACE_SCHEMA, schema_of, table_from_rows
from draftmill.storage.runs.unit_table import PlannedRow, PlanTable, RunTexts
from draftmill.storage.secrets import redacted
from draftmill.storage.stores.store import open_store

_log = logging.getLogger(__name__)

MAX_ERROR_CHARS = 2000
"""Limits error messages, which may quote a long row."""


def decoded_columns(
    task: Task, canvas: Canvas, outcome: Outcome, tokenizer: Tokenizer | None, stops: StopStrings | None = None
) -> dict[str, Any]:
    """The columns of a decoded row; `text` and the fills' texts are None without a tokenizer."""
    columns = _outcome_columns(canvas, outcome, tokenizer) | {"prompt_tokens": len(canvas.tokens) - canvas.size.masked}
    if isinstance(task, Complete | Score):
        columns["truncated_tokens"] = canvas.truncated
    if isinstance(task, Score):
        return columns | _score_columns(canvas, outcome, tokenizer)
    skip = task.skip_special_tokens
    if isinstance(task, Complete):
        own = canvas.settings.stop_text or stops
        return columns | {"text": _completed_text(outcome, tokenizer, own, skip_special=skip)}
    text, fills = finish_row(canvas, outcome.tokens, tokenizer, skip_special=skip)
    return columns | {"text": text, "fills": fills}


def _outcome_columns(canvas: Canvas, outcome: Outcome, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The columns that all tasks have, and those with one value per generated token for a row that asked for them."""
    columns: dict[str, Any] = {
        "tokens": outcome.tokens,
        "new_tokens": len(outcome.tokens),
        "finish": outcome.finish,
        "logprob": outcome.logprob,
        "endpoint": canvas.endpoint,
    }
    if canvas.settings.token_logprobs:
        columns["token_logprobs"] = outcome.token_logprobs
        if tokenizer is not None:  # special tokens have a text, too; bytes that form no character become U+FFFD
            columns["token_texts"] = [tokenizer.continuation([token]) for token in outcome.tokens.tolist()]
    if outcome.top_logprobs is not None:
        columns["top_logprobs"] = [[_best(pair, tokenizer) for pair in best] for best in outcome.top_logprobs]
    return columns


def _best(pair: tuple[int, float], tokenizer: Tokenizer | None) -> dict[str, Any]:
    token, logprob = pair
    return {"token": token, "logprob": logprob, "text": None if tokenizer is None else tokenizer.continuation([token])}


def infilled_columns(
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
    text: str | None = None
    texts: list[str | None] = [None] * len(fills)
    if tokenizer is not None:
        shown = fills
        if task.skip_special_tokens:
            shown = [fill[~np.isin(fill, list(tokenizer.special))] for fill in fills]
        texts = [tokenizer.continuation(fill.tolist()) for fill in shown]
        # A row that begins with a hole is decoded like a continuation.
        decode = tokenizer.decode if len(row.pieces[0]) else tokenizer.continuation
        text = decode(np.concatenate(row.filled(shown)).tolist())
    return _outcome_columns(canvas, outcome, tokenizer) | {
        "prompt_tokens": sum(part.asked.num_prompt for part in parts) if parts else len(filled),
        "text": text,
        "fills": [
            {"start": start, "end": end, "text": fill_text}
            for start, end, fill_text in zip(ends[::2], ends[1::2], texts, strict=False)
        ],
        "truncated_tokens": max((part.asked.cut for part in parts), default=0),
    }


def _completed_text(
    outcome: Outcome, tokenizer: Tokenizer | None, stops: StopText | None, *, skip_special: bool
) -> str | None:
    """The text after the prompt, without the end token or the stop string that ended it."""
    if tokenizer is None:
        return None
    kept = outcome.tokens[: -1 if outcome.finish == "eos" else None].tolist()
    text = tokenizer.continuation(kept, skip_special=skip_special)
    if outcome.finish == "stop" and isinstance(stops, StopStrings):
        return stops.cut(text, outcome.tokens.tolist())
    return text


def _score_columns(canvas: Canvas, outcome: Outcome, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The scored text, what is known of its score and of its tokens, and bits per byte if the text is known."""
    text, fills, scored_text = canvas.text, None, canvas.text
    if canvas.scored is not None:
        tokens = canvas.tokens.copy()
        tokens[canvas.scored] = HOLE
        text, fills = finish_row(replace(canvas, tokens=tokens), outcome.tokens, tokenizer)
        scored_text = None if text is None else "".join(fill["text"] for fill in fills)
    elif text is None and tokenizer is not None:
        text = scored_text = tokenizer.continuation(outcome.tokens.tolist())
    # The bytes of a hole are unknown where it begins or ends within a character.
    is_cut = fills is not None and "\ufffd" in (scored_text or "")
    num_bytes = 0 if scored_text is None or is_cut else len(scored_text.encode())
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


_COUNTS = (
    *("nfe", "nfe_draft", "nfe_kinds", "iterations", "proposed", "accepted", "accept_hist", "reused"),
    *("wait_s", "prefill_s", "decode_s", "total_s", "device_s", "batch_rows", "pad_fraction"),
)


T = TypeVar("T")


@dataclass(slots=True)
class RowNote:
    """The UnitIO's data on a row between opening and closing: the plan's entry, its canvas if it has one, and the values of
    the columns that are copied into the results. `request_model` is the model that an OpenAI request names.
    """

    planned: PlannedRow
    canvas: Canvas | None = None
    keep: dict[str, Any] | None = None
    request_model: str | None = None


class RowUnitIO:
    """Opens and closes the units of one job; see draftmill.actors.loop.runner.UnitIO."""

    def __init__(
        self,
        job: Job,
        *,
        tokenizer: Tokenizer | None,
        info: ModelInfo,
        worker: str,
        node: str,
        has_head: bool = False,
        exact: bool | None = None,
    ) -> None:
        self._job, self._recipe = job, job.recipe
        self._store = open_store(job.store)
        self._plan = PlanTable(self._store, job.parts)
        self._tokenizer = tokenizer
        constraints = None if tokenizer is None else ConstraintMaker(tokenizer, info, job.recipe.ends)
        self._maker = maker_for(job.recipe, tokenizer, info, constraints=constraints)
        self._stops = stop_strings(job.recipe.task, job.recipe.sampling, tokenizer)
        self._worker = worker
        self._node = node
        self._drafter = drafter_of(job, has_head)
        self._keep = job.keep
        self._schema = schema_of(self._keep)
        kept = names_read(self._keep.names if self._keep is not None else ())
        self._columns = read_columns(job.recipe) | kept
        self._exact = exact
        self._earlier = [RunTexts(run) for run in job.earlier]
        self._latest: tuple[Row, int, Canvas | RowError] | None = None

    def open_unit(self, unit: WorkUnit) -> list[Sample]:
        """Read the unit's rows and make their canvases; a failed or quarantined row is a Sample with its error."""
        failpoint("worker.open_unit")
        planned = self._plan.unit_rows(unit.unit)[unit.start : unit.stop]
        samples = [self._sample(unit, unit.start + n, row) for n, row in enumerate(planned)]
        readable = [sample for sample in samples if sample.error is None]
        planned = [sample.note.planned for sample in readable]
        rows = read_planned(planned, self._job.files, self._columns, self._recipe.chunk_chars)
        for sample, row in zip(readable, rows, strict=True):
            self._prepare(sample, row)
        self._latest = None
        self._find_earlier([sample for sample in samples if sample.error is None])
        return samples

    def close_unit(self, unit: WorkUnit, samples: list[Sample]) -> Receipt:
        """Build the unit's table and commit it; a probe's table is built but discarded."""
        failpoint("worker.close_unit")
        rows = [self._result(unit, sample) for sample in samples]
        table = table_from_rows(rows, schema=self._schema)
        committed, began_s = None, time.perf_counter()
        if not unit.probe:
            committed = commit_unit(
                self._store,
                unit=unit.unit,
                table=table,
                fingerprint=self._job.fingerprint,
                code_version=self._job.code_version,
                pass_=unit.pass_,
                attempt=unit.attempt,
                exact=self._exact,
                trace=_trace_table(unit, samples) if self._job.trace else None,
            )
            failpoint("worker.committed")
        commit_s = time.perf_counter() - began_s
        kinds = Counter(sample.error.kind for sample in samples if sample.error is not None)
        names = (unit.lease, unit.unit, self._worker, self._node)
        return Receipt(*names, committed, tally_of(samples), dict(kinds), commit_s=commit_s)

    # ---- rows in

    def _sample(self, unit: WorkUnit, index: int, planned: PlannedRow) -> Sample:
        key = nth_key(sample_key(self._recipe.seed, planned.id), planned.sample)
        sample = Sample(index, key=key, note=RowNote(planned))
        for verdict in unit.verdicts:
            if verdict.start <= index < verdict.stop:
                sample.error = RowError(verdict.kind, verdict.stage, verdict.message)
        return sample

    def _prepare(self, sample: Sample, row: Row) -> None:
        if row.error is not None:
            sample.error = row.error
            return
        sample.note.request_model = model_of(row.values or {})
        if self._keep is not None:
            schema = self._keep
            kept = try_row(lambda: kept_values(row.values or {}, schema), "read", "bad_row")
            if isinstance(kept, RowError):
                sample.error = kept
                return
            sample.note.keep = kept
        canvas = self._canvas(sample, row)
        if isinstance(canvas, RowError):
            sample.error = canvas
        else:
            sample.note.canvas = canvas
            sample.canvas, sample.score_from, sample.settings = canvas.tokens, canvas.score_from, canvas.settings
            sample.scored = canvas.scored
            if canvas.lengths is not None:
                sample.find_lengths(canvas.lengths)
            if canvas.infilling is not None and canvas.infilling.limits:
                sample.fill(canvas.infilling)

    def _find_earlier(self, samples: Sequence[Sample]) -> None:
        """Give rows their texts in the runs that draft. Where these can't be read, rows do without; under rejection, where a text
        depends on its drafts, the unit fails."""
        rows = [(sample.note.planned.id, sample.note.planned.sample) for sample in samples]
        for run in self._earlier:
            try:
                found = run.find(rows)
            except StoreError as error:
                if self._recipe.sampling.acceptance == "rejection":
                    raise
                _log.warning("decoder.drafter: its texts do not draft: %s", redacted(str(error)))
                continue
            for sample, text in zip(samples, found, strict=True):
                ids = self._tokenizer.encode_behind(text) if self._tokenizer and isinstance(text, str) else text
                if ids:
                    sample.earlier = (*sample.earlier, np.array(ids, dtype=np.int32))

    def _canvas(self, sample: Sample, row: Row) -> Canvas | RowError:
        """The canvas of the sample's row, which is made with the row's key: all samples of a row share it, or its error.

        Raises ChangedInput if the row has another id than in the plan.
        """
        planned: PlannedRow = sample.note.planned
        if self._latest is None or self._latest[0] is not row:
            file = self._job.files[planned.file]
            name, key, canvas = make_row(self._recipe, file, row, self._maker.make)
            if name != planned.id:
                raise ChangedInput(
                    f"input.path: {file.uri} has changed since it was planned: row {planned.row} has the id {brief(name)}, which "
                    f"was {brief(planned.id)}"
                )
            self._latest = row, key, canvas
        _, key, canvas = self._latest
        sample.key = sample.key if isinstance(canvas, RowError) else nth_key(key, planned.sample)
        return canvas

    # ---- rows out

    def _result(self, unit: WorkUnit, sample: Sample) -> dict[str, Any]:
        """One row of the result table, from the sample's plan entry, canvas and outcome."""
        columns: dict[str, Any] = {}
        if sample.error is None:
            decoded = try_row(lambda: self._decoded_columns(sample), "detokenize", "detokenize_error")
            if isinstance(decoded, RowError):
                sample.error = decoded
            else:
                columns = decoded
        if sample.error is not None:
            message = redacted(sample.error.message[: 10 * MAX_ERROR_CHARS])[:MAX_ERROR_CHARS]
            columns = {
                "error_kind": sample.error.kind,
                "error_stage": sample.error.stage,
                "error": message,
                "new_tokens": 0,
            }
        row = {
            "id": sample.note.planned.id,
            "sample": sample.note.planned.sample,
            "unit": unit.unit,
            "pass": unit.pass_,
            "attempt": unit.attempt,
            "status": "ok" if sample.error is None else "failed",
            "decoder": self._recipe.decoder.kind,
            "model": self._job.model.checkpoint.url,
            "drafter": self._drafter,
            "key": sample.key,
            "worker": self._worker,
            "node": self._node,
            "request_model": sample.note.request_model,
            "constraint": None if sample.note.canvas is None else sample.note.canvas.constraint,
        }
        if self._keep is not None:
            row[KEEP] = sample.note.keep
        if sample.outcome is not None:
            row |= {name: getattr(sample.outcome, name) for name in _COUNTS}
            row["started_at"] = datetime.fromtimestamp(sample.outcome.started_at_s, UTC)
        return row | columns

    def _decoded_columns(self, sample: Sample) -> dict[str, Any]:
        outcome, canvas = sample.outcome, sample.note.canvas
        assert outcome is not None and canvas is not None
        if canvas.infilling is not None:
            task = self._recipe.task
            assert isinstance(task, Infill), "only holes are filled one after another"
            return infilled_columns(task, canvas, sample.parts, outcome, self._tokenizer)
        found: dict[str, Any] = {}
        if sample.search is not None:
            canvas = canvas.with_lengths(sample.search.taken)
            found = {"length_logprob": sample.search.logprob, "lengths_tried": sample.search.num_tried}
        return decoded_columns(self._recipe.task, canvas, outcome, self._tokenizer, self._stops) | found


def read_planned(
    planned: Sequence[PlannedRow], inputs: Sequence[InputFile], columns: Mapping[str, str], chunk_chars: int | None
) -> list[Row]:
    """The input rows in plan order; reads each file once."""
    rows: dict[tuple[int, int], Row] = {}
    by_file: dict[int, dict[tuple[int, int | None], None]] = {}  # each row once, however many samples it has
    for row in sorted(planned, key=lambda row: row.file):
        by_file.setdefault(row.file, {})[row.row, row.offset] = None
    files = ((inputs[number], list(places)) for number, places in by_file.items())
    for number, (file, places) in zip(by_file, fetch_ahead(files), strict=True):
        read = read_rows(file, places, columns=columns, chunk_chars=chunk_chars)
        rows |= {(number, row.row): row for row in read}
    return [rows[row.file, row.row] for row in planned]


def try_row(call: Callable[[], T], stage: str, kind: str) -> T | RowError:
    """The error boundary of one row: turns whatever `call` raises into the row's error, of `kind` unless it has its own.

    It catches broadly, since tokenizers raise bare Exceptions, their panics are not even Exceptions, and a bug of ours that
    one strange row triggers must not fail its unit. Only exceptions that end a process (an interrupt, an exit) pass through, and
    ChangedInput, which is about the whole input.
    """
    try:
        return call()
    except RowError as error:
        return error
    except (KeyboardInterrupt, SystemExit, GeneratorExit, ChangedInput):
        raise
    except BaseException as error:  # noqa: BLE001 - see above
        return RowError(kind, stage, f"{type(error).__name__}: {error}")


def make_row(
    recipe: RowRecipe, file: InputFile, row: Row, make: Callable[[Values, int], T]
) -> tuple[str, int, T | RowError]:
    """The row's id, its key (0 if it has none), and what `make` makes of its values and key: its canvas, or the canvas's size."""
    name = default_id(file, row.row).encode("utf-8", "backslashreplace").decode()
    if row.error is not None:
        return name, 0, row.error
    values = row.values or {}
    try:
        name = row_id(values, recipe.columns) or name
        key = row_key(values, recipe.columns, job_seed=recipe.seed, sample_id=name)
    except RowError as error:
        return name, 0, error
    return name, key, try_row(lambda: make(values, key), "tokenize", "tokenize_error")


def drafter_of(job: Job, has_head: bool) -> str | None:
    """What drafts: the model itself, its head or masks, an n-gram table, an index of texts, a model's path; None if nothing."""
    drafter = getattr(job.recipe.decoder, "drafter", None)
    if has_head and drafter in (None, "self"):
        return "head"
    return drafter.path if isinstance(drafter, DrafterPlace) else getattr(drafter, "kind", drafter)


def _trace_table(unit: WorkUnit, samples: Sequence[Sample]) -> pa.Table:
    rows = []
    for sample in samples:
        for step in (sample.outcome and sample.outcome.trace) or ():
            row = {name: getattr(step, name) for name in ("iteration", "nfe", "proposed", "committed", "positions")}
            planned: PlannedRow = sample.note.planned
            row |= {"id": planned.id, "unit": unit.unit, "pass": unit.pass_, "sample": planned.sample}
            rows.append(row)
    return table_from_rows(rows, schema=TRACE_SCHEMA)
