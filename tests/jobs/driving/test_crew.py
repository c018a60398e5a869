"""How many workers, and what each gets."""

from __future__ import annotations

import pytest

from actors.pool import Seat
from jobs.driving.crew import crew
from jobs.spec.job_spec import ErrorSettings
from jobs.spec.thresholds import hopeless, most_failed, too_many_failed
from jobs.spec.worker_shape import WorkerShape
from storage.errors import UserError


@pytest.mark.parametrize(
    ("settings", "cpus", "gpus", "units", "expected"),
    [
        ({}, 8, 0, 99, (8, Seat(1, 0.0, 1))),
        ({}, 8, 0, 3, (3, Seat(1, 0.0, 2))),
        ({}, 8, 2, 99, (2, Seat(1, 1.0, 4))),
        ({"gpus": 0.5}, 8, 2, 99, (4, Seat(1, 0.5, 2))),
        ({"gpus": 0.0}, 8, 2, 99, (8, Seat(1, 0.0, 1))),
        ({"count": 3, "cpus": 2.0}, 8, 0, 99, (3, Seat(2.0, 0.0, 2))),
        ({"count": 50}, 4, 0, 99, (4, Seat(1, 0.0, 1))),
    ],
)
def test_workers_fill_the_gpus_or_else_the_cpus_and_share_the_threads(settings, cpus, gpus, units, expected):
    assert crew(WorkerShape(**settings), num_cpus=cpus, num_gpus=gpus, units=units) == expected


@pytest.mark.parametrize(("settings", "field"), [({"gpus": 1.0}, "workers.gpus"), ({"cpus": 9.0}, "workers.cpus")])
def test_a_worker_that_fits_nowhere_is_refused(settings, field):
    with pytest.raises(UserError, match=field):
        crew(WorkerShape(**settings), num_cpus=8, num_gpus=0, units=1)


@pytest.mark.parametrize(("gpus", "num_gpus"), [("auto", 0), (0.0, 2)])
def test_a_model_that_is_to_be_on_a_gpu_is_refused_where_workers_have_none(gpus, num_gpus):
    with pytest.raises(UserError, match=r"model\.device"):
        crew(WorkerShape(gpus=gpus), num_cpus=8, num_gpus=num_gpus, units=1, device="cuda:0")
    assert crew(WorkerShape(gpus=1.0), num_cpus=8, num_gpus=2, units=9, device="cuda")[0] == 2


@pytest.mark.parametrize(
    ("failed", "allowed", "too_many"),
    [
        (10, {}, False),
        (11, {}, True),
        (1, {"max_rate": 0.0}, True),
        (1, {"max_count": 0}, True),
        (60, {"max_rate": 0.06}, False),
    ],
)
def test_the_error_threshold_is_a_rate_and_a_count(failed, allowed, too_many):
    assert too_many_failed(failed, 1000, ErrorSettings(**allowed)) == too_many
    assert not hopeless(min(failed, 999), 1000, ErrorSettings(**allowed)), "a small job is finished, whatever fails"


def test_a_few_failures_of_a_small_job_are_let_pass_whatever_their_rate():
    most = {1: 0, 4: 0, 19: 0, 20: 1, 60: 3, 99: 4, 100: 5, 500: 5, 600: 6, 10**6: 10**4}
    assert {rows: most_failed(rows, ErrorSettings()) for rows in most} == most
    assert most_failed(100, ErrorSettings(max_rate=0.07)) == 7, "no rounding takes a sample away"
    assert most_failed(60, ErrorSettings(max_rate=0.0)) == most_failed(60, ErrorSettings(max_count=0)) == 0


def test_a_large_job_is_hopeless_as_soon_as_more_has_failed_than_the_whole_of_it_may():
    allowed = ErrorSettings(max_rate=0.01)
    assert [hopeless(failed, 200_000, allowed) for failed in (999, 2000, 2001)] == [False, False, True]
    assert hopeless(1000, 10**9, ErrorSettings(max_count=999))
