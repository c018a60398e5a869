"""The pool of rejected runs: what is kept, and what is proposed."""

from draftmill.decoders.causal.jacobi import NgramPool


def pool_of(runs, *, size=3, longest=5):
    pool = NgramPool(size, longest)
    for run in runs:
        pool.push(run)
    return pool


def propose(pool, last, drafts, *, most=8):
    return pool.candidates(last, drafts, most)


def test_the_most_recent_run_proposes_first():
    pool = pool_of([[7, 1, 2], [7, 3, 4]])
    assert propose(pool, 7, [0, 0]) == [[3, 4], [1, 2]]
    assert propose(pool, 7, [0, 0], most=1) == [[3, 4]]


def test_the_oldest_run_makes_room():
    pool = pool_of([[7, 1], [7, 2], [7, 3], [7, 4]])
    assert propose(pool, 7, [0]) == [[4], [3], [2]]


def test_a_run_that_comes_again_becomes_the_most_recent_and_costs_no_place():
    pool = pool_of([[7, 1], [7, 2], [7, 3], [7, 2]])
    assert propose(pool, 7, [0]) == [[2], [3], [1]]


def test_a_proposal_is_cut_to_the_drafts_or_filled_up_with_them():
    pool = pool_of([[5, 7, 1], [7, 2, 3, 4, 5]])
    assert propose(pool, 7, [8, 9]) == [[2, 3], [1, 9]]
    assert propose(pool, 7, [6, 6, 6, 6, 6]) == [[2, 3, 4, 5, 6], [1, 6, 6, 6, 6]]


def test_a_run_proposes_what_follows_the_first_place_of_the_token():
    pool = pool_of([[7, 1, 7, 2, 7]])
    assert propose(pool, 7, [0]) == [[1]]


def test_nothing_follows_the_last_token_of_a_run_and_nothing_an_unknown_token():
    pool = pool_of([[1, 2, 7]])
    assert propose(pool, 7, [0]) == []
    assert propose(pool, 8, [0]) == []


def test_proposals_differ_from_each_other_and_from_the_drafts():
    pool = pool_of([[7, 1, 2], [5, 7, 1, 2], [7, 3]], size=4)
    assert propose(pool, 7, [3, 0]) == [[1, 2]]


def test_runs_of_one_token_are_left_out_and_long_ones_are_cut():
    pool = pool_of([[7, 1], [9], [7, 1, 2, 3, 4, 5, 6]])
    assert propose(pool, 7, [0] * 6) == [[1, 2, 3, 4, 0, 0], [1, 0, 0, 0, 0, 0]]
