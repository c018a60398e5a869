"""Tokens, log-probabilities and notes of the kernel equal those of the production code in torch, also for numbers at the edge.

Tokens are compared where the best candidate is ahead of the second by more than rounding; `drawn` draws until all rows are such.
"""

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from draftmill.decoders.draws import noise
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.draws.sampling import sample
from draftmill.decoders.draws.settings import NOTES
from draftmill.decoders.kernels import sampling
from tests.decoders.references.sampling import warp_of

MARGIN = 1e-4
MASK = 2
NOISE = 1.1e-6  # of any of the 2^32 words: the numbers at which it is largest have 22 bits behind the point
MODEL_S, PLAIN, WARPED = 1e-12, 1e-5, 2e-5
"""How far off is allowed: with notes, sums over the model's own distribution are float64; the others are of float32 numbers."""


def drawn(rows, vocab_size, *, temperatures=(1.0,), top_ps=(1.0,), spread=3.0, **more):
    """Logits, warp, keys and positions. No row has a near tie; row r takes setting r modulo their number."""
    warp = warp_of(rows, vocab_size, temperature=temperatures, top_p=top_ps, **more)
    keys = noise.key_words([sample_key(3, f"row {row}") for row in range(rows)])
    positions = torch.arange(rows) * 7919
    for seed in range(20):
        logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread
        if vocab_size == 1 or _ahead(logits, warp, keys, positions) > MARGIN:
            return logits, warp, keys, positions
    raise AssertionError("every draw had a near tie")


def _ahead(logits, warp, keys, positions):
    """By how much the best candidate is ahead, in the worst row; what the warp leaves no mass is none."""
    law = warp.law(warp.suppress(logits.clone()), cut=True)
    best = (law + noise.gumbel_rows(keys, positions, logits.shape[1])).topk(2).values
    return (best[:, 0] - best[:, 1]).min()


def both(logits, warp, keys, positions, *, wanted=NOTES, **more):
    """What the kernel and the reference tell, by name; the reference changes its logits."""
    names, more = ("token", "log_p", *wanted), {"wanted": wanted, "mask_id": MASK, **more}
    return [
        dict(zip(names, draw(logits.clone(), warp, keys, positions, **more).unbind(1), strict=True))
        for draw in (sampling.sample, sample)
    ]


def assert_equal(found, expected, *, warped=False):
    assert found.keys() == expected.keys()
    for name, one in found.items():
        relative = 0.0 if name == "token" else WARPED if warped and name != "scores" else MODEL_S
        rounding = PLAIN if len(found) == 2 and name == "log_p" else relative
        assert torch.allclose(one, expected[name], rtol=relative, atol=rounding), (name, one, expected[name])


CASES: dict[str, dict] = {
    "plain": {},
    "temperatures, suppressed ids": {"temperatures": (0.7, 0.0, 2.0), "suppressed": (0, 3, 700, 2046)},
    "top-p": {"temperatures": (1.0, 1.5), "top_ps": (0.8, 1.0, 0.3, 0.999)},
    "top-k": {"temperatures": (1.0, 3.0, 0.0), "top_k": 5},
    "both": {"temperatures": (1.0, 0.6, 2.5), "top_ps": (0.5, 0.9, 1.0), "top_k": 20, "suppressed": (5, 6)},
    "flat": {"top_ps": (0.4, 1.0), "top_k": 1500, "spread": 0.3},
}


@pytest.mark.parametrize("scored", [None, [-1, 17, -1, 2000]])
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_reference(name, scored):
    scored_R = None if scored is None else torch.tensor(scored)
    found, expected = both(*drawn(4, 2047, **CASES[name]), wanted=(), scored_R=scored_R)
    assert_equal(found, expected)


