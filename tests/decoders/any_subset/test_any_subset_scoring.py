"""The exact joint of any tokens given any others: by enumeration on a toy, in every batch, and golden densities."""

import numpy as np
import pytest
import torch

from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from tests.decoders.references.table import TableBackbone
from tests.decoders.support import decode, decoder_settings, score, table_info

VOCAB, LENGTH = 3, 4
SETTINGS = decoder_settings("any_subset")


def by_hand(table, tokens, scored, *, suppressed=()):
    """The log-probability of each scored token given the given ones and the scored ones to its left, straight from the table."""
    given = [place for place in range(len(tokens)) if place not in scored]
    found, chosen = [], []
    for place in scored:
        code = (VOCAB + 1) ** LENGTH - 1
        code += sum((tokens[other] - VOCAB) * (VOCAB + 1) ** other for other in given)
        logits = table.table_PXV[place, code].clone()
        logits[list(suppressed)] = -torch.inf
        found.append(float(logits.log_softmax(0)[tokens[place]]))
        chosen.append(int(logits.argmax()) == tokens[place])
        given.append(place)
    return found, all(chosen)


def requests_of(count, seed=0):
    rng = np.random.default_rng(seed)
    requests = []
    for index in range(count):
        canvas = rng.integers(0, VOCAB, int(rng.integers(1, LENGTH + 1))).astype(np.int32)
        scored = np.sort(rng.permutation(len(canvas))[: rng.integers(1, len(canvas) + 1)])
        requests.append(Request(index, index, canvas, scored=scored))
    return requests


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_every_batch_gives_the_conditionals_of_the_definition(rows):
    table = TableBackbone(vocab_size=VOCAB, num_positions=LENGTH, seed=1)
    requests = requests_of(60)
    outcomes = score(table, table_info(VOCAB), SETTINGS, requests, rows=rows)
    for request in requests:
        outcome = outcomes[request.index]
        expected, is_greedy = by_hand(table, request.canvas.tolist(), request.scored.tolist())
        assert outcome.tokens.tolist() == request.canvas[request.scored].tolist()
        np.testing.assert_allclose(outcome.token_logprobs, expected, rtol=1e-6)
        assert outcome.logprob == pytest.approx(sum(expected), abs=1e-12)
        assert (outcome.nfe, outcome.finish, outcome.is_greedy) == (1, "filled", is_greedy)
        assert outcome.logprob_stderr is None


def test_a_score_is_the_log_probability_with_which_the_decoder_fills_the_holes():
    table = TableBackbone(vocab_size=VOCAB, num_positions=LENGTH, seed=3)
    holes = [Request(n, n, np.asarray([-1, 2, -1, -1], dtype=np.int32)) for n in range(20)]
    filled = decode(table, table_info(VOCAB), SETTINGS, Sampling(), holes)
    texts = []
    for number, outcome in filled.items():
        canvas = np.asarray([0, 2, 0, 0], dtype=np.int32)
        canvas[[0, 2, 3]] = outcome.tokens
        texts.append(Request(number, 0, canvas, scored=np.asarray([0, 2, 3])))
    scored = score(table, table_info(VOCAB), SETTINGS, texts)
    for number, outcome in filled.items():
        assert scored[number].logprob == pytest.approx(outcome.logprob, abs=1e-9)
    (greedy,) = decode(table, table_info(VOCAB), SETTINGS, Sampling(temperature=0.0), holes[:1]).values()
    for number, outcome in filled.items():
        assert scored[number].is_greedy == (outcome.tokens.tolist() == greedy.tokens.tolist())
