"""`draftmill export --to` and `draftmill prove`: a published row is decoded again, and one that was changed is found."""

import json
import shutil
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import draftmill
from draftmill.actors.checkpoints.models import fetch_model
from draftmill.jobs.cli import main
from draftmill.jobs.plan.fingerprint import digest
from draftmill.jobs.results.publish import SPEC
from draftmill.storage.stores.store import Place
from tests.runs.jobs_of_tests import write_rows, write_spec
from tests.runs.test_rerun import COUNT, SICK, STILL_SICK, run_with
from tests.storage.stores.fake_hub import TOKEN, serving
from tests.storage.stores.fsspec_driver import register

TINY = fetch_model(Place("builtin:ar-tiny"), None)
PLACE = "hf://datasets/me/rows"
PROMPTS = [
    {"id": name, "prompt": text} for name, text in zip("abcd", ["def f(", "import os", "class A:", ""], strict=True)
]


def run_job(folder: Path, rows=PROMPTS, **sections) -> Path:
    """A finished run of a small job, in the folder; rows are those of rows.jsonl, or of the table rows.parquet."""
    is_table = isinstance(rows, pa.Table)
    if is_table:
        pq.write_table(rows, folder / "rows.parquet")
    else:
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = {
        "name": "small",
        "task": {"kind": "complete", "max_new_tokens": 8},
        "model": {"path": "builtin:ar-tiny"},
        "decoder": {"kind": "speculative"},
        "sampling": {"temperature": 0.7},
        "errors": {"max_rate": 1.0},
        **sections,
    }
    name = "rows.parquet" if is_table else "rows.jsonl"
    paths = {"input": {"path": str(folder / name), **spec.pop("input", {})}}
    paths["output"] = {"path": str(folder / "run"), **spec.pop("output", {})}
    draftmill.run({**spec, **paths}, local=True)
    return folder / "run"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("publish")
    return run_job(folder, [*PROMPTS, {"id": "bad"}], input={"keep": ["prompt"]})


def publish(run: Path, to: Path | str, *more: str) -> int:
    return main(["export", str(run), "--to", str(to), *more])


def proved(place: Path | str, capsys, *more: str) -> tuple[int, list[str]]:
    """The exit code of `prove`, and its lines about rows."""
    capsys.readouterr()
    code = main(["prove", str(place), *more])
    return code, [line.strip() for line in capsys.readouterr().out.splitlines()[1:-1]]


def change(file: Path, **columns) -> None:
    """Change columns of the rows by a function of their values."""
    table = pq.read_table(file)
    for name, made in columns.items():
        place, values = table.schema.get_field_index(name), table[name].to_pylist()
        table = table.set_column(place, table.schema.field(name), pa.array(made(values), table.schema.field(name).type))
    pq.write_table(table, file)


def test_a_dataset_has_each_row_with_its_input_and_a_card_for_the_hub(run, tmp_path, capsys):
    assert publish(run, tmp_path / "out") == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}: 5 samples in 1 file\n"
    names = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert names == ["README.md", "_SUCCESS", "data/part-00000.parquet", "draftmill.json"]
    rows = {row["id"]: row for row in pq.read_table(tmp_path / "out" / "data").to_pylist()}
    assert {name: json.loads(row["input"]) for name, row in rows.items()} == {
        row["id"]: row for row in [*PROMPTS, {"id": "bad"}]
    }
    assert rows["a"]["text"] and rows["a"]["keep"] == {"prompt": "def f("} and rows["bad"]["status"] == "failed"
    _, head, body = (tmp_path / "out" / "README.md").read_text().split("---\n")
    assert yaml.safe_load(head)["configs"] == [{"config_name": "default", "data_files": "data/*.parquet"}]
    facts = json.loads((tmp_path / "out" / "draftmill.json").read_text())
    assert facts["rows"] == {"ok": 4, "failed": 1, "skipped": 0, "errors": {"missing_column": 1}}
    assert facts["exact"] is True
    assert facts["results"]["model"]["checkpoint"] in body and f"draftmill prove {tmp_path / 'out'}" in body
    assert "output" not in facts["spec"] and "s3" not in facts["spec"]


