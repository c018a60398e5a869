"""A short trial of a job: rows from its inputs, their canvases, and a decoder that decodes some of them for a few seconds."""

from __future__ import annotations

import resource
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from draftmill.actors.checkpoints.models import user_error
from draftmill.actors.job import WorkerResources
from draftmill.actors.loop.loading import ModelCache, build, load_networks, most_canvases
from draftmill.actors.loop.memory import Room, fit
from draftmill.actors.planning.surveying import CONSTRAINED
from draftmill.actors.rows.canvas import Canvas, runs
from draftmill.actors.rows.makers import Maker
from draftmill.actors.rows.prompts import read_columns
from draftmill.actors.rows.row import row_id, row_key
from draftmill.actors.rows.stop_text import stops_of
from draftmill.actors.rows.unit_io import try_row
from draftmill.decoders.base import HOLE, Decoder, Request
from draftmill.jobs.driving.allocation import fitting_threads
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.plan import check_names, each_sample, lacks_a_column, make_maker, no_column, survey
from draftmill.jobs.plan.prepare import Prepared
from draftmill.jobs.plan.worker_job import decoder_of, place_of
from draftmill.jobs.spec.job_spec import JobSpec
from draftmill.storage.errors import RowError, UserError
from draftmill.storage.inputs.inputs import local_path
from draftmill.storage.inputs.reader import iterate
from draftmill.storage.inputs.rows import InputFile, Row, default_id

SAMPLE_ROWS = 512
TRIAL_ROWS = 64
TRIAL_S = 5.0
FIRST_FLOP, LONGEST_FLOP = 2e10, 2e11
"""Limits of the trial's first forward and of its longest canvas, at 2 FLOP per token and parameter: under a second, and a few
seconds, on one slow core. A forward can't be interrupted, so its size is bounded."""

QUICK_S, LEAST_TOKENS = 0.5, 16
"""After a step that took less than QUICK_S, the next one may admit twice as many tokens. The first budget is at least
LEAST_TOKENS."""


@dataclass(frozen=True, slots=True)
class TrialSample:
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

    @property
    def new_tokens(self) -> float:
        """Tokens to generate of all rows."""
        return float(self.masked().mean()) * self.total


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A row and its canvas."""

    id: str
    key: int
    canvas: Canvas

    def request(self, handle: int) -> Request:
        """The request for a decoder."""
        canvas = self.canvas
        return Request(
            handle,
            self.key,
            canvas.tokens,
            score_from=canvas.score_from,
            settings=canvas.settings,
            scored=canvas.scored,
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """Measurements from briefly decoding a few rows; `memory_bytes` is the peak of the process or of the GPU. `tokens` take
    `took_s` in a job; 0 if the trial was too short to tell.

    `longest` is the length in tokens to which longer canvases were cut, None if none was cut. `room` is what a worker can hold
    that runs alone on this machine. `exact` says whether results are bit-identical in any batch, `device` what was computed
    with (actors/loop/device_facts.py).
    """

    exact: bool
    rows: int
    tokens: int
    took_s: float
    memory_bytes: int
    where: str
    longest: int | None = None
    room: Room | None = None
    device: Mapping[str, Any] = field(default_factory=dict)


class _Step(NamedTuple):
    """A step of a trial: the samples that it admitted, and whether all slots were full, or no sample was left, before it."""

    admitted: int
    is_full: bool
    tokens: int
    took_s: float


def take_sample(prepared: Prepared) -> TrialSample:
    """Survey the first rows; UserError if there are none, or none has the columns. With `sampling.n` each counts n times."""
    spec, inputs, each = prepared.spec, prepared.inputs, prepared.spec.sampling.n
    most = max(1, SAMPLE_ROWS // each)
    limit = min(most, spec.input.limit or most)
    few = spec.model_copy(update={"input": spec.input.model_copy(update={"limit": limit})})
    tables = list(survey(few, maker_of(prepared), inputs))
    if not tables:
        raise UserError(f"{spec.input.shown}: no rows in {counted(len(inputs), 'file')}", field="input.path")
    table = pa.concat_tables(tables)
    if lacks_a_column(Counter(table["error_kind"].to_pylist())):
        raise no_column(spec, inputs)
    exact = table.num_rows < limit or limit == spec.input.limit
    if exact and table["error_kind"].null_count and not pc.any(table[CONSTRAINED.name]).as_py():
        check_names(spec)
    total = table.num_rows if exact else estimate_rows(inputs, table)
    total = total if spec.input.limit is None else min(total, spec.input.limit)
    return TrialSample(pa.concat_tables(each_sample(table, each)), each * total, exact)


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


def maker_of(prepared: Prepared) -> Maker:
    """The maker of this job's canvases."""
    return make_maker(prepared.spec, prepared.tokenizer, prepared.info, prepared.hashes)


