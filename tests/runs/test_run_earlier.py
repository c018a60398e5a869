"""Whole jobs that draft with finished runs: the rows of the job without a drafter, in fewer forwards."""

import json
import shutil

import pyarrow.parquet as pq
import pytest
import yaml

from draftmill.jobs.cli import main
from draftmill.storage.stores.store import open_store
from tests.runs import jobs_of_tests
from tests.runs.jobs_here import run, without_ray

ROWS = [{"id": f"r{number}", "prompt": f"def f{number}(x):\n"} for number in range(9)]


@pytest.fixture(autouse=True)
def _here(monkeypatch):
    without_ray(monkeypatch)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory):
    """A folder with rows, and two finished runs at temperatures 0.8 and 0."""
    folder = tmp_path_factory.mktemp("earlier")
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        for name, temperature in (("warm", 0.8), ("cold", 0.0)):
            assert decode(folder, name, sampling={"temperature": temperature}) == 0
    return folder


def spec_of(folder, name: str, **sections) -> dict:
    return {
        "input": {"path": str(folder / "rows.jsonl")},
        "task": {"kind": "complete", "max_new_tokens": 24},
        "model": {"path": "builtin:ar-micro", "device": "cpu"},
        "decoder": {"kind": "autoregressive"},
        "sampling": {"temperature": 0.8},
        "batching": {"max_rows": 4},
        "output": {"path": str(folder / name), "unit_rows": 4},
    } | sections


def by_run(*paths, **more) -> dict:
    return {"kind": "speculative", "drafter": {"kind": "run", "path": list(map(str, paths)), "k": 16} | more}


def decode(folder, name: str, **sections) -> int:
    return run(spec_of(folder, name, **sections), folder / f"{name}.yaml")


def rows_of(folder, name: str) -> list[dict]:
    rows = jobs_of_tests.rows_of(folder / name).to_pylist()
    return sorted(rows, key=lambda row: (row["id"], row["sample"]))


def texts_of(folder, name: str) -> list:
    return [(row["id"], row["sample"], row["tokens"], row["finish"]) for row in rows_of(folder, name)]


def test_a_run_drafts_for_itself_and_for_another_temperature(world):
    assert decode(world, "again", decoder=by_run(world / "warm")) == 0
    assert decode(world, "other", decoder=by_run(world / "warm", world / "cold"), sampling={"temperature": 0.0}) == 0
    assert texts_of(world, "again") == texts_of(world, "warm") and texts_of(world, "other") == texts_of(world, "cold")
    for name in ("again", "other"):
        for row in rows_of(world, name):
            assert row["drafter"] == "run" and row["reused"] == row["accepted"] > 0
            assert row["nfe"] <= 4 and row["nfe"] + row["reused"] == row["new_tokens"]
    assert {row["reused"] for row in rows_of(world, "warm")} == {0}
    assert main(["verify", str(world / "again")]) == 0


def test_a_changed_input_is_drafted_for_by_id(world, tmp_path):
    """Another order, a new row; the run at another place, and as several samples."""
    rows = [{"id": "new", "prompt": "y"}, *ROWS[::-1]]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    moved, two = shutil.copytree(world / "cold", tmp_path / "moved"), {"temperature": 0.0, "n": 2}
    assert decode(tmp_path, "plain", sampling=two) == 0
    assert decode(tmp_path, "drafted", sampling=two, decoder=by_run(moved)) == 0
    assert texts_of(tmp_path, "drafted") == texts_of(tmp_path, "plain")
    reused = {(row["id"], row["sample"]): row["reused"] for row in rows_of(tmp_path, "drafted")}
    assert reused["new", 0] == 0 and sum(reused.values()) > 0
    assert all(not count for (_, sample), count in reused.items() if sample), "the run has one sample a row"


def test_a_text_of_another_tokenizer_is_read_as_text(world, tmp_path, monkeypatch):
    shutil.copy(world / "rows.jsonl", tmp_path)
    monkeypatch.setattr("draftmill.jobs.plan.resolve.tokenizer_hash", lambda *_: "another")
    assert decode(tmp_path, "new", decoder=by_run(world / "cold"), sampling={"temperature": 0.0}) == 0
    assert texts_of(tmp_path, "new") == texts_of(world, "cold")
    assert sum(row["reused"] for row in rows_of(tmp_path, "new")) > 50


@pytest.mark.parametrize("damage", ["results", "rows", "all"])
def test_a_run_that_is_gone_does_not_keep_a_job_from_its_end(world, tmp_path, damage, caplog):
    shutil.copy(world / "rows.jsonl", tmp_path)
    old, spec = shutil.copytree(world / "warm", tmp_path / "old"), {"decoder": by_run(tmp_path / "old")}
    assert decode(tmp_path, "new", **spec) == 0
    lost = open_store(str(tmp_path / "new"))
    for name in ("_SUCCESS", "_manifest.json", "data/unit-00000001.parquet"):
        lost.delete(name)
    if damage == "all":
        shutil.rmtree(old)
    elif damage == "rows":
        for file in (old / "data").iterdir():
            pq.write_table(pq.read_table(file).slice(0, 1), file)
    else:
        for file in (old / "data").iterdir():
            file.write_bytes(b"PAR1")
    assert decode(tmp_path, "new", **spec) == 0
    assert texts_of(tmp_path, "new") == texts_of(world, "warm")
    assert any("do not draft" in record.getMessage() for record in caplog.records)


