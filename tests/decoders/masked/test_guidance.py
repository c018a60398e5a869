"""Guidance and end tokens that come last: LLaDA's public code, step by step, on a toy table.

`llada` is the loop of `generate` in ML-GSAI/LLaDA (generate.py) with `cfg_scale`, with `confidence_eos_eot_inf` as its comments
mean it, and with one block; greedy, so that no noise has to be the same.
"""

from copy import copy
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from draftmill.decoders.base import HOLE, ModelInfo, Request
from draftmill.decoders.common_settings import DecoderChoice, Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder
from tests.decoders.references.causal import PlainMasked
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decoder_settings, run_all, texts

VOCAB, LENGTH = 3, 6
MASK, END = VOCAB, 2


@cache
def table() -> TokenTable:
    return TokenTable(vocab_size=VOCAB + 1, num_positions=LENGTH, seed=3)


def setup(sampling: Sampling, *, rows: int = 3, ends: tuple[int, ...] = ()) -> Setup:
    info = ModelInfo("llada", VOCAB + 1, MASK, None, "masked", 0, (MASK,))
    stops = Stops(ends) if ends else None
    backbone = copy(table())
    return Setup(backbone=backbone, info=info, sampling=sampling, max_rows=rows, max_tokens=1 << 20, stops=stops)


def requests(count: int = 12) -> list[Request]:
    rng = np.random.default_rng(0)
    canvases = [[*rng.integers(0, VOCAB, int(rng.integers(1, 3))).tolist()] for _ in range(count)]
    whole = [np.array([*prompt, *[HOLE] * (LENGTH - len(prompt))], dtype=np.int32) for prompt in canvases]
    return [Request(index, sample_key(0, str(index)), canvas) for index, canvas in enumerate(whole)]


def llada(canvas: list[int], cfg_scale: float, *, tokens_per_step: int, ends: tuple[int, ...] = ()) -> list[int]:
    model = PlainMasked(copy(table()), mask_id=MASK, sampling=Sampling())
    x = torch.tensor([MASK if token == HOLE else token for token in canvas])
    prompt_index = x != MASK
    while (x == MASK).any():
        mask_index = x == MASK
        logits = model.logits(x.tolist())
        if cfg_scale > 0.0:
            un_x = x.clone()
            un_x[prompt_index] = MASK
            un_logits = model.logits(un_x.tolist())
            logits = un_logits + (cfg_scale + 1) * (logits - un_logits)
        logits[:, MASK] = -torch.inf  # draftmill never generates a mask
        x0 = logits.argmax(-1)
        x0_p = torch.softmax(logits, -1).gather(-1, x0.unsqueeze(-1)).squeeze(-1)
        x0_p[torch.isin(x0, torch.tensor(ends, dtype=torch.int64))] = -1.0
        confidence = torch.where(mask_index, x0_p, -torch.inf)
        chosen = confidence.topk(min(tokens_per_step, int(mask_index.sum()))).indices
        x[chosen] = x0[chosen]
    return x[~prompt_index].tolist()


@pytest.mark.parametrize("tokens_per_step", [1, 2])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_guided_texts_are_those_of_lladas_code_and_take_two_evaluations_a_step(scale, tokens_per_step):
    settings = decoder_settings("stepwise", block_length=None, guidance_scale=scale, tokens_per_step=tokens_per_step)
    found = run_all(build_decoder(setup(Sampling(temperature=0.0)), settings), requests())
    plain = run_all(
        build_decoder(setup(Sampling(temperature=0.0)), settings.model_copy(update={"guidance_scale": 0.0})), requests()
    )
    for made in requests():
        outcome, canvas = found[made.index], made.canvas.tolist()
        assert outcome.tokens.tolist() == llada(canvas, scale, tokens_per_step=tokens_per_step)
        assert plain[made.index].tokens.tolist() == llada(canvas, 0.0, tokens_per_step=tokens_per_step)
        assert outcome.nfe == 2 * plain[made.index].nfe == 2 * len(outcome.tokens[::tokens_per_step])
        assert outcome.batch_rows <= 3.0
    assert texts(found) != texts(plain)


def test_end_tokens_come_last_if_they_are_suppressed():
    def run(**more) -> dict[int, list[int]]:
        settings = decoder_settings("stepwise", block_length=None, **more)
        made = setup(Sampling(temperature=0.0), ends=(END,))
        return texts(run_all(build_decoder(made, settings), requests()))

    def cut(text: list[int]) -> list[int]:
        return text[: text.index(END) + 1] if END in text else text

    plain, last = run(), run(suppress_end=True)
    for made in requests():
        assert plain[made.index] == cut(llada(made.canvas.tolist(), 0.0, tokens_per_step=1))
        assert last[made.index] == cut(llada(made.canvas.tolist(), 0.0, tokens_per_step=1, ends=(END,)))
    assert sum(map(len, last.values())) > sum(map(len, plain.values()))


@pytest.mark.parametrize("sampling", [Sampling(temperature=0.0), Sampling(temperature=0.8, top_p=0.9)], ids=str)
def test_speculation_keeps_guided_texts_and_the_order_of_ends(sampling):
    more: dict = {"guidance_scale": 1.5, "suppress_end": True, "block_length": 3}

    def run(settings: DecoderChoice, rows: int) -> dict[int, list[int]]:
        return texts(run_all(build_decoder(setup(sampling, rows=rows, ends=(END,)), settings), requests()))

    expected = run(decoder_settings("stepwise", **more), 1)
    assert run(decoder_settings("stepwise", **more), 5) == expected
    for tree in ("chain", "mixed"):
        assert run(decoder_settings("ssd", draft_length=2, tree=tree, **more), 3) == expected
    alone = replace(requests()[0], index=0)
    assert run_all(build_decoder(setup(sampling), decoder_settings("factor", guidance_scale=2.0)), [alone])


def test_a_cache_holds_one_canvas_only():
    with pytest.raises(ValueError, match="runs two canvases, and a cache holds one"):
        decoder_settings("stepwise", guidance_scale=1.0, cache="prefix")
