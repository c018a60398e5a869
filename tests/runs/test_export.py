"""`draftmill export`, and the OpenAI batch format in and out: every sample once, failed ones in a file of their own."""

import csv
import gc
import json
import os
import shutil
import warnings
from contextlib import contextmanager
from threading import Thread

import pyarrow.parquet as pq
import pytest

from draftmill.jobs.cli import main
from draftmill.jobs.results import export as export_module
from draftmill.jobs.results.formats import openai_answer
from draftmill.jobs.results.passes import latest_rows, passes_of
from draftmill.storage.runs.records import SCHEMA
from draftmill.storage.stores.store import open_store
from tests.jobs.compare import made_runs
from tests.runs.causal_jobs import ROOM, save_model
from tests.runs.jobs_here import run, without_ray
from tests.runs.test_rerun import run_with

PROMPTS = {
    "plain": {"model": "m", "prompt": "def f(x):"},
    "a list of one": {"model": "m", "prompt": ["def f(x):"]},
    "../../etc/passwd": {"model": "m", "prompt": "x = 1\n"},
    "no prompt": {"model": "m", "input": "x"},
    "a list of two": {"model": "m", "prompt": ["a", "b"]},
}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory):
    return decode_prompts(tmp_path_factory.mktemp("prompts"))


def decode_prompts(folder):
    """Decode the requests in `folder / run`, of which some fail."""
    save_model(folder / "model", ends=[2])
    plain = {"method": "POST", "url": "/v1/completions"}
    lines = [json.dumps(plain | {"custom_id": name, "body": body}) for name, body in PROMPTS.items()]
    (folder / "batch.jsonl").write_text("\n".join(lines))
    spec = {
        "task": {"kind": "complete", "max_new_tokens": ROOM},
        "input": {"path": str(folder / "batch.jsonl")},
        "model": {"path": str(folder / "model"), "device": "cpu"},
        "decoder": {"kind": "autoregressive"},
        "output": {"path": str(folder / "run"), "unit_rows": 3},
    }
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        assert run(spec, folder / "job.yaml") == 3
    return folder


def lines_of(path) -> dict[str, dict]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    return {line["custom_id"]: line for line in lines}


def rows_of(run_dir) -> dict[str, dict]:
    rows = [row for table in latest_rows(passes_of(open_store(str(run_dir)))) for row in table.to_pylist()]
    return {row["id"]: row for row in rows}


def test_prompts_of_a_batch_come_back_as_its_answers(prompts, tmp_path):
    out = tmp_path / "answers.jsonl"
    assert main(["export", str(prompts / "run"), "--format", "openai", "--out", str(out)]) == 0
    answers, errors, rows = lines_of(out), lines_of(tmp_path / "answers.errors.jsonl"), rows_of(prompts / "run")
    assert set(answers) == {"plain", "a list of one", "../../etc/passwd"}
    assert set(errors) == {"no prompt", "a list of two"}
    for name, answer in answers.items():
        body, row = answer["response"]["body"], rows[name]
        (choice,) = body["choices"]
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        assert body["object"] == "text_completion" and body["created"] > 10**9
        assert body["model"] == "m", "the name in the request, by which clients group answers"
        assert choice["text"] == row["text"] and choice["index"] == 0
        assert choice["finish_reason"] == {"eos": "stop", "length": "length"}[row["finish"]]
        given, new = row["prompt_tokens"], row["new_tokens"]
        usage = {"prompt_tokens": given, "completion_tokens": new, "total_tokens": given + new}
        assert body["usage"] == usage
    for name, error in errors.items():
        assert error["response"] is None
        assert error["error"] == {"code": rows[name]["error_kind"], "message": rows[name]["error"]}
    assert rows["plain"]["prompt_tokens"] == rows["a list of one"]["prompt_tokens"]
    assert len({line["id"] for line in [*answers.values(), *errors.values()]}) == len(PROMPTS)