def first_canvases(prepared: Prepared, count: int) -> list[TrialRow]:
    """The first rows that have a canvas."""
    tried = islice(_canvases(prepared), SAMPLE_ROWS)
    return list(islice((row for row in tried if isinstance(row, TrialRow)), count))


def _canvases(prepared: Prepared) -> Iterator[TrialRow | RowError]:
    spec, maker = prepared.spec, maker_of(prepared)
    columns = read_columns(spec.input.columns, spec.task, spec.prompt)
    for file in prepared.inputs:
        for row in iterate(file, columns=columns, chunk_chars=spec.input.chunk_chars, s3=spec.s3.options()):
            yield try_row(partial(canvas_of, spec, maker, row, default_id(file, row.row)), "tokenize", "tokenize_error")


def canvas_of(spec: JobSpec, maker: Maker, row: Row, name: str) -> TrialRow:
    if row.error is not None:
        raise row.error
    values = row.values or {}
    name = row_id(values, spec.input.columns) or name
    key = row_key(values, spec.input.columns, job_seed=spec.seed, sample_id=name)
    return TrialRow(name, key, maker.make(values, key))


def try_out(
    prepared: Prepared, rows: Sequence[TrialRow], *, trial_s: float = TRIAL_S, model_cache: ModelCache | None = None
) -> Trial:
    """Load the model and decode these rows for about `trial_s`; raises UserError if the weights are unusable.

    Takes short rows first and cuts long ones, so that no forward takes long on a slow machine; checks the clock after each
    step. `model_cache` holds networks that are in memory already.
    """
    import torch

    from draftmill.actors.loop.device_facts import device_facts

    as_here = WorkerResources(1.0, 0.0, torch.get_num_threads())
    torch.set_num_threads(fitting_threads(as_here, prepared.info.num_parameters).threads)
    most = max(LEAST_TOKENS, int(LONGEST_FLOP / (2 * max(1, prepared.info.num_parameters))))
    cut = sorted((cut_row(row, most) for row in rows), key=lambda row: len(row.canvas.tokens))
    first = int(FIRST_FLOP / (2 * max(1, prepared.info.num_parameters)))
    at_once = _rows_at_once(prepared.spec, [len(row.canvas.tokens) for row in cut], first)
    try:
        decoder, exact = _build(prepared, max_rows=at_once, model_cache=model_cache)
    except ValueError as error:
        raise user_error(error, "model.path") from None
    room = fit(decoder, threads=torch.get_num_threads())
    try:
        tokens, took_s = _measure_rate(decoder, cut, first, trial_s)
    except MemoryError as error:
        raise UserError(str(error), field="model.device") from None
    longest = most if any(len(row.canvas.tokens) > most for row in rows) else None
    at_peak = _memory(prepared.spec.model.device)
    return Trial(exact, min(len(cut), at_once), tokens, took_s, *at_peak, longest, room, device_facts(decoder))


