"""From `input.path` to a list of files: names, formats, and clear refusals."""

import dataclasses
import glob
import json
import os
import pickle
import tracemalloc

import datasets
import pytest

from draftmill.storage.errors import StoreRefused, UserError
from draftmill.storage.inputs.inputs import format_of, glob_pattern, list_inputs
from draftmill.storage.inputs.reader import fetch_ahead, iterate, read_rows
from draftmill.storage.inputs.rows import InputFile, InputFiles, default_id
from draftmill.storage.stores.store import S3_DEFAULTS, Place, S3Options


def write(folder, *names: str, text: str = '{"text": "a"}\n'):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(path, s3: S3Options = S3_DEFAULTS) -> list[str]:
    return [file.name for file in list_inputs(Place(str(path), s3))]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl", ("jsonl", None)),
        ("a.NDJSON.GZ", ("jsonl", "gzip")),
        ("a.b.csv.zst", ("csv", "zstd")),
        ("a.tsv", ("csv", None)),
        ("a.parquet", ("parquet", None)),
        ("a.parquet.gz", ("", None)),
        ("a.arrow", ("arrow", None)),
        ("a.txt", ("txt", None)),
        ("a.py", ("text", None)),
        ("a.md.gz", ("text", "gzip")),
        ("a.gz", ("", None)),
        ("a.png", ("", None)),
        ("jsonl", ("", None)),
    ],
)
def test_endings_tell_format_and_compression(name, expected):
    assert format_of(name) == expected


