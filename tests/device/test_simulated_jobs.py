"""What the engine asks of a GPU in whole jobs: most steps are replays, graphs stay, and few kernels are compiled."""

import importlib.util

import pytest

from tests.device.simulated import requests_of, simulate

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (the extra gpu)"
)

SMALL, LARGE = 100_000_000, 8_000_000_000


@pytest.mark.parametrize(
    ("decoder", "ascending", "most_captures"),
    [("autoregressive", False, 2), ("autoregressive", True, 2), ("speculative", False, 4), ("speculative", True, 4)],
)
def test_where_launches_decide_four_of_five_steps_are_replays(decoder, ascending, most_captures):
    found = simulate(decoder, requests_of(200, ascending=ascending), num_weights=SMALL)
    assert found.replayed >= 0.8 * found.steps, found
    assert found.captured <= most_captures and found.dropped == 0, "the cache is allocated once, whatever the lengths"
    assert all(len(keys) <= 3 for keys in found.variants.values()), found


@pytest.mark.parametrize("num_weights", [SMALL, LARGE])
@pytest.mark.parametrize("ascending", [False, True])
def test_nine_of_ten_records_are_read_while_the_next_forward_runs(ascending, num_weights):
    found = simulate("autoregressive", requests_of(120, ascending=ascending), num_weights=num_weights)
    assert found.hidden >= 0.9 * found.steps, found


def test_a_large_model_runs_prompts_beside_others_at_once():
    """Its rows of prompts take longer than launches, and the others' rows run with them for nothing."""
    small, large = (
        simulate("autoregressive", requests_of(120, ascending=False), num_weights=n) for n in (SMALL, LARGE)
    )
    assert large.steps < small.steps < 1.1 * large.steps
    assert large.replayed < 0.6 * large.steps


def test_long_slots_take_shares_of_columns_and_few_variants():
    found = simulate("autoregressive", requests_of(4, ascending=True, new=(1100, 1101)), num_weights=SMALL)
    assert {name: len(keys) for name, keys in found.variants.items()} == {"attend_tiles": 2, "add_shares": 1}
