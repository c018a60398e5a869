"""Arrow data whose offsets point nowhere is refused before it is touched; a strange value is no reason to."""

import struct
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.storage.errors import UserError
from draftmill.storage.inputs.inputs import list_inputs
from draftmill.storage.inputs.reader import iterate, read_rows
from draftmill.storage.parquet import plain_form, sound

TEXTS = ["one", "two", None, "three"]


def stream_of(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


@pytest.mark.parametrize("offset", [2**30, -1, -(2**31)])
def test_an_offset_that_points_nowhere_is_a_damaged_file(tmp_path, offset):
    data = stream_of(pa.table({"id": [0, 1, 2, 3], "text": TEXTS}))
    offsets = struct.pack("<5i", 0, 3, 6, 6, 11)
    assert data.count(offsets) == 1
    path = tmp_path / "a.arrow"
    path.write_bytes(data.replace(offsets, struct.pack("<5i", 0, 3, offset, 6, 11)))
    (file,) = list_inputs(str(path))
    with pytest.raises(UserError, match="damaged or not arrow"):
        list(iterate(file))
    with pytest.raises(UserError, match="damaged or not arrow"):
        list(read_rows(file, [(1, None)]))


def test_a_column_whose_name_is_no_utf8_is_a_damaged_file(tmp_path):
    data = stream_of(pa.table({"naïve": TEXTS}))
    path = tmp_path / "a.arrow"
    path.write_bytes(data.replace("naïve".encode(), b"na\xff\xfeve"))
    (file,) = list_inputs(str(path))
    with pytest.raises(UserError, match="damaged or not arrow"):
        list(iterate(file, columns={"text": "text"}))


def test_a_table_that_ends_early_is_a_damaged_file(tmp_path, monkeypatch):
    """A damaged page header may end a column without an error: rows must not vanish quietly."""
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet")
    (file,) = list_inputs(str(tmp_path / "a.parquet"))
    whole = pq.ParquetFile.iter_batches

    def less(self: pq.ParquetFile, **options):
        return (batch.slice(1) for batch in whole(self, **options))

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", less)
    for read in (lambda: list(iterate(file)), lambda: list(read_rows(file, [(3, None)]))):
        with pytest.raises(UserError, match="3 rows, but the footer says 4"):
            read()


NOT_UTF8 = pa.Array.from_buffers(pa.string(), 1, pa.array([b"\xff"], pa.binary()).buffers())
BEYOND_THE_DAY = pa.array([2**62], pa.int64()).view(pa.time64("ns"))


@pytest.mark.parametrize(
    "column",
    [
        NOT_UTF8,
        BEYOND_THE_DAY,
        pa.array([1], pa.int64()).view(pa.date64()),
        pa.ListArray.from_arrays([0, 1], NOT_UTF8),
        pa.LargeListArray.from_arrays([0, 1], NOT_UTF8),
        pa.FixedSizeListArray.from_arrays(NOT_UTF8, 1),
        pa.StructArray.from_arrays([BEYOND_THE_DAY, NOT_UTF8], ["when", "text"]),
        pa.MapArray.from_arrays([0, 1], pa.array(["key"]), NOT_UTF8),
        pa.DictionaryArray.from_arrays(pa.array([0]), NOT_UTF8),
    ],
    ids=lambda column: str(column.type),
)
def test_a_strange_value_is_sound(column):
    with pytest.raises(pa.ArrowInvalid):
        column.validate(full=True)
    sound(pa.record_batch({"x": column}))


def test_every_text_and_time_has_a_plain_form():
    kinds = [pa.string(), pa.large_string(), pa.string_view(), pa.time32("s"), pa.date32(), pa.decimal128(9, 2)]
    assert [plain_form(kind) for kind in kinds] == [
        pa.binary(),
        pa.large_binary(),
        pa.binary_view(),
        pa.int32(),
        pa.int32(),
        pa.binary(16),
    ]
    assert plain_form(pa.list_(pa.struct({"a": pa.string()}))) == pa.list_(pa.struct({"a": pa.binary()}))
    assert plain_form(pa.int64()) == pa.int64()


def write(name: str, table: pa.Table, folder):
    path = folder / name
    if name.endswith(".parquet"):
        pq.write_table(table, path, dictionary_pagesize_limit=2**30)
    else:
        path.write_bytes(stream_of(table))
    return path


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.slow
def test_a_text_that_all_rows_share_is_unpacked_for_a_few_rows_at_a_time(tmp_path, name):
    rows, text = 3000, "x" * 2_000_000
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), pa.array([text]))
    if name == "a.parquet":  # as most writers leave it: the type says nothing of the dictionary
        table = pa.table({"text": shared}, schema=pa.schema({"text": shared.type}))
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, dictionary_pagesize_limit=2**30, store_schema=False)
        (tmp_path / name).write_bytes(sink.getvalue().to_pybytes())
    else:
        write(name, pa.table({"text": shared}), tmp_path)
    del shared
    (file,) = list_inputs(str(tmp_path / name))
    before = pa.total_allocated_bytes()
    for number, row in enumerate(iterate(file)):
        assert row.values == {"text": text}
        assert pa.total_allocated_bytes() - before < 200 * 2**20, "six gigabytes in all"
        if number == 100:
            break
    assert [row.values for row in read_rows(file, [(2999, None), (7, None)])] == [{"text": text}] * 2


