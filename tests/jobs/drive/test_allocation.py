"""How many workers, what each gets, and what is asked of an autoscaler for the queue, only when it changes."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from draftmill.actors.job import WorkerResources
from draftmill.jobs.config.sections import ErrorSettings, WorkerShape
from draftmill.jobs.drive.allocation import (
    MOST_NODES,
    Bundles,
    Demand,
    NodeRoom,
    Selectors,
    allocate,
    lacking,
    possible_nodes,
    request_of_ray,
)
from draftmill.jobs.drive.backend import RayBackend
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
        ({"gpus": 2.0}, [(8, 1), (8, 1)], "workers"),  # two GPUs on two nodes are no room for a worker with two
        ({"gpus": 2.0}, [(8, 3), (8, 2)], 2),
        ({"gpus_per_model": 2}, [(8, 1), (8, 1)], "workers"),
        ({"gpus_per_model": 2}, [(8, 3), (8, 2)], 2),
        ({"gpus": 0.4}, [(8, 1), (8, 4)], 10),  # two on each GPU; a fifth of each is left
        ({"gpus": 0.5}, [(1, 4)], 1),
        ({"cpus": 5.0}, [(4, 0), (4, 0)], "workers"),
        ({"gpus": 1.0}, [(8, 0)], "workers"),
        ({"cpus": 3.0}, [(8, 0), (4, 0), (2, 0)], 3),
        ({"labels": {"zone": "b"}}, [(8, 0, "a"), (4, 0, "b")], 4),
        ({"labels": {"zone": "!b"}}, [(8, 0, "a"), (4, 0, "b"), (2, 0)], 10),
        ({"labels": {"zone": "in(a, c)"}}, [(8, 0, "a"), (4, 0, "b"), (2, 0)], 8),
        ({"labels": {"zone": "!in(a, b)"}}, [(8, 0, "a"), (4, 0, "b"), (2, 0)], 2),
        ({"labels": {"zone": "c"}}, [(8, 0, "a"), (2, 0)], "workers"),
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
        "workers: a worker needs 2 GPUs and 1 CPU on one node, zone: !c; "
        "the nodes have 2 x (4 CPUs, 1 GPU), (8 CPUs, zone=b), (1 CPU)"
    )


def test_kinds_with_a_number_come_first_and_the_others_take_what_is_left():
    nodes = [NodeRoom(8, 2, {"zone": "a"}), NodeRoom(4, 0)]
    shapes = [WorkerShape(gpus=0.0), WorkerShape(count=1, gpus=2.0, cpus=3.0), WorkerShape(count=9, gpus=1.0)]
    found = allocate(shapes, nodes, units=99)
    assert found.counts == (9, 1, 0)
    assert [resources.gpus for resources in found.kinds] == [0.0, 2.0, 1.0]
    assert found.kinds[0].threads == 1
    assert allocate(shapes, nodes, units=3).counts == (2, 1, 0)
    only = [WorkerShape(gpus=0.0, cpus=2.0), WorkerShape(labels={"zone": "a"})]
    assert [dict(one.labels) for one in allocate(only, nodes, units=99).kinds] == [{}, {"zone": "a"}]


def test_a_kind_that_fits_nowhere_yet_waits_and_none_at_all_is_an_error():
    nodes = [NodeRoom(4, 0)]
    shapes = [WorkerShape(gpus=0.0), WorkerShape(gpus=1.0)]
    found = allocate(shapes, nodes, units=99)
    assert found.counts == (4, 0)
    assert lacking(shapes, found, nodes) == [
        "workers.1: a worker needs 1 GPU and 1 CPU on one node; the nodes have (4 CPUs); such workers start once a node joins "
        "that has room"
    ]
    with pytest.raises(UserError, match=r"^workers: a worker needs 1 GPU .*; a worker needs 2 GPUs "):
        allocate([WorkerShape(gpus=1.0), WorkerShape(gpus=2.0)], nodes, units=99)


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


POSSIBLE = [NodeRoom(8, 2, None)] * 3


def asked_for(shapes: list[WorkerShape], *units: int) -> list[Any]:
    asked: list[Any] = []
    demand = Demand(
        lambda left: allocate(shapes, POSSIBLE, units=left),
        lambda bundles, selectors: asked.append((bundles, selectors)),
    )
    for left in units:
        demand.need(left)
    demand.need(0)
    return asked


def test_the_queue_decides_how_much_is_asked_for_and_only_changes_are_sent():
    one = {"CPU": 1, "GPU": 1.0}
    found = asked_for([WorkerShape()], 100, 90, 6, 4, 4, 1)
    assert [bundles for bundles, _ in found] == [[one] * 6, [one] * 4, [one], []]


def test_a_number_of_workers_is_the_most_that_is_asked_for():
    assert [len(bundles) for bundles, _ in asked_for([WorkerShape(count=2)], 100)] == [2, 0]


def test_each_kind_asks_for_its_own_nodes():
    shapes = [WorkerShape(count=1, gpus=2.0, labels={"zone": "a"}), WorkerShape(count=2, gpus=0.0, cpus=4.0)]
    (bundles, selectors), _ = asked_for(shapes, 9)
    assert bundles == [{"CPU": 1, "GPU": 2.0}, {"CPU": 4.0}, {"CPU": 4.0}]
    assert selectors == [{"zone": "a"}, {}, {}]


def test_a_job_that_never_asked_takes_nothing_back():
    assert asked_for([WorkerShape()]) == []


def test_rays_own_call_gets_bundles_and_labels_only_if_there_are_any(monkeypatch):
    called: list[Any] = []
    monkeypatch.setattr("ray.autoscaler.sdk.request_resources", lambda **given: called.append(given))
    request_of_ray([{"CPU": 1.0}], [{}])
    request_of_ray([{"CPU": 1.0}], [{"zone": "a"}])
    request_of_ray([], [])
    assert called == [
        {"bundles": [{"CPU": 1.0}]},
        {"bundles": [{"CPU": 1.0}], "bundle_label_selectors": [{"zone": "a"}]},
        {"bundles": []},
    ]


def group(most: int, **resources: int) -> Any:
    return SimpleNamespace(resources=resources, max_count=most)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What Ray says about the autoscaler's node groups, whose list the test sets; nothing by default."""
    found: Any = SimpleNamespace(node_group_configs=[])
    monkeypatch.setattr("ray._private.state.state.get_cluster_config", lambda: found)
    return found


