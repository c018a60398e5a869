"""Batched any-subset decoders against the sequential baseline, its plain reference and exact scores, on the toy model."""

import numpy as np
import pytest
import torch

from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from tests.decoders.references.table import TableBackbone
from tests.decoders.support import (
    decode,
    decoder_settings,
    engine,
    score,
    table_info,
    texts,
    toy_heads,
    toy_requests,
)

VOCAB, LENGTH = 4, 6
INFO = table_info(VOCAB)
SEQUENTIAL = decoder_settings("any_subset")
VARIANTS: dict[str, dict] = {
    "self": {},
    "ngram": {"drafter": "ngram"},
    "rows": {"fused": "rows"},
    "ends": {"fused": "rows", "rows": "ends"},
}


def table():
    return TableBackbone(vocab_size=VOCAB, num_positions=LENGTH, seed=1)


@pytest.mark.one_in(53, soak=3)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("warp", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 2}], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 16])
def test_coupled_output_is_the_sequential_output(variant, warp, rows):
    sampling = Sampling(**warp)
    requests = toy_requests(60, vocab_size=VOCAB, longest=LENGTH, seed=2)
    expected = decode(table(), INFO, SEQUENTIAL, sampling, requests, rows=5)
    heads = toy_heads(VOCAB) if variant != "ngram" else None
    lengths: tuple = (1, 2, 4, 8, "auto")
    for seed, k in enumerate(lengths):
        settings = decoder_settings("assd", k=k, **VARIANTS[variant])
        shuffled = [requests[i] for i in np.random.default_rng(seed).permutation(len(requests))]
        found = decode(table(), INFO, settings, sampling, shuffled, rows=rows, heads=heads)
        assert texts(found) == texts(expected)
        for index, outcome in found.items():
            assert outcome.logprob == pytest.approx(expected[index].logprob, abs=1e-9)


@pytest.mark.one_in(7, soak=3)
@pytest.mark.parametrize("variant", ["self", "rows", "ends"])
@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
@pytest.mark.parametrize("k", [2, 3, 5, 8])
def test_nfe_never_exceeds_the_number_of_holes(variant, acceptance, k):
    requests = toy_requests(80, vocab_size=VOCAB, longest=LENGTH, seed=4)
    settings = decoder_settings("assd", k=k, **VARIANTS[variant])
    outcomes = decode(table(), INFO, settings, Sampling(acceptance=acceptance), requests, heads=toy_heads(VOCAB))
    assert all(outcome.nfe <= len(outcome.tokens) for outcome in outcomes.values())
    total, holes = (sum(o.nfe for o in outcomes.values()), sum(len(o.tokens) for o in outcomes.values()))
    # Two drafts by two forwards are always worth exactly their two tokens.
    assert total == holes if (variant, k) == ("self", 2) else total < holes


@pytest.mark.parametrize("variant", [*VARIANTS, "parallel", "sequential"])
def test_edge_canvases_come_back_whole(variant):
    canvases = [[-1], [2], [], [-1] * LENGTH, [0, -1, 1], [-1, 1, 1], [1, 1, -1], [3] * LENGTH]
    requests = [Request(i, 100 + i, np.array(canvas, dtype=np.int32)) for i, canvas in enumerate(canvases)]
    kinds = {"parallel": decoder_settings("parallel"), "sequential": SEQUENTIAL}
    settings = kinds.get(variant) or decoder_settings("assd", k=3, **VARIANTS[variant])
    outcomes = decode(table(), INFO, settings, Sampling(), requests, heads=toy_heads(VOCAB))
    for request in requests:
        outcome = outcomes[request.index]
        assert len(outcome.tokens) == int((request.canvas < 0).sum())
        assert ((outcome.tokens >= 0) & (outcome.tokens < VOCAB)).all()
        assert outcome.finish == "filled" and outcome.error_kind is None
        assert (outcome.nfe == 0) == (len(outcome.tokens) == 0)


def test_parallel_takes_one_forward_and_knows_no_log_probability():
    requests = toy_requests(40, vocab_size=VOCAB, longest=LENGTH, seed=6)
    outcomes = decode(table(), INFO, decoder_settings("parallel"), Sampling(), requests)
    for outcome in outcomes.values():
        if len(outcome.tokens):
            assert (outcome.nfe, outcome.iterations, outcome.logprob) == (1, 1, None)
            assert outcome.accept_hist == [0] * len(outcome.tokens) + [1]


def test_parallel_draws_each_hole_from_the_law_given_the_prompt():
    # One hole: parallel and sequential read the same noise and the same law.
    canvas = np.array([1, -1, 2, 0], dtype=np.int32)
    requests = [Request(i, 17 * i, canvas) for i in range(50)]
    parallel = decode(table(), INFO, decoder_settings("parallel"), Sampling(), requests)
    assert texts(parallel) == texts(decode(table(), INFO, SEQUENTIAL, Sampling(), requests))