def test_a_large_row_group_of_texts_of_their_own_is_read_in_flat_memory(tmp_path):
    path = tmp_path / "a.parquet"
    texts = pa.array(f"{number} " + "x" * 2000 for number in range(40_000))
    pq.write_table(pa.table({"text": texts}), path, compression="zstd")
    num_bytes = texts.nbytes
    del texts
    (file,) = list_inputs(str(path))
    before, most = pa.total_allocated_bytes(), 0
    for number, row in enumerate(iterate(file)):
        assert row.values is not None and row.values["text"].startswith(f"{number} ")
        most = max(most, pa.total_allocated_bytes() - before)
    assert number == 39_999 and most < num_bytes / 2, "as dictionaries all of them would be held in the end"


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("coded", [False, True])
def test_a_row_beyond_the_bound_fails_alone(tmp_path, monkeypatch, name, coded):
    monkeypatch.setattr("draftmill.storage.inputs.tables.MAX_ROW_BYTES", 500)
    monkeypatch.setattr("draftmill.storage.inputs.tables.PORTION_BYTES", 500)
    texts = ["a" * 400, "b" * 501, None, "c" * 500, "d" * 200, "b" * 501]
    column = pa.array(texts).dictionary_encode() if coded else pa.array(texts)
    (file,) = list_inputs(str(write(name, pa.table({"text": column}), tmp_path)))
    found = list(iterate(file))
    assert [row.error.kind if row.error else None for row in found] == [None, "bad_row", None, None, None, "bad_row"]
    assert [row.values and row.values["text"] for row in found] == [texts[0], None, None, *texts[3:5], None]
    again = list(read_rows(file, [(row.row, None) for row in reversed(found)]))
    assert [(row.row, row.values, str(row.error)) for row in reversed(again)] == [
        (row.row, row.values, str(row.error)) for row in found
    ]


FLIPPER = """
import sys
from pathlib import Path
from draftmill.storage.errors import UserError
from draftmill.storage.inputs import tables
from draftmill.storage.inputs.inputs import list_inputs
from draftmill.storage.inputs.reader import iterate, read_rows

tables.SHARED_BYTES = int(sys.argv[2])
whole, outcomes = Path(sys.argv[1]).read_bytes(), [0, 0]
for place in range(len(whole)):
    for mask in (0x01, 0x80, 0xFF):
        path = Path(sys.argv[1]).with_name(f"{place}-{mask}{Path(sys.argv[1]).suffix}")
        path.write_bytes(whole[:place] + bytes([whole[place] ^ mask]) + whole[place + 1 :])
        (file,) = list_inputs(str(path))
        try:
            rows = list(iterate(file))
            list(read_rows(file, [(row.row, None) for row in rows]))
            outcomes[0] += 1
        except UserError:
            outcomes[1] += 1
        path.unlink()
print(*outcomes)
"""


@pytest.mark.parametrize(("name", "shared_bytes"), [("a.parquet", 2**26), ("a.parquet", 0), ("a.arrow", 0)])
@pytest.mark.slow
def test_any_byte_of_a_table_may_be_another_one(tmp_path, name, shared_bytes):
    """Rows or a clear error, for each byte with one bit, another bit, or all of them turned; in a process of its own,
    since what goes wrong may end it."""
    path = write(name, pa.table({"id": ["a", "b", None], "tokens": [[1, 2], None, [3]]}), tmp_path)
    command = [sys.executable, "-c", FLIPPER, str(path), str(shared_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    read, refused = map(int, done.stdout.split())
    assert read + refused == 3 * path.stat().st_size and refused > 100 and read > 100
