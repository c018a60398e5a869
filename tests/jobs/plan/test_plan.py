"""A plan holds every row once, is the same whenever it is built, and knows when it belongs to another job."""

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.actors.rows.text import Tokenizer
from draftmill.jobs.config.spec import JobSpec, check_spec
from draftmill.jobs.drive.progress import Display
from draftmill.jobs.plan import packing
from draftmill.jobs.plan.fingerprint import changed_files, differences, results_key, with_files
from draftmill.jobs.plan.packing import PlanWriter
from draftmill.jobs.plan.plan import Plan, compare_plan, compare_settings, load_plan
from draftmill.jobs.plan.planning import make_plan
from draftmill.jobs.plan.resolve import Resolved, resolve
from draftmill.storage.errors import StoreError, UserError
from draftmill.storage.inputs.inputs import list_inputs
from draftmill.storage.inputs.rows import InputFile
from draftmill.storage.inputs.sources import with_hashes
from draftmill.storage.runs.unit_table import ROW_SCHEMA, TABLE_SCHEMA, PlanTable, part_name, parts_of
from draftmill.storage.stores.store import Store, open_store
from tests.actors.tokenizers_for_tests import byte_level, model_info
from tests.jobs.specs import infilling

HASHES: dict = {"model": "weights", "tokenizer": "tokenizer"}


def spec_for(path: Path, **changes) -> JobSpec:
    data = infilling(input={"path": str(path)})
    for key, value in changes.items():
        section, name = key.split("__")
        data.setdefault(section, {})[name] = value
    return check_spec(data)


def plan(spec: JobSpec, store: Store, epoch: int = 0) -> Plan:
    """A plan by what `resolve` would find, with a model that is only described."""
    inputs = list_inputs(*spec.input_places, delimiter=spec.input.delimiter)
    results = results_key(spec, model_info(), **HASHES)
    found = Resolved(spec, spec.recipe(), results, Path("m"), model_info(), byte_level(), inputs)
    return make_plan(found, store, Display(), epoch=epoch)


