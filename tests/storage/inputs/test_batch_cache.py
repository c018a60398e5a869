"""BatchCache: what was read last of tables, and that it is read once."""

import pyarrow as pa
import pytest

from draftmill.storage.inputs.tables import BatchCache

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
