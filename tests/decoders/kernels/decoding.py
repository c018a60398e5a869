"""Short decodes of builtin models by given kernels, or by torch's operations."""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from draftmill.decoders.backbones.invariance import NO_RULES
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.network import RotaryBackbone
from draftmill.decoders.backbones.packed import FixedLinear, replace_products
from draftmill.decoders.base import Request, RowSettings
from draftmill.decoders.common_settings import Estimate, Sampling
from draftmill.decoders.registry import build_decoder, build_scorer
from tests.decoders.shipped import facts, folder_of, setup_of
from tests.decoders.support import run_all

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "autoregressive": ("ar-tiny", {"kind": "autoregressive"}),
    "look-up": ("ar-tiny", {"kind": "speculative", "k": 3}),
    "model": ("ar-tiny", {"kind": "speculative", "k": 3, "drafter": {"kind": "model", "path": "ar-micro"}}),
    "multi-block": ("ar-tiny", {"kind": "multiblock_jacobi", "block_size": 4}),
    "jacobi": ("ar-tiny", {"kind": "jacobi", "block_size": 4}),
    "any_subset": ("asarm-tiny", {"kind": "any_subset"}),
    "assd": ("asarm-tiny", {"kind": "assd", "k": 3}),
    "assd, fused": ("asarm-tiny", {"kind": "assd", "k": 3, "fused": "rows"}),
}
SURE = ("top1", "margin", "entropy", "random")
MASKED: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"stepwise, {kind}": ("mdm-tiny", {"kind": "stepwise", "block_length": 4, "confidence": kind}) for kind in SURE},
    "threshold": ("mdm-tiny", {"kind": "threshold", "tau": 0.2}),
    "factor": ("mdm-tiny", {"kind": "factor", "confidence": "margin"}),
    "ssd": ("mdm-tiny", {"kind": "ssd", "draft_length": 2}),
    "ssd, cached": (
        "mdm-tiny",
        {"kind": "ssd", "draft_length": 3, "cache": "dual_strict", "block_length": 4, "tree": "mixed"},
    ),
    "ancestral": ("mdlm", {"kind": "ancestral", "steps": 4}),
    "ancestral, analytic": ("sedd", {"kind": "ancestral", "steps": 4}),
    "ancestral, euler": ("sedd", {"kind": "ancestral", "steps": 4, "predictor": "euler"}),
}
"""Decoders of masked diffusion."""
BLOCKS: dict[str, tuple[str, dict[str, Any]]] = {
    "block_diffusion": ("block-tiny", {"kind": "block_diffusion", "block_size": 4}),
    "block_diffusion, entropy": ("block-tiny", {"kind": "block_diffusion", "schedule": "entropy", "tau": 2.0}),
    "block_diffusion, editing": ("block-tiny", {"kind": "block_diffusion", "tau": 0.2, "tau_edit": 0.3}),
    "s2d2": ("block-tiny", {"kind": "s2d2"}),
    "s2d2, fused": ("block-tiny", {"kind": "s2d2", "block_size": 4, "causal_cache": True, "fused": True}),
    **{
        f"s2d2, {kind}": ("block-tiny", {"kind": "s2d2", "router": {"kind": "score"}, "estimator": {"kind": kind}})
        for kind in ("entropy", "hard_entropy", "margin", "linear_margin", "confidence", "renyi")
    },
    "s2d2, bandit": ("block-tiny", {"kind": "s2d2", "router": {"kind": "bandit"}}),
}
"""Decoders of block diffusion, with each schedule and measure that reads a note."""
WARPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "all": {"temperature": 0.8, "top_k": 40, "top_p": 0.7},
}
OWN = [RowSettings(), RowSettings(temperature=0.0), RowSettings(temperature=1.5, top_p=0.6)]


@dataclass(frozen=True)
class Kernels:
    """What stands in for the kernels that a worker would find on its device; None for torch's operations."""

    attend: Any = None
    sample: Any = None
    product: Any = None


TORCH = Kernels()


