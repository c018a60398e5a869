"""Products of packed and of small weights: their numbers, the same rows in any batch, and lossless decoders on them."""

import os
import subprocess
import sys
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from draftmill.decoders.backbones.families.rotary import MixtureShape
from draftmill.decoders.backbones.invariance import rows_exact
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.moe import Mixture
from draftmill.decoders.backbones.packed import PackedLinear, block_of_rows, can_pack, replace_products
from draftmill.decoders.backbones.rows import causal_rows
from draftmill.decoders.backbones.small_weights import (
    SmallEmbedding,
    SmallLinear,
    adds_exactly,
    integer_sums,
    packed_sums,
    shrink_products,
    turn_rows,
)
from tests.decoders.backbones.causal_models import decode_with_rejections, plain_layer, random_tokens, save_random

KINDS = ("int8", "int4", "fp8")
SIZES = {"hidden_size": 64, "intermediate_size": 96}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def small(kind, dtype=torch.float32, *, shape=(48, 128), bias=None, **how):
    """A small layer, with a buffer, and the weight that it was made of."""
    weight_MK = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 0.1).to(dtype)
    weight_MK[3] = 0
    layer = SmallLinear(weight_MK, bias, kind, **how)
    layer.buffer = torch.full((weight_MK.numel() + 7,), float("nan"), dtype=dtype)
    return layer, weight_MK


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_numbers_of_the_codes(kind, dtype):
    bias_M = torch.linspace(-1, 1, 48).to(dtype)
    layer, weight_MK = small(kind, dtype, bias=bias_M)
    scale, code = layer.scale_MG1.double(), layer.code_MK
    if kind == "int4":
        halves = torch.stack([code & 15, (code >> 4) & 15], 2).flatten(1)
        numbers = (halves.double().unflatten(1, (-1, 64)) * scale + layer.low_MG1.double()).flatten(1)
    else:
        numbers = code.double() * scale[:, 0]
    step = {"int8": 1 / 254, "int4": 1 / 12, "fp8": 1 / 16}[kind]  # of the row's or the number's own size
    largest = weight_MK.double().abs().amax(1, keepdim=True)
    near = weight_MK.double().abs() if kind == "fp8" else largest
    rounding = 8 * torch.finfo(dtype).eps * largest + 2**-9 * scale[:, 0]
    assert ((numbers - weight_MK.double()).abs() <= step * near + rounding).all()
    rows = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = rows.double() @ numbers.T + bias_M.double()
    # Rows of int8 are rounded to 16 bits of their largest number.
    rounding = (rows.abs().amax() / 65024).double() * numbers.abs().sum(1).max() if kind == "int8" else 0.0
    close = 16 * torch.finfo(dtype).eps * expected.abs().max() + rounding
    assert (layer(rows).double() - expected).abs().max() <= close