@pytest.mark.parametrize("warped", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_notes_are_those_of_the_reference(name, warped):
    case = drawn(4, 2047, **({"suppressed": (MASK, 7)} | CASES[name]))
    found, expected = both(*case, warped=warped)
    assert_equal(found, expected, warped=warped)
    assert all(len(set(one[0].tolist())) > 1 for one in found.values()), "rows differ, so that a wrong row is found"


@pytest.mark.parametrize("wanted", [(), ("top1", "squares")])
def test_the_log_probability_is_that_of_a_given_token_and_all_else_that_of_the_row(wanted):
    case = drawn(4, 2047, suppressed=(MASK, 7), temperatures=(1.0, 0.0))
    for warped in (False, True):
        (found, expected), (alone, _) = (
            both(*case, wanted=wanted, warped=warped, scored_R=scored_R)
            for scored_R in (torch.tensor([-1, 0, 7, 2000]), None)
        )
        assert_equal(found, expected, warped=warped)
        assert found["log_p"][0, 2] == -math.inf and found["log_p"][0, 0] == alone["log_p"][0, 0]
        assert all(torch.equal(one, alone[name]) for name, one in found.items() if name != "log_p")


@pytest.mark.parametrize("warped", [False, True])
@pytest.mark.parametrize("wanted", [(), ("top1",), ("margin",), ("squares", "top1"), ("scores", "entropy")])
def test_notes_come_in_the_order_in_which_they_are_wanted(wanted, warped):
    found, expected = both(*drawn(3, 97, temperatures=(0.8, 0.0)), wanted=wanted, warped=warped)
    assert list(found) == ["token", "log_p", *wanted]
    assert_equal(found, expected, warped=warped)


def test_a_draw_has_noise_of_its_own_and_the_first_one_that_of_none():
    asked = drawn(6, 500, suppressed=(MASK,))
    alone, _ = both(*asked, wanted=("top1",))
    tokens = []
    for numbers in ([0] * 6, [1] * 6, [0, 1, 2, 3, 2**20, 2**31]):
        found, expected = both(*asked, wanted=("top1",), draw_R=torch.tensor(numbers))
        assert_equal(found, expected)
        tokens.append(found["token"][0].tolist())
    assert tokens[0] == alone["token"][0].tolist()
    assert tokens[1] != tokens[0] and tokens[2][:2] == [tokens[0][0], tokens[1][1]] and tokens[2][2:] != tokens[0][2:]


@pytest.mark.parametrize("wanted", [(), ("top1", "scores")])
@pytest.mark.parametrize("first", [None, 5])
def test_draws_ahead_are_those_of_the_numbers_that_follow(wanted, first):
    asked, draw_R = drawn(4, 300, temperatures=(1.0, 0.0)), None if first is None else torch.arange(4) + first
    found, expected = both(*asked, wanted=wanted, draw_R=draw_R, ahead=2)
    assert_equal(found, expected)
    for step in range(3):
        alone, _ = both(*asked, wanted=wanted, draw_R=step + (torch.zeros(4).long() if draw_R is None else draw_R))
        assert all(torch.equal(found[name][step], one[0]) for name, one in alone.items())
    assert len({tuple(one) for one in found["token"].tolist()}) > 1


@pytest.mark.parametrize("vocab_size", [3, 16, 17, 2048, 2049, 8193])
def test_one_row_of_any_vocabulary(vocab_size):
    for warped in (False, True):
        case = drawn(1, vocab_size, temperatures=(0.9,), top_ps=(0.7,), top_k=vocab_size)
        assert_equal(*both(*case, warped=warped), warped=warped)


def test_a_vocabulary_of_one_token():
    found = sampling.sample(*drawn(3, 1, temperatures=(1.0, 0.0), top_ps=(0.5,)))
    assert found.tolist() == [[[0.0] * 3] * 2]


def settings_of(rows, *, temperature=1.0, top_p=1.0, vocab_size=40, **more):
    return warp_of(rows, vocab_size, temperature=temperature, top_p=top_p, **more)


def keys_of(rows):
    return noise.key_words([sample_key(0, f"{row}") for row in range(rows)]), torch.arange(rows)


EDGES: dict[str, tuple[torch.Tensor, dict]] = {
    "ties": (torch.where(torch.arange(40) % 2 == 0, 2.0, -20.0), {"top_p": 0.29}),
    "ties, whole": (torch.where(torch.arange(40) % 2 == 0, 2.0, -20.0), {}),
    "the second best is cut by top-p": (torch.where(torch.arange(40) == 9, 5.0, 0.0), {"top_p": 0.5}),
    "the best two are equal, one is in the nucleus": (torch.where(torch.arange(40) < 2, 5.0, 0.0), {"top_p": 0.2}),
    "the best two are equal": (torch.where(torch.arange(40) < 2, 5.0, 0.0), {"top_p": 0.6}),
    "two in the nucleus": (torch.where(torch.arange(40) < 2, torch.arange(40) + 5.0, 0.0), {"top_p": 0.8}),
    "top-k of one": (torch.arange(40) / 9.0, {"top_k": 1}),
    "top-k, equal at the edge": (torch.arange(40).div(4, rounding_mode="floor") / 3.0, {"top_k": 6}),
    "all equal": (torch.zeros(40), {"top_p": 0.51}),  # at 0.5 the reference's rounding would decide
    "greedy, equal": (torch.where(torch.arange(40) > 30, 1.0, 0.0), {"temperature": 0.0, "top_p": 0.5, "top_k": 3}),
    "all suppressed but one": (torch.arange(40) / 9.0, {"suppressed": [*range(30), *range(31, 40)]}),
    "one has all the mass": (torch.where(torch.arange(40) == 39, 60.0, -30.0), {"top_p": 0.9, "top_k": 3}),
    "no mass for most": (torch.where(torch.arange(40) < 5, torch.arange(40) / 2.0, -torch.inf), {"top_p": 0.95}),
    "huge": (torch.where(torch.arange(40) % 3 == 0, 3e38, -3e38) * (torch.arange(40) > 3), {}),
    "tiny": (torch.arange(40) * 1e-30, {"temperature": 0.5}),
    "hot": (torch.arange(40) * 1.0, {"temperature": 1e6, "top_p": 0.5}),
    "cold": (torch.arange(40) * 1.0, {"temperature": 1e-3}),
    "cold, all equal": (torch.full((40,), 30.0), {"temperature": 1e-3}),
    "differences that masses do not have": (
        torch.arange(40) * 1e-30 + (torch.arange(40) == 7),
        {"top_p": 0.7, "top_k": 9},
    ),
    "zeros of both signs at the edge": (torch.tensor([0.0, -0.0] * 20), {"top_k": 7, "top_p": 0.31}),
    "top-k of more than there are": (torch.arange(40) / 9.0, {"top_k": 50, "top_p": 0.7}),
    "top-k, too few have any mass": (torch.where(torch.arange(40) < 5, 1.0, -torch.inf), {"top_k": 9, "top_p": 0.7}),
    "tiny top-p": (torch.arange(40) / 9.0, {"top_p": 1e-9}),
    "top-p of nearly all": (torch.arange(40) * 3.0, {"top_p": 1 - 1e-9}),
}


@pytest.mark.parametrize("name", EDGES)
def test_numbers_at_the_edge(name):
    logits, more = EDGES[name]
    asked = logits.repeat(6, 1).float(), settings_of(6, **more), *keys_of(6)
    for wanted, warped in ((), False), (NOTES, False), (NOTES, True):
        found, expected = both(*asked, wanted=wanted, warped=warped)
        assert_equal(found, expected, warped=warped)
        assert all(one.isfinite().all() for one in found.values())


def test_equal_masses_enter_the_nucleus_by_index():
    # Tokens 0, 2, 4, ... share one mass, the others have hardly any: 0.29 of 20 equal ones are the first six.
    logits, more = EDGES["ties"]
    found, expected = both(logits.repeat(12, 1), settings_of(12, **more), *keys_of(12), wanted=())
    assert set(found["token"][0].tolist()) == {0, 2, 4, 6, 8, 10} and torch.equal(found["token"], expected["token"])


def test_a_token_with_all_the_mass_is_drawn():
    logits = torch.full((2, 40), -30.0)
    logits[0, 39], logits[1, 0] = 60.0, 60.0
    assert sampling.sample(logits, settings_of(2, top_p=0.9, top_k=3), *keys_of(2))[0, 0].tolist() == [39, 0]


def test_the_notes_are_what_their_names_say():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log().float()
    found, _ = both(logits, settings_of(1, temperature=0.0, vocab_size=4), *keys_of(1))
    told = {name: float(one[0, 0]) for name, one in found.items()}
    # MASK has the third: 0.85 are left for scores.
    assert told == pytest.approx(
        {
            "token": 0, "log_p": math.log(0.5), "top1": 0.5, "margin": 0.2, "squares": 0.365, "scores": math.log(0.85),
            "entropy": -sum(p * math.log(p) for p in (0.5, 0.3, 0.15, 0.05)),
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
    for wanted in ((), ("top1", "margin")):
        found = sampling.sample(logits[:0], warp, keys[:0], positions[:0], wanted=wanted, ahead=1)
        assert found.shape == (2, 2 + len(wanted), 0)
    for draw in (sampling.sample, sample):
        with pytest.raises(AssertionError, match="scores have no mask"):
            draw(logits, warp, keys, positions, wanted=("scores",))


def test_numbers_that_are_not_finite_end_and_stay_in_range():
    logits = torch.full((3, 100), torch.nan)
    logits[1] = -torch.inf
    logits[2, 5] = torch.inf
    warp = settings_of(3, temperature=0.5, top_p=0.5, top_k=7, vocab_size=100)
    for wanted, warped in ((), False), (NOTES, False), (NOTES, True):
        found = sampling.sample(logits, warp, *keys_of(3), wanted=wanted, mask_id=0, warped=warped)
        assert ((found[0, 0] >= 0) & (found[0, 0] < 100)).all() and not found[0, 1].isfinite().any()


@pytest.mark.parametrize("wanted", [(), ("top1",)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_rows_of_a_larger_matrix_and_numbers_in_columns(dtype, wanted):
    logits, warp, keys, positions = drawn(4, 300)
    columns = torch.stack([positions, positions], 1)
    wide = torch.zeros(4, 512, dtype=dtype)
    wide[:, :300] = logits
    warp = replace(warp, settings_4R=warp.settings_4R.T.contiguous().T)
    found = sampling.sample(wide[:, :300], warp, keys.T.contiguous().T, columns[:, 0], wanted=wanted)
    expected = sample(wide[:, :300].float(), warp, keys, positions, wanted=wanted)
    torch.testing.assert_close(found, expected, rtol=MODEL_S, atol=MODEL_S if wanted else PLAIN)


@pytest.mark.parametrize("top_k", [None, 1, 3, 8, 21, 22])
def test_equal_numbers_are_cut_as_the_reference_cuts_them(top_k):
    """Few different numbers, so that most draws end among equals."""
    settings = list(product([0.0, 0.1, 1.0, 5.0], [1.0, 0.93, 0.37, 0.003]))
    logits = torch.randint(-3, 2, (16, 21), generator=torch.Generator().manual_seed(7)).float()
    logits[::3] = logits[::3].masked_fill(logits[::3] == 1, -torch.inf)
    temperatures, top_ps = zip(*settings, strict=True)
    warp = warp_of(16, 21, temperature=temperatures, top_p=top_ps, top_k=top_k or 0, suppressed=(4,))
    assert_equal(*both(logits, warp, *keys_of(16), wanted=()))


def test_a_row_has_the_same_bits_beside_any_others():
    """In a vocabulary of several parts, of which a row is read by one program or by several."""
    logits, _, keys, positions = drawn(3, 8193)
    temperatures, top_ps = (1.0, 0.7, 0.0), (1.0, 0.8, 0.5)
    for top_k in (0, 400):
        warp = warp_of(3, 8193, temperature=temperatures, top_p=top_ps, top_k=top_k)
        whole = sampling.sample(logits, warp, keys, positions)
        for row in range(3):
            one = slice(row, row + 1)
            part = warp_of(1, 8193, temperature=temperatures[row], top_p=top_ps[row], top_k=top_k)
            alone = sampling.sample(logits[one], part, keys[one], positions[one])
            assert torch.equal(alone, whole[:, :, one])


PASSES: dict[str, tuple[int, dict]] = {
    "plain": (1, {}),
    "greedy, with cuts": (1, {"temperatures": (0.0,), "top_k": 5, "top_ps": (0.5,)}),
    "top-k": (4, {"top_k": 5}),
    "top-k of all": (1, {"top_k": 300}),
    "top-p": (5, {"top_ps": (0.5,)}),
    "both": (6, {"top_ps": (0.5,), "top_k": 200}),
}


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize(("wanted", "warped", "more"), [((), False, 0), (("entropy",), False, 1), (NOTES, True, 3)])
def test_a_row_is_read_a_few_times(monkeypatch, name, wanted, warped, more):
    """Numbers of the logits that are loaded, over rows, draws and tokens; each draw may load three of them once more."""
    passes, case = PASSES[name]
    logits, *asked = drawn(2, 300, **{"temperatures": (0.8,)} | case)
    loads, low = [], logits.data_ptr()
    plain = triton.runtime.interpreter.InterpreterBuilder.create_masked_load

    def counted(self, places, mask, *more):
        inside = (places.data >= low) & (places.data < low + 4 * logits.numel()) & mask.data
        loads.append(int(np.count_nonzero(inside)))
        return plain(self, places, mask, *more)

    monkeypatch.setattr(triton.runtime.interpreter.InterpreterBuilder, "create_masked_load", counted)
    sampling.sample(logits, *asked, wanted=wanted, warped=warped, mask_id=MASK, ahead=1)
    passes += more - (warped and "greedy" in name)  # which has no warped distribution
    read = 4 * (300 * passes - ("scores" in wanted))  # scores have no mask
    assert read < sum(loads) <= read + 4 * 3


@triton.jit
def gumbel_of_words(words, out, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + place, sampling.gumbel_of(tl.load(words + place).to(tl.uint32)))


def test_the_noise_in_float32_is_that_of_float64():
    powers = 2 ** torch.arange(33)
    near = (powers.unsqueeze(1) + torch.arange(-64, 64)).flatten()
    ends = torch.arange(2**15)
    spread = torch.arange(0, 2**32, 65521)
    words = torch.cat([near, 3 * near, ends, spread]).clamp(0, 2**32 - 1)
    words = torch.cat([words, 2**32 - 1 - words]).unique()
    words = torch.cat([words, words.new_zeros(-len(words) % 1024)])
    found = torch.empty(len(words), dtype=torch.float32)
    gumbel_of_words[(len(words) // 1024,)](words, found, BLOCK=1024)
    expected = -(-((words.to(torch.float64) + 0.5) * 2.0**-32).log()).log()
    assert words.min() == 0 and words.max() == 2**32 - 1
    assert (found - expected).abs().max() < NOISE
