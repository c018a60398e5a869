"""Whole jobs on models of masked diffusion: rows of tokens, without a tokenizer, infilled and completed."""

import shutil

import pytest

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.storage.errors import UserError
from tests.runs.causal_jobs import next_job

CANVASES: dict[str, list[int | None]] = {
    "middle": [5, 11, None, None, 3, None, 8, 8, 21, None],
    "front": [None, None, 40, 2],
    "all": [None] * 9,
    "none": [1, 2, 3],
}
INFILL: dict = {"kind": "infill", "mask": {"kind": "given"}}
DECODERS: list[tuple[str, dict]] = [
    *(("llada", {"kind": kind, "block_length": 4}) for kind in ("stepwise", "threshold", "factor", "ssd")),
    ("mdlm", {"kind": "ancestral", "steps": 6}),
    ("sedd", {"kind": "ancestral", "steps": 6}),
    ("sedd", {"kind": "ancestral", "steps": 6, "predictor": "euler"}),
]


def decoded(folder, decoder: dict, rows: list[dict], task: dict):
    return next_job(folder, rows, task=task, decoder=decoder, sampling={"temperature": 1.0})


@pytest.mark.parametrize(("family", "decoder"), DECODERS, ids=str)
def test_given_holes_are_filled_by_every_decoder(golden, tmp_path, family, decoder):
    shutil.copytree(golden / family, tmp_path / "model")
    found = decoded(tmp_path, decoder, [{"id": name, "ids": ids} for name, ids in CANVASES.items()], INFILL)
    assert sorted(found) == sorted(CANVASES)
    for name, ids in CANVASES.items():
        row, holes = found[name], ids.count(None)
        assert (row["status"], row["finish"], row["text"]) == ("ok", "filled", None), row["error"]
        assert row["new_tokens"] == holes == len(row["tokens"])
        assert inspect_model(tmp_path / "model").mask_id not in row["tokens"]
        assert (row["nfe"] == 0) == (holes == 0) and row["nfe"] <= (7 if family == "sedd" else holes)
        assert row["logprob"] == (0.0 if not holes else None) or decoder["kind"] in ("stepwise", "ssd")


@pytest.mark.parametrize(("family", "decoder"), [("llada", {"kind": "stepwise", "block_length": 5}), DECODERS[4]])
def test_prompts_are_completed(golden, tmp_path, family, decoder):
    shutil.copytree(golden / family, tmp_path / "model")
    rows = [{"id": str(index), "ids": [index, 7, 30 + index]} for index in range(5)]
    for row in decoded(tmp_path, decoder, rows, {"kind": "complete", "max_new_tokens": 10}).values():
        assert (row["status"], row["finish"], row["new_tokens"]) == ("ok", "length", 10)
        assert inspect_model(tmp_path / "model").mask_id not in row["tokens"] and 1 <= row["nfe"] <= 10


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
def test_what_can_not_be_decoded_is_refused_by_name(golden, tmp_path, decoder, task, message):
    shutil.copytree(golden / "llada", tmp_path / "model")
    with pytest.raises(UserError) as caught:
        decoded(tmp_path, decoder, [{"id": "a", "ids": [1, None]}], task)
    assert message in str(caught.value)
