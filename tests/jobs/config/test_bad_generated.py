"""Thousands of generated specs, rows and files: always a clear error or a failed row, never a traceback or a lost neighbour."""

import io
import json
import os
import random
import shutil
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from draftmill.actors.rows.chat import ChatTemplate
from draftmill.actors.rows.makers import Maker, maker_for
from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.rows.unit_io import make_row
from draftmill.jobs import cli
from draftmill.jobs.config.spec import JobSpec, check_spec, load_spec
from draftmill.jobs.exit_codes import INTERRUPTED, Ended
from draftmill.jobs.plan.planning import check_survey, survey
from draftmill.jobs.plan.resolve import Resolved
from draftmill.jobs.results.passes import latest_rows, passes_of
from draftmill.storage.errors import RowError, UserError
from draftmill.storage.inputs.inputs import list_inputs
from draftmill.storage.inputs.reader import iterate, read_rows
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.stores.store import open_store
from tests.actors.tokenizers_for_tests import byte_level, model_info
from tests.jobs.config.bad_input import GOOD, bad_lines, spec_texts, table_files, text_files
from tests.runs.jobs_here import run, without_ray
from tests.runs.jobs_of_tests import GOLDEN

pytestmark = pytest.mark.slow
SPECS, RUNS, ROW_FILES, ROWS_EACH, FILES = 500, 50, 125, 8, 250


