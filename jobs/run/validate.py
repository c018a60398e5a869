"""`draftmill validate`: a dry run. Reads a few rows, shows the first canvas and the job's size, and loads the model.

Writes nothing. Figures estimated from the sampled rows are marked with ~; memory is measured.
"""

from __future__ import annotations

import resource
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain, islice
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from draftmill.actors.checkpoints.generation import HONOURED
from draftmill.actors.checkpoints.models import user_error
from draftmill.actors.loop.loading import build, load_networks
from draftmill.actors.loop.memory import fit
from draftmill.actors.rows.canvas import Canvas
from draftmill.actors.rows.prompts import read_columns
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Complete, Infill, Task
from draftmill.decoders.base import HOLE
from draftmill.decoders.common_settings import DecoderChoice
from draftmill.jobs.config.spec import JobSpec, at_date
from draftmill.jobs.drive.notify import check_receivers
from draftmill.jobs.drive.totals import exactness
from draftmill.jobs.exit_codes import OK, failed_text, too_many_failed
from draftmill.jobs.formatting import counted, device_text, size_text
from draftmill.jobs.plan.packing import auto_unit_rows, longest_first, padding_efficiency
from draftmill.jobs.plan.planning import FirstRow, check_kinds, first_rows
from draftmill.jobs.plan.resolve import Resolved, length_note, resolve, weight_bytes
from draftmill.jobs.results.measure import ready_for
from draftmill.jobs.results.run_input import source_of, with_run_rows
from draftmill.jobs.results.summary import error_rows
from draftmill.jobs.run.since import new_files, with_last_run
from draftmill.storage.errors import MOST_NAMES, RowError, UserError, printable
from draftmill.storage.inputs.inputs import is_object, local_path
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.runs.records import EXAMPLES, Sums
from draftmill.storage.stores.store import open_store

SHOWN_CHARS = 4000
SHOWN_ROWS = 64
"""Rows among which prompts that are cut are counted."""
BATCH = 32
"""Batch size, in samples, for the estimate of padding."""


def header(resolved: Resolved) -> Iterator[str]:
    """The job, its model and its inputs."""
    spec, task, info = resolved.spec, resolved.recipe.task, resolved.info
    longest = "any length" if info.max_length is None else f"up to {info.max_length} tokens"
    num_bytes = sum(file.size or 0 for file in resolved.inputs)
    chosen = None if isinstance(task, Complete) else task.mask
    mask = "" if chosen is None else f", mask {chosen.kind}"
    yield f"job       {spec.name}: {task.kind}{mask}, decoder {spec.decoder.kind}{drafter_text(spec.decoder)}"
    yield f"model     {spec.model.path}: {info.family}, {info.num_parameters:,} parameters, {longest}"
    if note := length_note(task, info):
        yield f"  length  {note}"
    yield from quantized_lines(resolved)
    yield from generation_lines(resolved)
    yield from (f"texts     match {line}" for line in resolved.constraints)
    yield f"input     {spec.input.shown}: {counted(len(resolved.inputs), 'file')}, {num_bytes / 1e6:,.1f} MB"
    planned = f", planned already: {counted(resolved.plan.rows, 'sample')}" if resolved.plan is not None else ""
    yield f"output    {spec.output.path}{planned}"


def drafter_text(decoder: DecoderChoice) -> str:
    """What drafts, and where it is, in words; empty if nothing does."""
    drafter: Any = getattr(decoder, "drafter", None)
    path = getattr(drafter, "path", None) or ()
    kind = drafter if isinstance(drafter, str) else getattr(drafter, "kind", "")
    named = " ".join(filter(None, (kind, *([path] if isinstance(path, str) else path))))
    return f", drafter {named}" if named else ""


