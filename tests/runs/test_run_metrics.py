"""Metrics in whole jobs: judges beside score jobs, `metrics:` in specs, and workers on Ray."""

from itertools import combinations

import pytest
import yaml

from draftmill.actors.metrics import registry
from draftmill.actors.sandbox.sandbox import problem
from draftmill.jobs.cli import main
from draftmill.jobs.results import measure as finished_measure
from draftmill.storage.runs.metric_files import read_metric_errors, read_metrics
from draftmill.storage.stores.store import Store, open_store
from tests.jobs.results.test_measure import by_id, contents, right_but_f, write
from tests.jobs.results.written_runs import spec_for, write_run
from tests.runs.causal_jobs import World, run_here

TEXTS = {
    "a": "import os\n",
    "b": "    return x + 1\n",
    "c": "x",
    "d": "the quick brown fox jumps",
    "long": "word " * 100,
    "none": "",
}
ROWS = [{"id": name, "prompt": f"def {name}(x):"} for name in TEXTS]


@pytest.fixture(scope="module")
def judged(world: World, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A run with these texts, measured by two judges: of the text alone, and of the text after its prompt."""
    folder = tmp_path_factory.mktemp("judged")
    inputs = {"path": str(folder / "rows.jsonl"), "columns": {"id": "id", "prompt": "prompt"}, "keep": ["prompt"]}
    store = write_run(spec_for(folder, ROWS, input=inputs), lambda name: [{"text": TEXTS[name]}])
    model = world.folder / "model"
    words = [
        f"{{kind: judge, model: {model}}}",
        f"{{kind: judge, model: {model}, prompt: prompt, name: after}}",
    ]
    assert main(["measure", store.url, "--local", "--quiet", "--metric", *words]) == 0
    return store


def test_a_judge_gives_what_a_score_job_gives(world, judged, tmp_path):
    for judge in ("judge", "after"):
        rows = [row | {"completion": TEXTS[row["id"]]} for row in ROWS]
        rows = [{key: row[key] for key in row if key != "prompt" or judge == "after"} for row in rows]
        (tmp_path / judge).mkdir()
        scored = run_here(world.spec(tmp_path / judge, rows, task={"kind": "score"}))
        for name, row in scored.items():
            assert by_id(judged, f"{judge}_logprob")[name] == row["logprob"]


def test_texts_that_a_judge_can_not_score_fail_alone(judged):
    assert by_id(judged, "judge_logprob")["long"] is None and by_id(judged, "judge_logprob")["none"] is None
    errors = {(error.id, error.metric): error.message for _, found in read_metric_errors(judged) for error in found}
    assert set(errors) == {("long", "judge"), ("none", "judge"), ("long", "after"), ("none", "after")}
    assert "too_long" in errors["long", "judge"] and "empty_text" in errors["none", "judge"]


def job(folder, *metrics):
    (folder / "rows.csv").write_text("id,prompt,answer\na,def f(x):,x\nb,import os,y\nc,class A:,z\n")
    spec = {
        "task": {"kind": "complete", "max_new_tokens": 4},
        "input": {"path": str(folder / "rows.csv"), "columns": {"id": "id", "prompt": "prompt", "reference": "answer"}},
        "model": {"path": "builtin:ar-micro", "device": "cpu"},
        "decoder": {"kind": "autoregressive"},
        "output": {"path": str(folder / "run"), "unit_rows": 1},
        "metrics": list(metrics),
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(spec))
    return folder / "job.yaml"


def test_a_run_measures_the_metrics_of_its_spec(tmp_path, capsys):
    words = ["run", str(job(tmp_path, "exact_match", "rougeL")), "--local", "--quiet"]
    assert main(words) == 0
    assert "exact_match  0.0000  mean of 3 samples" in capsys.readouterr().out
    store = open_store(str(tmp_path / "run"))
    table = read_metrics(store)
    assert table is not None and table.column_names == ["id", "sample", "exact_match", "rougeL"]
    before = contents(tmp_path / "run")
    assert main(words) == 0
    assert contents(tmp_path / "run") == before
    assert main(["run", str(job(tmp_path, "exact_match", "length")), "--local", "--quiet"]) == 0
    assert by_id(store, "length_tokens") == dict.fromkeys("abc", 4.0)
    assert {name: contents(tmp_path / "run")[name] for name in before} == before
    assert main(["verify", str(tmp_path / "run")]) == 0


def test_metrics_that_can_not_be_measured_are_refused_before_decoding(tmp_path, capsys):
    assert main(["run", str(job(tmp_path, {"kind": "judge", "model": "builtin:nothing"})), "--local", "--quiet"]) == 2
    assert "metrics.0.model" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(problem("kernel") is not None, reason=f"no kernel sandbox here: {problem('kernel')}")
def test_pass_at_k_of_a_job_with_several_samples_a_row(tmp_path):
    """Units of two samples cut the rows of three apart."""
    spec = yaml.safe_load(job(tmp_path).read_text())
    code = {"kind": "pass_at_k", "k": [1, 2], "program": "assert len('''{text}''') % 2", "allow_code_execution": True}
    spec |= {"sampling": {"n": 3}, "metrics": [code, "length"]}
    spec["output"]["unit_rows"] = 2
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(spec))
    assert main(["run", str(tmp_path / "job.yaml"), "--local", "--quiet"]) == 0
    table = read_metrics(open_store(str(tmp_path / "run")))
    assert table is not None and table.num_rows == 9
    rows = table.to_pylist()
    for row in rows:
        passed = [other["length_characters"] % 2 for other in rows if other["id"] == row["id"]]
        pairs = [max(one, other) for one, other in combinations(passed, 2)]
        assert row["passed"] == row["length_characters"] % 2
        assert row["pass@1"] == pytest.approx(sum(passed) / 3) and row["pass@2"] == pytest.approx(sum(pairs) / 3)


@pytest.mark.ray
def judged_sweep(folder):
    """Three cases with the same judge; the second has another metric before it."""
    base = yaml.safe_load(job(folder).read_text())
    del base["output"]["path"], base["metrics"]
    judge = {"kind": "judge", "model": "builtin:ar-micro"}
    cases: dict = {
        "one": {"metrics": [judge]},
        "two": {"metrics": ["length", judge]},
        "three": {"sampling.temperature": 0.5, "metrics": [judge]},
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({"base": base, "cases": cases, "output": {"path": str(folder / "out")}}))
    return path


@pytest.mark.slow
def test_a_sweep_loads_a_judge_once(tmp_path, monkeypatch):
    built: list[str] = []
    original = registry.build_meter

    def counting(metric, **options):
        built.append(metric.settings.kind)
        return original(metric, **options)

    monkeypatch.setattr("draftmill.actors.measuring.measure.build_meter", counting)
    assert main(["sweep", str(judged_sweep(tmp_path)), "--local", "--quiet"]) == 0
    assert built.count("judge") == 1 and "length" in built
    for name in ("one", "two", "three"):
        table = read_metrics(open_store(str(tmp_path / "out" / "cases" / name)))
        assert table is not None and table["judge_logprob"].null_count == 0 and len(table) == 3


def test_workers_on_ray_measure_and_one_that_dies_is_replaced(tmp_path, ray_session):
    store = write(tmp_path)
    (tmp_path / "mortal.py").write_text(
        f"import os, pathlib\n\ndef measure(row):\n    mark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
        "    if row['id'] == 'c' and not mark.exists():\n        mark.touch()\n        os.kill(os.getpid(), 9)\n    return 1\n"
    )
    assert main(["measure", store.url, "--quiet", "--metric", str(tmp_path / "mortal.py"), "exact_match"]) == 0
    assert by_id(store, "mortal") == dict.fromkeys("abcdef", 1.0)
    assert by_id(store, "exact_match") == {name: float(name != "f") for name in "abcdef"}


@pytest.mark.ray
@pytest.mark.slow
def test_rows_that_end_their_worker_or_never_end_have_the_reason(tmp_path, ray_session, monkeypatch):
    """The metric holds its process so that no signal interrupts it on the row e."""
    monkeypatch.setattr(finished_measure, "MARGIN_S", 1.0)
    store = write(tmp_path, right_but_f, workers={"stall_s": 1})
    (tmp_path / "deadly.py").write_text(
        "import os, signal, time\n\ndef measure(row):\n    if row['id'] == 'c':\n        os.kill(os.getpid(), 9)\n"
        "    if row['id'] == 'e':\n        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n"
        "        time.sleep(1000)\n    while row['id'] == 'f':\n        pass\n    return 1\n"
    )
    assert main(["measure", store.url, "--quiet", "--metric", str(tmp_path / "deadly.py"), "exact_match"]) == 0
    assert by_id(store, "deadly") == dict.fromkeys("abd", 1.0) | dict.fromkeys("cef")
    assert by_id(store, "exact_match") == {name: float(name != "f") for name in "abcdef"}
    reasons = {error.id: error.message for _, errors in read_metric_errors(store) for error in errors}
    assert "worker_died" in reasons["c"] and "no progress for 2 s" in reasons["e"]
    assert reasons["f"] == "TimeoutError: the metric took longer than 1 s"
