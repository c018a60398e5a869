"""Draws, on rows small enough to check by hand: warps, the rejection rule, and the noise field, whichever way it is asked for."""

import numpy as np
import pytest
import torch

from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws import noise
from draftmill.decoders.draws import sampling as warps
from draftmill.decoders.draws.keys import ACCEPT, MASK, TARGET, nth_key, philox, sample_key, uniforms
from draftmill.decoders.draws.sampling import inverse_cdf_draw, residual
from tests.decoders.references.sampling import coupled_draw, log_law, warp_of


def law(logits_RV, **settings):
    """The distributions of rows that all have these settings."""
    return warp_of(*logits_RV.shape, **settings).law(logits_RV, cut=True)


def test_temperature_zero_is_one_hot_on_the_lowest_index_of_a_tie():
    assert law(torch.tensor([[1.0, 3.0, 3.0, 2.0]]), temperature=0.0).exp().tolist() == [[0.0, 1.0, 0.0, 0.0]]


def test_temperature_divides_logits():
    logits = torch.tensor([[0.3, -1.0, 2.0]])
    torch.testing.assert_close(law(logits, temperature=0.5), torch.log_softmax(logits / 0.5, -1))


def test_top_k_keeps_the_best_and_ties_at_the_edge():
    found = law(torch.tensor([[0.0, 2.0, 1.0, 1.0, -1.0]]), top_k=2).exp()
    assert (found > 0).tolist() == [[False, True, True, True, False]]
    assert found.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (1e-9, 1), (1.0, 4)])
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(top_p, kept):
    found = law(torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log(), top_p=top_p)
    assert int((found > -torch.inf).sum()) == kept


def test_the_nucleus_is_the_same_whether_rows_are_peaked_or_flat():
    # Flat rows need more tokens than are looked at first; ties are broken towards the lower index.
    generator = torch.Generator().manual_seed(0)
    peaked = torch.randn(20, 1000, generator=generator) * 6
    flat = torch.zeros(5, 1000)
    logits = torch.cat([peaked, flat, peaked.round()])
    for top_p in (0.3, 0.9, 0.999):
        kept = law(logits, top_p=top_p) > -torch.inf
        for row, found in zip(torch.log_softmax(logits, -1).exp(), kept, strict=True):
            ordered, index = row.sort(descending=True, stable=True)
            count = int(((ordered.double().cumsum(0) - ordered) < top_p).sum())
            assert set(found.nonzero().flatten().tolist()) == set(index[:count].tolist())


def test_a_draw_that_looks_for_the_nucleus_late_is_the_draw_from_the_nucleus():
    generator = torch.Generator().manual_seed(1)
    logits = torch.cat([torch.randn(200, 400, generator=generator) * scale for scale in (0.0, 1.0, 5.0)])
    gumbel = noise.gumbel_rows(noise.key_words(list(range(600))), torch.zeros(600, dtype=torch.int64), 400)
    for top_p in (0.05, 0.5, 0.95):
        warp = warp_of(600, 400, top_p=top_p)
        late = warp.draw(warp.law(logits, cut=False), gumbel)
        assert torch.equal(late, coupled_draw(law(logits, top_p=top_p), gumbel))
        assert not torch.equal(late, coupled_draw(law(logits), gumbel))


# Every setting, in rows of all kinds: numbers of settings that have no common divisor meet each other.
MIXED: dict = {
    "temperature": (0.0, 0.3, 0.7, 1.0, 1.9), "top_p": (0.05, 0.5, 0.95, 1.0), "min_p": (0.0, 0.0, 0.1),
    "top_k": (0, 7, 0, 40, 300, 900, 0),
}  # fmt: skip


def drawn(logits, gumbel, **settings):
    """The distributions, cut and not, and the tokens of rows, whose settings come in turn."""
    warp = warp_of(*logits.shape, **settings)
    uncut = warp.law(logits, cut=False)
    return warp.law(logits, cut=True), uncut, warp.draw(uncut, gumbel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "names", [("temperature",), ("temperature", "top_p"), ("min_p", "top_k"), tuple(MIXED)], ids=" and ".join
)
def test_a_row_beside_others_has_the_bits_of_a_job_like_it(monkeypatch, dtype, names):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(840, 300, generator=generator, dtype=dtype) * 4).round(decimals=1)
    gumbel = -torch.rand(840, 300, generator=generator).log().neg().log()
    settings = {name: MIXED[name] for name in names}
    found = drawn(logits, gumbel, **settings)
    for row in range(0, 840, 11):
        own = {name: values[row % len(values)] for name, values in settings.items()}
        sampling, one = Sampling(**{**own, "top_k": own.get("top_k") or None}), logits[row : row + 1]
        alone = drawn(one, gumbel[row : row + 1], **own)
        cut = log_law(one, sampling)
        expected = cut, log_law(one, sampling, cut=False), coupled_draw(cut, gumbel[row : row + 1])
        for field, single, plain in zip(found, alone, expected, strict=True):
            assert torch.equal(field[row : row + 1], plain) and torch.equal(single, plain), own
    # Where looking at the data would wait, the same operations run on all rows.
    monkeypatch.setattr(warps, "_looks", lambda law_RV: False)
    assert all(torch.equal(one, other) for one, other in zip(drawn(logits, gumbel, **settings), found, strict=True))


