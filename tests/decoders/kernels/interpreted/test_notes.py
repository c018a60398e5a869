"""Tokens and notes of the kernel equal those of the production code in torch, on shapes and numbers at the edge."""

import math
from typing import Any

import pytest
import torch

from draftmill.decoders.draws import noise
from draftmill.decoders.kernels import notes, notes_reference
from draftmill.decoders.kernels.choice_reference import Warp
from draftmill.decoders.kernels.notes_reference import WANTED
from tests.decoders.kernels.interpreted.test_choice import CASES, drawn

MASK = 2
MODEL_S, WARPED = 1e-12, 2e-5
"""How far a note may be off: sums over the model's own distribution are float64, the others are of float32 numbers."""


def both(logits, warp, keys, positions, *, wanted=WANTED, **more):
    """What the kernel and the reference tell, by name."""
    draws = torch.arange(len(positions)) * 31
    return [
        dict(
            zip(
                ("token", "log_p", *wanted),
                module.note(logits, warp, keys, positions, wanted=wanted, draw_R=draws, mask_id=MASK, **more),
                strict=True,
            )
        )
        for module in (notes, notes_reference)
    ]


def assert_equal(found, expected, *, warped=False):
    assert found.keys() == expected.keys()
    for name, one in found.items():
        exact = name in ("token", "order")
        rounding = 0.0 if exact else WARPED if warped and name not in ("log_p", "scores") else MODEL_S
        assert torch.allclose(one, expected[name], rtol=rounding, atol=rounding), (name, one, expected[name])