def test_the_hub_shows_a_dataset_in_one_commit_and_is_sent_each_file_once(run, monkeypatch, capsys):
    with serving(monkeypatch) as hub:
        hub.faults = [("POST .*/commit/", 403)]
        assert publish(run, PLACE) == 2
        said = capsys.readouterr()
        assert f"{PLACE}: HfHubHTTPError" in said.err and hub.datasets == {"me/rows": {}} and hub.sent() == 1
        hub.faults = []
        assert publish(run, PLACE) == 0 and hub.sent() == 1 and hub.private == {"me/rows": True}
        assert sorted(hub.datasets["me/rows"]) == ["README.md", "data/part-00000.parquet", "draftmill.json"]
        assert publish(run, PLACE) == 0 and hub.commits == ["me/rows"]
        assert proved(PLACE, capsys)[0] == 0 and proved(f"{PLACE}/data/part-00000.parquet", capsys)[0] == 0
        assert hub.tokens == {f"Bearer {TOKEN}", None}
        everything = b"".join(hub.datasets["me/rows"].values()) + (said.out + said.err).encode()
        assert TOKEN.encode() not in everything


def test_an_upload_to_the_hub_that_breaks_off_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    run = run_job(tmp_path, [{"id": str(n), "prompt": f"import {n}"} for n in range(12)], output={"unit_rows": 4})
    monkeypatch.setattr("draftmill.jobs.results.export.AT_ONCE", 4)
    with serving(monkeypatch) as hub:
        put = hub.answer

        def breaks(method, path, body):
            return (403, {}) if method == "PUT" and hub.sent() > 1 else put(method, path, body)

        monkeypatch.setattr(hub, "answer", breaks)
        monkeypatch.setattr("draftmill.jobs.results.publish.MIB", 2**10)
        assert publish(run, PLACE, "--file-mb", "1") == 2
        assert "data/part-00001.parquet: HfHubHTTPError" in capsys.readouterr().err and hub.datasets == {"me/rows": {}}
        monkeypatch.setattr(hub, "answer", put)
        before = hub.sent()
        assert publish(run, PLACE, "--file-mb", "1") == 0
        parts = [name for name in hub.datasets["me/rows"] if name.startswith("data/")]
        assert 3 <= len(parts) == hub.sent() - before + 1
        assert publish(run, PLACE) == 0
        assert [name for name in hub.datasets["me/rows"] if name.startswith("data/")] == ["data/part-00000.parquet"]
        code, lines = proved(PLACE, capsys, "--rows", "3")
        assert code == 0 and len(lines) == 3 and all(line.endswith("equal to the bit") for line in lines)


@pytest.mark.s3
def test_a_broken_off_export_sends_only_what_is_missing(run, tmp_path, s3_server, s3_url, monkeypatch, capsys):
    to, endpoint = f"{s3_url}/out", ("--s3-endpoint", s3_server.endpoint)
    with monkeypatch.context() as patch:
        patch.setattr("draftmill.jobs.results.publish.card", lambda *_: 1 / 0)
        assert publish(run, to, *endpoint) == 1
    s3_server.app.requests.clear()
    assert proved(to, capsys, *endpoint)[0] == 0
    assert publish(run, to, *endpoint) == 0
    sent = [path.split("?")[0].rpartition("/out/")[2] for method, path in s3_server.app.requests if method == "PUT"]
    assert sent == ["README.md", "_SUCCESS"]


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_the_buckets_of_other_clouds_take_datasets_too(scheme, run, monkeypatch, capsys):
    bucket, to, sent = register(monkeypatch, scheme), f"{scheme}://bucket/out", list[str]()
    with monkeypatch.context() as patch:
        patch.setattr("draftmill.jobs.results.publish.card", lambda *_: 1 / 0)
        assert publish(run, to) == 1
    monkeypatch.setattr(type(bucket), "wrote", staticmethod(sent.append))
    assert publish(run, to) == 0 and sent == ["bucket/out/README.md", "bucket/out/_SUCCESS"]
    bucket.pipe_file("bucket/out/data/part-00000.parquet", b"?")
    bucket.pipe_file("bucket/out/data/part-00007.parquet", b"of an export with smaller files")
    assert publish(run, to) == 0 and proved(to, capsys, "--rows", "3")[0] == 0
    data = [Path(name).name for name in bucket.find("bucket/out/data", detail=True)]
    assert data == ["part-00000.parquet"]