def times(count: int) -> settings:
    """So many examples, however long each takes on a busy machine."""
    return settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    """A folder with rows, in which the process stands for the time of the tests: relative paths lead nowhere else."""
    folder = tmp_path_factory.mktemp("bad")
    lines = [json.dumps({"id": f"row-{number}", "tokens": [7, None, 8, 9]}) for number in range(4)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def clear(message: str) -> bool:
    """Whether a message is fit for a user: a line or a few, no novel, no escape sequences, no traceback."""
    plain = all(character.isprintable() or character in "\n\t" for character in message)
    return bool(message.strip()) and len(message) < 2000 and plain and "Traceback" not in message


@times(SPECS)
@given(text=spec_texts(str(GOLDEN)))
def test_a_generated_spec_is_taken_or_refused_in_words(folder, text):
    (folder / "spec.yaml").write_bytes(text)
    try:
        assert isinstance(load_spec(folder / "spec.yaml"), JobSpec)
    except UserError as error:
        assert clear(str(error)), str(error)


@times(RUNS)
@given(text=spec_texts(str(GOLDEN)))
def test_a_generated_job_is_planned_or_exits_with_2(folder, text):
    """All of `draftmill run` but the decoding, which is cut off: exit code 4."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    (folder / "spec.yaml").write_bytes(text)
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stderr(said), redirect_stdout(io.StringIO()):
        patch.setattr("draftmill.jobs.run.job.decode", Mock(side_effect=Ended("cut off", INTERRUPTED)))
        code = cli.main(["run", "spec.yaml", "--quiet"])
    assert code in {2, 4} and clear(said.getvalue()), (code, said.getvalue())
    assert code == 4 or not (folder / "run").exists(), "a job that is refused leaves nothing"


TASKS: dict[str, tuple[dict, dict[str, str]]] = {
    "random": ({"kind": "infill", "mask": {"kind": "random", "rate": 0.5}}, {}),
    "marker": ({"kind": "infill", "mask": {"kind": "marker"}}, {}),
    "between": ({"kind": "infill", "mask": {"kind": "marker"}}, {"prefix": "prefix", "suffix": "suffix"}),
    "lines": ({"kind": "infill", "mask": {"kind": "lines"}}, {}),
    "sentences": ({"kind": "infill", "mask": {"kind": "sentences"}}, {"sentences": "sentences"}),
    "spans": ({"kind": "infill", "mask": {"kind": "spans"}}, {"spans": "spans", "text": "text"}),
    "given": ({"kind": "infill", "mask": {"kind": "given"}}, {"tokens": "tokens"}),
    "seeded": ({"kind": "infill", "mask": {"kind": "random"}}, {"seed": "seed"}),
    "complete": ({"kind": "complete"}, {}),
    "chat": ({"kind": "complete", "chat": True}, {}),
    "score": ({"kind": "score"}, {}),
    "behind": ({"kind": "score"}, {"prompt": "prompt", "completion": "completion"}),
}


# The template stumbles over what it did not expect, as real ones do.
CHAT = ChatTemplate("{% for one in messages %}{{ '<' + one.role + '>' + one.content }}{% endfor %}", {})
TOKENIZER = Tokenizer(byte_level()._core, chat=CHAT)


def task_of(name: str, path) -> tuple[JobSpec, Maker]:
    task, columns = TASKS[name]
    decoder = {"kind": "assd" if task["kind"] == "infill" else "autoregressive"}
    parts = {"task": task, "decoder": decoder, "model": {"path": "m"}, "output": {"path": "out"}}
    spec = check_spec({**parts, "input": {"path": str(path), "columns": columns}})
    return spec, maker_for(spec.recipe(), TOKENIZER, model_info())


def planned(spec: JobSpec, maker: Maker, files: list[InputFile]) -> list[dict]:
    resolved = Resolved(spec, spec.recipe(), {}, Path(), model_info(), TOKENIZER, files)
    tables = check_survey(survey(resolved.recipe, maker, files), resolved)
    return [row for table in tables for row in table.to_pylist()]


def check_worker(spec: JobSpec, maker: Maker, file: InputFile, plan: list[dict]) -> None:
    """What a worker finds in each row: an error of the row's own, and what the plan found."""
    places = [(row["row"], row["offset"]) for row in plan]
    rows = list(read_rows(file, places, columns=spec.input.columns.to_read(spec.task)))
    assert len(rows) == len(plan)
    for entry, row in zip(plan, rows, strict=True):
        _, _, made = make_row(spec.recipe(), file, row, maker.make)
        found = made if isinstance(made, RowError) else None
        same = (found.kind if found else None) == entry["error_kind"]
        # ids are the planner's alone
        assert same or entry["error_kind"] in {"bad_row", "missing_column"}, (entry, found)


@times(ROW_FILES)
@given(task=st.sampled_from(sorted(TASKS)), bad=st.lists(bad_lines(), min_size=ROWS_EACH, max_size=ROWS_EACH))
def test_a_generated_row_fails_alone_or_is_fine(folder, task, bad):
    good = {**GOOD, "tokens": [7, None, 9]}
    lines = [line for n, one in enumerate(bad) for line in (json.dumps({**good, "id": f"good-{n}"}).encode(), one)]
    (folder / "bad.jsonl").write_bytes(b"\n".join(lines))
    spec, maker = task_of(task, folder / "bad.jsonl")
    files = list_inputs(str(folder / "bad.jsonl"))
    try:
        plan = planned(spec, maker, files)
    except UserError as error:
        assert "occurs twice" in str(error) and clear(str(error)), str(error)
        assume(False)
    kinds = {row["id"]: row["error_kind"] for row in plan}
    assert [kinds[f"good-{n}"] for n in range(ROWS_EACH)] == [None] * ROWS_EACH
    blank = sum(not line.strip() for line in bad)
    assert len(plan) == len(lines) - blank, "each line is a row, and none is lost"
    check_worker(spec, maker, files[0], plan)


@times(FILES)
@given(task=st.sampled_from(sorted(TASKS)), file=table_files())
def test_a_generated_table_is_rows_or_a_clear_error(folder, task, file):
    assume(file is not None)
    assert file is not None
    check_file(folder, task, *file)


@times(FILES)
@given(task=st.sampled_from(sorted(TASKS)), file=text_files())
def test_a_generated_text_file_is_rows_or_a_clear_error(folder, task, file):
    check_file(folder, task, *file)


def check_file(folder, task: str, name: str, data: bytes) -> None:
    place = folder / "files"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    (place / name).write_bytes(data)
    spec, maker = task_of(task, place / name)
    files = list_inputs(str(place / name))
    try:
        plan = planned(spec, maker, files)
        check_worker(spec, maker, files[0], plan)
    except UserError as error:
        assert clear(str(error)), str(error)


LONG = "for value in values:\n" * 500_000
"""Some ten megabytes."""


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.csv"])
def test_a_row_of_ten_megabytes_loses_no_neighbour(folder, name):
    rows = [{"id": "before", "text": "<mask>"}, {"id": "long", "text": LONG}, {"id": "after", "text": "<mask>"}]
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
    elif name == "a.csv":
        (folder / name).write_text("\n".join(["id,text", *(f'{row["id"]},"{row["text"]}"' for row in rows)]))
    else:
        (folder / name).write_text("\n".join(map(json.dumps, rows)))
    (file,) = list_inputs(str(folder / name))
    assert [row.values for row in iterate(file)] == rows
    spec, maker = task_of("marker", folder / name)
    kinds = {row["id"]: row["error_kind"] for row in planned(spec, maker, [file])}
    assert kinds == {"before": None, "long": "marker_absent", "after": None}


def test_a_job_over_hundreds_of_bad_rows_brings_every_row_back_once(tmp_path, capsys):
    rng = random.Random(6)
    bad = examples(bad_lines(), 300)
    good = [json.dumps({"id": f"good-{n}", "text": f"x = <mask:2> + {n}\n"}).encode() for n in range(20)]
    lines = [*bad, *good]
    rng.shuffle(lines)
    lines = without_twins(lines)
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    spec = {
        "task": {"kind": "infill", "mask": {"kind": "marker", "length": 2}},
        "input": {"path": str(tmp_path / "rows.jsonl")},
        "model": {"path": "builtin:asarm-tiny", "device": "cpu"},
        "decoder": {"kind": "parallel"},
        "output": {"path": str(tmp_path / "run")},
    }
    with pytest.MonkeyPatch.context() as patch:
        without_ray(patch)
        assert run(spec, tmp_path / "job.yaml") == 3, capsys.readouterr().err
    assert cli.main(["verify", str(tmp_path / "run")]) == 0
    rows = [row for table in latest_rows(passes_of(open_store(str(tmp_path / "run")))) for row in table.to_pylist()]
    assert len(rows) == len({row["id"] for row in rows}) == sum(bool(line.strip()) for line in lines)
    by_id = {row["id"]: row for row in rows}
    for number in range(20):
        row = by_id[f"good-{number}"]
        assert row["status"] == "ok" and row["text"].startswith("x = ") and row["text"].endswith(f" + {number}\n")
    failed = [row for row in rows if row["status"] == "failed"]
    assert len(failed) > 100 and all(row["error_kind"] and row["error_stage"] and row["error"] for row in failed)
    assert all(len(row["error"]) <= 2000 for row in failed)


def examples(strategy: st.SearchStrategy[bytes], count: int) -> list[bytes]:
    """The same `count` of what a strategy makes, each time."""
    found: list[bytes] = []

    @settings(times(count), derandomize=True, database=None)
    @given(strategy)
    def take(value: bytes) -> None:
        found.append(value)

    take()
    return found


def without_twins(lines: list[bytes]) -> list[bytes]:
    """The lines, without those whose id came before: a job with an id twice is refused."""
    seen: set[str] = set()
    kept = []
    for line in lines:
        try:
            row = json.loads(line)
            name = str(row.get("id", row.get("custom_id"))) if isinstance(row, dict) else ""
        except (ValueError, RecursionError):
            name = ""
        if not name or name not in seen:
            kept.append(line)
        seen.add(name)
    return kept
