"""The noise field: published known answers, and one value whichever way it is asked for."""

import numpy as np
import pytest
import torch

from draftmill.decoders.draws import noise
from draftmill.decoders.draws.keys import ACCEPT, MASK, TARGET, nth_key, philox, sample_key, uniforms


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
