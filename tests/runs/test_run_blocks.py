"""Whole jobs of block diffusion and S2D2: rows of tokens, completed, the same at every attempt and alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from draftmill.storage.errors import UserError
from draftmill.storage.runs.records import read_results
from draftmill.storage.stores.store import open_store
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


def decoded(folder: Path, decoder: dict[str, Any], **sections: Any) -> dict[str, dict[str, Any]]:
    rows = sections.pop("rows", None) or [{"id": name, "ids": ids} for name, ids in PROMPTS.items()]
    sections.setdefault("task", {"kind": "complete", "max_new_tokens": ROOM, "ignore_eos": True})
    sections.setdefault("sampling", {"temperature": 1.0})
    path = str(folder / f"run-{len(list(folder.glob('run-*')))}")
    sections.setdefault("output", {"path": path, "unit_rows": 3, "trace": "steps"})
    found: dict[str, dict[str, Any]] = next_job(folder, rows, decoder=decoder, **sections)
    return found


@pytest.fixture
def world(golden: Path, tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(golden / "sdar" / name, tmp_path / "model" / name)
    return tmp_path


@pytest.mark.slow
def test_prompts_of_every_length_are_completed_and_forwards_are_told_by_kind(world):
    found = {
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
        assert found["one"][name]["tokens"] == found["drafted"][name]["tokens"]
        assert found["drafted"][name]["nfe_draft"] > 0 == found["fused"][name]["nfe_draft"]
        assert found["fused"][name]["logprob"] == pytest.approx(found["one"][name]["logprob"], rel=1e-5)
        assert found["fused"][name]["nfe"] < found["always"][name]["nfe"]
        assert found["plain"][name]["logprob"] is None and dict(found["plain"][name]["nfe_kinds"])["verify"] == 0


def test_a_drafter_that_is_no_block_diffusion_model_is_refused_at_the_start(world, golden):
    with pytest.raises(
        UserError, match=r"decoder.drafter.path: .* is of family 'llada', which is not a block-diffusion"
    ):
        decoded(world, ALWAYS | {"drafter": {"path": str(golden / "llada")}})


def test_a_job_that_names_the_family_of_d2f_gives_the_public_codes_text(golden, tmp_path):
    """config.json says `llada`, whose decoders are others."""
    cases = read_json(golden / "d2f" / "cases.json")["cases"]
    case = next(case for case in cases if case.get("nfe") == 15)
    options = case["settings"]
    model = {"path": str(golden / "llada"), "device": "cpu", "tokenizer": "none"}
    sections: dict[str, Any] = {
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


def wrote(folder: Path, case: dict[str, Any], decoder: dict[str, Any]) -> tuple[list[int], dict[str, int]]:
    """What a job makes of a recorded prompt, and its forwards by kind."""
    prompt, options = case["prompt"], case["settings"]
    room = -(-(len(prompt) + options["gen_length"]) // options["block_length"]) * options["block_length"] - len(prompt)
    row = decoded(
        folder,
        {"block_size": options["block_length"], "steps": options["denoising_steps"]} | decoder,
        rows=[{"id": case["name"], "ids": prompt}],
        task={"kind": "complete", "max_new_tokens": room, "ignore_eos": True},
        sampling={"temperature": 0.0},
    )[case["name"]]
    return [*prompt, *row["tokens"]], dict(row["nfe_kinds"])


def test_a_job_gives_the_public_codes_runs(world, golden):
    """As a user would write them, the mask suppressed; all but the last store pass, after which nothing comes."""
    runs: list[tuple[str, str, dict[str, Any]]] = [
        ("sdar/generate.json", "gen.B4.low_confidence_static.t0.9.s4.p8", {"schedule": "static"}),
        ("sdar/generate.json", "gen.B8.low_confidence_dynamic.t0.3.s8.p13", {"tau": 0.3}),
        (
            "s2d2/cases.json",
            "ssd.B8.s8.hyst_entropy_dynamic.low_confidence_dynamic.AR.onehot",
            {
                "causal_cache": True,
                "causal_draft": True,
                "tau": 0.85,
                "router": {"kind": "hysteresis", "on": 1.0, "off": 0.3},
                "estimator": {"kind": "entropy"},
                "cost": {"kind": "dynamic", "c": 1.0},
            },
        ),
    ]
    for file, name, decoder in runs:
        (case,) = [case for case in read_json(golden / file)["cases"] if case["name"] == name]
        decoder["kind"] = "s2d2" if case["kind"] == "s2d2" else "block_diffusion"
        text, kinds = wrote(world, case, decoder)
        theirs = case["nfe"]
        assert text == case["output"], name
        assert kinds == {kind: theirs[kind] for kind in ("prefill", "draft", "verify")} | {
            "commit": theirs["store"] - 1
        }


def test_traces_tell_every_step(world):
    rows = decoded(world, ALWAYS)
    traces = [pq.read_table(path).to_pylist() for path in sorted((world / "run-0" / "traces").glob("*.parquet"))]
    steps = [step for trace in traces for step in trace]
    for name, row in rows.items():
        own = [step for step in steps if step["id"] == name]
        said = {place: token for step in own for place, token in zip(step["positions"], step["committed"], strict=True)}
        prompt = len(PROMPTS[name])
        assert [said[prompt + place] for place in range(ROOM)] == row["tokens"]
        assert sum(len(step["proposed"]) for step in own) == row["proposed"]


def test_an_end_token_ends_a_completion(world):
    whole = decoded(world, {"kind": "block_diffusion"}, sampling={"temperature": 0.0})
    end = whole["long"]["tokens"][4]
    (world / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    task = {"kind": "complete", "max_new_tokens": ROOM}
    for row in decoded(world, {"kind": "block_diffusion"}, sampling={"temperature": 0.0}, task=task).values():
        text = whole[row["id"]]["tokens"]
        keep = text.index(end) + 1 if end in text else None
        assert (row["tokens"], row["finish"]) == (text[:keep], "length" if keep is None else "eos")


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


def test_a_unit_decoded_again_is_the_same(world):
    """Rows, but for what was timed, to the byte."""
    decoder = {"kind": "s2d2", "router": {"kind": "hysteresis", "on": 1.0, "off": 0.5}}
    rejecting = {"temperature": 1.0, "acceptance": "rejection"}
    first, second = (decoded(world, decoder, sampling=rejecting) for _ in range(2))
    timed = {"wait_s", "prefill_s", "decode_s", "total_s", "device_s", "batch_rows", "pad_fraction", "started_at"}
    assert [{k: v for k, v in row.items() if k not in timed} for row in first.values()] == [
        {k: v for k, v in row.items() if k not in timed} for row in second.values()
    ]
    assert all(table.num_rows for table in read_results(open_store(str(world / "run-1"))))
