"""What a planning task does: the rows of one chunk of the inputs, in items that are sent to the planner one by one.

An item is a function of the job and the chunk: a task that is done again gives the same items. Knows no Ray.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from draftmill.actors.checkpoints.models import TOKENIZER_FILES
from draftmill.actors.planning.surveying import SURVEYED, Piece, Reading, surveyed
from draftmill.actors.rows.makers import Maker, maker_for
from draftmill.actors.rows.row import id_hashes
from draftmill.actors.rows.text import Tokenizer, load_tokenizer
from draftmill.actors.task import Side
from draftmill.decoders.base import ModelInfo
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.settings import DecoderSettings
from draftmill.storage.inputs.kept import KeptTypes, NewTypes

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
    new_types: NewTypes | None
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
    return Item(table.append_column(HASH, hashes), None if kept is None else kept.new_types())


_MODEL_FILES = ("config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class TokenizerParcel:
    """A tokenizer as plain bytes, for a process on another machine, where the model's folder may be missing.

    These are the files that `load_tokenizer` reads: of the model's folder, and of the tokenizer's own if it has another. A
    tokenizer that is read from the same files is the same to the bit.
    """

    model: dict[str, bytes]
    own: dict[str, bytes] | None


def packed(folder: Path, setting: str) -> TokenizerParcel | None:
    """Pack the tokenizer of a model folder; `setting` is model.tokenizer. None if rows need no tokenizer."""
    if setting == "none":
        return None
    names = (*TOKENIZER_FILES, *_MODEL_FILES)
    own = None if setting == "auto" else _files(Path(setting).expanduser(), names)
    return TokenizerParcel(_files(folder, names), own)


def unpacked(parcel: TokenizerParcel | None) -> Tokenizer | None:
    """Load the tokenizer from its files."""
    if parcel is None:
        return None
    with tempfile.TemporaryDirectory(prefix="draftmill-tokenizer-") as place:
        model, own = Path(place, "model"), Path(place, "own")
        _write(model, parcel.model)
        if parcel.own is not None:
            _write(own, parcel.own)
        return load_tokenizer(model, "auto" if parcel.own is None else str(own))


def _files(folder: Path, names: tuple[str, ...]) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}


def _write(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
