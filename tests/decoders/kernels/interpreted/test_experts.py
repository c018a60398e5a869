"""The product with the weights of experts equals its reference."""

import pytest
import torch

from draftmill.decoders.kernels import experts
from tests.decoders.references import kernels as reference

TOLERANCE = {torch.float32: 3e-5, torch.float16: 5e-2, torch.bfloat16: 3e-1}


def check(counts, width_in, width_out, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(counts), width_in, generator=generator).to(dtype)
    weights = torch.randn(len(counts), width_out, width_in, generator=generator).to(dtype)
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    found = experts.triton_product(rows, weights, ends)
    assert found.dtype == dtype
    torch.testing.assert_close(found, reference.product(rows, weights, ends), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_experts_with_many_few_and_no_rows(dtype):
    check([3, 0, 37, 1, 0], 20, 70, dtype)


@pytest.mark.parametrize("counts", [[1], [0, 0, 16], [17, 0], [0, 1, 0, 1, 0, 0, 0, 3], [90, 60]])
def test_any_division_of_the_rows(counts):
    check(counts, 33, 65)


def test_no_rows():
    check([0, 0], 20, 3)


def test_the_rows_of_a_larger_matrix():
    rows, weights = torch.randn(6, 64)[:, 8:40], torch.randn(2, 10, 32)
    ends = torch.tensor([2, 6], dtype=torch.int32)
    found, expected = (product(rows, weights, ends) for product in (experts.product, reference.product))
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-5)
