"""`draftmill compact`: files of a chosen size that hold each row once as the last pass has it, and a check that sees damage."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.jobs.cli import main
from draftmill.jobs.exporting import compact
from draftmill.jobs.exporting.compact import MANIFEST, Parts, read_compact
from draftmill.jobs.finished.passes import latest_rows, passes_of
from draftmill.storage.parquet import parquet_groups
from draftmill.storage.runs.records import SCHEMA, table_from_rows
from draftmill.storage.stores.interface import S3Options
from draftmill.storage.stores.store import open_store
from tests.runs.jobs_of_tests import write_rows, write_spec
from tests.runs.test_rerun import COUNT, SICK, STILL_SICK, run_with
from tests.storage.inputs.tables import result_row, unit_table


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compact")
    rows = write_rows(folder / "rows.jsonl", COUNT)
    assert run_with(SICK, "run", str(write_spec(folder, rows=rows))) == 3
    return folder


@pytest.fixture
def run(first: Path, tmp_path: Path) -> Path:
    """A run directory of the test's own: other names for the same files, which are never written to."""
    shutil.copytree(first / "run", tmp_path / "run", copy_function=os.link)
    return tmp_path / "run"


def files_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "compact").iterdir())


def test_a_compacted_run_has_every_row_once_and_verifies(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in (run / "data").iterdir())
    assert main(["compact", str(run)]) == 0
    assert f"{COUNT} rows in 1 file" in capsys.readouterr().out
    found = json.loads((run / MANIFEST).read_text())
    assert found["totals"]["rows"] == COUNT and found["totals"]["failed"] == len(SICK) and found["passes"] == 1
    table = pq.read_table(run / found["files"][0]["object"])
    assert table.schema.remove_metadata().equals(SCHEMA)
    ids = [row["id"] for part in latest_rows(passes_of(open_store(str(run)))) for row in part.to_pylist()]
    assert table["id"].to_pylist() == ids and len(set(ids)) == COUNT
    assert main(["verify", str(run)]) == 0
    assert f"compact: {COUNT} rows in 1 file" in capsys.readouterr().out
    assert sorted(path.name for path in (run / "data").iterdir()) == before, "the unit files stay"


def test_compacting_again_writes_nothing_but_after_another_pass_anew(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compact", str(run)]) == 0
    (name,) = [name for name in files_in(run) if name.startswith("part-")]
    written = (run / "compact" / name).stat()
    assert main(["compact", str(run)]) == 0
    assert (run / "compact" / name).stat() == written
    assert run_with(set(STILL_SICK), "rerun", str(run), "--failed") == 3
    assert main(["verify", str(run)]) == 0
    assert "from before the last pass" in capsys.readouterr().out
    assert main(["compact", str(run), "--file-mb", "1"]) == 0
    assert "from 8 unit files of 2 passes" in capsys.readouterr().out
    assert name not in files_in(run), "files that no longer count are swept"
    found = read_compact(open_store(str(run)))
    assert found is not None and sum(file.failed for file in found.files) == len(STILL_SICK)
    assert main(["verify", str(run)]) == 0


def test_files_are_as_large_as_asked_for_and_lose_nothing() -> None:
    rng = np.random.default_rng(0)
    tables = []
    for unit in range(40):
        rows = [
            result_row(unit * 50 + row, unit=unit, tokens=rng.integers(0, 2**30, 300).tolist(), worker=f"w{unit % 3}")
            for row in range(50)
        ]
        tables.append(table_from_rows(rows))
    wanted = 256 * 1024
    parts = list(Parts(SCHEMA, {"fingerprint": "f"}, wanted).of(tables))
    assert len(parts) > 5 and all(len(part.data) <= wanted for part in parts)
    assert all(len(part.data) > wanted / 3 for part in parts[:-1])
    found = [row["id"] for part in parts for group in parquet_groups(part.data) for row in group.to_pylist()]
    assert found == [row["id"] for table in tables for row in table.to_pylist()]
    assert sum(part.statuses["ok"] for part in parts) == 2000


def test_a_run_without_rows_in_a_unit_is_compacted_too() -> None:
    tables = [unit_table(3, failed=1), unit_table(0, failed=0), unit_table(2, failed=2)]
    (part,) = Parts(SCHEMA, {}, 2**20).of(tables)
    assert (part.rows, part.statuses) == (5, {"ok": 2, "failed": 3})


def flip(path: Path, change: Callable[[bytes], bytes]) -> None:
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(change(data))


def torn(run: Path, part: Path) -> None:
    flip(part, lambda data: data[:-100])


def gone(run: Path, part: Path) -> None:
    part.unlink()


def other_rows(run: Path, part: Path) -> None:
    """A whole file with good checksums, in which one text is another one."""
    table = pq.read_table(part)
    at = table.schema.get_field_index("tokens")
    tokens = table["tokens"].to_pylist()
    tokens[3] = [1, 2, 3]
    rewrite(run, part, table.set_column(at, table.schema.field(at), pa.array(tokens, pa.list_(pa.int32()))))


def fewer_rows(run: Path, part: Path) -> None:
    rewrite(run, part, pq.read_table(part).slice(1))


def rewrite(run: Path, part: Path, table: pa.Table) -> None:
    import hashlib

    part.unlink()
    pq.write_table(table, part)
    found = json.loads((run / MANIFEST).read_text())
    found["files"][0]["sha256"] = hashlib.sha256(part.read_bytes()).hexdigest()
    (run / MANIFEST).write_text(json.dumps(found))


def damaged_manifest(run: Path, part: Path) -> None:
    (run / MANIFEST).write_text("{")


SPOILT: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "torn": (torn, "its SHA-256 differs from the manifest's"),
    "gone": (gone, "can't be read"),
    "another text": (other_rows, "its rows differ from those of the unit files, from row 0 on"),
    "a row less": (fewer_rows, "its rows differ from those of the unit files, from row 0 on"),
    "manifest": (damaged_manifest, "is damaged"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILT.values(), ids=SPOILT)
def test_verify_sees_compacted_files_that_are(
    run: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path, Path], None], message: str
) -> None:
    assert main(["compact", str(run)]) == 0
    (part,) = (run / "compact").glob("part-*")
    spoil(run, part)
    assert main(["verify", str(run)]) == 1
    out = capsys.readouterr().out
    assert "BROKEN: " in out and message in out


