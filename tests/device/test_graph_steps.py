"""A captured step on a pretended GPU: one buffer down, one graph, one record up; nothing crosses inside of the graph."""

from typing import Any

import pytest

from draftmill.decoders.base import JOB_SETTINGS, RowSettings
from draftmill.decoders.engine.penalties import Penalties
from tests.decoders.replaying import Replaying, use_graphs
from tests.device import pretend
from tests.device.pretend import KINDS
from tests.device.steps import run, run_on_cpu

# launches, transfers down, transfers up, waits of the step that asks least: a graph for each forward, and one for a head's window
LIMITS = {
    "autoregressive": (1, 1, 1, 1),
    "speculative": (1, 1, 1, 1),
    "speculative, suffix": (1, 1, 1, 1),
    "jacobi": (1, 1, 1, 1),
    "multiblock_jacobi": (1, 1, 1, 1),
    "any_subset": (1, 1, 1, 1),
    "block_diffusion": (1, 1, 1, 1),
    "stepwise, cached": (1, 1, 1, 1),
    "speculative, model": (5, 5, 5, 2),
    "assd": (2, 2, 2, 2),
    "assd, n-gram": (1, 1, 1, 1),
    "assd, fused": (2, 2, 2, 2),
    "s2d2, head": (2, 2, 2, 2),
}
# These have more shapes; with more samples each comes a third time.
MANY = {
    "stepwise, cached": 10,
    "speculative, model": 14,
    "assd": 16,
    "assd, n-gram": 16,
    "assd, fused": 40,
    "s2d2, head": 40,
}


class OneLaunch(Replaying):
    """Counts a replay as one launch, and makes sure that what is replayed asks nothing of the host."""

    def capture(self, work) -> tuple:
        """See Replaying."""
        replay, found = super().capture(work)
        counts = pretend._active[-1].counts

        def launched() -> None:
            before = counts.state()
            replay()
            now = counts.state()
            assert all(now[kind] == before[kind] for kind in KINDS if kind != "launches"), str(counts)
            counts.launches = before["launches"] + 1

        return launched, found


# Under the rejection rule. Each draft of an n-gram sends its distribution, and waits for nothing.
RATIO = {"speculative": (1, 1, 1, 1), "speculative, model": (5, 5, 5, 2), "assd, n-gram": (26, 6, 1, 1)}


@pytest.mark.parametrize(
    ("name", "acceptance"), [*((name, "coupled") for name in LIMITS), *((name, "rejection") for name in RATIO)]
)
@pytest.mark.slow
def test_a_captured_step_is_one_transfer_down_one_graph_and_one_record(name, acceptance, monkeypatch):
    use_graphs(monkeypatch)
    monkeypatch.setattr("draftmill.decoders.engine.cuda_graphs.find_recorder", lambda device: OneLaunch())
    requests, limit = MANY.get(name, 5), (LIMITS if acceptance == "coupled" else RATIO)[name]
    found = run(name, requests=requests, acceptance=acceptance)
    monkeypatch.undo()
    expected = run_on_cpu(name, requests=requests, acceptance=acceptance)
    assert found.said() == expected.said()
    steps = [(step.launches, step.down, step.up, step.waits) for step in found.steady]
    assert any(all(count <= limit for count, limit in zip(step, limit, strict=True)) for step in steps), steps
    # A capture waits once more, to compare.
    assert all(step.waits <= 2 * limit[3] and step.shapes == 0 for step in found.steady)


class Counted(Replaying):
    """Counts the replays of all graphs."""

    num_replayed = 0

    def capture(self, work) -> tuple:
        """See Replaying."""
        replay, found = super().capture(work)

        def counted() -> None:
            self.num_replayed += 1
            replay()

        return counted, found


@pytest.mark.parametrize("name", ["autoregressive", "speculative, model"])
def test_a_row_that_no_kernel_draws_leaves_graphs_to_the_rest(name, monkeypatch):
    """And they keep their bits: a penalty, a min-p or another top-k than the job's is drawn by torch, row by row."""
    use_graphs(monkeypatch)
    own = [RowSettings(penalties=Penalties(frequency=1.5)), RowSettings(min_p=0.2), RowSettings(top_k=9)]
    seen = list[tuple[Any, int]]()
    for settings in ([JOB_SETTINGS], [JOB_SETTINGS, *own]):
        recorder = Counted()
        monkeypatch.setattr("draftmill.decoders.engine.cuda_graphs.find_recorder", lambda _, made=recorder: made)
        monkeypatch.setattr("tests.device.steps.OWN", settings)
        seen.append((run(name, requests=4, own=True).outcomes, recorder.num_replayed))
    (usual, whole), (mixed, replayed) = seen
    assert replayed >= whole - 2 > 8, "steps are captured as without these rows"
    assert (mixed[0].tokens.tolist(), mixed[0].logprob) == (usual[0].tokens.tolist(), usual[0].logprob)
    monkeypatch.undo()
    monkeypatch.setattr("tests.device.steps.OWN", settings)
    expected = run_on_cpu(name, requests=4, own=True).outcomes
    for index, one in expected.items():
        assert mixed[index].tokens.tolist() == one.tokens.tolist() and mixed[index].error_kind is None
        assert mixed[index].logprob == pytest.approx(one.logprob, abs=1e-3)
        assert index == 0 or one.tokens.tolist() != usual[index].tokens.tolist()
