"""Tokens, log-probabilities and ratios of the choice kernels equal those of the production code in torch.

Tokens are compared where the best candidate is ahead of the second by more than rounding; `cases` draws until all rows are such.
"""

from typing import Any

import pytest
import torch

from draftmill.decoders.draws import noise
from draftmill.decoders.draws.sampling import log_laws
from draftmill.decoders.kernels import choice, choice_reference
from draftmill.decoders.kernels.choice_reference import Warp

MARGIN = 1e-4


def drawn(rows, vocab_size, *, temperatures=(1.0,), top_ps=(1.0,), top_k=None, suppressed=(), spread=3.0):
    """Logits, warp, keys and positions. No row has a near tie; row r takes setting r modulo their number."""
    forbidden = torch.zeros(vocab_size, dtype=torch.bool)
    forbidden[list(suppressed)] = True
    temperature = torch.tensor([temperatures[row % len(temperatures)] for row in range(rows)], dtype=torch.float64)
    top_p = torch.tensor([top_ps[row % len(top_ps)] for row in range(rows)], dtype=torch.float64)
    warp = Warp(temperature, top_p, bool((top_p < 1).any()), top_k, forbidden)
    keys = noise.key_words([noise.sample_key(3, f"row {row}") for row in range(rows)])
    positions = torch.arange(rows) * 7919
    for seed in range(20):
        logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
        if vocab_size == 1 or _ahead(logits, warp, keys, positions) > MARGIN:
            return logits, warp, keys, positions
    raise AssertionError("every draw had a near tie")


def _ahead(logits, warp, keys, positions):
    """By how much the best candidate is ahead, in the worst row; what the warp leaves no mass is none."""
    logits = logits.masked_fill(warp.suppressed_V, -torch.inf)
    top_p = warp.top_p_R.unsqueeze(1) if warp.cuts else None
    law = log_laws(logits, warp.temperature_R.unsqueeze(1), top_k=warp.top_k, top_p_R1=top_p)
    best = (law + noise.gumbel_rows(keys, positions, logits.shape[1])).topk(2).values
    return (best[:, 0] - best[:, 1]).min()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperatures, suppressed ids": {"temperatures": (0.7, 0.0, 2.0), "suppressed": (0, 3, 700, 2046)},
    "top-p": {"temperatures": (1.0, 1.5), "top_ps": (0.8, 1.0, 0.3, 0.999)},
    "top-k": {"temperatures": (1.0, 3.0, 0.0), "top_k": 5},
    "both": {"temperatures": (1.0, 0.6, 2.5), "top_ps": (0.5, 0.9, 1.0), "top_k": 20, "suppressed": (5, 6)},
    "flat": {"top_ps": (0.4, 1.0), "top_k": 1500, "spread": 0.3},
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_reference(name):
    logits, warp, keys, positions = drawn(4, 2047, **CASES[name])
    expected = choice_reference.choose(logits, warp, keys, positions)
    draft = torch.where(torch.arange(4) % 2 == 0, expected.token_R, (expected.token_R + 1) % 2047)
    draft[3] = -1
    scored = torch.tensor([-1, 17, -1, 2000])
    found = choice.choose(logits, warp, keys, positions, draft_R=draft, scored_R=scored)
    expected = choice_reference.choose(logits, warp, keys, positions, draft_R=draft, scored_R=scored)
    assert torch.equal(found.token_R, expected.token_R)
    assert found.accepted_R.tolist() == [True, False, True, False] == expected.accepted_R.tolist()
    torch.testing.assert_close(found.log_p_R, expected.log_p_R, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["temperatures, suppressed ids", "top-p", "both"])
def test_ratios_are_those_of_the_reference(name):
    logits, warp, keys, positions = drawn(4, 2047, **CASES[name])
    # Likely drafts, and some that top-k and top-p leave no mass.
    draft = choice_reference.choose(logits, warp, keys, positions).token_R
    draft[::3] = logits[::3].masked_fill(warp.suppressed_V, torch.inf).argmin(1)
    log_q = torch.linspace(-3, 0, 4, dtype=torch.float64)
    found, expected = (module.weigh(logits, warp, draft, log_q) for module in (choice, choice_reference))
    assert torch.equal(found[0].isfinite(), expected[0].isfinite()) and found[0].isfinite().any()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_a_vocabulary_of_one_token():
    logits, warp, keys, positions = drawn(3, 1, temperatures=(1.0, 0.0), top_ps=(0.5,))
    found = choice.choose(logits, warp, keys, positions)
    assert found.token_R.tolist() == [0, 0, 0] and found.log_p_R.tolist() == [0.0, 0.0, 0.0]
    zeros = torch.zeros(3, dtype=torch.float64)
    assert choice.weigh(logits, warp, torch.zeros(3, dtype=torch.int64), zeros)[0].tolist() == [0.0, 0.0, 0.0]


def test_no_rows():
    logits, warp, keys, positions = drawn(2, 7)
    found = choice.choose(logits[:0], warp, keys[:0], positions[:0])
    assert found.token_R.shape == found.log_p_R.shape == found.accepted_R.shape == (0,)


def test_equal_masses_enter_the_nucleus_by_index():
    # Tokens 0, 2, 4, ... share one mass, the others have hardly any: 0.29 of 20 equal ones are the first six.
    logits = torch.where(torch.arange(40) % 2 == 0, 2.0, -20.0).repeat(12, 1)
    warp = Warp(
        torch.ones(12, dtype=torch.float64),
        torch.full((12,), 0.29, dtype=torch.float64),
        True,
        None,
        torch.zeros(40) > 0,
    )
    keys = noise.key_words([noise.sample_key(0, f"{row}") for row in range(12)])
    found = choice.choose(logits, warp, keys, torch.arange(12))
    assert set(found.token_R.tolist()) == {0, 2, 4, 6, 8, 10}
    assert torch.equal(found.token_R, choice_reference.choose(logits, warp, keys, torch.arange(12)).token_R)


def test_a_token_with_all_the_mass_is_drawn():
    logits = torch.full((2, 50), -30.0)
    logits[0, 49], logits[1, 0] = 60.0, 60.0
    warp = Warp(
        torch.ones(2, dtype=torch.float64), torch.full((2,), 0.9, dtype=torch.float64), True, 3, torch.zeros(50) > 0
    )
    keys = noise.key_words([1, 2])
    assert choice.choose(logits, warp, keys, torch.tensor([0, 1])).token_R.tolist() == [49, 0]


def test_numbers_that_are_not_finite_end_and_stay_in_range():
    logits = torch.full((3, 100), torch.nan)
    logits[1] = -torch.inf
    logits[2, 5] = torch.inf
    half = torch.full((3,), 0.5, dtype=torch.float64)
    found = choice.choose(
        logits, Warp(half, half, True, 7, torch.zeros(100) > 0), noise.key_words([1, 2, 3]), torch.arange(3)
    )
    assert ((found.token_R >= 0) & (found.token_R < 100)).all()


def test_half_precision_logits_and_rows_of_a_larger_matrix():
    logits, warp, keys, positions = drawn(4, 300)
    wide = torch.zeros(4, 512, dtype=torch.float16)
    wide[:, :300] = logits
    found = choice.choose(wide[:, :300], warp, keys, positions)
    expected = choice_reference.choose(wide[:, :300].float(), warp, keys, positions)
    assert torch.equal(found.token_R, expected.token_R)
