"""Where kernels are used, a step on a GPU waits once and makes no shape that depends on data; references stand in for them here.

A kernel counts as one launch.
"""

from types import SimpleNamespace

import pytest
import torch

from draftmill.decoders.backbones.transformer import ModuleBackbone
from draftmill.decoders.base import JOB_SETTINGS, RowSettings
from draftmill.decoders.draws.sampling import sample
from draftmill.decoders.engine.penalties import Penalties
from tests.decoders.references import kernels as reference
from tests.decoders.replaying import use_references
from tests.decoders.support import run_all
from tests.device.pretend import as_one_launch
from tests.device.steps import made, run, run_on_cpu, toy_canvases
from tests.device.test_steps import CUTS, LIMITS

# Launches, and transfers to the device. Of a rotary model a layer has nine: two norms with their sums, four products, the turning
# of heads, attention, and the gate. An XLNet layer has sixteen. In a graph all are one.
# `autoregressive` and `any_subset` note their tokens on the device, and read them there.
ROTARY, XLNET = 9, 16
LEAST = {
    "autoregressive": (4 * ROTARY + 13, 1),
    "speculative": (4 * ROTARY + 13, 1),
    "multiblock_jacobi": (4 * ROTARY + 13, 1),
    "any_subset": (3 * XLNET + 19, 1),
    "stepwise, cached": (4 * ROTARY + 14, 1),
    "stepwise, random": (4 * ROTARY + 14, 1),
    "ssd, cached": (4 * ROTARY + 14, 1),
    "ancestral, analytic": (103, 1),
    "block_diffusion": (4 * ROTARY + 14, 1),
    "s2d2, fused": (4 * ROTARY + 14, 1),
}
# A Llama of 32 layers: 300, where prompts run beside others.
MIXED = {"autoregressive": 4 * ROTARY + 12, "any_subset": 3 * XLNET + 20}
CUT = ["speculative", "ssd, cached", "ancestral, analytic"]


@pytest.fixture
def kernels(monkeypatch):
    attend, draw = as_one_launch(reference.attend), as_one_launch(sample)
    for module in ("transformer", "xlnet"):
        monkeypatch.setattr(f"draftmill.decoders.backbones.{module}.find_attention", lambda *_, **__: attend)
    layers = SimpleNamespace(**{name: as_one_launch(one) for name, one in vars(reference.LAYERS).items()})
    monkeypatch.setattr("draftmill.decoders.backbones.network.find_layers", lambda *_, **__: layers)
    monkeypatch.setattr("draftmill.decoders.engine.sampler.find_sampling", lambda *_: draw)


@pytest.mark.parametrize("name", ["autoregressive", "any_subset"])
def test_a_device_has_the_next_forward_before_the_host_reads(kernels, name):
    """Of all steps but the first: it waits for a record while the next forward runs, unless all samples end with it."""
    found = run(name, requests=9)
    assert max(step.launches for step in found.steps) <= MIXED[name], "also with rows of prompts"
    assert sum(step.waits for step in found.steps[1:]) >= len(found.steps) - 1
    assert sum(step.idle for step in found.steps[1:]) <= 0.1 * len(found.steps), found.places


def test_the_kernel_that_draws_reads_logits_as_the_product_gives_them(monkeypatch):
    """In bfloat16; half the memory is half the parts, and the same bits."""
    use_references(monkeypatch)
    seen, found = list[torch.dtype](), []

    def noted(logits_RV, *args, **more):
        seen.append(logits_RV.dtype)
        return sample(logits_RV, *args, **more)

    monkeypatch.setattr("draftmill.decoders.engine.sampler.find_sampling", lambda *_: noted)
    for _ in range(2):
        engine = made("autoregressive", {}, "cpu", dtype="bfloat16")
        found.append(run_all(engine, toy_canvases(3, "autoregressive")))
        monkeypatch.setattr("draftmill.decoders.backbones.transformer.ModuleBackbone.raw_logits", wide_logits)
    assert seen[0] is torch.bfloat16 and seen[-1] is torch.float32
    (raw, wide) = found
    assert [(one.tokens.tolist(), one.logprob) for one in raw.values()] == [
        (one.tokens.tolist(), one.logprob) for one in wide.values()
    ]


def wide_logits(backbone, hidden_RD, raw=ModuleBackbone.raw_logits):
    return raw(backbone, hidden_RD).float()


@pytest.mark.slow
def test_prompts_run_beside_the_others_where_attention_reads_rows(kernels, monkeypatch):
    monkeypatch.setattr("draftmill.decoders.engine.engine.hides_host", lambda backbone: False)
    beside = run("autoregressive", requests=9)
    monkeypatch.undo()
    # Without kernels, a new sample's prompt would widen the rectangle of all others: it has a step of its own.
    assert len(beside.steps) < len(run("autoregressive", requests=9).steps)


def test_a_row_with_a_penalty_takes_the_kernel_from_no_other_row(kernels, monkeypatch):
    """The stand-in says that what it draws is 1,000 less probable."""

    def marked(*given, **more):
        fields_AFR = sample(*given, **more)
        fields_AFR[:, 1] -= 1000.0
        return fields_AFR

    settings = [
        JOB_SETTINGS,
        RowSettings(penalties=Penalties(frequency=1.5)),
        RowSettings(min_p=0.1),
        RowSettings(top_k=9),
    ]
    monkeypatch.setattr("draftmill.decoders.engine.sampler.find_sampling", lambda *_: as_one_launch(marked))
    monkeypatch.setattr("tests.device.steps.OWN", settings)
    found = run("autoregressive", requests=4, own=True).outcomes
    by_kernel = [round(-(found[index].logprob or 0.0)) // 1000 for index in range(4)]
    # The first row has nothing to count yet: it draws from the model's own distribution.
    assert by_kernel == [len(found[0].tokens), 1, 0, 0]


@pytest.mark.one_in(13)
@pytest.mark.parametrize(("name", "cuts"), [*((name, {}) for name in LEAST), *((name, CUTS) for name in CUT)], ids=str)
def test_a_step_with_kernels_waits_no_more_than_without(kernels, monkeypatch, name, cuts):
    found = run(name, **cuts)
    monkeypatch.undo()
    expected = run_on_cpu(name, **cuts)
    assert found.said() == expected.said()
    assert found.steady, "a step in which no sample begins or ends"
    launches, down = LEAST[name]
    for step in found.steady:
        assert step.waits <= LIMITS[name][3] and step.shapes == 0 and step.down <= down, found.places
        assert cuts or step.launches <= launches, (step.launches, found.places)
