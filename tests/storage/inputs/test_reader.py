"""Rows out of every format: bad ones fail alone, all can be read again one by one, memory stays flat."""

import gzip
import json
import random
import tracemalloc
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.storage.errors import UserError
from draftmill.storage.inputs.inputs import list_inputs
from draftmill.storage.inputs.lines import MAX_LEVELS
from draftmill.storage.inputs.reader import delimiter_hint, iterate, read_rows
from draftmill.storage.inputs.rows import InputFile, Row
from draftmill.storage.inputs.tables import BatchCache, group_batches
from draftmill.storage.stores.store import Place


def one_file(path: Path, data: bytes) -> InputFile:
    path.write_bytes(data)
    return list_inputs(str(path))[0]


def arrow_file(path: Path, table: pa.Table, new=pa.ipc.new_file, **options) -> InputFile:
    with new(path, table.schema, **options) as writer:
        writer.write_table(table, max_chunksize=130)
    return list_inputs(str(path))[0]


def rows_of(path: Path, data: bytes, **options) -> list[Row]:
    """The file's rows, after checking that every one is found again by itself."""
    file = one_file(path, data)
    rows = list(iterate(file, **options))
    check_again(file, rows, **options)
    return rows


def check_again(file: InputFile, rows: list[Row], **options) -> None:
    mixed = random.Random(0).sample(rows, len(rows))
    for picked in (mixed, mixed[: len(rows) // 3], rows[-1:]):
        for keep in (True, False):
            wanted = [(row.row, row.offset if keep else None) for row in picked]
            assert [told(row) for row in read_rows(file, wanted, **options)] == [told(row) for row in picked]


def told(row: Row) -> tuple:
    return row.row, row.offset, row.values, str(row.error)


def kinds(rows: list[Row]) -> list:
    """Each row's error kind, or its values."""
    return [row.error.kind if row.error else row.values for row in rows]


def test_a_bad_jsonl_line_fails_alone(tmp_path):
    data = b'{"text": "a"}\n{"text": \n\n   \n[1, 2]\n"x"\n{"text": "\xff"}\n{"text": "b"}\n{"text": "to'
    rows = rows_of(tmp_path / "a.jsonl", data)
    expected = [{"text": "a"}, "bad_json", "bad_row", "bad_row", "bad_encoding", {"text": "b"}, "bad_json"]
    assert kinds(rows) == expected
    assert [row.row for row in rows] == [0, 1, 4, 5, 6, 7, 8]
    assert all(row.error.stage == "read" for row in rows if row.error)


@pytest.mark.parametrize(("name", "at"), [("a.jsonl", 26), ("a.txt", 26), ("a.csv", 26), ("a.md", 26)])
def test_a_row_in_latin_1_says_which_byte_and_what_to_do(tmp_path, name, at):
    (row,) = [one for one in rows_of(tmp_path / name, b'{"b": "first one"}\n{"b": "\xe9"}\n') if one.error]
    assert row.error is not None and row.error.message.startswith(f"not valid UTF-8: 0xe9 near byte {at} of the file; ")
    assert row.error.message.endswith("`iconv -f latin1 -t utf-8` converts Latin-1")


@pytest.mark.parametrize("levels", [MAX_LEVELS, MAX_LEVELS + 1])
def test_how_deep_a_row_may_be_nested_does_not_depend_on_the_caller(levels, tmp_path):
    (tmp_path / "rows.jsonl").write_text(
        '{"a": ' + "[" * (levels - 1) + "]" * (levels - 1) + "}\n" + '{"a": ' * levels + "1" + "}" * levels
    )
    (file,) = list_inputs(str(tmp_path / "rows.jsonl"))

    def read(calls: int) -> list[str | None]:
        return read(calls - 1) if calls else [None if row.error is None else row.error.kind for row in iterate(file)]

    assert read(0) == read(500) == [None if levels <= MAX_LEVELS else "bad_json"] * 2


def test_jsonl_types_may_change_from_line_to_line(tmp_path):
    values = [{"id": 1}, {"id": "x"}, {"id": None, "more": [None, {"a": [None]}]}, {}, {"id": 1e400}, {"id": 10**300}]
    data = "".join(json.dumps(value) + "\n" for value in values).encode()
    assert kinds(rows_of(tmp_path / "a.jsonl", data)) == values


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (b"[" * 100_000, "bad_json"),
        (b'{"a": ' * 100_000 + b"1" + b"}" * 100_000, "bad_json"),
        (b'{"n": ' + b"9" * 10_000 + b"}", "bad_json"),
        (b'{"text": "\\ud800"}', "bad_encoding"),
        (b'{"\\udfff": 1}', "bad_encoding"),
        (b'{"text": "a\0b"}', "bad_json"),
        (b"\xff\xfe{\0}\0", "bad_encoding"),
        (b"null", "bad_row"),
    ],
)
def test_a_hostile_jsonl_line_is_a_failed_row_between_good_ones(line, kind, tmp_path):
    rows = rows_of(tmp_path / "a.jsonl", b'{"a": 1}\n' + line + b'\n{"a": 2}\n')
    assert kinds(rows) == [{"a": 1}, kind, {"a": 2}]


