"""`draftmill show`: rows as a person reads them: the prompt, what the model wrote, by which forward, and why rows failed.

Results hold no prompts, and say in tokens where a hole is. So canvases are made again from the inputs, by the code of a worker
but without the weights. Where the inputs or the tokenizer are gone, only the texts of the results are shown.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby, islice
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.text import Text

from draftmill.actors.messages import WorkUnit
from draftmill.actors.rows.canvas import Canvas
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.rows.unit_io import RowUnitIO
from draftmill.decoders.base import HOLE
from draftmill.jobs.compare.report import render_page, write_page
from draftmill.jobs.exit_codes import OK
from draftmill.jobs.formatting import counted
from draftmill.jobs.plan.plan import SampleName
from draftmill.jobs.plan.resolve import make_job, resolved_of
from draftmill.jobs.results.formats import plain_rows
from draftmill.jobs.results.passes import Pass, latest_rows, passes_of
from draftmill.storage.errors import Error, UserError, printable
from draftmill.storage.parquet import read_parquet
from draftmill.storage.runs.commit import trace_name
from draftmill.storage.runs.records import read_results
from draftmill.storage.stores.store import NotFound, Place, open_store

_log = logging.getLogger(__name__)

ON_TERMINAL: Final = 10
ON_PAGE: Final = 1000
"""Rows that are shown without --limit."""

GIVEN_CHARS: Final = 1200
"""Characters of a given text that are printed; the middle of a longer one is not, unless its row is asked for."""

BEGIN, END = "\N{LEFT CEILING}", "\N{RIGHT FLOOR}"
"""What the model wrote stands between them where there are no colours."""

COLOURS: Final = ("green", "yellow", "cyan", "magenta", "blue", "red")
"""Of a row's forwards, in turn; the first one where no trace says which forward decided a token."""


@dataclass(frozen=True, slots=True)
class ShownPart:
    """A part of a text, given or `made` by the model; `forward` counts the sample's forwards up to the one that decided it."""

    text: str
    made: bool = False
    forward: int | None = None


@dataclass(frozen=True, slots=True)
class ShownRow:
    """A result row, with its text in pieces."""

    row: Mapping[str, Any]
    pieces: Sequence[ShownPart]

    @property
    def name(self) -> str:
        """The row's id, and which sample of it this is, if it has several."""
        return f"{self.row['id']} ({self.row['sample']})" if self.row.get("sample") else str(self.row["id"])

    @property
    def facts(self) -> str:
        """What the row took and how it ended, or why it failed."""
        row = self.row
        if row["status"] != "ok":
            return f"{row['status']} ({row['error_kind']}, {row['error_stage']}): {row['error']}"
        parts = [f"{counted(row['new_tokens'] or 0, 'token')} in {counted(row['nfe'] or 0, 'forward')}"]
        parts += [] if row["finish"] is None else [row["finish"]]
        parts += [] if row["logprob"] is None else [f"log-probability {row['logprob']:.2f}"]
        return ", ".join(parts)


def show(
    place: Place,
    *,
    ids: Sequence[str] = (),
    failed: bool = False,
    limit: int | None = None,
    html: str | None = None,
    overwrite: bool = False,
) -> int:
    """Print rows of a run, or write a page of them; returns the exit code. Of an unfinished run, those of its finished units.

    `ids` and `failed` choose rows, of which at most `limit` are shown. UserError if there is no run, or no row with an id.
    """
    passes = passes_of(open_store(place))
    remaking = SampleReplay(passes)
    most = limit or (ON_TERMINAL if html is None else ON_PAGE)
    rows = list(islice(remaking.shown(chosen_rows(passes, ids, failed=failed)), most))
    lacking = [name for name in ids if name not in {shown.row["id"] for shown in rows}]
    if lacking and len(rows) < most:
        raise UserError(f"no {'failed ' if failed else ''}sample has the id {lacking[0]!r}", field="--id")
    if remaking.problem is not None:
        _log.warning(f"without prompts and marks: {remaking.problem}")
    spec = passes[0].plan.spec
    scope = f"{len(rows):,} of {counted(passes[0].plan.rows, 'sample')}"
    if html is None:
        print_rows(rows, scope, every_column=bool(ids))
        return OK
    lead = f"{spec.decoder.kind} on {spec.model.path}, task {spec.task.kind}, {scope}"
    last = max((piece.forward or 0 for shown in rows for piece in shown.pieces), default=0)
    content = {"title": f"Rows: {spec.name}", "lead": lead, "rows": rows, "last": last}
    size = write_page(html, lambda: render_page(**content, sections=[], foot=""), field="--html", overwrite=overwrite)
    print(f"{html}: {size:,} bytes, {scope}")
    return OK


