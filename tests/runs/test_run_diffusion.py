"""Whole jobs of diffusion models, masked and by blocks: rows of tokens, infilled and completed, the same at every attempt."""

import shutil

import pytest

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.storage.errors import UserError
from recipes.folder import save_draft_heads
from tests.decoders.support import toy_heads
from tests.golden_data import read_json
from tests.runs.causal_jobs import next_job

MASK, ROOM = 95, 11
PROMPTS: dict[str, list[int]] = {
    "none": [],
    "one": [5],
    "short": [5, 11, 3],
    "whole": [9, 9, 2, 40],
    "long": list(range(10, 23)),
}
ALWAYS = {"kind": "s2d2", "block_size": 4, "causal_cache": True}


def decoded(folder, decoder: dict, **sections) -> dict[str, dict]:
    rows = sections.pop("rows", None) or [{"id": name, "ids": ids} for name, ids in PROMPTS.items()]
    sections.setdefault("task", {"kind": "complete", "max_new_tokens": ROOM, "ignore_eos": True})
    sections.setdefault("sampling", {"temperature": 1.0})
    path = str(folder / f"run-{len(list(folder.glob('run-*')))}")
    sections.setdefault("output", {"path": path, "unit_rows": 3, "trace": "steps"})
    found: dict[str, dict] = next_job(folder, rows, decoder=decoder, **sections)
    return found


@pytest.fixture
def world(golden, tmp_path):
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(golden / "sdar" / name, tmp_path / "model" / name)
    return tmp_path


@pytest.mark.slow
def test_prompts_of_every_length_are_completed_and_forwards_are_told_by_kind(world):
    width = read_json(world / "model" / "config.json")["hidden_size"]
    (world / "head").mkdir()
    save_draft_heads(world / "head", toy_heads(width), "s2d2")
    found = {
        "headed": decoded(world, ALWAYS | {"fused": True, "head": str(world / "head")}),
        "one": decoded(world, {"kind": "block_diffusion", "block_size": 1, "causal_cache": True}),
        "always": decoded(world, ALWAYS),
        "fused": decoded(world, ALWAYS | {"fused": True}),
        "drafted": decoded(world, ALWAYS | {"drafter": {"path": str(world / "model")}}),
        "plain": decoded(world, {"kind": "block_diffusion"}),
        "routed": decoded(world, {"kind": "s2d2", "router": {"kind": "bandit"}}),
    }
    for decoder, rows in found.items():
        assert sorted(rows) == sorted(PROMPTS)
        for row in rows.values():
            kinds = dict(row["nfe_kinds"])
            assert (row["status"], row["finish"], len(row["tokens"])) == ("ok", "length", ROOM), decoder
            assert MASK not in row["tokens"] and sum(kinds.values()) == row["nfe"]
    for name in PROMPTS:
        assert found["one"][name]["tokens"] == found["always"][name]["tokens"] == found["fused"][name]["tokens"]
        assert found["one"][name]["tokens"] == found["drafted"][name]["tokens"] == found["headed"][name]["tokens"]
        assert (found["headed"][name]["drafter"], found["fused"][name]["drafter"]) == ("head", None)
        assert found["drafted"][name]["nfe_draft"] > 0 == found["fused"][name]["nfe_draft"]
        assert found["fused"][name]["logprob"] == pytest.approx(found["one"][name]["logprob"], rel=1e-5)
        assert found["fused"][name]["nfe"] < found["always"][name]["nfe"]
        assert found["plain"][name]["logprob"] is None and dict(found["plain"][name]["nfe_kinds"])["verify"] == 0


def test_a_drafter_that_is_no_block_diffusion_model_is_refused_at_the_start(world, golden):
    with pytest.raises(
        UserError, match=r"decoder.drafter.path: .* is of family 'llada', which is not a block-diffusion"
    ):
        decoded(world, ALWAYS | {"drafter": {"path": str(golden / "llada")}})


def test_a_damaged_draft_head_is_refused_at_the_start(world):
    for name, data in (
        ("draft_head.json", b'{"kind": "s2d2", "width": 64, "markov_hidden": 8}'),
        ("draft_head.safetensors", b"?"),
    ):
        (world / "model" / name).write_bytes(data)
    with pytest.raises(UserError, match=r"decoder.head: .*draft_head.safetensors is damaged or not a safetensors file"):
        decoded(world, ALWAYS | {"fused": True})


def test_a_job_that_names_the_family_of_d2f_gives_the_public_codes_text(golden, tmp_path):
    """config.json says `llada`, whose decoders are others."""
    cases = read_json(golden / "d2f" / "cases.json")["cases"]
    case = next(case for case in cases if case.get("nfe") == 15)
    options = case["settings"]
    model = {"path": str(golden / "llada"), "device": "cpu", "tokenizer": "none"}
    sections: dict = {
        "decoder": {"kind": "block_diffusion", "block_size": options["block_size"], "tau": options["skip_threshold"]},
        "rows": [{"id": "a", "ids": case["prompt"]}],
        "task": {"kind": "complete", "max_new_tokens": len(case["output"]), "ignore_eos": True},
        "sampling": {"temperature": 0.0},
    }
    found = decoded(tmp_path, **sections, model=model | {"family": "d2f_llada"})
    assert found["a"]["tokens"] == case["output"]
    with pytest.raises(
        UserError, match="'block_diffusion' does not run on models of family 'llada'; allowed: stepwise"
    ):
        decoded(tmp_path, **sections, model=model)


@pytest.mark.parametrize(
    ("decoder", "task", "message"),
    [
        ({"kind": "s2d2"}, {"kind": "infill", "mask": {"kind": "given"}}, "decoder.kind: 's2d2' does not run the task"),
        ({"kind": "autoregressive"}, None, "allowed: block_diffusion, s2d2"),
        ({"kind": "block_diffusion", "sub_block": 3}, None, "decoder.sub_block: 3 does not divide"),
    ],
)
def test_what_does_not_fit_is_refused(world, decoder, task, message):
    with pytest.raises(UserError, match=message):
        decoded(world, decoder, **({} if task is None else {"task": task}))


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


def filled(folder, decoder: dict, rows: list[dict], task: dict):
    return next_job(folder, rows, task=task, decoder=decoder, sampling={"temperature": 1.0})


@pytest.mark.parametrize(("family", "decoder"), DECODERS, ids=str)
def test_given_holes_are_filled_by_every_decoder(golden, tmp_path, family, decoder):
    shutil.copytree(golden / family, tmp_path / "model")
    found = filled(tmp_path, decoder, [{"id": name, "ids": ids} for name, ids in CANVASES.items()], INFILL)
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
    for row in filled(tmp_path, decoder, rows, {"kind": "complete", "max_new_tokens": 10}).values():
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
        filled(tmp_path, decoder, [{"id": "a", "ids": [1, None]}], task)
    assert message in str(caught.value)
