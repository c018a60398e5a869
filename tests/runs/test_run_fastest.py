"""Whole jobs with `decoder: fastest`: the rows of the baseline's job, and what drafted, in the manifest and the table."""

import json
import sysconfig
from pathlib import Path

import pytest

from draftmill.jobs.cli import main
from draftmill.storage.runs.commit import read_manifest
from draftmill.storage.stores.store import open_store
from tests.runs import jobs_of_tests
from tests.runs.jobs_here import run, without_ray

COMPLETE = {"kind": "complete", "max_new_tokens": 20, "stop": ["\n\n"]}
INFILL = {"kind": "infill", "mask": {"kind": "random", "rate": 0.4}}
CACHED = {"kind": "stepwise", "block_length": 16, "cache": "dual_strict"}
JOBS: dict[str, tuple] = {
    "causal": ("ar-tiny", COMPLETE, "fastest", {"kind": "autoregressive"}),
    "causal with a model": (
        "ar-tiny",
        COMPLETE,
        {"kind": "fastest", "drafter": {"kind": "model", "path": "builtin:ar-micro"}},
        {"kind": "autoregressive"},
    ),
    "causal with a head": (
        "ar-tiny",
        COMPLETE,
        {"kind": "fastest", "drafter": {"kind": "head", "path": "builtin:ar-tiny-eagle3"}},
        {"kind": "autoregressive"},
    ),
    "fill in the middle": (
        "fim-tiny",
        {"kind": "infill", "mask": {"kind": "lines"}},
        "fastest",
        {"kind": "autoregressive"},
    ),
    "any subset": ("asarm-tiny", INFILL, "fastest", {"kind": "any_subset"}),
    "masked": ("mdm-tiny", INFILL, CACHED | {"kind": "fastest"}, CACHED),
    "blocks": (
        "block-tiny",
        COMPLETE,
        {"kind": "fastest"},
        {"kind": "block_diffusion", "block_size": 1, "causal_cache": True},
    ),
}


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    without_ray(monkeypatch)


def decode(folder: Path, name: str, model: str, **sections) -> int:
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()
    rows = [{"id": f"r{n}", "prompt": text[700 * n :][: 11 * n + 1], "text": text[700 * n :][:120]} for n in range(16)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    spec = {
        "input": {"path": str(folder / "rows.jsonl")},
        "model": {"path": f"builtin:{model}", "device": "cpu"},
        "sampling": {"temperature": 0.8},
        "batching": {"max_rows": 2},
        "output": {"path": str(folder / name), "unit_rows": 4},
    }
    return run(spec | sections, folder / f"{name}.yaml")


def rows_of(folder: Path, name: str) -> list[tuple]:
    rows = jobs_of_tests.rows_of(folder / name).to_pylist()
    return sorted((row["id"], row["status"], row["tokens"], row["text"], row["finish"]) for row in rows)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_the_baselines_rows_and_its_manifest_says_what_drafted(tmp_path, capsys, name):
    model, task, decoder, like = JOBS[name]
    assert decode(tmp_path, "plain", model, task=task, decoder=like) == 0
    assert decode(tmp_path, "fastest", model, task=task, decoder=decoder) == 0
    assert rows_of(tmp_path, "fastest") == rows_of(tmp_path, "plain")
    found = jobs_of_tests.rows_of(tmp_path / "fastest").to_pylist()
    assert {row["decoder"] for row in found} == {"fastest"}
    manifest = read_manifest(open_store(str(tmp_path / "fastest")))
    assert manifest is not None and manifest.ways is not None and "none" in manifest.ways
    assert sum(manifest.ways.values()) == pytest.approx(1.0)
    # At 2 slots there is time for a trial: something drafted, and the rows count it.
    assert len(manifest.ways) > 1 and sum(row["iterations"] for row in found) > 0
    capsys.readouterr()
    assert main(["status", str(tmp_path / "fastest")]) == 0
    assert main(["verify", str(tmp_path / "fastest")]) == 0
    plain = read_manifest(open_store(str(tmp_path / "plain")))
    assert plain is not None and plain.ways is None


def test_a_run_is_continued_with_the_baseline_that_it_began_with(tmp_path, capsys):
    assert decode(tmp_path, "run", "ar-micro", task=COMPLETE, decoder="fastest") == 0
    before = rows_of(tmp_path, "run")
    (tmp_path / "run" / "_SUCCESS").unlink()
    (tmp_path / "run" / "data" / "unit-00000002.parquet").unlink()
    assert decode(tmp_path, "run", "ar-micro", task=COMPLETE, decoder="fastest") == 0
    assert rows_of(tmp_path, "run") == before
    assert decode(tmp_path, "run", "ar-micro", task=COMPLETE, decoder="autoregressive") == 2
    assert "decoder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "sections", "problem"),
    [
        (
            "ar-micro",
            {"task": COMPLETE, "decoder": {"kind": "fastest", "block_length": 8}},
            "decoder.block_length: 8 is for masked-diffusion models",
        ),
        (
            "mdm-tiny",
            {"task": COMPLETE, "decoder": {"kind": "fastest", "like": "any_subset"}},
            "decoder.like: 'any_subset' is not the baseline",
        ),
        ("asarm-tiny", {"task": {"kind": "score"}, "decoder": "fastest"}, "decoder.kind: 'fastest'"),
        ("block-tiny", {"task": INFILL, "decoder": "fastest"}, "task"),
        ("ar-micro", {"task": INFILL, "decoder": "fastest"}, "task.mask.kind"),
        (
            "ar-micro",
            {"task": COMPLETE, "decoder": "fastest", "sampling": {"acceptance": "rejection"}},
            "chooses by time",
        ),
        (
            "mdm-tiny",
            {"task": COMPLETE, "decoder": {"kind": "fastest", "drafter": {"kind": "suffix"}}},
            "drafts for causal models",
        ),
    ],
)
def test_what_does_not_fit_the_baseline_is_refused_before_work_starts(tmp_path, capsys, model, sections, problem):
    assert decode(tmp_path, "run", model, **sections) == 2
    said = capsys.readouterr().err
    assert problem in said and said.strip().count("\n") == 0
    assert not (tmp_path / "run" / "data").exists()


def test_validate_says_what_would_be_tried(tmp_path, capsys):
    assert decode(tmp_path, "run", "ar-micro", task=COMPLETE, decoder="fastest") == 0
    capsys.readouterr()
    assert main(["validate", str(tmp_path / "run.yaml")]) == 0
    assert "drafts    chosen by time: ngram up to 16, jacobi up to 16, or none" in capsys.readouterr().out