@pytest.mark.parametrize("looks", [True, False])
def test_a_row_of_nan_gives_an_id_in_range(monkeypatch, looks):
    monkeypatch.setattr(warps, "_looks", lambda law_RV: looks)
    found = torch.full((2, 9), torch.nan)
    found[1] = torch.log_softmax(torch.arange(9.0), -1)
    tokens = warp_of(2, 9, top_p=0.5).draw(found, torch.zeros(2, 9))
    assert 0 <= int(tokens[0]) < 9 and int(tokens[1]) == 8
    assert 0 <= int(law(found, top_p=0.5)[0].argmax()) < 9


def test_suppressed_tokens_stay_at_probability_zero():
    logits = torch.tensor([[0.1, 0.3, 0.2]])
    for settings in ({}, {"temperature": 0.3}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.01}):
        warp = warp_of(1, 3, suppressed=(1,), **settings)
        assert warp.law(warp.suppress(logits.clone()), cut=True)[0, 1] == -torch.inf


def test_inverse_cdf_counts_the_values_at_or_below_the_uniform():
    mass = torch.tensor([[0.2, 0.0, 0.5, 0.3]]).expand(5, -1)
    uniform = torch.tensor([0.0, 0.1999, 0.2000001, 0.6999, 0.999999999])
    assert inverse_cdf_draw(mass, uniform).tolist() == [0, 0, 2, 2, 3]


def test_inverse_cdf_never_gives_a_token_without_mass_at_the_end():
    mass = torch.tensor([[0.4, 0.6, 0.0, 0.0]])
    assert inverse_cdf_draw(mass, torch.tensor([1.0 - 1e-17], dtype=torch.float64)).tolist() == [1]


def test_the_residual_falls_back_to_p_where_it_has_no_mass():
    p = torch.tensor([[0.25, 0.75]]).log()
    torch.testing.assert_close(residual(p, p), p.exp())


def test_rejection_gives_the_target_law_by_exact_sums():
    p = torch.tensor([0.1, 0.6, 0.3], dtype=torch.float64)
    q = torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    accepted = q * torch.minimum(torch.ones(3), p / q)
    rest = residual(p.log().unsqueeze(0), q.log().unsqueeze(0))[0]
    output = accepted + (1 - accepted.sum()) * rest / rest.sum()
    torch.testing.assert_close(output, p, atol=1e-15, rtol=0)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_known_answers(counter, key, words):
    for array in (np.array, torch.tensor):
        c0, c1, c2, c3, k0, k1 = (array([word]) for word in (*counter, *key))
        assert tuple(int(word[0]) for word in philox((c0, c1, c2, c3), (k0, k1))) == words


def test_a_sample_key_is_the_same_on_every_machine():
    assert sample_key(0, "file.py:3") == 0x37D60FF52EC9FABB
    assert sample_key(1, "file.py:3") != sample_key(0, "file.py:3")
    assert sample_key(0, "é") != sample_key(0, "e")


def test_a_samples_key_is_its_rows_and_its_numbers_alone():
    keys = {(row, n): nth_key(sample_key(0, f"{row}"), n) for row in range(50) for n in range(50)}
    assert len(set(keys.values())) == len(keys)
    assert all(keys[row, 0] == sample_key(0, f"{row}") for row in range(50))


def test_a_seed_beyond_64_bits_is_refused():
    with pytest.raises(ValueError, match=r"seed: .*does not fit"):
        sample_key(2**63, "a")


def test_noise_does_not_depend_on_how_many_rows_are_asked_together():
    keys = noise.key_words(list(range(200)))
    positions = torch.arange(200)
    together = noise.gumbel_rows(keys, positions, 2048)
    alone = torch.cat([noise.gumbel_rows(keys[i : i + 1], positions[i : i + 1], 2048) for i in range(0, 200, 17)])
    assert torch.equal(together[::17], alone)


def test_streams_positions_and_draws_differ():
    base = uniforms(7, np.arange(50), TARGET)
    assert not np.intersect1d(base, uniforms(7, np.arange(50), ACCEPT)).size
    assert not np.intersect1d(base, uniforms(7, np.arange(50), TARGET, draw=1)).size
    assert not np.intersect1d(base, uniforms(8, np.arange(50), TARGET)).size
    assert len(np.unique(base)) == 50


def test_uniforms_are_uniform():
    # Chi-square over 64 cells, 63 degrees of freedom; the 1 - 1e-6 quantile is 131. The key is fixed: no flake.
    values = uniforms(12345, np.arange(64_000), MASK)
    assert values.min() > 0.0 and values.max() < 1.0
    counts = np.bincount((values * 64).astype(int), minlength=64)
    assert ((counts - 1000) ** 2 / 1000).sum() < 131


def test_gumbel_noise_draws_from_the_law_it_is_added_to():
    # Chi-square with 3 degrees of freedom at 1 - 1e-6 is 30.7; the keys are fixed.
    law = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    keys = noise.key_words([sample_key(3, str(i)) for i in range(20_000)])
    tokens = (law + noise.gumbel_rows(keys, torch.zeros(20_000, dtype=torch.int64), 4)).argmax(-1)
    expected = law.exp().numpy() * 20_000
    assert ((np.bincount(tokens.numpy(), minlength=4) - expected) ** 2 / expected).sum() < 30.7


def test_extreme_words_give_finite_noise():
    assert torch.isfinite(noise._gumbel(torch.tensor([0, 1, 0xFFFFFFFF]))).all()