def test_an_answer_of_every_kind_has_the_reason_that_the_api_has():
    row = dict.fromkeys(["error_kind", "error", "prompt_tokens", "new_tokens", "model", "started_at"])
    row |= {"id": "a", "status": "ok", "text": "t", "key": 1, "model": "m"}
    for finish, reason in {"eos": "stop", "stop": "stop", "length": "length", "filled": "stop"}.items():
        answer = openai_answer([row | {"finish": finish}], chat=True)
        assert answer["response"]["body"]["choices"][0]["finish_reason"] == reason
    skipped = openai_answer([row | {"status": "skipped"}], chat=True)
    assert skipped["response"] is None and skipped["error"] == {"code": "skipped", "message": "skipped"}


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/home/me/models/tiny-Q4_1.gguf", "tiny-Q4_1.gguf"),
        ("~/models/tiny/", "tiny"),
        ("../tiny", "tiny"),
        ("s3://bucket/models/tiny", "tiny"),
        ("org/tiny", "org/tiny"),
        ("builtin:ar-tiny", "builtin:ar-tiny"),
    ],
)
def test_an_answer_to_a_request_without_a_model_names_no_local_path(path, shown):
    row: dict = dict.fromkeys(["error_kind", "error", "prompt_tokens", "new_tokens", "started_at"])
    row |= {"id": "a", "status": "ok", "text": "t", "key": 1, "model": path, "finish": "eos"}
    assert openai_answer([row], chat=True)["response"]["body"]["model"] == shown
    named = openai_answer([row | {"request_model": "gpt-x"}], chat=True)
    assert named["response"]["body"]["model"] == "gpt-x"


def test_every_format_has_every_row_once(prompts, tmp_path):
    expected = rows_of(prompts / "run")
    for kind in ("jsonl", "csv", "parquet"):
        assert main(["export", str(prompts / "run"), "--format", kind, "--out", str(tmp_path / f"all.{kind}")]) == 0
    assert pq.read_schema(tmp_path / "all.parquet").remove_metadata().equals(SCHEMA)
    assert pq.read_table(tmp_path / "all.parquet").to_pylist() == list(expected.values())
    found = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    records = list(csv.DictReader((tmp_path / "all.csv").open(newline="")))
    assert [row["id"] for row in found] == [row["id"] for row in records] == list(expected)
    for row, record in zip(found, records, strict=True):
        same = expected[row["id"]]
        for name in ("text", "tokens", "logprob", "key", "finish", "error"):
            assert row[name] == same[name]
            written = record[name] if isinstance(same[name], str) else json.loads(record[name] or "null")
            assert written == same[name]
        assert row["metrics"] is None and (row["started_at"] or "2").startswith("2")


def test_columns_are_chosen_and_failed_samples_set_apart(prompts, tmp_path, capfdbinary):
    apart = tmp_path / "failed.jsonl"
    command = ["export", str(prompts / "run"), "--format", "jsonl", "--columns", "text,id", "--errors", str(apart)]
    assert main([*command, "--out", "-"]) == 0
    lines = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert [list(line) for line in lines] == [["text", "id"]] * 3 and all(line["text"] for line in lines)
    failed = [json.loads(line) for line in apart.read_text().splitlines()]
    assert {line["id"] for line in failed} == {"no prompt", "a list of two"}


def test_answers_without_a_failed_one_go_to_a_pipe_alone(tmp_path, capfdbinary):
    folder = made_runs.write_run(tmp_path / "run", [made_runs.row(number) for number in range(4)])
    assert main(["export", str(folder), "--format", "openai", "--out", "-"]) == 0
    assert capfdbinary.readouterr().out.count(b"\n") == 4 and [*tmp_path.iterdir()] == [folder]


def test_numbers_that_json_has_not_are_null(tmp_path):
    from draftmill.jobs.results.formats import LineSink
    from draftmill.storage.runs.records import table_from_rows
    from tests.storage.inputs.tables import result_row

    row = result_row(
        0, logprob=float("-inf"), metrics={"bits_per_byte": float("nan")}, token_logprobs=[0.5, float("inf")]
    )
    with (tmp_path / "one.jsonl").open("wb") as file:
        LineSink(file).add(table_from_rows([row]))
    found = json.loads((tmp_path / "one.jsonl").read_text(), parse_constant=pytest.fail)
    assert (found["logprob"], found["metrics"], found["token_logprobs"]) == (None, {"bits_per_byte": None}, [0.5, None])


def unfinished(run_dir) -> None:
    (run_dir / "_manifest.json").unlink()


def nothing(run_dir) -> None:
    pass


