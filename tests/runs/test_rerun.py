"""`draftmill rerun --failed`: what a new pass holds, what becomes of the run as a whole, and what it refuses."""

import json
import os
import shutil

import pytest

from draftmill.actors.rows.unit_io import RowUnitIO
from draftmill.jobs.cli import main
from draftmill.jobs.results.passes import Pass, PassRows, latest_rows, passes_of
from draftmill.storage.errors import RowError, StoreError
from draftmill.storage.runs.commit import SUCCESS
from draftmill.storage.runs.records import TIMING_COLUMNS
from draftmill.storage.stores.store import open_store
from tests.runs.jobs_here import without_ray
from tests.runs.jobs_of_tests import write_rows, write_spec

COUNT = 24
SICK = {f"row-{number}" for number in (0, 3, 4, 9, 17, 23)}
STILL_SICK = {"row-4", "row-23"}


def sicken(monkeypatch: pytest.MonkeyPatch, names: set[str]) -> None:
    """Rows of these names fail when a worker makes their canvas, though the plan found nothing wrong with them."""
    healthy = RowUnitIO._canvas

    def canvas(self: RowUnitIO, sample, values):
        if sample.note.planned.id in names:
            raise RowError("out_of_memory", "decode", "too little of it today")
        return healthy(self, sample, values)

    monkeypatch.setattr(RowUnitIO, "_canvas", canvas)


def run_with(names: set[str], *arguments: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        sicken(patch, names)
        return main([*arguments, "--quiet"])


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory):
    """A finished run of 24 rows, six of them failed, and beside it (`well`) one in which none failed."""
    folder = tmp_path_factory.mktemp("rerun")
    rows = write_rows(folder / "rows.jsonl", COUNT)
    assert run_with(SICK, "run", str(write_spec(folder, rows=rows))) == 3
    assert run_with(set(), "run", str(write_spec(folder, rows=rows, out="well"))) == 0
    return folder


@pytest.fixture
def folder(first, tmp_path):
    """A copy of the first run that a test may go on with: other names for the same files, which are never written to."""
    shutil.copytree(first / "run", tmp_path / "run", copy_function=os.link)
    return tmp_path


def rows_of(passes: list[Pass]) -> list[dict]:
    rows = [row for table in latest_rows(passes) for row in table.to_pylist()]
    return [{key: value for key, value in row.items() if key not in TIMING_COLUMNS | {"pass", "unit"}} for row in rows]


def bytes_of(folder) -> dict[str, bytes]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "_lease.json")
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def rerun(folder, *arguments: str, sick: set[str] = frozenset()) -> int:  # type: ignore[assignment]
    return run_with(set(sick), "rerun", str(folder / "run"), "--failed", *arguments)


def test_a_rerun_gives_the_rows_of_a_run_in_which_nothing_failed(first, folder, capsys):
    before = bytes_of(folder / "run")
    assert rerun(folder) == 0
    assert f"after 2 passes {COUNT} of {COUNT} samples are ok, 0 failed" in capsys.readouterr().out
    passes = passes_of(open_store(str(folder / "run")))
    assert [one.number for one in passes] == [1, 2] and passes[1].plan.rows == len(SICK)
    assert rows_of(passes) == rows_of(passes_of(open_store(str(first / "well"))))
    after = bytes_of(folder / "run")
    assert {name: after[name] for name in before} == before, "no file of the first pass changes"
    again = [row for table in latest_rows(passes) for row in table.to_pylist() if row["pass"] == 2]
    assert {row["id"] for row in again} == SICK


def test_what_fails_again_is_rerun_by_the_next_pass_and_by_no_other(folder, capsys):
    assert rerun(folder, sick=STILL_SICK) == 3
    assert "after 2 passes 22 of 24 samples are ok, 2 failed" in capsys.readouterr().out
    assert main(["verify", str(folder / "run")]) == 0
    assert "pass 2: 6 samples again, 4 ok, 2 failed, 0 skipped" in capsys.readouterr().out
    assert rerun(folder) == 0
    passes = passes_of(open_store(str(folder / "run")))
    assert [one.plan.rows for one in passes] == [COUNT, len(SICK), len(STILL_SICK)]
    rows = [row for table in latest_rows(passes) for row in table.to_pylist()]
    assert {row["id"] for row in rows if row["pass"] == 3} == STILL_SICK
    assert len({row["id"] for row in rows}) == len(rows) == COUNT
    assert main(["verify", str(folder / "run")]) == 0
    assert main(["status", str(folder / "run")]) == 0
    assert "pass 2   finished: 6 samples again, 2 of them failed" in capsys.readouterr().out
    assert rerun(folder) == 0
    assert "no failed samples" in capsys.readouterr().out
    assert len(passes_of(open_store(str(folder / "run")))) == 3