def test_a_drafter_that_equals_the_target_accepts_everything():
    class Independent(TableBackbone):
        """Conditionals that ignore all context: drafts are then always right."""

        def _context(self, slot_Q, limit_Q):
            return torch.zeros_like(limit_Q)

    canvas = np.array([1, *[-1] * 5], dtype=np.int32)
    requests = [Request(i, i, canvas) for i in range(6)]
    make = lambda: Independent(vocab_size=VOCAB, num_positions=LENGTH)  # noqa: E731
    for acceptance in ("coupled", "rejection"):
        sampling = Sampling(acceptance=acceptance)
        plain = decode(make(), INFO, decoder_settings("assd", k=2), sampling, requests)
        fused = decode(make(), INFO, decoder_settings("assd", k=2, fused="rows"), sampling, requests)
        for outcome in plain.values():
            # Five holes, windows of 2, 2 and 1: draft + verify, draft + verify, draft alone.
            assert (outcome.nfe, outcome.iterations, outcome.proposed, outcome.accepted) == (5, 3, 5, 5)
            assert outcome.accept_hist == [0, 1, 2]
        for outcome in fused.values():
            # First pass: the bonus alone. Then two drafts and a bonus; then the last draft with no row left for a bonus.
            assert (outcome.nfe, outcome.iterations, outcome.proposed, outcome.accepted) == (3, 3, 3, 3)
            assert outcome.accept_hist == [0, 2, 0, 1]


def test_an_ngrams_draft_reads_the_noise_of_its_position_so_where_the_laws_agree_it_holds():
    """Every token occurs once, none of them twice, and the model finds all alike."""
    backbone = TableBackbone(vocab_size=3, num_positions=4, seed=0)
    backbone.table_PXV = torch.zeros_like(backbone.table_PXV)
    requests = [Request(index, index, np.array([0, 1, 2, -1], dtype=np.int32)) for index in range(40)]
    settings = decoder_settings("assd", k=1, drafter="ngram")
    outcomes = decode(backbone, table_info(3), settings, Sampling(), requests, rows=7)
    assert {(outcome.proposed, outcome.accepted) for outcome in outcomes.values()} == {(1, 1)}
    assert len({outcome.tokens[0] for outcome in outcomes.values()}) == 3


def test_room_keeps_to_rows_and_tokens_but_always_takes_one_sample():
    decoder = engine(table(), INFO, SEQUENTIAL, rows=4, max_tokens=13)
    assert decoder.room(6) == 2 and decoder.room(3) == 4 and decoder.room(100) == 1
    decoder.admit([Request(0, 0, np.full(6, -1, dtype=np.int32))])
    assert decoder.room(6) == 1 and decoder.room(3) == 1 and decoder.room(100) == 0


NUM_TOKENS, NUM_PLACES = 3, 4
SETTINGS = decoder_settings("any_subset")


def by_hand(table, tokens, scored, *, suppressed=()):
    """The log-probability of each scored token given the given ones and the scored ones to its left, straight from the table."""
    given = [place for place in range(len(tokens)) if place not in scored]
    found, chosen = [], []
    for place in scored:
        code = (NUM_TOKENS + 1) ** NUM_PLACES - 1
        code += sum((tokens[other] - NUM_TOKENS) * (NUM_TOKENS + 1) ** other for other in given)
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
        canvas = rng.integers(0, NUM_TOKENS, int(rng.integers(1, NUM_PLACES + 1))).astype(np.int32)
        scored = np.sort(rng.permutation(len(canvas))[: rng.integers(1, len(canvas) + 1)])
        requests.append(Request(index, index, canvas, scored=scored))
    return requests


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_every_batch_gives_the_conditionals_of_the_definition(rows):
    table = TableBackbone(vocab_size=NUM_TOKENS, num_positions=NUM_PLACES, seed=1)
    requests = requests_of(60)
    outcomes = score(table, table_info(NUM_TOKENS), SETTINGS, requests, rows=rows)
    for request in requests:
        outcome = outcomes[request.index]
        expected, is_greedy = by_hand(table, request.canvas.tolist(), request.scored.tolist())
        assert outcome.tokens.tolist() == request.canvas[request.scored].tolist()
        np.testing.assert_allclose(outcome.token_logprobs, expected, rtol=1e-6)
        assert outcome.logprob == pytest.approx(sum(expected), abs=1e-12)
        assert (outcome.nfe, outcome.finish, outcome.is_greedy) == (1, "filled", is_greedy)
        assert outcome.logprob_stderr is None


def test_a_score_is_the_log_probability_with_which_the_decoder_fills_the_holes():
    table = TableBackbone(vocab_size=NUM_TOKENS, num_positions=NUM_PLACES, seed=3)
    holes = [Request(n, n, np.asarray([-1, 2, -1, -1], dtype=np.int32)) for n in range(20)]
    filled = decode(table, table_info(NUM_TOKENS), SETTINGS, Sampling(), holes)
    texts = []
    for number, outcome in filled.items():
        canvas = np.asarray([0, 2, 0, 0], dtype=np.int32)
        canvas[[0, 2, 3]] = outcome.tokens
        texts.append(Request(number, 0, canvas, scored=np.asarray([0, 2, 3])))
    scored = score(table, table_info(NUM_TOKENS), SETTINGS, texts)
    for number, outcome in filled.items():
        assert scored[number].logprob == pytest.approx(outcome.logprob, abs=1e-9)
    (greedy,) = decode(table, table_info(NUM_TOKENS), SETTINGS, Sampling(temperature=0.0), holes[:1]).values()
    for number, outcome in filled.items():
        assert scored[number].is_greedy == (outcome.tokens.tolist() == greedy.tokens.tolist())
