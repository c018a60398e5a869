"""A finished run is the input of another job: its rows with their metrics, filtered, and where they come from."""

import json
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from draftmill.jobs.cli import main
from draftmill.jobs.config.spec import at_date, check_spec
from draftmill.storage.runs.commit import read_manifest
from draftmill.storage.stores.store import Place, open_store
from tests.runs import jobs_of_tests
from tests.runs.causal_jobs import make_world

TASK = {"kind": "complete", "max_new_tokens": 4}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and a finished run `made` of six rows; one failed, and the references of three are their texts."""
    folder = make_world(tmp_path_factory.mktemp("source")).folder
    rows: list[dict] = [{"id": f"r{number}", "prompt": f"x = {number}", "n": number} for number in range(5)]
    texts: dict[str, str] = {}
    for name in ("guess", "made"):
        for row in rows:
            row["answer"] = texts.get(row["id"], "?") if row["n"] < 3 else "?"
        lines = [*rows, {"id": "bad", "answer": "?", "n": 9}]
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, lines)))
        made = spec_of(
            folder,
            name,
            input={"path": str(folder / "rows.jsonl"), "keep": ["n"], "columns": {"reference": "answer"}},
            metrics=["exact_match"],
            errors={"max_rate": 1.0},
        )
        assert run(made, folder / "job.yaml") == 0
        texts = {row["id"]: row["text"] for row in rows_of(folder, name)}
    return folder


def run(spec: dict, file: Path, command: str = "run") -> int:
    file.write_text(yaml.safe_dump(spec))
    return main([command, str(file), *(["--local", "--quiet"] if command == "run" else [])])


def spec_of(folder: Path, name: str, **sections) -> dict:
    return {
        "task": TASK,
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "decoder": {"kind": "autoregressive"},
        "sampling": {"temperature": 0.0},
        "output": {"path": str(folder / name), "unit_rows": 2},
    } | sections


def rows_of(folder: Path, name: str) -> list[dict]:
    return jobs_of_tests.rows_of(folder / name).to_pylist()


def judge(folder: Path, name: str, where: str | None, **more) -> dict:
    source = {"run": str(folder / "made")} | ({} if where is None else {"where": where}) | more
    return spec_of(folder, name, input=source, prompt={"template": "{{ keep.n }}: {{ text }} {{ exact_match }} good?"})


@pytest.mark.slow
def test_the_rows_of_a_run_with_their_metrics_are_the_input_of_the_next(world, capsys):
    spec = judge(world, "judged", "exact_match >= 1 and keep.n != 1", keep=["exact_match", "text"])
    assert run(spec, world / "judge.yaml", "validate") == 0
    said = capsys.readouterr().out
    assert f"rows      2 of the 6 rows of {world / 'made'}" in said and "  | 0: " in said
    assert not (world / "judged").exists()
    assert run(spec, world / "judge.yaml") == 0
    rows = {row["id"]: row for row in rows_of(world, "judged")}
    before = {row["id"]: row for row in rows_of(world, "made")}
    assert rows.keys() == {"r0", "r2"} and before["bad"]["status"] == "failed"
    assert rows["r2"]["keep"] == {"exact_match": 1.0, "text": before["r2"]["text"]}
    manifest, source = (read_manifest(open_store(str(world / name))) for name in ("judged", "made"))
    assert manifest is not None and manifest.source is not None and source is not None
    assert {key: manifest.source[key] for key in ("run", "fingerprint", "where", "rows", "kept")} == {
        "run": str(world / "made"),
        "fingerprint": source.fingerprint,
        "where": "exact_match >= 1 and keep.n != 1",
        "rows": 6,
        "kept": 2,
    }
    assert run(spec, world / "judge.yaml") == 0
    assert main(["verify", str(world / "judged")]) == 0
    chained = spec_of(world, "again", input={"run": str(world / "judged")}, prompt={"template": "{{ keep.text }}"})
    assert run(chained, world / "again.yaml") == 0
    assert {row["id"] for row in rows_of(world, "again")} == {"r0", "r2"}


@pytest.mark.slow
def test_the_guide_s_two_jobs_run_one_after_the_other(tmp_path, monkeypatch):
    guide = (Path(__file__).parents[2] / "docs" / "prompts.md").read_text()
    monkeypatch.chdir(tmp_path)
    Path("questions.csv").write_text("id,question,solution\na,What is 2 + 3?,5\nb,What is 7 - 4?,3\n")
    for name in ("answer", "again"):
        (job,) = re.findall(rf"```yaml\n# {name}.yaml\n(.*?)```", guide, re.DOTALL)
        assert run(yaml.safe_load(job), tmp_path / f"{name}.yaml") == 0
    rows = rows_of(tmp_path, "runs/again")
    assert {row["keep"]["keep.question"] for row in rows} == {"What is 2 + 3?", "What is 7 - 4?"}


def test_without_a_filter_the_rows_that_are_ok_are_read(world):
    assert run(judge(world, "all", None), world / "all.yaml") == 0
    assert sorted(row["id"] for row in rows_of(world, "all")) == [f"r{number}" for number in range(5)]


def test_the_samples_of_a_row_are_rows_of_the_next_job(world):
    sampling = {"temperature": 1.0, "n": 2}
    (world / "two.jsonl").write_text('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "y"}')
    first = spec_of(world, "sampled", input={"path": str(world / "two.jsonl")}, sampling=sampling)
    assert run(first, world / "sampled.yaml") == 0
    second = spec_of(world, "best", input={"run": str(world / "sampled"), "where": "sample == 1 or id == 'b'"})
    assert run(second, world / "best.yaml") == 0
    assert sorted(row["id"] for row in rows_of(world, "best")) == ["a:1", "b:0", "b:1"]


def test_a_run_that_changes_and_one_that_can_not_be_read_are_refused(world, tmp_path, capsys):

    def refusal(spec: dict) -> str:
        assert run(spec, tmp_path / "spec.yaml") == 2
        return capsys.readouterr().err

    spec = judge(world, "never", "exact_match >= 2")
    assert "input.where: " in (said := refusal(spec)) and "has no rows with 'exact_match >= 2', of 6" in said
    assert "has no rows" not in (said := refusal(judge(world, "never", "rouge > 1"))) and "exact_match" in said
    assert "input.where: " in refusal(judge(world, "never", "text > 1"))
    assert "input.where: 'a =': " in refusal(judge(world, "never", "a ="))
    assert "input.run: " in refusal(judge(world, "never", None, run=str(world / "nowhere")))
    assert "input.path: missing" in refusal(spec | {"input": {}})
    assert "input.where: filters the rows of a run" in refusal(spec | {"input": {"path": "a", "where": "b == 1"}})
    assert "input.run: " in refusal(spec | {"input": {"path": "a", "run": "b"}})
    sweep = {"base": spec, "grid": {"seed": [0, 1]}, "output": {"path": str(tmp_path / "sweep")}}
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump(sweep))
    assert main(["sweep", str(tmp_path / "sweep.yaml"), "--dry-run"]) == 2
    assert "input.run: a sweep reads files" in "".join(capsys.readouterr())
    assert not any((world / "never").glob("**/*.parquet"))

    shutil.copytree(world / "made", tmp_path / "made")
    moved = judge(world, "moved", "exact_match >= 1", run=str(tmp_path / "made"))
    assert run(moved, tmp_path / "spec.yaml") == 0
    shutil.move(tmp_path / "made", tmp_path / "elsewhere")
    assert run(judge(world, "moved", "exact_match >= 1", run=str(tmp_path / "elsewhere")), tmp_path / "spec.yaml") == 0
    assert "input.where was" in refusal(judge(world, "moved", "exact_match >= 0", run=str(tmp_path / "elsewhere")))
    assert main(["measure", str(tmp_path / "elsewhere"), "--metric", "length"]) == 0
    capsys.readouterr()
    assert "input.run.state was" in refusal(judge(world, "moved", "exact_match >= 1", run=str(tmp_path / "elsewhere")))
    shutil.rmtree(tmp_path / "elsewhere")
    assert run(judge(world, "moved", "exact_match >= 1", run=str(tmp_path / "elsewhere")), tmp_path / "spec.yaml") == 0


@pytest.mark.slow
@pytest.mark.s3
def test_both_runs_may_be_on_s3(world, s3_url, s3_options):
    (world / "two.jsonl").write_text('{"id": "a", "prompt": "x"}\n{"id": "b", "prompt": "y"}')
    s3 = {"endpoint": s3_options.endpoint, "region": s3_options.region}
    first = spec_of(world, "", input={"path": str(world / "two.jsonl")}, output={"path": f"{s3_url}/first"}, s3=s3)
    assert run(first, world / "first.yaml") == 0
    source = {"run": f"{s3_url}/first", "where": "id == 'b'"}
    second = spec_of(world, "", input=source, output={"path": f"{s3_url}/second"}, s3=s3)
    assert run(second, world / "second.yaml", "validate") == 0
    assert run(second, world / "second.yaml") == 0
    store = open_store(Place(f"{s3_url}/second", s3_options))
    assert jobs_of_tests.rows_of(store)["id"].to_pylist() == ["b"]
    manifest = read_manifest(store)
    assert manifest is not None and manifest.source is not None and manifest.source["kept"] == 1
    assert run(second, world / "second.yaml") == 0


def test_a_recurring_job_reads_the_run_of_its_date(world):
    spec = judge(world, "daily/{date:%Y-%m-%d}", None, run=str(world / "{date:%Y-%m-%d}"))
    day = at_date(check_spec(spec), datetime(2026, 11, 26, tzinfo=UTC))
    assert day.input.run == str(world / "2026-11-26") and day.output.path == str(world / "daily/2026-11-26")
