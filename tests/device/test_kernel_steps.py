"""Where kernels are used, a step on a GPU waits once and makes no shape that depends on data; references stand in for them here.

Masked and block decoders draw by torch's operations; their attention alone is a kernel's.
"""

import pytest

from decoders.kernels import attention_reference, choice_reference
from tests.device.steps import run, run_on_cpu
from tests.device.test_steps import LIMITS

CASES = [
    "autoregressive", "speculative", "multiblock_jacobi", "any_subset", "assd, fused chain", "stepwise, cached", "ssd, cached",
    "block_diffusion", "s2d2, fused",
]  # fmt: skip
DOWN = {"autoregressive": 2, "speculative": 2, "multiblock_jacobi": 2, "any_subset": 2}
"""Transfers to the device: the rows, and the keys and positions of the tokens to draw; else as without kernels."""


@pytest.fixture
def kernels(monkeypatch):
    for module in ("transformer", "xlnet"):
        monkeypatch.setattr(f"decoders.backbones.{module}.find_attention", lambda *_, **__: attention_reference.attend)
    monkeypatch.setattr("decoders.engine.answers.find_choice", lambda *_: choice_reference)


@pytest.mark.parametrize("name", CASES)
def test_a_step_with_kernels_waits_no_more_than_without(kernels, monkeypatch, name):
    found = run(name)
    monkeypatch.undo()
    expected = run_on_cpu(name)
    assert {index: (None, one.tokens.tolist(), one.nfe) for index, one in expected.outcomes.items()} == {
        index: (one.error_kind, one.tokens.tolist(), one.nfe) for index, one in found.outcomes.items()
    }
    assert all(step.waits <= LIMITS[name][3] and step.shapes == 0 for step in found.steady), found.places
    assert max(step.down for step in found.steady) <= DOWN.get(name, LIMITS[name][1]), found.places
