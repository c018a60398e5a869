"""What cron and systemd share: the command of a run on this machine, or on a Ray cluster that it reaches."""

from __future__ import annotations

import re

from draftmill.jobs.manifests.job import Job
from draftmill.jobs.manifests.visible import check_folder, refuse_unseen
from draftmill.storage.errors import UserError

HOW = "a folder that all nodes of the cluster share, as an absolute path (--shared-path FOLDER)"


def check_places(job: Job) -> None:
    """Refuse paths that the nodes of another cluster can't see; on one machine all can be seen."""
    if job.options.head_address is not None:
        refuse_unseen(job.spec, [check_folder(path, "--shared-path") for path in job.options.shared_path], how=HOW)


def run_words(job: Job) -> list[str]:
    """The command of the driver, as words."""
    words = [job.program, "run", job.path, *job.sets(), "--if-running", "skip"]
    return words if job.options.head_address is None else [*words, "--ray-address", _address(job.options.head_address)]


def _address(given: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.\[\]:-]+:\d{1,5}", given):
        raise UserError(
            f"{given!r} is not allowed; allowed: HOST:PORT of the cluster's head, like 10.0.0.1:6379",
            field="--head-address",
        )
    return given
