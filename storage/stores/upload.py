"""Streams a file of any size to S3 in parts; it appears under its name whole or not at all.

    with Upload(store, "answers.jsonl") as file:
        file.write(...)

Memory holds one part. The request that completes the upload takes the name, or a single PutObject if there is only one part.
A killed exporter leaves parts that no listing of objects shows and that cost money; the next writer of that name removes them
with `abort_orphans`. Knows nothing of rows.
"""

from __future__ import annotations

import io
import logging
import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from draftmill.storage.errors import StoreError
from draftmill.storage.stores.s3 import TOKEN, S3Store, sha256, status_of
from draftmill.storage.stores.store import AlreadyExists

PART_BYTES = 16 * 2**20
MAX_PARTS = 10_000
PARTS_OF_A_SIZE = 150
"""After this many parts they grow by PART_BYTES: 10,000 parts make 5.2 TiB, above S3's limit; the last has 1 GiB."""

ORPHAN_S = 3600.0
"""A younger upload may belong to a running exporter."""

_log = logging.getLogger(__name__)


class Upload(io.RawIOBase):
    """One object in progress, as a write-only, append-only binary file.

    Leaving the `with` block publishes it; an exception or interrupt leaves nothing. With `overwrite` it replaces what has the
    name; without, AlreadyExists is raised, at the end if the name was taken in the meantime. A failed write ends the upload.
    """

    def __init__(self, store: S3Store, name: str, *, overwrite: bool = False, part_bytes: int | None = None) -> None:
        self._store, self._name = store, name
        self._overwrite, self._part_bytes = overwrite, part_bytes or PART_BYTES
        self._token = secrets.token_hex(16)
        self._upload_id: str | None = None
        self._parts: list[dict[str, Any]] = []
        self._sent_bytes = 0
        self._buffer = bytearray()

    def write(self, data: Any) -> int:
        """Take the bytes, and send each full part when more data follows. Raises StoreError."""
        self._check_open()
        rest = memoryview(data).cast("B")
        count = len(rest)
        while rest:
            room = part_size(len(self._parts) + 1, self._part_bytes) - len(self._buffer)
            if not room:
                self._or_nothing(self._send_part)
                continue
            self._buffer += rest[:room]
            rest = rest[room:]
        return count

    def publish(self) -> None:
        """Give the object its name. Raises AlreadyExists if it is taken and may not be overwritten."""
        self._check_open()
        self._or_nothing(self._complete if self._upload_id else self._put)
        self._end()

    def close(self) -> None:
        """Abort an unpublished upload and remove its parts. Does nothing after `publish`."""
        upload_id = self._upload_id
        self._end()
        if upload_id is not None:
            _abort(self._store, self._name, upload_id)

    def tell(self) -> int:
        return self._sent_bytes + len(self._buffer)

    def writable(self) -> bool:
        return True

    def __del__(self) -> None:
        """A file would close itself here, which asks the store."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.publish()
        else:
            self.close()

    def _or_nothing(self, step: Callable[[], object]) -> None:
        try:
            step()
        except BaseException:
            self.close()
            raise

    def _end(self) -> None:
        self._upload_id, self._buffer = None, bytearray()
        super().close()

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("the upload has ended")

    def _send_part(self) -> None:
        store, number, data = self._store, len(self._parts) + 1, self._buffer
        if number > MAX_PARTS:
            raise StoreError(f"{store.where(self._name)}: S3 takes no more than {MAX_PARTS:,} parts")
        if self._upload_id is None:
            kind = {"ChecksumAlgorithm": "SHA256"} if store.with_checksums else {}
            answer = self._ask("create_multipart_upload", Metadata={TOKEN: self._token}, **kind)
            self._upload_id = answer["UploadId"]
        checksum = {"ChecksumSHA256": sha256(data)} if store.with_checksums else {}
        answer = self._ask("upload_part", UploadId=self._upload_id, PartNumber=number, Body=data, **checksum)
        self._parts.append({"PartNumber": number, "ETag": answer["ETag"], **checksum})
        self._sent_bytes += len(data)
        self._buffer = bytearray()

    def _put(self) -> None:
        write = self._store.put if self._overwrite else self._store.create
        write(self._name, bytes(self._buffer))

    def _complete(self) -> None:
        """Complete the upload. If an answer was lost and the retry is refused, it is a success if the object is ours."""
        self._send_part()
        store, name = self._store, self._name
        stat = None if self._overwrite else store.stat(name)
        if stat is not None:  # a server that ignores the condition below would overwrite it
            raise AlreadyExists(stat)
        condition = {} if self._overwrite else {"IfNoneMatch": "*"}
        parts = {"Parts": self._parts}
        place = {"Key": store.key(name), "UploadId": self._upload_id}
        try:
            store.ask("complete_multipart_upload", name, **place, MultipartUpload=parts, **condition)
        except ClientError as error:
            if status_of(error) not in {404, 412}:
                raise store.error_of(name, error) from None
            stat = store.stat(name)
            if stat is not None and stat.metadata.get(TOKEN) == self._token:
                return
            if stat is not None and status_of(error) == 412:
                raise AlreadyExists(stat) from None
            raise self._error_of(error) from None

    def _ask(self, operation: str, **arguments: Any) -> Any:
        try:
            return self._store.ask(operation, self._name, Key=self._store.key(self._name), **arguments)
        except ClientError as error:
            raise self._error_of(error) from None

    def _error_of(self, error: ClientError) -> Exception:
        where = self._store.where(self._name)
        if _code(error) == "NoSuchUpload":
            return StoreError(f"{where}: another process has ended the upload; the file is not written")
        if status_of(error) == 412:
            return StoreError(f"{where} was refused as existing, but does not exist")
        return self._store.error_of(self._name, error)


def part_size(number: int, part_bytes: int) -> int:
    """Bytes of the part of this number, from 1, where the first one has `part_bytes`."""
    return part_bytes * (1 + number // PARTS_OF_A_SIZE)


# ---- what killed exporters left


def abort_orphans(store: S3Store, name: str) -> int:
    """Abort the uploads to this very name that were begun more than ORPHAN_S ago, and return how many there were.

    Raises StoreRefused if there is no such bucket. Where uploads can't be listed nothing is done: many may not list them.
    """
    key, old = store.key(name), list[str]()
    pages = store.client.get_paginator("list_multipart_uploads").paginate(Bucket=store.bucket, Prefix=key)
    try:
        for page in pages:
            date = page["ResponseMetadata"]["HTTPHeaders"].get("date")  # by the store's own clock, if it tells
            until = (parsedate_to_datetime(date) if date else datetime.now(UTC)) - timedelta(seconds=ORPHAN_S)
            uploads = (upload for upload in page.get("Uploads", ()) if upload["Key"] == key)
            old += [upload["UploadId"] for upload in uploads if upload["Initiated"] < until]
    except (ClientError, BotoCoreError) as error:
        if isinstance(error, ClientError) and _code(error) == "NoSuchBucket":
            raise store.error_of(name, error) from None
        _log.warning(
            "%s: can't look for parts that killed exporters left (%s)", store.where(name), " ".join(str(error).split())
        )
        return 0
    for upload_id in old:
        _abort(store, name, upload_id)
    return len(old)


def _abort(store: S3Store, name: str, upload_id: str) -> None:
    """Abort an upload; if that fails, the next exporter to this name will do it."""
    try:
        store.ask("abort_multipart_upload", name, Key=store.key(name), UploadId=upload_id)
    except (StoreError, ClientError) as error:
        if not isinstance(error, ClientError) or status_of(error) != 404:
            _log.warning("%s: the parts of an upload could not be removed (%s)", store.where(name), error)


def _code(error: ClientError) -> str:
    return str(error.response["Error"].get("Code", "") or status_of(error))
