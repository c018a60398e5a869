"""`draftmill measure` on finished runs: values, resuming, passes, refusals before any work, and errors of single rows."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from draftmill.actors.sandbox.sandbox import problem
from draftmill.jobs.cli import main
from draftmill.jobs.plan.plan import load_plan
from draftmill.jobs.results.measure import parse_metric
from draftmill.storage.errors import UserError
from draftmill.storage.failpoints import VARIABLE
from draftmill.storage.runs.metric_files import measured_units, metric_sets, read_metric_errors, read_metrics
from draftmill.storage.stores.store import Place, Store, open_store
from tests.jobs.results.written_runs import failed, second_pass, spec_for, write_run, write_units
from tests.runs import jobs_of_tests

ROWS = [
    {"id": name, "prompt": f"p{name}", "answer": f"text of {name}", "label": number}
    for number, name in enumerate("abcdef")
]
BARE = {"id": "id", "prompt": "prompt"}
COLUMNS = BARE | {"reference": "answer"}


def right_but_f(name: str) -> list[dict]:
    return [{"text": f"text of {name}" if name != "f" else "other"}]


def write(folder: Path, texts=right_but_f, *, rows=ROWS, **sections) -> Store:
    folder.mkdir(exist_ok=True)
    sections = {"input": input_of(folder, keep=["label"])} | sections
    return write_run(spec_for(folder, rows, **sections), texts)


def input_of(folder: Path, columns: dict[str, str] = COLUMNS, **more) -> dict:
    return {"path": str(folder / "rows.jsonl"), "columns": columns} | more


def measure(store: Store, *words: str) -> int:
    return main(["measure", store.url, "--local", "--quiet", "--metric", *words])


def by_id(store: Store, column: str) -> dict[str, float | None]:
    table = read_metrics(store)
    assert table is not None
    return dict(zip(table["id"].to_pylist(), table[column].to_pylist(), strict=True))


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return jobs_of_tests.contents(folder, leases=False)


def test_metrics_are_measured_against_the_references_that_travelled_with_the_rows(tmp_path, capsys):
    store = write(tmp_path)
    (tmp_path / "rows.jsonl").unlink()  # measuring needs no input
    assert measure(store, "exact_match", "edit_similarity", "length") == 0
    assert by_id(store, "exact_match") == {name: float(name != "f") for name in "abcdef"}
    assert by_id(store, "length_tokens") == dict.fromkeys("abcdef", 3.0)
    assert set(measured_units(store)) == {(1, 0), (1, 1), (1, 2)}
    out = capsys.readouterr().out
    assert "exact_match" in out and "0.8333  mean of 6 samples" in out
    assert main(["status", store.url]) == 0
    assert "0.8333  mean of 6 samples" in capsys.readouterr().out


def test_samples_that_were_not_decoded_or_have_no_reference_have_no_value(tmp_path, capsys):
    rows: list[dict] = [*ROWS[:4], {**ROWS[4], "answer": None}, ROWS[5]]
    store = write(tmp_path, lambda name: [failed()] if name == "a" else right_but_f(name), rows=rows)
    assert measure(store, "exact_match") == 0
    assert by_id(store, "exact_match") == {"a": None, "b": 1.0, "c": 1.0, "d": 1.0, "e": None, "f": 0.0}
    assert "0.7500  mean of 4 samples, 2 without a value" in capsys.readouterr().out


def test_another_kept_column_can_hold_the_references(tmp_path):
    store = write(tmp_path, input=input_of(tmp_path, BARE, keep=["answer"]))
    assert main(["measure", store.url, "--local", "--quiet", "--metric", "exact_match", "--reference", "answer"]) == 0
    assert by_id(store, "exact_match")["a"] == 1.0


def test_several_references_and_numbers_are_references_too(tmp_path):
    rows: list[dict] = [
        {"id": "a", "prompt": "p", "answer": ["one", "text"]},
        {"id": "b", "prompt": "p", "answer": ["x"]},
    ]
    store = write(tmp_path, lambda _: [{"text": "text"}], rows=rows, input=input_of(tmp_path))
    assert measure(store, "exact_match") == 0 and by_id(store, "exact_match") == {"a": 1.0, "b": 0.0}
    numbers = tmp_path / "numbers"
    rows = [{"id": "a", "prompt": "p", "answer": 42}, {"id": "b", "prompt": "p", "answer": 7}]
    store = write(numbers, lambda _: [{"text": "so it is 42."}], rows=rows, input=input_of(numbers))
    assert measure(store, "number_match") == 0 and by_id(store, "number_match") == {"a": 1.0, "b": 0.0}


def test_an_infilled_text_is_compared_with_the_original(tmp_path):
    """The spec's metrics need references, so that the text itself travels into the results."""
    rows = [{"id": "a", "text": "The original text."}, {"id": "b", "text": "Another text, longer."}]
    sections: dict = {
        "task": {"kind": "infill", "mask": {"kind": "random", "rate": 0.5}},
        "model": {"path": "builtin:asarm-tiny", "device": "cpu"},
        "decoder": {"kind": "any_subset"},
        "input": {"path": str(tmp_path / "rows.jsonl"), "columns": {"id": "id"}},
        "metrics": ["exact_match"],
    }
    store = write(
        tmp_path, lambda name: [{"text": "The original text." if name == "a" else "?"}], rows=rows, **sections
    )
    assert measure(store, "exact_match") == 0 and by_id(store, "exact_match") == {"a": 1.0, "b": 0.0}


