"""Cuts batches into portions that fit into memory once each row has its own copy of shared texts.

A columnar file may store a text once that many rows share: a few kilobytes can stand for terabytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from draftmill.storage.inputs.rows import MAX_ROW_BYTES

PORTION_BYTES = MAX_ROW_BYTES
"""At most the size limit of a row: a longer row is then a separate portion."""

_types = pa.types


def row_bytes(batch: pa.RecordBatch) -> NDArray[np.int64]:
    """Bytes of the texts and byte strings of each row, shared ones counted in full; int64 [rows]. Nested ones are not counted."""
    sizes = np.zeros(batch.num_rows, dtype=np.int64)
    for column in batch.columns:
        if _types.is_dictionary(column.type) and is_bytes(column.type.value_type):
            # A dictionary may hold a null, and an index may be null.
            lengths = pc.fill_null(pc.binary_length(column.dictionary), 0)
            sizes += pc.fill_null(lengths.take(column.indices), 0).to_numpy(zero_copy_only=False)
        elif is_bytes(column.type):
            sizes += pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False)
    return sizes


def is_bytes(kind: pa.DataType) -> bool:
    """Whether values of the type are runs of bytes whose lengths are known without reading them."""
    return bool(
        _types.is_string(kind) or _types.is_large_string(kind) or _types.is_binary(kind) or _types.is_large_binary(kind)
    )


def portions(sizes: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Cut rows of these sizes into [start, stop) portions of at most PORTION_BYTES, or of one row."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(sizes):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + PORTION_BYTES, side="right")))
        yield start, stop
        start = stop
