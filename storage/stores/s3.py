"""A store under s3://bucket/prefix, through boto3: single PUTs, conditional where the verb says so.

Conditional multipart completion is not used here: a widespread server overwrites silently there (exports, which may be of any
size, go through upload.py). Retries are ours (tenacity) and boto3's are off, so that a lost answer can be recognised: each
conditional write carries a unique token, and if the existing object has that token, our write has succeeded.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, TypeVar

import boto3
import tenacity
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError

from draftmill.storage.errors import StoreError, StoreRefused, UserError
from draftmill.storage.failpoints import failpoint
from draftmill.storage.secrets import presentable
from draftmill.storage.stores.store import (
    AlreadyExists,
    Conflict,
    FolderLevel,
    NotFound,
    Place,
    S3Options,
    Stat,
    Store,
)

TOKEN = "write-token"
ATTEMPTS = 8
MAX_WAIT_S = 10.0
TIMEOUT_S = 60
REFUSED_ATTEMPTS = 5
REFUSED_WAIT_S = 0.5
"""A refusal is retried after 0.5, 1, 2 and 4 s: credentials that are being renewed or spread are refused for some seconds."""

MAX_PUT_BYTES = 5 * 2**30
PAGE_KEYS = 1000

_PASSING = frozenset({"SlowDown", "RequestTimeout", "Throttling", "RequestLimitExceeded", "ConditionalRequestConflict"})
_REFUSALS = frozenset({400, 401, 403})
_log = logging.getLogger(__name__)
T = TypeVar("T")


class _BeyondEnd(StoreError):
    """A range begins at or after the object's end."""


