"""Planning by Ray tasks beside planning in one process, on the same inputs, alternating, on a Ray of this machine.

The plans are compared byte for byte. What the driver itself spends on a row (CPU time of its process) bounds how far more CPUs
help: reading and tokenizing are the tasks', duplicates, packing and the unit table are the driver's. Run from the checkout:

    python -m benchmarks.cluster_planning [--megabytes 64] [--cpus 2] [--rounds 2]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")

from draftmill.jobs.config.spec import check_spec
from draftmill.jobs.drive.backend import cluster_survey
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.plan.planning import Survey, make_plan, survey
from draftmill.jobs.plan.resolve import resolve
from draftmill.storage.stores.store import open_store

WORDS = 40
"""Words of a row, on average."""


def texts(megabytes: float) -> list[str]:
    """Rows of common words, some longer than others."""
    rng = random.Random(0)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 9))) for _ in range(5000)]
    rows, size = [], 0
    while size < megabytes * 2**20:
        rows.append(" ".join(rng.choices(words, k=rng.randint(1, 2 * WORDS))))
        size += len(rows[-1])
    return rows


def write_inputs(folder: Path, rows: list[str]) -> dict[str, Path]:
    """The same rows in two formats."""
    paths = {"jsonl": folder / "rows.jsonl", "parquet": folder / "rows.parquet"}
    with paths["jsonl"].open("w") as file:
        for number, text in enumerate(rows):
            file.write(json.dumps({"id": f"row-{number}", "text": text}) + "\n")
    table = pa.table({"id": [f"row-{number}" for number in range(len(rows))], "text": rows})
    pq.write_table(table, paths["parquet"], row_group_size=20_000)
    return paths


def time_plan(path: Path, out: Path, survey_of: Callable[..., Survey]) -> tuple[dict[str, bytes], float, float]:
    """Plan once: the plan's parts, wall seconds, CPU seconds of this process."""
    spec = check_spec(
        {
            "task": {"kind": "infill", "mask": {"kind": "random", "rate": 0.5}},
            "input": {"path": str(path)},
            "model": {"path": "builtin:asarm-tiny"},
            "decoder": {"kind": "assd"},
            "output": {"path": str(out)},
        }
    )
    store = open_store(spec.output.path)
    resolved = resolve(spec, store)
    began_s, spent_s = time.perf_counter(), time.process_time()
    make_plan(resolved, store, Display(), survey=survey_of(resolved))
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - spent_s
    return {file.name: file.read_bytes() for file in sorted(out.glob("plan/*"))}, wall_s, cpu_s


def compare(folder: Path, name: str, path: Path, rows: int, cpus: int, rounds: int) -> None:
    """Print one line for an input."""
    there = partial(cluster_survey, num_cpus=cpus, is_ours=True, note=print)
    time_plan(path, folder / f"{name}-warm", there)  # processes start, and load the tokenizer
    here_s, there_s, spent_here_s, spent_s = [], [], [], []
    for number in range(rounds):
        alone, wall_s, cpu_s = time_plan(path, folder / f"{name}-here-{number}", lambda resolved: survey)
        here_s.append(wall_s)
        spent_here_s.append(cpu_s)
        together, wall_s, cpu_s = time_plan(path, folder / f"{name}-there-{number}", there)
        assert alone == together, "the plans differ"
        there_s.append(wall_s)
        spent_s.append(cpu_s)
    here, away, spent = min(here_s), min(there_s), min(spent_s)
    size = path.stat().st_size / 2**20
    print(
        f"| {name}, {size:.0f} MiB, {rows:,} rows | {here:.1f} s | {away:.1f} s | {here / away:.2f}x | "
        f"{min(spent_here_s):.1f} s | {spent:.1f} s | {rows / spent:,.0f} |",
        flush=True,
    )


def main() -> None:
    """Print the table."""
    import ray

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=64)
    parser.add_argument("--cpus", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        rows = texts(given.megabytes)
        paths = write_inputs(folder, rows)
        ray.init(
            address="local",
            num_cpus=given.cpus,
            include_dashboard=False,
            object_store_memory=128 * 2**20,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        print(
            "| input | one process | tasks | ratio | driver's CPU alone | driver's CPU with tasks | rows per driver CPU second |"
        )
        print("|---|---:|---:|---:|---:|---:|---:|")
        for name, path in paths.items():
            compare(folder, name, path, len(rows), given.cpus, given.rounds)
        ray.shutdown()


if __name__ == "__main__":
    main()
