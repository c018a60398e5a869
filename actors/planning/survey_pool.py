"""Reads and measures rows by Ray tasks, in the order of the inputs: what tasks find is the same as in the planner's process.

    inputs --chunks--> tasks, several at a time --items, in order--> tables

A chunk is the work of one task: small files together, or a slice of a large one. A task sends the rows of its chunk in items.
To cut a large file, something must be known of it: the row groups of a Parquet file,
how many lines each of its byte ranges has. Tasks find that out, too, a number of questions ahead.

Nothing is retried on the cluster: the rest of a chunk whose task is lost, or fails, is done in the planner's process. Errors are
then those of a planner without Ray.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
from ray.exceptions import RayError

from draftmill.actors.checkpoints.models import TOKENIZER_FILES
from draftmill.actors.job import RowRecipe
from draftmill.actors.planning.surveying import HASH, SURVEYED, FilePart, survey_pieces
from draftmill.actors.rows.makers import Maker, maker_for
from draftmill.actors.rows.row import id_hashes
from draftmill.actors.rows.text import Tokenizer, load_tokenizer
from draftmill.decoders.base import ModelInfo
from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.inputs.kept import KeptTypes
from draftmill.storage.inputs.reader import count_lines, has_lines
from draftmill.storage.inputs.rows import FIELD, FileSlice, InputFile
from draftmill.storage.inputs.tables import group_slices
from draftmill.storage.stores.store import about

ITEM_TABLES = 8
"""Tables of an item, at most: 8,192 rows, or 32 million characters."""


@dataclass(frozen=True, slots=True)
class SurveyJob:
    """Everything that a task needs besides its chunk; plain data. `kept` are the columns that are copied into the results."""

    recipe: RowRecipe
    kept: tuple[str, ...]
    info: ModelInfo
    tokenizer: TokenizerParcel


SurveyedRows = tuple[pa.Table, KeptTypes | None]
"""Rows in order (SURVEYED, and HASH), and the types of kept columns in the chunk so far."""


def items(
    job: SurveyJob, maker: Maker, pieces: Sequence[FilePart], *, limit: int | None = None
) -> Iterator[SurveyedRows]:
    """Yield the rows of a chunk, at most `limit`. Raises UserError if a file is missing or damaged, after the items before."""
    kept = KeptTypes(job.kept) if job.kept else None
    held: list[pa.Table] = []
    for table in survey_pieces(job.recipe, maker, pieces, kept, limit=limit):
        held.append(table)
        if len(held) == ITEM_TABLES:
            yield _item(held, kept)
            held = []
    if held or kept is not None:
        yield _item(held, kept)


def _item(tables: list[pa.Table], kept: KeptTypes | None) -> SurveyedRows:
    table = pa.concat_tables(tables).combine_chunks() if tables else SURVEYED.empty_table()
    hashes = pa.FixedSizeBinaryArray.from_buffers(
        HASH.type, table.num_rows, [None, pa.py_buffer(id_hashes(table["id"].to_pylist()))]
    )
    return table.append_column(HASH, hashes), kept


_MODEL_FILES = ("config.json", "generation_config.json")

TokenizerParcel = tuple[dict[str, bytes], ...]
"""A tokenizer for a process on another machine, where the model's folder may be missing: the files that `load_tokenizer` reads,
of the model's folder, and of the tokenizer's own if it has another."""


def pack_tokenizer(folder: Path, setting: str) -> TokenizerParcel:
    """Pack the tokenizer of a model folder; `setting` is model.tokenizer. Empty if rows need no tokenizer."""
    folders = {"none": [], "auto": [folder]}.get(setting, [folder, Path(setting).expanduser()])
    paths = [[place / name for name in (*TOKENIZER_FILES, *_MODEL_FILES)] for place in folders]
    return tuple({path.name: path.read_bytes() for path in of_one if path.is_file()} for of_one in paths)


def unpack_tokenizer(parcel: TokenizerParcel) -> Tokenizer | None:
    with tempfile.TemporaryDirectory(prefix="draftmill-tokenizer-") as place:
        folders = [Path(place, str(number)) for number in range(len(parcel))]
        for folder, files in zip(folders, parcel, strict=True):
            folder.mkdir()
            for name, data in files.items():
                (folder / name).write_bytes(data)
        return load_tokenizer(folders[0], "auto" if len(folders) == 1 else str(folders[1])) if folders else None


CHUNK_BYTES = 8 * 2**20
"""About how many bytes of input a task reads: some seconds of work."""

MOST_FILES = 256
"""Files of a chunk, at most."""


@dataclass(frozen=True, slots=True)
class SurveyChunk:
    """The work of one task. `is_long` if it is a file of any size that can't be cut; `error` if it can't even be cut."""

    pieces: tuple[FilePart, ...]
    is_long: bool = False
    error: UserError | StoreError | None = None


@dataclass(frozen=True, slots=True)
class CutQuestion:
    """What must be known of the bytes [start, stop) of a file in order to cut it into slices of about `slice_bytes`."""

    file: InputFile
    start: int
    stop: int
    slice_bytes: int


Answer = list[FileSlice] | tuple[int, int]
"""The slices of a Parquet file, or, for a byte range, the offset of its first line and its number of lines."""

Ask = Callable[[CutQuestion], Callable[[], Answer]]
"""Asks a question, and returns what waits for the answer."""


def answer(question: CutQuestion) -> Answer:
    """Look into the file. Raises UserError or StoreError if it is damaged or missing."""
    file = question.file
    if file.format == "parquet":
        return list(group_slices(file, question.slice_bytes))
    return count_lines(file, question.start, question.stop)


def chunks(inputs: Sequence[InputFile], chunk_chars: int | None, ask: Ask, *, ahead: int) -> Iterator[SurveyChunk]:
    """Yield chunks whose rows, one after another, are the rows of the inputs."""
    held: list[FilePart] = []
    size = row = 0
    broken = None
    for piece, question, answered in _ask_ahead(inputs, chunk_chars, ask, ahead):
        is_full = size + (piece.file.size or CHUNK_BYTES) > CHUNK_BYTES or len(held) == MOST_FILES
        if held and (question is not None or is_full):
            yield _together(held, size)
            held, size = [], 0
        if question is None:
            held.append(piece)
            size += piece.file.size or CHUNK_BYTES
            continue
        row = 0 if question.start == 0 else row
        try:
            with about(FIELD):
                cut, row = _cut(piece, question, answered(), row) if broken != piece.number else ([], row)
            yield from (SurveyChunk((piece_cut,)) for piece_cut in cut)
        except (StoreError, UserError) as error:
            broken = piece.number
            yield SurveyChunk((), error=error)
    if held:
        yield _together(held, size)


def _together(held: list[FilePart], size: int) -> SurveyChunk:
    return SurveyChunk(tuple(held), is_long=len(held) == 1 and size > 2 * CHUNK_BYTES)


def _cut(piece: FilePart, question: CutQuestion, reply: Answer, row: int) -> tuple[list[FilePart], int]:
    """The pieces of what was asked about, and the number of the row that follows them."""
    if isinstance(reply, list):
        return [FilePart(piece.number, piece.file, part) for part in reply], 0
    offset, count = reply
    part = FileSlice(row, offset, question.stop)
    return ([FilePart(piece.number, piece.file, part)] if count else []), row + count


Asked = tuple[FilePart, CutQuestion | None, Callable[[], Answer]]


def _ask_ahead(inputs: Sequence[InputFile], chunk_chars: int | None, ask: Ask, ahead: int) -> Iterator[Asked]:
    """Yield each file, with a question for each part of a large one; questions are asked `ahead` of the caller."""
    waiting: deque[Asked] = deque()
    for number, file in enumerate(inputs):
        questions: list[CutQuestion | None] = [*_questions(file, chunk_chars)]
        for question in questions or [None]:
            waiting.append((FilePart(number, file), question, list if question is None else ask(question)))
            if len(waiting) > ahead:
                yield waiting.popleft()
    yield from waiting


def _questions(file: InputFile, chunk_chars: int | None) -> list[CutQuestion]:
    """What must be known to cut a large file; nothing of a small one, or of one that can't be cut."""
    size, is_parquet = file.size or 0, file.format == "parquet"
    if size <= 2 * CHUNK_BYTES or not (is_parquet or has_lines(file, chunk_chars)):
        return []
    starts = range(0, size, size if is_parquet else CHUNK_BYTES)
    return [CutQuestion(file, start, min(start + starts.step, size), CHUNK_BYTES) for start in starts]


