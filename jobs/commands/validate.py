"""`draftmill validate`: a dry run. Reads a few rows, shows the first canvas and the job's size, and decodes a few samples.

Writes nothing. Figures estimated from the sampled rows are marked with ~; rates and memory are measured in a short trial.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pyarrow.compute as pc

from draftmill.actors.rows.unit_io import guarded
from draftmill.jobs.exit_codes import OK, most_failed, too_many_failed
from draftmill.jobs.finished.summary import EXAMPLES, Results, error_rows
from draftmill.jobs.forecasting.forecast import (
    FAIL,
    TrialSample,
    canvas_lines,
    forecast_lines,
    header,
    size_lines,
    trial_lines,
)
from draftmill.jobs.forecasting.trial import (
    TRIAL_ROWS,
    TRIAL_S,
    canvas_of,
    first_canvases,
    maker_of,
    take_sample,
    try_out,
)
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.prepare import Prepared, prepare
from draftmill.jobs.recurring.new_inputs import new_files
from draftmill.jobs.running.run import ready_for
from draftmill.jobs.spec.dated_path import has_date
from draftmill.jobs.spec.job_spec import JobSpec, at_date
from draftmill.jobs.spec.places import check_places
from draftmill.jobs.watching.notify import check_receivers
from draftmill.storage.errors import RowError
from draftmill.storage.inputs.reader import read_rows
from draftmill.storage.stores.store import open_store


def validate(spec: JobSpec) -> int:
    """Print what the job would do; returns the exit code. Raises UserError if a part of the job is unusable."""
    path = spec.output.path if has_date(spec.output.path) else None
    spec = at_date(spec, datetime.now(UTC))
    check_places(spec)
    store = open_store(spec.output.path, s3=spec.s3.options())
    new_inputs = new_files(spec, store, path)
    if new_inputs is not None:
        print(f"since     {new_inputs.text}")
        if not new_inputs.files:
            print(f"nothing is new in {spec.input.shown}; a run would end at once, with exit code 0")
            return OK
    if spec.input.dedupe is not None:
        print("dedupe    the figures below still count rows whose ids finished runs have as ok; a run leaves them out")
    prepared = prepare(spec, store, loaders=None if new_inputs is None else new_inputs.loaders())
    ready_for(spec, prepared.plan)
    check_receivers(spec.notify)
    sample = take_sample(prepared)
    canvases = first_canvases(prepared, TRIAL_ROWS)
    for line in header(prepared):
        print(line)
    for line in canvas_lines(prepared, canvases):
        print(line)
    for line in size_lines(prepared, sample):
        print(line)
        if line.startswith(FAIL):
            for more in failure_lines(prepared, sample):
                print(more)
    trial = None
    if canvases:
        print(f"trial     loading the model, then decoding for about {TRIAL_S:.0f} s", flush=True)
        trial = try_out(prepared, canvases)
        for line in trial_lines(prepared, sample, trial):
            print(line)
    for line in forecast_lines(prepared, store, sample, trial, path):
        print(line)
    return OK


def failure_lines(prepared: Prepared, sample: TrialSample) -> Iterator[str]:
    """The first failures of each kind, as a run's table has them, and whether there are more than `errors` allows."""
    spec = prepared.spec
    results = Results()
    for row in sample.table.filter(pc.is_valid(sample.table["error_kind"])).to_pylist():
        results.errors[row["error_kind"]] += 1
        named = results.examples.setdefault(row["error_kind"], [])
        if len(named) < EXAMPLES and row["id"] not in [name for name, _ in named]:
            named.append((row["id"], _reason(prepared, row)))
    rows = error_rows(results)[1:]
    width = max(8, *(len(label) for label, _ in rows))
    for label, text in rows:
        yield f"{label:<{width}}  {text}"
    failed = round(sum(results.errors.values()) * sample.total / sample.table.num_rows)
    if too_many_failed(failed, sample.total, spec.errors):
        allowed = f"more than `errors` allows ({most_failed(sample.total, spec.errors):,})"
        if sample.exact:
            yield f"          {counted(failed, 'failed sample')}: {allowed}; the run will end with exit code 3"
        else:
            yield f"          at this rate ~{failed:,} samples fail, {allowed}; the run would end with exit code 3"


def _reason(prepared: Prepared, row: dict[str, Any]) -> str:
    """Why a row of the survey has no canvas: it is read again."""
    spec, file = prepared.spec, prepared.inputs[row["file"]]
    columns = spec.input.columns.wanted(spec.task)
    place = [(row["row"], row["offset"])]
    (found,) = read_rows(file, place, columns=columns, chunk_chars=spec.input.chunk_chars, s3=spec.s3.options())
    made = guarded(partial(canvas_of, spec, maker_of(prepared), found, row["id"]), "tokenize", "tokenize_error")
    return made.message if isinstance(made, RowError) else ""