def quantized_lines(resolved: Resolved) -> Iterator[str]:
    """How a quantized checkpoint is stored, and the memory of its weights once they are unpacked."""
    from draftmill.decoders.backbones.checkpoint import read_config
    from draftmill.decoders.backbones.quantized import find_form

    form, numbers = find_form(read_config(resolved.folder)), resolved.info.num_parameters
    if form is not None:
        stored = size_text(weight_bytes(resolved.folder))
        yield (
            f"weights   quantized to {form.bits} bits, {stored}; unpacked when they are loaded: {size_text(4 * numbers)} in "
            f"float32, {size_text(2 * numbers)} in bfloat16"
        )


def generation_lines(resolved: Resolved) -> Iterator[str]:
    """What the checkpoint recommends for sampling, and whether it is used."""
    from draftmill.decoders.backbones.checkpoint import GENERATION_FILE, read_generation

    given = {
        key: value for key, value in read_generation(resolved.folder).items() if key in HONOURED and value is not None
    }
    if given:
        is_used = resolved.spec.sampling.from_checkpoint
        use = "where the spec leaves them out" if is_used else "not used: sampling.from_checkpoint is false"
        yield f"sampling  {GENERATION_FILE}: {', '.join(f'{key} {value}' for key, value in given.items())} ({use})"


def canvas_lines(resolved: Resolved, rows: Iterable[FirstRow]) -> Iterator[str]:
    """The first canvas; each hole is shown as its number of tokens, in brackets."""
    canvases = [(row, row.made) for row in rows if isinstance(row.made, Canvas)][:SHOWN_ROWS]
    if not canvases:
        yield "canvas    none: every sampled row fails"
        return
    row, canvas = canvases[0]
    todo = work_text(resolved.recipe.task, canvas)
    yield f"canvas    {printable(row.id)}: {len(canvas.tokens)} tokens, {todo}, key {row.key:#018x}"
    yield f"  tokens  {' '.join('_' if token == HOLE else str(token) for token in canvas.tokens[:40].tolist())}"
    if isinstance(resolved.recipe.task, Infill):
        yield f"  holes   {holes_text(resolved.recipe.task, canvas)}"
    if cut := [other.truncated for _, other in canvases if other.truncated]:
        yield f"  cut     {len(cut)} of the first {len(canvases)} prompts do not fit: {sum(cut):,} of their tokens"
    if resolved.tokenizer is not None:
        shown = prompt_text(canvas, resolved.tokenizer)
        if len(shown) > SHOWN_CHARS:  # the examples come first, and the row's own question last
            shown = f"{shown[: SHOWN_CHARS // 2]}\n...\n{shown[-SHOWN_CHARS // 2 :]}"
        yield "  prompt (a hole is [its tokens])"
        yield from (f"  | {printable(line)}" for line in shown.splitlines())


def work_text(task: Task, canvas: Canvas) -> str:
    """The decoder's work on the canvas, in words."""
    if canvas.scored is not None:
        return f"{canvas.size.masked} to score in {counted(len(canvas.holes), 'hole')}"
    if canvas.score_from is not None:
        return f"{canvas.size.masked} to score from position {canvas.score_from} on"
    if canvas.infilling is not None:
        holes = counted(len(canvas.infilling.limits), "hole")
        return f"up to {canvas.num_masked} to generate in {holes} (the first is shown)"
    if canvas.lengths is not None:
        return f"up to {canvas.num_masked} to generate in {counted(len(canvas.holes), 'hole')} of lengths to be found"
    if isinstance(task, Infill):
        return f"{canvas.num_masked} to generate in {counted(len(canvas.holes), 'hole')}"
    return f"{canvas.holes[0][0]} of them the prompt, up to {canvas.num_masked} to generate"


def holes_text(task: Infill, canvas: Canvas) -> str:
    """The length of each of the first holes, and its constraint."""
    named = {id(rule): name for name, rule in task.constraint.items()} if isinstance(task.constraint, dict) else {}
    rules, shown = canvas.rules or (None,) * len(canvas.limits), []
    for index, (most, rule) in enumerate(zip(canvas.limits[:MOST_NAMES], rules, strict=False)):
        choices = (most,) if canvas.lengths is None else canvas.lengths.choices[index]
        size = f"{'up to ' if canvas.infilling else ''}{choices[0]}{f'-{choices[-1]}' if choices[1:] else ''}"
        name = "" if rule is None else f" {named.get(id(rule)) or rule.name or rule.kind}"
        shown.append(f"{size} {'token' if size == '1' else 'tokens'}{name}")
    more = len(canvas.limits) - len(shown)
    return ", ".join(shown) + (f" and {more:,} more" if more else "")


