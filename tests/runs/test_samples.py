"""`sampling.n`: several samples of a row, each with its own key and result row."""

import json
import shutil
from itertools import count
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from draftmill.actors.rows.makers import PromptMaker
from draftmill.jobs.cli import main
from tests.runs.jobs_here import without_ray
from tests.runs.jobs_of_tests import rows_of, write_rows, write_spec
from tests.runs.test_rerun import run_with

TEXTS = ["def add(a, b):\n", "import os\n", "class Point:\n    x = 1\n", "for line in open(path):\n", "# a note\n"]
N = 3


def spec(folder, out: str, *, n: int, **changes) -> dict:
    return {
        "task": {"kind": "complete", "max_new_tokens": 12},
        "input": {"path": str(folder / "rows.jsonl"), "columns": {"id": "id", "prompt": "prompt"}},
        "model": {"path": "builtin:ar-tiny", "device": "cpu"},
        "decoder": {"kind": "autoregressive"},
        "sampling": {"temperature": 1.0, "n": n},
        "output": {"path": str(folder / out), "unit_rows": 4},
    } | changes


def run(folder, out: str, **changes) -> int:
    file = folder / f"{out}.yaml"
    file.write_text(yaml.safe_dump(spec(folder, out, **changes)))
    return main(["run", str(file), "--quiet"])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory):
    """A finished run of three samples a row, and one of a single sample; a row without a prompt fails in both."""
    folder = tmp_path_factory.mktemp("samples")
    rows: list[dict] = [{"id": f"r{number}", "prompt": text} for number, text in enumerate(TEXTS)]
    rows.append({"id": "bad", "prompt": 7})
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        for out, n in (("many", N), ("one", 1)):
            assert run(folder, out, n=n, errors={"max_rate": 1.0}) == 0
    return folder


def test_samples_of_a_row_that_fails_share_its_error(tmp_path, monkeypatch):
    """The planner makes the row's canvas once, and the worker once for all of its samples."""
    made, make = count(), PromptMaker._make

    def counting(self: Any, *row: Any) -> Any:
        next(made)
        return make(self, *row)

    monkeypatch.setattr(PromptMaker, "_make", counting)
    without_ray(monkeypatch)
    (tmp_path / "rows.jsonl").write_text('{"id": "bad", "prompt": 7}\n')
    assert run(tmp_path, "out", n=N, errors={"max_rate": 1.0}) == 0
    assert [row["error_kind"] for row in rows_of(tmp_path / "out").to_pylist()] == ["bad_row"] * N and next(made) == 2


@pytest.mark.slow
def test_every_row_comes_back_once_for_each_sample_with_a_key_and_a_text_of_its_own(done):
    many, one = (rows_of(done / out).to_pylist() for out in ("many", "one"))
    names = [(row["id"], row["sample"]) for row in many]
    assert sorted(names) == sorted((f"{name}", n) for name in [*(f"r{k}" for k in range(5)), "bad"] for n in range(N))
    assert len({row["key"] for row in many}) == len(many)
    texts = {(row["id"], row["sample"]): row["tokens"] for row in many if row["status"] == "ok"}
    assert len({tuple(tokens) for tokens in texts.values()}) > len(TEXTS)
    # The first sample is the one that a row has by itself.
    assert all(row["sample"] == 0 for row in one)
    assert {row["id"]: row["tokens"] for row in one if row["status"] == "ok"} == {
        name: tokens for (name, number), tokens in texts.items() if number == 0
    }


@pytest.mark.slow
def test_a_run_of_several_samples_keeps_its_promises(done, capsys):
    assert main(["verify", str(done / "many"), "--invariance", "6"]) == 0
    assert "6 equal (100.0%)" in capsys.readouterr().out
    assert main(["status", str(done / "many")]) == 0
    assert "18 of 18 done" in capsys.readouterr().out


def test_verify_finds_a_sample_that_took_the_place_of_another(done, tmp_path, capsys):
    shutil.copytree(done / "many", tmp_path / "run")
    unit = tmp_path / "run" / "data" / "unit-00000000.parquet"
    table = pq.read_table(unit)
    column = table.column_names.index("sample")
    ones = pa.array([1] * table.num_rows, pa.int32())
    pq.write_table(table.set_column(column, table.schema.field(column), ones), unit)
    assert main(["verify", str(tmp_path / "run")]) == 1
    assert "planned rows are missing" in capsys.readouterr().out


