"""The names of submitted jobs: a run directory has one job at a time, and every submission a name of its own. Pure.

A name is the job's name, a hash of the run directory, and a number that grows. Two submissions of the same run at the same moment
choose the same name, which Ray refuses to the second: so one job runs, and both can follow it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Protocol

from draftmill.jobs.plan.worker_job import absolute
from draftmill.jobs.spec.job_spec import JobSpec

RUN = "draftmill.run"
SPEC = "draftmill.spec"
"""Keys of a job's metadata: its run directory, and a hash of what was asked."""


class KnownJob(Protocol):
    """What is read of a job that the cluster knows (ray.job_submission.JobDetails)."""

    submission_id: str | None
    status: str


def run_of(spec: JobSpec) -> str:
    """The run directory, as the cluster will know it."""
    return absolute(spec.output.path.rstrip("/"))


def stem_of(name: str, run: str, endpoint: str | None = None) -> str:
    """What the names of all submissions of a run begin with."""
    digest = hashlib.blake2b(f"{endpoint or ''}\n{run}".encode(), digest_size=6).hexdigest()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40].strip("-")
    return "-".join(filter(None, ["draftmill", slug, digest]))


def digest_of(*parts: str) -> str:
    """A short hash of what was asked, to tell a repeated submission from a changed one."""
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=6).hexdigest()


def numbered(stem: str, jobs: Sequence[KnownJob]) -> list[tuple[int, KnownJob]]:
    """The submissions of a run, oldest first, with their numbers. Goes by the hash: a job may have been renamed."""
    digest = stem.rpartition("-")[2]
    pattern = re.compile(rf"draftmill-(?:[a-z0-9-]+-)?{digest}-(\d+)")
    found = [(pattern.fullmatch(job.submission_id or ""), job) for job in jobs]
    return sorted(((int(match[1]), job) for match, job in found if match), key=lambda pair: pair[0])


def next_name(stem: str, jobs: Sequence[KnownJob]) -> str:
    """The name of the next submission of a run."""
    known = numbered(stem, jobs)
    return f"{stem}-{known[-1][0] + 1 if known else 1}"


def is_over(job: KnownJob) -> bool:
    """Whether a job has ended, in any way."""
    return str(job.status) in {"STOPPED", "SUCCEEDED", "FAILED"}