@pytest.mark.skipif(problem("kernel") is not None, reason="no sandbox here")
def test_pass_at_k_counts_the_samples_of_a_row_over_units_and_passes(tmp_path):
    samples: dict[str, list[str | None]] = {
        "a": ["assert True", "assert False", "assert False"],
        "b": ["assert True", "assert True", None],
    }

    def texts(name: str) -> list[dict]:
        return [{"sample": n} | (failed() if text is None else {"text": text}) for n, text in enumerate(samples[name])]

    store = write(tmp_path, texts, rows=ROWS[:2], input=input_of(tmp_path, BARE), sampling={"n": 3})
    code = '{kind: pass_at_k, k: [1, 2], program: "{text}\\n"}'
    assert main(["measure", store.url, "--local", "--quiet", "--allow-code-execution", "--metric", code]) == 0
    table = read_metrics(store)
    assert table is not None
    rows = {(row["id"], row["sample"]): row for row in table.to_pylist()}
    assert [rows["a", n]["passed"] for n in range(3)] == [1.0, 0.0, 0.0] and rows["b", 2]["passed"] is None
    assert rows["a", 1]["pass@1"] == pytest.approx(1 / 3) and rows["a", 2]["pass@2"] == pytest.approx(2 / 3)
    assert rows["b", 0]["pass@1"] == 1.0


def test_a_later_pass_is_measured_alone_and_its_results_count(tmp_path):
    store = write(tmp_path, lambda name: [failed()] if name in "bd" else right_but_f(name))
    assert measure(store, "exact_match") == 0
    before = contents(tmp_path / "run")
    plan = load_plan(store)
    assert plan is not None
    write_units(second_pass(store, plan, ["b", "d"]), right_but_f)
    assert measure(store, "exact_match") == 0
    assert by_id(store, "exact_match") == {name: float(name != "f") for name in "abcdef"}
    after = contents(tmp_path / "run")
    assert {name: after[name] for name in before} == before
    assert set(measured_units(store)) == {(1, 0), (1, 1), (1, 2), (2, 0)}


def test_measuring_again_does_nothing_and_more_metrics_get_files_of_their_own(tmp_path, capsys):
    store = write(tmp_path)
    assert measure(store, "rouge") == 0
    [name] = [stat.name for stat in store.list("metrics/set-")]
    written = json.loads(store.get(name))["metrics"]
    assert sorted(metric["columns"] for metric in written) == [["rouge1"], ["rouge2"], ["rougeL"]]
    assert {metric["settings"]["kind"] for metric in written} == {"rouge"}
    assert written[0]["settings"]["reference"] == ["answer", None]
    before = contents(tmp_path / "run")
    assert measure(store, "rougeL", "rouge") == 0
    assert contents(tmp_path / "run") == before
    assert measure(store, "rouge", "length") == 0
    after = contents(tmp_path / "run")
    assert {name: after[name] for name in before} == before and len(after) == len(before) + 3 + 1
    assert [found.columns for found in metric_sets(store).values() if len(found.metrics) == 1] == [
        ("length_tokens", "length_characters", "length_words")
    ]
    table = read_metrics(store)
    assert table is not None and {"rouge1", "rougeL", "length_words"} <= set(table.column_names)