@pytest.mark.parametrize("spoil", [torn, gone, damaged_manifest])
def test_compacting_again_mends_what_is_damaged(run: Path, spoil: Callable[[Path, Path], None]) -> None:
    assert main(["compact", str(run)]) == 0
    (part,) = (run / "compact").glob("part-*")
    spoil(run, part)
    assert main(["compact", str(run)]) == 0
    assert main(["verify", str(run)]) == 0, "the rows that failed, and nothing else"


def test_a_compaction_that_broke_off_does_not_count_and_is_done_again(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(compact, "_json", lambda manifest: 1 / 0)
        assert main(["compact", str(run)]) == 1
    assert files_in(run) == [name for name in files_in(run) if name.startswith("part-")]
    assert main(["verify", str(run)]) == 0, "files that no manifest names say nothing"
    (run / "compact" / "part-00000-deadbeef.parquet").write_bytes(b"of an earlier try")
    assert main(["compact", str(run)]) == 0
    assert len(files_in(run)) == 2 and main(["verify", str(run)]) == 0


@pytest.mark.parametrize("size", ["0", "5000", "-1", "many"])
def test_a_size_that_no_file_may_have_is_refused(run: Path, size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["compact", str(run), "--file-mb", size])
    assert caught.value.code == 2 and "allowed: 1 to 4096" in capsys.readouterr().err


def test_an_unfinished_run_is_not_compacted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "_manifest.json").unlink()
    assert main(["compact", str(run)]) == 2
    assert "is not finished" in capsys.readouterr().err and not (run / "compact").exists()


@pytest.mark.s3
def test_on_s3_a_run_is_rerun_compacted_and_verified(
    tmp_path: Path, s3_url: str, s3_options: S3Options, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", 8)
    s3: dict[str, Any] = {"endpoint": s3_options.endpoint, "region": s3_options.region}
    spec = write_spec(tmp_path, rows=rows, output={"path": s3_url, "unit_rows": 4}, s3=s3)
    place = [s3_url, "--s3-endpoint", str(s3_options.endpoint), "--s3-region", str(s3_options.region)]
    assert run_with({"row-1", "row-5"}, "run", str(spec)) == 3
    assert run_with({"row-5"}, "rerun", *place, "--failed") == 3
    assert main(["compact", *place]) == 0
    assert main(["verify", *place]) == 0
    out = capsys.readouterr().out
    assert "pass 2: 2 samples again, 1 ok, 1 failed" in out and "compact: 8 rows in 1 file" in out
