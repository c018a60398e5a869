"""Jacobi decoding: the sequential text, whatever the blocks and batches, and what scripted texts cost, counted by hand."""

import itertools
import random

import numpy as np
import pytest
import torch

from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.ends import Stops
from tests.decoders.causal.jacobi_settings import jacobi, multi
from tests.decoders.references.table import Toy
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import Pair, decode, decoder_settings, engine, run_all, texts, token_info, toy_prompts

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


class Script(Toy):
    """A model that is sure of the next token, which depends on the row's position and token alone."""

    def __init__(self, following, vocab_size=10):
        self.following, self.vocab_size, self.width = following, vocab_size, vocab_size
        self.device, self.dtype = torch.device("cpu"), torch.float64
        self.num_rows_computed, self.min_rows, self.exact, self.num_columns = 0, 1, True, 0

    def allocate(self, num_slots, num_columns):
        self.num_columns = max(self.num_columns, num_columns)

    def copy_prefix(self, source, target, num_columns):
        pass

    def forward(self, rows):
        assert int(rows.column_N.max()) < self.num_columns
        self.num_rows_computed = rows.num_rows
        pairs = zip(rows.position_N.tolist(), rows.token_N.tolist(), strict=True)
        following = torch.tensor([self.following(position, token) for position, token in pairs])
        return 50.0 * torch.nn.functional.one_hot(following, self.vocab_size).double()

    def logits(self, hidden_RD):
        return hidden_RD.clone()

    def embed(self, tokens_R):
        raise NotImplementedError


# The text of a prompt of one 9: 0 1 2 .. 8 0 1 .., known from the position alone, so one look at any drafts finds it.
BY_PLACE = Script(lambda position, token: position % 9)
# Every token follows from the one before it, modulo 4: a wrong draft makes all that come after it wrong.
BY_TOKEN = Script(lambda position, token: (token + 1) % 4)


def scripted(script, settings, num_new, *, prompt=9, **more):
    request = Request(0, 1, np.array([prompt] + [-1] * num_new, dtype=np.int32))
    return decode(script, token_info(10), settings, Sampling(temperature=0.0), [request], **more)[0]


def test_a_fixed_block_takes_two_forwards_where_places_tell_the_text():
    outcome = scripted(BY_PLACE, jacobi(4), 16, trace=True)
    assert outcome.tokens.tolist() == [place % 9 for place in range(16)]
    fed = [[9] * 4, [1, 2, 3], [9] * 3, [6, 7], [9] * 3, [1, 2], [9] * 2, [5]]
    done = [[0], [1, 2, 3, 4], [5], [6, 7, 8], [0], [1, 2, 3], [4], [5, 6]]
    assert [step.proposed for step in outcome.trace] == fed
    assert [step.committed for step in outcome.trace] == done
    assert [step.positions[0] for step in outcome.trace] == [1, 2, 6, 7, 10, 11, 14, 15]
    assert (outcome.nfe, outcome.proposed, outcome.accepted) == (8, 20, 8)
    assert outcome.accept_hist == [0, 4, 1, 2, 1]


def test_a_running_window_refills_what_was_accepted():
    outcome = scripted(BY_PLACE, jacobi(4, "running"), 16, trace=True)
    assert outcome.tokens.tolist() == [place % 9 for place in range(16)]
    fed = [[9] * 4, [1, 2, 3, 4], [9] * 4, [7, 8, 0, 1], [9] * 3, [4, 5]]
    assert [step.proposed for step in outcome.trace] == fed
    assert (outcome.nfe, outcome.accepted, outcome.accept_hist) == (6, 10, [0, 3, 0, 1, 0, 2])


def test_a_second_block_starts_while_the_first_is_refined():
    def forwards(blocks, ratio):
        outcome = scripted(BY_PLACE, multi(4, blocks, ratio=ratio, verify=1, pool=0), 16, trace=True)
        assert outcome.tokens.tolist() == [place % 9 for place in range(16)]
        return outcome

    early = forwards(2, 0.25)
    # The row before a new block has told its first token already; acceptance goes on into the promoted block.
    fed = [[9] * 4, [1, 2, 3, 4, 9, 9, 9], [6, 7, 8, 9, 9, 9], [1, 2, 3, 9, 9], [5]]
    assert [step.proposed for step in early.trace] == fed
    assert [len(step.committed) for step in early.trace] == [1, 5, 4, 4, 2]
    assert forwards(1, 0.25).nfe == 8
    # A block that opens at three of four tokens opens too late here: the one before it is finished by then.
    assert early.nfe == 5 < forwards(2, 0.75).nfe <= 8


