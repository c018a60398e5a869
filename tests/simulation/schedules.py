"""Schedules: jobs drawn from seeds, the fakes put in place, a schedule played to its end and checked."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from draftmill.jobs.drive import run_log
from draftmill.jobs.drive.driver import Driver
from draftmill.jobs.run import session
from draftmill.storage.runs import commit as committer
from draftmill.storage.runs.records import Sums
from tests.simulation.disk import Job, check_promise
from tests.simulation.workers import unit_file
from tests.simulation.world import TTL_S, SimThread, World


@contextmanager
def simulated() -> Iterator[dict]:
    """Put the fakes in the place of Ray, threads, Parquet and the clock; yields a place for the world at work."""
    at_work: dict = {}
    clock = lambda: at_work["world"].now_s  # noqa: E731
    fakes: dict = {
        "make_job": lambda resolved, plan: resolved.process,
        "Driver": partial(Driver, clock=clock),
    }
    with ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(patch.object(session, name, fake))
        threads = SimpleNamespace(Thread=lambda target, args, **_: SimThread(at_work["world"], lambda: target(*args)))
        stack.enter_context(patch.object(run_log, "threading", threads))
        stack.enter_context(patch.object(committer, "_write_checked", unit_file))
        stack.enter_context(patch.object(committer, "sum_up", lambda tables: summed(*tables)))
        stack.enter_context(
            patch("draftmill.jobs.drive.log.presentable", str)
        )  # there are no secrets here, and it looks long
        yield at_work


def summed(table: Any) -> Sums:
    statuses = Counter(table.column("status").to_pylist())
    return Sums(table.num_rows, statuses["ok"], statuses["failed"], statuses["skipped"])


def drawn_job(seed: int) -> Job:
    rng = random.Random(seed)
    rows = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
    cells = [(unit, row) for unit, count in enumerate(rows) for row in range(count)]
    poison = {
        cell: rng.choice(("kill", "raise")) for cell in rng.sample(cells, min(len(cells), rng.choice((0, 0, 1, 2))))
    }
    return Job(rows, poison, workers=rng.randint(1, 3), attempts=rng.randint(1, 3))


def play(world: World, at_work: dict) -> World:
    """Run the schedule: sessions with faults, then a fair end, then the check."""
    at_work["world"] = world
    for _ in range(4):
        if world.session() in {"finished", "done"}:
            break
        world.now_s += world.rng.choice((1.0, 2 * TTL_S))
    world.finish()
    check_promise(world.disk, disturbed=bool(world.struck))
    return world
