"""`draftmill export`: writes the results of a finished run to one file in another format, or to Parquet files of a chosen size.

Each sample is there once; its row comes from the last pass that has it. Files are local or objects on S3, and appear whole or
not at all. Failed samples can go to a separate file; in the openai format they always do.
"""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from draftmill.jobs.config.paths import is_inside, path_problem
from draftmill.jobs.exit_codes import OK
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.plan import Plan
from draftmill.jobs.results import formats
from draftmill.jobs.results.formats import SUCCESS, Sink
from draftmill.jobs.results.passes import Pass, count_failed, finished_passes, joined, latest_rows, passes_of
from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.inputs.kept import KEEP
from draftmill.storage.runs.records import SCHEMA_VERSION
from draftmill.storage.stores.local import link_new, sync_folder
from draftmill.storage.stores.store import AlreadyExists, Place, is_local, open_store

if TYPE_CHECKING:
    from draftmill.jobs.results.formats import Target

STDOUT = "-"
OUT, ERRORS, COLUMNS, FILE_MB = "--out", "--errors", "--columns", "--file-mb"
S3 = "s3://"
PART = re.compile(rf"part-\d{{5,}}\.parquet|{SUCCESS}")


def export(
    place: Place,
    kind: str,
    out: str,
    *,
    errors: str | None = None,
    columns: Sequence[str] = (),
    overwrite: bool = False,
    order: str = "plan",
    file_mb: int | None = None,
) -> int:
    """Write the run's rows to `out` (and those that are not ok to `errors`, if given); returns the exit code.

    `columns` selects columns of the result table, an empty list all of them; `order` is "plan" or "input". With `file_mb`, `out`
    is a folder of Parquet files of at most so many MiB.

    Raises UserError if the run is not finished, or if it can't be exported in this way.
    """
    store = open_store(place)
    passes = finished_passes(passes_of(store))
    names = columns_of(passes[0].plan, kind, columns)
    if kind == "openai":
        check_openai(passes[0].plan)
        if errors is None and (out != STDOUT or count_failed(passes)):
            errors = errors_beside(out)
    if file_mb is not None:
        if kind != "parquet":
            raise UserError(f"does not apply to --format {kind}; it applies to parquet", field=FILE_MB)
        if errors is not None:
            hint = "the column `status` tells which samples are ok"
            raise UserError(f"does not apply with --file-mb; {hint}", field=ERRORS)
        out = out.rstrip("/") or out
    check_places(store.url, kind, out, errors)
    if file_mb is not None:
        return export_parts(passes, names, place.at(out), file_bytes=file_mb * 2**20, overwrite=overwrite, order=order)
    with ExitStack() as stack:
        # Closed in reverse order: if `out` exists, its errors do too.
        files = [
            stack.enter_context(open_whole(place.at(file), field=field, overwrite=overwrite))
            for field, file in ((OUT, out), (ERRORS, errors))
            if file is not None
        ]
        sinks = [sink_for(kind, file, passes[0].plan, names) for file in files]
        counts = write_rows(tables_of(passes, names, order=order), names, sinks)
    if out != STDOUT:
        print(f"{out}: {counted(counts[0], 'sample')}")
    if errors is not None and out != STDOUT:
        print(f"{errors}: {counted(counts[1], 'sample')}, not ok")
    return OK


def export_parts(
    passes: Sequence[Pass], columns: Sequence[str], out: Place, *, file_bytes: int, overwrite: bool, order: str
) -> int:
    """Write Parquet files of a chosen size into the folder `out`; files of an earlier export go."""
    store = open_store(out)
    # Other names are not ours to replace or delete.
    earlier = [stat.name for prefix in ("part-", SUCCESS) for stat in store.list(prefix) if PART.fullmatch(stat.name)]
    if earlier and not overwrite:
        raise UserError(f"{out.url!r} has {earlier[0]} already; --overwrite replaces it", field=OUT)
    if SUCCESS in earlier:
        store.delete(SUCCESS)
    sink = formats.PartsSink(store.put, *parquet_format(passes[0].plan, columns), file_bytes)
    (count,) = write_rows(tables_of(passes, columns, order=order), columns, [sink])
    for name in set(earlier) - {SUCCESS, *sink.names}:
        store.delete(name)
    store.put(SUCCESS, b"")
    print(f"{out.url}: {counted(count, 'sample')} in {counted(len(sink.names), 'file')}")
    return OK


