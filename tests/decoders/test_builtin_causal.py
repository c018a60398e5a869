"""The causal models that ship with the project, on prompts of real source: their text, and what drafts save."""

import sysconfig
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import draftmill.decoders.builtin
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from tests.decoders.support import decode, decoder_settings, texts

BUILTIN = Path(draftmill.decoders.builtin.__path__[0])
TARGET, DRAFTER = BUILTIN / "ar-tiny", BUILTIN / "ar-micro"
AR = decoder_settings("autoregressive")
WARPS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.8},
]


@pytest.fixture(scope="module")
def model():
    backbones = load_backbone(TARGET, device="cpu"), load_backbone(DRAFTER, device="cpu")
    return backbones, inspect_model(TARGET)


@pytest.fixture(scope="module")
def requests():
    """The corners first: prompts of one token, one and two new tokens; then up to 24 tokens of source and up to 20 new ones."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TARGET)
    text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text()
    ids = np.array(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
    rng, shapes = np.random.default_rng(0), [(1, 1), (1, 2), (1, 20), (24, 1), (9, 14)]
    while len(shapes) < 70:
        shapes.append((int(rng.integers(1, 25)), int(rng.integers(1, 21))))
    made = []
    for index, (num_prompt, max_new) in enumerate(shapes):
        canvas = np.full(num_prompt + max_new, -1, dtype=np.int32)
        start = rng.integers(0, len(ids) - num_prompt)
        canvas[:num_prompt] = ids[start : start + num_prompt]
        made.append(Request(index, sample_key(0, str(index)), canvas))
    return made


@pytest.fixture(scope="module")
def run(model):
    """Decode with the models that ship."""
    (target, drafter), info = model

    def decoded(settings, warp, requests, *, rows, **more):
        return decode(target, info, settings, Sampling(**WARPS[warp]), requests, rows=rows, drafter=drafter, **more)

    return decoded


@pytest.fixture(scope="module")
def baseline(run, requests):
    """Autoregressive text by the index of the warp, without stops, computed once."""
    return cache(lambda warp: texts(run(AR, warp, requests, rows=32)))


@pytest.mark.slow
def test_greedy_text_is_that_of_transformers_generate(requests, baseline):
    theirs = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    for request in requests[:16]:
        prompt = torch.from_numpy(request.canvas[request.canvas >= 0]).long().unsqueeze(0)
        more = len(request.canvas) - prompt.shape[1]
        found = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=more, do_sample=False, eos_token_id=None
        )
        assert found[0, prompt.shape[1] :].tolist() == baseline(0)[request.index]


@pytest.mark.slow
def test_the_small_model_saves_forwards_of_the_large_one(run, requests):
    """At temperature 1, where the text does not repeat itself, and with a fixed number of drafts."""
    outcomes = run(
        decoder_settings("speculative", k=4, drafter={"kind": "model", "path": "micro"}), 2, requests, rows=64
    ).values()
    tokens, nfe = sum(len(outcome.tokens) for outcome in outcomes), sum(outcome.nfe for outcome in outcomes)
    assert nfe < 0.75 * tokens


@pytest.mark.slow
@pytest.mark.parametrize(("warp", "share"), [(0, 0.75), (2, 0.95)])
def test_the_distilled_model_gives_its_own_text_in_fewer_forwards(requests, warp, share):
    """It was distilled on greedy texts, and longer ones; sampling gains less."""
    folder, counts = BUILTIN / "ar-tiny-jacobi", {}
    backbones = {name: load_backbone(path, device="cpu") for name, path in (("before", TARGET), ("after", folder))}
    whole = [
        Request(request.index, request.key, np.append(request.canvas[request.canvas >= 0], [-1] * 48).astype(np.int32))
        for request in requests[5:21]
    ]
    for name, backbone in backbones.items():
        plain, ours = (
            decode(backbone, inspect_model(folder), settings, Sampling(**WARPS[warp]), whole, rows=16)
            for settings in (AR, decoder_settings("jacobi", block_size=16, window="fixed"))
        )
        assert texts(ours) == texts(plain)
        for kind, outcomes in (("autoregressive", plain), ("jacobi", ours)):
            counts[name, kind] = sum(outcome.nfe for outcome in outcomes.values())
    assert counts["after", "jacobi"] < share * counts["before", "jacobi"]
    assert counts["after", "jacobi"] < 0.85 * counts["after", "autoregressive"]
