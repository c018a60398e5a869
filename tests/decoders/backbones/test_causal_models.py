"""Every decoder of causal models gives the text of `autoregressive`, token for token, on random models of three families.

A random model's laws are flat, and then nobody's drafts come true. These say again what they read last, more often than not:
drafters, look-ups and Jacobi iterations win tokens, and lose some. All settings are met in pairs, not in every combination.
"""

import zlib
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.ends import Stops
from tests.decoders.backbones.causal_models import load, save_random
from tests.decoders.support import decode, decoder_settings, pairwise, prompts

VOCAB, LONGEST = 61, 64
FAMILIES = ("qwen2", "llama", "gpt2")
DTYPES = ("float32", "float64")
AR = decoder_settings("autoregressive")
WARPS: list[dict] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 0.8, "top_p": 0.6, "top_k": 12},
]
SAMPLES = {1: 6, 3: 8, 16: 24, 64: 68}
"""How many samples a batch of so many slots gets: more than it holds, so that slots are refilled."""
ENDS = ("length", "ids", "text", "both")
STOP_IDS = (5, 9, 13, 16, 21, 48, 55, 58)


class Hashed:
    """Stops after about every eighth beginning of a text: at a place that differs from sample to sample."""

    def __init__(self, seed=0):
        self.seed = seed

    def find(self, tokens, num_checked):
        for place in range(num_checked + 1, len(tokens) + 1):
            if zlib.crc32(bytes([self.seed, *tokens[:place]])) % 8 == 0:
                return place
        return None


def stops_of(ends, seed=0):
    return Stops(STOP_IDS if ends in ("ids", "both") else (), Hashed(seed) if ends in ("text", "both") else None)


def ended(tokens, stops):
    """What is left of a text, and how it ends: the first event wins, at one place the stop id."""
    eos = next((place for place, token in enumerate(tokens, 1) if token in stops.ids), len(tokens) + 1)
    text = (stops.text and stops.text.find(tokens, 0)) or len(tokens) + 1
    if min(eos, text) > len(tokens):
        return tokens, "length"
    return tokens[: min(eos, text)], "eos" if eos <= text else "stop"


@torch.no_grad()
def save_sticky(folder, family, *, shaken):
    """Random weights whose output layer asks for the token of the row itself; `shaken` adds noise of that size to all."""
    model = save_random(folder, family, seed=1, eos_token_id=None, bos_token_id=None)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    norm = model.base_model.ln_f if family == "gpt2" else model.base_model.norm
    norm.weight.fill_(1.0)
    embedding.mul_(1.8) if head is embedding else head.add_(1.2 * embedding)
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.add_(shaken * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)


def make_requests():
    """The corners first: prompts of one token, one and two new tokens, all positions that GPT-2 has; then random lengths."""
    shapes = [(1, 1), (1, 2), (40, 24), (1, 13), (9, 1), (5, 2)]
    rng = np.random.default_rng(0)
    while len(shapes) < max(SAMPLES.values()):
        shapes.append((int(rng.integers(1, 13)), int(rng.integers(1, 16))))
    return prompts(
        [(num_prompt, num_prompt + max_new) for num_prompt, max_new in shapes], vocab_size=VOCAB, seed=7, least=1
    )


REQUESTS = make_requests()


class Zoo:
    """The models of every family, each loaded once; `near` is the model a little shaken, `twin` a second copy of it."""

    def __init__(self, root):
        self.root = root
        for family in FAMILIES:
            save_sticky(self.folder(family), family, shaken=0.0)
            save_sticky(self.folder(family, "near"), family, shaken=0.02)
        self.model, self.baseline = cache(self._model), cache(self._baseline)

    def folder(self, family, role="model"):
        return self.root / f"{family}{' near' if role == 'near' else ''}"

    def _model(self, family, dtype, role="model"):
        if role == "other":
            return self.model(FAMILIES[FAMILIES.index(family) - 1], dtype, "twin")
        return load(self.folder(family, role), dtype)

    def decode(self, family, dtype, settings, warp, requests, *, rows, **more):
        """Decode with the drafter that the settings name as their `path`."""
        named = getattr(getattr(settings, "drafter", None), "path", None)
        drafter = None if named is None else self.model(family, dtype, named)
        info = inspect_model(self.folder(family))
        sampling = Sampling(**WARPS[warp])
        return decode(self.model(family, dtype), info, settings, sampling, requests, rows=rows, drafter=drafter, **more)

    def _baseline(self, family, dtype, warp):
        """Outcomes of `autoregressive` without stops."""
        return self.decode(family, dtype, AR, warp, REQUESTS, rows=64)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    return Zoo(tmp_path_factory.mktemp("models"))