def chosen_rows(passes: Sequence[Pass], ids: Sequence[str], *, failed: bool) -> Iterator[pa.Table]:
    """The wanted rows in the plan's order, one table for each unit that has any."""
    is_finished = passes[0].manifest is not None
    for table in latest_rows(passes) if is_finished else read_results(passes[0].store):
        wanted = table.filter(pc.is_in(table["id"], pa.array(ids, pa.string()))) if ids else table
        wanted = wanted.filter(pc.not_equal(wanted["status"], "ok")) if failed else wanted
        if wanted.num_rows:
            yield wanted


# ---- the text of a row


@dataclass(slots=True)
class SampleReplay:
    """Makes the canvases of samples again and reads their traces. `problem` says why it can't, once that is known."""

    passes: Sequence[Pass]
    problem: str | None = None
    tokenizer: Tokenizer | None = None
    _unit_ios: dict[int, RowUnitIO] = field(default_factory=dict)

    def shown(self, tables: Iterable[pa.Table]) -> Iterator[ShownRow]:
        """The rows of tables of results, each with its text in pieces; a few rows are in memory at a time."""
        keep = self.passes[0].plan.keep
        slices = (table.slice(n, ON_TERMINAL) for table in tables for n in range(0, table.num_rows, ON_TERMINAL))
        groups = (groupby(plain_rows(rows, keep), key=lambda row: (row["pass"], row["unit"])) for rows in slices)
        for (number, unit), group in chain.from_iterable(groups):
            of_unit = list(group)
            names = {name_of(row) for row in of_unit}
            canvases = self._canvases(self.passes[number - 1], unit, names)
            forwards = self._forwards(self.passes[number - 1], unit, names)
            for row in of_unit:
                name = name_of(row)
                yield ShownRow(row, [*pieces_of(row, canvases.get(name), self.tokenizer, forwards.get(name, {}))])

    def _canvases(self, part: Pass, unit: int, names: set[SampleName]) -> dict[SampleName, Canvas]:
        if self.problem is not None:
            return {}
        planned = part.plan.unit_rows(unit)
        places = [place for place, row in enumerate(planned) if (row.id, row.sample) in names]
        first, last = min(places), max(places)
        work = WorkUnit(0, unit, len(planned), 0, 1, part.number, start=first, stop=last + 1, probe=True)
        try:
            samples = self._unit_io(part).open_unit(work)
        except (Error, ValueError, OSError) as error:
            self.problem = str(error)
            return {}
        notes = [sample.note for sample in samples]
        return {(note.planned.id, note.planned.sample): note.canvas for note in notes if note.canvas is not None}

    def _unit_io(self, part: Pass) -> RowUnitIO:
        """What makes the canvases of a pass: as in a worker, without networks."""
        if part.number not in self._unit_ios:
            was = resolved_of(part.plan)
            self.tokenizer = was.tokenizer
            job = make_job(was, part.plan)
            self._unit_ios[part.number] = RowUnitIO(job, tokenizer=was.tokenizer, info=was.info, worker="show", node="")
        return self._unit_ios[part.number]

    def _forwards(self, part: Pass, unit: int, names: set[SampleName]) -> dict[SampleName, dict[int, int]]:
        """For each sample that has a trace: each decided position, with the sample's forwards up to then."""
        if part.plan.spec.output.trace == "none":
            return {}
        try:
            trace = read_parquet(part.store.get(trace_name(unit))).to_pylist()
        except NotFound:  # it may have been deleted: nothing else needs it
            return {}
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(
                f"{trace_name(unit)} is damaged: {error}; delete it to see texts without its steps"
            ) from None
        found: dict[SampleName, dict[int, int]] = {name: {} for name in names}
        for step in trace:
            if name_of(step) in names:
                found[name_of(step)] |= dict.fromkeys(step["positions"], step["nfe"])
        return found


def name_of(row: Mapping[str, Any]) -> SampleName:
    """What identifies a row of the results or of a trace."""
    return row["id"], row.get("sample") or 0


