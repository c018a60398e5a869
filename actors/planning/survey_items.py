"""What a planning task does: the rows of one chunk of the inputs, in items that are sent to the planner one by one.

An item is a function of the job and the chunk: a task that is done again gives the same items. Knows no Ray.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from draftmill.actors.planning.surveying import SURVEYED, Piece, Reading, surveyed
from draftmill.actors.planning.tokenizer_parcel import TokenizerParcel, unpacked
from draftmill.actors.rows.id_hashes import id_hashes
from draftmill.actors.rows.makers import Maker, maker_for
from draftmill.actors.task import Side
from draftmill.decoders.base import ModelInfo
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.settings import DecoderSettings
from draftmill.storage.inputs.kept import KeptNews, KeptTypes

ITEM_TABLES = 8
"""Tables of an item, at most: 8,192 rows, or 32 million characters."""


@dataclass(frozen=True, slots=True)
class SurveyJob:
    """Everything that a task needs besides its chunk; plain data."""

    reading: Reading
    info: ModelInfo
    decoder: DecoderSettings
    sampling: Sampling
    ends: tuple[int, ...]
    truncate: Side | None
    tokenizer: TokenizerParcel | None


@dataclass(frozen=True, slots=True)
class Item:
    """Rows in order (SURVEYED, and HASH), and what they say of the types of copied columns; `pid` is the task's process."""

    table: pa.Table
    news: KeptNews | None
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Broken:
    """The rest of the chunk could not be surveyed; `reason` is one line."""

    reason: str


HASH = pa.field("hash", pa.binary(16), nullable=False)
"""A column that tasks add to SURVEYED: hashes of the ids, by which the planner finds one that occurs twice."""


def maker_of(job: SurveyJob) -> Maker:
    """The canvas maker of a job."""
    return maker_for(
        job.reading.task,
        job.reading.columns,
        unpacked(job.tokenizer),
        job.info,
        decoder=job.decoder,
        sampling=job.sampling,
        ends=job.ends,
        truncate=job.truncate,
    )


def items(reading: Reading, maker: Maker, pieces: Sequence[Piece], *, limit: int | None = None) -> Iterator[Item]:
    """Yield the rows of a chunk, at most `limit`. Raises UserError if a file is missing or damaged, after the items before."""
    kept = KeptTypes(reading.kept) if reading.kept else None
    held: list[pa.Table] = []
    for table in surveyed(reading, maker, pieces, kept, limit=limit):
        held.append(table)
        if len(held) == ITEM_TABLES:
            yield _item(held, kept)
            held = []
    if held or kept is not None:
        yield _item(held, kept)


def _item(tables: list[pa.Table], kept: KeptTypes | None) -> Item:
    table = pa.concat_tables(tables).combine_chunks() if tables else SURVEYED.empty_table()
    hashes = pa.FixedSizeBinaryArray.from_buffers(
        HASH.type, table.num_rows, [None, pa.py_buffer(id_hashes(table["id"].to_pylist()))]
    )
    return Item(table.append_column(HASH, hashes), None if kept is None else kept.news())