def speculative(k, drafter, max_n, **_):
    if drafter == "ngram":
        return decoder_settings("speculative", k=k, drafter={"kind": "ngram", "max_n": max_n})
    return decoder_settings("speculative", k=k, drafter={"kind": "model", "path": drafter})


def jacobi(block_size, window, **_):
    return decoder_settings("jacobi", block_size=block_size, window=window)


BLOCKS: dict[str, list] = {
    "block_size": [4, 1, 6, 16],
    "blocks": [2, 1, 3, 8],
    "spawn_ratio": [0.5, 0.1, 0.85, 1.0],
    "verify_size": [4, 1, 2, 16],
    "pool_size": [4, 0, 1, 20],
}
KINDS: dict[str, tuple] = {
    "speculative": (
        speculative,
        {"k": [*range(9), "auto"], "drafter": ["near", "ngram", "twin", "other"], "max_n": [3, 1]},
    ),
    "jacobi": (jacobi, {"block_size": [4, 1, 2, 7, 16, 100], "window": ["fixed", "running"]}),
    "multiblock_jacobi": (
        lambda **case: decoder_settings("multiblock_jacobi", **{name: case[name] for name in BLOCKS}),
        BLOCKS,
    ),
}
COMMON: dict[str, list] = {
    "warp": list(range(len(WARPS))),
    "rows": list(SAMPLES),
    "ends": list(ENDS),
    "family": list(FAMILIES),
    "dtype": list(DTYPES),
}
CASES = {kind: list(pairwise(factors | COMMON)) for kind, (_, factors) in KINDS.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_the_text_is_that_of_autoregressive(zoo, kind, family):
    committed: Counter[int] = Counter()
    finishes, refused = set(), 0
    for number, case in enumerate(CASES[kind]):
        if case["family"] != family:
            continue
        settings, stops, dtype = KINDS[kind][0](**case), stops_of(case["ends"]), case["dtype"]
        samples = REQUESTS[: SAMPLES[case["rows"]]]
        shuffled = [samples[i] for i in np.random.default_rng(number).permutation(len(samples))]
        found = zoo.decode(family, dtype, settings, case["warp"], shuffled, rows=case["rows"], stops=stops)
        expected = zoo.baseline(family, dtype, case["warp"])
        for request in samples:
            outcome, free = found[request.index], expected[request.index]
            assert (outcome.tokens.tolist(), outcome.finish) == ended(free.tokens.tolist(), stops), (case, request)
            assert outcome.nfe <= len(outcome.tokens)
            if len(outcome.tokens) == len(free.tokens):
                assert outcome.logprob == pytest.approx(free.logprob, abs=1e-8 if dtype == "float64" else 1e-3)
            committed.update(dict(enumerate(outcome.accept_hist)))
            refused += outcome.proposed - outcome.accepted
            finishes.add(outcome.finish)
    # Runs of drafts came true, others did not, and texts ended in every way.
    assert sum(times for count, times in committed.items() if count >= 3) >= 10
    assert refused >= 10 and finishes == {"length", "eos", "stop"}


@pytest.mark.one_in(13)
@pytest.mark.parametrize("ends", ["length", "ids"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_at_temperature_zero_it_is_the_text_of_transformers_generate(zoo, family, dtype, ends):
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(zoo.folder(family), dtype=getattr(torch, dtype)).eval()
    samples, stops = REQUESTS[:24], stops_of(ends)
    found = zoo.decode(family, dtype, AR, 0, samples, rows=7, stops=stops)
    for request in samples:
        prompt = torch.from_numpy(request.canvas[request.canvas >= 0]).long().unsqueeze(0)
        text = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=len(request.canvas) - prompt.shape[1],
            do_sample=False,
            eos_token_id=list(stops.ids) or None,
            pad_token_id=0,
        )[0, prompt.shape[1] :]
        assert found[request.index].tokens.tolist() == text.tolist()
    assert {outcome.finish for outcome in found.values()} == ({"length", "eos"} if stops.ids else {"length"})
