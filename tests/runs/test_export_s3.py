"""`draftmill export` to S3: the same files as on disk, in parts, whole or not at all, and what it refuses in words."""

import json
import os

import pyarrow.parquet as pq
import pytest

from draftmill.jobs.cli import main
from draftmill.jobs.results.export import check_places, errors_beside
from draftmill.jobs.results.passes import latest_rows
from draftmill.storage.errors import UserError
from draftmill.storage.stores import upload
from draftmill.storage.stores.s3 import S3Store
from draftmill.storage.stores.store import S3Options
from tests.runs.test_export import decode_prompts
from tests.storage.stores.s3_forward import VARIABLE
from tests.storage.stores.s3_server import S3Server

pytestmark = pytest.mark.s3

FORMATS = ["jsonl", "openai", "csv", "parquet"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory):
    return decode_prompts(tmp_path_factory.mktemp("prompts")) / "run"


@pytest.fixture
def bucket(s3_server: S3Server, s3_options: S3Options, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """A bucket of this test's own; what goes there goes in parts of 512 bytes, where the server takes so small ones."""
    if not os.environ.get(VARIABLE):
        monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
        monkeypatch.setattr(upload, "PART_BYTES", 512)
    store = S3Store(f"s3://{s3_server.new_bucket()}", s3_options, sleep=lambda _: None)
    monkeypatch.setattr("draftmill.storage.stores.s3.MAX_WAIT_S", 0.01)
    s3_server.calm()
    return store


def export(run, kind: str, out, server: S3Server, *more: str) -> int:
    place = ["--s3-endpoint", server.endpoint]
    return main(["export", str(run), "--format", kind, "--out", str(out), *place, *more])


def copied(run_dir, bucket: S3Store) -> str:
    """The same run on S3."""
    for path in run_dir.rglob("*"):
        if path.is_file():
            bucket.put(f"runs/one/{path.relative_to(run_dir)}", path.read_bytes())
    return f"{bucket.url}/runs/one"


def names(bucket: S3Store) -> list[str]:
    return [stat.name for stat in bucket.list() if not stat.name.startswith("runs/one/")]


def pending(bucket: S3Store) -> int:
    return len(bucket.ask("list_multipart_uploads", "").get("Uploads", ()))


def same(kind: str, bucket: S3Store, name: str, local) -> bool:
    if kind != "parquet":
        return bucket.get(name) == local.read_bytes()
    (local.parent / "fetched.parquet").write_bytes(bucket.get(name))
    return bool(pq.read_table(local.parent / "fetched.parquet").equals(pq.read_table(local), check_metadata=True))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.slow
def test_an_export_to_s3_is_the_one_on_disk(run_dir, tmp_path, bucket, s3_server, kind, capsys):
    apart = ["--errors", str(tmp_path / "failed")] if kind != "openai" else []
    assert export(run_dir, kind, tmp_path / "all.x", s3_server, *apart) == 0
    failed = tmp_path / ("failed" if kind != "openai" else "all.errors.x")
    apart = ["--errors", f"{bucket.url}/a/failed"] if kind != "openai" else []
    for run in (str(run_dir), copied(run_dir, bucket)):
        s3_server.app.requests.clear()
        assert export(run, kind, f"{bucket.url}/a/all.x", s3_server, *apart, "--overwrite") == 0
        assert names(bucket) == sorted(["a/all.x", f"a/{failed.name}"]) and pending(bucket) == 0
        assert same(kind, bucket, "a/all.x", tmp_path / "all.x") and same(kind, bucket, f"a/{failed.name}", failed)
        if not os.environ.get(VARIABLE):
            assert any("partNumber=2" in path for _, path in s3_server.app.requests)
    assert f"{bucket.url}/a/all.x: 3 samples\n{bucket.url}/a/{failed.name}: 2 samples" in capsys.readouterr().out


def test_one_file_may_go_to_disk_and_the_other_to_s3(run_dir, tmp_path, bucket, s3_server):
    out = tmp_path / "good.jsonl"
    assert export(run_dir, "jsonl", out, s3_server, "--errors", f"{bucket.url}/bad.jsonl") == 0
    bad = [json.loads(line) for line in bucket.get("bad.jsonl").splitlines()]
    assert len(out.read_text().splitlines()) == 3 and {row["status"] for row in bad} == {"failed"}


SECRET = "hunter2hunter2"

REFUSED = {
    "s3://bucket": "'s3://bucket' does not name an object; allowed: s3://bucket/key",
    "s3://bucket/": "does not name an object",
    "s3:///key": "does not name an object",
    "s3://bucket/folder/": "does not name an object",
    "s3://bucket/a/../runs/one/x": "does not name an object",
    "s3://b/runs/one/data/x.jsonl": "is inside the run directory",
    "s3://b/runs/one": "is inside the run directory",
    "gs://bucket/key": "gs:// is not allowed; allowed: a local path, s3://...",
    "memory://x": "memory:// is not allowed",
    f"https://host/x?X-Amz-Signature={SECRET}": "https:// is not allowed",
    f"s3://user:{SECRET}@bucket/key": "no credentials in a URL; they come from the environment",
    "s3://bucket/a\nb": "has control characters",
}


@pytest.mark.parametrize("field", ["--out", "--errors"])
@pytest.mark.parametrize(("place", "message"), REFUSED.items())
def test_a_place_that_can_not_be_is_refused_in_words(field, place, message):
    out, errors = (place, None) if field == "--out" else ("fine.jsonl", place)
    with pytest.raises(UserError) as refused:
        check_places("s3://b/runs/one/", "jsonl", out, errors)
    assert refused.value.field == field and message in refused.value.message and SECRET not in refused.value.message


def test_places_that_look_alike_are_not_inside_of_the_run():
    for out in ("s3://b/runs/one.jsonl", "s3://b/runs/one-more/x", "s3://other/runs/one/x", "runs/one/x"):
        check_places("s3://b/runs/one", "jsonl", out, None)
    check_places("/runs/one", "parquet", "s3://b/runs/one/x", None)


def test_failed_samples_go_beside_the_others():
    assert errors_beside("s3://b/a.d/answers.jsonl") == "s3://b/a.d/answers.errors.jsonl"
    assert errors_beside("s3://b.c/answers") == "s3://b.c/answers.errors"
    assert errors_beside("/a.d/answers") == "/a.d/answers.errors" and errors_beside("a.b.c") == "a.b.errors.c"


@pytest.mark.parametrize("field", ["--out", "--errors"])
def test_an_object_that_is_there_is_refused_at_once(run_dir, bucket, s3_server, field, monkeypatch, capsys):
    bucket.put("there", b"precious")
    places = {"--out": f"{bucket.url}/new", "--errors": f"{bucket.url}/new.errors"} | {field: f"{bucket.url}/there"}
    monkeypatch.setattr("draftmill.jobs.results.export.latest_rows", lambda *_, **__: pytest.fail("rows are read"))
    assert export(run_dir, "jsonl", places["--out"], s3_server, "--errors", places["--errors"]) == 2
    assert f"{field}: '{bucket.url}/there' already exists; --overwrite replaces it" in capsys.readouterr().err
    assert bucket.get("there") == b"precious" and names(bucket) == ["there"]


def test_a_bucket_that_is_not_there_is_told_at_once(run_dir, s3_server, monkeypatch, capsys):
    monkeypatch.setattr("draftmill.jobs.results.export.latest_rows", lambda *_, **__: pytest.fail("rows are read"))
    assert export(run_dir, "jsonl", "s3://no-such-bucket-here/all", s3_server) == 2
    assert "there is no bucket 'no-such-bucket-here'" in capsys.readouterr().err


def while_reading(monkeypatch: pytest.MonkeyPatch, happens) -> None:
    """Let something happen when the first unit has been read."""

    def rows(*arguments, **how):
        tables = latest_rows(*arguments, **how)
        yield next(tables)
        happens()
        yield from tables

    monkeypatch.setattr("draftmill.jobs.results.export.latest_rows", rows)


def test_an_object_that_appears_meanwhile_stays(run_dir, bucket, s3_server, monkeypatch, capsys):
    while_reading(monkeypatch, lambda: bucket.create("all", b"somebody's"))
    assert export(run_dir, "jsonl", f"{bucket.url}/all", s3_server) == 2
    assert "already exists; --overwrite replaces it" in capsys.readouterr().err
    assert bucket.get("all") == b"somebody's" and pending(bucket) == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("kind", FORMATS)
def test_an_export_that_breaks_off_leaves_the_old_object(run_dir, bucket, s3_server, monkeypatch, kind, error):
    def breaks_off() -> None:
        raise error

    bucket.put("all", b"the old one")
    with monkeypatch.context() as patch:
        while_reading(patch, breaks_off)
        assert export(run_dir, kind, f"{bucket.url}/all", s3_server, "--overwrite") == (
            4 if error is KeyboardInterrupt else 1
        )
    assert bucket.get("all") == b"the old one" and names(bucket) == ["all"] and pending(bucket) == 0


def test_an_interrupt_stays_one_where_the_store_takes_no_more(run_dir, bucket, s3_server, monkeypatch):
    def interrupted() -> None:
        s3_server.fail("503", part="/all", times=10**6)
        raise KeyboardInterrupt

    while_reading(monkeypatch, interrupted)
    assert export(run_dir, "parquet", f"{bucket.url}/all", s3_server) == 4  # closing the writer may send another part
    assert names(bucket) == [] and pending(bucket) == 0


@pytest.mark.parametrize("kind", FORMATS)
def test_a_store_that_takes_no_more_is_named_and_nothing_is_left(run_dir, bucket, s3_server, kind, capsys):
    s3_server.fail("503", part="/all", times=10**6)
    assert export(run_dir, kind, f"{bucket.url}/all", s3_server) == 1
    said = capsys.readouterr().err
    assert f"draftmill: {bucket.url}/all" in said and ": SlowDown (503) (--debug shows where)" in said
    s3_server.calm()
    assert names(bucket) == [] and pending(bucket) == 0


def test_an_export_begins_with_aborting_what_a_killed_one_left(run_dir, bucket, s3_server, monkeypatch):
    for name in ("all", "all.errors", "another"):
        upload.Upload(bucket, name, part_bytes=5 * 2**20).write(bytes(6 * 2**20))  # never ended
    monkeypatch.setattr(upload, "ORPHAN_S", -10.0)
    assert export(run_dir, "openai", f"{bucket.url}/all", s3_server) == 0
    left = [found["Key"] for found in bucket.ask("list_multipart_uploads", "")["Uploads"]]
    assert names(bucket) == ["all", "all.errors"] and left == ["another"]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.slow
def test_an_export_in_a_storm_of_faults_is_the_one_on_disk(run_dir, tmp_path, bucket, s3_server, monkeypatch, seed):
    assert export(run_dir, "openai", tmp_path / "all", s3_server) == 0
    run = copied(run_dir, bucket)
    if not os.environ.get(VARIABLE):
        monkeypatch.setattr(upload, "PART_BYTES", 64)
    storm = s3_server.rage(0.2, seed=seed, stall_s=0.01)
    assert export(run, "openai", f"{bucket.url}/all", s3_server) == 0
    s3_server.calm()
    assert storm.struck.total() >= (0 if os.environ.get(VARIABLE) else 5), "nothing but a breeze"
    for name in ("all", "all.errors"):
        assert bucket.get(name) == (tmp_path / name).read_bytes()
    assert pending(bucket) <= storm.struck["lost"], "a begun upload whose name was lost, and nothing else"
