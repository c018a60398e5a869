"""The bound of a text under masked diffusion: exact by enumeration, unbiased with an honest error, the same in every batch."""

import itertools
import math
import statistics
from dataclasses import replace
from math import comb

import numpy as np
import pytest
import torch

from draftmill.decoders.base import Request
from draftmill.decoders.draws.keys import sample_key
from tests.decoders.masked.diffusion_tables import LENGTH, MASK, VOCAB, drafter, mask_info
from tests.decoders.support import decoder_settings, score, scorer_for

LLADA, MDLM = decoder_settings("stepwise"), decoder_settings("ancestral")
ANCESTRAL = replace(mask_info(), kind="ancestral")


def law(table, canvas, place, *, shift=0):
    """The log-probabilities of the token at a masked place of a canvas, straight from the table."""
    code = (VOCAB + 2) ** LENGTH - 1 + sum((token - VOCAB - 1) * (VOCAB + 2) ** i for i, token in enumerate(canvas))
    logits = table.table_PXV[max(place - shift, 0), code].clone()
    logits[MASK] = -torch.inf
    return logits.log_softmax(0)


def bound(table, tokens, scored, *, shift=0):
    """The mean over all masks: their number l is uniform, and the weight of a mask of l tokens is L / l."""
    total, length = 0.0, len(scored)
    for count in range(1, length + 1):
        for masked in itertools.combinations(scored, count):
            canvas = [MASK if place in masked else token for place, token in enumerate(tokens)]
            given_others = sum(float(law(table, canvas, place, shift=shift)[tokens[place]]) for place in masked)
            total += given_others / count / comb(length, count)
    return total


def text(length, scored, *, key=1, index=0, seed=0):
    canvas = np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)
    return Request(index, sample_key(key, str(index)), canvas, scored=np.asarray(scored))


@pytest.mark.parametrize("scored", [[0, 1, 2, 3, 4, 5], [2, 5], [3], [1, 2, 4, 6]])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_text_with_few_masks_has_its_exact_bound(scored, shift):
    request = text(LENGTH, scored)
    (outcome,) = score(drafter(), mask_info(shift=shift), LLADA, [request], rows=5, samples=64).values()
    expected = bound(drafter(), request.canvas.tolist(), scored, shift=shift)
    assert outcome.logprob == pytest.approx(expected, abs=1e-9)
    assert outcome.nfe == 2 ** len(scored) - 1 and outcome.finish == "filled"
    assert outcome.tokens.tolist() == request.canvas[scored].tolist()
    if len(scored) > 1:
        assert outcome.logprob_stderr == 0.0 and outcome.token_logprobs is None and outcome.is_greedy is None


def test_a_single_token_is_scored_exactly_by_one_canvas():
    request = text(LENGTH, [3])
    (outcome,) = score(drafter(), mask_info(), LLADA, [request]).values()
    tokens = request.canvas.tolist()
    expected = law(drafter(), [*tokens[:3], MASK, *tokens[4:]], 3)
    assert outcome.nfe == 1 and outcome.logprob_stderr is None
    assert outcome.logprob == pytest.approx(float(expected[tokens[3]]), abs=1e-12)
    assert outcome.token_logprobs == pytest.approx([outcome.logprob], rel=1e-6)
    assert outcome.is_greedy == (int(expected.argmax()) == tokens[3])


def of_many_keys(request, *, seed):
    return [replace(request, index=index, key=sample_key(seed, str(index))) for index in range(600)]


def check_estimates(outcomes, exact):
    # The mean lies within 4.5 standard errors but with probability 7e-6. The mean square of the standard errors is the
    # variance: their ratio is compared within 25 %, beyond five deviations of a variance of 600 values.
    found = np.asarray([outcome.logprob for outcome in outcomes.values()])
    errors = np.asarray([outcome.logprob_stderr for outcome in outcomes.values()])
    assert abs(found.mean() - exact) < 4.5 * found.std() / np.sqrt(len(found))
    assert len(found) == 600 and (errors**2).mean() == pytest.approx(found.var(), rel=0.25)


CASES = [(LLADA, mask_info(), "llada"), (MDLM, ANCESTRAL, "mdlm"), (LLADA, mask_info(), "mdlm")]


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(("settings", "info", "kind"), CASES)
def test_the_estimate_has_the_bound_as_its_mean_and_its_standard_error(settings, info, kind):
    scored = [0, 1, 3, 4, 5, 6]
    base = text(LENGTH, scored)
    requests = of_many_keys(base, seed=7)
    outcomes = score(drafter(), info, settings, requests, rows=64, kind=kind, samples=6)
    check_estimates(outcomes, bound(drafter(), base.canvas.tolist(), scored))
    assert all(outcome.nfe == 6 and outcome.token_logprobs is None for outcome in outcomes.values())