FIRST_S = 60.0
"""How long the first item may take, which includes the start of a process: a busy cluster may have no CPU for planning."""

NEXT_S = 300.0
"""How long any later item may take before its chunk is done in the planner's process."""

BACKLOG = 4
"""Items of a long chunk that wait for the planner, at most."""

_makers: dict[str, Maker] = {}


def survey_chunk(key: str, job: list[Any], chunk: SurveyChunk) -> Iterator[SurveyedRows]:
    """The task: yield the items of a chunk; `job` holds the reference of a SurveyJob, named `key`."""
    the_job: SurveyJob = ray.get(job[0])
    if key not in _makers:
        _makers.clear()
        _makers[key] = maker_for(the_job.recipe, unpack_tokenizer(the_job.tokenizer), the_job.info)
    yield from items(the_job, _makers[key], chunk.pieces)


@dataclass(slots=True)
class ChunkStream:
    """A chunk and the running task that surveys it; `taken` items have arrived."""

    chunk: SurveyChunk
    task: Any = None
    taken: int = 0


@dataclass(slots=True)
class SurveyPool:
    """Surveys inputs by tasks of `cpus` CPUs each, `at_once` at a time."""

    job: SurveyJob
    cpus: float
    at_once: int
    note: Callable[[str], None] = lambda message: None
    _ref: Any = None
    _key: str = ""
    _streams: deque[ChunkStream] = field(default_factory=deque)
    _alone: bool = False
    _wait_s: float = FIRST_S

    def tables(
        self, maker: Maker, inputs: Sequence[InputFile], kept: KeptTypes | None, limit: int | None
    ) -> Iterator[pa.Table]:
        """Yield tables of SURVEYED and HASH, at most `limit` rows; `maker` is for what is done in this process.

        Raises UserError if a whole file is missing or damaged.
        """
        self._ref = ray.put(self.job)
        self._key = self._ref.hex()
        try:
            for stream in self._start_ahead(inputs):
                begun, left = limit, limit
                for item in self._items(stream, maker, begun):
                    is_last = left is not None and item[0].num_rows >= left
                    table, found = self._last(stream, maker, begun) if is_last else item
                    if kept is not None and found is not None:
                        kept.add(found)
                    yield table
                    left = None if left is None else left - table.num_rows
                    if left == 0:
                        return
                limit = left
        finally:
            self._cancel()

    def _last(self, stream: ChunkStream, maker: Maker, limit: int | None) -> SurveyedRows:
        """The item that has just arrived, cut at the limit of rows that was left when its chunk began."""
        again = items(self.job, maker, stream.chunk.pieces, limit=limit)
        return next(islice(again, stream.taken - 1, None))

    def _start_ahead(self, inputs: Sequence[InputFile]) -> Iterator[ChunkStream]:
        """The chunks in order, while the tasks of the next ones run."""
        for chunk in chunks(inputs, self.job.recipe.chunk_chars, self._ask, ahead=2 * self.at_once):
            self._streams.append(ChunkStream(chunk, self._start(chunk)))
            if len(self._streams) >= self.at_once:
                yield self._streams[0]
                self._streams.popleft()
        while self._streams:
            yield self._streams[0]
            self._streams.popleft()

    def _start(self, chunk: SurveyChunk) -> Any:
        """The task of a chunk; None if it is done in this process."""
        if self._alone or chunk.error is not None:
            return None
        backlog = {"_generator_backpressure_num_objects": BACKLOG} if chunk.is_long else {}
        options = {"num_cpus": self.cpus, "max_retries": 0, "scheduling_strategy": "SPREAD", **backlog}
        task = ray.remote(survey_chunk).options(num_returns="streaming", **options)
        return task.remote(self._key, [self._ref], chunk)

    def _items(self, stream: ChunkStream, maker: Maker, limit: int | None) -> Iterator[SurveyedRows]:
        """The items of a chunk: from its task, the rest from here, at most `limit` rows in total, if the task can't."""
        if stream.chunk.error is not None:
            raise stream.chunk.error
        if (yield from self._from_task(stream)):
            return
        for item in islice(items(self.job, maker, stream.chunk.pieces, limit=limit), stream.taken, None):
            stream.taken += 1
            yield item

    def _from_task(self, stream: ChunkStream) -> Generator[SurveyedRows, None, bool]:
        """The items of a chunk's task; returns whether these are all."""
        while stream.task is not None and not self._alone:
            try:
                ready, _ = ray.wait([stream.task], timeout=self._wait_s, fetch_local=False)
                if not ready:
                    if self._wait_s == FIRST_S:
                        self.note(f"the cluster has had no room for planning for {FIRST_S:.0f} s: planning here")
                        self._alone = True
                        self._cancel()
                    return False
                item: SurveyedRows = ray.get(next(stream.task))
            except StopIteration:
                return True
            except RayError:  # the planner finds out what it is
                return False
            self._wait_s = NEXT_S
            stream.taken += 1
            yield item
        return False

    def _ask(self, question: CutQuestion) -> Callable[[], Answer]:
        if self._alone:
            return lambda: answer(question)
        task = ray.remote(answer).options(num_cpus=self.cpus, max_retries=0, scheduling_strategy="SPREAD")
        ref = task.remote(question)

        def wait() -> Answer:
            with suppress(Exception):  # asked again here: the error is then that of this process
                if not self._alone:
                    return ray.get(ref, timeout=self._wait_s)
            return answer(question)

        return wait

    def _cancel(self) -> None:
        for stream in self._streams:
            with suppress(Exception):  # it may have ended
                if stream.task is not None:
                    ray.cancel(stream.task, force=False)