POINTS = [
    "metrics.before_set",
    "measure.unit:2",
    "measure.measured:2",
    "metrics.before_commit:3",
    "metrics.after_commit:1",
]


@pytest.mark.slow
def test_a_measure_that_is_killed_at_any_point_goes_on_and_changes_no_byte(tmp_path):
    store = write(tmp_path)
    reference = write(tmp_path / "other")
    assert measure(reference, "exact_match", "length") == 0
    left, words = [], ["measure", store.url, "--local", "--quiet", "--metric", "exact_match", "length"]
    before = contents(tmp_path / "run")
    for point in POINTS:
        name, _, hit = point.partition(":")
        done = subprocess.run(
            [sys.executable, "-m", "draftmill.jobs.cli", *words],
            env=os.environ | {VARIABLE: f"{name}=kill:{hit or 1}"},
            capture_output=True,
            check=False,
            timeout=200,
        )
        before = contents(tmp_path / "run")
        left.append(3 - len(measured_units(store)))
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL, done.stderr
    assert left[0] == 3 and left == sorted(left, reverse=True) and 0 < left[1] < 3
    assert measure(store, "exact_match", "length") == 0
    after = contents(tmp_path / "run")
    assert {name: after[name] for name in before} == before
    for column in ("exact_match", "length_characters"):
        assert by_id(store, column) == by_id(reference, column)


def test_sigterm_ends_with_what_is_measured_and_exit_code_4(tmp_path, capsys):
    store = write(tmp_path)
    (tmp_path / "slow.py").write_text(
        f"import os, pathlib\n\ndef measure(row):\n    mark = pathlib.Path({str(tmp_path / 'mark')!r})\n"
        f"    if row['id'] == 'c' and not mark.exists():\n        mark.touch()\n        os.kill(os.getpid(), 15)\n    return 1\n"
    )
    own = str(tmp_path / "slow.py")
    assert measure(store, own) == 4
    assert "interrupted with 2 of 3 units measured; run it again" in capsys.readouterr().err
    before = contents(tmp_path / "run")
    assert measure(store, own) == 0
    assert {name: contents(tmp_path / "run")[name] for name in before} == before
    assert by_id(store, "slow") == dict.fromkeys("abcdef", 1.0)


def test_the_grace_period_ends_a_long_unit(tmp_path):
    store = write(tmp_path, output={"path": str(tmp_path / "run"), "unit_rows": 6})
    (tmp_path / "stop.py").write_text(
        "import os, time\n\ndef measure(row):\n    os.kill(os.getpid(), 15)\n    time.sleep(0.3)\n    return 1\n"
    )
    words = ["measure", store.url, "--local", "--quiet", "--grace-seconds", "0", "--metric", str(tmp_path / "stop.py")]
    assert main(words) == 4
    assert measured_units(store) == {}


def test_verify_finds_damaged_files_of_metrics(tmp_path, capsys):
    store = write(tmp_path)
    assert measure(store, "exact_match") == 0
    assert main(["verify", store.url]) == 0
    assert "metrics: 3 files of 3 units" in capsys.readouterr().out
    first, second, third = (stat.name for stat in store.list("metrics/unit-"))
    store.put(first, store.get(first)[:-20])
    store.put(second, store.get(third))
    store.put(third.replace("00000002", "00000009"), store.get(third))
    assert main(["verify", store.url]) == 1
    out = capsys.readouterr().out
    assert f"{first}: can't be read" in out and f"{second}: its unit is '2', not '1'" in out
    assert f"{second}: its rows differ from those of the unit's results" in out and "there is no such unit" in out