def test_names_are_relative_to_the_inputs_root(tmp_path):
    write(tmp_path, "in/b.jsonl", "in/sub/a.jsonl", "in/a.jsonl")
    assert names(tmp_path / "in") == ["a.jsonl", "b.jsonl", "sub/a.jsonl"]
    assert names(tmp_path / "in" / "sub" / "a.jsonl") == ["a.jsonl"]
    assert names(f"{tmp_path}/in/*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(f"{tmp_path}/in/**/*.jsonl") == ["a.jsonl", "b.jsonl", "sub/a.jsonl"]
    assert names(f"{tmp_path}/*/sub/?.jsonl") == ["in/sub/a.jsonl"]


def test_ids_stay_when_the_data_moves(tmp_path):
    for place in ("here", "there"):
        write(tmp_path / place, "x/a.jsonl")
    ids = [default_id(list_inputs(str(tmp_path / place))[0], 3) for place in ("here", "there")]
    assert ids == ["x/a.jsonl:3", "x/a.jsonl:3"]


def test_a_relative_path_is_found_by_workers_elsewhere(tmp_path, monkeypatch):
    write(tmp_path, "a.jsonl")
    monkeypatch.chdir(tmp_path)
    (file,) = list_inputs("a.jsonl")
    monkeypatch.chdir("/")
    assert len(list(iterate(file))) == 1


def test_a_file_is_plain_json_and_knows_its_version(tmp_path):
    write(tmp_path, "a.jsonl")
    (file,) = list_inputs(str(tmp_path / "a.jsonl"))
    assert InputFile(**json.loads(json.dumps(file.facts()))) == file
    assert file.size == 14 and file.mtime_s is not None


def test_a_folder_passes_over_what_is_no_data(tmp_path):
    write(tmp_path, "a.jsonl", ".hidden.jsonl", ".git/x.jsonl", "_SUCCESS", "_log/b.jsonl", "state.json", "x.png")
    write(tmp_path, "README.md", "LICENSE.txt")
    assert names(tmp_path) == ["a.jsonl"]


def test_what_is_no_file_is_passed_over_and_odd_names_can_be_ids(tmp_path):
    write(tmp_path, "a.jsonl")
    (tmp_path / "dangling.jsonl").symlink_to("absent")
    (tmp_path / "folder.jsonl").mkdir()
    with open(os.fsencode(tmp_path) + b"/caf\xe9.jsonl", "wb") as file:
        file.write(b'{"a": 1}\n')
    files = list_inputs(str(tmp_path))
    assert [file.name for file in files] == ["a.jsonl", "caf\\udce9.jsonl"]
    assert [row.values for row in iterate(files[1])] == [{"a": 1}]
    assert InputFile(**json.loads(json.dumps(files[1].facts()))) == files[1]


def test_a_folder_of_sources_keeps_its_private_modules(tmp_path):
    write(tmp_path, "pkg/__init__.py", "pkg/_private.py", "_vendor/x.py", "README.md", "Makefile", "setup.json")
    write(tmp_path, "pkg/__pycache__/x.py")
    assert names(tmp_path) == ["README.md", "_vendor/x.py", "pkg/__init__.py", "pkg/_private.py"]


def test_data_beside_sources_is_refused_with_a_way_out(tmp_path):
    write(tmp_path, "a.jsonl", "b.py")
    with pytest.raises(UserError, match=r"^input\.path: .*a\.jsonl.*b\.py.*glob"):
        list_inputs(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent.jsonl", "nothing is at"),
        ("*.jsonl", "nothing is at"),
        ("empty", "nothing is at"),
        ("x.png", "not known by its ending"),
        ("pictures", "no file of a known format"),
        ("builtin:nothing", "builtin:python-stdlib"),
        ("ftp://host/a", "s3://"),
        ("hf://absent-dataset?color=red", "not an option"),
    ],
)
def test_what_cannot_be_an_input_is_refused(path, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write(tmp_path, "x.png", "pictures/y.png")
    with pytest.raises(UserError, match=message) as refused:
        list_inputs(path)
    assert str(refused.value).startswith("input.path: ")


@pytest.mark.slow
def test_several_paths_are_read_in_turn_and_their_names_begin_where_they_part(tmp_path):
    write(tmp_path, "data/en/b.jsonl", "data/en/a.jsonl", "data/de/a.jsonl")
    both = [f"{tmp_path}/data/en/*.jsonl", f"{tmp_path}/data/de", f"{tmp_path}/data/en/a.jsonl"]
    assert [file.name for file in list_inputs(*both)] == ["en/a.jsonl", "en/b.jsonl", "de/a.jsonl"], "each file once"
    assert [file.name for file in list_inputs(*both[:1])] == ["a.jsonl", "b.jsonl"]
    same = [f"{tmp_path}/data/en/b.jsonl", f"{tmp_path}/data/en/a.jsonl"]
    assert [file.name for file in list_inputs(*same)] == ["b.jsonl", "a.jsonl"], "as they are listed"
    mixed = list_inputs(f"{tmp_path}/data/de", "builtin:python-stdlib")
    assert mixed[0].name.endswith("data/de/a.jsonl") and mixed[1].name.startswith("builtin:python-stdlib/")
    with pytest.raises(UserError, match=r"nothing is at '.*fr'"):
        list_inputs(*both, f"{tmp_path}/data/fr")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("data/{en,de}/*.jsonl", ["de/a.jsonl", "en/a.jsonl", "en/b.jsonl"]),
        ("data/{en,de}", ["de/a.jsonl", "en/a.jsonl", "en/b.jsonl"]),
        ("data/{en/{a,b},de/a}.jsonl", ["de/a.jsonl", "en/a.jsonl", "en/b.jsonl"]),
        ("data/{en,de}/*.{jsonl,csv}", ["de/a.jsonl", "en/a.jsonl", "en/b.jsonl"]),
        ("{odd,name}.jsonl", ["{odd,name}.jsonl"]),
        ("{one}.jsonl", ["{one}.jsonl"]),
    ],
)
def test_braces_stand_for_either(tmp_path, pattern, expected):
    write(tmp_path, "data/en/b.jsonl", "data/en/a.jsonl", "data/de/a.jsonl", "{odd,name}.jsonl", "{one}.jsonl")
    assert [file.name for file in list_inputs(f"{tmp_path}/{pattern}")] == expected


def test_braces_that_name_what_is_not_there_are_refused(tmp_path):
    write(tmp_path, "train.jsonl")
    for pattern, message in (
        ("{train,tset}.jsonl", "nothing is at '.*tset.jsonl'"),
        ("{a,b}/*.jsonl", "nothing is at '.*{a,b}/"),
        ("{a,b}" * 12, "more than 1000 paths"),
    ):
        with pytest.raises(UserError, match=message):
            list_inputs(f"{tmp_path}/{pattern}")


