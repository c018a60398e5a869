"""Packed products: the numbers of `functional.linear`, the same bits in any company."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from draftmill.decoders.backbones.invariance import rows_exact
from draftmill.decoders.backbones.packed import PackedLinear, block_of_rows, can_pack, replace_products

PACKED = [dtype for dtype in (torch.float32, torch.bfloat16) if can_pack(dtype, torch.device("cpu"))]
needs_packing = pytest.mark.skipif(
    not can_pack(torch.float32, torch.device("cpu")), reason="this build of torch does not pack weights"
)


def random_layer(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator), torch.randn(shape[0], generator=generator)


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("biased", [True, False])
def test_a_packed_layer_gives_the_products_of_a_plain_one(biased, dtype):
    weight, bias = (part.to(dtype) for part in random_layer(24, 40))
    rows = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = functional.linear(rows, weight, bias if biased else None)
    close = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(PackedLinear(weight, bias if biased else None)(rows), expected, atol=close, rtol=close)


@pytest.mark.parametrize("dtype", PACKED)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype):
    weight, _ = random_layer(70, 129)
    rows = torch.randn(300, 129, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert rows_exact(PackedLinear(weight.to(dtype), None), rows, 1)


@needs_packing
def test_both_kinds_of_layers_are_replaced_and_nothing_else():
    module = nn.Sequential(nn.Linear(6, 4), nn.Sequential(nn.GELU(), Conv1D(3, 4)))
    apart = nn.ModuleList([nn.Embedding(5, 6), module])
    rows = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = module(rows)
        replace_products(apart, PackedLinear)
        after = module(rows)
    assert [type(part) for part in apart.modules() if not list(part.children())] == [
        nn.Embedding,
        PackedLinear,
        nn.GELU,
        PackedLinear,
    ]
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


def test_only_float32_and_bfloat16_on_a_cpu_are_packed():
    assert not can_pack(torch.float16, torch.device("cpu"))
    assert not can_pack(torch.float64, torch.device("cpu"))
    assert not can_pack(torch.float32, torch.device("cuda"))


@pytest.mark.parametrize(("count", "rounded"), [(1, 1), (8, 8), (9, 16), (64, 64), (65, 72)])
def test_many_rows_come_in_blocks(count, rounded):
    assert block_of_rows(count) == rounded
