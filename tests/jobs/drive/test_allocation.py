"""How many workers, and what each gets."""

import pytest

from draftmill.actors.job import WorkerResources
from draftmill.jobs.config.sections import ErrorSettings, WorkerShape
from draftmill.jobs.drive.allocation import NodeRoom, allocate, lacking
from draftmill.jobs.exit_codes import hopeless, most_failed, too_many_failed
from draftmill.storage.errors import UserError


@pytest.mark.parametrize(
    ("settings", "cpus", "gpus", "units", "expected"),
    [
        ({}, 8, 0, 99, (8, WorkerResources(1, 0.0, 1))),
        ({}, 8, 0, 3, (3, WorkerResources(1, 0.0, 2))),
        ({}, 8, 2, 99, (2, WorkerResources(1, 1.0, 4))),
        ({"gpus": 0.5}, 8, 2, 99, (4, WorkerResources(1, 0.5, 2))),
        ({"gpus": 0.0}, 8, 2, 99, (8, WorkerResources(1, 0.0, 1))),
        ({"count": 3, "cpus": 2.0}, 8, 0, 99, (3, WorkerResources(2.0, 0.0, 2))),
        ({"count": 50}, 4, 0, 99, (4, WorkerResources(1, 0.0, 1))),
        ({"gpus_per_model": 2, "cpus": 2.0}, 8, 0, 99, (4, WorkerResources(2.0, 0.0, 1, processes=2))),
        ({"gpus_per_model": 2}, 16, 4, 99, (2, WorkerResources(1, 2.0, 4, processes=2))),
        ({"gpus_per_model": 4, "gpus": 0.0, "cpus": 8.0}, 16, 4, 99, (2, WorkerResources(8.0, 0.0, 2, processes=4))),
    ],
)
def test_workers_fill_the_gpus_or_else_the_cpus_and_share_the_threads(settings, cpus, gpus, units, expected):
    found = allocate([WorkerShape(**settings)], [NodeRoom(cpus, gpus)], units=units)
    assert (found.count, found.kinds[0]) == expected


@pytest.mark.parametrize(
    ("settings", "nodes", "expected"),
    [
        ({"gpus": 2.0}, [(8, 1), (8, 1)], "workers.gpus"),  # two GPUs on two nodes are no room for a worker with two
        ({"gpus": 2.0}, [(8, 3), (8, 2)], 2),
        ({"gpus_per_model": 2}, [(8, 1), (8, 1)], "workers.gpus"),
        ({"gpus_per_model": 2}, [(8, 3), (8, 2)], 2),
        ({"gpus": 0.4}, [(8, 1), (8, 4)], 10),  # two on each GPU; a fifth of each is left
        ({"gpus": 0.5}, [(1, 4)], 1),
        ({"cpus": 5.0}, [(4, 0), (4, 0)], "workers.cpus"),
        ({"gpus": 1.0}, [(8, 0)], "workers.gpus"),
        ({"cpus": 3.0}, [(8, 0), (4, 0), (2, 0)], 3),
        ({"labels": {"zone": "b"}}, [(8, 0, "a"), (4, 0, "b")], 4),
        ({"labels": {"zone": "!b"}}, [(8, 0, "a"), (4, 0, "b"), (2, 0)], 10),
        ({"labels": {"zone": "in(a, c)"}}, [(8, 0, "a"), (4, 0, "b"), (2, 0)], 8),
        ({"labels": {"zone": "!in(a, b)"}}, [(8, 0, "a"), (4, 0, "b"), (2, 0)], 2),
        ({"labels": {"zone": "c"}}, [(8, 0, "a"), (2, 0)], "workers.labels"),
        ({}, [(8, 0), (8, 2)], 2),
        ({}, [(0, 0), (8, 0)], 8),
    ],
)
def test_a_worker_needs_all_of_its_resources_on_one_node(settings, nodes, expected):
    rooms = [NodeRoom(cpus, gpus, {"zone": zone[0]} if zone else {}) for cpus, gpus, *zone in nodes]
    if isinstance(expected, str):
        with pytest.raises(UserError, match=f"^{expected}: a worker needs .* on one node"):
            allocate([WorkerShape(**settings)], rooms, units=99)
    else:
        assert allocate([WorkerShape(**settings)], rooms, units=99).count == expected


def test_what_fits_nowhere_is_refused_with_the_nodes_and_their_labels():
    nodes = [NodeRoom(4, 1), NodeRoom(4, 1), NodeRoom(8, 0, {"zone": "b", "ray.io/node-id": "1f"}), NodeRoom(1, 0)]
    with pytest.raises(UserError) as caught:
        allocate([WorkerShape(gpus=2.0, labels={"zone": "!c"})], nodes, units=1)
    assert str(caught.value) == (
        "workers.gpus: a worker needs 2 GPUs and 1 CPU on one node, zone: !c; "
        "the nodes have 2 x (4 CPUs, 1 GPU), (8 CPUs, zone=b), (1 CPU)"
    )


def test_kinds_with_a_number_come_first_and_the_others_take_what_is_left():
    nodes = [NodeRoom(8, 2, {"zone": "a"}), NodeRoom(4, 0)]
    shapes = [WorkerShape(gpus=0.0), WorkerShape(count=1, gpus=2.0, cpus=3.0), WorkerShape(count=9, gpus=1.0)]
    found = allocate(shapes, nodes, units=99, listed=True)
    assert found.counts == (9, 1, 0)
    assert [resources.gpus for resources in found.kinds] == [0.0, 2.0, 1.0]
    assert found.kinds[0].threads == 1
    assert allocate(shapes, nodes, units=3, listed=True).counts == (2, 1, 0)
    only = [WorkerShape(gpus=0.0, cpus=2.0), WorkerShape(labels={"zone": "a"})]
    assert [dict(one.labels) for one in allocate(only, nodes, units=99, listed=True).kinds] == [{}, {"zone": "a"}]


def test_a_kind_that_fits_nowhere_yet_waits_and_none_at_all_is_an_error():
    nodes = [NodeRoom(4, 0)]
    shapes = [WorkerShape(gpus=0.0), WorkerShape(gpus=1.0)]
    found = allocate(shapes, nodes, units=99, listed=True)
    assert found.counts == (4, 0)
    assert lacking(shapes, found, nodes) == [
        "workers.1: a worker needs 1 GPU and 1 CPU on one node; the nodes have (4 CPUs); such workers start once a node joins "
        "that has room"
    ]
    with pytest.raises(UserError, match=r"^workers: no worker fits on any node: workers\.0: .*; workers\.1: "):
        allocate([WorkerShape(gpus=1.0), WorkerShape(gpus=2.0)], nodes, units=99, listed=True)


@pytest.mark.parametrize(("gpus", "num_gpus"), [("auto", 0), (0.0, 2)])
def test_a_model_that_is_to_be_on_a_gpu_is_refused_where_workers_have_none(gpus, num_gpus):
    with pytest.raises(UserError, match=r"model\.device"):
        allocate([WorkerShape(gpus=gpus)], [NodeRoom(8, num_gpus)], units=1, device="cuda:0")
    assert allocate([WorkerShape(gpus=1.0)], [NodeRoom(8, 2)], units=9, device="cuda").count == 2


@pytest.mark.parametrize(
    ("failed", "allowed", "too_many"),
    [
        (10, {}, False),
        (11, {}, True),
        (1, {"max_rate": 0.0}, True),
        (1, {"max_count": 0}, True),
        (60, {"max_rate": 0.06}, False),
        (50, {"max_count": 50}, False),
        (50, {"max_count": 50, "max_rate": 0.01}, True),
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