def test_the_nodes_that_may_come_are_those_of_the_autoscalers_groups(config):
    config.node_group_configs = [group(1, CPU=2), group(3, CPU=8, GPU=2)]
    assert possible_nodes([], []) == [NodeRoom(2, 0, None), *POSSIBLE]
    config.node_group_configs = [group(-1, CPU=1)]
    assert possible_nodes([], []) == [NodeRoom(1, 0, None)] * MOST_NODES


def says(monkeypatch: pytest.MonkeyPatch, report: dict[str, Any] | None) -> None:
    """Let Ray's own key-value store have this report of the (first version of the) autoscaler."""
    text = None if report is None else json.dumps({"autoscaler_report": report, "time": 1.0}).encode()
    monkeypatch.setattr("ray.autoscaler.v2.utils.is_autoscaler_v2", lambda: False)
    monkeypatch.setattr("ray.experimental.internal_kv._internal_kv_get", lambda key: text)


def test_without_groups_the_names_of_the_nodes_types_tell_whether_there_is_an_autoscaler(monkeypatch, config):
    shapes = [WorkerShape(cpus=2.0, gpus=0.5), WorkerShape(count=2, gpus=0.0)]
    for nothing in (None, {}, {"active_nodes": {"node_" + "0a" * 28: 1}, "pending_launches": {}}):
        says(monkeypatch, nothing)
        assert possible_nodes(shapes, []) is None
    says(monkeypatch, {"active_nodes": {"headgroup": 1}, "pending_launches": {}})
    assert possible_nodes(shapes, []) == [NodeRoom(1, 0, None)] * 2 + [NodeRoom(2, 1, None)] * MOST_NODES


def test_the_second_version_of_the_autoscaler_tells_the_types_of_its_nodes(monkeypatch, config):
    types = ["node_" + "0a" * 28, ""]
    node: Any = SimpleNamespace
    status = SimpleNamespace(active_nodes=[], idle_nodes=[])
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(gcs_address="here:1"))
    monkeypatch.setattr("ray.autoscaler.v2.utils.is_autoscaler_v2", lambda: True)
    monkeypatch.setattr("ray.autoscaler.v2.sdk.get_cluster_status", lambda address: status)
    status.active_nodes = [node(ray_node_type_name=name) for name in types]
    assert possible_nodes([WorkerShape()], []) is None
    status.idle_nodes = [node(ray_node_type_name="gpu-group")]
    assert possible_nodes([WorkerShape(count=3)], [NodeRoom(4, 1)]) == [NodeRoom(1, 1, None)] * 3
    assert possible_nodes([WorkerShape(count=3)], [NodeRoom(4, 0)]) == [NodeRoom(1, 0, None)] * 3


def test_a_ray_that_cannot_be_asked_counts_as_without_an_autoscaler(monkeypatch, config):
    monkeypatch.delattr("ray.autoscaler.v2.utils.is_autoscaler_v2")
    assert possible_nodes([WorkerShape()], []) is None


def test_a_request_that_fails_is_made_again_and_does_not_end_the_run():
    asked: list[int] = []

    def request(bundles: Bundles, selectors: Selectors) -> None:
        asked.append(len(bundles))
        if len(asked) == 1:
            raise RuntimeError("the head does not answer")

    demand = Demand(lambda units: allocate([WorkerShape(gpus=0.0)], POSSIBLE, units=units), request)
    for _ in range(3):
        demand.need(2)
    assert asked == [2, 2]


def test_a_cluster_without_nodes_yet_starts_one_worker_that_waits_for_the_autoscaler(monkeypatch):
    spec: Any = SimpleNamespace(shapes=(WorkerShape(),), workers=WorkerShape(), model=SimpleNamespace(device="auto"))
    monkeypatch.setattr("draftmill.jobs.drive.backend.cluster_nodes", lambda: [NodeRoom(0, 0)])
    monkeypatch.setattr("draftmill.jobs.drive.backend.possible_nodes", lambda shapes, now: POSSIBLE)
    backend = RayBackend("auto")
    found = backend.allocate(spec, units=50)
    assert (found.count, found.kinds[0].gpus) == (1, 1.0)
    demand = backend.demand(spec)
    assert demand is not None and demand.allocate_for(50).count == 6
    monkeypatch.setattr("draftmill.jobs.drive.backend.possible_nodes", lambda shapes, now: None)
    assert backend.demand(spec) is None
    with pytest.raises(UserError, match="a worker needs"):
        backend.allocate(spec, units=50)
