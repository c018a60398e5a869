"""Whole jobs of ancestral sampling on MDLM and SEDD: rows of tokens, infilled and completed, the same at every attempt."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.runs.causal_jobs import next_job

MASK = 64
CANVASES: dict[str, list[int | None]] = {
    "middle": [5, 11, None, None, 3, None, 8, 8, 21, None],
    "front": [None, None, 40, 2],
    "all": [None] * 9,
    "none": [1, 2, 3],
}
ROWS: list[dict[str, Any]] = [{"id": name, "ids": ids} for name, ids in CANVASES.items()]
INFILL: dict[str, Any] = {"kind": "infill", "mask": {"kind": "given"}}


def decoded(folder: Path, decoder: dict[str, Any], rows: list[dict[str, Any]], task: Any, **sections: Any) -> Any:
    sections = {"sampling": {"temperature": 1.0}} | sections
    return next_job(folder, rows, task=task, decoder={"kind": "ancestral"} | decoder, **sections)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("family", "predictor"), [("mdlm", "auto"), ("sedd", "auto"), ("sedd", "euler")])
def test_given_holes_are_filled_the_same_in_every_batch(golden, tmp_path, family, predictor):
    shutil.copytree(golden / family, tmp_path / "model")
    decoder = {"steps": 6, "predictor": predictor}
    found = decoded(tmp_path, decoder, ROWS, INFILL)
    assert sorted(found) == sorted(CANVASES)
    for name, ids in CANVASES.items():
        row, holes = found[name], ids.count(None)
        assert (row["status"], row["finish"], row["text"], row["logprob"]) == (
            "ok",
            "filled",
            None,
            None if holes else 0.0,
        )
        assert row["new_tokens"] == holes == len(row["tokens"]) and MASK not in row["tokens"]
        assert (row["nfe"] == 0) == (holes == 0) and row["nfe"] <= 7
        if family == "mdlm":
            assert row["nfe"] <= holes
    alone = decoded(tmp_path, decoder, ROWS, INFILL, batching={"max_rows": 1})
    assert {name: row["tokens"] for name, row in alone.items()} == {name: row["tokens"] for name, row in found.items()}


def test_prompts_are_completed(golden, tmp_path):
    shutil.copytree(golden / "mdlm", tmp_path / "model")
    rows = [{"id": str(index), "ids": [index, 7, 30 + index]} for index in range(5)]
    for row in decoded(tmp_path, {"steps": 4}, rows, {"kind": "complete", "max_new_tokens": 10}).values():
        assert (row["status"], row["finish"], row["new_tokens"]) == ("ok", "length", 10)
        assert MASK not in row["tokens"] and 1 <= row["nfe"] <= 5
