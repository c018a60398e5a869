"""Cuts the inputs into chunks of similar size, each the work of one planning task: small files together, large ones in slices.

To cut a large file, something must be known of it: the row groups of a Parquet file, how many lines each of its byte ranges has.
`ask` finds that out, a number of questions ahead. Knows no Ray.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from draftmill.actors.planning.surveying import Piece
from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.inputs.reader import count_lines, has_lines
from draftmill.storage.inputs.row_groups import group_slices
from draftmill.storage.inputs.rows import FIELD, InputFile, Slice
from draftmill.storage.stores.interface import S3Options, about

CHUNK_BYTES = 8 * 2**20
"""About how many bytes of input a task reads: some seconds of work."""

MOST_FILES = 256
"""Files of a chunk, at most."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The work of one task. `is_long` if it is a file of any size that can't be cut; `error` if it can't even be cut."""

    pieces: tuple[Piece, ...]
    is_long: bool = False
    error: UserError | StoreError | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """What must be known of the bytes [start, stop) of a file in order to cut it into slices of about `slice_bytes`."""

    file: InputFile
    start: int
    stop: int
    s3: S3Options
    slice_bytes: int


Answer = list[Slice] | tuple[int, int]
"""The slices of a Parquet file, or, for a byte range, the offset of its first line and its number of lines."""

Ask = Callable[[Question], Callable[[], Answer]]
"""Asks a question, and returns what waits for the answer."""


def answer(question: Question) -> Answer:
    """Look into the file. Raises UserError or StoreError if it is damaged or missing."""
    file, s3 = question.file, question.s3
    if file.format == "parquet":
        return list(group_slices(file, question.slice_bytes, s3))
    return count_lines(file, question.start, question.stop, s3)


def chunks(
    inputs: Sequence[InputFile], chunk_chars: int | None, s3: S3Options, ask: Ask, *, ahead: int
) -> Iterator[Chunk]:
    """Yield chunks whose rows, one after another, are the rows of the inputs."""
    held: list[Piece] = []
    size = row = 0
    broken = None
    for piece, question, found in _asked(inputs, chunk_chars, s3, ask, ahead):
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
                cut, row = _cut(piece, question, found(), row) if broken != piece.number else ([], row)
            yield from (Chunk((one,)) for one in cut)
        except (StoreError, UserError) as error:
            broken = piece.number
            yield Chunk((), error=error)
    if held:
        yield _together(held, size)


def _together(held: list[Piece], size: int) -> Chunk:
    return Chunk(tuple(held), is_long=len(held) == 1 and size > 2 * CHUNK_BYTES)


def _cut(piece: Piece, question: Question, found: Answer, row: int) -> tuple[list[Piece], int]:
    """The pieces of what was asked about, and the number of the row that follows them."""
    if isinstance(found, list):
        return [Piece(piece.number, piece.file, part) for part in found], 0
    offset, count = found
    part = Slice(row, offset, question.stop)
    return ([Piece(piece.number, piece.file, part)] if count else []), row + count


Asked = tuple[Piece, Question | None, Callable[[], Answer]]


def _asked(
    inputs: Sequence[InputFile], chunk_chars: int | None, s3: S3Options, ask: Ask, ahead: int
) -> Iterator[Asked]:
    """Yield each file, with a question for each part of a large one; questions are asked `ahead` of the caller."""
    waiting: deque[Asked] = deque()
    for number, file in enumerate(inputs):
        for start, stop in _ranges(file, chunk_chars):
            question = Question(file, start, stop, s3, CHUNK_BYTES)
            waiting.append((Piece(number, file), question, ask(question)))
            if len(waiting) > ahead:
                yield waiting.popleft()
        if not _is_cut(file, chunk_chars):
            waiting.append((Piece(number, file), None, list))
            if len(waiting) > ahead:
                yield waiting.popleft()
    yield from waiting


def _is_cut(file: InputFile, chunk_chars: int | None) -> bool:
    is_large = file.size is not None and file.size > 2 * CHUNK_BYTES
    return is_large and (file.format == "parquet" or has_lines(file, chunk_chars))


def _ranges(file: InputFile, chunk_chars: int | None) -> Iterator[tuple[int, int]]:
    if not _is_cut(file, chunk_chars):
        return
    assert file.size is not None
    step = file.size if file.format == "parquet" else CHUNK_BYTES
    for start in range(0, file.size, step):
        yield start, min(start + step, file.size)
