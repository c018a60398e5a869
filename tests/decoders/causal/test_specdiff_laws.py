"""Exact output laws of speculative diffusion decoding under rejection: every branch of every random choice, summed."""

from dataclasses import replace

import numpy as np
import pytest

from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.setup import Setup
from tests.decoders import enumeration
from tests.decoders.masked.diffusion_tables import TARGET_INFO, VOCAB, drafter, mask_info, specdiff, target
from tests.decoders.support import decoder_settings, toy_heads

pytestmark = pytest.mark.slow
AR = decoder_settings("autoregressive")


def on_the_engine(settings, *, rows=1, heads=None, requests=None, index=0, suppressed=(), **sampling):
    setup = Setup(
        backbone=target(),
        info=replace(TARGET_INFO, suppressed=suppressed),
        sampling=Sampling(acceptance="rejection", **sampling),
        max_rows=rows,
        max_tokens=99,
        drafter=None if settings is AR else drafter(),
        drafter_info=None if settings is AR else mask_info(max_length=5),
        heads=heads,
    )
    return enumeration.law_of(setup, settings, requests or [request_of(0)], index)


def request_of(index, prompt=2, holes=3):
    return Request(index, 55 + index, np.array([*range(prompt), *[-1] * holes], dtype=np.int32))


@pytest.mark.parametrize(("gamma", "steps"), [(1, 1), (2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("window", ["short", "full"])
@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.one_in(99, soak=3)
def test_the_decoder_in_the_engine_has_the_autoregressive_law(gamma, steps, window, with_head):
    heads = toy_heads(VOCAB + 1) if with_head else None
    found = on_the_engine(specdiff(gamma, steps, window=window), heads=heads)
    assert enumeration.total_variation(found, on_the_engine(AR)) < 1e-12


@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("warp", [{"temperature": 0.6}, {"top_p": 0.7}, {"top_k": 2}], ids=str)
def test_the_warps_and_suppressed_ids_leave_the_law_alone(warp, with_head):
    heads = toy_heads(VOCAB + 1, seed=2) if with_head else None
    found = on_the_engine(specdiff(2, 2), heads=heads, suppressed=(1,), **warp)
    assert all(1 not in fill for fill in found)
    assert enumeration.total_variation(found, on_the_engine(AR, suppressed=(1,), **warp)) < 1e-12


@pytest.mark.parametrize("with_head", [False, True])
def test_a_sample_that_refills_a_slot_beside_others_has_that_law_too(with_head):
    heads = toy_heads(VOCAB + 1) if with_head else None
    requests = [request_of(1, 1, 2), request_of(2, 2, 4), request_of(0)]
    found = on_the_engine(specdiff(2, 2), rows=2, heads=heads, requests=requests, index=0, temperature=0.7)
    assert enumeration.total_variation(found, on_the_engine(AR, temperature=0.7)) < 1e-12


def test_the_native_order_has_another_law_in_the_engine():
    found = on_the_engine(specdiff(2, 2, order="native"))
    assert enumeration.total_variation(found, on_the_engine(AR)) > 1e-4
