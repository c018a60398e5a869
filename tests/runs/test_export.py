"""`draftmill export`, the OpenAI batch format in and out, Parquet files of a size: every sample once, as its last pass has it."""

import csv
import gc
import json
import os
import shutil
import warnings
from contextlib import contextmanager
from threading import Thread

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.jobs.cli import main
from draftmill.jobs.results import export as export_module
from draftmill.jobs.results.export import AT_ONCE, BYTES_AT_ONCE, columns_of, export_parts, parquet_format, tables_of
from draftmill.jobs.results.formats import PartsSink, openai_answer, plain_rows
from draftmill.jobs.results.passes import latest_rows, passes_of
from draftmill.storage.errors import StoreError
from draftmill.storage.runs.records import SCHEMA, table_from_rows
from draftmill.storage.stores.local import LocalStore
from draftmill.storage.stores.store import Place, open_store
from tests.jobs.compare import made_runs
from tests.runs.causal_jobs import ROOM, save_model
from tests.runs.jobs_here import run, without_ray
from tests.runs.jobs_of_tests import write_rows, write_spec
from tests.runs.test_rerun import COUNT, SICK, STILL_SICK, run_with
from tests.storage.inputs.tables import result_row

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
    assert "--format: openai needs generated texts" in capsys.readouterr().err


PARQUET = ("--format", "parquet", "--file-mb", "1")


@pytest.fixture(scope="module")
def two_passes(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("parts")
    rows = write_rows(folder / "rows.jsonl", COUNT)
    assert run_with(SICK, "run", str(write_spec(folder, rows=rows))) == 3
    assert run_with(set(STILL_SICK), "rerun", str(folder / "run"), "--failed") == 3
    return folder / "run"


def names_in(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_files_have_every_row_once_as_the_last_pass_has_it(two_passes, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["export", str(two_passes), *PARQUET, "--out", f"{out}/"]) == 0
    assert f"{out}: {COUNT} samples in 1 file\n" in capsys.readouterr().out
    assert names_in(out) == ["_SUCCESS", "part-00000.parquet"]
    table = pq.read_table(out)
    assert table.schema.remove_metadata().equals(SCHEMA)
    rows = [row["id"] for part in latest_rows(passes_of(open_store(str(two_passes)))) for row in part.to_pylist()]
    assert table["id"].to_pylist() == rows and len(set(rows)) == COUNT
    assert table["status"].to_pylist().count("failed") == len(STILL_SICK)
    assert (
        main(
            ["export", str(two_passes), *PARQUET, "--out", str(tmp_path / "ids"), "--columns", "id", "--order", "input"]
        )
        == 0
    )
    assert pq.read_table(tmp_path / "ids").column_names == ["id"]


def test_files_are_as_large_as_asked_for_and_lose_nothing(tmp_path):
    rng, wanted, tables = np.random.default_rng(0), 256 * 1024, []
    for unit in range(40):
        rows = [
            result_row(unit * 50 + row, unit=unit, tokens=rng.integers(0, 2**30, 300).tolist(), worker=f"w{unit % 3}")
            for row in range(50)
        ]
        tables.append(table_from_rows(rows))
    tables = [pa.concat_tables(tables[:20]), *tables[20:]]  # the first is as large as several files
    sink = PartsSink(LocalStore(str(tmp_path)).put, SCHEMA, {"fingerprint": "f"}, wanted)
    for table in tables:
        sink.add(table)
    sink.close()
    parts = [tmp_path / name for name in names_in(tmp_path)]
    sizes = [part.stat().st_size for part in parts]
    assert len(parts) == len(sink.names) > 5 and max(sizes) <= wanted and min(sizes[:-1]) > wanted / 3
    found = [name for part in parts for name in pq.read_table(part)["id"].to_pylist()]
    assert found == [row["id"] for table in tables for row in table.to_pylist()]


def test_a_run_without_rows_has_one_file_with_the_columns(tmp_path):
    sink = PartsSink(LocalStore(str(tmp_path)).put, SCHEMA, {}, 2**20)
    sink.close()
    assert names_in(tmp_path) == ["part-00000.parquet"] and pq.read_table(tmp_path).schema.equals(SCHEMA)


def test_an_earlier_export_is_replaced_only_if_asked_and_none_of_it_stays(two_passes, tmp_path, capsys):
    plan = passes_of(open_store(str(two_passes)))[0].plan
    schema, metadata = parquet_format(plan, columns_of(plan, "parquet", []))
    store = LocalStore(str(tmp_path / "out"))
    for number in range(3):
        sink = PartsSink(store.put, schema, metadata, 2**20)
        sink.names += ["others"] * number
        sink.close()
    for name in ("notes.txt", "part-of-mine.parquet"):
        (tmp_path / "out" / name).write_text("the user's")
    arguments = ["export", str(two_passes), *PARQUET, "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "has part-00000.parquet already; --overwrite replaces it" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0
    assert names_in(tmp_path / "out") == ["_SUCCESS", "notes.txt", "part-00000.parquet", "part-of-mine.parquet"]


def test_an_export_that_breaks_off_has_no_mark(two_passes, tmp_path, monkeypatch):
    out = tmp_path / "out"
    arguments = ["export", str(two_passes), *PARQUET, "--out", str(out), "--overwrite"]
    assert main(arguments) == 0

    def full(*_: object) -> None:
        raise StoreError("full")

    with monkeypatch.context() as patch:
        patch.setattr(PartsSink, "close", full)
        assert main(arguments) == 1
    assert "_SUCCESS" not in names_in(out)
    assert main(arguments) == 0 and names_in(out) == ["_SUCCESS", "part-00000.parquet"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "csv", "--file-mb", "1"], "--file-mb: does not apply to --format csv"),
        ([*PARQUET, "--errors", "e.parquet"], "--errors: does not apply with --file-mb"),
    ],
)
def test_what_several_files_can_not_be_is_refused(two_passes, tmp_path, words, message, capsys):
    assert main(["export", str(two_passes), *words, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["0", "5000", "-1", "many"])
def test_a_size_that_no_file_may_have_is_refused(two_passes, size, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["export", str(two_passes), "--format", "parquet", "--out", "x", "--file-mb", size])
    assert caught.value.code == 2 and "allowed: 1 to 4096" in capsys.readouterr().err


@pytest.mark.s3
def test_on_s3_they_are_those_of_a_disk(two_passes, tmp_path, s3_url, s3_options):
    passes = passes_of(open_store(str(two_passes)))
    columns = columns_of(passes[0].plan, "parquet", [])
    place = Place(f"{s3_url}/out", s3_options)
    for out in (Place(str(tmp_path / "out")), place):
        assert export_parts(passes, columns, out, file_bytes=2**20, overwrite=False, order="plan") == 0
    store = open_store(place)
    assert {stat.name: store.get(stat.name) for stat in store.list()} == {
        path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()
    }


def test_small_units_are_exported_together(tmp_path):
    place = made_runs.write_run(tmp_path / "run", [made_runs.row(number) for number in range(AT_ONCE + 300)], units=50)
    passes = passes_of(open_store(str(place)))
    names = passes[0].plan.schema.names
    tables = list(tables_of(passes, names))
    assert 2 <= len(tables) < 25, "of 50 units"
    assert all(table.nbytes < 2 * BYTES_AT_ONCE for table in tables)
    assert plain_rows(pa.concat_tables(tables).select(["id", "nfe", "started_at"])) == [
        {"id": one["id"], "nfe": one["nfe"], "started_at": one["started_at"].isoformat()}
        for one in (made_runs.row(number) for number in range(AT_ONCE + 300))
    ]
