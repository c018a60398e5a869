"""The first rows of a job's inputs: their sizes, their canvases, and the memory of its decoder, which decodes nothing here."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from draftmill.actors.checkpoints.models import user_error
from draftmill.actors.loop.loading import build, load_networks, most_canvases
from draftmill.actors.loop.memory import BatchLimits, fit
from draftmill.actors.planning.surveying import CONSTRAINED
from draftmill.actors.recipe import RowRecipe
from draftmill.actors.rows.canvas import Canvas
from draftmill.actors.rows.makers import Maker
from draftmill.actors.rows.prompts import read_columns
from draftmill.actors.rows.row import row_id, row_key
from draftmill.actors.rows.stop_text import stops_of
from draftmill.actors.rows.unit_io import try_row
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.planning import check_names, each_sample, lacks_a_column, no_column, survey
from draftmill.jobs.plan.resolve import Resolved
from draftmill.storage.errors import RowError, UserError
from draftmill.storage.inputs.inputs import local_path
from draftmill.storage.inputs.reader import iterate
from draftmill.storage.inputs.rows import InputFile, Row, default_id

SAMPLE_ROWS = 512
SHOWN_ROWS = 64
"""Rows whose canvases are made."""


@dataclass(frozen=True, slots=True)
class RowSample:
    """The first rows of the input as the planner sees them; `total` is the number of all rows, `exact` or estimated."""

    table: pa.Table
    total: int
    exact: bool

    def lengths(self) -> NDArray[np.int32]:
        """Canvas tokens of each row, int32 [rows]."""
        return np.asarray(self.table["length"].to_numpy(), dtype=np.int32)

    def masked(self) -> NDArray[np.int32]:
        """Tokens to generate of each row, int32 [rows]."""
        return np.asarray(self.table["holes"].to_numpy(), dtype=np.int32)


@dataclass(frozen=True, slots=True)
class RowCanvas:
    """A row and its canvas."""

    id: str
    key: int
    canvas: Canvas


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The job's decoder on this machine: `memory_bytes` is the peak of the process or of the GPU.

    `room` is what a worker can hold that runs alone here. `exact` says whether results are bit-identical in any batch, `device`
    what is computed with (actors/loop/device_facts.py).
    """

    exact: bool
    memory_bytes: int
    where: str
    room: BatchLimits | None = None
    device: Mapping[str, Any] = field(default_factory=dict)


def take_sample(resolved: Resolved) -> RowSample:
    """Survey the first rows; UserError if there are none, or none has the columns. With `sampling.n` each counts n times."""
    spec, recipe, inputs, each = resolved.spec, resolved.recipe, resolved.inputs, resolved.recipe.sampling.n
    most = max(1, SAMPLE_ROWS // each)
    limit = min(most, spec.input.limit or most)
    tables = list(survey(recipe, resolved.maker(), inputs, limit=limit))
    if not tables:
        raise UserError(f"{spec.input.shown}: no rows in {counted(len(inputs), 'file')}", field="input.path")
    table = pa.concat_tables(tables)
    if lacks_a_column(Counter(table["error_kind"].to_pylist())):
        raise no_column(recipe, inputs)
    exact = table.num_rows < limit or limit == spec.input.limit
    if exact and table["error_kind"].null_count and not pc.any(table[CONSTRAINED.name]).as_py():
        check_names(recipe)
    total = table.num_rows if exact else estimate_rows(inputs, table)
    total = total if spec.input.limit is None else min(total, spec.input.limit)
    return RowSample(pa.concat_tables(each_sample(table, each)), each * total, exact)


def estimate_rows(inputs: Sequence[InputFile], table: pa.Table) -> int:
    """Rows of all inputs: exact for Parquet files, else extrapolated from the sampled rows per byte; at least the sample's."""
    if all(file.format == "parquet" and not file.uri.startswith("s3://") for file in inputs):
        return sum(pq.read_metadata(local_path(file)).num_rows for file in inputs)
    # The sample's last row begins at `offset`: the bytes before it hold all earlier rows.
    files, offset = sorted(set(table["file"].to_pylist())), table["offset"][-1].as_py()
    last = inputs[files[-1]]
    inside, rows = (last.size or 0, table.num_rows)
    if offset and last.compression is None:
        inside, rows = offset, table.num_rows - 1
    read = inside + sum(inputs[file].size or 0 for file in files[:-1])
    return max(table.num_rows, round(rows * sum(file.size or 0 for file in inputs) / max(1, read)))


def first_canvases(resolved: Resolved, count: int) -> list[RowCanvas]:
    """The first rows that have a canvas."""
    tried = islice(_canvases(resolved), SAMPLE_ROWS)
    return list(islice((row for row in tried if isinstance(row, RowCanvas)), count))


def _canvases(resolved: Resolved) -> Iterator[RowCanvas | RowError]:
    recipe, maker = resolved.recipe, resolved.maker()
    columns = read_columns(recipe)
    for file in resolved.inputs:
        for row in iterate(file, columns=columns, chunk_chars=recipe.chunk_chars):
            make = partial(canvas_of, recipe, maker, row, default_id(file, row.row))
            yield try_row(make, "tokenize", "tokenize_error")


def canvas_of(recipe: RowRecipe, maker: Maker, row: Row, name: str) -> RowCanvas:
    if row.error is not None:
        raise row.error
    values = row.values or {}
    name = row_id(values, recipe.columns) or name
    key = row_key(values, recipe.columns, job_seed=recipe.seed, sample_id=name)
    return RowCanvas(name, key, maker.make(values, key))


def load(resolved: Resolved, unit_rows: int) -> LoadedModel:
    """Build the decoder of a worker that has units of `unit_rows` rows; raises UserError if the weights are unusable."""
    import torch

    from draftmill.actors.loop.device_facts import device_facts
    from draftmill.actors.loop.worker import slots_of

    spec, recipe, threads = resolved.spec, resolved.recipe, torch.get_num_threads()
    batching = spec.batching
    try:
        networks = load_networks(resolved.folder, spec.model_place(), recipe.decoder)
        most = most_canvases(recipe.task, recipe.decoder, unit_rows)
        decoder = build(
            networks,
            resolved.info,
            recipe.task,
            recipe.decoder,
            recipe.sampling,
            stops=stops_of(recipe.task, recipe.sampling, resolved.folder, resolved.tokenizer, resolved.info),
            max_rows=slots_of(networks, most) if batching.max_rows == "auto" else batching.max_rows,
            max_tokens=2**20 if batching.max_tokens == "auto" else batching.max_tokens,
        )
        room = fit(decoder, threads=threads)
    except ValueError as error:
        raise user_error(error, "model.path") from None
    except MemoryError as error:
        raise UserError(str(error), field="model.device") from None
    return LoadedModel(networks.exact, *_memory(spec.model.device), room, device_facts(decoder))


def _memory(device: str) -> tuple[int, str]:
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "CPU memory"
    return torch.cuda.max_memory_allocated(), "GPU memory"
