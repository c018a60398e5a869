"""Inputs in the buckets of other clouds: read like local files, and never another version than the listed one."""

import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.registry import _registry, known_implementations

from draftmill.jobs.config.spec import check_spec
from draftmill.storage.errors import ChangedInput, Error, StoreError, UserError
from draftmill.storage.inputs import inputs, reader, sources
from draftmill.storage.inputs.inputs import list_inputs
from draftmill.storage.inputs.reader import iterate, read_rows
from draftmill.storage.stores import block_cache
from draftmill.storage.stores.block_cache import BlockCache
from draftmill.storage.stores.fsspec_store import DRIVERS, FsspecStore
from tests.storage.stores.fsspec_driver import Driver, register

SECRET = "h4x0r-value-of-a-key"


@pytest.fixture(params=sorted(DRIVERS))
def scheme(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def driver(scheme: str, monkeypatch: pytest.MonkeyPatch) -> Driver:
    return register(monkeypatch, scheme)


@pytest.fixture(autouse=True)
def nothing_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks, and none of another test."""
    reader._seekable.cache_clear()
    monkeypatch.setattr(block_cache, "BLOCKS", BlockCache())
    for module in (block_cache, sources, reader):
        monkeypatch.setattr(module, "BLOCK_BYTES", 128)
    monkeypatch.setattr(sources, "BUFFER_BYTES", 64)


def lines(name: str, count: int = 40) -> bytes:
    return "".join(f'{{"id": "{name}-{number}"}}\n' for number in range(count)).encode()


def test_a_bucket_is_listed_and_read_like_a_folder(scheme, driver, tmp_path):
    table = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": [f"row-{number}" for number in range(40)]}), table)
    files = {
        name: lines(name)
        for name in ("in/a.jsonl", "in/sub/b.jsonl", "in/.hidden/c.jsonl", "in/_SUCCESS", "inner.jsonl")
    }
    files |= {
        "x/d.csv": b"id\n1\n",
        "x/e.jsonl.gz": gzip.compress(lines("e")),
        "x/f.parquet": table.getvalue().to_pybytes(),
    }
    for name, data in files.items():
        driver.pipe_file(f"bucket/{name}", data)
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    for place in ("in", "in/", "in/a.jsonl", "in/*.jsonl", "**/*.jsonl", "{in/a,inner}.jsonl", "x"):
        found, expected = list_inputs(f"{scheme}://bucket/{place}"), list_inputs(f"{tmp_path}/{place}")
        assert [(file.name, file.size) for file in found] == [(file.name, file.size) for file in expected], place
        assert [list(iterate(file)) for file in found] == [list(iterate(file)) for file in expected], place
        for one, other in zip(found, expected, strict=True):
            rows = [(row.row, row.offset) for row in iterate(other)][::-3]
            assert list(read_rows(one, rows)) == list(read_rows(other, rows))
    for place in ("absent.jsonl", "absent/*.jsonl", "i"):
        with pytest.raises(UserError, match=r"^input\.path: nothing is at "):
            list_inputs(f"{scheme}://bucket/{place}")
    with pytest.raises(StoreError, match=r"^input\.path: .* names no bucket"):
        list_inputs(f"{scheme}:///rows.jsonl")


@pytest.mark.parametrize("count", [40, 1], ids=["as long", "shorter"])
def test_an_object_that_is_replaced_is_never_read_as_the_listed_one(scheme, driver, count):
    driver.pipe_file("bucket/rows.jsonl", lines("old"))
    (file,) = list_inputs(f"{scheme}://bucket/rows.jsonl")
    last = list(iterate(file))[-1]
    block_cache.BLOCKS = BlockCache()
    straddling = iterate(file)
    assert next(straddling).values == {"id": "old-0"}
    driver.pipe_file("bucket/rows.jsonl", lines("new", count))
    block_cache.BLOCKS = BlockCache()
    for rows in (straddling, iterate(file), read_rows(file, [(last.row, last.offset)])):
        with pytest.raises(
            ChangedInput, match=rf"^input\.path: {scheme}://.*rows\.jsonl has changed since it was listed"
        ):
            list(rows)
    assert list_inputs(f"{scheme}://bucket/rows.jsonl") != [file]
    driver.rm("bucket/rows.jsonl")
    with pytest.raises(UserError, match=r"rows\.jsonl does not exist"):
        list(iterate(file))


def test_an_object_that_is_replaced_while_a_range_is_read_is_noticed(scheme, driver):
    driver.pipe_file("bucket/x", b"abc")
    store = FsspecStore(f"{scheme}://bucket")
    (stat,) = store.list("x")
    assert store.get_range("x", 1, 9, etag=stat.etag) == b"bc"
    store._files.after_read = lambda: driver.pipe_file("bucket/x", b"xyz")
    with pytest.raises(StoreError, match="x has changed since it was listed"):
        store.get_range("x", 0, 3, etag=stat.etag)


def test_a_cache_of_the_cloud_does_not_answer_with_an_older_version(monkeypatch):
    driver = register(monkeypatch, "gs")
    driver.pipe_file("bucket/x", b"new")
    driver.cached["bucket/x"] = b"old"
    store = FsspecStore("gs://bucket")
    assert [store.get_range("x", 0, 3, etag=stat.etag) for stat in store.list("x")] == [b"new"]


def test_what_a_driver_unpacks_is_no_range(scheme, driver):
    driver.pipe_file("bucket/x", b"abc")
    store = FsspecStore(f"{scheme}://bucket")
    store._files.cat_file = lambda *_, **__: b"unpacked"
    with pytest.raises(StoreError, match=r"8 bytes came from 0 on, of 3; a Content-Encoding is not supported"):
        store.get_range("x", 0, 3)


def test_a_driver_that_does_not_show_versions_is_refused(scheme, driver, monkeypatch):
    driver.pipe_file("bucket/rows.jsonl", lines("old"))
    monkeypatch.setattr(Driver, "_as_driver", lambda self, info: info | {"name": info["name"].removeprefix("/")})
    reason = f"gives no {DRIVERS[scheme][1]}, without which a change of the object would not be noticed"
    with pytest.raises(StoreError, match=rf"^input\.path: {scheme}://bucket/rows\.jsonl: .*{reason}"):
        list_inputs(f"{scheme}://bucket/rows.jsonl")


@pytest.mark.parametrize("url", ["https://host/rows.jsonl", "memory://x/rows.jsonl", "github://a/rows.jsonl"])
def test_places_that_do_not_show_versions_are_refused_with_the_reason(url):
    spec = {"task": {"kind": "complete"}, "model": {"path": "m"}, "decoder": {"kind": "autoregressive"}}
    reason = r"is not allowed; allowed: a local path, .*gs://.*; elsewhere an object that changes would not be noticed"
    with pytest.raises(UserError, match=rf"^input\.path: \w+:// {reason}"):
        check_spec(spec | {"input": {"path": url}, "output": {"path": "out"}})
    with pytest.raises(UserError, match=rf"^input\.path: \w+:// {reason}"):
        list_inputs(url)


def test_a_missing_driver_is_named(scheme, monkeypatch):
    inputs._open.cache_clear()
    monkeypatch.delitem(_registry, scheme, raising=False)
    monkeypatch.setitem(known_implementations, scheme, {"class": "no_such_package.Files", "err": "?"})
    package = DRIVERS[scheme][0]
    with pytest.raises(StoreError, match=rf"^input\.path: {scheme}://.*not installed: pip install {package}$"):
        list_inputs(f"{scheme}://bucket/rows.jsonl")


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("AZURE_STORAGE_ACCOUNT_KEY", f"bad key {SECRET}"),
        ("AZURE_STORAGE_CONNECTION_STRING", f"cannot parse {SECRET}"),
        ("FSSPEC_GS_TOKEN", f"no file {SECRET}"),
        ("HOME", f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={SECRET}"),
        ("HOME", f"GET https://a.blob.core.windows.net/x?sv=1&sig={SECRET}"),
    ],
)
def test_an_error_of_a_driver_shows_no_credentials(variable, text, monkeypatch):
    driver = register(monkeypatch, "az")
    monkeypatch.setenv(variable, SECRET if variable != "HOME" else "/home")

    def refuse(*_: object, **__: object) -> None:
        raise ValueError(text)

    monkeypatch.setattr(type(driver), "info", refuse)
    with pytest.raises(Error, match=r"^input\.path: az://bucket/rows\.jsonl: ValueError: ") as caught:
        list_inputs("az://bucket/rows.jsonl")
    assert SECRET not in str(caught.value) and "[hidden]" in str(caught.value)
