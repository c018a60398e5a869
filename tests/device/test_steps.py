"""Every decoder on a pretended GPU: nothing mixes devices, and a step asks no more of the device than it did before.

The numbers are limits that only go down: kernels, transfers to the device and back, waits for it, and results whose shape depends
on data, in the worst step in which no sample begins or ends. The goal for each decoder: two transfers, one wait, no such shape.
"""

import pytest

from tests.device.steps import CASES, run, run_on_cpu

# launches, transfers down, transfers up, waits, shapes
LIMITS = {
    "autoregressive": (349, 4, 1, 1, 0),
    "speculative": (349, 4, 1, 1, 0),
    "speculative, model": (693, 10, 5, 5, 0),
    "speculative, suffix": (365, 4, 1, 1, 0),
    "jacobi": (349, 4, 1, 1, 0),
    "multiblock_jacobi": (369, 4, 1, 1, 0),
    "specdiff": (793, 8, 3, 3, 0),
    "any_subset": (286, 4, 1, 1, 0),
    "assd": (449, 10, 2, 2, 0),
    "assd, n-gram": (326, 14, 6, 6, 0),
    "assd, suffix": (286, 4, 1, 1, 0),
    "assd, fused": (489, 11, 2, 2, 0),
    "assd, fused chain": (494, 11, 2, 2, 0),
    "stepwise": (276, 1, 1, 1, 0),
    "stepwise, cached": (416, 1, 1, 1, 0),
    "threshold": (276, 1, 1, 1, 0),
    "factor": (276, 1, 1, 1, 0),
    "ssd": (276, 1, 1, 1, 0),
    "ssd, cached": (291, 1, 1, 1, 0),
    "block_diffusion": (409, 4, 1, 1, 0),
    "s2d2": (424, 4, 1, 1, 0),
    "s2d2, fused": (423, 4, 1, 1, 0),
    "stepwise, score": (197, 2, 1, 1, 0),
    "block_diffusion, score": (245, 2, 1, 1, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_decoder_runs_on_a_device_and_gives_the_same_texts_there(name):
    found, expected = run(name), run_on_cpu(name)
    assert {index: (one.error_kind, one.tokens.tolist(), one.nfe) for index, one in found.outcomes.items()} == {
        index: (None, one.tokens.tolist(), one.nfe) for index, one in expected.outcomes.items()
    }
    for index, outcome in found.outcomes.items():
        assert outcome.logprob == pytest.approx(expected.outcomes[index].logprob, abs=1e-3)
    assert found.steady or name not in LIMITS
    for step in found.steady:
        counts = (step.launches, step.down, step.up, step.waits, step.shapes)
        assert all(count <= limit for count, limit in zip(counts, LIMITS[name], strict=True)), (counts, found.places)


@pytest.mark.parametrize("name", ["speculative, model", "assd", "assd, n-gram"])
def test_drafts_are_judged_by_their_ratio_without_further_waits(name):
    found = run(name, acceptance="rejection")
    assert all(one.error_kind is None for one in found.outcomes.values())
    assert max(step.waits for step in found.steady) <= LIMITS[name][3]
    assert max(step.shapes for step in found.steady) == 0
