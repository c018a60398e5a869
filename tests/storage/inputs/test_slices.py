"""Slices of a file are its rows, wherever it is cut, and what was read last of tables is read once."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.storage.inputs.inputs import list_inputs
from draftmill.storage.inputs.reader import count_lines, has_lines, iterate
from draftmill.storage.inputs.rows import FileSlice, InputFile
from draftmill.storage.inputs.tables import BatchCache, group_slices


def seen(rows) -> list[tuple[int, int | None, object, str | None]]:
    return [(row.row, row.offset, row.values, row.error.message if row.error else None) for row in rows]


def text_of(rng: random.Random) -> bytes:
    """Lines of any kind: empty, blank, with both line ends, of several bytes a character, broken; with or without a last end."""
    kinds = [b"", b" ", b'{"a": 1}', b'{"a": "\xc3\xa4\xe2\x82\xac"}', b'{"a": ', b"\xff\xfe", b"x" * 40, b"\r"]
    lines = [rng.choice(kinds) + rng.choice([b"\n", b"\n", b"\r\n"]) for _ in range(rng.randint(1, 30))]
    return rng.choice([b"", b"\xef\xbb\xbf"]) + b"".join(lines) + rng.choice([b"", b'{"a": 2}'])


def cut(file: InputFile, step: int):
    """The slices of a file of lines by ranges of `step` bytes."""
    assert file.size is not None
    row = 0
    for start in range(0, file.size, step):
        stop = min(start + step, file.size)
        first, count = count_lines(file, start, stop)
        if count:
            yield FileSlice(row, first, stop)
        row += count


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_lines_are_cut_at_any_byte(tmp_path, name):
    for seed in range(60):
        rng = random.Random(seed)
        (tmp_path / name).write_bytes(text_of(rng))
        (file,) = list_inputs(str(tmp_path / name))
        assert has_lines(file, None)
        for step in (1, 3, rng.randint(4, 200), 10_000):
            found = [row for part in cut(file, step) for row in seen(iterate(file, part=part))]
            assert found == seen(iterate(file)), (seed, step)


def test_the_lines_of_a_range_are_counted_as_a_loop_counts_them(tmp_path):
    for seed in range(60):
        rng = random.Random(seed)
        data = text_of(rng)
        (tmp_path / "a.jsonl").write_bytes(data)
        (file,) = list_inputs(str(tmp_path / "a.jsonl"))
        begins = [place for place in range(len(data)) if place == 0 or data[place - 1 : place] == b"\n"]
        for _ in range(10):
            start = rng.randrange(len(data))
            stop = rng.randint(start + 1, len(data))
            inside = [place for place in begins if start <= place < stop]
            assert count_lines(file, start, stop) == (inside[0] if inside else stop, len(inside))


@pytest.mark.parametrize("slice_bytes", [1, 2000, 10**9])
def test_parquet_is_cut_at_row_groups(tmp_path, slice_bytes):
    pq.write_table(pa.table({"a": [f"text {n}" for n in range(500)]}), tmp_path / "a.parquet", row_group_size=37)
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), tmp_path / "b.parquet")
    for file in list_inputs(str(tmp_path)):
        slices = list(group_slices(file, slice_bytes))
        assert [row for part in slices for row in seen(iterate(file, part=part))] == seen(iterate(file))
        assert len(slices) == 1 if slice_bytes == 10**9 or "b." in file.name else len(slices) > 3


def test_files_whose_rows_are_not_lines_are_not_cut_by_lines(tmp_path):
    for name in ("a.csv", "a.jsonl.gz", "a.py", "a.parquet"):
        (tmp_path / name).write_bytes(b"x")
        (file,) = list_inputs(str(tmp_path / name))
        assert not has_lines(file, None)
    (tmp_path / "a.txt").write_bytes(b"x")
    (file,) = list_inputs(str(tmp_path / "a.txt"))
    assert not has_lines(file, 100) and has_lines(file, None)


BATCH = 10


class Table:
    """A table of int64 numbers in batches of ten rows (80 bytes), which counts how many were read."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.read = 0
        self.opened = 0

    def open(self):
        self.opened += 1
        for first in range(0, self.rows, BATCH):
            self.read += 1
            yield pa.record_batch({"x": pa.array(range(first, min(self.rows, first + BATCH)), pa.int64())})


def picked(stretches: BatchCache, table: Table, rows) -> list[int]:
    found = list(stretches.pick(table, rows, table.open))
    assert all(batch["x"].to_pylist() == list(numbers) for batch, numbers in found)
    return [number for _, numbers in found for number in numbers]


def test_units_of_a_window_read_it_once_and_no_further_than_they_need():
    stretches, table = BatchCache(), Table(1000)
    for rows in ([3, 150, 299], [0, 11, 298], [7], [299], [12, 13, 200]):
        assert picked(stretches, table, rows) == rows
    assert (table.opened, table.read) == (1, 30)
    assert picked(stretches, table, [305, 399]) == [305, 399]
    assert (table.opened, table.read) == (1, 40)


def test_rows_beyond_the_end_are_passed_over():
    stretches, table = BatchCache(), Table(25)
    assert picked(stretches, table, [24, 25, 99]) == [24]
    assert picked(stretches, table, [30]) == [] and picked(stretches, table, []) == []
    assert picked(stretches, table, [0]) == [0] and table.read == 3


def test_what_was_read_first_is_forgotten_and_read_again_from_the_front():
    stretches, table = BatchCache(kept_bytes=5 * 80), Table(1000)
    assert picked(stretches, table, [0, 999]) == [0, 999]
    assert stretches.num_bytes == 5 * 80
    assert picked(stretches, table, [950]) == [950] and table.read == 100
    assert picked(stretches, table, [949]) == [949] and (table.opened, table.read) == (2, 195)


def test_another_table_is_forgotten_before_the_front_of_this_one():
    stretches, first, second = BatchCache(kept_bytes=5 * 80), Table(40), Table(50)
    picked(stretches, first, [39])
    picked(stretches, second, [49])
    assert stretches.num_bytes == 5 * 80
    picked(stretches, second, [0])
    assert second.opened == 1
    picked(stretches, first, [0])
    assert first.opened == 2


def test_a_table_that_breaks_off_is_read_anew():
    stretches = BatchCache()
    breaks = [True]

    def opened():
        yield pa.record_batch({"x": pa.array([0], pa.int64())})
        if breaks.pop():
            raise pa.ArrowInvalid("a damaged page")
        yield pa.record_batch({"x": pa.array([1], pa.int64())})

    with pytest.raises(pa.ArrowInvalid):
        list(stretches.pick("table", [0, 1], opened))
    breaks.append(False)
    assert [numbers for _, numbers in stretches.pick("table", [0, 1], opened)] == [[0], [1]]
