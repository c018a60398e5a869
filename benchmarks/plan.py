"""Planning of ten million rows with synthetic lengths: rows per second, and whether memory stays constant.

Everything that planning does apart from reading and tokenizing: the search for duplicate ids, windows, sorting,
units, the unit table on disk. Run from the checkout:

    python -m benchmarks.plan [--rows 10000000]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pyarrow as pa

from benchmarks.makespans import makespan_bound, refill_makespan, static_makespan
from draftmill.jobs.plan.id_sets import DuplicateFinder, hashes_of
from draftmill.jobs.plan.packing import PlanWriter, longest_first, padding_efficiency
from draftmill.storage.runs.unit_table import ROW_SCHEMA
from draftmill.storage.stores.store import open_store

BATCH = 16384
WINDOW = 65536
MEDIAN_TOKENS, SPREAD, LONGEST = 180, 0.7, 2048


def synthetic_lengths(generator: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Realistic canvas lengths: log-normal, cut at the model's limit; int32 [count]."""
    lengths = np.exp(generator.normal(np.log(MEDIAN_TOKENS), SPREAD, count))
    return np.clip(lengths, 1, LONGEST).astype(np.int32)


def synthetic_rows(rows: int) -> Iterator[pa.Table]:
    """Tables of ROW_SCHEMA like those from a survey of one large file."""
    generator = np.random.default_rng(0)
    for start in range(0, rows, BATCH):
        numbers = np.arange(start, min(start + BATCH, rows), dtype=np.int64)
        lengths = synthetic_lengths(generator, len(numbers))
        columns = [
            pa.array(np.zeros(len(numbers), dtype=np.int32)),
            pa.array(numbers),
            pa.array(numbers * 700),
            pa.array([f"corpus.jsonl:{number}" for number in numbers.tolist()]),
            pa.array(lengths),
            pa.array(lengths // 2),
            pa.nulls(len(numbers), pa.string()),
        ]
        yield pa.Table.from_arrays(columns, schema=ROW_SCHEMA)


def plan_rows(rows: int) -> None:
    """Plan, and print rate and memory at each tenth."""
    process = psutil.Process()
    print(f"{'rows':>12} {'rows/s':>12} {'resident MB':>12} {'units':>8}")
    with tempfile.TemporaryDirectory() as folder, DuplicateFinder() as finder:
        writer = PlanWriter(open_store(folder), window=WINDOW)
        began_s, done, shown = time.perf_counter(), 0, 0
        for table in synthetic_rows(rows):
            finder.add(hashes_of(table["id"].to_pylist()), table["file"].to_numpy(), table["row"].to_numpy())
            writer.add(table)
            done += table.num_rows
            if done * 10 // rows > shown:
                shown = done * 10 // rows
                rate = done / (time.perf_counter() - began_s)
                resident = process.memory_info().rss / 1e6
                print(f"{done:>12,} {rate:>12,.0f} {resident:>12,.0f} {writer.totals.units:>8,}", flush=True)
        writer.finish()
        twice = finder.first()
        took_s = time.perf_counter() - began_s
    assert twice is None and writer.totals.rows == rows
    print(f"{rows:,} rows in {took_s:.1f} s: {rows / took_s:,.0f} rows/s, {writer.totals.units:,} units\n")


def pack_window() -> None:
    """One window: padding and makespan by order, each against its bound."""
    lengths = synthetic_lengths(np.random.default_rng(1), WINDOW)
    ordered = lengths[longest_first(lengths)]
    print(f"{'one window':<28} {'file order':>12} {'longest first':>14}")
    useful = [padding_efficiency(each, batch_rows=64) for each in (lengths, ordered)]
    print(f"{'useful tokens, batches of 64':<28} {useful[0]:>12.1%} {useful[1]:>14.1%}")
    few, slots = lengths[:4096], 64
    for name, simulate in (("static batches / bound", static_makespan), ("refilled slots / bound", refill_makespan)):
        ratios = []
        for each in (few, few[longest_first(few)]):
            costs = each.astype(float).tolist()
            ratios.append(simulate(costs, slots) / makespan_bound(costs, slots))
        print(f"{name:<28} {ratios[0]:>12.3f} {ratios[1]:>14.3f}")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    plan_rows(parser.parse_args().rows)
    pack_window()


if __name__ == "__main__":
    main()
