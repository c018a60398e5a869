"""What is asked of an autoscaler: room for the workers that the queue needs, only when it changes, and nothing at the end."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from draftmill.jobs.config.sections import WorkerShape
from draftmill.jobs.drive.allocation import (
    MOST_NODES,
    Bundles,
    Demand,
    NodeRoom,
    Selectors,
    allocate,
    possible_nodes,
    request_of_ray,
)
from draftmill.jobs.drive.backend import RayBackend
from draftmill.storage.errors import UserError

POSSIBLE = [NodeRoom(8, 2, None)] * 3


def asked_for(shapes: list[WorkerShape], *units: int) -> list[Any]:
    asked: list[Any] = []
    demand = Demand(
        lambda left: allocate(shapes, POSSIBLE, units=left, listed=True),
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
