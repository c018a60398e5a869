"""Every kernel compiles ahead of time, as it is launched, for several GPUs, with shared memory that they all have."""

import importlib.util

import pytest
import torch

from draftmill.decoders.draws.settings import NOTES
from draftmill.decoders.kernels.seen import Seen, Tiling
from tests.decoders.kernels.compiling import compiled, launched, variant
from tests.decoders.references.sampling import warp_of

SHARED_BYTES = 99 * 1024
"""What a program may have on every GPU since Ampere (8.6 and 8.9 have the least)."""

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (the extra gpu)"
)


@pytest.fixture
def launches(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return launched


HALF = torch.bfloat16


def attend(
    dtype,
    heads,
    key_heads,
    width,
    *,
    intervals=1,
    rows_at_once=1,
    window=None,
    relative=False,
    shares=1,
    cap=None,
    sinks=False,
    skip=0,
    columns=256,
):
    def call(module):
        rows = 64
        group, line_N = heads // key_heads, torch.arange(rows) % rows_at_once
        seen = Seen(
            torch.arange(rows) // rows_at_once,
            torch.zeros(intervals, rows, dtype=torch.int64),
            torch.ones(intervals, rows, dtype=torch.int64),
            position_N=torch.arange(rows),
            positions_SW=torch.zeros(rows, columns, dtype=torch.int64),
            tables=Tiling.of(torch.device("cpu"), dtype, group=group, width=width, relative=relative).tables(line_N),
        )
        module.attend(
            torch.zeros(rows - skip, heads, width, dtype=dtype),
            torch.zeros(2, rows, key_heads, columns, width, dtype=dtype),
            seen.after(skip),
            scaling=0.1,
            window=window,
            relative_NHP=torch.zeros(heads, rows - skip, 2 * columns, dtype=dtype).transpose(0, 1)
            if relative
            else None,
            cap=cap,
            sink_H=torch.zeros(heads, dtype=dtype) if sinks else None,
            shares=shares,
        )

    return call


def sample(*, top_k=None, top_p=None, wanted=(), warped=False, number_rows=False, dtype=torch.float32, rows=4):
    def call(module):
        zeros = torch.zeros(rows + 1, dtype=torch.int64)[rows % 2 :][:rows]  # not aligned, where rows are odd
        module.sample(
            torch.zeros(rows, 50000, dtype=dtype),
            warp_of(rows, 50000, temperature=0.5, top_p=0.5 if top_k or top_p else 1.0, top_k=top_k or 0),
            torch.zeros(rows, 2, dtype=torch.int64),
            zeros,
            wanted=wanted,
            warped=warped,
            draw_R=zeros if number_rows else None,
            scored_R=zeros if number_rows else None,
            mask_id=7,
            ahead=1,
        )

    return call


def norm(module):
    states = torch.zeros(4, 4096, dtype=HALF)
    module.add_norm(states, states, torch.zeros(4096, dtype=HALF), 1e-5)


def rotate(module):
    weight, turn = torch.zeros(128, dtype=HALF), (torch.zeros(64), 1.0)
    heads, pool, numbers = torch.zeros(4, 48, 128, dtype=HALF), torch.zeros(2, 99, 8, 128, dtype=HALF), torch.arange(4)
    module.rotate(heads, numbers, numbers, pool, turn, (weight, weight, 1e-5))


def multiply(dtype):
    rows, weights = torch.zeros(512, 2048, dtype=dtype), torch.zeros(64, 768, 2048, dtype=dtype)
    return lambda module: module.triton_product(rows, weights, torch.zeros(64, dtype=torch.int32))


def linear(dtype, rows=64, *, width_in=4096, heads=()):
    weight, bias = torch.zeros(*heads, 512, width_in, dtype=dtype), None if heads else torch.zeros(512, dtype=dtype)
    return lambda module: module.fixed_product(torch.zeros(rows, *heads, width_in, dtype=dtype), weight, bias)


ATTENTION, SAMPLING = ["attend_tiles", "add_shares"], ["sample_rows", "read_parts"]
CASES = {
    "attention, an 8B Llama": ("attention", ATTENTION, "attend_tiles", attend(HALF, 32, 8, 128, rows_at_once=4)),
    "tokens, all warps": ("sampling", SAMPLING, "sample_rows", sample(top_k=20, number_rows=True)),
    "experts": ("experts", ["multiply_tiles"], "multiply_tiles", multiply(HALF)),
    "notes, all warps": (
        "sampling", SAMPLING, "sample_rows", sample(top_k=20, wanted=NOTES, warped=True, number_rows=True)
    ),
    "attention, drafts": ("attention", ATTENTION, "attend_tiles", attend(HALF, 32, 8, 128, rows_at_once=8)),
    "attention, a prompt": ("attention", ATTENTION, "attend_tiles", attend(HALF, 32, 8, 128, rows_at_once=64)),
    "attention, a prompt in float32": (
        "attention", ATTENTION, "attend_tiles", attend(torch.float32, 32, 8, 128, rows_at_once=64)
    ),
    "attention, a prompt in float16": (
        "attention", ATTENTION, "attend_tiles", attend(torch.float16, 32, 8, 128, rows_at_once=64)
    ),
    "layers, norm": ("layers", ["add_norm_rows"], "add_norm_rows", norm),
    "layers, heads": ("layers", ["rotate_heads"], "rotate_heads", rotate),
    "layers, gate": ("layers", ["gate_rows"], "gate_rows", lambda module: module.gated(torch.zeros(4, 28672, dtype=HALF))),
    "attention, two intervals and a window": (
        "attention", ATTENTION, "attend_tiles", attend(torch.float16, 32, 8, 96, intervals=2, window=100)
    ),
    "attention, XLNet": ("attention", ATTENTION, "attend_tiles", attend(HALF, 12, 12, 64, rows_at_once=16, relative=True)),
    "attention, capped": ("attention", ATTENTION, "attend_tiles", attend(HALF, 8, 4, 256, rows_at_once=8, window=100, cap=50.0)),
    "attention, sinks": ("attention", ATTENTION, "attend_tiles", attend(HALF, 64, 8, 64, rows_at_once=8, window=100, sinks=True)),
    "attention, float32 in shares": ("attention", ATTENTION, "attend_tiles", attend(torch.float32, 9, 3, 20, shares=4)),
    "attention, the sum of shares": ("attention", ATTENTION, "add_shares", attend(HALF, 32, 8, 128, shares=4)),
    "fixed product": ("products", ["multiply_rows"], "multiply_rows", linear(HALF)),
    "fixed product, float32": ("products", ["multiply_rows"], "multiply_rows", linear(torch.float32)),
    "fixed product, heads": ("products", ["multiply_rows"], "multiply_rows", linear(HALF, width_in=64, heads=(12,))),
    "tokens, no warp": ("sampling", SAMPLING, "sample_rows", sample(dtype=HALF)),
    "tokens, a part of a row": ("sampling", SAMPLING, "read_parts", sample(dtype=HALF)),
    "tokens, top-p": ("sampling", SAMPLING, "sample_rows", sample(top_p=0.9)),
    "notes, one": ("sampling", SAMPLING, "sample_rows", sample(wanted=("top1",))),
}  # fmt: skip
TENSOR_CORES = [
    name for name in CASES if name.startswith(("attention", "experts", "fixed product")) and "float32" not in name
]
EVERYWHERE = list(CASES)[:4]


@pytest.mark.one_in(21)
@pytest.mark.parametrize(
    ("capability", "name"),
    [(90, name) for name in CASES] + [(other, name) for other in (80, 100) for name in EVERYWHERE],
)
def test_a_kernel_compiles_ahead_of_time(launches, capability, name):
    kernel, launch = launches(*CASES[name])
    made = compiled(kernel, launch, capability)
    assert made.asm["cubin"] and made.metadata.shared <= SHARED_BYTES
    assert f".target sm_{capability}" in made.asm["ptx"]
    if name in TENSOR_CORES and "sum" not in name:
        assert "mma" in made.asm["ptx"], "half precision is multiplied by tensor cores"


PROMPTS = [(HALF, 128), (HALF, 256), (torch.float32, 128)]


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_one_compiled_kernel_serves_all_numbers_of_rows(launches, dtype):
    """What Triton compiles for is the same for one row and for 2,048: so is the order of every sum."""
    case = ("products", ["multiply_rows"], "multiply_rows")
    found = {str(variant(*launches(*case, linear(dtype, rows)))) for rows in (1, 7, 16, 17, 64, 300, 2048)}
    assert len(found) == 1 and ("bf16" in str(found)) == (dtype == HALF)


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize(("dtype", "width"), PROMPTS, ids=["bf16, 128", "bf16, 256", "float32, 128"])
def test_the_largest_tile_of_a_prompt_fits_into_the_least_shared_memory(launches, dtype, width):
    kernel, launch = launches("attention", ATTENTION, "attend_tiles", attend(dtype, 8, 2, width, rows_at_once=64))
    assert launch[2]["LINES"] == Tiling.of(torch.device("cpu"), dtype, group=4, width=width).most
    assert compiled(kernel, launch, 86).metadata.shared <= SHARED_BYTES


def test_a_launch_has_a_program_for_each_tile_and_key_head(launches):
    _, one = launches(*CASES["attention, an 8B Llama"])
    assert one[0] == (16, 8, 1)


def test_content_rows_and_distances_make_no_variants_of_attention(launches):
    """Query rows follow any number of content rows, and the longest canvas says how many distances there are."""
    made = [
        variant(*launches("attention", ATTENTION, "attend_tiles", attend(HALF, 12, 12, 64, relative=True, **options)))
        for options in ({"skip": 16}, {"skip": 1}, {"skip": 2}, {"columns": 200}, {"columns": 253})
    ]
    assert all(one == made[0] for one in made)


@pytest.mark.parametrize(("name", "options"), [("sample_rows", {"top_k": 20}), ("sample_rows", {}), ("read_parts", {})])
def test_rows_and_their_alignment_make_no_variants_of_sampling(launches, name, options):
    made = [
        variant(*launches("sampling", SAMPLING, name, sample(number_rows=True, rows=rows, **options)))
        for rows in (1, 4, 16, 33)
    ]
    assert all(one == made[0] for one in made)