def test_a_file_that_was_changed_is_written_again(run, tmp_path, capsys):
    assert publish(run, tmp_path) == 0
    file = tmp_path / "data" / "part-00000.parquet"
    before = file.read_bytes()
    file.write_bytes(before[:-1] + b"?")
    (tmp_path / "data" / "part-00007.parquet").write_bytes(b"of an export with smaller files")
    (tmp_path / "notes.txt").write_text("the user's")
    assert publish(run, tmp_path) == 0 and file.read_bytes() == before
    assert [path.name for path in (tmp_path / "data").iterdir()] == [file.name] and (tmp_path / "notes.txt").exists()


def test_what_is_there_of_others_is_replaced_only_if_asked(run, tmp_path, capsys):
    (tmp_path / "README.md").write_text("mine")
    assert publish(run, tmp_path) == 2
    assert "has README.md of another export; --overwrite replaces it" in capsys.readouterr().err
    assert publish(run, tmp_path, "--overwrite") == 0 and "draftmill" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["ftp://bucket/x"],
            "--to: ftp:// is not allowed; allowed: a local path, hf://..., s3://..., gs://..., az://..., abfs://...",
        ),
        (["hf://me/rows"], "'hf://me/rows' is not allowed; allowed: hf://datasets/OWNER/NAME"),
        (["{run}/out"], "--to: '{run}/out' is inside the run directory"),
        (["out", "--format", "csv"], "--format: does not apply with --to"),
        (["out", "--columns", "id"], "--columns: does not apply with --to"),
        (["out", "--errors", "e"], "--errors: does not apply with --to"),
    ],
)
def test_a_place_or_an_option_that_can_not_be_is_refused(run, words, message, capsys):
    assert main(["export", str(run), "--to", *(word.format(run=run) for word in words)]) == 2
    assert message.format(run=run) in capsys.readouterr().err


def test_inputs_that_changed_or_that_json_would_change_are_refused(tmp_path, capsys):
    run = run_job(tmp_path, pa.table({"prompt": ["a"], "seed": [Decimal("5.00")]}), input={"columns": {"seed": "seed"}})
    assert publish(run, tmp_path / "out") == 2
    assert not [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert "column 'seed': JSON would change \"Decimal('5.00')\"" in capsys.readouterr().err
    (tmp_path / "more").mkdir()
    tmp_path = tmp_path / "more"
    run = run_job(tmp_path)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write("{}\n")
    assert publish(run, tmp_path / "out") == 2 and not (tmp_path / "out").exists()
    assert "input.path: the inputs changed since" in capsys.readouterr().err


def test_rows_are_equal_to_the_bit_and_a_failed_one_can_not_be_told(run, tmp_path, capsys):
    assert publish(run, tmp_path, "--order", "input") == 0
    code, lines = proved(tmp_path, capsys)
    assert code == 0 and lines == [
        *(f"{name}: equal to the bit" for name in "abcd"),
        "bad: cannot tell: the row is failed (missing_column)",
    ]
    assert [line[0] for line in proved(tmp_path / "data" / "part-00000.parquet", capsys, "--rows", "1")[1]] == ["c"]


@pytest.mark.parametrize(
    ("column", "made", "verdict"),
    [
        ("tokens", lambda all_rows: [row and [*row[:-1], row[-1] ^ 1] for row in all_rows], "different: other tokens"),
        ("text", lambda texts: [text and f"{text}." for text in texts], "different: other text"),
        ("logprob", lambda sums: [number and number * 2 for number in sums], "different: other logprob"),
        ("input", lambda texts: [text.replace('prompt": "', 'prompt": "x') for text in texts], "different: other key"),
        ("nfe", lambda counts: [count and count + 1 for count in counts], "equal tokens: other nfe"),
        ("input", lambda texts: ["{" for _ in texts], "cannot tell: failed here"),
    ],
)
def test_a_changed_row_is_found(run, tmp_path, capsys, column, made, verdict):
    assert publish(run, tmp_path, "--order", "input") == 0
    change(tmp_path / "data" / "part-00000.parquet", **{column: lambda values: [*made(values[:1]), *values[1:]]})
    code, lines = proved(tmp_path, capsys)
    assert code == int("different" in verdict)
    assert lines[0].startswith(f"a: {verdict.replace('other key', 'other')}")
    assert lines[1:4] == [f"{name}: equal to the bit" for name in "bcd"]


def facts_changed(folder: Path, **values) -> None:
    file = folder / "draftmill.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"exact": False}, "other text, tokens; exact: false, so last bits may differ"),
        ({"devices": ["H100"]}, "other text, tokens; it was decoded on ['H100'], here on ['CPU"),
    ],
)
def test_where_last_bits_may_differ_another_token_proves_nothing(run, tmp_path, capsys, facts, why):
    assert publish(run, tmp_path, "--order", "input") == 0
    facts_changed(tmp_path, **facts)
    change(
        tmp_path / "data" / "part-00000.parquet",
        tokens=lambda rows: [[5, *rows[0][1:]], *rows[1:]],
        text=lambda texts: ["5", *texts[1:]],
        logprob=lambda sums: [sums[0], sums[1] + 1e-9, *sums[2:]],
    )
    change(tmp_path / "data" / "part-00000.parquet", text=lambda texts: [*texts[:2], "x", *texts[3:]])
    code, lines = proved(tmp_path, capsys)
    assert lines[0].startswith(f"a: cannot tell: {why}")
    assert lines[1:4] == ["b: equal tokens: other logprob", "c: different: other text", "d: equal to the bit"]
    assert code == 1