def compare(made: Plan, spec: JobSpec, **hashes: str) -> None:
    """Compare a plan with a spec, as when it is run again, with other hashes of checkpoints."""
    inputs = with_hashes(list_inputs(*spec.input_places))
    compare_plan(made, spec, with_files(results_key(spec, model_info(), **HASHES | hashes), inputs), inputs)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Two files of 30 and 10 rows with texts of many lengths, one row of them damaged."""
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [json.dumps({"id": f"r{number}", "text": "7" * (number * 7 % 50)}) for number in range(40)]
    lines[5] = '{"id": "r5", "text": '
    (folder / "a.jsonl").write_text("\n".join(lines[:30]))
    (folder / "b.jsonl").write_text("\n".join(lines[30:]))
    return folder


def names(store: Store) -> list[str]:
    return [stat.name for stat in store.list()]


def test_every_row_is_planned_once_longest_first(rows):
    store = open_store("memory://once")
    made = plan(spec_for(rows, output__unit_rows=8), store)
    planned = [row for unit in range(made.units) for row in made.unit_rows(unit)]
    assert sorted((row.file, row.row) for row in planned) == [(0, n) for n in range(30)] + [(1, n) for n in range(10)]
    assert [row.length for row in planned] == sorted((row.length for row in planned), reverse=True)
    assert made.rows == 40 and made.units == 5 and [size.rows for size in made.sizes()] == [8] * 5
    assert made.totals.tokens == sum(row.length for row in planned) == sum(size.tokens for size in made.sizes())
    assert made.totals.holes == sum(row.holes for row in planned)
    assert [names for _, names in made.unit_samples()] == [
        [(row.id, row.sample) for row in made.unit_rows(unit)] for unit in range(5)
    ]


def test_a_damaged_row_is_planned_as_a_failed_one(rows):
    made = plan(spec_for(rows, output__unit_rows=64), open_store("memory://damaged"))
    (bad,) = [row for row in made.unit_rows(0) if row.error_kind is not None]
    assert (bad.id, bad.error_kind, bad.length) == ("a.jsonl:5", "bad_json", 0)
    assert made.totals.errors == {"bad_json": 1}


def test_a_plan_is_the_same_each_time_and_reads_back_as_it_was(rows):
    stores = [open_store("memory://first"), open_store("memory://second")]
    spec = spec_for(rows, output__unit_rows=8)
    first, second = (plan(spec, store) for store in stores)
    assert [stores[0].get(name) for name in names(stores[0])] == [stores[1].get(name) for name in names(stores[1])]
    again = load_plan(stores[0])
    assert again == first and again.fingerprint == second.fingerprint
    assert load_plan(open_store("memory://empty")) is None


def test_what_does_not_change_results_does_not_change_the_plan(rows):
    base = plan(spec_for(rows), open_store("memory://base"))
    other = plan(
        spec_for(
            rows,
            workers__count=7,
            batching__max_rows=3,
            model__device="cpu",
            errors__attempts=9,
            output__trace="steps",
        ),
        open_store("memory://other"),
    )
    assert other.fingerprint == base.fingerprint
    assert list(other.unit_samples()) == list(base.unit_samples())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"decoder__k": 3}, "decoder.k was 5, is 3"),
        ({"sampling__temperature": 0.5}, "sampling.temperature was 1.0, is 0.5"),
        ({"task__mask": {"kind": "random", "rate": 0.25}}, "task.mask.rate was 0.5, is 0.25"),
        ({"input__limit": 4}, "input.limit was null, is 4"),
        ({"input__columns": {"text": "text"}}, 'input.columns.text was null, is "text"'),
        ({"model__dtype": "float64"}, 'model.dtype was "auto", is "float64"'),
        ({"model__weights": "int8"}, 'model.weights was "auto", is "int8"'),
    ],
)
def test_another_job_on_the_same_directory_is_refused_by_its_keys(rows, changes, named):
    store = open_store("memory://refused")
    store.delete("_plan.json")
    made = plan(spec_for(rows), store)
    compare(made, spec_for(rows))
    with pytest.raises(UserError) as caught:
        compare(made, spec_for(rows, **changes))
    assert caught.value.field == "output.path" and named in str(caught.value)


def test_a_changed_spec_is_refused_before_weights_are_hashed(tmp_path, monkeypatch):
    file, store = tmp_path / "rows.jsonl", open_store(str(tmp_path / "run"))
    file.write_text('{"text": "def f"}')
    same = spec_for(file, model__path="builtin:asarm-tiny", output__path=str(tmp_path / "run"))
    make_plan(resolve(same, store), store, Display())
    assert resolve(same, store).plan is not None

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the model is looked at")

    monkeypatch.setattr("draftmill.jobs.plan.resolve.fetch_model", never)
    monkeypatch.setattr("draftmill.jobs.plan.resolve.model_hash", never)
    other = spec_for(
        file, model__path="builtin:asarm-tiny", output__path=str(tmp_path / "run"), decoder__k=2, input__limit=9
    )
    with pytest.raises(UserError, match=r"decoder\.k was 5, is 2; input\.limit was null, is 9") as caught:
        resolve(other, store)
    assert caught.value.field == "output.path"


def test_other_weights_are_named(rows):
    made = plan(spec_for(rows), open_store("memory://weights"))
    named = {"model": "model.checkpoint", "tokenizer": "model.tokenizer", "adapter": "model.adapter"}
    for field, key in (named | {"head": "decoder.head, its files,"}).items():
        with pytest.raises(UserError, match=f"{key} was"):
            compare(made, spec_for(rows), **{field: "x"})


def test_a_changed_input_is_named(rows):
    made = plan(spec_for(rows), open_store("memory://inputs"))
    (rows / "b.jsonl").write_text("{}")
    (rows / "c.jsonl").write_text("{}")
    with pytest.raises(UserError) as caught:
        compare(made, spec_for(rows))
    assert caught.value.field == "input.path"
    assert "b.jsonl (" in str(caught.value) and "c.jsonl (new)" in str(caught.value)
    assert "a.jsonl" not in str(caught.value)


def small_job(folder: Path, **changes) -> tuple[JobSpec, Store, Path]:
    """A job of the builtin model over one file of two rows, its run directory, and the file."""
    file = folder / "rows.jsonl"
    file.write_text('{"text": "def f"}\n{"text": "def g"}\n')
    spec = spec_for(file, model__path="builtin:asarm-tiny", output__path=str(folder / "run"), **changes)
    return spec, open_store(str(folder / "run")), file


def test_an_input_that_was_only_touched_does_not_refuse_a_resume(tmp_path):
    spec, store, file = small_job(tmp_path)
    made = make_plan(resolve(spec, store), store, Display())
    assert made.files[0].sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    os.utime(file, (1, 1))
    again = resolve(spec, store)
    assert again.plan is not None and again.plan.fingerprint == made.fingerprint
    assert make_plan(again, store, Display()).fingerprint == made.fingerprint, "the plan that is there is taken"
    shutil.copy(file, tmp_path / "copy")
    (tmp_path / "copy").rename(file)
    assert resolve(spec, store).plan is not None, "a copy has the same bytes, too"


def test_an_input_of_the_same_size_and_other_bytes_refuses_a_resume(tmp_path):
    spec, store, file = small_job(tmp_path)
    make_plan(resolve(spec, store), store, Display())
    file.write_bytes(file.read_bytes().replace(b"def g", b"def h"))
    os.utime(file, (1, 1))
    with pytest.raises(UserError, match=r"rows\.jsonl \(changed\)") as caught:
        resolve(spec, store)
    assert caught.value.field == "input.path"


def test_an_input_is_read_for_its_hash_only_where_its_date_changed(tmp_path, monkeypatch):
    spec, store, file = small_job(tmp_path)
    make_plan(resolve(spec, store), store, Display())

    def never(file: InputFile) -> InputFile:
        raise AssertionError(f"{file.name} is read")

    monkeypatch.setattr("draftmill.storage.inputs.sources._with_hash", never)
    resolve(spec, store)
    file.write_text("of another size")
    with pytest.raises(UserError, match=r"rows\.jsonl \(changed, 36 -> 15 bytes\)"):
        resolve(spec, store)


def test_a_few_rows_of_a_huge_file_are_planned_without_hashing_it(tmp_path, monkeypatch):
    monkeypatch.setattr("draftmill.jobs.plan.planning.LIMITED_HASH_BYTES", 8)
    spec, store, file = small_job(tmp_path, input__limit=1)
    assert make_plan(resolve(spec, store), store, Display()).files[0].sha256 is None
    assert resolve(spec, store).plan is not None
    os.utime(file, (1, 1))
    with pytest.raises(UserError, match=r"rows\.jsonl \(changed"):
        resolve(spec, store)


def test_an_object_that_was_uploaded_again_is_known_by_its_etag():
    before = InputFile("s3://b/a.jsonl", "a.jsonl", 7, '"e"', 1.0, "jsonl")
    assert changed_files([before], [dataclasses.replace(before, mtime_s=2.0)]) == []
    assert changed_files([before], [dataclasses.replace(before, etag='"f"')]) == ["a.jsonl (changed)"]
    assert changed_files([before], [dataclasses.replace(before, size=7000)]) == ["a.jsonl (changed, 7 -> 7,000 bytes)"]


def test_inputs_that_moved_are_the_same_inputs(rows):
    inputs = with_hashes(list_inputs(str(rows)))
    moved = [dataclasses.replace(file, uri=f"/elsewhere/{file.name}") for file in inputs]
    assert with_files({"input": {}}, moved) == with_files({"input": {}}, inputs)


def test_limit_counts_rows_over_all_files(rows):
    made = plan(spec_for(rows, input__limit=33), open_store("memory://limit"))
    assert made.rows == 33 and sum(row.file == 1 for unit in range(made.units) for row in made.unit_rows(unit)) == 3


@pytest.mark.parametrize(
    ("content", "columns", "field", "message"),
    [
        ("", {}, "input.path", "no rows in 1 file"),
        ('{"id": "a", "text": "x"}\n{"id": "b", "text": "x"}\n{"id": "a", "text": "x"}', {}, "input.columns.id",
         "the id 'a' occurs twice: row 0 of rows.jsonl and row 2 of rows.jsonl"),
        ('{"body": "x"}\n{"body": "y"}', {}, "input.columns", "the column 'text' is missing; the row has 'body'"),
        ('{"text": "x"}\n{"text": "y"}', {"id": "name"}, "input.columns", "the column 'name' is missing; the row has 'text'"),
        ('{"bo\n{"body": "x"}\n[1]', {}, "input.columns", "no row has all columns: the column 'text' is missing"),
        ('{"id": "a", "text": 3}\n{"id": "b"}', {}, "input.columns", "the column 'text' is missing; the row has 'id'"),
        ('{"n": 3}\n{"ids": [5, 6]}', {"tokens": "ids", "seed": "n"}, "input.columns", "the column 'ids' is missing; "),
    ],
)  # fmt: skip
def test_an_unusable_input_leaves_nothing_behind(tmp_path, content, columns, field, message):
    file, store = tmp_path / "rows.jsonl", open_store(str(tmp_path / "run"))
    file.write_text(content)
    with pytest.raises(UserError) as caught:
        plan(spec_for(file, input__columns=columns), store)
    assert caught.value.field == field and message in str(caught.value)
    assert names(store) == []


def test_a_row_without_a_column_fails_alone(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"body": "x"}\n{"text": "y"}')
    assert plan(spec_for(file), open_store("memory://alone")).totals.errors == {"missing_column": 1}


@pytest.mark.parametrize(
    ("content", "field", "message"),
    [
        (
            "id;text\n1;x\n",
            "input.columns",
            "the header of rows.csv looks delimited by ';': set input.delimiter to ';'",
        ),
        ("id;text\n1;x, y\n2;a, b\n", "input.delimiter", "none of 2 rows can be read; the header of rows.csv looks"),
    ],
)
def test_a_csv_with_another_delimiter_is_refused_with_a_hint(tmp_path, content, field, message):
    file = tmp_path / "rows.csv"
    file.write_text(content)
    with pytest.raises(UserError) as caught:
        plan(spec_for(file), open_store("memory://delimited"))
    assert caught.value.field == field and message in str(caught.value)
    spec = spec_for(file, input__delimiter=";")
    made = plan(spec, open_store(str(tmp_path / "run")))
    assert made.totals.errors == {} and made.results["input"]["delimiter"] == ";" and made.files[0].delimiter == ";"
    with pytest.raises(UserError, match=r"input\.delimiter was \";\", is null"):
        compare_settings(made, spec_for(file))
    with pytest.raises(UserError, match=r"input\.keep was \[\], is \[\"id\"\]"):
        compare_settings(made, spec_for(file, input__delimiter=";", input__keep=["id"]))


def test_fields_of_structs_are_ids_and_texts(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"meta": {"id": "a"}, "doc": {"body": "xyz"}}\n{"meta": {"id": "b"}, "doc": {}}\n')
    columns = {"id": "meta.id", "text": "doc.body"}
    made = plan(spec_for(file, input__columns=columns), open_store("memory://fields"))
    assert {row.id: row.error_kind for row in made.unit_rows(0)} == {"a": None, "b": "missing_column"}
    with pytest.raises(UserError, match=r"the column 'doc\.text' is missing; the row has 'meta', 'doc'"):
        plan(spec_for(file, input__columns={"text": "doc.text"}), open_store("memory://nofields"))
    with file.open("a") as more:
        more.write('{"meta": {"id": "a"}, "doc": {"body": "again"}}\n')
    with pytest.raises(UserError, match="the id 'a' occurs twice"):
        plan(spec_for(file, input__columns=columns), open_store("memory://twice"))


def test_rows_that_none_can_read_are_failed_rows(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": \n[1]')
    assert plan(spec_for(file), open_store("memory://unread")).totals.errors == {"bad_json": 1, "bad_row": 1}


def test_parts_left_by_an_interrupted_planner_are_replaced(rows):
    store = open_store("memory://stale")
    store.put(part_name(7), b"of another plan")
    made = plan(spec_for(rows), store)
    assert names(store) == ["_plan.json", part_name(0)] and made.units == 2


def test_a_planner_that_wakes_up_late_touches_nothing_of_the_next_drivers_plan(rows):
    store = open_store("memory://late")
    late = PlanWriter(store, window=10, unit_rows=4, epoch=1)
    late.add(rows_table([3] * 12))
    made = plan(spec_for(rows), store, epoch=2)
    before = {name: store.get(name) for name in names(store)}
    packing.discard_parts(store, 1)
    late.finish()
    assert {name: store.get(name) for name in before} == before
    assert sum(len(made.unit_rows(unit)) for unit in range(made.units)) == made.rows == 40


def test_a_plan_that_another_driver_has_made_meanwhile_is_taken_over(rows):
    store, spec = open_store("memory://meanwhile"), spec_for(rows)
    first = plan(spec, store, epoch=1)
    before = names(store)
    assert plan(spec, store, epoch=2).fingerprint == first.fingerprint
    assert names(store) == before == ["_plan.json", part_name(0, 1)]
    with pytest.raises(UserError, match="holds another job"):
        plan(spec_for(rows, task__mask={"kind": "random", "rate": 0.1}), store, epoch=3)


def test_other_files_of_a_draft_head_are_named_by_the_key_of_the_spec():
    before, now = ({"model": {"head": digit * 64}} for digit in "ab")
    (said,) = differences(before, now)
    assert said == 'decoder.head, its files, was "aaaaaaaaaaa...", is "bbbbbbbbbbb..."'


def test_a_damaged_plan_is_refused(rows):
    store = open_store("memory://broken")
    store.put("_plan.json", b"{")
    with pytest.raises(UserError, match="damaged"):
        load_plan(store)


def rows_table(lengths: list[int], first: int = 0) -> pa.Table:
    count = len(lengths)
    columns = [[0] * count, list(range(first, first + count)), [None] * count, [f"r{first + n}" for n in range(count)]]
    return pa.Table.from_arrays(
        [
            pa.array(values, field.type)
            for values, field in zip([*columns, lengths, lengths, [None] * count, [0] * count], ROW_SCHEMA, strict=True)
        ],
        schema=ROW_SCHEMA,
    )


def test_windows_and_parts_hold_every_unit(monkeypatch):
    monkeypatch.setattr(packing, "PART_UNITS", 3)
    store = open_store("memory://parts")
    writer = PlanWriter(store, window=10, unit_rows=4)
    for start in range(0, 42, 7):
        writer.add(rows_table([(start + n) % 9 for n in range(7)], start))
    writer.finish()
    assert [(part["first"], part["units"]) for part in writer.parts] == [(0, 3), (3, 3), (6, 3), (9, 3), (12, 1)]
    table = PlanTable(store, parts_of(writer.parts))
    units = [table.unit_rows(unit) for unit in range(13)]
    assert sorted(row.row for rows in units for row in rows) == list(range(42))
    for number, rows in enumerate(units):
        assert all(row.unit == number and row.row // 10 == rows[0].row // 10 for row in rows)
        assert [row.length for row in rows] == sorted((row.length for row in rows), reverse=True)
    with pytest.raises(StoreError, match="no unit 13"):
        table.unit_rows(13)
    listed = writer.parts
    assert [list(part["windows"]) for part in listed] == [[0], [3], [6], [9], [12]]
    assert listed[0]["unit_rows"].itemsize + listed[0]["unit_tokens"].itemsize == 12, "there may be millions of units"


def test_a_plan_knows_the_windows_of_its_units(rows):
    made = plan(spec_for(rows, output__unit_rows=4, batching__window=10), open_store("memory://windows"))
    windows = [size.window for size in made.sizes()]
    planned = [{(30 * row.file + row.row) // 10 for row in made.unit_rows(unit)} for unit in range(made.units)]
    assert len(set(windows)) == 4 and [{window} for window in windows] == planned


def test_a_window_ends_early_where_its_rows_are_long(monkeypatch):
    monkeypatch.setattr(packing, "WINDOW_TOKENS", 40)
    store = open_store("memory://long")
    writer = PlanWriter(store, window=10, unit_rows=100)
    lengths = [1] * 12 + [30, 5, 5, 100, 7] + [8] * 6
    for start in range(0, len(lengths), 3):
        writer.add(rows_table(lengths[start : start + 3], start))
    writer.finish()
    table = PlanTable(store, parts_of(writer.parts))
    windows = [sorted(row.row for row in table.unit_rows(unit)) for unit in range(5)]
    # ten rows; 1 + 1 + 30 + 5 + 5 tokens; a row that has more than all by itself; 7 + 5 * 8; the rest
    assert windows == [[*range(10)], [*range(10, 15)], [15], [*range(16, 22)], [22]]


def test_the_unit_table_is_plain_parquet_with_a_row_group_for_each_unit(rows, tmp_path):
    made = plan(spec_for(rows, output__unit_rows=8), open_store(str(tmp_path / "run")))
    file = pq.ParquetFile(tmp_path / "run" / part_name(0))
    assert file.num_row_groups == made.units and file.schema_arrow.equals(TABLE_SCHEMA)
    assert pq.read_table(tmp_path / "run" / "plan").num_rows == made.rows


class Panic(BaseException):
    """What a fault in the tokenizer's native code looks like: no Exception."""


