"""A dataset of the Hugging Face hub, hf://datasets/OWNER/NAME, to read and to publish; @REVISION reads another version.

Data is sent when it is put, and appears with all other changes in one commit. The hub keeps what was sent for a commit that
failed: it is not sent again. `huggingface_hub` finds the token, and retries.
"""

from __future__ import annotations

import re
from typing import Any

from draftmill.storage.errors import StoreRefused
from draftmill.storage.stores.fsspec_store import FsspecStore

HUB_DATASET = re.compile(r"hf://datasets/([\w.-]+/[\w.-]+)(@[^/@]+)?")


class HubStore(FsspecStore):
    """A dataset as a ReadStore, and its next commit."""

    def __init__(self, url: str) -> None:
        import huggingface_hub  # it takes a second

        if (match := HUB_DATASET.fullmatch(url)) is None:
            raise StoreRefused(f"{url!r} is not allowed; allowed: hf://datasets/OWNER/NAME")
        super().__init__(url)
        self._files.invalidate_cache()  # fsspec shares drivers, and this one caches listings
        self._hub, self._api, self._changes = huggingface_hub, huggingface_hub.HfApi(), list[Any]()
        self._dataset: dict[str, Any] = {"repo_id": match[1], "repo_type": "dataset"}

    def put(self, name: str, data: bytes) -> None:
        """Send the data, unless the hub has it, and add it to the commit; a dataset that does not exist is created, private."""
        added = self._hub.CommitOperationAdd(name, data)
        with self._errors(name):
            if not self._changes:
                self._api.create_repo(**self._dataset, private=True, exist_ok=True)
            self._api.preupload_lfs_files(**self._dataset, additions=[added])
        self._changes.append(added)

    def delete(self, name: str) -> None:
        """Add the deletion to the commit."""
        self._changes.append(self._hub.CommitOperationDelete(name))

    def commit(self, message: str) -> None:
        """Let all changes appear at once."""
        with self._errors(""):
            self._api.create_commit(**self._dataset, operations=self._changes, commit_message=message)
