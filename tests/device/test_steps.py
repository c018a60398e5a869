"""Every decoder on a pretended GPU: nothing mixes devices, and a step asks no more of the device than it did before.

The numbers are limits that only go down: kernels, transfers to the device and back, waits for it, and results whose shape depends
on data, in the worst step in which no sample begins or ends. Each forward
of a step has one transfer down, one record up, and no such shape. It waits once for what it drafts and once for what it decides,
however many forwards drafted.
"""

from functools import cache

import pytest

from tests.device.steps import CASES, Found, run, run_on_cpu

# launches, transfers down, transfers up, waits, shapes. Noise is kept on CPUs alone: torch's operations make that of each draw
# anew here, and of each draft. On a GPU the kernel that samples makes it, without launches of its own (test_kernel_steps.py).
LIMITS = {
    "autoregressive": (340, 1, 1, 1, 0),
    "speculative": (356, 1, 1, 1, 0),
    "speculative, model": (1439, 5, 5, 2, 0),
    "speculative, suffix": (356, 1, 1, 1, 0),
    "jacobi": (356, 1, 1, 1, 0),
    "multiblock_jacobi": (360, 1, 1, 1, 0),
    "specdiff": (1080, 3, 3, 3, 0),
    "any_subset": (274, 1, 1, 1, 0),
    "assd": (1077, 2, 2, 2, 0),
    "assd, n-gram": (274, 1, 1, 1, 0),
    "assd, fused": (1277, 2, 2, 2, 0),
    "stepwise": (360, 1, 1, 1, 0),
    "stepwise, cached": (360, 1, 1, 1, 0),
    "threshold": (360, 1, 1, 1, 0),
    "factor": (360, 1, 1, 1, 0),
    "ssd": (684, 1, 1, 1, 0),
    "ssd, cached": (700, 1, 1, 1, 0),  # two of them where the slots that run are not adjacent
    "stepwise, random": (358, 1, 1, 1, 0),
    "ancestral, analytic": (302, 1, 1, 1, 0),
    "block_diffusion": (394, 1, 1, 1, 0),
    "s2d2": (415, 1, 1, 1, 0),
    "s2d2, fused": (410, 1, 1, 1, 0),
    "s2d2, head": (1153, 2, 2, 2, 0),
    "stepwise, score": (187, 1, 1, 1, 0),
    "block_diffusion, score": (239, 1, 1, 1, 0),
}


@cache
def usual(name: str) -> Found:
    """A case with its usual settings, which several tests look at."""
    return run(name)


@pytest.mark.one_in(29)
@pytest.mark.parametrize("name", CASES)
def test_a_decoder_runs_on_a_device_and_gives_the_same_texts_there(name):
    found, expected = usual(name), run_on_cpu(name)
    assert found.said() == expected.said()
    for index, outcome in found.outcomes.items():
        assert outcome.logprob == pytest.approx(expected.outcomes[index].logprob, abs=1e-3)
    assert found.steady or name not in LIMITS
    for step in found.steady:
        counts = (step.launches, step.down, step.up, step.waits, step.shapes)
        assert all(count <= limit for count, limit in zip(counts, LIMITS[name], strict=True)), (counts, found.places)


@pytest.mark.one_in(23)
@pytest.mark.parametrize("name", LIMITS)
def test_samples_come_and_go_without_further_waits(name):
    """One that comes sends its order or canvas at most; memory is allocated for the first ones alone."""
    found = usual(name)
    first, *later = found.admissions
    assert first.down <= 4 and first.waits <= 3 and (first.up, first.shapes) == (0, 0)
    for one in later:
        assert (one.up, one.waits, one.shapes) == (0, 0, 0) and one.down <= 1 and one.launches <= 1
    assert any(step.ended for step in found.steps)
    for step in found.steps:
        _, down, up, waits, shapes = LIMITS[name]
        assert step.down <= down and step.up <= up and step.waits <= waits and step.shapes <= shapes


@pytest.mark.slow
@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["autoregressive", "speculative", "any_subset", "s2d2"])
def test_a_step_with_a_chunk_of_a_prompt_waits_no_more_than_others(name):
    found, whole = run(name, prompt_rows=3), usual(name)
    assert len(found.steps) > len(whole.steps), "prompts run in several steps"
    assert found.said() == whole.said()
    # Their rows are ragged, which takes a rectangle some launches more.
    for step in found.steady:
        counts = (step.down, step.up, step.waits, step.shapes)
        assert all(count <= limit for count, limit in zip(counts, LIMITS[name][1:], strict=True)), (
            counts,
            found.places,
        )


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["speculative, model", "assd", "assd, n-gram"])
def test_drafts_are_judged_by_their_ratio_without_further_waits(name):
    found = run(name, acceptance="rejection")
    assert all(one.error_kind is None for one in found.outcomes.values())
    assert max(step.waits for step in found.steady) <= LIMITS[name][3]
    assert max(step.shapes for step in found.steady) == 0


CUTS: dict = {"temperature": 0.8, "top_k": 30, "top_p": 0.6}


# Of each kind of ask one: rows, a window by a head, canvases, chances of being revealed, blocks.
@pytest.mark.slow
@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "name", ["speculative", "assd, fused", "ssd, cached", "ancestral, analytic", "block_diffusion"]
)
def test_cuts_bring_no_wait_and_no_shape_that_depends_on_data(name):
    check_cuts(name, **CUTS)


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
def test_cuts_of_a_requests_own_bring_none_either(acceptance):
    check_cuts("speculative, model", own=True, top_k=30, acceptance=acceptance)


def check_cuts(name: str, **more) -> None:
    found, expected = run(name, **more), run_on_cpu(name, **more)
    assert found.said() == expected.said()
    waits = LIMITS[name][3]
    assert found.steady and all(step.waits <= waits and step.shapes == 0 for step in found.steady), found.places
