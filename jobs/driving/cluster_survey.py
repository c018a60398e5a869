"""Planning on the cluster: decides whether Ray tasks read and tokenize the inputs, and lets them.

    small inputs, one CPU, `run --local`     the driver reads them itself, in threads, while Ray starts
    anything else                            tasks read chunks of the inputs (actors/planning/survey_pool.py)

The plan is the same to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from draftmill.actors.planning.survey_items import packed
from draftmill.actors.rows.makers import Maker
from draftmill.jobs.plan.prepare import Prepared
from draftmill.jobs.plan.survey import Survey, reading_of
from draftmill.jobs.spec.job_spec import JobSpec
from draftmill.storage.inputs.kept import KeptTypes
from draftmill.storage.inputs.rows import InputFile

LEAST_BYTES = 64 * 2**20
"""Smaller inputs are read sooner than processes that tokenize have started. A Ray of our own must also start first, so that
twice as much is needed there."""

LEAST_LIMIT = 1_000_000
"""With a smaller `input.limit`, most of the input is not read at all."""

MOST_TASKS = 256
"""Tasks at once, at most: the driver takes about a third of a million rows per second from them."""


def pays(prepared: Prepared, num_cpus: int, *, is_ours: bool) -> bool:
    """Whether tasks are worth their start. A tokenizer that needs code of its checkpoint stays in this process."""
    spec = prepared.spec
    size = sum(file.size or 0 for file in prepared.inputs)
    is_limited = spec.input.limit is not None and spec.input.limit < LEAST_LIMIT
    is_large = size >= LEAST_BYTES * (2 if is_ours else 1)
    return num_cpus > 1 and is_large and not is_limited and not spec.model.trust_remote_code


def cluster_survey(prepared: Prepared, num_cpus: int, *, is_ours: bool, note: Callable[[str], None]) -> Survey:
    """A survey by Ray tasks; Ray must be connected.

    In a Ray of our own the workers, which wait for the plan, hold all CPUs: tasks then ask for none, and there are as many as
    CPUs.
    """

    def surveyed(
        spec: JobSpec, maker: Maker, inputs: Sequence[InputFile], kept: KeptTypes | None = None
    ) -> Iterator[pa.Table]:
        from draftmill.actors.planning.survey_items import SurveyJob
        from draftmill.actors.planning.survey_pool import SurveyPool

        job = SurveyJob(
            reading=reading_of(spec),
            info=prepared.info,
            decoder=spec.decoder,
            sampling=spec.sampling,
            ends=tuple(prepared.hashes.ends),
            truncate=spec.input.truncate,
            tokenizer=packed(prepared.folder, spec.model.tokenizer),
        )
        at_once = min(MOST_TASKS, num_cpus if is_ours else 2 * num_cpus)
        pool = SurveyPool(job, cpus=0 if is_ours else 1, at_once=at_once, note=note)
        return pool.tables(maker, inputs, kept, spec.input.limit)

    return surveyed
