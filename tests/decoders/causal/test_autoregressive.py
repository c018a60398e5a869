"""The baseline of causal decoding: its law by enumeration, its batches, its ends."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.draws.noise import gumbel_rows, key_words
from draftmill.decoders.engine.ends import Stops
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import Pair, decode, decoder_settings, engine, texts, token_info, toy_prompts

AR = decoder_settings("autoregressive")
VOCAB, LENGTH = 3, 5


def by_hand(table, request, sampling):
    """The tokens of one request, one at a time, straight from the table and the noise field."""
    tokens = [int(token) for token in request.canvas if token >= 0]
    logprob = 0.0
    for position in range(len(tokens), len(request.canvas)):
        code = (VOCAB + 1) ** LENGTH - 1
        code += sum((token - VOCAB) * (VOCAB + 1) ** place for place, token in enumerate(tokens))
        law = torch.log_softmax(table.table_PXV[position - 1, code], 0)
        scores = law
        if sampling.temperature > 0:
            where = torch.tensor([position])
            scores = torch.log_softmax(law / sampling.temperature, 0)
            scores = scores + gumbel_rows(key_words([request.key]), where, VOCAB)[0]
        tokens.append(int(scores.argmax()))
        logprob += float(law[tokens[-1]])
    return tokens[int((request.canvas >= 0).sum()) :], logprob


@pytest.mark.one_in(2)
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_every_batch_gives_the_tokens_of_the_definition(temperature, rows):
    table = TokenTable(vocab_size=VOCAB, num_positions=LENGTH, seed=1)
    requests = toy_prompts(40, vocab_size=VOCAB, longest=LENGTH)
    sampling = Sampling(temperature=temperature)
    outcomes = decode(table, token_info(VOCAB), AR, sampling, requests, rows=rows)
    for request in requests:
        tokens, logprob = by_hand(table, request, sampling)
        outcome = outcomes[request.index]
        assert outcome.tokens.tolist() == tokens
        assert outcome.logprob == pytest.approx(logprob, abs=1e-12)
        assert (outcome.finish, outcome.nfe, outcome.iterations) == ("length", len(tokens), len(tokens))


def test_a_stop_id_ends_the_sample_and_is_its_last_token():
    table = TokenTable(vocab_size=VOCAB, num_positions=LENGTH, seed=2)
    requests = toy_prompts(60, vocab_size=VOCAB, longest=LENGTH)
    free = texts(decode(table, token_info(VOCAB), AR, Sampling(), requests))
    stopped = decode(table, token_info(VOCAB), AR, Sampling(), requests, stops=Stops(ids=(2,)))
    ends = 0
    for index, tokens in free.items():
        expected = tokens[: tokens.index(2) + 1] if 2 in tokens else tokens
        ends += 2 in tokens
        assert stopped[index].tokens.tolist() == expected
        assert stopped[index].finish == ("eos" if 2 in tokens else "length")
        assert stopped[index].nfe == len(expected)
    assert 10 < ends < 50


def test_the_first_of_stop_id_and_stop_text_wins():
    table = TokenTable(vocab_size=VOCAB, num_positions=LENGTH, seed=3)
    requests = toy_prompts(60, vocab_size=VOCAB, longest=LENGTH)
    free = texts(decode(table, token_info(VOCAB), AR, Sampling(), requests))
    stopped = decode(table, token_info(VOCAB), AR, Sampling(), requests, stops=Stops(ids=(2,), text=Pair()))
    seen = set()
    for index, tokens in free.items():
        eos = tokens.index(2) if 2 in tokens else len(tokens)
        pair = next((place for place, (a, b) in enumerate(itertools.pairwise(tokens), 1) if a == b), len(tokens))
        end = min(eos, pair)
        finish = "length" if end == len(tokens) else "eos" if eos <= pair else "stop"
        assert stopped[index].tokens.tolist() == tokens[: end + 1]
        assert stopped[index].finish == finish
        seen.add(finish)
    assert seen == {"length", "eos", "stop"}


@pytest.mark.parametrize("canvas", [[-1, -1], [0, -1, 1], [-1, 2]])
def test_a_canvas_that_is_no_prompt_and_holes_is_refused(canvas):
    table = TokenTable(vocab_size=VOCAB, num_positions=LENGTH)
    request = Request(0, sample_key(0, "a"), np.array(canvas, dtype=np.int32))
    with pytest.raises(ValueError, match="prompt of at least one token"):
        decode(table, token_info(VOCAB), AR, Sampling(), [request])


def steps_until_done(decoder, requests, *, rows):
    """How many forwards it takes when every free slot is refilled at once, and all outcomes."""
    waiting, outcomes, steps = list(requests), {}, 0
    while waiting or decoder.active:
        while waiting and decoder.active < rows:
            decoder.admit([waiting.pop(0)])
        outcomes.update({outcome.index: outcome for outcome in decoder.step()})
        steps += 1
    return steps, outcomes


def test_a_new_sample_joins_the_others_forward_and_costs_no_step_of_its_own():
    rows, rng = 8, np.random.default_rng(0)
    table = TokenTable(vocab_size=VOCAB, num_positions=9, seed=3)
    requests = [
        Request(index, sample_key(0, str(index)), np.array([1] + [-1] * int(rng.integers(2, 8)), dtype=np.int32))
        for index in range(40)
    ]
    joined, apart = (engine(table, token_info(VOCAB), AR, rows=rows) for _ in range(2))
    apart.scheduler.algorithm = replace(apart.algorithm, joins_prompts=False)
    few, outcomes = steps_until_done(joined, requests, rows=rows)
    many, others = steps_until_done(apart, requests, rows=rows)
    assert texts(outcomes) == texts(others)
    assert [o.nfe for o in outcomes.values()] == [len(o.tokens) for o in outcomes.values()]
    assert {i: o.nfe for i, o in outcomes.items()} == {i: o.nfe for i, o in others.items()}
    # Of the forwards that start a few samples, none is taken from the others.
    assert few < many - 5
    assert few >= sum(len(tokens) for tokens in texts(outcomes).values()) / rows
