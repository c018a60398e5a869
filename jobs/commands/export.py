"""`draftmill export`: writes the results of a finished run to one file in another format, each sample once.

A sample's row comes from the last pass that has it. Files are local or objects on S3, and appear whole or not at all.
Failed samples can go to a separate file; in the openai format they always do.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from jobs.codes import OK
from jobs.commands.export_places import ERRORS, OUT, STDOUT, check_places, errors_beside, written
from jobs.commands.export_rows import OPENAI_COLUMNS, CsvSink, LineSink, ParquetSink, Sink, Target, openai_answer
from jobs.finished.input_order import in_input_order
from jobs.finished.passes import Pass, finished, latest_rows, passes_of
from jobs.plan.plan import Plan
from storage.errors import UserError
from storage.inputs.kept import KEEP
from storage.stores.store import open_store
from storage.stores.verbs import S3Options

FORMATS = ("openai", "jsonl", "csv", "parquet")
ORDERS = ("plan", "input")
COLUMNS = "--columns"


def export(
    run_dir: str,
    kind: str,
    out: str,
    *,
    errors: str | None = None,
    columns: Sequence[str] = (),
    overwrite: bool = False,
    order: str = "plan",
    s3: S3Options | None = None,
) -> int:
    """Write the run's rows to `out` (and those that are not ok to `errors`, if given); returns the exit code.

    `columns` selects columns of the result table, an empty list all of them; `order` is one of ORDERS.

    Raises UserError if the run is not finished, or if it can't be exported in this way.
    """
    store = open_store(run_dir, s3=s3)
    passes = finished(passes_of(store, s3=s3))
    wanted = checked_columns(passes[0].plan, kind, columns)
    if kind == "openai":
        check_openai(passes[0].plan)
        errors = errors or errors_beside(out)
    check_places(store.url, kind, out, errors)
    with ExitStack() as stack:
        # Closed in reverse order: if `out` exists, its errors do too.
        files = [
            stack.enter_context(written(place, field=field, overwrite=overwrite, s3=s3))
            for field, place in ((OUT, out), (ERRORS, errors))
            if place is not None
        ]
        sinks = [sink_for(kind, file, passes[0].plan, wanted) for file in files]
        with ExitStack() as unfinished:  # after any error or interrupt, discard the files
            for sink in sinks:
                unfinished.callback(sink.abandon)
            counts = write_rows(passes, wanted, sinks, order=order)
            for sink in sinks:
                sink.close()
            unfinished.pop_all()
    if out != STDOUT:
        print(f"{out}: {counts[0]:,} samples")
    if errors is not None and out != STDOUT:
        print(f"{errors}: {counts[1]:,} samples that are not ok")
    return OK


def write_rows(
    passes: Sequence[Pass], columns: Sequence[str], sinks: Sequence[Sink], *, order: str = "plan"
) -> list[int]:
    """Write all rows to the one sink, or ok rows to the first and the rest to the second; returns the rows of each."""
    counts = [0] * len(sinks)
    tables = latest_rows(passes, columns=list(dict.fromkeys([*columns, "status"])))
    for table in in_input_order(passes[0].plan, tables) if order == "input" else tables:
        good = pc.equal(table["status"], "ok")
        parts = [table] if len(sinks) == 1 else [table.filter(good), table.filter(pc.invert(good))]
        for number, part in enumerate(parts):
            sinks[number].add(part.select(list(columns)))
            counts[number] += part.num_rows
    return counts


def sink_for(kind: str, file: Target, plan: Plan, columns: Sequence[str]) -> Sink:
    """The sink for a format."""
    if kind == "openai":
        return LineSink(file, partial(openai_answer, chat=is_chat(plan)), keep=plan.keep)
    if kind == "jsonl":
        return LineSink(file, lambda row: row, keep=plan.keep)
    if kind == "csv":
        return CsvSink(file, columns, keep=plan.keep)
    schema = result_schema(plan)
    metadata = {"fingerprint": plan.fingerprint, "schema_version": str(plan.results["schema_version"])}
    return ParquetSink(file, pa.schema([schema.field(name) for name in columns]), metadata)


# ---- which requests are valid


def result_schema(plan: Plan) -> pa.Schema:
    """The schema of the run's result rows."""
    return plan.schema


def is_chat(plan: Plan) -> bool:
    """Whether the run answers conversations."""
    return bool(getattr(plan.spec.task, "chat", False))


def checked_columns(plan: Plan, kind: str, columns: Sequence[str]) -> list[str]:
    """The columns to read; UserError on an unknown column, or if the format fixes its columns."""
    if kind == "openai":
        if columns:
            raise UserError(
                "not available with --format openai, whose fields are fixed; choose jsonl, csv or parquet",
                field=COLUMNS,
            )
        # Older runs lack the columns that were added later.
        known = [name for name in OPENAI_COLUMNS if name in result_schema(plan).names]
        return [*known, *([KEEP] if plan.keep is not None else [])]
    known = result_schema(plan).names
    for name in columns:
        if name not in known:
            raise UserError(f"{name!r} is not a column of the result; allowed: {', '.join(known)}", field=COLUMNS)
    return list(dict.fromkeys(columns)) or list(known)


def check_openai(plan: Plan) -> None:
    """Raise UserError if the run's results are not completions as the OpenAI API defines them."""
    if plan.spec.task.kind == "score":
        raise UserError("the openai format can't hold scores; allowed here: jsonl, csv, parquet", field="--format")
    if plan.spec.model.tokenizer == "none":
        raise UserError(
            "the results have no text (model.tokenizer: none); allowed here: jsonl, csv, parquet", field="--format"
        )
