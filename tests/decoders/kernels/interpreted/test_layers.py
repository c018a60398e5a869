"""What stands between the products of a layer equals its references."""

import pytest
import torch

from draftmill.decoders.kernels import layers
from draftmill.decoders.kernels.trial import problem
from tests.decoders.references import kernels as reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(run, dtype):
    """The results of the kernels and of their references are close."""
    found, expected = run(layers), run(reference.LAYERS)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [64, 100])
def test_a_sum_and_its_norm(dtype, width):
    def run(kernels):
        states, weight = normal(0, 5, width, dtype=dtype), normal(1, width, dtype=dtype)
        first = kernels.add_norm(states, None, weight, 1e-5)
        assert torch.equal(states, normal(0, 5, width, dtype=dtype))
        return first, kernels.add_norm(states, normal(2, 5, width, dtype=dtype), weight, 1e-3), states

    both(run, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("num_heads", "key_heads", "width", "normed"), [(4, 2, 16, False), (3, 3, 20, True), (6, 1, 32, True)]
)
def test_queries_turn_and_keys_and_values_go_to_their_cells(dtype, num_heads, key_heads, width, normed):
    def run(kernels):
        heads = normal(0, 4, num_heads + 2 * key_heads, width, dtype=dtype)
        norms = (normal(1, width, dtype=dtype), normal(2, width, dtype=dtype), 1e-5) if normed else None
        pool, turn = heads.new_zeros(2, 11, key_heads, width), (1.0 / 100 ** torch.linspace(0, 1, width // 2), 1.3)
        kernels.rotate(heads, torch.tensor([0, 5, 17, 3000]), torch.tensor([10, 0, 4, 5]), pool, turn, norms)
        assert not pool[:, [1, 2, 3, 6, 7, 8, 9]].any() and torch.equal(
            pool[1, 4], normal(0, 4, num_heads + 2 * key_heads, width, dtype=dtype)[2, -key_heads:]
        )
        return heads[:, :num_heads], pool

    both(run, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_gates_open_and_close(dtype):
    both(lambda kernels: (kernels.gated(4 * normal(0, 3, 2 * 1500, dtype=dtype)),), dtype)


@pytest.mark.parametrize("count", [0, 1])
def test_no_row_and_one(count):
    states = normal(0, count, 32)
    assert layers.add_norm(states, states, torch.ones(32), 1e-5).shape == (count, 32)
    assert layers.gated(states).shape == (count, 16)
    layers.rotate(
        states.view(count, 4, 8),
        torch.zeros(count),
        torch.zeros(count).long(),
        torch.zeros(2, 3, 1, 8),
        (torch.ones(4), 1.0),
        None,
    )


def test_the_trial_of_a_device_passes():
    problem.cache_clear()
    cpu = torch.device("cpu")
    for dtype in TOLERANCE:
        assert problem("layers", cpu, dtype, num_heads=4, key_heads=2, width=20) is None