def test_other_weights_and_another_schema_prove_nothing(run, tmp_path, capsys):
    assert publish(run, tmp_path) == 0
    code, lines = proved(tmp_path, capsys, "--set", "model.path=builtin:ar-micro", "--rows", "1")
    assert code == 2 and ": cannot tell: model.checkpoint was " in lines[0]
    facts = json.loads((tmp_path / "draftmill.json").read_text())
    results = facts["results"] | {"schema_version": 0}
    facts_changed(tmp_path, results=results, fingerprint=digest(results))
    code, lines = proved(tmp_path, capsys, "--rows", "1")
    assert code == 2 and "cannot tell: draftmill 0.1.0 has results of another schema" in lines[0]


def test_weights_that_are_elsewhere_here_are_named(tmp_path, capsys):
    here = tmp_path / "weights"
    here.symlink_to(TINY)
    assert publish(run_job(tmp_path, model={"path": str(here)}), tmp_path / "out") == 0
    here.rename(tmp_path / "moved")
    code, lines = proved(tmp_path / "out", capsys)
    assert code == 2 and all(": cannot tell: model.path" in line for line in lines)
    assert proved(tmp_path / "out", capsys, "--set", f"model.path={tmp_path / 'moved'}")[0] == 0


def test_a_dataset_can_name_no_commands_no_servers_and_no_code(run, tmp_path, capsys):
    assert publish(run, tmp_path) == 0
    spec = json.loads((tmp_path / "draftmill.json").read_text())["spec"]
    mark = tmp_path / "mark"
    spec |= {"notify": {"command": ["touch", str(mark)], "on": ["finish"]}, "s3": {"endpoint": "http://evil"}}
    facts_changed(tmp_path, spec=spec | {"model": spec["model"] | {"trust_remote_code": True}})
    made: dict[str, Any] = {}

    def check(data: dict[str, Any], words: list[str]) -> None:
        made.update(data)
        raise ZeroDivisionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftmill.jobs.run.prove.check_spec", check)
        assert main(["prove", str(tmp_path)]) == 1
    assert made.keys() == {*SPEC, "input", "output"} and made["model"]["trust_remote_code"] is False
    assert proved(tmp_path, capsys)[0] == 0 and not mark.exists()


def test_what_is_no_dataset_is_refused(run, tmp_path, capsys):
    for place, message in (
        (tmp_path, "has no draftmill.json of `draftmill export --to`: nothing is there"),
        (run.parent, "other files are"),
        (run, "it is a run, not published yet"),
        ("ftp://b/x", "SOURCE: ftp://"),
    ):
        assert main(["prove", str(place)]) == 2 and message in capsys.readouterr().err
    assert publish(run, tmp_path) == 0
    damages: dict[str, dict[str, Any]] = {
        "lacks 'task'": {"spec": {}},
        "lacks 'schema_version'": {"devices": None, "results": {}},
        "has format 2; this draftmill reads 1": {"format": 2},
        "is damaged": {"results": 3},
    }
    for message, lacks in damages.items():
        shutil.copytree(tmp_path, tmp_path / "damaged", ignore=shutil.ignore_patterns("damaged"), dirs_exist_ok=True)
        facts_changed(tmp_path / "damaged", **lacks)
        assert main(["prove", str(tmp_path / "damaged")]) == 2 and f"json {message}" in capsys.readouterr().err
    assert main(["prove", str(tmp_path / "data" / "part-00007.parquet")]) == 2
    assert "no files in data/, or not the one that was named" in capsys.readouterr().err
    change_to_ids = pq.read_table(tmp_path / "data").select(["id"])
    pq.write_table(change_to_ids, tmp_path / "data" / "part-00000.parquet")
    assert main(["prove", str(tmp_path)]) == 2 and "not the files of `draftmill export --to`" in capsys.readouterr().err


