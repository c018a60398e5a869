"""A job of a million units: planning it and listing what is done take the driver no more memory than a small one."""

import json
import subprocess
import sys

import pytest

from draftmill.storage.runs.done_units import BLOCK, DoneUnits

CODE = """
import json, resource
import numpy as np
import pyarrow as pa
from draftmill.storage.runs.unit_table import ROW_SCHEMA
from draftmill.jobs.plan import packing
from draftmill.jobs.plan.packing import PlanWriter
from draftmill.storage.runs.commit import done_units, unit_name
from draftmill.storage.stores.store import Stat

UNITS, WINDOW, BYTES = 1_000_000, 50_000, 0

class Store:
    '''A store that keeps nothing, and lists a million committed units.'''
    url = "fake"
    def put(self, name, data):
        global BYTES
        BYTES += len(data)
        return Stat(name, len(data), "0")
    def list(self, prefix=""):
        return (Stat(unit_name(unit), 20_000, f"{unit:032x}", {}, 1.0) for unit in range(UNITS))

def rows(first):
    numbers = np.arange(first, first + WINDOW)
    length = pa.array((1 + numbers * 7919 % 500).astype(np.int32))
    nothing = pa.nulls(WINDOW, pa.string())
    columns = {"file": pa.array(np.zeros(WINDOW, np.int32)), "row": pa.array(numbers), "offset": nothing.cast(pa.int64()),
               "id": pa.array(numbers.astype(str)), "length": length, "holes": length, "error_kind": nothing,
               "sample": pa.array(np.zeros(WINDOW, np.int32))}
    return pa.Table.from_arrays([columns[name] for name in ROW_SCHEMA.names], schema=ROW_SCHEMA)

def peak_mb():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

packing.part_bytes = lambda units: bytes(100)  # Parquet with a million row groups takes a minute
writer = PlanWriter(Store(), window=WINDOW, unit_rows=1)
writer.add(rows(0))
small = peak_mb()
for first in range(WINDOW, UNITS, WINDOW):
    writer.add(rows(first))
writer.finish()
planned = peak_mb()
done = done_units(Store())
listed = peak_mb()
assert writer.totals.rows == UNITS == writer.totals.units == len(done) and UNITS - 1 in done and UNITS not in done
print(json.dumps({"parts": len(writer.parts), "bytes": BYTES, "plan_mb": planned - small, "list_mb": listed - planned}))
"""


@pytest.fixture(scope="module")
def taken() -> dict[str, float]:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.slow
def test_planning_a_million_units_keeps_little_of_each(taken):
    """Twelve bytes, and a line for each 256 of them; a window and a part at a time."""
    assert taken["parts"] == 3907 and taken["bytes"] == 390_700
    assert taken["plan_mb"] < 64, taken


@pytest.mark.slow
def test_listing_a_million_units_keeps_a_byte_of_each(taken):
    assert taken["list_mb"] < 16, taken


def test_the_done_units_are_known_by_number():
    done = DoneUnits()
    units = [0, 5, BLOCK - 1, BLOCK, 7 * BLOCK + 3, 10**12]
    for unit in [*reversed(units), 5]:
        done.add(unit)
    assert list(done) == units and len(done) == len(units)
    assert [unit in done for unit in (1, 5, BLOCK + 1, "5", -1)] == [False, True, False, False, False]
