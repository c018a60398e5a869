"""Time to read all units of a plan, in the order of assignment, against one pass over the same file.

Rows of a unit lie anywhere in their window, so a file is read in scattered pieces. One pass is the cost of a job that decodes
rows in file order. The last column assigns units longest first over all windows, for as many units.
Run from the checkout:

    python -m benchmarks.reading [--rows 200000]
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from draftmill.jobs.plan.packing import UNITS_PER_WINDOW, PlanWriter
from draftmill.jobs.schedule.units import UnitSize, UnitSizes, WaitingUnits
from draftmill.storage.inputs.inputs import list_inputs
from draftmill.storage.inputs.reader import iterate, read_rows
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.runs.unit_table import ROW_SCHEMA, PlanTable, parts_of
from draftmill.storage.stores.store import open_store

WINDOW = 16384
WORDS = 90
MOST_UNITS = 4 * UNITS_PER_WINDOW
COLUMNS = {"id": "id", "text": "text"}


def texts(rows: int) -> list[str]:
    """Some 600 characters each, no two the same."""
    generator = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = np.array(["".join(generator.choice(letters, generator.integers(2, 10))) for _ in range(20_000)])
    return [f"{row} " + " ".join(words[generator.integers(0, len(words), WORDS)]) for row in range(rows)]


def as_lines(path: Path, table: pa.Table) -> None:
    """One JSON object per line, compressed according to the name's ending."""
    with gzip.open(path, "wt", compresslevel=3) if path.suffix == ".gz" else path.open("w") as file:
        for batch in table.to_batches(4096):
            file.writelines(json.dumps(row) + "\n" for row in batch.to_pylist())


def in_groups(rows: int) -> Callable[[Path, pa.Table], None]:
    """A Parquet file with row groups of a given number of rows."""
    return lambda path, table: pq.write_table(table, path, row_group_size=rows, compression="zstd")


KINDS: dict[str, tuple[str, Callable[[Path, pa.Table], None]]] = {
    "jsonl": ("a.jsonl", as_lines),
    "jsonl.gz": ("a.jsonl.gz", as_lines),
    "parquet, one row group": ("a.parquet", in_groups(10**9)),
    "parquet, 1,000 rows a group": ("a.parquet", in_groups(1000)),
}


def time_plan(file: InputFile) -> tuple[float, PlanTable, list[UnitSize]]:
    """Seconds of one pass over the file, and a plan of its rows with lengths drawn at random."""
    began_s = time.perf_counter()
    places = [(row.row, row.offset) for row in iterate(file, columns=COLUMNS)]
    took_s = time.perf_counter() - began_s
    count = len(places)
    lengths = pa.array(np.random.default_rng(1).integers(20, 400, count).astype(np.int32))
    columns = [
        pa.array(np.zeros(count, dtype=np.int32)),
        pa.array([row for row, _ in places], pa.int64()),
        pa.array([offset for _, offset in places], pa.int64()),
        pa.array([str(row) for row, _ in places]),
        lengths,
        lengths,
        pa.nulls(count, pa.string()),
    ]
    store = open_store("memory://reading")
    writer = PlanWriter(store, window=WINDOW)
    writer.add(pa.Table.from_arrays(columns, schema=ROW_SCHEMA))
    writer.finish()
    units, window = [], 0
    for part in writer.parts:
        for number, (rows, tokens) in enumerate(
            zip(part["unit_rows"], part["unit_tokens"], strict=True), part["first"]
        ):
            window += number > 0 and number in part["windows"]
            units.append(UnitSize(number, rows, tokens, window))
    return took_s, PlanTable(store, parts_of(writer.parts)), units


def read_s(file: InputFile, table: PlanTable, order: Iterable[int]) -> float:
    """Seconds to read the units' rows in this order."""
    began_s = time.perf_counter()
    for unit in order:
        rows = table.unit_rows(unit)
        outcomes = read_rows(file, [(row.row, row.offset) for row in rows], columns=COLUMNS)
        assert all(row.error is None for row in outcomes)
    return time.perf_counter() - began_s


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    count = parser.parse_args().rows
    rows = texts(count)
    table = pa.table({"id": [str(row) for row in range(count)], "text": rows, "other": list(range(count))})
    del rows
    print(f"{'':<30}{'one pass':>10}{'all units':>11}{'(limit 1)':>11}{'a unit':>10}{'longest of all first':>22}")
    with tempfile.TemporaryDirectory() as folder:
        for kind, (name, write) in KINDS.items():
            path = Path(folder, name)
            write(path, table)
            again = path.with_name(f"again-{name}")  # another name, so that nothing is cached
            os.link(path, again)
            (file,), (other,) = list_inputs(str(path)), list_inputs(str(again))
            pass_s, plan, units = time_plan(file)
            waiting = WaitingUnits(UnitSizes(units), workers=1)
            all_s = read_s(file, plan, [unit for _ in units if (unit := waiting.take()) is not None])
            longest = [size.unit for size in sorted(units, key=lambda size: -size.tokens)]
            some = list(islice(longest, MOST_UNITS // 16))
            unit_ms, longest_ms = (
                1e3 * seconds for seconds in (all_s / len(units), read_s(other, plan, some) / len(some))
            )
            print(
                f"{kind:<30}{pass_s:>8.1f} s{all_s:>9.1f} s{all_s / pass_s:>10.2f}x{unit_ms:>7.0f} ms{longest_ms:>19.0f} ms",
                flush=True,
            )
            path.unlink()
            again.unlink()


if __name__ == "__main__":
    main()