def _rows_at_once(spec: JobSpec, lengths: Sequence[int], budget: int) -> int:
    """Slots for the trial: one a row; for an estimated score as many canvases as a forward of `budget` tokens holds."""
    canvases = most_canvases(spec.task, spec.decoder, len(lengths))
    return canvases if canvases == len(lengths) else max(1, min(canvases, budget // max(lengths)))


def _measure_rate(
    decoder: Decoder, rows: Sequence[TrialRow], budget: int, trial_s: float = TRIAL_S
) -> tuple[int, float]:
    """Decode for about `trial_s`; returns tokens, and the seconds that they take in a job. No tokens if the trial can't tell.

    A job's rate is not that of the first steps, which run prompts for few samples. So the time of a token is that of steps with
    all samples in their slots, and the time of a sample's prompt is that of the steps that admit samples. `budget` is the number
    of canvas tokens the first step admits.
    """
    waiting = deque(row.request(number) for number, row in enumerate(rows))
    steps, began_s = list[_Step](), time.perf_counter()
    while (waiting or decoder.active) and (now_s := time.perf_counter()) - began_s < trial_s:
        left, before = len(waiting), decoder.stats.committed
        _step(decoder, waiting, budget)
        took_s, admitted = time.perf_counter() - now_s, left - len(waiting)
        is_full = not admitted and not (waiting and decoder.room(len(waiting[0].canvas)))
        steps.append(_Step(admitted, is_full, decoder.stats.committed - before, took_s))
        if took_s < QUICK_S:
            budget *= 2
    later = steps[1:] or steps  # the first forward allocates and chooses kernels
    to_generate = sum(end - start for row in rows for start, end in row.canvas.holes)
    if not to_generate or not (waiting or decoder.active):
        return sum(step.tokens for step in later), sum(step.took_s for step in later)
    full = [step for step in later if step.is_full]
    tokens = sum(step.tokens for step in full)
    if not tokens:
        return 0, 0.0
    prompts = [step for step in later if step.admitted] or steps[:1]
    token_s = sum(step.took_s for step in full) / tokens
    prompt_s = sum(step.took_s for step in prompts) / sum(step.admitted for step in prompts)
    return to_generate, to_generate * token_s + len(rows) * prompt_s


def cut_row(row: TrialRow, most: int) -> TrialRow:
    """The row with its canvas cut to `most` tokens around the first one that is generated or scored."""
    canvas = row.canvas
    if len(canvas.tokens) <= most:
        return row
    wanted = canvas.holes[0][0] if canvas.score_from is None else canvas.score_from
    start = max(0, min(wanted - most // 2, len(canvas.tokens) - most))
    tokens = canvas.tokens[start : start + most]
    if canvas.scored is not None:
        scored = canvas.scored - start
        scored = scored[(scored >= 0) & (scored < len(tokens))]
        return replace(row, canvas=Canvas(tokens, (), score_from=int(scored[0]), scored=scored))
    if canvas.score_from is not None:
        return replace(row, canvas=Canvas(tokens, (), score_from=max(1, canvas.score_from - start)))
    return replace(row, canvas=Canvas(tokens, tuple(runs(tokens == HOLE))))


def _build(prepared: Prepared, *, max_rows: int, model_cache: ModelCache | None) -> tuple[Decoder, bool]:
    """The job's decoder, and whether its results are bit-identical in any batch."""
    spec, batching = prepared.spec, prepared.spec.batching
    networks = load_networks(
        prepared.folder, place_of(spec), decoder_of(spec), spec.s3.options(), model_cache=model_cache
    )
    decoder = build(
        networks,
        prepared.info,
        spec.task,
        spec.decoder,
        spec.sampling,
        stops=stops_of(spec.task, spec.sampling, prepared.folder, prepared.tokenizer, prepared.info),
        max_rows=max_rows if batching.max_rows == "auto" else batching.max_rows,
        max_tokens=2**20 if batching.max_tokens == "auto" else batching.max_tokens,
    )
    return decoder, networks.exact


def _step(decoder: Decoder, waiting: deque[Request], budget: int) -> None:
    """Admit rows of up to `budget` tokens in total, at least one if the decoder is empty, and run one step."""
    while waiting and decoder.room(size := len(waiting[0].canvas)) and (size <= budget or not decoder.active):
        decoder.admit([waiting.popleft()])
        budget -= size
    decoder.step()


def _memory(device: str) -> tuple[int, str]:
    import torch

    if device == "cpu" or not torch.cuda.is_available():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "CPU memory"
    return torch.cuda.max_memory_allocated(), "GPU memory"