def test_every_forward_is_full_while_canvases_are_left():
    requests = [text(LENGTH, range(index % LENGTH + 1), index=index) for index in range(20)]
    scorer = scorer_for(drafter(), mask_info(), LLADA, rows=8, samples=16)
    total, queue = sum(min(2 ** len(one.scored) - 1, 16) for one in requests), list(requests)
    done: dict = {}
    while queue or scorer.active:
        while queue and scorer.room(len(queue[0].canvas)):
            scorer.admit([queue.pop(0)])
        done |= {outcome.index: outcome for outcome in scorer.step()}
    assert scorer.stats.steps == -(-total // 8)
    assert sum(outcome.nfe for outcome in done.values()) == total == scorer.stats.active_slot_steps
    assert scorer.stats.committed == sum(len(one.scored) for one in requests)
    assert scorer.stats.slot_steps == 8 * scorer.stats.steps


def test_a_text_is_charged_for_its_own_canvases_in_the_forwards_that_they_took_part_in():
    # Forwards of 4 canvases: 3 of the first text and 1 of the second, then 2 and 2 of the third, 4, and its last one alone.
    requests = [text(LENGTH, scored, index=index) for index, scored in enumerate([[0, 1], [2, 3], [1, 2, 3]])]
    outcomes = score(drafter(), mask_info(), LLADA, requests, rows=4, samples=8)
    assert [outcomes[index].nfe for index in range(3)] == [3, 3, 7]
    assert [outcomes[index].batch_rows for index in range(3)] == [4, 4, (2 * 4 + 4 * 4 + 1) / 7]
    assert all(outcome.device_s > 0 and outcome.pad_fraction == 0 for outcome in outcomes.values())


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_where_memory_runs_out_fewer_canvases_run_at_once(monkeypatch, error):
    requests = [text(LENGTH, range(LENGTH), index=index, seed=index) for index in range(3)]
    expected = score(drafter(), mask_info(), LLADA, requests, samples=8)
    table, sizes = drafter(), []
    forward = table.forward

    def small(rows):
        sizes.append(len(rows.slots_G))
        if sizes[-1] > 3:
            raise error("out of memory")
        return forward(rows)

    monkeypatch.setattr(table, "forward", small)
    outcomes = score(table, mask_info(), LLADA, requests, rows=16, samples=8)
    assert sizes[:3] == [16, 8, 4] and set(sizes[3:-1]) == {2}
    for index, outcome in outcomes.items():
        assert (outcome.logprob, outcome.nfe) == (expected[index].logprob, 8)
    monkeypatch.setattr(table, "forward", lambda rows: (_ for _ in ()).throw(error("out of memory")))
    with pytest.raises(error):
        score(table, mask_info(), LLADA, requests, rows=16, samples=8)


def test_two_models_see_the_same_masks(monkeypatch):
    seen = []
    for seed in (3, 4):
        table = drafter(seed=seed)
        canvases: list[torch.Tensor] = []
        forward = table.forward
        monkeypatch.setattr(table, "forward", lambda rows, f=forward, c=canvases: (c.append(rows.token_N), f(rows))[1])
        score(table, mask_info(), LLADA, [text(LENGTH, range(LENGTH))], rows=4, samples=8)
        seen.append(torch.cat(canvases))
    assert torch.equal(seen[0], seen[1]) and bool((seen[0] == MASK).any())


def test_a_model_is_told_the_noise_of_the_share_of_the_whole_text_that_is_masked(monkeypatch):
    table, sigmas = drafter(), list[float]()
    forward = table.forward

    def told(rows):
        sigmas.extend(rows.sigma_G.tolist())
        return forward(rows)

    monkeypatch.setattr(table, "forward", told)
    score(table, ANCESTRAL, MDLM, [text(LENGTH, [2, 5])], kind="llada")
    assert sigmas == pytest.approx([-math.log1p(-share) for share in (1 / LENGTH, 1 / LENGTH, 2 / LENGTH)])


def test_impossible_tokens_fail_alone():
    canvas = np.asarray([0, MASK, 1], dtype=np.int32)
    fine, bad = text(3, [0, 1, 2], index=0), Request(1, 1, canvas, scored=np.asarray([0, 1, 2]))
    outcomes = score(drafter(), mask_info(), LLADA, [fine, bad], samples=4)
    assert outcomes[0].error_kind is None and outcomes[1].error_kind == "nan_logits"
    assert outcomes[1].logprob is None and outcomes[1].logprob_stderr is None


def test_the_error_of_one_pair_is_that_of_the_mean_of_two_values():
    base = text(LENGTH, range(LENGTH))
    (outcome,) = score(drafter(), mask_info(), LLADA, [base], samples=2).values()
    scorer = scorer_for(drafter(), mask_info(), LLADA, samples=2)
    scorer.admit([base])
    (held,) = scorer.texts
    scorer.step()
    values = 2 * held.sampled_M
    assert outcome.logprob == pytest.approx(statistics.mean(values))
    assert outcome.logprob_stderr == pytest.approx(statistics.stdev(values) / math.sqrt(2))
