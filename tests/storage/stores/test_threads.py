"""Reading starts no thread of Arrow's: one that still lets go of Python's bytes while the interpreter ends aborts it."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.jobs.plan.packing import PlanWriter
from draftmill.storage.parquet import write_parquet
from draftmill.storage.runs.records import table_from_rows
from draftmill.storage.runs.unit_table import ROW_SCHEMA
from draftmill.storage.stores.store import open_store

ROOT = Path(__file__).resolve().parents[3]

START = """
import json, sys
from pathlib import Path
import psutil
from draftmill.storage.runs.unit_table import PlanTable, parts_of
from draftmill.storage.inputs.inputs import list_inputs
from draftmill.storage.inputs.reader import iterate, read_rows
from draftmill.storage.parquet import read_parquet
from draftmill.storage.stores.store import open_store

folder = Path(sys.argv[1])
before = psutil.Process().num_threads()
"""
READS = {
    "a unit's file": "assert read_parquet((folder / 'unit').read_bytes()).num_rows == 300",
    "a unit of the plan": """
table = PlanTable(open_store(str(folder)), parts_of(json.loads((folder / "parts").read_text())["parts"]))
assert len(table.unit_rows(3)) == 4
""",
    "the plan": """
table = PlanTable(open_store(str(folder)), parts_of(json.loads((folder / "parts").read_text())["parts"]))
assert sum(table.num_rows for table in table.tables()) == 100
""",
    "an input in Parquet": """
(file,) = list_inputs(str(folder / "rows.parquet"))
assert len(list(iterate(file))) == 5000 and len(list(read_rows(file, [(7, None), (4000, None)]))) == 2
""",
}
END = """
after = psutil.Process().num_threads()
assert after == before, f"{after - before} threads were started"
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    table = pa.table({name: [f"{name} {row}" for row in range(5000)] for name in "abcdef"})
    pq.write_table(table, folder / "rows.parquet", row_group_size=1000)
    rows = [
        {"id": f"{row}", "unit": 0, "pass": 1, "attempt": 1, "status": "ok", "text": "x" * row} for row in range(300)
    ]
    (folder / "unit").write_bytes(write_parquet(table_from_rows(rows), {}))
    values = [dict(zip(ROW_SCHEMA.names, (0, row, None, f"{row}", 1, 1, None, 0), strict=True)) for row in range(100)]
    writer = PlanWriter(open_store(str(folder)), window=10, unit_rows=4)
    writer.add(pa.Table.from_pylist(values, schema=ROW_SCHEMA))
    writer.finish()
    (folder / "parts").write_text(json.dumps({"parts": writer.parts}, default=list))
    return folder


@pytest.mark.parametrize("what", READS)
@pytest.mark.slow
def test_reading_starts_no_thread(what, files):
    command = [sys.executable, "-c", START + READS[what] + END, str(files)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