def write_rows(tables: Iterable[pa.Table], columns: Sequence[str], sinks: Sequence[Sink]) -> list[int]:
    """Write all rows to the one sink, or ok rows to the first and the rest to the second; returns the rows of each.

    Closes the sinks, or abandons them after any error or interrupt.
    """
    counts = [0] * len(sinks)
    with ExitStack() as unfinished:
        for sink in sinks:
            unfinished.callback(sink.abandon)
        for table in tables:
            good = pc.equal(table["status"], "ok")
            parts = [table] if len(sinks) == 1 else [table.filter(good), table.filter(pc.invert(good))]
            for number, part in enumerate(parts):
                sinks[number].add(part.select(list(columns)))
                counts[number] += part.num_rows
        for sink in sinks:
            sink.close()
        unfinished.pop_all()
    return counts


def tables_of(passes: Sequence[Pass], columns: Sequence[str], *, order: str = "plan") -> Iterator[pa.Table]:
    """Yield every row of the run once, in tables of these columns (and `status`); `order` is "plan" or "input"."""
    plan = passes[0].plan
    own = own_columns(plan).intersection(columns)
    read = [name for name in columns if name not in own] + [KEEP] * bool(own)
    tables = latest_rows(passes, columns=list(dict.fromkeys([*read, "status"])))
    fields = [field for field in plan.keep or () if field.name in own]
    for table in in_order(plan, tables, order):  # what follows takes a time for each table and column
        columns = [pc.struct_field(table[KEEP], field.name) for field in fields]
        yield pa.Table.from_arrays([*table.columns, *columns], schema=pa.schema([*table.schema, *fields]))


def in_order(plan: Plan, tables: Iterable[pa.Table], order: str) -> Iterator[pa.Table]:
    """The rows of a table for each unit, in larger tables; `order` is "plan" or "input"."""
    return in_input_order(plan, tables) if order == "input" else joined(tables, AT_ONCE, BYTES_AT_ONCE)


def sink_for(kind: str, file: Target, plan: Plan, columns: Sequence[str]) -> Sink:
    if kind == "openai":
        is_chat = getattr(plan.spec.task, "chat", False)
        return formats.OpenAISink(file, count=plan.spec.sampling.n, chat=is_chat, keep=plan.keep)
    if kind == "jsonl":
        return formats.LineSink(file, keep=plan.keep)
    if kind == "csv":
        return formats.CsvSink(file, columns, keep=plan.keep)
    return formats.ParquetSink(file, *parquet_format(plan, columns))


def parquet_format(plan: Plan, columns: Sequence[str]) -> tuple[pa.Schema, dict[str, str]]:
    """The schema of these columns, and what a file says of itself."""
    known = {field.name: field for field in [*(plan.keep or ()), *plan.schema]}
    metadata = {"fingerprint": plan.fingerprint, "schema_version": str(SCHEMA_VERSION)}
    return pa.schema([known[name] for name in columns]), metadata


# ---- which requests are valid


def own_columns(plan: Plan) -> set[str]:
    """The kept columns that can be named without their struct: those with names that no result column has."""
    return set() if plan.keep is None else set(plan.keep.names) - set(plan.schema.names)


def columns_of(plan: Plan, kind: str, columns: Sequence[str]) -> list[str]:
    """The columns to read; UserError on an unknown column, or if the format fixes its columns."""
    if kind == "openai":
        if columns:
            raise UserError(
                "not available with --format openai, whose fields are fixed; choose jsonl, csv or parquet",
                field=COLUMNS,
            )
        return [*formats.OPENAI_COLUMNS, *([KEEP] if plan.keep is not None else [])]
    known = plan.schema.names
    for name in columns:
        if name not in known and name not in own_columns(plan):
            allowed = ", ".join([*known, *sorted(own_columns(plan))])
            raise UserError(f"{name!r} is not a column of the result; allowed: {allowed}", field=COLUMNS)
    return list(dict.fromkeys(columns)) or list(known)


def check_openai(plan: Plan) -> None:
    """Raise UserError if the run's results are not completions as the OpenAI API defines them."""
    if plan.spec.task.kind == "score" or plan.spec.model.tokenizer == "none":
        raise UserError(
            "openai needs generated texts; allowed for these results: jsonl, csv, parquet", field="--format"
        )


ROW_BITS = 40
"""A place in the input is the file's number, and the row's number in the lower 40 bits: enough for 10^12 rows in a file."""

AT_ONCE = 4096
"""Rows of each table that is yielded."""
BYTES_AT_ONCE = 2**18
"""A table of more bytes is not joined with others: parts of a size stay near it, and long rows take no more memory."""


