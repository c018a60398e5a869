"""The pretended device finds what a GPU would refuse, and counts what it would wait for."""

import pytest
import torch

from tests.device.pretend import as_one_launch, pretending


def test_tensors_of_two_devices_in_one_operation_are_refused():
    with pretending():
        ours, host = torch.zeros(3, device="cuda"), torch.zeros(3)
        assert ours.device.type == "cuda" and ours.is_cuda and (ours + 1).is_cuda and not host.is_cuda
        with pytest.raises(RuntimeError, match="of cuda:0 and of cpu"):
            _ = ours + host
        with pytest.raises(TypeError, match="copy it to the host first"):
            ours.numpy()


@pytest.mark.parametrize(
    ("do", "kind"),
    [
        (lambda ours: bool(ours.any()), "waits"),
        (lambda ours: int(ours[0]), "waits"),
        (lambda ours: ours.tolist(), "waits"),
        (lambda ours: ours.cpu(), "waits"),
        (lambda ours: ours[ours > 0], "shapes"),
        (lambda ours: ours.nonzero(), "shapes"),
        (lambda ours: ours.repeat_interleave(ours), "shapes"),
        (lambda ours: torch.tensor([1], device="cuda"), "waits"),
        (lambda ours: torch.zeros(2).to("cuda"), "waits"),
        (lambda ours: ours[torch.tensor([1, 0])], "down"),
        (lambda ours: torch.cuda.synchronize(), "waits"),
        (lambda ours: ours.copy_(torch.ones(3, dtype=torch.int64), non_blocking=True), "down"),
        (lambda ours: ours.copy_(torch.ones(3, dtype=torch.int64)), "waits"),
        (lambda ours: torch.ones(3).copy_(ours), "up"),
        (lambda ours: ours + 1, "launches"),
    ],
)
def test_each_event_is_counted(do, kind):
    with pretending() as counts:
        ours = torch.ones(3, dtype=torch.int64, device="cuda")
        before = counts.state()[kind]
        do(ours)
        assert counts.state()[kind] > before


def test_views_pinned_transfers_and_late_events_cost_no_wait():
    with pretending() as counts:
        event, later = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        event.record()
        ours = torch.zeros(4, 2).pin_memory().to("cuda", non_blocking=True)
        later.record()
        ours.view(2, 4)[0].unsqueeze(0).masked_fill_(torch.zeros(1, 4, dtype=torch.bool, device="cuda"), 1.0)
        assert (counts.waits, counts.shapes, counts.down) == (0, 0, 1)
        ours.cpu()
        later.synchronize()
        assert counts.waits == 1 and event.elapsed_time(later) > 0
        later.record()
        later.synchronize()
        assert counts.waits == 2, "an event that is read before anything else waited"
        event.record()
        later.record()
        for _ in range(2):
            event.synchronize()
        assert counts.waits == 3
        later.synchronize()
        assert counts.waits == 4, "who waits for an event has not waited for a later one"


def test_what_stands_for_a_kernel_is_one_launch_whose_waits_count():
    with pretending() as counts:
        ours = torch.ones(3, device="cuda")
        counts.clear()
        as_one_launch(lambda one: (one + 1).mul(2).sum().item())(ours)
        assert (counts.launches, counts.waits) == (1, 1)
