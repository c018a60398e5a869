"""The pool of rejected runs: what is kept, what is proposed, and that it moves with its sample."""

import numpy as np
import torch

from decoders.base import Request
from decoders.causal.ngram_pool import NgramPool
from decoders.engine.state import SlotState


def pool_of(runs, *, size=3, longest=5, num_slots=2, slot=1):
    state = SlotState(num_slots, torch.device("cpu"), max_commit=1)
    pool = NgramPool(state, size, longest)
    for run in runs:
        pool.push(torch.tensor([slot]), torch.tensor([run]), torch.tensor([len(run)]))
    return state, pool


def propose(pool, last, drafts, *, most=8, slot=1):
    drafts = torch.tensor([drafts])
    tokens, num = pool.candidates(
        torch.tensor([slot]), torch.tensor([last]), drafts, torch.tensor([drafts.shape[1]]), most
    )
    return tokens[0, : int(num[0])].tolist()


def test_the_most_recent_run_proposes_first():
    _, pool = pool_of([[7, 1, 2], [7, 3, 4]])
    assert propose(pool, 7, [0, 0]) == [[3, 4], [1, 2]]
    assert propose(pool, 7, [0, 0], most=1) == [[3, 4]]


def test_the_oldest_run_makes_room():
    _, pool = pool_of([[7, 1], [7, 2], [7, 3], [7, 4]])
    assert propose(pool, 7, [0]) == [[4], [3], [2]]


def test_a_run_that_comes_again_becomes_the_most_recent_and_costs_no_place():
    _, pool = pool_of([[7, 1], [7, 2], [7, 3], [7, 2]])
    assert propose(pool, 7, [0]) == [[2], [3], [1]]


def test_a_proposal_is_cut_to_the_drafts_or_filled_up_with_them():
    _, pool = pool_of([[5, 7, 1], [7, 2, 3, 4, 5]])
    assert propose(pool, 7, [8, 9]) == [[2, 3], [1, 9]]
    assert propose(pool, 7, [6, 6, 6, 6, 6]) == [[2, 3, 4, 5, 6], [1, 6, 6, 6, 6]]


def test_a_run_proposes_what_follows_the_first_place_of_the_token():
    _, pool = pool_of([[7, 1, 7, 2, 7]])
    assert propose(pool, 7, [0]) == [[1]]


def test_nothing_follows_the_last_token_of_a_run_and_nothing_an_unknown_token():
    _, pool = pool_of([[1, 2, 7]])
    assert propose(pool, 7, [0]) == []
    assert propose(pool, 8, [0]) == []


def test_proposals_differ_from_each_other_and_from_the_drafts():
    _, pool = pool_of([[7, 1, 2], [5, 7, 1, 2], [7, 3]], size=4)
    assert propose(pool, 7, [3, 0]) == [[1, 2]]


def test_runs_of_one_token_are_left_out_and_long_ones_are_cut():
    _, pool = pool_of([[7, 1], [9], [7, 1, 2, 3, 4, 5, 6]])
    assert propose(pool, 7, [0] * 6) == [[1, 2, 3, 4, 0, 0], [1, 0, 0, 0, 0, 0]]


def test_slots_are_apart_and_a_pool_moves_and_ends_with_its_sample():
    state, pool = pool_of([[7, 1]])
    assert propose(pool, 7, [0], slot=0) == []
    state.move(1, 0)
    assert propose(pool, 7, [0], slot=0) == [[1]]
    state.widen(2)
    state.start(0, Request(0, 0, np.array([7, -1], dtype=np.int32)))
    assert propose(pool, 7, [0], slot=0) == []


def test_each_slot_of_a_step_has_its_own_number_of_drafts_and_proposals():
    _, pool = pool_of([[7, 1, 2, 3]])
    pool.push(torch.tensor([0, 1]), torch.tensor([[7, 5, 6], [8, 0, 0]]), torch.tensor([3, 1]))
    drafts = torch.tensor([[9, 9, 9], [1, 2, 9]])
    tokens, num = pool.candidates(torch.tensor([0, 1]), torch.tensor([7, 7]), drafts, torch.tensor([3, 2]), 4)
    # The second slot has two drafts, which are what its run would propose.
    assert num.tolist() == [1, 0]
    assert tokens[0, 0].tolist() == [5, 6, 9]
