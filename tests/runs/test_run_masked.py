"""Whole jobs on masked-diffusion models: rows of tokens, without a tokenizer, infilled and completed."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftmill.storage.errors import UserError
from tests.runs.causal_jobs import next_job

MASK, END = 90, 88
CANVASES: dict[str, list[int | None]] = {
    "middle": [5, 11, None, None, 3, None, 8, 8, 21, None],
    "front": [None, None, 40, 2],
    "all": [None] * 9,
    "none": [1, 2, 3],
}
INFILL: dict[str, Any] = {"kind": "infill", "mask": {"kind": "given"}}


def decoded(folder: Path, decoder: dict[str, Any], rows: list[dict[str, Any]], task: dict[str, Any]) -> Any:
    return next_job(folder, rows, task=task, decoder=decoder)


@pytest.fixture
def world(golden: Path, tmp_path: Path) -> Path:
    shutil.copytree(golden / "llada", tmp_path / "model")
    return tmp_path


def test_given_holes_are_filled_by_every_decoder_of_masked_diffusion(world):
    rows = [{"id": name, "ids": ids} for name, ids in CANVASES.items()]
    found = {
        kind: decoded(world, {"kind": kind, "block_length": 4}, rows, INFILL)
        for kind in ("stepwise", "threshold", "factor", "ssd")
    }
    for kind, results in found.items():
        assert sorted(results) == sorted(CANVASES)
        for name, ids in CANVASES.items():
            row, holes = results[name], ids.count(None)
            assert (row["status"], row["finish"], row["text"]) == ("ok", "filled", None), (kind, row["error"])
            assert row["new_tokens"] == holes == len(row["tokens"])
            assert MASK not in row["tokens"]
            assert (row["nfe"] == 0) == (holes == 0) and row["nfe"] <= holes
    for name, row in found["stepwise"].items():
        assert found["ssd"][name]["tokens"] == row["tokens"]
        assert row["nfe"] == row["new_tokens"]
    assert found["ssd"]["all"]["nfe"] < 9


@pytest.mark.slow
def test_caches_refreshes_and_trees_of_a_job_change_no_text_but_where_it_is_said(world):
    rows = [{"id": str(index), "ids": [7 * index, 3, *[None] * 14]} for index in range(6)]
    cached: dict[str, Any] = {"block_length": 4, "cache": "dual_strict", "refresh": 6}
    base = decoded(world, {"kind": "stepwise", **cached}, rows, INFILL)
    for more in ({"draft_length": 5}, {"draft_length": 5, "tree": "mixed"}):
        found = decoded(world, {"kind": "ssd", **cached, **more}, rows, INFILL)
        assert {name: row["tokens"] for name, row in found.items()} == {
            name: row["tokens"] for name, row in base.items()
        }
    relaxed = decoded(world, {"kind": "ssd", **cached, "cache": "dual_relaxed"}, rows, INFILL)
    assert all(row["status"] == "ok" and row["new_tokens"] == 14 for row in relaxed.values())
    same = decoded(world, {"kind": "stepwise", **cached, "cache": "dual_relaxed"}, rows, INFILL)
    assert [row["tokens"] for row in same.values()] == [row["tokens"] for row in base.values()]


@pytest.mark.slow
def test_a_prompt_is_completed_as_far_as_its_first_end_token(world):
    rows = [{"id": str(index), "ids": [index, 7, 30 + index]} for index in range(12)]
    task = {"kind": "complete", "max_new_tokens": 10}
    free = decoded(world, {"kind": "stepwise", "block_length": 5}, rows, task)
    said = [token for row in free.values() for token in row["tokens"][1:9]]
    end = max(set(said), key=said.count)
    (world / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    whole = decoded(world, {"kind": "stepwise", "block_length": 5}, rows, task | {"ignore_eos": True})
    finishes = set()
    for kind in ("stepwise", "ssd"):
        ended = decoded(world, {"kind": kind, "block_length": 5}, rows, task)
        for name, row in ended.items():
            tokens = whole[name]["tokens"]
            keep = tokens.index(end) + 1 if end in tokens else len(tokens)
            assert row["tokens"] == tokens[:keep]
            assert row["finish"] == ("eos" if end in tokens else "length")
            finishes |= {row["finish"]}
        assert sum(row["nfe"] for row in ended.values()) < sum(row["nfe"] for row in whole.values())
    assert finishes == {"eos", "length"}


@pytest.mark.parametrize(
    ("decoder", "task", "message"),
    [
        ({"kind": "assd"}, INFILL, "'assd' does not run on models of family 'llada'; allowed: stepwise, threshold"),
        ({"kind": "ssd", "draft_length": 0}, INFILL, "decoder.draft_length"),
        ({"kind": "ssd", "cache": "dual"}, INFILL, "decoder.cache: 'dual' is not allowed"),
        ({"kind": "stepwise", "refresh": 8}, INFILL, "decoder.refresh: 8, but cache 'none' has nothing to refresh; allowed"),
        ({"kind": "stepwise", "steps": 8, "tokens_per_step": 2}, INFILL, "give tokens_per_step or steps, not both"),
        ({"kind": "stepwise", "schedule": "dream"}, INFILL, "the schedule 'dream' needs the number of steps"),
        ({"kind": "stepwise", "schedule": "dream", "steps": 3}, INFILL, "decoder.block_length: 32, but the schedule"),
        ({"kind": "autoregressive"}, {"kind": "score"}, "does not run on models of family 'llada'; allowed: stepwise"),
    ],
)  # fmt: skip
def test_what_can_not_be_decoded_is_refused_by_name(world, decoder, task, message):
    with pytest.raises(UserError) as caught:
        decoded(world, decoder, [{"id": "a", "ids": [1, None]}], task)
    assert message in str(caught.value)