def test_a_finished_run_is_judged_by_its_last_pass(first, folder):
    spec = write_spec(folder, rows=first / "rows.jsonl")
    assert run_with(set(), "run", str(spec)) == 3
    assert rerun(folder) == 0
    assert run_with(set(), "run", str(spec)) == 0


def test_an_interrupted_pass_goes_on_and_does_not_count_before_its_end(folder, capsys):
    assert rerun(folder, sick=STILL_SICK) == 3
    place = folder / "run" / "passes" / "0002"
    plan = (place / "_plan.json").read_bytes()
    for name in ("_manifest.json", SUCCESS, "data/unit-00000001.parquet"):
        (place / name).unlink()
    assert main(["status", str(folder / "run")]) == 0
    assert "pass 2   1 of 2 units done; `draftmill rerun --failed` resumes it" in capsys.readouterr().out
    assert main(["verify", str(folder / "run")]) == 0, "the promises of the first pass hold"
    assert rerun(folder, sick=STILL_SICK) == 3
    assert (place / "_plan.json").read_bytes() == plan
    assert not (folder / "run" / "passes" / "0003").exists()
    assert main(["verify", str(folder / "run")]) == 0


def test_a_rerun_may_be_told_what_changes_no_result(folder):
    assert rerun(folder, "--set", "batching.max_rows=1", "--set", "errors.max_rate=0.1", sick=STILL_SICK) == 0


def unfinished(folder) -> None:
    (folder / "run" / "_manifest.json").unlink()
    (folder / "run" / SUCCESS).unlink()


def other_input(folder) -> None:
    write_rows(folder / "rows.jsonl", COUNT - 1)


REFUSED: dict[str, tuple] = {
    "another job": (lambda folder: None, ["--set", "decoder.k=2"], "decoder.k was 3, is 2"),
    "no such key": (lambda folder: None, ["--set", "decoder.kk=2"], "decoder.kk: unknown key"),
    "changed input": (other_input, ["--set", "input.path={folder}/rows.jsonl"], "the inputs changed"),
    "not finished": (unfinished, [], "is not finished"),
}


@pytest.mark.parametrize(("spoil", "arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_a_rerun_of_something_else_is_refused_and_leaves_nothing(folder, capsys, spoil, arguments, message):
    spoil(folder)
    assert rerun(folder, *(argument.format(folder=folder) for argument in arguments)) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "run" / "passes").exists()


def test_a_rerun_says_who_holds_the_run(folder, capsys):
    lease = {"owner": "elsewhere:machine:1", "epoch": 9, "expires_at_s": 4e9}
    (folder / "run" / "_lease.json").unlink()
    (folder / "run" / "_lease.json").write_text(json.dumps(lease))
    assert rerun(folder) == 4
    assert "elsewhere:machine:1" in capsys.readouterr().err


def test_verify_sees_a_pass_that_has_other_rows(folder, capsys):
    assert rerun(folder) == 0
    stranger = folder / "run" / "passes" / "0003"
    shutil.copytree(folder / "run", stranger, ignore=shutil.ignore_patterns("passes"), copy_function=os.link)
    assert main(["verify", str(folder / "run")]) == 1
    out = capsys.readouterr().out
    assert "BROKEN: pass 3: " in out and "its rows are not the failed rows of the pass before it" in out
    with pytest.raises(StoreError, match="0003 is damaged: it has rows"):
        list(latest_rows(passes_of(open_store(str(folder / "run")))))


def test_rows_are_taken_in_any_portions():
    import pyarrow as pa

    tables = [pa.table({"n": list(range(start, start + 3))}) for start in range(0, 12, 3)] + [pa.table({"n": [12]})]
    for portion in range(1, 15):
        rows, found = PassRows(tables), []
        while (table := rows.take(portion)) is not None:
            found.append(table["n"].to_pylist())
        assert [number for part in found for number in part] == list(range(13))
        assert all(len(part) == portion for part in found[:-1])
