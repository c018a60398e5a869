"""Noise that is kept is that of its sample, position and draw, and is computed no more often than it must be."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws import noise
from draftmill.decoders.draws.keys import split_key
from draftmill.decoders.engine.noise_cache import NoiseCache
from draftmill.decoders.engine.samples import SlotTable

VOCAB, BIG = 50, 1 << 20


class Held:
    """A cache of noise, with the samples whose keys were started in its slots; checks what it gives."""

    def __init__(self, monkeypatch, *, window=None, fresh=False, vocab=VOCAB, num_bytes=BIG, order=None):
        self.computed, self._whole = [], noise.gumbel_rows
        monkeypatch.setattr(noise, "gumbel_rows", self._counted)
        self.slots, self.num_bytes, self.fresh, self.vocab = SlotTable(Sampling(), 6), num_bytes, fresh, vocab
        self.slots.length_S[:] = 12
        self.slots.order_SW = None if order is None else np.tile(np.array(order), (6, 1))
        self.cache = NoiseCache(self.slots, vocab, window, fresh=fresh)
        self.cache.resize(6, num_bytes)

    def _counted(self, keys, positions, *rest, **more):
        self.computed.append(len(positions))
        return self._whole(keys, positions, *rest, **more)

    def start(self, slot, key):
        self.slots.key_S2[slot] = split_key(key)
        self.cache.start(slot)

    def check(self, slots, ranks, draws=0, *, once=False, ahead=0):
        """The noise of these rows; returns of how many it was computed."""
        slot_R, rank_R = np.broadcast_to(slots, len(ranks)), np.array(ranks)
        rows: Any = SimpleNamespace(
            slot_R=slot_R, rank_R=rank_R, host_draw_R=np.broadcast_to(draws, len(ranks)), once=once
        )
        self.computed.clear()
        found = self.cache.rows(rows, slice(None), self.num_bytes, ahead)
        computed, order = sum(self.computed), self.slots.order_SW
        place_R = rank_R if order is None else order[slot_R, rank_R]
        keys_R2 = torch.from_numpy(self.slots.key_S2[slot_R])
        draw_R = torch.from_numpy(rows.host_draw_R + ahead) if self.fresh else None
        assert torch.equal(found, self._whole(keys_R2, torch.from_numpy(place_R), self.vocab, draws_R=draw_R))
        return computed


@pytest.mark.parametrize("num_bytes", [BIG, 0])
def test_noise_of_whole_canvases_is_that_of_the_sample_through_new_ones_and_more_slots(num_bytes, monkeypatch):
    held, asked = Held(monkeypatch, num_bytes=num_bytes), [0, 5, 3, 0, 0]
    held.start(2, 11)
    # What does not fit is computed each time, that of equal rows once.
    assert [held.check(2, asked) for _ in range(2)] == ([3, 0] if num_bytes else [3, 3])
    held.start(2, 22)
    held.start(3, 11)
    assert [held.check(slot, asked) for slot in (2, 3, 2)] == ([3, 3, 0] if num_bytes else [3, 3, 3])
    held.cache.resize(3, num_bytes)
    assert held.check(2, asked) == (0 if num_bytes else 3), "slots that stay keep their noise"
    assert held.check([2, 3, 3], [5, 5, 5]) == (1 if num_bytes else 2), "a slot without room is computed"


def test_fresh_noise_is_that_of_its_draw_and_nothing_is_kept(monkeypatch):
    held = Held(monkeypatch, fresh=True)
    held.start(2, 11)
    for _ in range(2):
        assert held.check(2, [0, 5, 3, 0, 0], [4, 4, 4, 4, 5]) == 4
    assert held.check(2, [0, 0, 3], [4, 4, 4], ahead=2) == 2


@pytest.mark.parametrize("vocab", [VOCAB, 1 << 16])
def test_a_window_keeps_its_ranks_and_where_that_is_cheap_computes_those_after_it(vocab, monkeypatch):
    held = Held(monkeypatch, window=3, vocab=vocab, num_bytes=1 << 30)
    held.start(1, 7)
    cheap = vocab == VOCAB
    # Up to the end of the text: rank 2 and the nine ranks after it.
    assert held.check(1, [2]) == (10 if cheap else 1)
    assert held.check(1, [2, 3, 4]) == (0 if cheap else 2)
    assert held.check(1, [3, 4, 5]) == (0 if cheap else 1), "a cell goes to the rank that is a window later"
    held.start(1, 8)
    assert held.check(1, [3, 4, 5]) >= 3, "a new sample has nothing kept"


def test_noise_that_is_read_once_is_not_kept(monkeypatch):
    held = Held(monkeypatch, window=3)
    held.start(0, 5)
    assert [held.check(0, [4], once=True) for _ in range(2)] == [1, 1]


def test_more_ranks_at_once_than_the_window_have_their_own_noise(monkeypatch):
    """Where ids are many nothing is kept ahead: a rank beyond the window would read the noise of another."""
    held = Held(monkeypatch, window=2, vocab=70_000, num_bytes=BIG << 5)
    held.start(0, 5)
    held.check(0, [0, 1])
    held.check(0, [1, 2, 3])


def test_noise_is_that_of_the_position_at_each_rank(monkeypatch):
    held = Held(monkeypatch, window=4, order=[3, 0, 2, 1, *range(4, 12)])
    held.start(0, 5)
    held.check(0, [0, 1, 2, 3])
    held.check(0, [2, 3, 4])