def test_every_fp8_code_is_read_as_torch_reads_it():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    finite = codes.float().isfinite()
    for dtype in DTYPES:
        layer = SmallLinear(torch.ones(1, 256, dtype=dtype), None, "fp8")
        layer.code_MK, layer.buffer = codes, torch.empty(256, dtype=dtype)
        assert torch.equal(layer._codes()[finite], codes.float()[finite].to(dtype))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_on_a_grid_of_four_bits_keep_their_places(dtype, group):
    generator = torch.Generator().manual_seed(0)
    code = torch.randint(2, 14, (48, 256), generator=generator)
    zero, scale = (torch.rand(48, 256 // group, generator=generator) for _ in range(2))
    scale = (scale * 0.01 + 0.002).half().float()
    zero_MK, scale_MK = ((zero * 16).int().repeat_interleave(group, 1), scale.repeat_interleave(group, 1))
    layer = SmallLinear(((code - zero_MK) * scale_MK).to(dtype), None, "int4")
    low_MG1 = layer.low_MG1
    assert low_MG1 is not None and low_MG1.shape[1] == 256 // min(group, 64)
    codes = layer.code_MK
    halves = torch.stack([codes & 15, (codes >> 4) & 15], 2).flatten(1)
    numbers = (halves.double().unflatten(1, (low_MG1.shape[1], -1)) * layer.scale_MG1 + low_MG1).flatten(1)
    steps = numbers / scale_MK + zero_MK - code
    assert steps.abs().max() < (1e-5 if dtype == torch.float32 else 0.15)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_large_products_of_codes_do_not_leave_half_precision(kind):
    layer = SmallLinear(torch.full((4, 4096), 0.001, dtype=torch.float16), None, kind)
    layer.buffer = torch.empty(4 * 4096, dtype=torch.float16)
    assert layer(torch.full((2, 4096), 8.0, dtype=torch.float16)).isfinite().all()


@pytest.mark.parametrize("width", [1, 64, 1024, 1536, 5000])
def test_sums_of_codes_are_exact_packed_and_by_parts(width):
    rows = torch.randint(-128, 128, (6, width), dtype=torch.int8, generator=torch.Generator().manual_seed(0))
    matrix = torch.randint(-127, 128, (9, width), dtype=torch.int8, generator=torch.Generator().manual_seed(1))
    rows[0], rows[1], matrix[0], matrix[1] = 127, -128, 127, -127  # the largest sums, and the least
    expected = (rows.double() @ matrix.double().T).float()
    sums = [lambda part: integer_sums(part, matrix)]
    if adds_exactly():
        packed = torch.ops.onednn.qlinear_prepack(matrix, [1, width]), torch.ones(9), torch.zeros(9, dtype=torch.int32)
        sums.append(lambda part: packed_sums((part.int() + 128).to(torch.uint8), *packed))
    for each in sums:
        assert torch.equal(each(rows), expected)
        assert torch.equal(each(rows[2:3]), expected[2:3])


@pytest.mark.parametrize("how", [{}, {"one_code": True}, {"turns": True}], ids=str)
@pytest.mark.parametrize("bias_M", [None, torch.linspace(-1, 1, 48)])
def test_a_packed_layer_gives_the_same_bits_and_drops_its_plain_codes(bias_M, how):
    if not adds_exactly():
        pytest.skip("this CPU has no exact products of codes")
    (layer, _), rows = (
        small("int8", bias=bias_M, **how),
        torch.randn(300, 128, generator=torch.Generator().manual_seed(1)),
    )
    expected, weight_MK = layer(rows), layer.weight_MK()
    layer.pack()
    assert torch.equal(layer(rows), expected) and torch.equal(layer.weight_MK(), weight_MK)
    assert layer.code_MK.numel() == 0


@pytest.mark.slow
def test_integers_have_the_same_bits_on_a_processor_of_fewer_instructions():
    """oneDNN's variable takes away the instructions that add products of codes in 32 bits."""
    work = (
        "import torch\n"
        "from draftmill.decoders.backbones.small_weights import SmallEmbedding, SmallLinear, adds_exactly\n"
        "number = lambda *shape: torch.randn(*shape, generator=torch.Generator().manual_seed(0))\n"
        "for turns in (False, True):\n"
        "    layer = SmallLinear(number(48, 1536), number(48), 'int8', turns=turns)\n"
        "    embeddings = SmallEmbedding(layer)(torch.arange(48)).tolist()\n"
        "    adds_exactly() and layer.pack()\n"
        "    print(layer(number(7, 1536)).tolist(), embeddings)\n"
    )
    found = []
    for more in ({}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}):
        done = subprocess.run(
            [sys.executable, "-c", work], env=os.environ | more, capture_output=True, text=True, check=True
        )
        found.append(done.stdout)
    assert found[0] == found[1] and found[0].count("\n") == 2


def test_turns_spread_outliers_and_undo_themselves():
    rows = torch.zeros(2, 96)
    rows[0, 5], rows[1] = 8.0, torch.randn(96, generator=torch.Generator().manual_seed(0))
    turned = turn_rows(rows)  # in blocks of 32
    assert torch.equal(turned[0].abs(), torch.tensor([8 / 32**0.5] * 32 + [0.0] * 64))
    torch.testing.assert_close(turned.norm(dim=1), rows.norm(dim=1))
    torch.testing.assert_close(turn_rows(turned), rows)
    assert torch.equal(turn_rows(rows[1:]), turned[1:])
    assert torch.equal(turn_rows(rows, 4)[0].abs().nonzero()[:, 0], torch.arange(4, 8))  # of heads, in smaller blocks


def test_one_code_is_as_good_as_two_where_rows_are_turned():
    """A row with an outlier: in one code it loses the other numbers, unless they are turned."""
    rows = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    rows[:, 7] *= 60
    errors = []
    for how in ({}, {"turns": True}, {"one_code": True}):
        layer, weight_MK = small("int8", **how)
        expected = rows.double() @ weight_MK.double().T
        errors.append(float((layer(rows).double() - expected).norm() / expected.norm()))
    assert errors[1] < 1.1 * errors[0] and errors[2] > 3 * errors[1]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_network_computes_the_same_in_turned_states(tmp_path, name):
    """Whether weights take in all turns: then, rounding aside, no state that a reader sees changes."""
    save_random(tmp_path, name, hidden_size=48, head_dim=16, num_hidden_layers=2)
    backbone, tokens = load(tmp_path, "auto", "float64"), random_tokens(9, seed=1)
    found = []
    for is_turned in (False, True):
        if is_turned:
            backbone.base.turn(plain_layer)
            backbone.bind()
        backbone.base.taps = frozenset({1, 2})
        backbone.allocate(1, 16)
        hidden = backbone.forward(causal_rows([0], [9], [0], torch.tensor(tokens)))
        found.append([hidden, *(backbone.base.tapped[layer][:9] for layer in (1, 2))])
    assert backbone.base.is_turned
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


def test_a_row_of_int8_that_is_not_finite_stays_so_alone():
    layer, _ = small("int8")
    rows = torch.ones(3, 128)
    rows[1, 5], rows[2, 7] = torch.nan, torch.inf
    found = layer(rows)
    assert torch.equal(found[0], layer(rows[:1])[0]) and found[0].isfinite().all()
    assert not found[1].isfinite().any() and not found[2].sum().isfinite()


@pytest.mark.parametrize(("kind", "most"), [("int8", 1.05), ("int4", 0.65), ("fp8", 1.05)])
def test_a_layer_holds_its_codes_and_few_other_bytes(kind, most):
    layer, weight_MK = small(kind, torch.bfloat16)
    held = sum(buffer.numel() * buffer.element_size() for buffer in layer.buffers())
    assert held <= most * weight_MK.numel()


def load(folder, kind, dtype="float32"):
    return load_backbone(folder, dtype=dtype, device="cpu", small=kind)


NAMES = ("llama", "qwen3", "gpt2", "gpt_neo")


@pytest.mark.parametrize(("name", "kind"), [*product(NAMES, KINDS), ("llama", "w8a8"), ("qwen3", "w8a8")])
def test_rows_have_the_same_bits_in_any_batch(tmp_path, name, kind):
    sizes = {"n_embd": 96} if name == "gpt2" else {"hidden_size": 96, "intermediate_size": 64, "num_heads": 3}
    sizes = {key: value for key, value in sizes.items() if key != "num_heads" or name == "gpt_neo"}
    save_random(tmp_path, name, **sizes, **({"head_dim": 16} if kind == "w8a8" else {}))
    backbone, full = load(tmp_path, kind), load(tmp_path, "auto")
    assert backbone.exact
    layers = [part for part in backbone.base.modules() if isinstance(part, SmallLinear)]
    assert len({id(part.buffer) for part in layers}) == 1
    texts = {slot: random_tokens(9 + slot, seed=slot) for slot in range(3)}
    together = decode_with_rejections(backbone, texts, prompts={0: 4, 1: 2, 2: 7})
    alone = decode_with_rejections(backbone, {1: texts[1]}, prompts={1: 2}, junk_seed=5)
    assert torch.equal(together[1], alone[1])
    assert torch.equal(backbone.logits(together[1])[:1], backbone.logits(alone[1][:1]))
    exact = decode_with_rejections(full, texts, prompts={0: 4, 1: 2, 2: 7})
    error = (together[0] - exact[0]).norm() / exact[0].norm()
    assert 0 < error < {"int8": 0.2, "w8a8": 0.2, "fp8": 0.5, "int4": 0.9}[kind]


@pytest.mark.parametrize("kind", ["int8", "w8a8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_tied", [True, False])
def test_tied_embeddings_share_the_codes_of_the_output_layer(tmp_path, is_tied, dtype, kind):
    save_random(tmp_path, "llama", tie_word_embeddings=is_tied, **SIZES)
    name = str(dtype).removeprefix("torch.")
    backbone, full = load(tmp_path, kind, name), load(tmp_path, "auto", name)
    head, tokens = backbone.head, torch.arange(61)
    assert isinstance(head, SmallLinear) and head is backbone.model.lm_head
    table = backbone.base.word_embeddings
    assert isinstance(table, SmallEmbedding) == is_tied
    if is_tied:
        assert torch.equal(backbone.embed(tokens), head.weight_MK())
    expected = full.embed(tokens).float()
    # A code is half a step off; turning a block back adds up to a root of its width of those.
    largest, steps = (turn_rows(expected), 8) if kind == "w8a8" else (expected, 1)
    step = largest.abs().amax(1, keepdim=True) * (steps / 254 + 8 * torch.finfo(dtype).eps if is_tied else 0)
    assert ((backbone.embed(tokens).float() - expected).abs() <= step).all()
    assert torch.equal(backbone.embed(tokens), table(tokens))


def test_routers_stay_as_they_are_and_experts_become_small():
    mixture = Mixture(64, MixtureShape(inner=32, num_experts=4, num_chosen=2, normalise=True))
    for parameter in mixture.parameters():
        nn.init.normal_(parameter, std=0.1)
    rows_ND = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    expected = mixture(rows_ND)
    model = nn.Module()
    model.mixture = mixture
    shrink_products(model, "int8", torch.device("cpu"))
    assert type(mixture.gate).__name__ == "UnsetLinear" and isinstance(mixture.experts[3].down_proj, SmallLinear)
    error = (mixture(rows_ND) - expected).norm() / expected.norm()
    assert 0 < error < 0.05


def test_what_has_no_small_form_is_refused(tmp_path):
    save_random(tmp_path, "gpt2")  # its width is 24
    with pytest.raises(ValueError, match=r"^model.weights: int4, but a layer has 24 inputs; allowed: auto, int8, fp8$"):
        load_backbone(tmp_path, device="cpu", small="int4")
    save_random(tmp_path / "odd", "qwen3")  # its heads are 24 wide
    for folder, family in ((tmp_path, "gpt2"), (tmp_path / "odd", "qwen3")):
        with pytest.raises(
            ValueError, match=f"'w8a8' is for networks of our own .*; allowed for family '{family}': auto, int8"
        ):
            load_backbone(folder, device="cpu", small="w8a8")
    with pytest.raises(ValueError, match=r"model.weights: int8, but Conv1d has no small form; allowed: auto"):
        shrink_products(nn.Sequential(nn.Conv1d(2, 3, 4)), "int8", torch.device("cpu"))


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