def test_marks_and_line_ends_of_other_systems_do_not_show(tmp_path):
    assert kinds(rows_of(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"a": 1}\r\n{"a": 2}\r\n')) == [{"a": 1}, {"a": 2}]
    assert kinds(rows_of(tmp_path / "a.txt", b"\xef\xbb\xbfone\r\n\r\ntwo")) == [
        {"text": "one"},
        {"text": ""},
        {"text": "two"},
    ]
    assert kinds(rows_of(tmp_path / "a.csv", b"\xef\xbb\xbfa,b\r\n1,2\r\n")) == [{"a": "1", "b": "2"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv", "a.jsonl.gz", "a.csv.zst"])
def test_an_empty_file_has_no_rows(name, tmp_path):
    assert rows_of(tmp_path / name, b"") == []


def test_a_json_array_is_refused_with_a_way_out(tmp_path):
    file = one_file(tmp_path / "a.json", b'\n [\n {"text": "a"}\n]\n')
    with pytest.raises(UserError, match="one object a line"):
        list(iterate(file))
    assert kinds(rows_of(tmp_path / "b.json", b'{"text": "a"}\n')) == [{"text": "a"}]


def test_an_openai_batch_request_gives_its_prompt_or_messages(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    lines = [
        {"custom_id": "r1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "p", "max_tokens": 5}},
        {"custom_id": "r2", "body": {"messages": messages}},
        {"custom_id": "r3", "text": "not a request"},
        {"custom_id": "r4", "body": {"prompt": ["p"]}},
        {"custom_id": "r5", "body": {"prompt": ["p", "q"]}},
        {"custom_id": "r6", "body": None},
        {"custom_id": 7, "body": {"prompt": "p"}},
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    first, second, third, fourth, fifth, sixth, seventh = (row.values for row in rows_of(tmp_path / "a.jsonl", data))
    assert first is not None and (first["id"], first["prompt"]) == ("r1", "p")
    assert second is not None and (second["id"], second["messages"]) == ("r2", messages)
    assert third == lines[2]
    assert fourth is not None and (fourth["id"], fourth["prompt"]) == ("r4", "p")
    assert fifth is not None and fifth["prompt"] == ["p", "q"], "which of them is meant, the row can't say"
    assert sixth is not None and sixth["id"] == "r6", "its failure is looked up by its id"
    assert seventh is not None and (seventh["id"], seventh["prompt"]) == (7, "p")


def test_a_ten_megabyte_row_is_a_row(tmp_path):
    text = "x" * 10_000_000
    data = json.dumps({"text": text}).encode()
    assert kinds(rows_of(tmp_path / "a.jsonl", b'{"a": 1}\n' + data + b"\n")) == [{"a": 1}, {"text": text}]
    assert kinds(rows_of(tmp_path / "a.csv", b"text\n" + text.encode() + b"\n")) == [{"text": text}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "a.csv", "a.jsonl.gz"])
def test_a_line_beyond_the_bound_fails_alone(name, tmp_path, monkeypatch):
    monkeypatch.setattr("draftmill.storage.inputs.lines.MAX_ROW_BYTES", 100)
    good = {"a.jsonl": b'{"a": 1}', "a.jsonl.gz": b'{"a": 1}'}.get(name, b"1")
    data = b"a\n" * (name == "a.csv") + b"\n".join([good, b"7" * 5000, good, b'"' + b"7" * 101, good])
    rows = rows_of(tmp_path / name, gzip.compress(data) if name.endswith(".gz") else data)
    failed = [row.error is not None for row in rows]
    assert failed == [False, True, False, True, False]
    assert {row.error.kind for row in rows if row.error} == {"bad_row"}


def test_csv_quotes_hold_commas_quotes_and_lines(tmp_path):
    data = b'id,text\n1,"a, ""b""\nc"\n\n2,plain\n'
    assert kinds(rows_of(tmp_path / "a.csv", data)) == [{"id": "1", "text": 'a, "b"\nc'}, {"id": "2", "text": "plain"}]
    assert kinds(rows_of(tmp_path / "a.tsv", b"id\ttext\n1\ta,b\n")) == [{"id": "1", "text": "a,b"}]


def test_a_csv_file_may_have_another_delimiter(tmp_path):
    (tmp_path / "a.csv").write_text('id;text\n1;"a, b; c"\n2;d\n')
    (file,) = list_inputs(str(tmp_path), delimiter=";")
    rows = list(iterate(file))
    assert [row.values for row in rows] == [{"id": "1", "text": "a, b; c"}, {"id": "2", "text": "d"}]
    assert list(read_rows(file, [(1, rows[1].offset)])) == [rows[1]]
    assert delimiter_hint([file]) == ""
    for header, named in (("id;text", "';'"), ("id\ttext", "'tab'"), ("id|text", "'|'")):
        (tmp_path / "a.csv").write_text(f"{header}\n")
        assert delimiter_hint(list_inputs(str(tmp_path))).endswith(f"set input.delimiter to {named}")


FIELDS = [
    {"meta": {"lang": "en", "deep": {"n": 1, "text": "x" * 50}}, "a.b": "literal", "a": {"b": "inside"}},
    {"meta": {"lang": "de", "deep": None}, "a.b": None, "a": {"b": "inside"}},
    {"meta": None, "a.b": "literal", "a": None},
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_a_field_of_a_struct_is_a_column(tmp_path, name):
    table = pa.Table.from_pylist(FIELDS)
    if name == "a.jsonl":
        (tmp_path / name).write_text("\n".join(map(json.dumps, FIELDS)))
    elif name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        arrow_file(tmp_path / name, table)
    (file,) = list_inputs(str(tmp_path))
    wanted = {"text": "meta.deep.text", "id": "meta.lang", "seed": "a.b", "prompt": "meta.absent", "suffix": "gone.x"}
    rows = list(iterate(file, columns=wanted))
    found = [{key: (row.values or {}).get(column) for key, column in wanted.items()} for row in rows]
    assert found == [
        {"text": "x" * 50, "id": "en", "seed": "literal", "prompt": None, "suffix": None},
        {"text": None, "id": "de", "seed": None, "prompt": None, "suffix": None},
        {"text": None, "id": None, "seed": "literal", "prompt": None, "suffix": None},
    ]
    assert list(read_rows(file, [(row.row, row.offset) for row in rows], columns=wanted)) == rows


def test_of_a_struct_in_parquet_only_the_wanted_field_is_read(tmp_path):
    rows = [{"meta": {"lang": "en", "page": "x" * 100, "at": {"n": 1, "m": 2}}, "text": "t"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (file,) = list_inputs(str(tmp_path))
    (batch,) = group_batches(file, 0, ("meta.at.n", "meta.lang", "gone.x", "text"))
    assert batch.to_pylist() == [{"meta": {"lang": "en", "at": {"n": 1}}, "text": "t"}]
    (batch,) = group_batches(file, 0, ("meta.at",))
    assert batch.to_pylist() == [{"meta": {"at": {"n": 1, "m": 2}}}]


def test_a_broken_csv_record_loses_no_neighbour(tmp_path):
    data = b'id,text\n1,ok\n2,"never ends\n3,ok\n4\n5,a,b\n6,\xff\n7,"x"y\n8,ok\n'
    found = [row.error.kind if row.error else (row.values or {})["id"] for row in rows_of(tmp_path / "a.csv", data)]
    assert found == ["1", "bad_row", "3", "bad_row", "bad_row", "bad_encoding", "bad_row", "8"]


def test_a_csv_header_that_cannot_be_used_is_the_users_error(tmp_path):
    for data in (b"a,a\n1,2\n", b"\xff,b\n1,2\n", b'"a\n1\n'):
        with pytest.raises(UserError, match="header"):
            list(iterate(one_file(tmp_path / "a.csv", data)))


def test_a_source_file_is_one_row_kept_to_the_byte(tmp_path):
    text = "def f():\r\n\treturn 'é'\n\n"
    assert kinds(rows_of(tmp_path / "a.py", text.encode())) == [{"text": text}]
    assert kinds(rows_of(tmp_path / "a.py", b"")) == [{"text": ""}]
    assert kinds(rows_of(tmp_path / "a.py", b"caf\xe9")) == ["bad_encoding"]


def test_chunks_end_at_lines_and_join_to_the_text(tmp_path):
    text = "one\ntwo\n" + "long " * 10 + "end\n\n\n\n      \n   é\u4e2d\U0001f600\nlast"
    rows = rows_of(tmp_path / "a.py", text.encode(), chunk_chars=12)
    pieces = [(row.values or {})["text"] for row in rows]
    assert max(map(len, pieces)) <= 12 and pieces[0] == "one\ntwo\n"
    assert "".join("".join(pieces).split()) == "".join(text.split())
    assert [row.row for row in rows] == list(range(len(rows)))
    assert all(
        text.encode()[row.offset or 0 :].startswith(piece.encode()) for row, piece in zip(rows, pieces, strict=True)
    )


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("ab\n \u00e9\u4e2d\U0001f600"), max_size=200), chunk_chars=st.integers(1, 20))
def test_chunks_of_any_text_are_whole(text, chunk_chars, tmp_path_factory):
    file = one_file(tmp_path_factory.mktemp("p") / "a.txt", text.encode())
    pieces = [(row.values or {})["text"] for row in iterate(file, chunk_chars=chunk_chars)]
    assert all(0 < len(piece) <= chunk_chars and piece.strip() for piece in pieces)
    assert "".join("".join(pieces).split()) == "".join(text.split())


def test_a_bad_byte_fails_its_piece_alone(tmp_path):
    rows = rows_of(tmp_path / "a.py", b"good line\n" * 5 + b"caf\xe9 line\n" + b"good line\n" * 5, chunk_chars=20)
    assert [row.error is not None for row in rows].count(True) == 1
    assert len(rows) == 6


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=300), name=st.sampled_from(["a.jsonl", "a.txt", "a.csv", "a.py", "p.md"]))
def test_any_bytes_are_rows_or_a_clear_error(data, name, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    options = {"chunk_chars": 9} if name == "p.md" else {}
    try:
        rows_of(folder / name, data, **options)
    except UserError as error:
        assert name == "a.csv" and "header" in str(error)


def packed(data: bytes, codec: str) -> bytes:
    return gzip.compress(data) if codec == "gzip" else bytes(pa.Codec("zstd").compress(data, asbytes=True))


LINES = b"".join(b'{"n": %d, "text": "row %d"}\n' % (index, index) for index in range(1500))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("ending", "codec"), [(".gz", "gzip"), (".zst", "zstd")])
def test_compressed_lines_are_the_same_rows(ending, codec, tmp_path):
    whole = packed(LINES, codec)
    assert kinds(rows_of(tmp_path / f"a.jsonl{ending}", whole)) == kinds(rows_of(tmp_path / "a.jsonl", LINES))
    twice = rows_of(tmp_path / f"two.jsonl{ending}", whole + whole)
    assert len(twice) == 3000


@pytest.mark.parametrize(("ending", "codec"), [(".gz", "gzip"), (".zst", "zstd")])
def test_compression_that_breaks_off_is_an_error_and_not_an_end(ending, codec, tmp_path):
    whole = packed(LINES, codec)
    for broken in (whole[: len(whole) // 2], whole[:-3], whole + b"junk", b"not compressed"):
        with pytest.raises(UserError, match=r"^input\.path: .*damaged"):
            list(iterate(one_file(tmp_path / f"a.jsonl{ending}", broken)))


def parquet_file(path: Path, table: pa.Table, **options) -> InputFile:
    pq.write_table(table, path, **options)
    return list_inputs(str(path))[0]


TABLE = pa.table({"id": list(range(1000)), "text": [f"row {index}" for index in range(1000)], "other": [None] * 1000})


ZSTD = pa.ipc.IpcWriteOptions(compression="zstd")


WRITERS: dict = {
    "parquet": lambda folder: parquet_file(folder / "a.parquet", TABLE),
    "parquet in groups": lambda folder: parquet_file(folder / "a.parquet", TABLE, row_group_size=77),
    "arrow stream": lambda folder: arrow_file(folder / "a.arrow", TABLE, pa.ipc.new_stream),
    "arrow file": lambda folder: arrow_file(folder / "a.arrow", TABLE, options=ZSTD),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("cached", [True, False])
def test_columnar_rows_are_read_all_or_singly(writer, cached, tmp_path, monkeypatch):
    if not cached:
        monkeypatch.setattr("draftmill.storage.inputs.tables._BATCHES", BatchCache(kept_bytes=0))
    file = WRITERS[writer](tmp_path)
    rows = list(iterate(file))
    assert [row.values for row in rows] == TABLE.to_pylist()
    check_again(file, rows)
    columns = {"id": "id", "text": "text", "reference": "absent"}
    narrow = list(iterate(file, columns=columns))
    assert narrow[5].values == {"id": 5, "text": "row 5"}
    check_again(file, narrow, columns=columns)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kept_bytes", [2**28, 20_000])
def test_row_groups_that_are_read_in_turn_do_not_disturb_each_other(kept_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr("draftmill.storage.inputs.tables._BATCHES", BatchCache(kept_bytes))
    monkeypatch.setattr("draftmill.storage.inputs.tables.BATCH_ROWS", 64)
    monkeypatch.setattr("draftmill.storage.inputs.tables.SHARED_BYTES", 1000)
    texts = [f"row {row} " + "x" * (row % 97) for row in range(5000)]
    table = pa.table({"text": texts, "word": [f"w{row % 7}" for row in range(5000)]})
    file = parquet_file(tmp_path / "a.parquet", table, row_group_size=1300)
    rng = random.Random(0)
    for window in range(0, 5000, 250):  # many go over the end of a group
        for _ in range(3):
            rows = sorted(rng.sample(range(window, min(5000, window + 600)), 40))
            rng.shuffle(rows)
            found = list(read_rows(file, [(row, None) for row in rows], columns={"text": "text"}))
            assert [row.values for row in found] == [{"text": texts[row]} for row in rows]


def test_odd_parquet_types_and_nested_nulls_are_values(tmp_path):
    table = pa.table(
        {
            "tokens": pa.array([[1, None, 3], None, []], pa.list_(pa.int32())),
            "struct": pa.array([{"a": None}, None, {"a": {"b": 1}}], pa.struct([("a", pa.struct([("b", pa.int8())]))])),
            "blob": pa.array([b"\xff", None, b""], pa.binary()),
            "when": pa.array([datetime(2020, 1, 1), None, None], pa.timestamp("us")),
            "word": pa.array(["a", "b", None]).dictionary_encode(),
            "large": pa.array(["a", None, ""], pa.large_string()),
            "half": pa.array([None, None, None], pa.null()),
        }
    )
    file = parquet_file(tmp_path / "a.parquet", table)
    assert [row.values for row in iterate(file)] == table.to_pylist()


def test_of_repeated_texts_that_unpack_to_much_little_is_kept(tmp_path, monkeypatch):
    stretches = BatchCache(kept_bytes=3_000_000)
    monkeypatch.setattr("draftmill.storage.inputs.tables._BATCHES", stretches)
    monkeypatch.setattr("draftmill.storage.inputs.tables.SHARED_BYTES", 1_000_000)
    table = pa.table({"text": ["x" * 1000] * 20_000})
    file = parquet_file(tmp_path / "a.parquet", table)
    assert pq.ParquetFile(file.uri).metadata.row_group(0).total_byte_size < 100_000
    rows = list(iterate(file))
    check_again(file, rows)
    list(read_rows(file, [(row.row, row.offset) for row in rows]))
    assert 1_500_000 < stretches.num_bytes <= 3_000_000


def test_a_value_without_a_python_form_fails_its_row_alone(tmp_path):
    offsets = pa.py_buffer(b"".join(index.to_bytes(4, "little") for index in range(4)))
    text = pa.StringArray.from_buffers(3, offsets, pa.py_buffer(b"a\xffb"))
    when = pa.array([0, 2**62, 0], pa.int64()).cast(pa.timestamp("us"))
    for column, kind in ((text, "bad_encoding"), (when, "bad_row")):
        file = parquet_file(tmp_path / f"{kind}.parquet", pa.table({"x": column}))
        rows = list(iterate(file))
        assert [row.error.kind if row.error else None for row in rows] == [None, kind, None]
        check_again(file, rows)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_damaged_table_is_the_users_error(name, tmp_path):
    good = {"a.parquet": WRITERS["parquet"], "a.arrow": WRITERS["arrow stream"]}[name](tmp_path)
    whole = Path(good.uri).read_bytes()
    for broken in (
        b"",
        b"junk",
        whole[: len(whole) // 2],
        whole[: len(whole) // 2] + b"\0" * (len(whole) - len(whole) // 2),
    ):
        with pytest.raises(UserError, match="damaged"):
            list(iterate(one_file(tmp_path / f"broken-{len(broken)}-{name}", broken)))


def test_a_file_that_is_gone_is_the_users_error(tmp_path):
    for name in ("a.jsonl", "a.parquet", "a.arrow", "a.txt.gz"):
        file = one_file(tmp_path / name, b"x")
        (tmp_path / name).unlink()
        with pytest.raises(UserError, match="gone"):
            list(iterate(file))
        with pytest.raises(UserError, match="gone"):
            list(read_rows(file, [(0, 0)]))


def test_a_row_that_is_not_there_any_more_is_a_failed_row(tmp_path):
    file = one_file(tmp_path / "a.jsonl", b'{"a": 1}\n')
    found = list(read_rows(file, [(0, 0), (7, None), (7, 99)]))
    assert kinds(found) == [{"a": 1}, "bad_row", "bad_row"]
    table = WRITERS["parquet in groups"](tmp_path)
    assert kinds(list(read_rows(table, [(1000, None)]))) == ["bad_row"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.txt", "a.py"])
@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(name, tmp_path):
    def peak(count: int) -> int:
        data = b"text\n" + b'{"text": "' + b"y" * 190 + b'"}\n'
        body = (data[5:] if name.startswith("a.jsonl") else b"text line of prose, quite long\n") * count
        file = one_file(tmp_path / name, gzip.compress(body) if name.endswith(".gz") else body)
        tracemalloc.start()
        for _ in iterate(file, chunk_chars=100 if name == "a.py" else None):
            pass
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(10)
    assert peak(60_000) < peak(6_000) + 3_000_000


@pytest.mark.s3
def test_rows_come_from_s3_as_from_disk(s3_store, s3_url, s3_options, tmp_path):
    s3_store.put("in/a.jsonl", LINES)
    s3_store.put("in/b.jsonl.gz", gzip.compress(LINES))
    s3_store.put("in/c.parquet", Path(WRITERS["parquet in groups"](tmp_path).uri).read_bytes())
    s3_store.put("in/d.arrow", Path(WRITERS["arrow stream"](tmp_path).uri).read_bytes())
    files = list_inputs(Place(f"{s3_url}/in", s3_options))
    expected = [json.loads(line) for line in LINES.splitlines()]
    for file, values in zip(files, [expected, expected, TABLE.to_pylist(), TABLE.to_pylist()], strict=True):
        rows = list(iterate(file))
        assert [row.values for row in rows] == values
        check_again(file, rows)


def test_zeros_behind_a_gzip_file_are_padding(tmp_path):
    data = gzip.compress(b'{"a": 1}\n') + b"\0" * 512 + gzip.compress(b'{"a": 2}\n') + b"\0" * 100_000
    assert kinds(rows_of(tmp_path / "a.jsonl.gz", data)) == [{"a": 1}, {"a": 2}]
    for damaged in (data[:20], gzip.compress(b'{"a": 1}\n')[:-3], data + b"x"):
        with pytest.raises(UserError, match="damaged or not jsonl"):
            rows_of(tmp_path / "a.jsonl.gz", damaged)


def test_marks_of_files_that_were_joined_are_dropped(tmp_path):
    mark = b"\xef\xbb\xbf"
    lines = mark + mark + b'{"a": 1}\n' + mark + b'{"a": 2}\n' + mark + b"\n" + mark
    assert kinds(rows_of(tmp_path / "a.jsonl", lines)) == [{"a": 1}, {"a": 2}]
    assert kinds(rows_of(tmp_path / "a.csv", mark + b"a\n1\n" + mark + b"2\n")) == [{"a": "1"}, {"a": "2"}]
    texts = mark + b"one\n" + mark + "x\ufeff\uff46\n".encode()
    assert kinds(rows_of(tmp_path / "a.txt", texts)) == [{"text": "one"}, {"text": "x\ufeff\uff46"}]
