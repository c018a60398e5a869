"""Scores under block diffusion: exact at block size 1, else the bound over masks in each block, by hand and by enumeration."""

import itertools
from math import comb

import numpy as np
import pytest
import torch

from draftmill.decoders.base import Request
from draftmill.decoders.draws.keys import sample_key
from tests.decoders.blocks.block_tables import table, table_info
from tests.decoders.masked.test_masked_scoring import check_estimates, of_many_keys
from tests.decoders.support import decoder_settings, score, scorer_for

VOCAB, LENGTH = 3, 6
MASK = VOCAB


def settings(size, **more):
    return decoder_settings("block_diffusion", block_size=size, **more)


def law(model, held, row):
    """The log-probabilities that a row predicts which sees these tokens (position -> id), straight from the table."""
    code = (VOCAB + 2) ** LENGTH - 1 + sum((token - VOCAB - 1) * (VOCAB + 2) ** place for place, token in held.items())
    logits = model.table_PXV[row, code].clone()
    logits[MASK] = -torch.inf
    return logits.log_softmax(0)


def block_sum(model, tokens, block, masked, size, shift):
    """The sum of a block's masked tokens' log-probabilities, given its other tokens and the blocks before it."""
    end = min((block + 1) * size, len(tokens))
    held = {place: MASK if place in masked else tokens[place] for place in range(end)}
    return sum(float(law(model, held, max(place - shift, 0))[tokens[place]]) for place in masked)


def bound(model, tokens, first, size, *, shift=0, causal_cache=False):
    """The sum over blocks of the mean over masks; the first token of a block is predicted by the row before it (shift)."""
    total = 0.0
    for block in range(first // size, -(-len(tokens) // size)):
        places = list(range(max(first, block * size), min((block + 1) * size, len(tokens))))
        if shift and places[0] == block * size and places[0] > 0:
            row = places.pop(0) - 1
            end = row + 1 if causal_cache else (row // size + 1) * size  # of what a clean row sees
            total += float(law(model, dict(enumerate(tokens[:end])), row)[tokens[row + 1]])
        for count in range(1, len(places) + 1):
            for masked in itertools.combinations(places, count):
                weight = 1 / count / comb(len(places), count)
                total += weight * block_sum(model, tokens, block, masked, size, shift)
    return total


def text(length, first, *, index=0, seed=0):
    canvas = np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)
    return Request(index, sample_key(seed, str(index)), canvas, score_from=first)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("causal_cache", [False, True])
@pytest.mark.parametrize(
    ("size", "first", "length"), [(2, 1, 6), (3, 0, 6), (4, 3, 6), (3, 4, 5), (2, 4, 6), (6, 0, 6)]
)
def test_blocks_with_few_masks_have_the_exact_bound(size, first, length, shift, causal_cache):
    request = text(length, first)
    choice = settings(size, causal_cache=causal_cache)
    (outcome,) = score(table(), table_info(shift=shift), choice, [request], samples=64).values()
    expected = bound(table(), request.canvas.tolist(), first, size, shift=shift, causal_cache=causal_cache)
    assert outcome.logprob == pytest.approx(expected, abs=1e-9)
    assert outcome.tokens.tolist() == request.canvas[first:].tolist() and outcome.logprob_stderr in {None, 0.0}


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("first", [0, 1, 5])
def test_block_size_1_is_exact_token_by_token(shift, first):
    request, model = text(LENGTH, first), table()
    (outcome,) = score(table(), table_info(shift=shift), settings(1), [request]).values()
    tokens, expected, chosen = request.canvas.tolist(), [], []
    for place in range(first, LENGTH):
        held, row = dict(enumerate(tokens[:place])), place - 1
        if not shift or not place:
            held, row = held | {place: MASK}, place
        expected.append(float(law(model, held, row)[tokens[place]]))
        chosen.append(int(law(model, held, row).argmax()) == tokens[place])
    np.testing.assert_allclose(outcome.token_logprobs, expected, rtol=1e-6)
    assert outcome.logprob == pytest.approx(sum(expected), abs=1e-12)
    assert (outcome.nfe, outcome.is_greedy, outcome.logprob_stderr) == (1, all(chosen), None)


@pytest.mark.slow
def test_the_estimate_has_the_bound_as_its_mean_and_its_standard_error():
    base = text(LENGTH, 1)
    outcomes = score(table(), table_info(), settings(6), of_many_keys(base, seed=9), rows=64, samples=6)
    check_estimates(outcomes, bound(table(), base.canvas.tolist(), 1, 6))


def test_draws_share_the_clean_text_that_is_longer_than_their_copies():
    request = text(LENGTH, 4)
    scorer = scorer_for(table(), table_info(), settings(2), samples=64)
    scorer.admit([request])
    (outcome,) = (outcome for _ in range(2) for outcome in scorer.step())
    # Three masks of the last block, two a canvas: 4 clean rows and 2 or 1 copies of 2.
    assert outcome.nfe == 2 and scorer.stats.useful_rows == 2 * 4 + 3 * 2


def test_what_is_not_the_end_of_a_text_is_refused():
    scorer = scorer_for(table(), table_info(), settings(2))
    with pytest.raises(ValueError, match="block diffusion scores the end of a text"):
        scorer.admit([Request(0, 0, np.zeros(4, dtype=np.int32), scored=np.asarray([0, 2]))])
