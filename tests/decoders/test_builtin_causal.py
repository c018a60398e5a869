"""The causal models that ship with the project: every decoder's text is the autoregressive one, on prompts of real source."""

import sysconfig
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import draftmill.decoders.builtin
from draftmill.actors.rows.stop_text import StopStrings
from draftmill.actors.rows.text import load_tokenizer
from draftmill.decoders.backbones.checkpoint import inspect_model, stop_ids
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.base import Request
from draftmill.decoders.causal.settings import ModelDrafterSettings, NgramDrafterSettings, SuffixDrafterSettings
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.ends import Stops
from tests.decoders.support import decode, decoder_settings, pairwise, texts

BUILTIN = Path(draftmill.decoders.builtin.__path__[0])
TARGET, DRAFTER = BUILTIN / "ar-tiny", BUILTIN / "ar-micro"
AR = decoder_settings("autoregressive")
MODEL, NGRAM = ModelDrafterSettings(kind="model", path="builtin:ar-micro"), NgramDrafterSettings(kind="ngram")
SUFFIX = SuffixDrafterSettings(kind="suffix")
WARPS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.8},
]
SAMPLES = {1: 5, 3: 7, 16: 22, 64: 70}
STOP_STRINGS = ("\n\n", "self.", ")\n", "if ")


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
    while len(shapes) < max(SAMPLES.values()):
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


@pytest.fixture(scope="module")
def stops():
    """None, an end token that the model says often, and stop strings as a job looks for them."""
    tokenizer = load_tokenizer(TARGET)
    assert tokenizer is not None, "the builtin models have a tokenizer"
    comma = int(tokenizer.encode(",")[0])
    return {
        "length": Stops(),
        "eos": Stops(ids=(*stop_ids(TARGET), comma)),
        "stop": Stops(text=StopStrings(tokenizer, STOP_STRINGS)),
    }


def ended(tokens, stops):
    """What is left of a text, looked at token by token."""
    for place, token in enumerate(tokens, 1):
        if token in stops.ids or (stops.text is not None and stops.text.find(tokens[:place], 0) == place):
            return tokens[:place]
    return tokens


def speculative(k, drafter, **_):
    return decoder_settings("speculative", k=k, drafter=drafter)


def jacobi(block_size, window, **_):
    return decoder_settings("jacobi", block_size=block_size, window=window)


BLOCKS: dict[str, list[Any]] = {
    "block_size": [4, 16],
    "blocks": [2, 3],
    "spawn_ratio": [0.85, 0.4],
    "verify_size": [4, 1],
    "pool_size": [4, 0],
}


def multiblock(**case):
    return decoder_settings("multiblock_jacobi", **{name: case[name] for name in BLOCKS})


KINDS: dict[str, tuple[Any, dict[str, list[Any]]]] = {
    "speculative": (speculative, {"k": [1, 3, 5, 8, "auto"], "drafter": [MODEL, NGRAM, SUFFIX]}),
    "jacobi": (jacobi, {"block_size": [4, 16], "window": ["fixed", "running"]}),
    "multiblock_jacobi": (multiblock, BLOCKS),
}
COMMON: dict[str, list[Any]] = {"warp": [0, 1, 2, 3], "rows": list(SAMPLES), "ends": ["length", "eos", "stop"]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_the_autoregressive_text(run, requests, baseline, stops, kind):
    make, factors = KINDS[kind]
    finishes: set[str] = set()
    committed: Counter[int] = Counter()
    for number, case in enumerate(pairwise(factors | COMMON)):
        samples = requests[: SAMPLES[case["rows"]]]
        shuffled = [samples[i] for i in np.random.default_rng(number).permutation(len(samples))]
        found = run(make(**case), case["warp"], shuffled, rows=case["rows"], stops=stops[case["ends"]])
        for request in samples:
            outcome = found[request.index]
            assert outcome.tokens.tolist() == ended(baseline(case["warp"])[request.index], stops[case["ends"]]), case
            assert outcome.nfe <= len(outcome.tokens)
            finishes.add(outcome.finish)
            committed.update(dict(enumerate(outcome.accept_hist)))
    assert finishes == {"length", "eos", "stop"}
    assert sum(times for count, times in committed.items() if count >= 3) >= 20


@pytest.mark.slow
def test_the_batch_does_not_change_a_bit_of_the_autoregressive_text(run, requests, baseline):
    for rows in (1, 64):
        found = texts(run(AR, 2, requests[:20], rows=rows))
        assert found == {request.index: baseline(2)[request.index] for request in requests[:20]}


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
    outcomes = run(decoder_settings("speculative", k=4, drafter=MODEL), 2, requests, rows=64).values()
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
            for settings in (AR, jacobi(16, "fixed"))
        )
        assert texts(ours) == texts(plain)
        for kind, outcomes in (("autoregressive", plain), ("jacobi", ours)):
            counts[name, kind] = sum(outcome.nfe for outcome in outcomes.values())
    assert counts["after", "jacobi"] < share * counts["before", "jacobi"]
    assert counts["after", "jacobi"] < 0.85 * counts["after", "autoregressive"]
