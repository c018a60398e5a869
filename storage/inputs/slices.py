"""Cuts large files into slices that are read independently: row groups of Parquet files, byte ranges of files of lines.

The rows of a file's slices, one slice after the other, are the rows of the file, with the same numbers and offsets. Other files
(csv, whose quoted fields may contain line ends; compressed files; Arrow) are one slice each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from draftmill.storage.inputs.input_file import InputFile
from draftmill.storage.inputs.row_groups import group_sizes
from draftmill.storage.inputs.sources import open_bytes
from draftmill.storage.stores.interface import S3Options

READ_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Slice:
    """Part of a file, from row `row`, which begins at byte `offset`; the default is the whole file.

    The slice ends with the last line that begins before byte `end`; a slice of a Parquet file is the row groups
    [`groups[0]`, `groups[1]`).
    """

    row: int = 0
    offset: int = 0
    end: int | None = None
    groups: tuple[int, int] | None = None

    @property
    def is_first(self) -> bool:
        """Whether the slice begins with the file."""
        return self.row == 0 and self.offset == 0


WHOLE = Slice()


def has_lines(file: InputFile, chunk_chars: int | None) -> bool:
    """Whether each row of the file is a line, found by line ends alone, in a file of known size that is not compressed."""
    is_lines = file.format == "jsonl" or (file.format == "txt" and chunk_chars is None)
    return is_lines and file.compression is None and file.size is not None


def count_lines(file: InputFile, start: int, stop: int, s3: S3Options | None) -> tuple[int, int]:
    """Return the offset of the first line that begins in the bytes [start, stop), and how many lines begin there.

    The offset is `stop` if none does. `stop` is at most the size of the file. Raises StoreError if the file can't be read.
    """
    first, count = (0, 1) if start == 0 else (stop, 0)
    at = max(0, start - 1)  # a line begins after each line end, so that the last byte of the range has no say
    with open_bytes(file, s3=s3) as stream:
        stream.seek(at)
        while at < stop - 1 and (data := stream.read(min(READ_BYTES, stop - 1 - at))):
            if not count and (end := data.find(b"\n")) >= 0:
                first = at + end + 1
            count += data.count(b"\n")
            at += len(data)
    return first, count


def group_slices(file: InputFile, slice_bytes: int, s3: S3Options | None) -> Iterator[Slice]:
    """Cut a Parquet file into slices of whole row groups, each of about `slice_bytes` uncompressed; at least one slice.

    Raises UserError if the file is damaged.
    """
    first, row, start, size = 0, 0, 0, 0
    sizes = group_sizes(file, s3)
    for group, (rows, group_bytes) in enumerate(sizes):
        row, size = row + rows, size + group_bytes
        if size >= slice_bytes and group + 1 < len(sizes):
            yield Slice(start, groups=(first, group + 1))
            first, start, size = group + 1, row, 0
    yield Slice(start, groups=(first, len(sizes)))