def test_only_a_place_of_its_own_takes_a_dataset(run, tmp_path, capsys):
    other = run_job(tmp_path)
    (tmp_path / "has" / "data").mkdir(parents=True)
    (tmp_path / "has" / "data" / "mine.parquet").write_bytes(b"")
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "sweep.json").write_text("{}")
    for place, message in (
        (other, "is a run or a sweep"),
        (tmp_path / "sweep", "is a run or a sweep"),
        (tmp_path / "has", "has data/mine.parquet"),
        ("", "'' is not a path"),
        ("-", "'-' is not a path"),
    ):
        for more in ((), ("--overwrite",)):
            assert publish(run, place, *more) == 2 and message in capsys.readouterr().err
    assert main(["verify", str(other)]) == 0 and main(["prove", ""]) == 2


def test_missing_and_doubled_rows_and_a_changed_spec_are_found_and_an_edited_card_stays(run, tmp_path, capsys):
    place = tmp_path / "out"
    assert publish(run, place) == 0
    (place / "README.md").write_text("mine")
    assert publish(run, place) == 0 and (place / "README.md").read_text() == "mine"
    assert publish(run, place, "--overwrite") == 0 and "draftmill prove" in (place / "README.md").read_text()
    table = pq.read_table(place / "data" / "part-00000.parquet")
    for rows in (table.slice(1), pa.concat_tables([table, table.slice(0, 1)])):
        pq.write_table(rows, place / "data" / "part-00000.parquet")
        assert main(["prove", str(place), "--rows", str(10**20)]) == 1
        assert f"BROKEN: the files have {rows.num_rows} rows, and draftmill.json says 5" in capsys.readouterr().out
    pq.write_table(table, place / "data" / "part-00000.parquet")
    facts = json.loads((place / "draftmill.json").read_text())
    facts_changed(place, results=facts["results"] | {"seed": 9})
    assert main(["prove", str(place)]) == 2 and "draftmill.json was changed" in capsys.readouterr().err


def test_rows_of_a_later_pass_are_proved(tmp_path, capsys):
    spec = str(write_spec(tmp_path, rows=write_rows(tmp_path / "rows.jsonl", COUNT)))
    assert run_with(SICK, "run", spec) == 3 and run_with(STILL_SICK, "rerun", str(tmp_path / "run"), "--failed") == 3
    assert publish(tmp_path / "run", tmp_path / "out") == 0
    code, lines = proved(tmp_path / "out", capsys, "--rows", str(COUNT))
    told = [line.split(": ")[1] for line in lines]
    assert code == 0 and told.count("equal to the bit") == COUNT - len(STILL_SICK)
    assert told.count("cannot tell") == len(STILL_SICK)


def test_rows_of_a_run_and_of_a_text_that_was_cut_are_proved(run, tmp_path, capsys):
    (tmp_path / "book.txt").write_text("import os\n" * 5)
    text: dict[str, Any] = {"path": str(tmp_path / "book.txt"), "chunk_chars": 20}
    for name, given in {"text": text, "run": {"path": None, "run": str(run)}}.items():
        (tmp_path / name).mkdir()
        assert publish(run_job(tmp_path / name, input=given), tmp_path / name / "out") == 0
        code, lines = proved(tmp_path / name / "out", capsys)
        assert code == 0 and len(lines) >= 3 and all(line.endswith("equal to the bit") for line in lines)


def test_it_is_said_how_many_samples_are_decoded_for_the_rows(tmp_path, capsys):
    assert publish(run_job(tmp_path, PROMPTS[:1], sampling={"n": 3}), tmp_path / "out") == 0
    assert main(["prove", str(tmp_path / "out"), "--rows", "2"]) == 0
    assert "to prove 2 rows, all 3 samples of 1 input row are decoded\n" in capsys.readouterr().err


