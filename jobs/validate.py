"""`draftmill validate`: a dry run. Reads a few rows, shows the first canvas, says how large the job is, decodes a sample.

Writes nothing. What is estimated from a sample is marked with ~; rates and memory are measured by decoding for a moment.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from actors.canvas import Canvas, CanvasMaker
from actors.models import user_error
from actors.rows import row_id, row_key
from actors.text import Tokenizer
from decoders.base import HOLE, Decoder, Request
from jobs.codes import OK
from jobs.packing import auto_unit_rows, longest_first, padding_efficiency
from jobs.prepare import Prepared, prepare
from jobs.progress import duration
from jobs.spec import JobSpec
from jobs.survey import survey
from storage.errors import RowError, UserError
from storage.inputs import local_path
from storage.reader import InputFile, Row, default_id, iterate
from storage.store import open_store

SAMPLE_ROWS = 512
TRIAL_ROWS = 64
TRIAL_S = 5.0
SHOWN_CHARS = 1200
BATCH = 32
"""Samples of a batch for which the padding is estimated."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The first rows of the input as the planner sees them; `total` is how many rows there are, `exact` or estimated."""

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
class Made:
    """A row and its canvas."""

    id: str
    key: int
    canvas: Canvas


@dataclass(frozen=True, slots=True)
class Trial:
    """What decoding a few rows for a moment showed; `memory_bytes` is the peak of the process or of the GPU."""

    rows: int
    tokens: int
    took_s: float
    memory_bytes: int
    where: str


def validate(spec: JobSpec) -> int:
    """Print what the job would do; returns the exit code. Raises UserError where something is unusable."""
    store = open_store(spec.output.path, s3=spec.s3.options())
    prepared = prepare(spec, store)
    sample = take_sample(prepared)
    canvases = first_canvases(prepared, TRIAL_ROWS)
    for line in header(prepared):
        print(line)
    for line in canvas_lines(prepared, canvases):
        print(line)
    for line in size_lines(prepared, sample):
        print(line)
    if canvases:
        for line in trial_lines(prepared, sample, try_out(prepared, canvases)):
            print(line)
    return OK


def take_sample(prepared: Prepared) -> Sample:
    """Survey the first rows; UserError where there is none, or none has the columns."""
    spec, inputs = prepared.spec, prepared.inputs
    limit = min(SAMPLE_ROWS, spec.input.limit or SAMPLE_ROWS)
    few = spec.model_copy(update={"input": spec.input.model_copy(update={"limit": limit})})
    tables = list(survey(few, maker_of(prepared), inputs))
    if not tables:
        raise UserError(f"{spec.input.path}: no rows in {len(inputs)} files", field="input.path")
    table = pa.concat_tables(tables)
    if table["error_kind"].to_pylist().count("missing_column") == table.num_rows:
        raise UserError(f"in every row looked at: {next(_canvases(prepared))}", field="input.columns")
    exact = table.num_rows < limit or limit == spec.input.limit
    total = table.num_rows if exact else estimated_rows(inputs, table)
    return Sample(table, total if spec.input.limit is None else min(total, spec.input.limit), exact)


def estimated_rows(inputs: Sequence[InputFile], table: pa.Table) -> int:
    """Rows of all inputs: Parquet files say theirs, others hold as many per byte as the sampled ones, at least the sample's."""
    if all(file.format == "parquet" and not file.uri.startswith("s3://") for file in inputs):
        return sum(pq.read_metadata(local_path(file)).num_rows for file in inputs)
    # The sample's last row begins at `offset`: all rows in front of it lie in the bytes up to there.
    files, offset = sorted(set(table["file"].to_pylist())), table["offset"][-1].as_py()
    last = inputs[files[-1]]
    inside, rows = (last.size or 0, table.num_rows)
    if offset and last.compression is None:
        inside, rows = offset, table.num_rows - 1
    read = inside + sum(inputs[file].size or 0 for file in files[:-1])
    return max(table.num_rows, round(rows * sum(file.size or 0 for file in inputs) / max(1, read)))