def test_choices_of_an_openai_answer_are_the_samples_of_its_row(done, tmp_path):
    out = tmp_path / "out.jsonl"
    assert main(["export", str(done / "many"), "--format", "openai", "--out", str(out)]) == 0
    rows = {(row["id"], row["sample"]): row for row in rows_of(done / "many").to_pylist()}
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(answer["custom_id"] for answer in answers) == [f"r{number}" for number in range(5)]
    for answer in answers:
        own = [rows[answer["custom_id"], number] for number in range(N)]
        body = answer["response"]["body"]
        assert [choice["index"] for choice in body["choices"]] == list(range(N))
        assert [choice["text"] for choice in body["choices"]] == [row["text"] for row in own]
        assert body["usage"] == {
            "prompt_tokens": own[0]["prompt_tokens"],
            "completion_tokens": sum(row["new_tokens"] for row in own),
            "total_tokens": own[0]["prompt_tokens"] + sum(row["new_tokens"] for row in own),
        }
    (failed,) = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert failed["custom_id"] == "bad" and failed["response"] is None


def test_a_second_pass_decodes_every_sample_of_a_failed_row_as_if_it_had_not_failed(tmp_path):
    """`run_with` makes a row fail, and all of its samples with it; the second pass decodes each of them."""
    rows = write_rows(tmp_path / "rows.jsonl", 5)
    for out, sick in (("mended", {"row-2"}), ("well", set[str]())):
        file = write_spec(tmp_path, rows=rows, out=out, sampling={"n": 2}, errors={"max_rate": 1.0})
        assert run_with(sick, "run", str(file)) == 0
    failed = {(row["id"], row["sample"]) for row in rows_of(tmp_path / "mended").to_pylist() if row["status"] != "ok"}
    assert failed == {("row-2", 0), ("row-2", 1)}
    assert run_with(set(), "rerun", str(tmp_path / "mended"), "--failed") == 0
    exports = {}
    for out in ("mended", "well"):
        to = tmp_path / f"{out}.jsonl"
        options = ["--format", "jsonl", "--columns", "id,sample,tokens", "--out", str(to)]
        assert main(["export", str(tmp_path / out), *options]) == 0
        exports[out] = [json.loads(line) for line in to.read_text().splitlines()]
    assert exports["mended"] == exports["well"] and len(exports["well"]) == 10


def test_samples_of_an_infilled_row_have_the_same_holes(tmp_path, monkeypatch):
    without_ray(monkeypatch)
    rows = [{"id": f"r{number}", "text": text * 3} for number, text in enumerate(TEXTS)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    changes = {
        "task": {"kind": "infill", "mask": {"kind": "random", "rate": 0.5}},
        "input": {"path": str(tmp_path / "rows.jsonl"), "columns": {"id": "id", "text": "text"}},
        "model": {"path": "builtin:asarm-tiny", "device": "cpu"},
        "decoder": {"kind": "any_subset"},
    }
    assert run(tmp_path, "run", n=4, **changes) == 0
    holes: dict[str, set] = {}
    fills: dict[str, set] = {}
    for row in rows_of(tmp_path / "run").to_pylist():
        holes.setdefault(row["id"], set()).add(tuple((fill["start"], fill["end"]) for fill in row["fills"]))
        fills.setdefault(row["id"], set()).add(tuple(row["tokens"]))
    assert all(len(found) == 1 for found in holes.values()) and len(holes) == len(TEXTS)
    assert sum(len(found) for found in fills.values()) > 2 * len(TEXTS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"n": 0}}, "sampling.n: 0 is not allowed"),
        ({"sampling": {"n": 1.5}}, "sampling.n"),
        ({"sampling": {"n": 2}, "task": {"kind": "score"}}, "sampling.n: 2, but the task 'score' draws nothing"),
    ],
)
def test_a_number_of_samples_that_makes_no_sense_is_refused(tmp_path, changes, message, capsys):
    (tmp_path / "rows.jsonl").write_text('{"id": "a", "prompt": "x"}\n')
    file = tmp_path / "bad.yaml"
    file.write_text(yaml.safe_dump(spec(tmp_path, "bad", n=1) | changes))
    assert main(["run", str(file), "--quiet"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "bad").exists()