def test_a_recurring_job_takes_its_last_finished_date(world, tmp_path):
    shutil.copy(world / "rows.jsonl", tmp_path)
    found = {}
    for day in ("2026-11-01", "2026-11-03", "2026-11-02"):
        output = {"path": str(tmp_path / "daily/{date:%Y-%m-%d}"), "unit_rows": 4, "logical_date": day}
        assert decode(tmp_path, "job", decoder=by_run("last"), output=output) == 0
        found[day] = sum(row["reused"] for row in rows_of(tmp_path, f"daily/{day}"))
        plan = json.loads((tmp_path / f"daily/{day}/_plan.json").read_text())
        paths = plan["spec"]["decoder"]["drafter"]["path"]
        assert paths == ([] if day == "2026-11-01" else [str(tmp_path / "daily/2026-11-01")])
        assert decode(tmp_path, "job", decoder=by_run("last"), output=output) == 0, "it is finished"
    assert found["2026-11-01"] == 0 < found["2026-11-02"] == found["2026-11-03"]


def sweep(folder, cases: dict) -> int:
    base = {key: value for key, value in spec_of(folder, "x").items() if key != "output"}
    data = {"base": base | {"output": {"unit_rows": 4}}, "cases": cases, "output": {"path": str(folder / "sweep")}}
    (folder / "sweep.yaml").write_text(yaml.safe_dump(data, sort_keys=False))
    return main(["sweep", str(folder / "sweep.yaml"), "--local"])


def test_a_case_of_a_sweep_takes_the_last_finished_one(world, tmp_path):
    shutil.copy(world / "rows.jsonl", tmp_path)
    cases: dict = {"plain": {}, "again": {"decoder": by_run("last")}}
    assert sweep(tmp_path, cases) == 0
    assert sweep(tmp_path, cases | {"cold": {"decoder": by_run("last"), "sampling.temperature": 0}}) == 0
    found = {name: sum(row["reused"] for row in rows_of(tmp_path, f"sweep/cases/{name}")) for name in [*cases, "cold"]}
    assert found["plain"] == 0 < found["again"] and found["cold"] > 0
    assert texts_of(tmp_path, "sweep/cases/again") == texts_of(world, "warm")
    assert texts_of(tmp_path, "sweep/cases/cold") == texts_of(world, "cold")


def test_a_case_whose_last_one_is_gone_decodes_without_it(world, tmp_path):
    shutil.copy(world / "rows.jsonl", tmp_path)
    assert sweep(tmp_path, {"plain": {}}) == 0
    shutil.rmtree(tmp_path / "sweep/cases/plain/data")
    assert sweep(tmp_path, {"plain": {}, "again": {"decoder": by_run("last")}}) == 0
    assert texts_of(tmp_path, "sweep/cases/again") == texts_of(world, "warm")
    assert {row["reused"] for row in rows_of(tmp_path, "sweep/cases/again")} == {0}


def test_a_sweep_refuses_the_last_case_under_rejection(world, tmp_path, capsys):
    shutil.copy(world / "rows.jsonl", tmp_path)
    assert sweep(tmp_path, {"a": {"decoder": by_run("last"), "sampling.acceptance": "rejection"}}) == 2
    assert "decoder.drafter.path: under rejection" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("none", "'none' is no run directory"),
        ("half", "not finished; `draftmill run` resumes it"),
        ("empty", "were deleted by `draftmill prune`"),
        ("last", "'last' is the last finished date of a recurring job"),
    ],
)
def test_a_run_that_can_not_draft_is_refused(world, tmp_path, path, reason, capsys, monkeypatch):
    shutil.copy(world / "rows.jsonl", tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, lost in (("half", "_SUCCESS"), ("empty", "data")):
        place = shutil.copytree(world / "warm", tmp_path / name) / lost
        shutil.rmtree(place) if place.is_dir() else place.unlink()
    assert decode(tmp_path, "new", decoder=by_run(path)) == 2
    said = capsys.readouterr().err
    assert "decoder.drafter.path" in said or "output.path" in said
    assert reason in said or path == "last"
    assert not (tmp_path / "new").exists()


def test_rejection_refuses_a_length_by_time(world, capsys):
    assert decode(world, "r", decoder=by_run(world / "warm", k="auto"), sampling={"acceptance": "rejection"}) == 2
    assert "decoder.drafter.k: 'auto' chooses by time" in capsys.readouterr().err