def in_input_order(plan: Plan, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield the rows of `tables`, one for each unit of the plan in the plan's order, in the order of the inputs. Out of core.

    A plan sorts rows by length, but only within a window of the input, and the windows follow one another. Only one of them is
    in memory at a time: 65,536 rows or 2^25 tokens by default.
    """
    units = zip(plan.sizes(), plan.tables(["file", "row"]), tables, strict=True)
    for _, window in groupby(units, key=lambda unit: unit[0].window):
        _, planned, of_units = zip(*window, strict=True)
        order = np.argsort(np.concatenate([*map(places, planned)]), kind="stable")
        rows = pa.concat_tables(of_units).unify_dictionaries()
        for start in range(0, rows.num_rows, AT_ONCE):
            yield rows.take(pa.array(order[start : start + AT_ONCE]))


def places(planned: pa.Table) -> NDArray[np.int64]:
    """The positions of unit table rows in the input, as numbers that sort in input order; int64 [rows]."""
    files = planned["file"].to_numpy().astype(np.int64)
    return (files << ROW_BITS) + planned["row"].to_numpy()


# ---- where an export may go


def errors_beside(out: str) -> str:
    """`answers.jsonl` -> `answers.errors.jsonl`, in the same folder or under the same prefix."""
    if out == STDOUT:
        raise UserError("with --format openai, failed samples need a separate file; name one", field=ERRORS)
    folder, slash, name = out.rstrip("/").rpartition("/")
    stem, suffix = os.path.splitext(name)
    return f"{folder}{slash}{stem}.errors{suffix}"


def check_places(run_url: str, kind: str, out: str, errors: str | None) -> None:
    """Raise UserError for a place that can't or must not be written. Contacts no server."""
    for field, place in ((OUT, out), (ERRORS, errors)):
        if place is None or place == STDOUT:
            continue
        problem = "'' is not a path" if not place else path_problem(place, ("s3",))
        bucket, _, key = place.removeprefix(S3).partition("/")
        if place.startswith(S3) and (not bucket or {"", ".", ".."} & set(key.split("/"))):
            allowed = "s3://bucket/key, without empty parts, . and .. in the key"
            problem = problem or f"{place!r} does not name an object; allowed: {allowed}"
        if problem := problem or inside_problem(place, run_url):
            raise UserError(problem, field=field)
    if errors is not None and errors in {out, STDOUT}:
        raise UserError(f"{errors!r} can't take the failed samples; name a separate file", field=ERRORS)
    if kind == "parquet" and out == STDOUT:
        raise UserError("Parquet can't be written to standard output; name a file", field=OUT)


def inside_problem(place: str, run_url: str) -> str | None:
    """Why a place in the run directory can't be written; None for any other place."""
    if is_local(place) and is_local(run_url):
        inside = Path(place).expanduser().resolve().is_relative_to(Path(run_url).expanduser().resolve())
    else:
        inside = is_inside(place, run_url)
    return f"{place!r} is inside the run directory, which may hold only the run's own files" if inside else None


# ---- a file that appears whole or not at all


@contextmanager
def open_whole(place: Place, *, field: str, overwrite: bool) -> Iterator[Target]:
    """A file that appears under its name when the block succeeds; if the block raises, nothing is left.

    Raises UserError if the place can't be written. `field` is the argument that names the place.
    """
    if place.url == STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with (
        _object(place, field, overwrite)
        if place.url.startswith(S3)
        else _local_file(place.url, field, overwrite) as file
    ):
        yield file


@contextmanager
def _object(place: Place, field: str, overwrite: bool) -> Iterator[Target]:
    # Imported only here: importing boto3 takes a third of a second, and an export to local disk doesn't need it.
    from draftmill.storage.stores.s3 import S3Store
    from draftmill.storage.stores.upload import Upload, abort_orphans

    bucket, _, key = place.url.removeprefix(S3).partition("/")
    store = S3Store(f"{S3}{bucket}", place.s3)
    abort_orphans(store, key)
    if not overwrite and store.exists(key):
        raise _exists_error(place.url, field)
    try:
        with Upload(store, key, overwrite=overwrite) as file:
            yield file
    except AlreadyExists:
        raise _exists_error(place.url, field) from None


@contextmanager
def _local_file(place: str, field: str, overwrite: bool) -> Iterator[IO[bytes]]:
    path = Path(os.path.expanduser(place)).resolve()  # write a link's target and keep the link
    temporary = path.with_name(f".tmp-{secrets.token_hex(6)}")
    try:
        if path.is_dir():
            raise UserError(f"{place!r} is a folder", field=field)
        if path.exists() and not path.is_file():
            with path.open("wb") as file:  # a pipe or a device: write to it directly, never replace it
                yield file
            return
        if path.exists() and not overwrite:
            raise _exists_error(place, field)
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if overwrite:
            os.replace(temporary, path)
        elif not link_new(temporary, path):  # another program was faster
            raise _exists_error(place, field)
        sync_folder(path.parent)
    except OSError as error:
        kind = UserError if error.filename is not None else StoreError
        raise kind(f"{place}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _exists_error(place: str, field: str) -> UserError:
    return UserError(f"{place!r} already exists; --overwrite replaces it", field=field)
