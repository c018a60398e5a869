"""The noise of positions: that of the field, whether it is kept or not, and computed once."""

import pytest
import torch

from decoders.draws import noise
from decoders.engine.kept_noise import PositionNoise
from decoders.engine.state import SlotState


def state_of(keys, width):
    state = SlotState(len(keys), torch.device("cpu"), max_commit=1)
    state.widen(width)
    state.key_S2[:] = noise.key_words(keys)
    return state


@pytest.mark.parametrize("most", [None, 0])
def test_noise_is_that_of_the_field_through_moves_new_samples_and_longer_canvases(most):
    state = state_of([11, 22, 33], 8)
    kept = PositionNoise(state, 50, most=most)
    slots, positions = torch.tensor([0, 2, 2, 0, 1]), torch.tensor([7, 0, 3, 7, 7])

    def check():
        expected = noise.gumbel_rows(state.key_S2[slots], positions, 50)
        assert torch.equal(kept.rows(slots, positions), expected)
        assert torch.equal(kept.rows(slots, positions), expected)

    check()
    state.key_S2[0] = noise.key_words([44])[0]
    kept.forget(0)
    check()
    state.key_S2[1] = state.key_S2[2]
    kept.move(2, 1)
    check()
    state.widen(16)
    check()


def test_what_is_kept_is_computed_once(monkeypatch):
    state, computed = state_of([1, 2], 8), []
    whole = noise.gumbel_rows

    def counted(keys, *rest):
        computed.append(len(keys))
        return whole(keys, *rest)

    monkeypatch.setattr(noise, "gumbel_rows", counted)
    kept = PositionNoise(state, 50)
    kept.rows(torch.tensor([0, 0, 1]), torch.tensor([3, 3, 3]))
    kept.rows(torch.tensor([0, 1, 1]), torch.tensor([3, 3, 4]))
    assert computed == [2, 1]
