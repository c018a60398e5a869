"""A row's id, key and text."""

import json
import uuid
from datetime import date
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from draftmill.actors.rows.row import messages_of, prompt_of, row_id, row_key, string_of, text_of
from draftmill.actors.rows.row_settings import RowRules
from draftmill.actors.task import Columns, Complete
from draftmill.decoders.draws.keys import sample_key
from draftmill.storage.errors import RowError
from draftmill.storage.inputs.inputs import list_inputs
from draftmill.storage.inputs.reader import iterate
from tests.actors.tokenizers_for_tests import model_info, recipe_of


def test_an_id_is_taken_where_there_is_one():
    assert row_id({"id": 7}, Columns()) == "7"
    assert row_id({"name": "a"}, Columns(id="name")) == "a"
    assert row_id({"text": "a"}, Columns()) is None
    assert row_id({"id": None}, Columns()) is None


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (None, "missing_column"),
        (1.5, "bad_row"),
        (True, "bad_row"),
        ("", "bad_row"),
        ([1], "bad_row"),
        ("x" * 5000, "bad_row"),
    ],
)
def test_a_named_id_must_be_usable(value, kind):
    with pytest.raises(RowError) as caught:
        row_id({"name": value}, Columns(id="name"))
    assert caught.value.kind == kind and len(str(caught.value)) < 1200


def test_a_rows_own_seed_replaces_the_jobs():
    columns = Columns(seed="s")
    assert row_key({"s": 3}, columns, job_seed=1, sample_id="a") == sample_key(3, "a")
    assert row_key({"s": 3}, Columns(), job_seed=1, sample_id="a") == sample_key(1, "a")
    for seed in (2**63, "x", "3.0", None, 1.0):
        with pytest.raises(RowError):
            row_key({"s": seed}, columns, job_seed=1, sample_id="a")


def test_text_falls_back_to_a_prompt():
    assert text_of({"prompt": "p"}, Columns()) == "p"
    assert text_of({"prompt": "p", "text": "t"}, Columns()) == "t"
    with pytest.raises(RowError, match=r"missing_column.*'text' is missing; the row has 'a'"):
        text_of({"a": 1}, Columns())


def test_text_that_is_stored_as_bytes_is_text():
    assert text_of({"text": "für".encode()}, Columns()) == "für"
    assert row_id({"id": b"a-7"}, Columns()) == "a-7"
    for read in (lambda row: text_of(row, Columns()), lambda row: row_id(row, Columns(id="text"))):
        with pytest.raises(RowError, match=r"bad_encoding.*'text' is not valid UTF-8"):
            read({"text": b"f\xfcr"})


OWN = uuid.UUID(int=7)
BIG = 10**37 + 1
WHOLE = {pa.int8(): 7, pa.uint8(): 7, pa.int16(): 7, pa.int32(): 7, pa.int64(): 7, pa.uint64(): 7, pa.decimal32(7, 0): 7,
         pa.decimal64(12, 0): 7, pa.decimal128(38, 0): 7, pa.decimal256(50, 0): 7, pa.decimal128(20, 2): 7,
         pa.dictionary(pa.int8(), pa.int64()): 7}  # fmt: skip
TEXTS = {pa.string(): "7", pa.large_string(): "7", pa.string_view(): "7", pa.binary(): b"7", pa.large_binary(): b"7",
         pa.binary_view(): b"7", pa.binary(1): b"7", pa.dictionary(pa.int8(), pa.string()): "7"}  # fmt: skip
NUMBERS = {pa.float16(): 7, pa.float32(): 7, pa.float64(): 7}
OTHERS = {pa.float64(): 7.5, pa.decimal128(20, 2): Decimal("7.5"), pa.bool_(): True, pa.date32(): date(2026, 1, 2),
          pa.list_(pa.int8()): [7], pa.struct({"a": pa.int8()}): {"a": 7}}  # fmt: skip


def outcome(read):
    try:
        return read()
    except RowError:
        return "refused"


def as_every_column(row: dict) -> list:
    """What a value is as an id, as a seed, as a text, as a number of tokens, and as a temperature."""
    task = Complete(kind="complete")
    rules = RowRules(recipe_of(task, {"max_new_tokens": "x"}), None, model_info())
    warm = RowRules(recipe_of(task, {"temperature": "x"}), None, model_info())
    seed = outcome(lambda: row_key(row, Columns(seed="x"), job_seed=1, sample_id="a"))
    return [
        outcome(lambda: row_id(row, Columns(id="x"))),
        {sample_key(7, "a"): 7}.get(seed, seed),
        outcome(lambda: string_of(row, "x")),
        outcome(lambda: rules.own_settings(row).max_new_tokens),
        outcome(lambda: warm.own_settings(row).temperature),
    ]


WHOLE_IS, TEXT_IS, NUMBER_IS = ["7", 7, "refused", 7, 7.0], ["7", 7, "7", 7, 7.0], ["refused"] * 3 + [7, 7.0]


