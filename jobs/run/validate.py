"""`draftmill validate`: a dry run. Reads a few rows, shows the first canvas and the job's size, and loads the model.

Writes nothing. Figures estimated from the sampled rows are marked with ~; memory is measured.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import chain
from tempfile import TemporaryDirectory

import numpy as np

from draftmill.actors.checkpoints.generation import HONOURED
from draftmill.actors.rows.canvas import Canvas
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Complete, Infill, Task
from draftmill.decoders.base import HOLE
from draftmill.jobs.config.paths import check_places
from draftmill.jobs.config.spec import JobSpec, at_date
from draftmill.jobs.drive.notify import check_receivers
from draftmill.jobs.exit_codes import OK, most_failed, too_many_failed
from draftmill.jobs.formatting import counted, size_text
from draftmill.jobs.plan.checks import length_note
from draftmill.jobs.plan.packing import auto_unit_rows, longest_first, padding_efficiency
from draftmill.jobs.plan.resolve import Resolved, resolve, weight_bytes
from draftmill.jobs.results.measure import ready_for
from draftmill.jobs.results.run_input import source_of, with_run_rows
from draftmill.jobs.results.summary import error_rows
from draftmill.jobs.run.first_rows import FirstRow, RowSample, loaded_lines, take_sample
from draftmill.jobs.run.since import new_files, with_last_run
from draftmill.storage.errors import MOST_NAMES, RowError, printable
from draftmill.storage.runs.sums import EXAMPLES, Sums
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
    yield f"job       {spec.name}: {task.kind}{mask}, decoder {spec.decoder.kind}"
    yield f"model     {spec.model.path}: {info.family}, {info.num_parameters:,} parameters, {longest}"
    if note := length_note(task, info):
        yield f"  length  {note}"
    yield from quantized_lines(resolved)
    yield from generation_lines(resolved)
    yield from (f"texts     match {line}" for line in resolved.constraints)
    yield f"input     {spec.input.shown}: {counted(len(resolved.inputs), 'file')}, {num_bytes / 1e6:,.1f} MB"
    planned = f", planned already: {resolved.plan.rows:,} samples" if resolved.plan is not None else ""
    yield f"output    {spec.output.path}{planned}"


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
        return f"{canvas.size.masked} to score in {len(canvas.holes)} holes"
    if canvas.score_from is not None:
        return f"{canvas.size.masked} to score from position {canvas.score_from} on"
    if canvas.infilling is not None:
        holes = len(canvas.infilling.limits)
        return f"up to {canvas.num_masked} to generate in {holes} holes (the first is shown)"
    if canvas.lengths is not None:
        return f"up to {canvas.num_masked} to generate in {len(canvas.holes)} holes whose lengths are to be found"
    if isinstance(task, Infill):
        return f"{canvas.num_masked} to generate in {len(canvas.holes)} holes"
    return f"{canvas.holes[0][0]} of them the prompt, up to {canvas.num_masked} to generate"


def holes_text(task: Infill, canvas: Canvas) -> str:
    """The length of each of the first holes, and its constraint."""
    named = {id(rule): name for name, rule in task.constraint.items()} if isinstance(task.constraint, dict) else {}
    rules, shown = canvas.rules or (None,) * len(canvas.limits), []
    for index, (most, rule) in enumerate(zip(canvas.limits[:MOST_NAMES], rules, strict=False)):
        choices = (most,) if canvas.lengths is None else canvas.lengths.choices[index]
        size = f"{'up to ' if canvas.infilling else ''}{choices[0]}{f'-{choices[-1]}' if choices[1:] else ''}"
        name = "" if rule is None else f" {named.get(id(rule)) or rule.name or rule.kind}"
        shown.append(f"{size} tokens{name}")
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
    lengths, masked, about = sample.lengths(), sample.masked(), "" if sample.exact else "~"
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
    check_places(spec)
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
        allowed = f"more than `errors` allows ({most_failed(sample.total, spec.errors):,})"
        if sample.exact:
            yield f"          {counted(failed, 'failed sample')}: {allowed}; the run will end with exit code 3"
        else:
            yield f"          at this rate ~{failed:,} samples fail, {allowed}; the run would end with exit code 3"