def test_an_error_of_one_row_is_kept_and_stops_nothing(tmp_path, capsys):
    store = write(tmp_path)
    (tmp_path / "mine.py").write_text(
        "def measure(row):\n    if row['id'] == 'c':\n        raise ValueError('no c here')\n    return row['keep']['label']\n"
    )
    assert measure(store, str(tmp_path / "mine.py"), "exact_match") == 0
    assert by_id(store, "mine") == {"a": 0.0, "b": 1.0, "c": None, "d": 3.0, "e": 4.0, "f": 5.0}
    assert by_id(store, "exact_match")["c"] == 1.0
    [(count, [error])] = read_metric_errors(store)
    assert count == 1 and (error.id, error.message) == ("c", "ValueError: no c here")
    assert "1 error, each of one sample" in capsys.readouterr().out


def test_a_metric_that_never_ends_on_a_row_is_stopped_and_all_other_values_are_there(tmp_path):
    store = write(tmp_path, workers={"stall_s": 1})
    (tmp_path / "endless.py").write_text("def measure(row):\n    while row['id'] == 'c':\n        pass\n    return 1\n")
    assert measure(store, str(tmp_path / "endless.py"), "exact_match") == 0
    assert by_id(store, "endless") == dict.fromkeys("abdef", 1.0) | {"c": None}
    assert by_id(store, "exact_match")["c"] == 1.0
    [(count, [error])] = read_metric_errors(store)
    assert count == 1 and error.id == "c" and "endless" in error.metric
    assert error.message == "TimeoutError: the metric took longer than 1 s"


def refused(capsys: pytest.CaptureFixture[str], store: Store, *words: str) -> str:
    before = contents(Path(store.url))
    assert measure(store, *words) == 2
    assert contents(Path(store.url)) == before
    return capsys.readouterr().err


def test_what_can_not_be_measured_is_refused_before_any_work(tmp_path, capsys, monkeypatch):
    store = write(tmp_path, input=input_of(tmp_path, BARE, keep=["label"]))
    assert "--metric rogue: 'rogue' is not a metric; did you mean rouge?" in refused(capsys, store, "rogue")
    assert "input.columns.reference: the metric 'bleu' needs references" in refused(capsys, store, "length", "bleu")
    assert "input.keep: the metric 'judge' reads question; columns in the results: label" in refused(
        capsys, store, "{kind: judge, prompt: question, model: x}"
    )
    assert "not a mapping in YAML" in refused(capsys, store, "{kind: [}")
    assert "input.keep: the metric 'pass_at_k' reads prompt, test, entry_point" in refused(capsys, store, "pass@1")
    assert "nothing.py can't be read" in refused(capsys, store, "nothing.py")
    assert "the column 'distinct_1' is already that of an earlier metric" in refused(
        capsys, store, "distinct_1", "{kind: distinct, n: [1], over: tokens}"
    )
    assert "builtin:asarm-tiny is of family 'xlnet'; allowed: causal models" in refused(
        capsys, store, "{kind: judge, model: builtin:asarm-tiny}"
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    with_reference = write(tmp_path / "kept")
    assert "--metric rougeL: rouge needs rouge_score: pip install 'draftmill[metrics]'" in refused(
        capsys, with_reference, "rougeL"
    )


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_damaged_result_ends_a_measure_at_once(tmp_path, is_folder, capsys):
    store = write(tmp_path)
    damaged = sorted((tmp_path / "run" / "data").iterdir())[0]
    damaged.unlink()
    if is_folder:
        damaged.mkdir()
    else:
        damaged.write_bytes(b"odd")
    assert measure(store, "length") == 2
    said = capsys.readouterr().err
    assert f"{damaged.name} is damaged" in said and "times" not in said


def test_a_run_that_is_not_finished_or_is_none_is_refused(tmp_path, capsys):
    store = write(tmp_path)
    for name in ("_manifest.json", "_SUCCESS"):
        (tmp_path / "run" / name).unlink()
    assert f"{store.url} is not finished" in refused(capsys, store, "length")
    assert main(["measure", str(tmp_path / "nothing"), "--metric", "length"]) == 2
    assert "is not a run directory" in capsys.readouterr().err


def test_a_column_measured_with_other_settings_is_never_rewritten(tmp_path, capsys):
    store = write(tmp_path)
    assert measure(store, "distinct_1") == 0
    message = refused(capsys, store, "{kind: distinct, n: [1], over: tokens}")
    assert "the column 'distinct_1' of this run was measured with other settings (over)" in message
    assert measure(store, "{kind: distinct, n: [1], over: tokens, name: ids}") == 0
    assert by_id(store, "ids_1") == dict.fromkeys("abcdef", 1.0)
    (tmp_path / "mine.py").write_text("def measure(row):\n    return 1\n")
    assert measure(store, str(tmp_path / "mine.py")) == 0
    (tmp_path / "mine.py").write_text("def measure(row):\n    return 2\n")
    assert "'mine' of this run was measured with other settings (sha256)" in refused(
        capsys, store, str(tmp_path / "mine.py")
    )


def test_another_driver_is_waited_for_by_nobody(tmp_path, capsys):
    from draftmill.storage.runs.lease import acquire

    store = write(tmp_path)
    lease = acquire(store, "elsewhere:1:1", 60.0)
    assert measure(store, "length") == 4
    assert "another driver holds this run directory" in capsys.readouterr().err
    lease.release()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("{kind: judge, model: 2020-99-99}", "month must be"),
        (f"{{kind: distinct, n: [{'1' * 5000}]}}", "not a mapping in YAML"),
        ("{kind: rouge, foo: 1}", "foo: unknown key"),
    ],
    ids=["a date", "a number", "a key"],
)
def test_a_metric_of_the_command_line_that_is_none_is_refused_in_one_line(word, message):
    with pytest.raises(UserError, match=message) as refused:
        parse_metric(word, allow_code_execution=False)
    assert "\n" not in str(refused.value) and "metrics.0" not in str(refused.value)


