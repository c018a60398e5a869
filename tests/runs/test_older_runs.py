"""Runs that version 5 of the result schema wrote (commit 2a8123b): its maps are read by every command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.jobs.cli import main

OLD = Path(__file__).parents[1] / "data" / "schema-5"


@pytest.fixture(params=["score", "blocks"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a run directory: one scored texts, one decoded by blocks."""
    return Path(shutil.copytree(OLD / request.param, tmp_path / request.param))


def test_an_older_run_is_verified_and_exported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert pa.types.is_map(pq.read_schema(run / "data" / "unit-00000000.parquet").field("metrics").type)
    assert main(["verify", str(run)]) == 0, capsys.readouterr().out
    for kind in ("jsonl", "parquet"):
        assert main(["export", str(run), "--format", kind, "--out", str(run.parent / f"all.{kind}")]) == 0
    row = json.loads((run.parent / "all.jsonl").read_text().splitlines()[0])
    if run.name == "score":
        assert list(row["metrics"]) == ["bits_per_byte"] and row["nfe_kinds"] is None
    else:
        assert row["metrics"] == {} and sum(row["nfe_kinds"].values()) == row["nfe"]
        assert main(["export", str(run), "--format", "openai", "--out", str(run.parent / "o.jsonl")]) == 0
        assert (
            json.loads((run.parent / "o.jsonl").read_text().splitlines()[0])["response"]["body"]["model"]
            == "builtin:block-tiny"
        )
    assert pq.read_table(run.parent / "all.parquet").num_rows == 2


def test_an_older_run_is_compared(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(run), str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["comparisons"][0]
    assert set(found["metrics"]) == ({"bits_per_byte", "is_greedy", "logprob"} if run.name == "score" else set())