def test_a_delimiter_is_for_csv_files(tmp_path):
    write(tmp_path, "a.csv", "b.jsonl")
    found = list_inputs(f"{tmp_path}/a.csv", f"{tmp_path}/b.jsonl", delimiter=";")
    assert [file.delimiter for file in found] == [";", None]
    with pytest.raises(UserError, match=r"input\.delimiter: ';' is for csv files"):
        list_inputs(f"{tmp_path}/b.jsonl", delimiter=";")


@pytest.mark.slow
def test_the_standard_library_is_an_input_everywhere():
    files = list_inputs("builtin:python-stdlib")
    assert len(files) > 300 and files == sorted(files, key=lambda file: file.name)
    assert "json/decoder.py" in {file.name for file in files}
    assert not any("test" in file.name.split("/")[:-1] for file in files)
    (file,) = (file for file in files if file.name == "this.py")
    assert file.uri == "builtin:python-stdlib/this.py" and file.mtime_s is None
    rows = list(iterate(file))
    assert len(rows) > 1 and all(row.values and len(row.values["text"]) <= 384 for row in rows)


ODD = ("a.jsonl", "x1.jsonl", "x[1].jsonl", "x[2024-11].jsonl", "q?.jsonl", "q1.jsonl", "in [a]/b.jsonl", "in a/c.jsonl",
       "{d,e}/d.jsonl", "d/d.jsonl", "e/e.jsonl", "._a.jsonl", ".part.jsonl", ".h/a.jsonl", "s/t/u.jsonl", "s/.v/w.jsonl",
       "a+b(1).jsonl", "s/[/y.jsonl", "s/d.jsonl/z.jsonl")  # fmt: skip
PATHS = ("x[1].jsonl", "x[2024-11].jsonl", "q?.jsonl", "in [a]", "in [a]/", "{d,e}", "{d,e}/*.jsonl", "*.jsonl", "**/*.jsonl",
         "**", "s/**", "s/**.jsonl", "*/*.jsonl", ".*.jsonl", "[!a-z]*.jsonl", "x[!2-].jsonl", "in [[]a]/*", "?/*.jsonl",
         "s/[[]/*", "s/[/*", "a+b(1)*", "x[2-1]*.jsonl", "in [a]/*.jsonl", "s/*/*", "./*.jsonl")  # fmt: skip


def found(path: str, s3: S3Options = S3_DEFAULTS) -> list[str]:
    try:
        return names(path, s3)
    except UserError as error:
        return [str(error).partition(": ")[2].partition("'")[0]]


@pytest.mark.parametrize("path", PATHS)
def test_globs_match_the_same_names_as_on_disk(tmp_path, path):
    write(tmp_path, *ODD)
    on_disk = {os.path.relpath(name, tmp_path) for name in glob.glob(f"{tmp_path}/{path}", recursive=True)}
    files = {name for name in on_disk if (tmp_path / name).is_file()}
    assert {name for name in ODD if glob_pattern(path.removeprefix("./")).fullmatch(name)} == files


@pytest.mark.s3
def test_odd_names_are_the_same_inputs_on_each_store(tmp_path, s3_store, s3_url, s3_options):
    write(tmp_path, *ODD)
    for name in ODD:
        s3_store.put(f"odd/{name}", b'{"text": "a"}\n')
    on_disk = {path: found(f"{tmp_path}/{path}") for path in PATHS if path[:2] != "./"}
    assert on_disk == {path: found(f"{s3_url}/odd/{path}", s3_options) for path in on_disk}
    assert on_disk["x[1].jsonl"] == ["x[1].jsonl"] and on_disk["q?.jsonl"] == ["q?.jsonl"], "the exact name first"
    assert on_disk["in [a]"] == ["b.jsonl"] and on_disk["{d,e}"] == ["d.jsonl"], "a folder before a glob"


@pytest.mark.s3
def test_empty_objects_that_stand_for_folders_are_ignored(s3_store, s3_url, s3_options):
    for name in ("in", "in/sub", "in/sub_$folder$"):
        s3_store.put(f"marks/{name}", b"")
    s3_store.put("marks/in/sub/deep/a.jsonl", b'{"text": "a"}\n')
    s3_store.put("marks/in/b.jsonl", b"")
    for path in ("in", "in/", "in/*", "*/**"):
        expected = {"in/*": ["b.jsonl"], "*/**": ["in/b.jsonl", "in/sub/deep/a.jsonl"]}
        assert names(f"{s3_url}/marks/{path}", s3_options) == expected.get(path, ["b.jsonl", "sub/deep/a.jsonl"])


