"""Presets: each is a valid spec, fills in what a spec leaves out, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from draftmill.jobs.harness.requests import Generation
from draftmill.jobs.harness.spec import read_eval_spec
from draftmill.jobs.spec.job_spec import check_overridden, check_spec
from draftmill.jobs.spec.presets import PRESETS
from draftmill.storage.errors import UserError

PLAIN: dict[str, Any] = {"input": {"path": "prompts.jsonl"}, "output": {"path": "runs/a"}}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_makes_a_whole_job_of_an_input_and_an_output(name: str) -> None:
    spec: Any = check_spec(PLAIN | {"preset": name})
    settings = PRESETS[name].settings
    assert spec.task.kind == "complete" and spec.task.max_new_tokens == settings["task"]["max_new_tokens"]
    assert spec.model.path == settings["model"]["path"] and PRESETS[name].source
    decoder = spec.decoder.model_dump(mode="json")
    assert all(decoder[key] == value for key, value in settings["decoder"].items() if not isinstance(value, dict))
    assert check_spec(spec.model_dump(mode="json")) == spec, "a plan holds the whole spec"
    said = {key: value for key, value in spec.model_dump(mode="json").items() if key != "preset"}
    assert check_spec(said).results_key() == spec.results_key(), "a preset is another way to say the same job"


def test_what_a_spec_says_itself_counts() -> None:
    name = "llada-instruct-gsm8k"
    own = {"task": {"kind": "complete", "stop": ["\n"]}, "model": {"path": "folder"}, "decoder": {"block_length": 64}}
    spec: Any = check_spec(PLAIN | own | {"preset": name})
    assert (spec.task.max_new_tokens, spec.task.stop, spec.model.path) == (512, ("\n",), "folder")
    assert (spec.decoder.kind, spec.decoder.block_length, spec.decoder.suppress_end) == ("stepwise", 64, True)
    spec = check_spec(PLAIN | {"preset": name, "decoder": {"kind": "ssd"}})
    assert (spec.decoder.kind, spec.decoder.block_length, spec.decoder.suppress_end) == ("ssd", 32, False)
    spec = check_overridden(PLAIN | {"preset": name}, ["task.max_new_tokens=7", "sampling.temperature=0.5"])
    assert (spec.task.max_new_tokens, spec.sampling.temperature) == (7, 0.5)


def test_an_evaluation_may_have_a_preset_too(tmp_path: Path) -> None:
    path = tmp_path / "llada.yaml"
    path.write_text("preset: llada-instruct-humaneval\noutput: {path: runs/a}\n")
    spec = read_eval_spec(path)
    assert (spec.decoder, spec.max_new_tokens, spec.temperature) == ("stepwise", 512, 0.0)
    job: Any = spec.completing(Generation(512, (), 0.0), "requests.jsonl")
    assert job.sampling.min_new_tokens == 512 and job.decoder.block_length == 512


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UserError, match="'llada' is not a preset; allowed: llada-base-gsm8k, "):
        check_spec(
            PLAIN
            | {"preset": "llada", "task": {"kind": "complete"}, "model": {"path": "x"}, "decoder": {"kind": "ssd"}}
        )
