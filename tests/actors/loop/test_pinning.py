"""Workers on nodes with several GPUs: each its own device, every device used, fractions, kinds of workers on labelled nodes.

The GPUs are fake resources of several local raylets, which come up once for all tests.
"""

import os
from collections import Counter

import pytest

from draftmill.actors.job import Allocation, WorkerResources
from draftmill.actors.messages import NodeLeaving, PoolEvent, WorkerLoaded
from draftmill.actors.ray.pool import RayPool
from draftmill.jobs.config.sections import WorkerShape
from draftmill.jobs.drive.allocation import allocate
from draftmill.jobs.drive.ray_session import cluster_nodes
from draftmill.storage.errors import UserError

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

NODE: dict = {"num_cpus": 8, "object_store_memory": 100 * 2**20}


class PinnedWorker:
    """Says where it is and which devices it sees; has no model."""

    def __init__(self, name: str, job, threads: int, gpus: float = 1.0) -> None:
        import ray

        context = ray.get_runtime_context()
        self._seen = {
            "devices": os.environ.get("CUDA_VISIBLE_DEVICES") if ray.get_gpu_ids() else None,
            "zone": context.get_node_labels().get("zone"),
            "share": gpus,
        }

    def where(self) -> tuple[str, int, dict]:
        return "node", os.getpid(), self._seen


class AnyJob:
    """Stands for a Job."""

    def on_ray(self, resources: WorkerResources) -> "AnyJob":
        return self


@pytest.fixture(scope="module")
def cluster():
    """A head without GPUs, a node with four and one with two."""
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()  # the other tests' Ray; conftest.py starts it again for them
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 2})
    joined(cluster, num_gpus=4, labels={"zone": "a"})
    joined(cluster, num_gpus=2, labels={"zone": "b"})
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def joined(cluster, **resources):
    """A node that has joined; on a busy machine Ray gives up after half a minute, so it is tried again."""
    for attempt in range(3):
        try:
            node = cluster.add_node(**NODE, **resources)
            cluster.wait_for_nodes()
            return node
        except Exception:
            if attempt == 2:
                raise
    raise AssertionError


def come_up(found: Allocation) -> list:
    """Start a whole allocation; what its workers see, kind by kind."""
    pool = RayPool(AnyJob(), found, worker_class=PinnedWorker)
    names = [f"w{number}" for number in range(found.count)]
    try:
        for name in names:
            pool.start(name)
        events = until(pool, WorkerLoaded, len(names))
        return [{"kind": pool._members[up.worker].kind, **up.facts} for up in events if isinstance(up, WorkerLoaded)]
    finally:
        pool.close()


def until(pool: RayPool, kind: type, count: int) -> list[PoolEvent]:
    found: list[PoolEvent] = []
    for _ in range(600):
        found += [item for item in pool.poll(0.2) if isinstance(item, kind)]
        if len(found) >= count:
            return found
    raise AssertionError(f"only {found}")


def placed(*shapes: WorkerShape) -> Allocation:
    return allocate(shapes, cluster_nodes(), units=99)


def test_each_worker_has_a_device_of_its_own_and_every_device_is_used(cluster):
    seen = come_up(placed(WorkerShape()))
    assert sorted((one["zone"], one["devices"]) for one in seen) == [
        ("a", "0"), ("a", "1"), ("a", "2"), ("a", "3"), ("b", "0"), ("b", "1")
    ]  # fmt: skip


def test_fractions_share_a_device_and_know_their_share(cluster):
    seen = come_up(placed(WorkerShape(gpus=0.5, labels={"zone": "b"})))
    assert Counter((one["zone"], one["devices"]) for one in seen) == {("b", "0"): 2, ("b", "1"): 2}
    assert {one["share"] for one in seen} == {0.5}


def test_a_worker_with_several_devices_has_them_on_one_node(cluster):
    seen = come_up(placed(WorkerShape(gpus=2.0)))
    assert sorted((one["zone"], one["devices"]) for one in seen) == [("a", "0,1"), ("a", "2,3"), ("b", "0,1")]


def test_workers_without_gpus_see_none(cluster):
    seen = come_up(placed(WorkerShape(gpus=0.0, count=3)))
    assert [one["devices"] for one in seen] == [None] * 3


def test_kinds_of_workers_go_to_their_nodes(cluster):
    shapes = [
        WorkerShape(count=2, gpus=2.0, labels={"zone": "a"}),
        WorkerShape(gpus=0.5, labels={"zone": "b"}),
        WorkerShape(gpus=0.0, count=1, labels={"zone": "!in(a, b)"}),
    ]
    seen = come_up(placed(*shapes))
    assert Counter((one["kind"], one["zone"]) for one in seen) == {(0, "a"): 2, (1, "b"): 4, (2, None): 1}


def test_what_fits_on_no_node_does_not_start_and_the_nodes_are_named(cluster):
    with pytest.raises(UserError) as caught:
        placed(WorkerShape(gpus=5.0))
    message = str(caught.value)
    assert message.startswith("workers: a worker needs 5 GPUs and 1 CPU on one node; the nodes have ")
    assert "(8 CPUs, 4 GPUs, zone=a)" in message
    assert "(8 CPUs, 2 GPUs, zone=b)" in message
    with pytest.raises(UserError, match=r"^workers: .* zone: c; the nodes have "):
        placed(WorkerShape(labels={"zone": "c"}))


def test_a_kind_whose_nodes_join_later_is_used_then(cluster):
    shapes = [WorkerShape(count=1, gpus=0.0), WorkerShape(labels={"zone": "c"}, gpus=1.0)]
    before = placed(*shapes)
    assert before.counts == (1, 0)
    pool = RayPool(AnyJob(), before, worker_class=PinnedWorker)
    node = None
    try:
        pool.start("w0")
        node = joined(cluster, num_gpus=2, labels={"zone": "c"})
        after = placed(*shapes)
        assert after.counts == (1, 2)
        pool.resize(after)
        pool.start("w1")
        pool.start("w2")
        ups = {item.worker: item for item in until(pool, WorkerLoaded, 3) if isinstance(item, WorkerLoaded)}
        assert [pool._members[name].kind for name in ("w0", "w1", "w2")] == [0, 1, 1]
        assert {ups[name].facts["devices"] for name in ("w1", "w2")} == {"0", "1"}
    finally:
        pool.close()
        if node is not None:
            cluster.remove_node(node)


def test_a_node_that_will_be_removed_counts_no_more(cluster):
    from tests.faults.test_node_loss import told_to_go

    node = joined(cluster, num_gpus=1, labels={"zone": "d"})
    shape = WorkerShape(labels={"zone": "d"}, gpus=1.0)
    pool = RayPool(AnyJob(), placed(shape), worker_class=PinnedWorker)
    try:
        pool.start("w0")
        until(pool, WorkerLoaded, 1)
        told_to_go(cluster, node, in_s=60.0)
        (leaving,) = until(pool, NodeLeaving, 1)
        assert isinstance(leaving, NodeLeaving) and leaving.worker == "w0"
        assert leaving.left_s is not None and 0 < leaving.left_s <= 60
        with pytest.raises(UserError, match=r"^workers: .* zone: d"):
            placed(shape)
    finally:
        pool.close()
        cluster.remove_node(node)