def test_a_column_means_the_same_in_every_type_of_arrow(tmp_path):
    groups: list[tuple[dict, list]] = [(WHOLE, WHOLE_IS), (TEXTS, TEXT_IS), (NUMBERS, NUMBER_IS)]
    for kinds, expected in groups:
        for kind, value in kinds.items():
            given = Decimal(value) if pa.types.is_decimal(kind) else value
            array = pa.array([given]).dictionary_encode() if pa.types.is_dictionary(kind) else pa.array([given], kind)
            for row in written(tmp_path, pa.table({"x": array})):
                assert as_every_column(row) == expected, kind
    for kind, value in OTHERS.items():
        (row, *_) = written(tmp_path, pa.table({"x": pa.array([value], kind)}))
        assert as_every_column(row)[:3] == ["refused"] * 3, kind
    (row, *_) = written(tmp_path, pa.table({"x": pa.array([Decimal(BIG)], pa.decimal128(38, 0))}))
    assert row_id(row, Columns(id="x")) == str(BIG) and as_every_column(row)[1] == "refused"
    (row, *_) = written(tmp_path, pa.table({"x": pa.array([OWN.bytes], pa.uuid())}))
    assert row_id(row, Columns(id="x")) == str(OWN)


def written(folder, table: pa.Table) -> list[dict]:
    """The first row, by way of Arrow and, where it has the type, of Parquet."""
    with pa.ipc.new_file(folder / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    names = ["a.arrow"]
    if not any(is_kind(table.schema[0].type) for is_kind in (pa.types.is_decimal32, pa.types.is_decimal64)):
        pq.write_table(table, folder / "a.parquet")
        names.append("a.parquet")
    rows = [next(iterate(list_inputs(str(folder / name))[0])) for name in names]
    assert all(row.error is None for row in rows), table.schema
    return [row.values or {} for row in rows]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.jsonl", '{"x": 7}', WHOLE_IS),
        ("a.jsonl", '{"x": "7"}', TEXT_IS),
        ("a.jsonl", '{"x": 7.0}', NUMBER_IS),
        ("a.csv", "x\n7\n", TEXT_IS),
        ("a.tsv", 'x\ty\n"7"\t\n', TEXT_IS),
    ],
)
def test_a_column_means_the_same_in_json_and_csv(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    (row,) = iterate(list_inputs(str(tmp_path / name))[0])
    assert as_every_column(row.values or {}) == expected


def test_long_ids_and_leading_zeros_are_not_changed(tmp_path):
    (tmp_path / "a.jsonl").write_text(f'{{"id": {BIG}}}\n{{"id": "007"}}')
    (tmp_path / "b.csv").write_text("id\n007\n")
    ids = [row_id(row.values or {}, Columns()) for file in list_inputs(str(tmp_path)) for row in iterate(file)]
    assert ids == [str(BIG), "007", "007"]


CALLS = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"zip": null, "n": [1]}'}}]


def test_arguments_of_tool_calls_are_read_from_json_text():
    said = {"role": "assistant", "tool_calls": CALLS}
    (message,) = messages_of({"m": [said]}, "m")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"zip": None, "n": [1]}}
    assert said["tool_calls"] is CALLS and isinstance(CALLS[0]["function"]["arguments"], str), "a copy"  # type: ignore[index]
    for text, arguments in (("", {}), ('"a"', "a")):
        call = {"function": {"name": "f", "arguments": text}}
        (message,) = messages_of({"m": [said | {"tool_calls": [call]}]}, "m")
        assert message["tool_calls"][0]["function"]["arguments"] == arguments
    with pytest.raises(RowError, match=r"bad_messages.*the arguments of a tool call are not JSON: '\{oops'"):
        messages_of({"m": [said | {"tool_calls": [{"function": {"arguments": "{oops"}}]}]}, "m")
    for odd in (None, "x", [None], [{"function": None}], [{"function": {"arguments": {"a": 1}}}]):
        assert messages_of({"m": [said | {"tool_calls": odd}]}, "m")[0]["tool_calls"] == odd


@pytest.mark.parametrize("layout", [lambda t: t, lambda t: pa.large_list(t.value_type)], ids=["list", "large list"])
def test_keys_that_a_message_lacks_stay_absent_in_tables(tmp_path, layout):
    call = {"type": "function", "function": {"name": "f", "arguments": {"city": "x"}}}
    other = {"type": "function", "function": {"name": "g", "arguments": {"zip": 1}}}
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call, other]}]
    kind = layout(pa.array([talk]).type)
    meta = pa.array([{"a": None}], pa.struct({"a": pa.string()}))
    for row in written(tmp_path, pa.table({"messages": pa.array([talk], kind), "meta": meta})):
        assert json.dumps(messages_of(row, "messages"), sort_keys=True) == json.dumps(talk, sort_keys=True)
        assert row["meta"] == {"a": None}, "other columns have their nulls"


def test_a_request_without_custom_id_is_named():
    values = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    with pytest.raises(RowError, match="an OpenAI request without custom_id"):
        prompt_of(values, Columns(), Complete(kind="complete"), chat=False)