def test_each_iteration_runs_the_last_decided_token_and_the_drafts():
    request = Request(0, 1, np.array([9] + [-1] * 16, dtype=np.int32))
    decoder = engine(BY_PLACE, token_info(10), jacobi(4), rows=1)
    outcome = run_all(decoder, [request])[0]
    assert decoder.stats.useful_rows == outcome.iterations + outcome.proposed


def test_what_is_accepted_provisionally_stands_until_its_block_is_promoted_and_verified():
    def following(position, token):
        """Counts on modulo 4 for four tokens; what stands fifth depends on the fourth, and the rest on the place."""
        if position < 4:
            return (token + 1) % 4
        return {1: 5, 9: 6, 2: 6}.get(token, 7) if position == 4 else position % 9

    outcome = scripted(Script(following), multi(4, 2, ratio=0.25, verify=1), 20, trace=True)
    assert outcome.tokens.tolist() == [2, 3, 0, 1, 5, 5, 6, 7, 8, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1]
    # The fifth token was 6 twice and is held, though the fourth became 3 and 0, after which it would be 7. After the true
    # fourth token, 1, it is 5. The block that takes the place of a finished one starts with nothing held.
    fed = [[9] * 4, [2, 2, 2, 6, 9, 9, 9], [3, 3, 6, 5, 6, 7], [0, 6, 5, 6, 7], [6, 5, 6, 7]]
    fed += [[5, 6, 7, 8, 9, 9, 9], [1, 2, 3, 9, 9, 9], [5, 6, 7, 9, 9], [0]]
    assert [step.proposed for step in outcome.trace] == fed


def test_candidates_fit_beside_a_canvas_that_fills_all_its_columns():
    outcome = scripted(BY_TOKEN, multi(20, 1, verify=4), 63, prompt=0)
    assert outcome.tokens.tolist() == [(place + 1) % 4 for place in range(63)]


def test_a_freed_slot_leaves_no_runs_in_the_pool():
    requests = [Request(index, 1, np.array([0] + [-1] * 12, dtype=np.int32)) for index in range(3)]
    outcomes = decode(BY_TOKEN, token_info(10), multi(12, 1, verify=2), Sampling(), requests, rows=1)
    assert [outcome.nfe for outcome in outcomes.values()] == [7, 7, 7]


def test_a_candidate_from_the_pool_wins_where_the_drafts_are_wrong():
    plain = scripted(BY_TOKEN, multi(12, 1, verify=1), 12, prompt=0)
    recycled = scripted(BY_TOKEN, multi(12, 1, verify=2), 12, prompt=0, trace=True)
    assert plain.tokens.tolist() == recycled.tokens.tolist() == [1, 2, 3, 0] * 3
    assert (plain.nfe, plain.nfe_draft, plain.accepted) == (12, 0, 0)
    # After 1 2 3 0 1 the pool knows what followed the first 1; then what followed the first 2.
    assert [step.committed for step in recycled.trace] == [[1], [2], [3], [0], [1], [2, 3, 0, 1, 2], [3, 0]]
    assert recycled.trace[5].proposed == [1] * 6
    assert (recycled.nfe, recycled.nfe_draft, recycled.accepted) == (7, 6, 5)
    assert recycled.proposed == 11 + 10 + 9 + 8 + 7 + 6 + 1


@pytest.mark.parametrize("stop", range(9))
@pytest.mark.parametrize("window", ["fixed", "running"])
def test_a_stop_at_every_place_of_an_accepted_run_takes_back_what_comes_after_it(window, stop):
    """The first forward finds 0, the second accepts 1 .. 7 and has 8 as the bonus, or as one draft more."""
    outcome = scripted(BY_PLACE, jacobi(8, window), 20, stops=Stops(ids=(stop,)))
    assert outcome.tokens.tolist() == list(range(stop + 1))
    assert (outcome.finish, outcome.nfe) == ("eos", min(stop, 1) + 1)
    most = 7 if window == "fixed" else 8
    assert outcome.accepted == min(stop, most)
    assert outcome.proposed == (8 + min(stop, most) if stop else 1)
    committed = [1, stop][: outcome.nfe]
    assert outcome.accept_hist == [committed.count(size) for size in range(max(committed) + 1)]