REFUSED: dict[str, tuple] = {
    "unfinished": (unfinished, ["jsonl", "--out", "{out}"], "is not finished"),
    "there already": (nothing, ["jsonl", "--out", "{run}/../there"], "already exists; --overwrite replaces it"),
    "no name": (nothing, ["jsonl", "--out", ""], "--out: '' is not a path"),
    "a folder": (nothing, ["jsonl", "--overwrite", "--out", "{run}/.."], "is a folder"),
    "no such folder": (nothing, ["jsonl", "--out", "{run}/../no/such"], "No such file or directory"),
    "inside the run": (nothing, ["jsonl", "--out", "{run}/data/all.jsonl"], "is inside the run directory"),
    "another place": (
        nothing,
        ["jsonl", "--out", "gs://bucket/all"],
        "--out: gs:// is not allowed; allowed: a local path, s3://",
    ),
    "failed ones there already": (
        nothing,
        ["jsonl", "--out", "{out}", "--errors", "{run}/../there"],
        "--errors: '{run}/../there' already exists",
    ),
    "no such column": (nothing, ["csv", "--out", "{out}", "--columns", "txt"], "'txt' is not a column of the result"),
    "one file for both": (nothing, ["csv", "--out", "{out}", "--errors", "{out}"], "name a separate file"),
    "parquet to a pipe": (nothing, ["parquet", "--out", "-"], "--out: Parquet can't be written to standard output"),
    "openai to a pipe": (nothing, ["openai", "--out", "-"], "--errors: with --format openai, failed samples"),
    "openai with columns": (
        nothing,
        ["openai", "--out", "{out}", "--columns", "id"],
        "not available with --format openai",
    ),
}


@pytest.mark.parametrize(("spoil", "arguments", "message"), REFUSED.values(), ids=REFUSED)
def test_an_export_that_can_not_be_is_refused_and_leaves_nothing(prompts, tmp_path, capsys, spoil, arguments, message):
    shutil.copytree(prompts / "run", tmp_path / "run", copy_function=os.link)
    (tmp_path / "there").write_text("precious")
    spoil(tmp_path / "run")
    before = sorted(tmp_path.rglob("*"))
    filled = [argument.format(out=tmp_path / "out", run=tmp_path / "run") for argument in arguments]
    assert main(["export", str(tmp_path / "run"), "--format", *filled]) == 2
    assert message.format(run=tmp_path / "run") in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "there").read_text() == "precious"


def test_pipes_take_what_comes_and_links_lead_to_what_is_replaced(prompts, tmp_path):
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    target.write_text("old")
    link.symlink_to(target)
    taken: list[bytes] = []
    reader = Thread(target=lambda: taken.append(pipe.read_bytes()), daemon=True)
    reader.start()
    command = ["export", str(prompts / "run"), "--format", "jsonl", "--out"]
    assert main([*command, str(pipe), "--overwrite"]) == main([*command, str(link), "--overwrite"]) == 0
    reader.join(60)
    assert pipe.is_fifo() and link.is_symlink(), "neither was replaced"
    assert taken == [target.read_bytes()] and taken[0].count(b"\n") == len(PROMPTS)


def test_an_export_that_breaks_off_leaves_the_old_file(prompts, tmp_path, monkeypatch, capsys):
    out = tmp_path / "all.parquet"
    out.write_text("the old one")
    monkeypatch.setattr("draftmill.jobs.results.formats.ParquetSink._flush", lambda self: 1 / 0)
    command = ["export", str(prompts / "run"), "--format", "parquet", "--out", str(out), "--overwrite"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(command) == 1
        gc.collect()
    assert out.read_text() == "the old one" and os.listdir(tmp_path) == ["all.parquet"]
    monkeypatch.undo()
    assert main(command) == 0 and pq.read_table(out).num_rows == len(PROMPTS)


def test_a_file_that_appears_while_an_export_is_written_is_not_replaced(prompts, tmp_path, monkeypatch, capsys):
    out, written = tmp_path / "all.jsonl", export_module._local_file

    @contextmanager
    def beside(place: str, *rest):
        with written(place, *rest) as file:
            yield file
            out.write_text("of another program")

    command = ["export", str(prompts / "run"), "--format", "jsonl", "--out", str(out)]
    synced: list = []
    monkeypatch.setattr(export_module, "_local_file", beside)
    monkeypatch.setattr(export_module, "sync_folder", synced.append)
    assert main(command) == 2
    assert "already exists; --overwrite replaces it" in capsys.readouterr().err
    assert out.read_text() == "of another program" and os.listdir(tmp_path) == ["all.jsonl"] and not synced
    assert main([*command, "--overwrite"]) == 0
    assert out.read_text().count("\n") == len(PROMPTS) and synced == [tmp_path]


def test_scores_and_tokens_alone_are_no_answers(tmp_path, capsys):
    from tests.runs.jobs_of_tests import write_rows, write_spec

    spec = write_spec(tmp_path, rows=write_rows(tmp_path / "rows.jsonl", 4))
    assert run_with(set(), "run", str(spec)) == 0
    command = ["export", str(tmp_path / "run"), "--format", "openai", "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "--format: the results have no text" in capsys.readouterr().err