def test_a_conversation_is_proved_with_the_date_of_its_plan(tmp_path, monkeypatch, capsys):
    shutil.copytree(TINY, tmp_path / "model")
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = json.loads((TINY / "tokenizer_config.json").read_text())
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    rows = [{"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "import"}]}]
    task = {"kind": "complete", "max_new_tokens": 8, "chat": True}
    monkeypatch.setattr("draftmill.jobs.plan.resolve.today", lambda: date(2026, 11, 23))
    assert publish(run_job(tmp_path, rows, task=task, model={"path": str(tmp_path / "model")}), tmp_path / "out") == 0
    monkeypatch.setattr("draftmill.jobs.plan.resolve.today", lambda: date(2027, 1, 1))
    assert proved(tmp_path / "out", capsys) == (0, ["rows.jsonl:0: equal to the bit"])


def test_a_run_that_other_runs_draft_is_refused(run, tmp_path, capsys):
    drafted = run_job(tmp_path, decoder={"kind": "speculative", "drafter": {"kind": "run", "path": str(run)}})
    assert publish(drafted, tmp_path / "out") == 2
    assert "decoder.drafter: other runs draft" in capsys.readouterr().err


TEXTS = [{"id": n, "text": f"def f{n}(x):\n    return x + {n}\n\nprint(f{n}(3))\n"} for n in range(3)]
REQUESTS: list[dict[str, Any]] = [
    {
        "custom_id": f"r{n}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "m", "prompt": f"import {n}", **own},
    }
    for n, own in enumerate([dict[str, Any](), {"seed": 7, "max_tokens": 5}, {"logprobs": 2, "temperature": 1.3}])
]
MADE: dict[str, dict[str, Any]] = {
    "several samples of a row": {"sampling": {"n": 3}},
    "rows without ids": {"rows": [{"prompt": "import a"}, {"prompt": "import b"}]},
    "rows with numbers as ids, and a template": {
        "rows": [{"n": 7, "meta": {"lang": "py"}}],
        "input": {"columns": {"id": "n"}},
        "prompt": {
            "template": "{{ row['meta.lang'] }} {{ n + 1 }} {{ examples[0].q }}",
            "examples": {"rows": [{"q": "x"}]},
        },
    },
    "rows' own seeds and settings": {
        "rows": [{"id": "a", "prompt": "x", "s": 3, "t": 0.3}, {"id": "b", "prompt": "x", "s": 4, "t": None}],
        "input": {"columns": {"seed": "s", "temperature": "t"}},
    },
    "requests": {"rows": REQUESTS},
    "scores": {"rows": TEXTS, "task": {"kind": "score"}, "decoder": "autoregressive", "sampling": {}},
    "a table with bytes and dates": {
        "rows": pa.table({"text": [b"import "], "day": [datetime(2026, 11, 29)], "f": pa.array([0.1], pa.float32())}),
        "prompt": {"template": "{{ text }}{{ day }} {{ f }}"},
    },
    "constraints": {"task": {"kind": "complete", "max_new_tokens": 8, "constraint": {"regex": "[ab]{3}"}}},
    "holes at random places": {
        "rows": TEXTS,
        "task": {"kind": "infill", "mask": {"kind": "random", "rate": 0.4}},
        "model": {"path": "builtin:asarm-tiny"},
        "decoder": "assd",
    },
    "a masked model": {
        "rows": TEXTS,
        "task": {"kind": "infill", "mask": {"kind": "spans", "count": 2, "length": 3}},
        "model": {"path": "builtin:mdm-tiny"},
        "decoder": {"kind": "ssd"},
    },
    "drafts of neighbours": {"decoder": {"kind": "speculative", "drafter": {"kind": "suffix"}}},
    "the fastest decoder": {"decoder": "fastest"},
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("what", MADE)
def test_every_kind_of_row_is_proved(what, tmp_path, capsys):
    sections = dict(MADE[what])
    rows = sections.pop("rows", PROMPTS)
    run = run_job(tmp_path, rows, **sections)
    assert publish(run, tmp_path / "out") == 0
    code, lines = proved(tmp_path / "out", capsys)
    assert code == 0 and len(lines) == len(rows) * sections.get("sampling", {}).get("n", 1)
    by_clock = what in {"drafts of neighbours", "the fastest decoder"}
    assert all(line.endswith("equal to the bit") or (by_clock and ": equal tokens: other" in line) for line in lines), (
        lines
    )
