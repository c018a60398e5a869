"""The first rows of a job's inputs: their canvases, and the memory of its decoder, which decodes nothing here."""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from draftmill.actors.checkpoints.models import user_error
from draftmill.actors.loop.loading import build, load_networks, most_canvases
from draftmill.actors.loop.memory import fit
from draftmill.actors.recipe import RowRecipe
from draftmill.actors.rows.canvas import Canvas
from draftmill.actors.rows.makers import Maker
from draftmill.actors.rows.prompts import read_columns
from draftmill.actors.rows.row import row_id, row_key
from draftmill.actors.rows.stop_text import stops_of
from draftmill.actors.rows.unit_io import try_row
from draftmill.jobs.drive.totals import exactness
from draftmill.jobs.formatting import device_text
from draftmill.jobs.plan.planning import check_kinds
from draftmill.jobs.plan.resolve import Resolved
from draftmill.storage.errors import RowError, UserError
from draftmill.storage.inputs.inputs import is_object, local_path
from draftmill.storage.inputs.reader import iterate
from draftmill.storage.inputs.rows import InputFile, Row, default_id

SAMPLE_ROWS = 512


@dataclass(frozen=True, slots=True)
class FirstRow:
    """A row of the input with this number, where it is there, and its canvas, or why it has none."""

    file: int
    offset: int | None
    id: str
    key: int
    made: Canvas | RowError

    @property
    def error(self) -> str | None:
        return self.made.kind if isinstance(self.made, RowError) else None


@dataclass(frozen=True, slots=True)
class RowSample:
    """The first rows of the input; `total` is the number of all samples, `exact` or estimated."""

    rows: list[FirstRow]
    total: int
    exact: bool

    def lengths(self) -> NDArray[np.int32]:
        """Canvas tokens of each row, int32 [rows]."""
        return np.array([row.made.size.length if isinstance(row.made, Canvas) else 0 for row in self.rows], np.int32)

    def masked(self) -> NDArray[np.int32]:
        """Tokens to generate of each row, int32 [rows]."""
        return np.array([row.made.size.masked if isinstance(row.made, Canvas) else 0 for row in self.rows], np.int32)


def take_sample(resolved: Resolved) -> RowSample:
    """Make the canvases of the first rows; UserError if there are no rows, or none has the columns."""
    spec, recipe, inputs, most = resolved.spec, resolved.recipe, resolved.inputs, resolved.spec.input.limit
    limit = min(SAMPLE_ROWS, most or SAMPLE_ROWS)
    rows = list(islice(first_rows(resolved), limit))
    exact = len(rows) < limit or limit == most
    is_constrained = not exact or any(isinstance(row.made, Canvas) and any(row.made.rules) for row in rows)
    check_kinds(Counter(row.error for row in rows), spec, recipe, inputs, is_constrained=is_constrained)
    total = len(rows) if exact else estimate_rows(inputs, rows)
    return RowSample(rows, recipe.sampling.n * min(total, most or total), exact)


def estimate_rows(inputs: Sequence[InputFile], rows: Sequence[FirstRow]) -> int:
    """Rows of all inputs: exact for Parquet files, else extrapolated from the sampled rows per byte; at least the sample's."""
    if all(file.format == "parquet" and not is_object(file) for file in inputs):
        return sum(pq.read_metadata(local_path(file)).num_rows for file in inputs)
    # The sample's last row begins at `offset`: the bytes before it hold all earlier rows.
    last, offset = inputs[rows[-1].file], rows[-1].offset
    inside, count = last.size or 0, len(rows)
    if offset and last.compression is None:
        inside, count = offset, len(rows) - 1
    read = inside + sum(inputs[file].size or 0 for file in {row.file for row in rows} - {rows[-1].file})
    return max(len(rows), round(count * sum(file.size or 0 for file in inputs) / max(1, read)))


def first_rows(resolved: Resolved) -> Iterator[FirstRow]:
    """All rows of the inputs, in order."""
    recipe, maker = resolved.recipe, resolved.maker()
    columns = read_columns(recipe)
    for number, file in enumerate(resolved.inputs):
        for row in iterate(file, columns=columns, chunk_chars=recipe.chunk_chars):
            name = default_id(file, row.row)
            found = try_row(partial(_first_row, recipe, maker, row, number, name), "tokenize", "tokenize_error")
            yield FirstRow(number, row.offset, name, 0, found) if isinstance(found, RowError) else found


def _first_row(recipe: RowRecipe, maker: Maker, row: Row, file: int, name: str) -> FirstRow:
    if row.error is not None:
        return FirstRow(file, row.offset, name, 0, row.error)
    values = row.values or {}
    name = row_id(values, recipe.columns) or name
    key = row_key(values, recipe.columns, job_seed=recipe.seed, sample_id=name)
    made = try_row(lambda: maker.make(values, key), "tokenize", "tokenize_error")
    return FirstRow(file, row.offset, name, key, made)


def loaded_lines(resolved: Resolved, unit_rows: int) -> Iterator[str]:
    """Build the decoder of a worker that has units of `unit_rows` rows, and say what it computes with here, and its memory.

    UserError if the weights are unusable.
    """
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
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "CPU memory"
    if spec.model.device != "cpu" and torch.cuda.is_available():
        memory = torch.cuda.max_memory_allocated(), "GPU memory"
    yield from device_lines(device_facts(decoder))
    yield f"exact     {exactness(networks.exact)}"
    yield f"memory    {memory[0] / 2**30:.2f} GiB of {memory[1]} at its peak, with the model loaded"
    if room is not None:
        free = f"{room.free_bytes / 2**30:.2f} GiB free on {room.device}"
        yield f"  room    {free}: {room.rows:,} samples of {room.length} tokens at once"


def device_lines(device: Mapping[str, Any]) -> Iterator[str]:
    """What the model computes with, from these facts (actors/loop/device_facts.py), and whether another dtype is faster."""
    yield f"device    {device_text(device)}"
    if (times := device.get("times_float32", 0.0)) > 1:
        slower = f"{device['dtype']} products take {times:.1f} times as long as float32's on this CPU"
        yield f"  dtype   {slower}; auto and float32 are faster"
    if times := device.get("bfloat16_times"):
        yield f"  dtype   float32 is exact; bfloat16 products take {times:.1f} of its time here, and are not exact"
    if drafts := device.get("drafts"):
        yield f"drafts    chosen by time: {drafts}"