def prompt_text(canvas: Canvas, tokenizer: Tokenizer) -> str:
    """The canvas as text, with each hole as [number of tokens]."""
    parts: list[str] = []
    shown = 0
    for start, end in canvas.holes:
        parts += [tokenizer.decode(canvas.tokens[shown:start].tolist()), f"[{end - start}]"]
        shown = end
    return "".join([*parts, tokenizer.decode(canvas.tokens[shown:].tolist())])


def size_lines(resolved: Resolved, sample: RowSample) -> Iterator[str]:
    """Rows, tokens, units and padding, of the sampled rows and of the whole input."""
    each = resolved.recipe.sampling.n
    (lengths, masked), about = sample.sizes(), "" if sample.exact else "~"
    scale = sample.total / len(lengths)
    yield f"samples   {about}{sample.total:,}; read {each * len(lengths):,} of them"
    errors = Counter(row.error for row in sample.rows if row.error is not None)
    if errors:
        kinds = ", ".join(f"{kind} {each * count}" for kind, count in sorted(errors.items()))
        yield f"  fail    {each * errors.total()} of those read: {kinds}"
        yield from failure_lines(resolved.spec, sample, each)
    yield f"tokens    {lengths.mean():.1f} a sample (longest {lengths.max()}), {about}{lengths.sum() * scale:,.0f} together"
    todo = f"{about}{masked.sum() * scale:,.0f} {resolved.recipe.task.goal}"
    yield f"  new     {masked.mean():.1f} a sample, {todo}"
    unit_rows = rows_per_unit(resolved.spec, sample.total)
    yield f"units     {about}{-(-sample.total // unit_rows):,} of at most {counted(unit_rows, 'sample')}"
    lengths = np.repeat(lengths, each)
    by_length = lengths[longest_first(lengths)]
    yield (
        f"padding   {padding_efficiency(by_length, batch_rows=BATCH):.1%} of token positions are useful in batches of "
        f"{BATCH} sorted by length, {padding_efficiency(lengths, batch_rows=BATCH):.1%} in the order of the file"
    )


def rows_per_unit(spec: JobSpec, rows: int) -> int:
    """Rows per unit: the spec's value, or the planner's choice."""
    if spec.output.unit_rows != "auto":
        return spec.output.unit_rows
    return auto_unit_rows(min(rows, spec.batching.window))


def validate(spec: JobSpec) -> int:
    """Print what the job would do; returns the exit code. Raises UserError if a part of the job is unusable."""
    path, spec = spec.output.path, at_date(spec, datetime.now(UTC))
    store = open_store(spec.place(spec.output.path))
    spec, new_inputs = with_last_run(spec, store, path), new_files(spec, store, path)
    if new_inputs is not None:
        print(f"since     {new_inputs.text}")
        if not new_inputs.files:
            print(f"nothing is new in {spec.input.shown}; a run would end at once, with exit code 0")
            return OK
    if spec.input.dedupe is not None:
        print("dedupe    the figures below still count rows whose ids finished runs have as ok; a run leaves them out")
    resolved = resolve(spec, store, inputs=None if new_inputs is None else new_inputs.files)
    ready_for(spec, resolved.plan)
    check_receivers(spec.notify)
    with TemporaryDirectory(prefix="draftmill-") as place:
        copied = store if resolved.plan is not None else open_store(place)
        resolved = with_run_rows(resolved, copied)
        if source := source_of(spec, resolved.inputs, copied):
            print(f"rows      {source['kept']:,} of the {source['rows']:,} rows of {source['run']}")
        sample = take_sample(resolved)
        for line in chain(header(resolved), canvas_lines(resolved, sample.rows), size_lines(resolved, sample)):
            print(line)
        if any(row.error is None for row in sample.rows):
            print("loading the model", flush=True)
            for line in loaded_lines(resolved, rows_per_unit(resolved.spec, sample.total)):
                print(line)
    return OK