@cache
def loaded(model, attend, product=None):
    return made_exact(folder_of(model), attend, product) if product else made_usual(folder_of(model), attend)


def made_usual(folder, attend):
    backbone: Any = load_backbone(folder, dtype="float32", device="cpu")
    # Only now: the interpreter would take long for the tests that a model passes when it is loaded.
    backbone._attend = attend
    backbone.forget()
    return backbone


def made_exact(folder, attend, product, layers=None):
    """A model as it is on a GPU if it must be exact, but for the device; a rotary one with the kernels between its products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftmill.decoders.backbones.packed.can_pack", lambda *_: False)
        patch.setattr("draftmill.decoders.backbones.packed.find_fixed_product", lambda *_: product)
        backbone = made_usual(folder, attend)
        backbone.rules, backbone.min_rows = replace(NO_RULES, exact=True), 1
        backbone.tiling = replace(backbone.tiling, most=min(64, backbone.tiling.most), few=())
        if hasattr(backbone, "base"):
            replace_products(backbone.base, FixedLinear)
            backbone.head = FixedLinear(backbone.head.weight, backbone.head.bias)
            if isinstance(backbone, RotaryBackbone):
                backbone.bind()
                backbone.base.kernels = layers
        else:
            backbone._product = product
    return backbone


def requests_for(model, count, *, length=18, new=7, own=False):
    """Repeated words, the end of which is to be written, or some of which are."""
    rng, made, most = np.random.default_rng(0), [], min(1000, facts(model).vocab_size - 2)
    for index in range(count):
        canvas = np.resize(rng.integers(10, most, 6), length - index).astype(np.int32)
        holes = rng.permutation(len(canvas))[:new] if model == "asarm-tiny" else slice(len(canvas) - new, None)
        canvas[holes] = -1
        usual = RowSettings(token_logprobs=model != "block-tiny")
        settings = OWN[index % len(OWN)] if own else usual
        made.append(Request(index, 1000 + index, canvas, settings=settings))
    return made


def setup_for(name, kernels, sampling):
    load = partial(loaded, attend=kernels.attend, product=kernels.product)
    return setup_of((CASES | MASKED | BLOCKS)[name], sampling, 3, load=load, max_tokens=1 << 12)


def decoded(name, kernels, *, warp, count=4, acceptance="coupled", own=False, length=18, new=7):
    """The outcomes of some samples."""
    sampling = Sampling.model_validate({"acceptance": acceptance, **WARPS[warp]}, strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftmill.decoders.engine.sampler.find_sampling", lambda *_: kernels.sample)
        setup, settings = setup_for(name, kernels, sampling)
        model, _ = (CASES | MASKED | BLOCKS)[name]
        return run_all(build_decoder(setup, settings), requests_for(model, count, own=own, length=length, new=new))


def scored(name, kernels):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftmill.decoders.engine.sampler.find_sampling", lambda *_: kernels.sample)
        setup, settings = setup_for(name, kernels, Sampling())
        texts = [np.resize(np.arange(20, 30), length).astype(np.int32) for length in (18, 15, 9)]
        requests = [Request(index, 7, text, score_from=6) for index, text in enumerate(texts)]
        return run_all(build_scorer(setup, settings, Estimate()), requests)


def counts(outcome):
    """All of an outcome but its times and log-probabilities."""
    return (
        outcome.error, outcome.tokens.tolist(), outcome.finish, outcome.nfe, outcome.nfe_draft, outcome.iterations,
        outcome.proposed, outcome.accepted, outcome.accept_hist, outcome.is_greedy,
    )  # fmt: skip


def assert_equal(found, expected, *, rounding):
    """All counts equal; log-probabilities up to rounding."""
    assert {index: counts(one) for index, one in found.items()} == {
        index: counts(one) for index, one in expected.items()
    }
    for index, one in found.items():
        assert one.error is None and one.logprob == pytest.approx(expected[index].logprob, abs=rounding)
        if one.token_logprobs is not None:
            np.testing.assert_allclose(one.token_logprobs, expected[index].token_logprobs, atol=rounding)