class S3Store(Store):
    """A bucket, or a prefix in one, as a Store. `sleep` (seconds) waits between attempts."""

    def __init__(self, url: str, options: S3Options, *, sleep: Callable[[float], None] = time.sleep) -> None:
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        if not bucket:
            raise UserError(f"{url!r} names no bucket: s3://bucket/prefix")
        self.url, self.place = url, Place(url, options)
        self.bucket, self._prefix = bucket, f"{prefix.rstrip('/')}/" if prefix else ""
        self._sleep = sleep
        self.client = _client(options)

    def get(self, name: str) -> bytes:
        return self._read(name)

    def get_range(self, name: str, start: int, length: int, *, etag: str | None = None) -> bytes:
        """With If-Match, if there is an etag."""
        condition = {} if etag is None else {"IfMatch": etag}
        try:
            return self._read(name, Range=f"bytes={start}-{start + length - 1}", **condition) if length else b""
        except _BeyondEnd:
            return b""

    def create(self, name: str, data: bytes, *, metadata: dict[str, str] | None = None) -> Stat:
        """One PutObject with If-None-Match and a SHA-256 checksum."""
        failpoint("s3.before_create")
        is_ours, stat = self._write_if(name, data, metadata or {}, IfNoneMatch="*")
        if stat is None:
            raise StoreError(f"{self.where(name)} was refused as existing, but does not exist")
        if not is_ours:
            raise AlreadyExists(stat)
        failpoint("s3.after_create")
        return stat

    def put(self, name: str, data: bytes) -> Stat:
        failpoint("s3.before_put")
        try:
            answer = self._write(name, data, {})
        except ClientError as error:
            raise self.error_of(name, error) from None
        return Stat(name, len(data), _etag(answer))

    def replace(self, name: str, data: bytes, *, etag: str) -> Stat:
        """One PutObject with If-Match."""
        failpoint("s3.before_replace")
        is_ours, stat = self._write_if(name, data, {}, IfMatch=etag)
        if not is_ours or stat is None:
            raise Conflict(f"{self.where(name)} has changed")
        return stat

    def list(self, prefix: str = "") -> Iterator[Stat]:
        """One request for each thousand objects, as they are consumed."""
        for page in self._pages(Prefix=self._prefix + prefix):
            for item in page.get("Contents", ()):
                yield self._item_stat(item)

    def level(self, folder: str = "") -> FolderLevel:
        """One request for each thousand folders and objects."""
        prefix = f"{self._prefix}{folder}/" if folder else self._prefix
        folders, files = [], {}
        for page in self._pages(Prefix=prefix, Delimiter="/"):
            folders += [item["Prefix"].removeprefix(prefix).rstrip("/") for item in page.get("CommonPrefixes", ())]
            for item in page.get("Contents", ()):
                if name := item["Key"].removeprefix(prefix):  # some tools make an empty object for a folder
                    files[name] = self._item_stat(item)
        return FolderLevel(tuple(folders), files)

    def _pages(self, **query: Any) -> Iterator[dict[str, Any]]:
        query |= {"MaxKeys": PAGE_KEYS}
        while True:
            page = self._call("", self.client.list_objects_v2, **query)
            yield page
            if not page.get("IsTruncated"):
                return
            query["ContinuationToken"] = page["NextContinuationToken"]

    def _item_stat(self, item: dict[str, Any]) -> Stat:
        name = item["Key"].removeprefix(self._prefix)
        return Stat(name, item["Size"], _etag(item), {}, item["LastModified"].timestamp())

    def stat(self, name: str) -> Stat | None:
        try:
            head = self._call(name, self.client.head_object, Key=self.key(name))
        except NotFound:
            return None
        return Stat(name, head["ContentLength"], _etag(head), head["Metadata"], head["LastModified"].timestamp())

    def delete(self, name: str) -> None:
        self._call(name, self.client.delete_object, Key=self.key(name))

    # ---- for uploads in parts, too

    def ask(self, operation: str, name: str, **arguments: Any) -> Any:
        """The answer to a request, with retries; persistent ClientErrors are raised unchanged for the caller to handle."""
        return self._retry(name, getattr(self.client, operation), **arguments)

    def key(self, name: str) -> str:
        """The object's key in the bucket."""
        return self._prefix + name

    @property
    def with_checksums(self) -> bool:
        """Whether writes carry SHA-256 checksums; `auto` follows boto3's variable."""
        theirs = os.environ.get("AWS_REQUEST_CHECKSUM_CALCULATION", "").lower()
        return (theirs if self.place.s3.checksums == "auto" else self.place.s3.checksums) != "when_required"

    def where(self, name: str) -> str:
        """The object's URL, for messages."""
        return f"s3://{self.bucket}/{self._prefix}{name}"

    def error_of(self, name: str, error: ClientError) -> Exception:
        """Our error for one of S3's: NotFound, StoreRefused if the user must act, else StoreError."""
        code = str(error.response["Error"].get("Code", ""))
        if code == "NoSuchBucket":
            return StoreRefused(f"{self.url}: there is no bucket {self.bucket!r}")
        if status_of(error) == 416:
            return _BeyondEnd(f"{self.where(name)} ends before the range")
        if status_of(error) == 412:
            return Conflict(f"{self.where(name)} has changed since it was listed")
        if status_of(error) == 404:
            return NotFound(f"{self.where(name)} does not exist")
        if status_of(error) in {301, *_REFUSALS}:
            return StoreRefused(f"{self.where(name)}: refused ({code or status_of(error)})")
        return StoreError(f"{self.where(name)}: {code} ({status_of(error)})")

    # ---- requests

    def _read(self, name: str, **arguments: str) -> bytes:
        def read(**call: Any) -> bytes:
            # The body is read inside the attempt: it may be interrupted, and boto3 doesn't retry that.
            return bytes(self.client.get_object(**call)["Body"].read())

        return self._call(name, read, Key=self.key(name), **arguments)

    def _write_if(self, name: str, data: bytes, metadata: dict[str, str], **condition: str) -> tuple[bool, Stat | None]:
        """Whether the object is now what was written, and its facts; if the condition is not met, those of what is there."""
        token = secrets.token_hex(16)
        try:
            answer = self._write(name, data, {**metadata, TOKEN: token}, **condition)
        except ClientError as error:
            if status_of(error) != 412 and not ("IfMatch" in condition and status_of(error) == 404):
                raise self.error_of(name, error) from None
            stat = self.stat(name)
            return stat is not None and stat.metadata.get(TOKEN) == token, stat
        return True, Stat(name, len(data), _etag(answer), dict(metadata))

    def _write(self, name: str, data: bytes, metadata: dict[str, str], **condition: str) -> dict[str, Any]:
        """PutObject with retries; persistent ClientErrors are raised unchanged for the verb to handle."""
        assert len(data) <= MAX_PUT_BYTES, f"{name} is beyond what one PutObject takes"
        checksum = {"ChecksumSHA256": sha256(data)} if self.with_checksums else {}
        more = {"Metadata": metadata, **checksum, **condition}
        return self.ask("put_object", name, Key=self.key(name), Body=data, **more)

    def _call(self, name: str, function: Callable[..., T], **arguments: Any) -> T:
        try:
            return self._retry(name, function, **arguments)
        except ClientError as error:
            raise self.error_of(name, error) from None

    def _retry(self, name: str, function: Callable[..., T], **arguments: Any) -> T:
        """Try up to ATTEMPTS times (REFUSED_ATTEMPTS if refused), with exponential waits, while the failure may be temporary."""
        retrying = tenacity.Retrying(
            stop=lambda state: state.attempt_number >= (REFUSED_ATTEMPTS if _was_refused(state) else ATTEMPTS),
            wait=lambda state: min(MAX_WAIT_S, (_wait_refused if _was_refused(state) else _wait)(state)),
            retry=tenacity.retry_if_exception(_may_pass),
            before_sleep=lambda state: self._log_once(name, state),
            sleep=self._sleep,
            reraise=True,
        )
        try:
            return retrying(function, Bucket=self.bucket, **arguments)
        except (NoCredentialsError, PartialCredentialsError):
            raise StoreRefused(f"{self.url}: no S3 credentials were found in the environment") from None
        except ParamValidationError as error:
            raise StoreRefused(f"{self.url}: {error}") from None
        except BotoCoreError as error:
            raise StoreError(f"{self.where(name)}: {error}") from None

    def _log_once(self, name: str, state: tenacity.RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            error = presentable(str(state.outcome.exception()))
            _log.warning("%s: %s; retrying", self.where(name), error)


@lru_cache(maxsize=8)
def _client(options: S3Options) -> Any:
    """A client for these options, shared by all stores and threads of the process."""
    addressing = options.addressing
    if addressing == "auto":
        addressing = "path" if options.endpoint else "auto"
    checksums = "when_supported" if options.checksums == "when_supported" else "when_required"
    config = Config(
        s3={"addressing_style": addressing},
        retries={"total_max_attempts": 1},
        connect_timeout=TIMEOUT_S,
        read_timeout=TIMEOUT_S,
        max_pool_connections=32,
        request_checksum_calculation=checksums,
        response_checksum_validation=checksums,
    )
    # Use a separate session: boto3's default one is not safe to share between threads.
    if options.endpoint and "@" in options.endpoint:
        raise UserError("an endpoint may not carry credentials; give them in the environment", field="s3.endpoint")
    session = boto3.session.Session()
    try:
        return session.client("s3", endpoint_url=options.endpoint, region_name=options.region, config=config)
    except ValueError as error:
        raise UserError(str(error), field="s3.endpoint") from None


_wait = tenacity.wait_random_exponential(multiplier=0.1, max=MAX_WAIT_S)
_wait_refused = tenacity.wait_exponential(multiplier=REFUSED_WAIT_S)


def _was_refused(state: tenacity.RetryCallState) -> bool:
    error = state.outcome.exception() if state.outcome is not None else None
    return isinstance(error, ClientError) and status_of(error) in _REFUSALS


def _may_pass(error: BaseException) -> bool:
    """Whether an error may be temporary: timeouts, resets, broken bodies, 5xx, 429, conflicting conditional writes, refusals."""
    if isinstance(error, ClientError):
        code = error.response["Error"].get("Code", "")
        status = status_of(error)
        return status >= 500 or status == 429 or status in _REFUSALS or code in _PASSING
    return isinstance(error, HTTPClientError | BotoConnectionError | IncompleteReadError)


def status_of(error: ClientError) -> int:
    """The HTTP status of an error answer."""
    return int(error.response["ResponseMetadata"]["HTTPStatusCode"])


def _etag(answer: Any) -> str:
    return str(answer["ETag"]).strip('"')  # one server accepts If-Match only without the quotes


def sha256(data: bytes | bytearray) -> str:
    """The digest as S3 wants it, in base64."""
    return base64.b64encode(hashlib.sha256(data).digest()).decode()
