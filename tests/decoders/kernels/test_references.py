"""What flat rows see, how they are cut into tiles, the references, and the switch; all without Triton."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from draftmill.decoders.kernels import find, trial
from draftmill.decoders.kernels.find import VARIABLE, why_no_kernels
from draftmill.decoders.kernels.seen import Seen, Tiling, line_bytes
from tests.decoders.references import kernels as reference
from tests.decoders.replaying import attend_by_slots


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([5, 1, 2], {16: [0, 4, 5, 6]}),  # four rows of four heads in a tile
        ([1, 1, 1], {16: [0, 1, 2]}),
        ([5, 9, 1], {64: [0, 5, 14]}),
        ([1, 17, 40], {16: [0], 128: [1, 18, 50]}),
        ([17, 17], {128: [0, 17]}),
        ([1, -3, 2, -1], {16: [0, 1, 4, 6]}),  # so many dead rows
        ([17, -20], {128: [0, 17]}),
    ],
)
def test_slots_with_few_rows_have_tiles_of_few_lines(counts, expected):
    line_N = np.concatenate([np.arange(count) if count > 0 else np.full(-count, -1) for count in counts])
    if counts == [5, 1, 2]:
        expected = {64: [0, 5, 6]}  # the smallest tile that holds the rows of each
    tiling = Tiling(group=4)
    found = tiling.cut(line_N)
    assert {lines: first_T.tolist() for lines, first_T in found.items()} == expected
    for lines, first_T in found.items():
        assert len(first_T) <= tiling.most_tiles(lines, len(counts), len(line_N))


def test_tiles_have_few_sizes_that_fit_the_heads():
    assert [Tiling(group).sizes for group in (1, 8, 20, 500)] == [(16, 64, 128), (16, 64, 128), (32, 64, 128), (512,)]
    cpu = torch.device("cpu")
    assert Tiling.of(cpu, torch.float32, group=4, width=128).sizes == (16, 32)
    assert Tiling.of(cpu, torch.bfloat16, group=4, width=256).sizes == (16, 64)
    assert Tiling.of(cpu, torch.bfloat16, group=4, width=128, fixed=True).sizes == (64,)
    assert Tiling.of(cpu, torch.float32, group=1, width=64, relative=True, fixed=True).sizes == (32,)
    assert Tiling.of(cpu, torch.bfloat16, group=1, width=64, relative=True).sizes == (16, 64)


def test_the_rows_after_others_see_what_they_saw():
    slots, low, high = torch.tensor([0, 0, 1]), torch.tensor([[0, 2, 1]]), torch.tensor([[3, 4, 1]])
    whole = Seen(slots, low, high, position_N=slots, positions_SW=torch.zeros(2, 5, dtype=torch.int64))
    part = whole.after(1)
    assert torch.equal(part.visible_NW(5, 1), whole.visible_NW(5, 1)[1:]) and part.skip == 1


def test_the_reference_is_attention_under_a_mask_of_the_intervals():
    generator = torch.Generator().manual_seed(0)
    query, layer = torch.randn(4, 6, 10, generator=generator), torch.randn(2, 2, 2, 9, 10, generator=generator)
    slots = torch.tensor([1, 0, 1, 1])
    low, high = torch.tensor([[0, 0, 4, 5], [3, 8, 0, 5]]), torch.tensor([[4, 1, 6, 5], [7, 9, 0, 2]])
    columns = [{0, 1, 2, 3, 4, 5, 6}, {0, 8}, {4, 5}, set()]
    found = reference.attend(query, layer, Seen(slots, low, high), scaling=0.5)
    for row, seen in enumerate(columns):
        mask = torch.tensor([column in seen for column in range(9)])
        key, value = layer[:, slots[row]].repeat_interleave(3, 1)
        expected = functional.scaled_dot_product_attention(
            query[row].unsqueeze(1), key, value, attn_mask=mask, scale=0.5
        )
        torch.testing.assert_close(found[row], expected.squeeze(1) if seen else torch.zeros(6, 10))
    by_slots = attend_by_slots(query.double(), layer.double(), Seen(slots, low, high), scaling=0.5)
    torch.testing.assert_close(by_slots.float(), found)


def test_the_reference_of_a_fixed_product_gives_a_row_the_same_bits_in_any_batch():
    rows, weight, bias = torch.randn(40, 130), torch.randn(24, 130), torch.randn(24)
    found = reference.fixed_product(rows, weight, bias)
    torch.testing.assert_close(found, functional.linear(rows, weight, bias))
    for some in (slice(3, 4), slice(10, 27)):
        assert torch.equal(reference.fixed_product(rows[some], weight, bias), found[some])
    heads = torch.randn(2, 24, 65)
    found = reference.fixed_product(rows.view(40, 2, 65), heads)
    torch.testing.assert_close(found, torch.einsum("nhk,hmk->nhm", rows.view(40, 2, 65), heads))


@pytest.fixture
def gpu(monkeypatch):
    """A machine with an H100, Triton and a compiler."""
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: name)
    return torch.device("cuda")


def test_kernels_are_for_gpus_and_can_be_turned_off(monkeypatch, gpu):
    assert why_no_kernels(gpu) is None and why_no_kernels(torch.device("cpu")) is not None
    monkeypatch.setenv(VARIABLE, "0")
    assert why_no_kernels(gpu) == "DRAFTMILL_KERNELS is 0"
    monkeypatch.setenv(VARIABLE, "off")
    with pytest.raises(ValueError, match="DRAFTMILL_KERNELS: 'off' is not allowed; allowed: 0, 1"):
        why_no_kernels(gpu)


def test_kernels_that_are_not_used_have_a_reason(monkeypatch, gpu):
    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.get_device_capability", lambda device: (7, 0))
        assert "this GPU has compute capability 7.0; the kernels are for 7.5" in str(why_no_kernels(gpu))
    with monkeypatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        assert why_no_kernels(gpu) == "Triton is not installed"
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "there is no C compiler" in str(why_no_kernels(gpu))
    with monkeypatch.context() as patch:
        patch.setattr("torch.version.cuda", None)
        assert why_no_kernels(gpu) == "they are for NVIDIA GPUs"


def test_a_kernel_that_is_demanded_is_there_or_refused_with_the_reason(monkeypatch, gpu):
    monkeypatch.setenv(VARIABLE, "0")
    refusal = (
        "model.exact: true needs the kernel for fixed products on a GPU, and here it is off: DRAFTMILL_KERNELS is 0;"
    )
    with pytest.raises(ValueError, match=refusal):
        find.find_fixed_product(gpu, torch.bfloat16)
    with pytest.raises(ValueError, match="off: float64 is computed by torch; decode in bfloat16, float16 or float32"):
        find.find_fixed_product(gpu, torch.float64)
    with pytest.raises(ValueError, match="needs the kernel for attention on a GPU"):
        find.find_attention(gpu, torch.bfloat16, fixed=True)
    assert find.find_attention(gpu, torch.bfloat16) is None


def test_what_was_found_of_each_kernel_is_noted_for_who_asked(monkeypatch, gpu):
    monkeypatch.setenv(VARIABLE, "0")
    with find.noting() as found:
        assert find.find_product(gpu, torch.float32) is None
        with find.noting() as other:
            assert find.find_product(gpu, torch.float64) is None and find.find_sampling(gpu, torch.float64) is None
    assert found == {"experts": "off: DRAFTMILL_KERNELS is 0"}
    assert other == dict.fromkeys(("experts", "sampling"), "off: float64 is computed by torch")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [16, 20, 64, 96, 128, 192, 256])
def test_the_largest_tile_of_any_heads_fits_into_the_shared_memory_of_every_gpu_since_ampere(dtype, width):
    attention = pytest.importorskip("draftmill.decoders.kernels.attention")
    line = line_bytes(width, dtype)
    tile = Tiling.of(torch.device("cpu"), dtype, group=1, width=width).most
    block = attention._block(width, torch.zeros(1, dtype=dtype))
    assert tile * line + 2 * attention._STAGES * block * line <= 99 * 1024
    assert tile >= 16 and block >= 16, "tensor cores multiply 16 lines at a time"


def test_a_kernel_is_tried_once_a_process(monkeypatch):
    tried = []

    def wrong(name):
        def one(*_, **__):
            tried.append(name)
            yield torch.zeros(1), torch.ones(1)

        return one

    for name in ("attention", "sampling"):
        monkeypatch.setitem(trial.TRIALS, name, wrong(name))
    trial.problem.cache_clear()
    monkeypatch.setattr(find, "why_no_kernels", lambda device: None)
    device, half = torch.device("cpu"), torch.bfloat16
    with find.noting() as found:
        for _ in range(3):
            for dtype in (torch.float32, half):
                assert find.find_sampling(device, dtype) is None
            for heads in (2, 4):
                assert find.find_attention(device, half, num_heads=heads, key_heads=2, width=8) is None
    trial.problem.cache_clear()
    assert tried == ["sampling", "attention", "attention"], "once for both dtypes, once for each kind of heads"
    assert found["sampling"] == "off: is wrong here by up to 1"
