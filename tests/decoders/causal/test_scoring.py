"""Scores are the model's own law of given tokens: by enumeration on a toy, in every batch, with what was counted."""

import itertools

import numpy as np
import pytest
import torch

from draftmill.decoders.base import Request
from draftmill.decoders.engine import memory, model_runner
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decoder_settings, run_all, scorer_for, token_info

VOCAB, LENGTH = 3, 5


def causal_scorer(backbone, info, *, rows, tokens=1 << 20):
    return scorer_for(backbone, info, decoder_settings("autoregressive"), rows=rows, tokens=tokens)


def by_hand(table, tokens, first, *, suppressed=()):
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
        scores = [by_hand(table, [*tokens, token], len(tokens), suppressed=suppressed)[0] for token in range(VOCAB)]
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
        expected = by_hand(table, request.canvas.tolist(), first)
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
    np.testing.assert_allclose(outcomes[0].token_logprobs, by_hand(table, [0, 1, 0], 1, suppressed=[2]), rtol=1e-6)
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
