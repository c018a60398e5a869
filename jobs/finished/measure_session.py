"""Measures what a finished run lacks, under the run's lease: one command's work from the lease to its last file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from draftmill.jobs.driving.backend import backend_of
from draftmill.jobs.driving.driver import StopFlag
from draftmill.jobs.driving.lease_keeper import kept_lease
from draftmill.jobs.driving.progress import make_display
from draftmill.jobs.driving.session import RayDidNotStart
from draftmill.jobs.finished.measure import measure_units, units_to_measure
from draftmill.jobs.finished.metric_ready import Ready
from draftmill.jobs.finished.passes import finished, passes_of
from draftmill.jobs.spec.job_spec import JobSpec
from draftmill.storage.errors import StoreError
from draftmill.storage.runs.lease import Lease, LeaseHeld, LeaseLost
from draftmill.storage.stores.interface import S3Options, Store
from draftmill.storage.stores.store import delete_strays


class Options(Protocol):
    """How to run (draftmill.jobs.running.session.RunOptions)."""

    @property
    def ray_address(self) -> str | None: ...

    @property
    def local(self) -> bool: ...

    @property
    def quiet(self) -> bool: ...

    @property
    def grace_s(self) -> float: ...


def measure_run(
    store: Store,
    spec: JobSpec,
    ready: Ready,
    options: Options,
    *,
    s3: S3Options | None,
    lease: Callable[[Store, Callable[[str], None]], AbstractContextManager[Lease]] = kept_lease,
) -> bool:
    """Measure what a finished run lacks; returns whether all is measured. If not, the user has been told why.

    `lease` holds the run's lease; of its errors only LeaseHeld is told here.
    """
    if not units_to_measure(store, passes_of(store, s3=s3), ready):
        return True
    backend = backend_of(address=options.ray_address, local=options.local)
    stop = StopFlag()
    try:
        with lease(store, stop.set), make_display(quiet=options.quiet) as display:
            delete_strays(store)
            is_done = measure_units(
                store,
                spec,
                passes_of(store, s3=s3),  # read again: under the lease, no other driver adds a pass
                ready,
                backend=backend,
                local=options.local,
                display=display,
                stop=stop,
                grace_s=options.grace_s,
                s3=s3 or S3Options(),
            )
    except (LeaseHeld, LeaseLost) as error:
        print(f"draftmill: {error}", file=sys.stderr)
        return False
    except RayDidNotStart as error:
        raise StoreError(f"{error}; run it again to resume") from error
    if not is_done:
        say_interrupted(store, ready, s3=s3)
    return is_done


def say_interrupted(store: Store, ready: Ready, *, s3: S3Options | None) -> None:
    """Say how far an interrupted measurement came."""
    passes = finished(passes_of(store, s3=s3))
    units, left = sum(one.plan.units for one in passes), len(units_to_measure(store, passes, ready))
    print(
        f"draftmill: interrupted with {units - left:,} of {units:,} units measured; run it again to resume",
        file=sys.stderr,
    )
