"""A model that must be exact on a GPU has no product of torch's there; references stand in for the kernels on a pretended one."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftmill.actors.job import ModelPlace
from draftmill.actors.loop.loading import load_networks
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.packed import FixedLinear
from draftmill.decoders.backbones.xlnet import XLNetBackbone
from draftmill.decoders.draws.sampling import sample
from draftmill.decoders.registry import find_heads
from draftmill.storage.stores.store import Place
from tests.decoders.backbones.causal_models import save_random
from tests.decoders.references import kernels as reference
from tests.decoders.shipped import BUILTIN
from tests.decoders.support import decoder_settings
from tests.device.pretend import pretending
from tests.device.steps import run, run_on_cpu
from tests.device.test_fullgraph import FAMILIES, stream_step, token_step

PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "linear", "_grouped_mm", "convolution"}
MEANS = {"mean", "var", "var_mean", "norm"}


class Operations(TorchDispatchMode):
    """Notes operations whose sums a GPU would order by the number of rows, outside of what stands for a kernel.

    Rotary angles are products over a single number, which has one order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.clear()

    def clear(self) -> None:
        self.found, self.num_fixed = list[str](), 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self.inside and name in PRODUCTS | MEANS:
            left = args[1 if "add" in name else 0]
            if name in MEANS or left.shape[-1] > 1:
                self.found.append(name)
        return func(*args, **(kwargs or {}))

    def kernel(self, reference: Any) -> Any:
        def launched(*args: Any, **more: Any) -> Any:
            self.inside, self.num_fixed = True, self.num_fixed + 1
            try:
                return reference(*args, **more)
            finally:
                self.inside = False

        return launched


@pytest.fixture
def operations(monkeypatch):
    with Operations() as found:
        fixed, attend = found.kernel(reference.fixed_product), found.kernel(reference.attend)
        experts, draw = found.kernel(reference.product), found.kernel(sample)
        for module in ("packed", "xlnet"):
            monkeypatch.setattr(f"draftmill.decoders.backbones.{module}.find_fixed_product", lambda *_: fixed)
        for module in ("transformer", "xlnet"):
            monkeypatch.setattr(f"draftmill.decoders.backbones.{module}.find_attention", lambda *_, **__: attend)
        monkeypatch.setattr("draftmill.decoders.backbones.transformer.find_product", lambda *_, **__: experts)
        layers = SimpleNamespace(**{name: found.kernel(one) for name, one in vars(reference.LAYERS).items()})
        monkeypatch.setattr("draftmill.decoders.backbones.network.find_layers", lambda *_, **__: layers)
        monkeypatch.setattr("draftmill.decoders.engine.sampler.find_sampling", lambda *_: draw)
        # One kernel on a GPU; on a CPU torch computes it by a mean.
        monkeypatch.setattr(torch.nn.functional, "rms_norm", found.kernel(torch.nn.functional.rms_norm))
        yield found


def on_device(rows: Any) -> Any:
    tensors = {name: getattr(rows, name) for name in rows.__dataclass_fields__}
    return replace(rows, **{name: one.to("cuda") for name, one in tensors.items() if isinstance(one, torch.Tensor)})


@pytest.mark.parametrize("name", [*FAMILIES, "qwen3", "gpt2"])
def test_every_product_and_norm_of_a_network_is_fixed(operations, tmp_path, name):
    folder = FAMILIES.get(name, tmp_path)
    if folder == tmp_path:
        save_random(tmp_path, name)
    with pretending():
        backbone: Any = load_backbone(folder, dtype="float32", device="cuda", exact=True)
        assert backbone.exact and backbone.captures and backbone.reads_rows
        backbone.allocate(3, 32)
        make: Any = token_step
        if isinstance(backbone, XLNetBackbone):
            make = stream_step
            for slot in range(3):
                backbone.set_order(slot, torch.randperm(12).to("cuda"))
        operations.clear()
        logits = backbone.logits(backbone.forward(on_device(make([5, 3, 4], [0, 0, 0]))))
        assert logits.shape[1] == backbone.vocab_size
    assert operations.num_fixed > 4 and not operations.found


def test_products_of_torch_are_found(operations):
    """The test above can fail."""
    with pretending():
        backbone: Any = load_backbone(FAMILIES["blocks of experts (LLaDA2)"], dtype="float32", device="cuda")
        backbone.allocate(3, 32)
        operations.clear()
        backbone.logits(backbone.forward(on_device(token_step([5, 3, 4], [0, 0, 0]))))
    assert not backbone.exact and "mm" in operations.found


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "name", ["autoregressive", "any_subset", "speculative, model", "ancestral, analytic", "block_diffusion", "assd"]
)
def test_decoders_of_exact_models_give_the_texts_of_a_cpu(operations, monkeypatch, name):
    found = run(name, exact=True)
    monkeypatch.undo()
    expected = run_on_cpu(name)
    assert found.said() == expected.said()


def test_draft_heads_of_exact_models_are_fixed(operations):
    with pretending():
        backbone: Any = load_backbone(BUILTIN / "asarm-tiny", dtype="float32", device="cuda", exact=True)
        heads = find_heads(decoder_settings("assd", k=5), BUILTIN / "asarm-tiny", backbone)
    assert heads is not None
    assert {type(part) for part in heads.modules() if hasattr(part, "in_features")} == {FixedLinear}


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"acceptance": "rejection"}, "judged by the rejection rule"),
        ({"min_p": 0.1}, "constraints, penalties or min_p"),
    ],
    ids=str,
)
def test_draws_that_no_kernel_makes_are_refused(operations, sampling, reason):
    with pytest.raises(ValueError, match=f"model.exact: true, but .*{reason}"):
        run("speculative", exact=True, **sampling)


def test_networks_of_an_exact_place_are_exact(operations):
    place = ModelPlace(Place("builtin:ar-tiny"), None, "auto", None, "auto", "float32", "cuda", False, exact=True)
    drafts = decoder_settings("speculative", drafter={"kind": "model", "path": "builtin:ar-micro"})
    with pretending():
        exact = load_networks(BUILTIN / "ar-tiny", place, drafts)
        usual = load_networks(BUILTIN / "ar-tiny", replace(place, exact=False), drafts)
    assert exact.exact and exact.drafter is not None and exact.drafter.exact and not usual.exact


def test_a_gpu_without_kernels_is_refused_and_says_why():
    with (
        pretending(),
        pytest.raises(ValueError, match=r"model.exact: true needs the kernel for fixed products .* off: "),
    ):
        load_backbone(BUILTIN / "ar-tiny", dtype="float32", device="cuda", exact=True)
    with pretending(), pytest.raises(ValueError, match="off: float64 is computed by torch"):
        load_backbone(BUILTIN / "asarm-tiny", dtype="float64", device="cuda", exact=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_a_cpu_whose_products_depend_on_the_batch_is_refused(dtype):
    with pytest.raises(ValueError, match=f"model.exact: true, but in {dtype} on this CPU the batch changes last bits"):
        load_backbone(BUILTIN / "ar-tiny", dtype=dtype, device="cpu", exact=True)