@pytest.mark.s3
def test_s3_inputs_are_files_folders_and_globs(s3_store, s3_url, s3_options):
    for name in ("in/a.jsonl", "in/sub/b.jsonl", "in/.x.jsonl", "in2/c.jsonl", "in/_SUCCESS"):
        s3_store.put(name, b'{"text": "a"}\n')
    assert names(f"{s3_url}/in", s3_options) == names(f"{s3_url}/in/", s3_options) == ["a.jsonl", "sub/b.jsonl"]
    assert names(f"{s3_url}/in/a.jsonl", s3_options) == ["a.jsonl"]
    assert names(f"{s3_url}/in*/*.jsonl", s3_options) == ["in/a.jsonl", "in2/c.jsonl"]
    braces = names(f"{s3_url}/{{in,in2}}/*.jsonl", s3_options)
    assert braces == ["in/a.jsonl", "in2/c.jsonl"]
    (file,) = list_inputs(Place(f"{s3_url}/in2", s3_options))
    assert file.uri == f"{s3_url}/in2/c.jsonl" and file.etag and file.size == 14 and file.mtime_s
    for path in (f"{s3_url}/absent", "s3://no-such-bucket-of-mine/x"):
        with pytest.raises((UserError, StoreRefused), match=r"^input\.path"):
            list_inputs(Place(path, s3_options))


def saved(folder) -> datasets.Dataset:
    dataset = datasets.Dataset.from_dict({"text": [f"row {index}" for index in range(10)]})
    dataset.save_to_disk(folder, num_shards=2)
    return dataset


def test_a_dataset_saved_to_disk_is_its_arrow_files(tmp_path):
    saved(tmp_path / "ds")
    files = list_inputs(f"hf://{tmp_path}/ds")
    assert [file.format for file in files] == ["arrow", "arrow"]
    rows = [row.values for file in files for row in iterate(file)]
    assert rows == [{"text": f"row {index}"} for index in range(10)]


def test_a_saved_dataset_with_splits_needs_one_named(tmp_path):
    dataset = saved(tmp_path / "one")
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "ds")
    with pytest.raises(UserError, match="one of test, train"):
        list_inputs(f"hf://{tmp_path}/ds")
    with pytest.raises(UserError, match="no split 'dev'"):
        list_inputs(f"hf://{tmp_path}/ds?split=dev")
    assert len(list_inputs(f"hf://{tmp_path}/ds?split=test")) == 1


def test_a_dataset_of_the_hub_is_one_input_read_by_row_number(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write(tmp_path, "ds/a.jsonl", text="".join(f'{{"text": "row {index}", "n": {index}}}\n' for index in range(20)))
    (file,) = list_inputs(f"hf://{tmp_path}/ds")
    assert (file.format, file.name, file.size) == ("hf", "train", 20)
    rows = list(iterate(file))
    assert [row.values for row in rows] == [{"text": f"row {index}", "n": index} for index in range(20)]
    assert list(fetch_ahead([(file, [(7, None)])])) == [(file, [(7, None)])]  # its size is no number of bytes
    assert list(read_rows(file, [(7, None), (3, None)], columns={"text": "text"})) == [
        dataclasses.replace(rows[7], values={"text": "row 7"}),
        dataclasses.replace(rows[3], values={"text": "row 3"}),
    ]


def test_a_dataset_that_cannot_be_had_is_the_users_error():
    with pytest.raises(UserError, match=r"^input\.path: hf://nobody/nothing can't be loaded"):
        list_inputs("hf://nobody/nothing")


def test_many_inputs_take_little_memory_in_a_worker():
    files = [
        InputFile(f"/in/part-{n}\udcff.txt", f"part-{n}\udcff.txt", n, None, n / 7, "text", sha256="0" * 64)
        for n in range(20_000)
    ]
    sent = pickle.dumps(InputFiles(files))
    tracemalloc.start()
    received = pickle.loads(sent)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 20_000 * 300
    assert (len(received), received[-1], received[3:5]) == (20_000, files[-1], files[3:5])
