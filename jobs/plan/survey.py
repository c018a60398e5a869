"""Reads every input row once and measures its canvas; the planner packs this stream of rows into units.

The stream includes rows that can't be read or tokenized, with the kind of their error; they become failed rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from draftmill.actors.planning.surveying import BATCH_ROWS, Piece, Reading, surveyed
from draftmill.actors.rows.makers import Maker
from draftmill.jobs.spec.job_spec import JobSpec
from draftmill.storage.inputs.kept import KeptTypes
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.runs.unit_table import ROW_SCHEMA

MOST_THREADS = 16
"""Tokenizing releases the interpreter's lock. Reading and counting rows hold it, so more threads would be idle."""


Survey = Callable[[JobSpec, Maker, Sequence[InputFile], KeptTypes | None], Iterator[pa.Table]]
"""A way to read and measure the rows: `survey` in this process, or tasks on a cluster (jobs/driving/backend.py), whose tables
also have the column draftmill.actors.planning.survey_items.HASH."""


def survey(
    spec: JobSpec, maker: Maker, inputs: Sequence[InputFile], kept: KeptTypes | None = None
) -> Iterator[pa.Table]:
    """Yield tables of SURVEYED in input order, at most `input.limit` rows in total.

    `kept` collects the types of the columns that are copied into the results.

    Raises UserError if a whole file is missing or damaged.
    """
    threads = min(MOST_THREADS, os.cpu_count() or 1)
    pieces = [Piece(number, file) for number, file in enumerate(inputs)]
    return surveyed(reading_of(spec), maker, pieces, kept, limit=spec.input.limit, threads=threads)


def reading_of(spec: JobSpec) -> Reading:
    """What a spec says about reading its inputs."""
    return Reading(
        task=spec.task,
        columns=spec.input.columns,
        chunk_chars=spec.input.chunk_chars,
        seed=spec.seed,
        s3=spec.s3.options(),
        kept=tuple(spec.kept),
    )


def each_sample(table: pa.Table, count: int) -> Iterator[pa.Table]:
    """Repeat each row of a survey's table once for every sample (`sampling.n`); the samples of a row stay together.

    Yields small tables, since there may be thousands of samples.
    """
    if count == 1:
        yield table
        return
    at = ROW_SCHEMA.get_field_index("sample")
    at_once = max(1, BATCH_ROWS // count)
    for start in range(0, table.num_rows, at_once):
        rows = table.slice(start, at_once)
        repeated = rows.take(pa.array(np.repeat(np.arange(rows.num_rows), count)))
        numbers = pa.array(np.tile(np.arange(count, dtype=np.int32), rows.num_rows))
        yield repeated.set_column(at, ROW_SCHEMA.field("sample"), numbers)
