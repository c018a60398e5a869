"""The dry run says what a job would do, and writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from actors.canvas import Canvas, Size
from decoders.base import HOLE
from jobs.forecast import prompt_text
from jobs.spec import check_spec
from jobs.survey import table_of
from jobs.validate import estimated_rows, validate
from storage.reader import list_inputs
from tests.actors.tokenizers_for_tests import byte_level


def test_a_dry_run_shows_the_first_canvas_and_the_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"id": "bad"}, *({"id": f"r{number}", "text": f"x = <mask:{number + 1}>;\n"} for number in range(20))]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    spec = check_spec(
        {
            "name": "dry",
            "task": {"kind": "infill", "mask": {"kind": "marker"}},
            "input": {"path": str(file)},
            "model": {"path": "builtin:asarm-tiny"},
            "decoder": {"kind": "assd"},
            "output": {"path": str(tmp_path / "run")},
        }
    )
    assert validate(spec) == 0
    said = capsys.readouterr().out
    for part in (
        "dry: infill, mask marker, decoder assd",
        "3,090,944 parameters, up to 512 tokens",
        "canvas    r0:",
        "1 to generate in 1 holes",
        "  | x = [1];",
        "samples   21; looked at 21",
        "fail    1 of those looked at: missing_column 1",
        "10.0 a sample, 210 to generate",
        "units     1 of at most 32 samples",
        "useful in batches",
        "memory",
        "tokens/s on one worker",
        "time",
    ):
        assert part in said, f"{part!r} is not in\n{said}"
    assert not (tmp_path / "run").exists()


def test_a_prompt_shows_holes_as_their_lengths() -> None:
    a, b = byte_level().encode("a")[0], byte_level().encode("b")[0]
    canvas = Canvas(np.asarray([HOLE, a, HOLE, HOLE, b], dtype=np.int32), ((0, 1), (2, 4)))
    assert prompt_text(canvas, byte_level()) == "[1]a[2]b"


def test_rows_are_estimated_from_bytes_or_known_from_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("twelve chars\n" * 1000)
    inputs = list_inputs(str(tmp_path / "a.txt"))
    sample = table_of(
        0, rows=range(101), offsets=[13 * n for n in range(101)], ids=["x"] * 101, found=[Size(1, 1)] * 101
    )
    assert estimated_rows(inputs, sample) == 1000
    pq.write_table(pa.table({"text": ["a"] * 77}), tmp_path / "b.parquet")
    assert estimated_rows(list_inputs(str(tmp_path / "b.parquet")), sample) == 77