def test_metrics_of_a_spec_are_checked_with_the_spec(tmp_path):
    plain = input_of(tmp_path, BARE)
    for metrics, message in (
        (["exact_match"], r"input.columns.reference: the metric 'exact_match' needs references"),
        ([{"kind": "rouge", "typs": []}], r"metrics.0.typs: unknown key; did you mean metrics.0.types"),
        (
            [{"kind": "pass_at_k", "program": "{text}"}],
            r"metrics.0.allow_code_execution: pass_at_k runs code .* allowed: true",
        ),
        (
            ["length", {"kind": "length"}, {"kind": "entropy", "name": "length_tokens"}],
            r"metrics.2: the column 'length_tokens'",
        ),
        ({"kind": "length"}, r"metrics: .* is not allowed; allowed: a list"),
    ):
        with pytest.raises(ValueError, match=message):
            spec_for(tmp_path, ROWS, input=plain, metrics=metrics)


def test_metrics_do_not_change_a_jobs_fingerprint(tmp_path):
    without, with_metrics = spec_for(tmp_path, ROWS), spec_for(tmp_path, ROWS, metrics=["length"])
    assert without.results_key() == with_metrics.results_key()


def test_a_reference_column_that_no_row_has_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"input.columns.reference: no row has a column 'golden'"):
        write(tmp_path, input=input_of(tmp_path, BARE | {"reference": "golden"}))


@pytest.mark.s3
def test_a_run_on_s3_is_measured_there(tmp_path, s3_url, s3_options):
    output = {"path": s3_url, "unit_rows": 2}
    store = write(tmp_path, output=output, s3={"endpoint": s3_options.endpoint, "region": s3_options.region})
    words = ["measure", s3_url, "--local", "--quiet", "--s3-endpoint", str(s3_options.endpoint)]
    assert main([*words, "--metric", "exact_match"]) == 0
    store = open_store(Place(s3_url, s3_options))
    assert by_id(store, "exact_match") == {name: float(name != "f") for name in "abcdef"}
    before = {stat.name: stat.etag for stat in store.list("metrics/")}
    assert len(before) == 4
    assert main([*words, "--metric", "exact_match"]) == 0
    assert {stat.name: stat.etag for stat in store.list("metrics/")} == before
