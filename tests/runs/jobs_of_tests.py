"""A small job for tests: the golden any-subset model, rows that are token ids, and what a finished run holds."""

import json
import multiprocessing
import random
from collections.abc import Callable, Iterable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pyarrow as pa
import pytest
import yaml

from draftmill.storage.runs.commit import read_manifest
from draftmill.storage.runs.records import TIMING_COLUMNS, read_results
from draftmill.storage.stores.store import Store, open_store

GOLDEN = Path(__file__).parents[1] / "data" / "xlnet_asarm"
VOCABULARY = json.loads((GOLDEN / "config.json").read_text())["vocab_size"]


PRELOADED = [
    "draftmill.jobs.run.job",
    "draftmill.decoders.registry",
    "draftmill.decoders.backbones.xlnet",
    "draftmill.storage.stores.s3",
    "ray",
    "pandas",
    "tests.runs.local_pool",
]
"""What the server imports from which tests fork their processes: they share one, so the first to start it decides."""


def forked(target: Callable[..., None], *arguments: str) -> ForkServerProcess:
    """A process, started, that begins with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def soak(values: Iterable) -> list:
    """Parameters of a test for `make soak` alone."""
    return [pytest.param(value, marks=pytest.mark.soak) for value in sorted(values)]


def write_namesakes(folder: Path) -> None:
    """Files and a package of a user's with the names of our folders; to import one of them is an error."""
    (folder / "jobs").mkdir()
    for name in ("jobs/__init__.py", "actors.py", "decoders.py", "storage.py", "infra.py"):
        (folder / name).write_text(f"raise RuntimeError('{name} is the user\\'s')\n")


def write_rows(path: Path, count: int, *, seed: int = 0, longest: int = 24) -> Path:
    """`count` rows of ids, about half of them masked, as jsonl."""
    rng = random.Random(seed)
    with path.open("w") as file:
        for number in range(count):
            ids = [rng.randrange(6, VOCABULARY) for _ in range(rng.randint(4, longest))]
            tokens = [None if rng.random() < 0.5 else token for token in ids]
            file.write(json.dumps({"id": f"row-{number}", "tokens": tokens}) + "\n")
    return path


def job_over(rows: Path | str, **sections) -> dict:
    """A spec for those rows, without the path of its output; `sections` replace whole ones."""
    return {
        "task": {"kind": "infill", "mask": {"kind": "given"}},
        "input": {"path": str(rows), "columns": {"id": "id", "tokens": "tokens"}},
        "model": {"path": str(GOLDEN), "tokenizer": "none", "device": "cpu"},
        "decoder": {"kind": "assd", "k": 3},
        "output": {"unit_rows": 4},
    } | sections


def write_spec(folder: Path, *, rows: Path, out: str = "run", **changes) -> Path:
    spec = job_over(rows, output={"path": str(folder / out), "unit_rows": 4}) | changes
    path = folder / f"{out}.yaml"
    path.write_text(yaml.safe_dump(spec))
    return path


def rows_of(run: Path | Store) -> pa.Table:
    """All result rows of a finished run, without the columns that may differ between two runs."""
    store = open_store(str(run)) if isinstance(run, Path) else run
    manifest = read_manifest(store)
    assert manifest is not None
    tables = list(read_results(store, objects=[unit.object for unit in manifest.units]))
    return pa.concat_tables(tables, promote_options="default").drop_columns(sorted(TIMING_COLUMNS)).unify_dictionaries()


def unequal(found: pa.Table, expected: pa.Table) -> list[str]:
    """What differs between two results, in words; nothing if they are equal to the byte."""
    if found.equals(expected):
        return []
    pairs = zip(expected.to_pylist(), found.to_pylist(), strict=False)
    cells = [f"{a['id']}.{key}: {a[key]!r}, now {b[key]!r}" for a, b in pairs for key in a if a[key] != b[key]]
    return [f"{expected.num_rows} rows, now {found.num_rows}", *cells[:20]]


def contents(folder: Path, *, leases: bool = True) -> dict[str, tuple[bytes, int]]:
    """Every file of a folder, but its leases where they don't count, with its content and its time of change."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and (leases or path.name != "_lease.json"))
    return {str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def logged(run: Path, kind: str, epoch: str = "*") -> list[dict]:
    """The events of a kind in the log of a run, by all of its drivers or by that of an epoch."""
    files = sorted(run.glob(f"attempts/epoch-{epoch}-part-*.jsonl"))
    events = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [event for event in events if event["event"] == kind]
