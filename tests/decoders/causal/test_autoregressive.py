"""The baseline of causal decoding: its law by enumeration, its batches, its ends, and the scores of given tokens."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.draws.noise import gumbel_rows, key_words
from draftmill.decoders.engine import memory, model_runner
from draftmill.decoders.engine.ends import Stops
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import (
    Pair,
    decode,
    decoder_settings,
    engine,
    run_all,
    scorer_for,
    texts,
    token_info,
    toy_prompts,
)

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


@pytest.mark.parametrize(("text", "finishes"), [(None, {"length", "eos"}), (Pair(), {"length", "eos", "stop"})])
def test_the_first_of_stop_id_and_stop_text_ends_the_sample_and_is_its_last_token(text, finishes):
    table = TokenTable(vocab_size=VOCAB, num_positions=LENGTH, seed=3)
    requests = toy_prompts(60, vocab_size=VOCAB, longest=LENGTH)
    free = texts(decode(table, token_info(VOCAB), AR, Sampling(), requests))
    stopped = decode(table, token_info(VOCAB), AR, Sampling(), requests, stops=Stops(ids=(2,), text=text))
    seen = Counter[str]()
    for index, tokens in free.items():
        eos = tokens.index(2) if 2 in tokens else len(tokens)
        pairs = (place for place, (a, b) in enumerate(itertools.pairwise(tokens), 1) if text and a == b)
        pair = next(pairs, len(tokens))
        expected = tokens[: min(eos, pair) + 1]
        finish = "length" if min(eos, pair) == len(tokens) else "eos" if eos <= pair else "stop"
        assert stopped[index].tokens.tolist() == expected and stopped[index].nfe == len(expected)
        assert stopped[index].finish == finish
        seen[finish] += 1
    assert seen.keys() == finishes and 10 < seen["eos"] < 50


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


def causal_scorer(backbone, info, *, rows, tokens=1 << 20):
    return scorer_for(backbone, info, decoder_settings("autoregressive"), rows=rows, tokens=tokens)


def scored_by_hand(table, tokens, first, *, suppressed=()):
    """The log-probability of each token from `first` on, straight from the table."""
    scores = []
    for position in range(first, len(tokens)):
        code = (VOCAB + 1) ** LENGTH - 1
        code += sum((token - VOCAB) * (VOCAB + 1) ** place for place, token in enumerate(tokens[:position]))
        logits = table.table_PXV[position - 1, code].clone()
        logits[list(suppressed)] = -torch.inf
        scores.append(float(logits.log_softmax(0)[tokens[position]]))
    return scores


def greedy(table, prompt, count, *, suppressed=()):
    """The `count` tokens that are the most likely ones, each after those before it, straight from the table."""
    tokens = list(prompt)
    for _ in range(count):
        scores = [
            scored_by_hand(table, [*tokens, token], len(tokens), suppressed=suppressed)[0] for token in range(VOCAB)
        ]
        tokens.append(int(np.argmax(scores)))
    return tokens


def requests_of(count, seed=0):
    rng = np.random.default_rng(seed)
    requests = []
    for index in range(count):
        canvas = rng.integers(0, VOCAB, int(rng.integers(2, LENGTH + 1))).astype(np.int32)
        requests.append(Request(index, index, canvas, score_from=int(rng.integers(1, len(canvas)))))
    return requests


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("least_rows", [64, 1])
def test_every_batch_gives_the_scores_of_the_definition(rows, least_rows, monkeypatch):
    monkeypatch.setattr(memory, "_CPU_LOGITS", 2 * VOCAB * 8)
    monkeypatch.setattr(model_runner, "_LEAST_ROWS", least_rows)
    table = TokenTable(vocab_size=VOCAB, num_positions=LENGTH, seed=1)
    requests = requests_of(40)
    outcomes = run_all(causal_scorer(table, token_info(VOCAB), rows=rows), requests)
    for request in requests:
        outcome, first = outcomes[request.index], request.score_from
        expected = scored_by_hand(table, request.canvas.tolist(), first)
        assert outcome.tokens.tolist() == request.canvas[first:].tolist()
        assert outcome.token_logprobs.dtype == np.float32
        np.testing.assert_allclose(outcome.token_logprobs, expected, rtol=1e-6)
        assert outcome.logprob == pytest.approx(sum(expected), abs=1e-12)
        assert (outcome.finish, outcome.nfe, outcome.iterations, outcome.accept_hist) == ("filled", 1, 0, [])


def test_ids_without_a_token_have_no_share_of_the_law():
    table = TokenTable(vocab_size=VOCAB, num_positions=LENGTH, seed=3)
    scorer = causal_scorer(table, token_info(VOCAB, suppressed=[2]), rows=2)
    fine = Request(0, 0, np.asarray([0, 1, 0], dtype=np.int32), score_from=1)
    impossible = Request(1, 1, np.asarray([0, 2, 0], dtype=np.int32), score_from=1)
    outcomes = run_all(scorer, [fine, impossible])
    np.testing.assert_allclose(
        outcomes[0].token_logprobs, scored_by_hand(table, [0, 1, 0], 1, suppressed=[2]), rtol=1e-6
    )
    assert outcomes[1].error_kind is not None and outcomes[1].token_logprobs is None
    assert outcomes[0].is_greedy is not None and outcomes[1].is_greedy is None


@pytest.mark.parametrize("suppressed", [(), (2,)])
def test_a_text_is_greedy_if_each_of_its_tokens_is_the_most_likely_one(suppressed):
    table = TokenTable(vocab_size=VOCAB, num_positions=LENGTH, seed=5)
    texts = [text for text in itertools.product(range(VOCAB), repeat=LENGTH - 1) if not set(text) & set(suppressed)]
    requests = [
        Request(index, index, np.asarray([0, *text], dtype=np.int32), score_from=1) for index, text in enumerate(texts)
    ]
    scorer = causal_scorer(table, token_info(VOCAB, suppressed=suppressed), rows=7)
    outcomes = run_all(scorer, requests)
    chosen = [text for index, text in enumerate(texts) if outcomes[index].is_greedy]
    assert chosen == [tuple(greedy(table, [0], LENGTH - 1, suppressed=suppressed)[1:])]


def test_only_the_rows_that_are_needed_are_run_and_counted():
    table = TokenTable(vocab_size=VOCAB, num_positions=LENGTH, seed=4)
    scorer = causal_scorer(table, token_info(VOCAB), rows=2)
    requests = [
        Request(0, 0, np.zeros(5, dtype=np.int32), score_from=4),
        Request(1, 1, np.zeros(3, dtype=np.int32), score_from=1),
    ]
    outcomes = run_all(scorer, requests)
    assert scorer.stats.useful_rows == 4 + 2 and scorer.stats.committed == 1 + 2 and scorer.stats.steps == 1
    assert [len(outcomes[index].token_logprobs) for index in (0, 1)] == [1, 2]


@pytest.mark.parametrize(("canvas", "first"), [([0, 1], 0), ([0, 1], 2), ([0, -1], 1), ([0, 1], None)])
def test_what_can_not_be_scored_is_refused(canvas, first):
    scorer = causal_scorer(TokenTable(vocab_size=VOCAB), token_info(VOCAB), rows=2, tokens=64)
    with pytest.raises(
        ValueError, match=r"must have no holes|scores the end of a text, after at least one given token"
    ):
        scorer.admit([Request(0, 0, np.asarray(canvas, dtype=np.int32), score_from=first)])