def failure_lines(spec: JobSpec, sample: RowSample, each: int) -> Iterator[str]:
    """The first failures of each kind, as a run's table has them, and whether there are more than `errors` allows."""
    results = Sums()
    for row in sample.rows:
        if isinstance(row.made, RowError):
            results.errors[row.made.kind] = results.errors.get(row.made.kind, 0) + each
            named = results.examples.setdefault(row.made.kind, [])
            if len(named) < EXAMPLES:
                named.append((0, row.id, row.made.message))
    rows = error_rows(results)[1:]
    width = max(8, *(len(label) for label, _ in rows))
    for label, text in rows:
        yield f"{label:<{width}}  {text}"
    failed = round(sum(results.errors.values()) * sample.total / (each * len(sample.rows)))
    if too_many_failed(failed, sample.total, spec.errors):
        text = failed_text(failed, sample.total, spec.errors)
        rate, will = ("", "will") if sample.exact else ("at this rate ", "would")
        yield f"          {rate}{text}; the run {will} end with exit code 3"


# ---- the first rows of the inputs: their canvases, and the memory of the job's decoder, which decodes nothing here

SAMPLE_ROWS = 512


@dataclass(frozen=True, slots=True)
class RowSample:
    """The first rows of the input; `total` is the number of all samples, `exact` or estimated."""

    rows: list[FirstRow]
    total: int
    exact: bool

    def sizes(self) -> NDArray[np.int32]:
        """Canvas tokens of each row, and those to generate, int32 [2, rows]."""
        sizes = [row.made.size if isinstance(row.made, Canvas) else None for row in self.rows]
        return np.array([(size.length, size.masked) if size else (0, 0) for size in sizes], np.int32).T


def take_sample(resolved: Resolved) -> RowSample:
    """Make the canvases of the first rows; UserError if there are no rows, or none has the columns."""
    recipe, inputs, most = resolved.recipe, resolved.inputs, resolved.spec.input.limit
    limit = min(SAMPLE_ROWS, most or SAMPLE_ROWS)
    rows = list(islice(first_rows(resolved, read_columns(recipe)), limit))
    exact = len(rows) < limit or limit == most
    is_constrained = not exact or any(isinstance(row.made, Canvas) and any(row.made.rules) for row in rows)
    check_kinds(Counter(row.error for row in rows), resolved, is_constrained=is_constrained)
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


def loaded_lines(resolved: Resolved, unit_rows: int) -> Iterator[str]:
    """Build the decoder of a worker that has units of `unit_rows` rows, and say what it computes with here, and its memory.

    UserError if the weights are unusable.
    """
    import torch

    from draftmill.actors.loop.device_facts import device_facts

    spec, recipe, threads = resolved.spec, resolved.recipe, torch.get_num_threads()
    try:
        networks = load_networks(resolved.folder, spec.model_place(), recipe.decoder)
        where = resolved.folder, resolved.tokenizer, resolved.info
        decoder = build(networks, recipe, *where, spec.batching.bounds, unit_rows=unit_rows)
        room = fit(decoder, threads=threads)
    except ValueError as error:
        raise user_error(error, "model.path") from None
    except MemoryError as error:
        raise UserError(str(error), field="model.device") from None
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "CPU memory"
    if spec.model.device != "cpu" and torch.cuda.is_available():
        memory = torch.cuda.max_memory_allocated(), "GPU memory"
    yield from device_lines(device_facts(decoder))
    if recipe.decoder.draft_head != "none":
        yield f"head      {'no draft head: its folder has none' if networks.heads is None else 'a draft head drafts'}"
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
