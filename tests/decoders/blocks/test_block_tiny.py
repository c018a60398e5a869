"""S2D2 on the builtin block-diffusion model: the law and the text of its block size 1."""

import itertools
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.base import Request
from draftmill.decoders.blocks.settings import S2d2Settings
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from tests.decoders.references.blocks import PlainBlocks, law_at_size_one
from tests.decoders.support import decode, decoder_settings, texts

FOLDER = Path(__file__).parents[3] / "decoders" / "builtin" / "block-tiny"
PROMPT, NEW = (511, 37, 820, 1201, 64), 4
"""Five tokens, so that blocks of four begin with a tail, and four new ones lie in two blocks."""
REJECTING = Sampling(temperature=1.3, top_k=2, acceptance="rejection")
ALWAYS: dict[str, Any] = {"kind": "s2d2", "block_size": 4, "causal_cache": True, "causal_draft": True}
ONE = decoder_settings("block_diffusion", block_size=1, causal_cache=True)


@cache
def model() -> Any:
    return inspect_model(FOLDER), load_backbone(FOLDER, dtype="float32", device="cpu")


def requests(count: int, lengths: tuple[int, ...] = (len(PROMPT) + NEW,)) -> list[Request]:
    canvases = [np.array([*PROMPT, *[-1] * (length - len(PROMPT))], dtype=np.int32) for length in lengths]
    return [Request(index, sample_key(7, str(index)), canvases[index % len(lengths)]) for index in range(count)]


def decoded(settings: Any, sampling: Sampling, asked: list[Request], *, rows: int = 32) -> Any:
    info, backbone = model()
    backbone.forget()
    return decode(backbone, info, settings, sampling, asked, rows=rows)


@cache
def block_size_one() -> dict[tuple[int, ...], float]:
    """Every completion that block size 1 can give, with its probability: two tokens to a place."""
    info, backbone = model()
    backbone.forget()
    plain = PlainBlocks(backbone, info, ONE, REJECTING)
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for place in range(len(PROMPT), len(PROMPT) + NEW):
        grown: dict[tuple[int, ...], float] = {}
        for text, mass in known.items():
            law = plain.law(*plain.verifying([*PROMPT, *text], 0, place)).exp()
            grown |= {(*text, token): mass * float(law[token]) for token in law.nonzero().flatten().tolist()}
        known = grown
    wanted = law_at_size_one(plain, PROMPT, len(PROMPT) + NEW)
    text = next(iter(known))
    assert wanted(text) == pytest.approx(known[text])
    return known


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.slow
def test_samples_of_the_builtin_follow_the_law_of_block_size_one(fused):
    """By rejection, always verified, over a causal cache: chi-square over the texts of 400 keys."""
    law, num = block_size_one(), 400
    assert len(law) == 2**NEW and sum(law.values()) == pytest.approx(1.0)
    found = decoded(S2d2Settings(**ALWAYS, fused=fused), REJECTING, requests(num))
    assert 0 < sum(o.accepted for o in found.values()) < sum(o.proposed for o in found.values())
    said = Counter(tuple(text) for text in texts(found).values())
    assert set(said) <= set(law) and num * min(law.values()) > 5
    # 15 degrees of freedom: above 44.3 once in ten thousand.
    assert sum((said[text] - num * mass) ** 2 / (num * mass) for text, mass in law.items()) < 44.3


def test_over_another_cache_it_says_what_block_size_one_never_does():
    """So the test above can tell."""
    law = block_size_one()
    found = texts(decoded(S2d2Settings(**ALWAYS | {"causal_cache": False}), REJECTING, requests(60)))
    assert sum(tuple(text) not in law for text in found.values()) > 10


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.slow
def test_its_text_is_that_of_block_size_one_alone_and_in_company(temperature):
    """Token for token, by coupled acceptance and at temperature 0."""
    sampling, asked = Sampling(temperature=temperature, top_p=0.95), requests(6, lengths=(6, 17, 26, 21))
    one = texts(decoded(ONE, sampling, asked, rows=16))
    forwards = []
    for fused, rows in itertools.product((False, True), (1, 3, 16)):
        found = decoded(S2d2Settings(**ALWAYS, fused=fused), sampling, asked, rows=rows)
        assert texts(found) == one
        forwards.append(sum(outcome.nfe for outcome in found.values()))
    assert forwards[0] == forwards[1] == forwards[2] > forwards[3] == forwards[4] == forwards[5]
