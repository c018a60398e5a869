"""What S3 does when the network doesn't: lost answers, slow-downs, broken bodies, ignored conditions."""

import pytest

from draftmill.storage.errors import StoreError, StoreRefused, UserError
from draftmill.storage.stores.s3 import ATTEMPTS, S3Store
from draftmill.storage.stores.store import AlreadyExists, Conflict, NotFound, S3Options, probe

pytestmark = pytest.mark.s3


def test_a_creation_whose_answer_was_lost_is_a_success(s3_store, s3_server):
    s3_server.fail("lost")
    stat = s3_store.create("data/a", b"mine", metadata={"unit": "1"})
    assert stat.metadata["unit"] == "1"
    assert s3_store.get("data/a") == b"mine"
    with pytest.raises(AlreadyExists) as refused:
        s3_store.create("data/a", b"mine", metadata={"unit": "1"})
    assert refused.value.stat.metadata["unit"] == "1"


def test_a_replacement_whose_answer_was_lost_is_a_success(s3_store, s3_server):
    first = s3_store.create("lease", b"1")
    s3_server.fail("lost")
    second = s3_store.replace("lease", b"2", etag=first.etag)
    s3_store.replace("lease", b"3", etag=second.etag)
    with pytest.raises(Conflict):
        s3_store.replace("lease", b"4", etag=second.etag)


@pytest.mark.parametrize("kind", ["503", "500", "409", "reset"])
def test_a_passing_fault_is_tried_again(kind, s3_store, s3_server):
    s3_server.fail(kind, times=3)
    s3_store.create("data/a", b"x")
    assert s3_store.get("data/a") == b"x"


def test_a_body_that_breaks_off_is_read_again(s3_store, s3_server):
    s3_store.create("data/a", b"0123456789" * 1000)
    s3_server.fail("cut", method="GET", times=2)
    assert s3_store.get("data/a") == b"0123456789" * 1000


def test_a_lasting_fault_ends_after_bounded_attempts(s3_store, s3_server):
    s3_server.fail("503", times=1000)
    s3_server.app.requests.clear()
    with pytest.raises(StoreError, match="SlowDown"):
        s3_store.create("data/a", b"x")
    assert len(s3_server.app.requests) == ATTEMPTS


def test_retries_are_logged_once_and_without_secrets(s3_store, s3_server, caplog):
    s3_server.fail("503", times=4)
    s3_store.create("data/a", b"x")
    assert len([record for record in caplog.records if record.name == "draftmill.storage.stores.s3"]) == 1
    assert "test-secret" not in caplog.text


def test_a_missing_bucket_is_the_users_error(s3_options):
    store = S3Store("s3://no-such-bucket-here/run", s3_options)
    with pytest.raises(StoreRefused, match="no-such-bucket-here"):
        probe(store)
    with pytest.raises(StoreRefused, match="no-such-bucket-here"):
        list(store.list())


def test_an_unreachable_endpoint_is_named_after_bounded_attempts():
    options = S3Options(endpoint="http://127.0.0.1:9", region="us-east-1")
    store = S3Store("s3://bucket/run", options, sleep=lambda _: None)
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:9"):
        store.get("a")


def test_a_malformed_endpoint_names_its_field():
    with pytest.raises(UserError, match=r"^s3\.endpoint"):
        S3Store("s3://bucket", S3Options(endpoint="not a url"))


def test_credentials_in_an_endpoint_are_refused_unsaid():
    with pytest.raises(UserError) as refused:
        S3Store("s3://bucket", S3Options(endpoint="http://me:hunter2@host:9000"))
    assert "hunter2" not in str(refused.value)


def test_missing_credentials_are_the_users_error(s3_server, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    with pytest.raises(StoreRefused, match="credentials"):
        S3Store("s3://bucket", S3Options(endpoint=s3_server.endpoint, region="eu-west-1")).get("a")


def test_listing_goes_on_page_by_page(s3_store, monkeypatch):
    monkeypatch.setattr("draftmill.storage.stores.s3.PAGE_KEYS", 3)
    for index in range(10):
        s3_store.put(f"data/{index}", b"")
    assert [stat.name for stat in s3_store.list("data/")] == [f"data/{index}" for index in range(10)]


@pytest.mark.parametrize(
    ("key", "variable", "is_sent"),
    [
        ("auto", None, True),
        ("auto", "WHEN_REQUIRED", False),
        ("auto", "when_supported", True),
        ("when_required", None, False),
        ("when_supported", "when_required", True),
    ],
)
def test_auto_follows_the_variable_of_boto3(key, variable, is_sent, monkeypatch):
    if variable is not None:
        monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", variable)
    assert S3Store("s3://bucket/run", S3Options(checksums=key)).with_checksums == is_sent


@pytest.mark.parametrize("checksums", ["auto", "when_required", "when_supported"])
def test_every_checksum_setting_writes_and_reads(checksums, s3_url, s3_server):
    store = S3Store(s3_url, S3Options(endpoint=s3_server.endpoint, region="us-east-1", checksums=checksums))
    store.create("a", b"x" * 1000)
    assert store.get("a") == b"x" * 1000
    with pytest.raises(NotFound):
        store.get("b")