@pytest.mark.parametrize("warped", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_tokens_and_notes_are_those_of_the_reference(name, warped):
    more = {"suppressed": (MASK, 7)} | CASES[name]
    found, expected = both(*drawn(4, 2047, **more), warped=warped)
    assert_equal(found, expected, warped=warped)
    assert all(len(set(one.tolist())) > 1 for one in found.values()), "rows differ, so that a wrong row is found"


@pytest.mark.parametrize("warped", [False, True])
@pytest.mark.parametrize("wanted", [(), ("top1",), ("margin",), ("squares", "top1"), ("scores", "entropy", "order")])
def test_notes_come_in_the_order_in_which_they_are_wanted(wanted, warped):
    found, expected = both(*drawn(3, 97, temperatures=(0.8, 0.0)), wanted=wanted, warped=warped)
    assert list(found) == ["token", "log_p", *wanted]
    assert_equal(found, expected, warped=warped)


def test_a_step_has_noise_of_its_own_and_the_first_one_that_of_no_step():
    asked = drawn(6, 500, suppressed=(MASK,))
    alone, _ = both(*asked, wanted=("top1",))
    steps = [torch.tensor(numbers) for numbers in ([0] * 6, [1] * 6, [0, 1, 2, 3, 2**20, 2**31])]
    tokens = []
    for step_R in steps:
        found, expected = both(*asked, wanted=("top1",), step_R=step_R)
        assert_equal(found, expected)
        tokens.append(found["token"].tolist())
    assert tokens[0] == alone["token"].tolist()
    assert tokens[1] != tokens[0] and tokens[2][:2] == [tokens[0][0], tokens[1][1]] and tokens[2][2:] != tokens[0][2:]


@pytest.mark.parametrize("vocab_size", [3, 16, 17, 2048, 2049])
def test_one_row_of_any_vocabulary(vocab_size):
    for warped in (False, True):
        case = drawn(1, vocab_size, temperatures=(0.9,), top_ps=(0.7,), top_k=vocab_size)
        assert_equal(*both(*case, warped=warped), warped=warped)


def settings_of(rows, *, temperature=1.0, top_p=1.0, top_k=None, suppressed=(), vocab_size=40):
    forbidden = torch.zeros(vocab_size, dtype=torch.bool)
    forbidden[list(suppressed)] = True
    column = torch.ones(rows, dtype=torch.float64)
    return Warp(column * temperature, column * top_p, top_p < 1, top_k, forbidden)


def keys_of(rows):
    return noise.key_words([noise.sample_key(0, f"{row}") for row in range(rows)]), torch.arange(rows)


EDGES: dict[str, tuple[torch.Tensor, dict[str, Any]]] = {
    "ties": (torch.where(torch.arange(40) % 2 == 0, 2.0, -20.0), {"top_p": 0.29}),
    "ties, whole": (torch.where(torch.arange(40) % 2 == 0, 2.0, -20.0), {}),
    "the second best is cut by top-p": (torch.where(torch.arange(40) == 9, 5.0, 0.0), {"top_p": 0.5}),
    "the best two are equal, one is in the nucleus": (torch.where(torch.arange(40) < 2, 5.0, 0.0), {"top_p": 0.2}),
    "the best two are equal": (torch.where(torch.arange(40) < 2, 5.0, 0.0), {"top_p": 0.6}),
    "two in the nucleus": (torch.where(torch.arange(40) < 2, torch.arange(40) + 5.0, 0.0), {"top_p": 0.8}),
    "top-k of one": (torch.arange(40) / 9.0, {"top_k": 1}),
    "top-k, equal at the edge": (torch.arange(40).div(4, rounding_mode="floor") / 3.0, {"top_k": 6}),
    "all equal": (torch.zeros(40), {"top_p": 0.5}),
    "greedy, equal": (torch.where(torch.arange(40) > 30, 1.0, 0.0), {"temperature": 0.0, "top_p": 0.5, "top_k": 3}),
    "all suppressed but one": (torch.arange(40) / 9.0, {"suppressed": [*range(30), *range(31, 40)]}),
    "one has all the mass": (torch.where(torch.arange(40) == 39, 60.0, -30.0), {"top_p": 0.9, "top_k": 3}),
    "no mass for most": (torch.where(torch.arange(40) < 5, torch.arange(40) / 2.0, -torch.inf), {"top_p": 0.95}),
    "huge": (torch.where(torch.arange(40) % 3 == 0, 3e38, -3e38) * (torch.arange(40) > 3), {}),
    "tiny": (torch.arange(40) * 1e-30, {"temperature": 0.5}),
    "hot": (torch.arange(40) * 1.0, {"temperature": 1e6, "top_p": 0.5}),
    "cold": (torch.arange(40) * 1.0, {"temperature": 1e-3}),
}


@pytest.mark.parametrize("warped", [False, True])
@pytest.mark.parametrize("name", EDGES)
def test_numbers_at_the_edge(name, warped):
    logits, more = EDGES[name]
    found, expected = both(logits.repeat(6, 1).float(), settings_of(6, **more), *keys_of(6), warped=warped)
    assert_equal(found, expected, warped=warped)
    assert all(one.isfinite().all() for one in found.values())


def test_the_notes_are_what_their_names_say():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().float()
    found, _ = both(logits, settings_of(1, temperature=0.0, vocab_size=4), *keys_of(1))
    told = {name: float(one[0]) for name, one in found.items()}
    # MASK has the third: 0.85 are left for scores.
    assert told == pytest.approx(
        {
            "token": 0, "log_p": math.log(0.5), "top1": 0.5, "margin": 0.2, "squares": 0.365, "scores": math.log(0.85),
            "entropy": -sum(p * math.log(p) for p in (0.5, 0.3, 0.15, 0.05)), "order": told["order"],
        },
        abs=1e-6,
    )  # fmt: skip


def test_scores_where_the_mask_alone_has_any():
    logits = torch.full((1, 9), -torch.inf)
    logits[0, MASK] = 1.0
    found, expected = both(logits, settings_of(1, vocab_size=9), *keys_of(1), wanted=("scores",))
    assert found["scores"].item() == expected["scores"].item() == -math.inf


def test_no_rows_and_what_must_be_given():
    logits, warp, keys, positions = drawn(2, 7)
    assert notes.note(logits[:0], warp, keys[:0], positions[:0], wanted=("top1", "margin")).shape == (4, 0)
    for module in (notes, notes_reference):
        with pytest.raises(AssertionError, match="the number of the draw"):
            module.note(logits, warp, keys, positions, wanted=("order",))
        with pytest.raises(AssertionError, match="scores leave out the mask"):
            module.note(logits, warp, keys, positions, wanted=("scores",))


def test_numbers_that_are_not_finite_end_and_stay_in_range():
    logits = torch.full((3, 100), torch.nan)
    logits[1] = -torch.inf
    logits[2, 5] = torch.inf
    half = torch.full((3,), 0.5, dtype=torch.float64)
    warp, draws = Warp(half, half, True, 7, torch.zeros(100) > 0), torch.zeros(3, dtype=torch.int64)
    for warped in (False, True):
        found = notes.note(
            logits,
            warp,
            noise.key_words([1, 2, 3]),
            torch.arange(3),
            wanted=WANTED,
            draw_R=draws,
            mask_id=0,
            warped=warped,
        )
        assert ((found[0] >= 0) & (found[0] < 100)).all()


def test_half_precision_logits_rows_of_a_larger_matrix_and_keys_in_columns():
    logits, warp, keys, positions = drawn(4, 300)
    keys = keys.T.contiguous().T
    wide = torch.zeros(4, 512, dtype=torch.float16)
    wide[:, :300] = logits
    found = notes.note(wide[:, :300], warp, keys, positions, wanted=("top1",))
    expected = notes_reference.note(wide[:, :300].float(), warp, keys, positions, wanted=("top1",))
    torch.testing.assert_close(found, expected, rtol=MODEL_S, atol=MODEL_S)
