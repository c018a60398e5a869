"""Jacobi decoding: the sequential text, whatever the blocks, windows, candidates and batches."""

import itertools
import random

import pytest
import torch

from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.ends import Stops
from tests.decoders.causal.jacobi_settings import jacobi, multi
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import Pair, decode, decoder_settings, texts, token_info, toy_prompts

AR = decoder_settings("autoregressive")
VOCAB, LENGTH = 3, 9
INFO = token_info(VOCAB)
SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "cold": Sampling(temperature=0.8),
    "plain": Sampling(temperature=1.0),
    "nucleus": Sampling(temperature=1.0, top_p=0.7, top_k=2),
}


EVERY_JACOBI = [jacobi(n, window) for n in (1, 2, 3, 4, 5) for window in ("fixed", "running")]
EVERY_MULTI = [
    multi(n, blocks, ratio=ratio, verify=verify, pool=pool)
    for n, blocks, ratio, verify, pool in itertools.product(
        (1, 2, 3, 4, 5), (1, 2, 3), (0.4, 0.85, 1.0), (1, 2, 4), (0, 1, 3, 8)
    )
]


def patterned(vocab_size=VOCAB, num_positions=LENGTH):
    """A table whose tokens mostly count up, and depend on the whole context all the same: drafts and candidates come true."""
    table = TokenTable(vocab_size=vocab_size, num_positions=num_positions, seed=1)
    codes = torch.arange((vocab_size + 1) ** num_positions)
    for position in range(num_positions):
        token = codes // (vocab_size + 1) ** position % (vocab_size + 1)
        table.table_PXV[position, codes, (token + 1) % vocab_size] += 3.0
    return table


@pytest.fixture(scope="module")
def table():
    return patterned()


def agree(outcomes, expected):
    """Same tokens, ends and log-probabilities in no more forwards, and counts that fit together."""
    assert texts(outcomes) == texts(expected)
    for index, outcome in outcomes.items():
        assert outcome.finish == expected[index].finish
        assert outcome.logprob == pytest.approx(expected[index].logprob, abs=1e-9)
        assert outcome.iterations == outcome.nfe <= expected[index].nfe
        assert sum(outcome.accept_hist) == outcome.iterations
        assert sum(size * num for size, num in enumerate(outcome.accept_hist)) == len(outcome.tokens)
        assert outcome.accepted <= outcome.proposed
        # Every iteration commits its accepted drafts and one token more, which a stop may take back.
        assert len(outcome.tokens) - outcome.iterations <= outcome.accepted <= len(outcome.tokens)


@pytest.mark.slow
@pytest.mark.one_in(11, soak=3)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("stops", [Stops(), Stops(ids=(2,))], ids=["free", "stopped"])
def test_every_setting_gives_the_sequential_text_in_no_more_forwards(table, sampling, stops):
    requests = toy_prompts(30, vocab_size=VOCAB, longest=LENGTH)
    expected = decode(table, INFO, AR, sampling, requests, stops=stops)
    for number, settings in enumerate([*EVERY_JACOBI, *random.Random(len(stops.ids)).sample(EVERY_MULTI, 12)]):
        shuffled = random.Random(number).sample(requests, len(requests))
        outcomes = decode(table, INFO, settings, sampling, shuffled, rows=(1, 3, 16)[number % 3], stops=stops)
        agree(outcomes, expected)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("settings", [jacobi(4), jacobi(4, "running"), multi(2, 3), multi(3, 2, ratio=0.85)])
def test_stop_ids_and_stop_texts_end_where_they_end_the_sequential_text(table, settings):
    requests = toy_prompts(80, vocab_size=VOCAB, longest=LENGTH, seed=3)
    for stops in (Stops(text=Pair()), Stops(ids=(0,), text=Pair()), Stops(ids=(0, 1))):
        expected = decode(table, INFO, AR, Sampling(), requests, stops=stops)
        agree(decode(table, INFO, settings, Sampling(), requests, stops=stops), expected)


def test_with_one_block_and_no_candidates_it_is_plain_jacobi(table):
    requests = toy_prompts(60, vocab_size=VOCAB, longest=LENGTH, seed=9)
    for size in (1, 2, 3, 5):
        plain = decode(table, INFO, jacobi(size), Sampling(), requests)
        single = decode(table, INFO, multi(size, 1, verify=1), Sampling(), requests)
        for index, outcome in plain.items():
            same = single[index]
            assert (outcome.nfe, outcome.proposed, outcome.accept_hist) == (same.nfe, same.proposed, same.accept_hist)


@pytest.mark.parametrize("settings", [jacobi(3), multi(3)])
def test_rejection_is_refused_since_no_draft_has_a_law(table, settings):
    with pytest.raises(ValueError, match=r"sampling\.acceptance: 'rejection' .* allowed: 'coupled'"):
        decode(table, INFO, settings, Sampling(acceptance="rejection"), [])