def maker_of(prepared: Prepared) -> CanvasMaker:
    """What makes this job's canvases."""
    return CanvasMaker(prepared.spec.task, prepared.spec.input.columns, prepared.tokenizer, prepared.info)


def first_canvases(prepared: Prepared, count: int) -> list[Made]:
    """The first rows that have a canvas."""
    tried = islice(_canvases(prepared), SAMPLE_ROWS)
    return list(islice((made for made in tried if isinstance(made, Made)), count))


def _canvases(prepared: Prepared) -> Iterator[Made | RowError]:
    spec, maker = prepared.spec, maker_of(prepared)
    columns = spec.input.columns.wanted()
    for file in prepared.inputs:
        for row in iterate(file, columns=columns, chunk_chars=spec.input.chunk_chars, s3=spec.s3.options()):
            try:
                yield _made(spec, maker, row, default_id(file, row.row))
            except RowError as error:
                yield error


def _made(spec: JobSpec, maker: CanvasMaker, row: Row, name: str) -> Made:
    if row.error is not None:
        raise row.error
    values = row.values or {}
    name = row_id(values, spec.input.columns) or name
    key = row_key(values, spec.input.columns, job_seed=spec.seed, sample_id=name)
    return Made(name, key, maker.make(values, key))


# ---- a moment of decoding


def try_out(prepared: Prepared, rows: Sequence[Made]) -> Trial:
    """Load the model and decode these rows for at most TRIAL_S; raises UserError where the weights are unusable."""
    try:
        decoder = _build(prepared, max_rows=len(rows))
    except ValueError as error:
        raise user_error(error, "model.path") from None
    waiting = deque(Request(number, row.key, row.canvas.tokens) for number, row in enumerate(rows))
    _step(decoder, waiting)  # the first forward allocates and chooses kernels
    tokens, began_s = decoder.stats.committed, time.perf_counter()
    while (waiting or decoder.active) and time.perf_counter() - began_s < TRIAL_S:
        _step(decoder, waiting)
    took_s = time.perf_counter() - began_s
    return Trial(len(rows), decoder.stats.committed - tokens, took_s, *_memory(prepared.spec.model.device))


def _build(prepared: Prepared, *, max_rows: int) -> Decoder:
    from decoders.backbones.load import load_backbone
    from decoders.registry import build_decoder, find_heads

    spec, batching = prepared.spec, prepared.spec.batching
    model = spec.model
    backbone = load_backbone(prepared.folder, family=model.family, dtype=model.dtype, device=model.device)
    return build_decoder(
        backbone,
        prepared.info,
        spec.decoder,
        spec.sampling,
        max_rows=max_rows if batching.max_rows == "auto" else batching.max_rows,
        max_tokens=2**20 if batching.max_tokens == "auto" else batching.max_tokens,
        heads=find_heads(spec.decoder, prepared.folder, backbone),
    )


def _step(decoder: Decoder, waiting: deque[Request]) -> None:
    while waiting and decoder.room(len(waiting[0].canvas)):
        decoder.admit([waiting.popleft()])
    decoder.step()


def _memory(device: str) -> tuple[int, str]:
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "CPU memory"
    return torch.cuda.max_memory_allocated(), "GPU memory"


# ---- what is printed


def header(prepared: Prepared) -> Iterator[str]:
    """The job, its model and its inputs."""
    spec, info = prepared.spec, prepared.info
    longest = "any length" if info.max_length is None else f"up to {info.max_length} tokens"
    num_bytes = sum(file.size or 0 for file in prepared.inputs)
    yield f"job       {spec.name}: {spec.task.kind}, mask {spec.task.mask.kind}, decoder {spec.decoder.kind}"
    yield f"model     {spec.model.path}: {info.family}, {info.num_parameters:,} parameters, {longest}"
    yield f"input     {spec.input.path}: {len(prepared.inputs):,} files, {num_bytes / 1e6:,.1f} MB"
    planned = f", planned already: {prepared.plan.rows:,} samples" if prepared.plan is not None else ""
    yield f"output    {spec.output.path}{planned}"


