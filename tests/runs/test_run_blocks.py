"""Whole jobs of block diffusion and S2D2: rows of tokens, completed, the same at every attempt and alone."""

import shutil

import pytest

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
