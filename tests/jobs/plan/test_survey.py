"""The survey measures several batches at once, and what it says does not depend on that."""

import json
from threading import Barrier, Lock

import pytest

from draftmill.actors.planning import surveying
from draftmill.actors.rows.canvas import CanvasSize
from draftmill.actors.rows.row import Values
from draftmill.jobs.config.spec import JobSpec, check_spec
from draftmill.jobs.plan.planning import survey
from draftmill.storage.errors import RowError, UserError
from draftmill.storage.inputs.inputs import list_inputs
from tests.jobs.specs import infilling

PATIENCE_S = 60.0
THREADS = 3
ROWS, BATCH_ROWS = 50, 8


class Measures:
    """Says that a canvas is as long as the row's number; the first batches are measured at once, or nobody gets further.
    Batches of files of ROWS rows have BATCH_ROWS of them."""

    def __init__(self, barrier: Barrier | None = None) -> None:
        self.barrier = barrier
        self.lock = Lock()
        self.batches = 0

    def size(self, values: Values, key: int) -> CanvasSize:
        number = values["n"]
        if number % ROWS % BATCH_ROWS == 0:
            with self.lock:
                self.batches += 1
                is_first = self.batches <= THREADS
            if self.barrier is not None and is_first:
                self.barrier.wait(PATIENCE_S)
        if number % 10 == 7:
            raise RowError("odd", "tokenize", "no")
        return CanvasSize(number, 1)


@pytest.fixture(autouse=True)
def small_batches_on_three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surveying, "BATCH_ROWS", BATCH_ROWS)
    monkeypatch.setattr("os.cpu_count", lambda: THREADS)


@pytest.fixture
def spec(tmp_path) -> JobSpec:
    """Two files of 50 rows."""
    for name, first in (("a.jsonl", 0), ("b.jsonl", ROWS)):
        lines = [json.dumps({"id": f"r{n}", "n": n}) for n in range(first, first + ROWS)]
        (tmp_path / name).write_text("\n".join(lines))
    return check_spec(infilling(input={"path": str(tmp_path)}))


def surveyed(spec: JobSpec, maker: Measures, limit: int | None = None):
    for table in survey(spec.recipe(), maker, list_inputs(spec.input.path), limit=limit):  # type: ignore[arg-type]
        yield from zip(*(table[name].to_pylist() for name in ("id", "length", "error_kind")), strict=True)


def test_batches_are_measured_side_by_side_and_come_in_the_order_of_the_input(spec):
    maker = Measures(Barrier(THREADS))
    found = list(surveyed(spec, maker))
    assert found == [(f"r{n}", 0 if n % 10 == 7 else n, "odd" if n % 10 == 7 else None) for n in range(100)]
    assert maker.batches == 14


def test_the_limit_and_a_damaged_file_end_it_as_if_there_were_one_thread(spec, tmp_path):
    assert [name for name, _, _ in surveyed(spec, Measures(), limit=60)] == [f"r{n}" for n in range(60)]
    (tmp_path / "b.jsonl.gz").write_bytes(b"\x1f\x8b and no more")
    with pytest.raises(UserError, match=r"b\.jsonl\.gz: damaged"):
        list(surveyed(spec, Measures()))


def test_memory_holds_a_few_batches_for_each_thread(spec):
    maker = Measures()
    tables = survey(spec.recipe(), maker, list_inputs(spec.input.path))  # type: ignore[arg-type]
    next(tables)
    tables.close()  # type: ignore[attr-defined]
    assert maker.batches <= 2 * THREADS