def canvas_lines(prepared: Prepared, canvases: Sequence[Made]) -> Iterator[str]:
    """The first canvas, with each hole as its number of tokens in brackets."""
    if not canvases:
        yield f"canvas    none of the first {SAMPLE_ROWS} rows has one"
        return
    canvas = canvases[0].canvas
    holes = f"{canvas.num_masked} to generate in {len(canvas.holes)} holes"
    yield f"canvas    {canvases[0].id}: {len(canvas.tokens)} tokens, {holes}, key {canvases[0].key:#018x}"
    yield f"  tokens  {' '.join('_' if token == HOLE else str(token) for token in canvas.tokens[:40].tolist())}"
    if prepared.tokenizer is not None:
        shown = prompt_text(canvas, prepared.tokenizer)
        yield "  prompt (a hole is [its tokens])"
        yield from (f"  | {line}" for line in shown[:SHOWN_CHARS].splitlines())
        if len(shown) > SHOWN_CHARS:
            yield "  | ..."


def prompt_text(canvas: Canvas, tokenizer: Tokenizer) -> str:
    """What the model sees, as text; each hole as [number of tokens]."""
    parts: list[str] = []
    shown = 0
    for start, end in canvas.holes:
        parts += [tokenizer.decode(canvas.tokens[shown:start].tolist()), f"[{end - start}]"]
        shown = end
    return "".join([*parts, tokenizer.decode(canvas.tokens[shown:].tolist())])


def size_lines(prepared: Prepared, sample: Sample) -> Iterator[str]:
    """Rows, tokens, units and padding, of the sample and of the whole."""
    lengths, masked, about = sample.lengths(), sample.masked(), "" if sample.exact else "~"
    scale = sample.total / len(lengths)
    yield f"samples   {about}{sample.total:,}; looked at {len(lengths):,}"
    errors = [kind for kind in sample.table["error_kind"].to_pylist() if kind is not None]
    if errors:
        kinds = ", ".join(f"{kind} {errors.count(kind)}" for kind in sorted(set(errors)))
        yield f"  fail    {len(errors)} of those looked at: {kinds}"
    yield f"tokens    {lengths.mean():.1f} a sample (longest {lengths.max()}), {about}{lengths.sum() * scale:,.0f} together"
    yield f"  new     {masked.mean():.1f} a sample, {about}{masked.sum() * scale:,.0f} to generate"
    unit_rows = rows_per_unit(prepared.spec, sample.total)
    yield f"units     {about}{-(-sample.total // unit_rows):,} of at most {unit_rows} samples"
    by_length = lengths[longest_first(lengths)]
    yield (
        f"padding   {padding_efficiency(by_length, batch_rows=BATCH):.1%} of token positions are useful in batches of "
        f"{BATCH} sorted by length, {padding_efficiency(lengths, batch_rows=BATCH):.1%} in the order of the file"
    )


def rows_per_unit(spec: JobSpec, rows: int) -> int:
    """Rows of a unit: the spec's, or what the planner will choose."""
    if spec.output.unit_rows != "auto":
        return spec.output.unit_rows
    return auto_unit_rows(min(rows, spec.batching.window))


def trial_lines(prepared: Prepared, sample: Sample, trial: Trial) -> Iterator[str]:
    """Memory and time, measured and extrapolated."""
    yield f"memory    {trial.memory_bytes / 2**30:.2f} GiB of {trial.where} at its peak, {trial.rows} samples at once"
    rate = trial.tokens / trial.took_s if trial.took_s else 0.0
    todo = float(sample.masked().mean()) * sample.total
    yield f"rate      {rate:,.0f} tokens/s on one worker, measured over {trial.took_s:.1f} s"
    if rate:
        count = prepared.spec.workers.count
        shared = "; divide by the number of workers" if count == "auto" else f" on {count} workers"
        workers = 1 if count == "auto" else count
        yield f"time      ~{duration(todo / rate / workers)}{shared}"
