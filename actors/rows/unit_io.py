"""RowUnitIO: the part of a worker that handles rows, text and files.

Opening a unit reads its rows from the inputs, tokenizes them and makes their canvases. Closing it turns outcomes into
result rows and commits the unit's file. An exception of one row becomes that row's error and affects no other row.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from draftmill.actors.job import Job
from draftmill.actors.messages import Receipt, WorkUnit
from draftmill.actors.rows.canvas import Canvas
from draftmill.actors.rows.makers import maker_for
from draftmill.actors.rows.requests import named_model
from draftmill.actors.rows.results import counts_of, decoded, failed, infilled
from draftmill.actors.rows.row import Values, row_id, row_key
from draftmill.actors.rows.samples import Sample, tally_of
from draftmill.actors.rows.stop_text import stop_strings
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Infill
from draftmill.decoders.base import ModelInfo
from draftmill.decoders.causal.settings import DrafterPlace, NgramDrafterSettings, SuffixDrafterSettings
from draftmill.decoders.draws.keys import nth_key, sample_key
from draftmill.storage.errors import ChangedInput, RowError, brief
from draftmill.storage.failpoints import failpoint
from draftmill.storage.inputs.kept import KEEP, kept_values, names_read, schema_from_bytes
from draftmill.storage.inputs.reader import fetched_ahead, read_rows
from draftmill.storage.inputs.rows import Row, default_id
from draftmill.storage.runs.commit import commit_unit
from draftmill.storage.runs.records import SCHEMA_VERSION, TRACE_SCHEMA, schema_of, table_from_rows
from draftmill.storage.runs.unit_table import PlannedRow, PlanTable
from draftmill.storage.stores.store import open_store

T = TypeVar("T")


@dataclass(slots=True)
class Note:
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
        ends: Sequence[int] = (),
    ) -> None:
        self._job = job
        self._store = open_store(job.store_url, s3=job.s3)
        self._plan = PlanTable(self._store)
        self._tokenizer = tokenizer
        self._maker = maker_for(
            job.task,
            job.columns,
            tokenizer,
            info,
            decoder=job.decoder,
            sampling=job.sampling,
            ends=ends,
            truncate=job.truncate,
        )
        self._stops = stop_strings(job.task, tokenizer)
        self._worker = worker
        self._node = node
        self._drafter = drafter_of(job, has_head)
        self._keep = None if job.keep is None else schema_from_bytes(job.keep)
        self._schema = schema_of(SCHEMA_VERSION, self._keep)
        self._columns = job.columns.wanted(job.task) | names_read(self._keep.names if self._keep is not None else ())
        self._exact = exact
        self._made: tuple[Row, int, Canvas] | None = None

    def open_unit(self, unit: WorkUnit) -> list[Sample]:
        """Read the unit's rows and make their canvases; a failed or quarantined row is a Sample with its error."""
        failpoint("worker.open_unit")
        planned = self._plan.unit_rows(unit.unit)[unit.start : unit.stop]
        samples = [self._quarantined(unit, unit.start + n, row) for n, row in enumerate(planned)]
        wanted = [sample for sample in samples if sample.error is None]
        rows = self._read([sample.note.planned for sample in wanted])
        for sample, row in zip(wanted, rows, strict=True):
            self._prepare(sample, row)
        self._made = None
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
                conditional=self._job.conditional,
                attempt=unit.attempt,
                exact=self._exact,
                trace=table_from_rows(list(_trace_rows(unit, samples)), schema=TRACE_SCHEMA)
                if self._job.trace
                else None,
            )
            failpoint("worker.committed")
        commit_s = time.perf_counter() - began_s
        kinds = Counter(sample.error.kind for sample in samples if sample.error is not None)
        return Receipt(
            unit.lease,
            unit.unit,
            self._worker,
            self._node,
            committed,
            tally_of(samples),
            dict(kinds),
            commit_s=commit_s,
        )

    # ---- rows in

    def _quarantined(self, unit: WorkUnit, index: int, planned: PlannedRow) -> Sample:
        key = nth_key(sample_key(self._job.seed, planned.id), planned.sample)
        sample = Sample(index, key=key, note=Note(planned))
        for verdict in unit.verdicts:
            if verdict.start <= index < verdict.stop:
                sample.error = RowError(verdict.kind, verdict.stage, verdict.message)
        return sample

    def _read(self, planned: Sequence[PlannedRow]) -> list[Row]:
        """The input rows in plan order; reads each file once."""
        found: dict[tuple[int, int], Row] = {}
        wanted: dict[int, dict[tuple[int, int | None], None]] = {}  # each row once, however many samples it has
        for row in sorted(planned, key=lambda row: row.file):
            wanted.setdefault(row.file, {})[row.row, row.offset] = None
        files = ((self._job.files[number], list(places)) for number, places in wanted.items())
        for number, (file, places) in zip(wanted, fetched_ahead(files, s3=self._job.s3), strict=True):
            rows = read_rows(file, places, columns=self._columns, chunk_chars=self._job.chunk_chars, s3=self._job.s3)
            found |= {(number, row.row): row for row in rows}
        return [found[row.file, row.row] for row in planned]

    def _prepare(self, sample: Sample, row: Row) -> None:
        if row.error is not None:
            sample.error = row.error
            return
        sample.note.request_model = named_model(row.values or {})
        if self._keep is not None:
            schema = self._keep
            kept = guarded(lambda: kept_values(row.values or {}, schema), "read", "bad_row")
            if isinstance(kept, RowError):
                sample.error = kept
                return
            sample.note.keep = kept
        made = guarded(lambda: self._canvas(sample, row), "tokenize", "tokenize_error")
        if isinstance(made, RowError):
            sample.error = made
        else:
            sample.note.canvas = made
            sample.canvas, sample.score_from, sample.settings = made.tokens, made.score_from, made.settings
            sample.scored = made.scored
            if made.infilling is not None:
                sample.infilling = made.infilling
                sample.ask()

    def _canvas(self, sample: Sample, row: Row) -> Canvas:
        """The canvas of the sample's row, which is made with the row's key: all samples of a row have the same one."""
        planned: PlannedRow = sample.note.planned
        if self._made is None or self._made[0] is not row:
            values = row.values or {}
            self._check_id(planned, values)
            key = row_key(values, self._job.columns, job_seed=self._job.seed, sample_id=planned.id)
            self._made = row, key, self._maker.make(values, key)
        _, key, canvas = self._made
        sample.key = nth_key(key, planned.sample)
        return canvas

    def _check_id(self, planned: PlannedRow, values: Values) -> None:
        """Raise ChangedInput if the row has another id than in the plan, RowError for an invalid one, as planning did."""
        file = self._job.files[planned.file]
        found = row_id(values, self._job.columns) or default_id(file, planned.row)
        if found != planned.id:
            raise ChangedInput(
                f"input.path: {file.uri} has changed since it was planned: row {planned.row} has the id {brief(found)}, which "
                f"was {brief(planned.id)}"
            )

    # ---- rows out

    def _result(self, unit: WorkUnit, sample: Sample) -> dict[str, Any]:
        """One row of the result table, from the sample's plan entry, canvas and outcome."""
        said: dict[str, Any] = {}
        if sample.error is None:
            found = guarded(lambda: self._decoded(sample), "detokenize", "detokenize_error")
            if isinstance(found, RowError):
                sample.error = found
            else:
                said = found
        row = {
            "id": sample.note.planned.id,
            "sample": sample.note.planned.sample,
            "unit": unit.unit,
            "pass": unit.pass_,
            "attempt": unit.attempt,
            "status": "ok" if sample.error is None else "failed",
            "decoder": self._job.decoder.kind,
            "model": self._job.model.path,
            "drafter": self._drafter,
            "key": sample.key,
            "worker": self._worker,
            "node": self._node,
            "request_model": sample.note.request_model,
        }
        if self._keep is not None:
            row[KEEP] = sample.note.keep
        if sample.outcome is not None:
            row |= counts_of(sample.outcome)
        if sample.error is not None:
            return row | failed(sample.error)
        return row | said

    def _decoded(self, sample: Sample) -> dict[str, Any]:
        outcome, canvas = sample.outcome, sample.note.canvas
        assert outcome is not None and canvas is not None
        if canvas.infilling is not None:
            task = self._job.task
            assert isinstance(task, Infill), "only holes are filled one after another"
            return infilled(task, canvas, sample.parts, outcome, self._tokenizer)
        return decoded(self._job.task, canvas, outcome, self._tokenizer, self._stops)


def guarded(call: Callable[[], T], stage: str, kind: str) -> T | RowError:
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


def drafter_of(job: Job, has_head: bool) -> str | None:
    """What drafts: the model itself, its draft head, an n-gram table, an index of texts, a model's path; None without drafts."""
    match getattr(job.decoder, "drafter", None):
        case DrafterPlace(path=path):
            return path
        case NgramDrafterSettings():
            return "ngram"
        case SuffixDrafterSettings():
            return "suffix"
        case "self" if has_head:
            return "head"
        case drafter:
            return drafter


def _trace_rows(unit: WorkUnit, samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    for sample in samples:
        for step in (sample.outcome.trace or ()) if sample.outcome is not None else ():
            yield {
                "id": sample.note.planned.id,
                "unit": unit.unit,
                "pass": unit.pass_,
                "iteration": step.iteration,
                "nfe": step.nfe,
                "proposed": step.proposed,
                "committed": step.committed,
                "positions": step.positions,
                "sample": sample.note.planned.sample,
            }