def pieces_of(
    row: Mapping[str, Any], canvas: Canvas | None, tokenizer: Tokenizer | None, forwards: Mapping[int, int]
) -> Iterator[ShownPart]:
    """The pieces of a row's text, one without a canvas. A hole that was not filled is the number of its tokens in brackets.

    `forwards` has the forward that decided a position of the canvas; where a causal model fills holes one after another, each
    hole has a canvas of its own, and pieces have no forward.
    """
    if canvas is None:
        yield from [ShownPart(row["text"])] if row["text"] else []
        return
    if canvas.infilling is not None:
        fills = [fill["text"] for fill in row["fills"] or ()] or [f"[{limit}]" for limit in canvas.infilling.limits]
        given = [decoded(piece.tolist(), tokenizer, follows=bool(n)) for n, piece in enumerate(canvas.infilling.pieces)]
        yield ShownPart(given[0])
        for fill, text in zip(fills, given[1:], strict=False):
            yield from (ShownPart(fill or "", made=True), ShownPart(text))
        return
    if canvas.lengths is not None and row["fills"] is not None:
        canvas = canvas.with_lengths([fill["end"] - fill["start"] for fill in row["fills"]])
    tokens, where = canvas.tokens.copy(), made_positions(canvas)
    new = row["tokens"] or []
    tokens[where[: len(new)]] = new[: len(where)]
    labels = dict.fromkeys(where.tolist(), True)
    kept = [place for place, token in enumerate(tokens.tolist()) if token != HOLE or row["status"] != "ok"]
    held: list[int] = []
    groups = [
        (label, [int(tokens[place]) for place in places])
        for label, places in groupby(kept, key=lambda place: (place in labels, forwards.get(place)))
    ]
    is_first = True
    for number, ((made, forward), ids) in enumerate(groups):
        if HOLE in ids:
            yield ShownPart(f"[{len(ids)}]", made=True)
            continue
        held += ids
        text = decoded(held, tokenizer, follows=not is_first)
        if text.endswith("\ufffd") and number + 1 < len(groups):  # a character whose other bytes are in the next piece
            continue
        yield ShownPart(text, made, forward if made else None)
        held, is_first = [], False


def made_positions(canvas: Canvas) -> np.ndarray:
    """The positions of a canvas that are generated or scored, in the order of a result's `tokens`; int64."""
    if canvas.scored is not None:
        return canvas.scored
    if canvas.score_from is not None:
        return np.arange(canvas.score_from, len(canvas.tokens))
    return np.flatnonzero(canvas.tokens == HOLE)


def decoded(ids: Sequence[int], tokenizer: Tokenizer | None, *, follows: bool) -> str:
    """The text of tokens, or the ids themselves without a tokenizer; `follows`: other text stands before it."""
    if tokenizer is None:
        return "".join(f"{number} " for number in ids)
    return tokenizer.continuation(ids) if follows else tokenizer.decode(ids)


# ---- on a terminal


def print_rows(rows: Sequence[ShownRow], scope: str, *, every_column: bool) -> None:
    """Print rows: in colours on a terminal, with marks in a pipe or with NO_COLOR."""
    console = Console(highlight=False, soft_wrap=True)
    in_colours = console.is_terminal and not console.no_color
    for shown in rows:
        style = "bold" if shown.row["status"] == "ok" else "bold red"
        console.print(Text(printable(f"{shown.name}  {shown.facts}"), style))
        if shown.pieces:
            forwards = sorted({piece.forward for piece in shown.pieces if piece.forward is not None})
            colours = {forward: COLOURS[place % len(COLOURS)] for place, forward in enumerate(forwards)}
            pieces = shown.pieces if every_column else map(without_middle, shown.pieces)
            styled = (text_of(piece, colours if in_colours else None) for piece in pieces)
            console.print(Text.assemble(*styled))
        if every_column:
            console.print(Text(column_lines(shown.row), "dim"))
        console.print()
    if any(piece.forward is not None for shown in rows for piece in shown.pieces):
        how = "a colour is a forward" if in_colours else f"{BEGIN}2:...{END} is what the second forward decided"
        scope = f"{how}; {scope}"
    console.print(Text(f"{scope}; --id, --failed and --limit choose rows, --html FILE writes a page", "dim"))


def without_middle(piece: ShownPart) -> ShownPart:
    """A given text that is long without its middle."""
    if piece.made or len(piece.text) <= GIVEN_CHARS:
        return piece
    half = GIVEN_CHARS // 2
    left_out = f"[... {len(piece.text) - 2 * half:,} characters ...]"
    return replace(piece, text=f"{piece.text[:half]}{left_out}{piece.text[-half:]}")


def text_of(piece: ShownPart, colours: Mapping[int, str] | None) -> tuple[str, str]:
    """A piece and its style; with `colours`, of forwards, it needs no marks."""
    text = printable(piece.text)
    if not piece.made:
        return text, ""
    if colours is not None:
        return text, "bold " + (COLOURS[0] if piece.forward is None else colours[piece.forward])
    return f"{BEGIN}{'' if piece.forward is None else f'{piece.forward}:'}{text}{END}", ""


def column_lines(row: Mapping[str, Any]) -> str:
    """The columns that have a value, one a line."""
    values = {name: value for name, value in row.items() if value is not None and name not in {"text", "id"}}
    width = max(map(len, values))
    return "\n".join(f"  {name:<{width}}  {printable(str(value))}" for name, value in values.items())
