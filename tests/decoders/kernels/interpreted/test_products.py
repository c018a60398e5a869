"""The product of fixed tiles equals its reference, and a row has the same bits alone, among others, and anywhere in its tile."""

import pytest
import torch

from draftmill.decoders.kernels import experts
from draftmill.decoders.kernels.products import fixed_product
from tests.decoders.references import kernels as reference

TOLERANCE = {torch.float32: 3e-5, torch.float16: 5e-2, torch.bfloat16: 3e-1}


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 20, 70), (5, 33, 65), (130, 64, 128), (64, 300, 3)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_are_those_of_the_reference(dtype, shape, has_bias):
    num_rows, width_in, width_out = shape
    rows, weight = normal(0, num_rows, width_in, dtype=dtype), normal(1, width_out, width_in, dtype=dtype)
    bias = normal(2, width_out, dtype=dtype) if has_bias else None
    found, expected = (product(rows, weight, bias) for product in (fixed_product, reference.fixed_product))
    assert found.dtype == dtype and found.shape == (num_rows, width_out)
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE[dtype])


def test_each_head_has_weights_of_its_own():
    # XLNet's keys of distances: a part of a wider table, whose rows are its columns.
    rows, table = normal(0, 5, 3, 20), normal(1, 3, 20, 96)
    weights = table[:, :, 16:80].transpose(1, 2)
    found = fixed_product(rows, weights)
    assert found.shape == (5, 3, 64) and found.is_contiguous()
    torch.testing.assert_close(found, torch.einsum("nhk,hmk->nhm", rows, weights), rtol=0, atol=3e-5)
    assert torch.equal(found[2:3], fixed_product(rows[2:3], weights))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_the_same_bits_in_any_batch_and_at_any_place(dtype):
    rows, weight, bias = (
        normal(seed, *shape, dtype=dtype) for seed, shape in enumerate([(300, 200), (72, 200), (72,)])
    )
    whole = fixed_product(rows, weight, bias)
    for row in (0, 31, 63, 64, 250, 299):
        assert torch.equal(fixed_product(rows[row : row + 1], weight, bias)[0], whole[row])
    order = torch.randperm(300, generator=torch.Generator().manual_seed(9))
    for count in (2, 17, 64, 300):
        assert torch.equal(fixed_product(rows[order[:count]], weight, bias), whole[order[:count]])


def test_rows_may_lie_anywhere_in_memory():
    wide, weight = normal(0, 6, 64), normal(1, 10, 21)
    expected = fixed_product(wide[:, 3:24].clone(), weight)
    assert torch.equal(fixed_product(wide[:, 3:24], weight), expected)
    packed = torch.cat([torch.zeros(1), wide[:, 3:24].flatten()])[1:].view(6, 21)
    assert packed.data_ptr() % 16 and torch.equal(fixed_product(packed, weight), expected)


def test_no_rows():
    assert fixed_product(torch.zeros(0, 5), torch.zeros(3, 5)).shape == (0, 3)


def test_a_row_has_the_same_bits_whatever_rows_its_expert_has():
    rows, weights = normal(0, 150, 40), normal(1, 3, 65, 40)
    whole = experts.fixed_product(rows, weights, torch.tensor([10, 110, 150], dtype=torch.int32))
    for row, expert in ((3, 0), (10, 1), (77, 1), (149, 2)):
        ends = torch.tensor([int(expert <= other) for other in range(3)], dtype=torch.int32)
        assert torch.equal(experts.fixed_product(rows[row : row + 1], weights, ends)[0], whole[row])
    expected = reference.product(rows, weights, torch.tensor([10, 110, 150], dtype=torch.int32))
    torch.testing.assert_close(whole, expected, rtol=0, atol=3e-5)
