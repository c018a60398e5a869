"""Helpers of the decoder tests: toy requests, and a loop that keeps a decoder's slots full."""

import itertools
from collections import Counter
from functools import reduce

import numpy as np
import torch

from draftmill.decoders.backbones.heads.markov import DraftHeads
from draftmill.decoders.base import ModelInfo, Request
from draftmill.decoders.common_settings import Estimate, Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder, build_scorer
from draftmill.decoders.settings import DECODERS


def table_info(vocab_size, suppressed=()):
    return ModelInfo("table", vocab_size, None, None, "any_subset", 0, tuple(suppressed))


def toy_requests(count, *, vocab_size, longest, share=0.7, seed=0, shortest=1):
    rng = np.random.default_rng(seed)
    requests = []
    for index in range(count):
        canvas = rng.integers(0, vocab_size, rng.integers(shortest, longest + 1)).astype(np.int32)
        canvas[rng.random(len(canvas)) < share] = -1
        requests.append(Request(index, sample_key(seed, str(index)), canvas))
    return requests


def accepts(automaton, tokens):
    """Whether an automaton over tokens accepts a text."""
    state = reduce(automaton.step, tokens, 0)
    return state >= 0 and bool(automaton.is_end_S[state])


def token_info(vocab_size, suppressed=()):
    return ModelInfo("token_table", vocab_size, None, None, "causal", 0, tuple(suppressed))


def toy_prompts(count, *, vocab_size, longest, seed=0, max_new=None):
    """Completions of random prompts; canvases of up to `longest` tokens, each with at least one prompt token and one hole."""
    rng = np.random.default_rng(seed)
    requests = []
    for index in range(count):
        length = int(rng.integers(2, longest + 1))
        num_prompt = max(int(rng.integers(1, length)), length - (max_new or length))
        canvas = rng.integers(0, vocab_size, length).astype(np.int32)
        canvas[num_prompt:] = -1
        requests.append(Request(index, sample_key(seed, str(index)), canvas))
    return requests


def prompts(lengths, *, vocab_size=3, seed=0, least=0):
    """A request for each (prompt length, canvas length), of tokens from `least` on."""
    rng, requests = np.random.default_rng(seed), []
    for index, (num_prompt, length) in enumerate(lengths):
        canvas = np.full(length, -1, dtype=np.int32)
        canvas[:num_prompt] = rng.integers(least, vocab_size, num_prompt)
        requests.append(Request(index, sample_key(seed, str(index)), canvas))
    return requests


def ragged_prompts(count, *, vocab_size, longest=40, shared=0, seed=0):
    """Prompts and holes of many lengths; all prompts begin with `shared` equal tokens."""
    rng = np.random.default_rng(seed)
    beginning, requests = rng.integers(0, vocab_size, shared), []
    for index in range(count):
        prompt = [*beginning, *rng.integers(0, vocab_size, rng.integers(1, longest // 2))]
        canvas = np.array([*prompt, *[-1] * int(rng.integers(1, longest // 2))], dtype=np.int32)
        requests.append(Request(index, sample_key(seed, str(index)), canvas))
    return requests


def toy_heads(width, seed=0):
    """Random draft heads that really change what is drafted."""
    torch.manual_seed(seed)
    heads = DraftHeads(width=width, markov_hidden=8).double()
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return heads.requires_grad_(False)


def run_all(decoder, requests):
    """Decode requests, refilling slots as they free up; outcomes by index, each exactly once."""
    queue, outcomes = list(requests), {}
    while queue or decoder.active:
        while queue and decoder.room(len(queue[0].canvas)):
            decoder.admit([queue.pop(0)])
        for outcome in decoder.step():
            assert outcome.index not in outcomes
            outcomes[outcome.index] = outcome
    assert set(outcomes) == {request.index for request in requests}
    return outcomes


def decoder_settings(kind, **settings):
    return DECODERS[kind].model_validate({"kind": kind} | settings)


def engine(backbone, info, settings, sampling=None, *, rows=3, max_tokens=1 << 20, **more):
    """A decoder; `more` are further fields of Setup."""
    sampling = sampling or Sampling()
    setup = Setup(backbone=backbone, info=info, sampling=sampling, max_rows=rows, max_tokens=max_tokens, **more)
    return build_decoder(setup, settings)


def decode(backbone, info, settings, sampling, requests, *, rows=3, max_tokens=1 << 20, **more):
    decoder = engine(backbone, info, settings, sampling, rows=rows, max_tokens=max_tokens, **more)
    return run_all(decoder, requests)


def scorer_for(backbone, info, settings, *, rows=3, tokens=1 << 20, **estimate):
    """What scores texts with the decoder `settings` and an estimate of these settings."""
    setup = Setup(backbone=backbone, info=info, sampling=Sampling(), max_rows=rows, max_tokens=tokens)
    return build_scorer(setup, settings, Estimate.model_validate(estimate, strict=True))


def score(backbone, info, settings, requests, *, rows=3, **estimate):
    """The outcomes of texts to score, by index."""
    return run_all(scorer_for(backbone, info, settings, rows=rows, **estimate), requests)


def texts(outcomes):
    return {index: outcome.tokens.tolist() for index, outcome in outcomes.items()}


class Pair:
    """A stop text: these two tokens in a row, or any two equal ones."""

    def __init__(self, *tokens):
        self.tokens = list(tokens)

    def find(self, tokens, num_checked):
        for count in range(max(num_checked + 1, 2), len(tokens) + 1):
            if list(tokens[count - 2 : count]) == (self.tokens or [tokens[count - 1]] * 2):
                return count
        return None


def random_lengths(auto):
    """In place of AutoLength.__call__: any number of drafts for each iteration, the fewest and the most among them."""
    return int(torch.randint(auto.lengths[0], auto.lengths[-1] + 1, ()))


def random_way(auto):
    """In place of AutoLength.way: any way to draft for each iteration."""
    return int(torch.randint(max(auto._way_of) + 1, ()))


def pairwise(factors):
    """Cases in which every value of every factor meets every value of every other one; greedy, always the same."""
    names = list(factors)
    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in range(len(factors[a]))
        for y in range(len(factors[b]))
    }
    while missing:
        case = dict(min(missing))
        for name in names:
            if name not in case:
                met = Counter(dict.fromkeys(range(len(factors[name])), 0))
                for value in met:
                    others = (((name, value), other) for other in case.items())
                    met[value] = sum(pair in missing or pair[::-1] in missing for pair in others)
                # Among equals the one whose turn it is, so that what is left over spreads.
                case[name] = max(met, key=lambda value: (met[value], -((value - len(missing)) % len(met))))
        missing -= set(itertools.combinations([(name, case[name]) for name in names], 2))
        yield {name: factors[name][case[name]] for name in names}
