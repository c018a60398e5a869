"""Whole jobs over rows of 16 to 1,500 tokens: a row's result is the same alone, beside longer rows and in any batch."""

from typing import Any

import pytest

from draftmill.jobs.config.spec import JobSpec
from draftmill.jobs.drive.log import shown
from draftmill.jobs.results.status import status
from draftmill.jobs.run.job import run_job
from draftmill.jobs.run.session import RunOptions
from draftmill.jobs.run.validate import validate
from tests.decoders.backbones.causal_models import random_tokens
from tests.runs.causal_jobs import World, job_spec, make_world, run_here
from tests.runs.local_pool import without_ray

LENGTHS = (16, 40, 90, 112, 130, 185, 250, 300, 383, 700, 1100, 1500)
ROWS = [{"id": f"{length}", "tokens": random_tokens(length, seed=length, vocab_size=2048)} for length in LENGTHS]
# Where and when a row was decoded, and what it cost there; all other columns are functions of the row and the settings.
PLACES = {"unit", "attempt", "worker", "node", "batch_rows", "pad_fraction", "started_at"}
TIMES = {"wait_s", "prefill_s", "decode_s", "total_s", "device_s"}
JOBS: dict[str, dict[str, Any]] = {
    "plain": {"sampling": {"temperature": 0.8}},
    "greedy": {"sampling": {"temperature": 0.0}},
    "drafted": {
        "sampling": {"temperature": 0.8},
        "decoder": {"kind": "speculative", "k": 3, "drafter": {"kind": "ngram"}},
    },
    "score": {"task": {"kind": "score"}},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return make_world(tmp_path_factory.mktemp("lengths"), max_position_embeddings=2048)


def spec_of(
    world: World, name: str, folder: str, rows: list[dict[str, Any]], *, dtype: str = "auto", **sections: Any
) -> JobSpec:
    (world.folder / name / folder).mkdir(parents=True)
    job = {"task": {"kind": "complete", "max_new_tokens": 6}} | JOBS[name]
    here = world.folder / name / folder
    return job_spec(
        here,
        rows,
        **job,
        model={"path": str(world.folder / "model"), "device": "cpu", "dtype": dtype},
        input={"path": str(here / "rows.jsonl"), "columns": {"tokens": "tokens"}},
        **sections,
    )


def told(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What must not depend on company: every column but times and places."""
    return {name: {key: value for key, value in row.items() if key not in PLACES | TIMES} for name, row in rows.items()}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.slow
def test_a_rows_result_is_the_same_in_any_company(world, name):
    expected = told(run_here(spec_of(world, name, "together", ROWS)))
    assert len(expected) == len(ROWS)
    assert all(row["status"] == "ok" and row["logprob"] is not None for row in expected.values())
    for batch, unit in ((1, 3), (3, 5), (5, 12)):
        spec = spec_of(
            world,
            name,
            f"batches-{batch}",
            ROWS,
            batching={"max_rows": batch},
            output={"path": str(world.folder / name / f"batches-{batch}" / "run"), "unit_rows": unit},
        )
        assert told(run_here(spec)) == expected, f"{batch} rows a batch"
    for row in ROWS[::3]:
        assert told(run_here(spec_of(world, name, "alone-" + row["id"], [row])))[row["id"]] == expected[row["id"]]


def said(capsys: pytest.CaptureFixture[str]) -> set[str]:
    """What was printed after the word exact."""
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    return {line[1] for line in lines if line[:1] == ["exact"]}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("dtype", "exact"), [("float32", "true:"), ("bfloat16", "false:")])
def test_validate_the_run_and_status_say_whether_results_are_exact(world, capsys, dtype, exact):
    spec = spec_of(world, "plain", f"said-{dtype}", ROWS[:2], dtype=dtype)
    assert validate(spec) == 0 and said(capsys) == {exact}
    with without_ray(), shown():
        assert run_job(spec, RunOptions()) == 0 and said(capsys) == {exact}
    assert status(spec.place(spec.output.path)) == 0 and said(capsys) == {exact}