@pytest.mark.parametrize("trouble", [Exception("bare"), Panic("out of bounds"), MemoryError()], ids=repr)
def test_a_row_on_which_the_tokenizer_fails_is_planned_as_a_failed_one(rows, monkeypatch, trouble):
    strange = "7" * (7 * 7 % 50)
    encode = Tokenizer.encode

    def failing(self: Tokenizer, text: str) -> list[int]:
        if text == strange:
            raise trouble
        return encode(self, text)

    monkeypatch.setattr(Tokenizer, "encode", failing)
    made = plan(spec_for(rows, output__unit_rows=64), open_store(f"memory://{trouble!r}"))
    assert made.rows == 40 and made.totals.errors == {"bad_json": 1, "tokenize_error": 1}
    (bad,) = [row for row in made.unit_rows(0) if row.error_kind == "tokenize_error"]
    assert bad.id == "r7"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_planning_is_no_rows_error(rows, monkeypatch, stop):
    def interrupted(self: Tokenizer, text: str) -> list[int]:
        raise stop

    monkeypatch.setattr(Tokenizer, "encode", interrupted)
    with pytest.raises(stop):
        plan(spec_for(rows), open_store("memory://interrupted"))


def test_names_of_constraints_that_no_marker_has_are_refused(tmp_path):
    rows = tmp_path / "rows.jsonl"
    spec = spec_for(
        rows,
        task__mask={"kind": "marker", "marker": "[[...]]"},
        task__constraint={"int": {"regex": "[0-9]+"}, "word": {"regex": "[a-z]+"}},
    )
    rows.write_text('{"text": "x [[age]]"}\n{"text": "[[]]"}\n')
    with pytest.raises(UserError, match=r"task\.constraint: no marker of any row names one of them: 'int', 'word'"):
        plan(spec, open_store(str(tmp_path / "run")))
    assert not list(open_store(str(tmp_path / "run")).list())
    rows.write_text('{"text": "x [[age]]"}\n{"text": "[[word]]"}\n')
    assert plan(spec, open_store(str(tmp_path / "run"))).rows == 2
