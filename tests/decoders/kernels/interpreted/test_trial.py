"""The trial that a worker makes on its device: it passes here, and finds kernels that are wrong or fail."""

import logging
import subprocess

import pytest
import torch

from draftmill.decoders.kernels import attention, experts, products, sampling
from draftmill.decoders.kernels.seen import Tiling
from draftmill.decoders.kernels.trial import TRIALS, problem

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def forget():
    """The trials remember what they found."""
    problem.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_work_in_the_interpreter(dtype):
    heads = {"num_heads": 3, "key_heads": 1, "width": 20}
    assert problem("attention", CPU, dtype, **heads, relative=dtype == torch.float32) is None
    assert problem("attention", CPU, dtype, **heads, plain=False) is None
    assert all(problem("experts", CPU, dtype, fixed=fixed) is None for fixed in (False, True))
    assert problem("fixed products", CPU, dtype) is None


def test_sampling_works_in_the_interpreter():
    assert problem("sampling", CPU, torch.float32) is None


def test_a_wrong_kernel_is_found(monkeypatch, caplog):
    plain = experts.product
    monkeypatch.setattr(experts, "product", lambda *args: plain(*args) * 1.01)
    with caplog.at_level(logging.WARNING):
        assert str(problem("experts", CPU, torch.float32, fixed=False)).startswith("is wrong here by up to")
    assert "the kernel for experts is wrong here by up to" in caplog.text


def test_a_product_whose_bits_depend_on_the_number_of_rows_is_found(monkeypatch, caplog):
    plain = products.fixed_product

    def rounded(rows, *more):
        return plain(rows, *more) * (1 + len(rows) * 2**-22)

    monkeypatch.setattr(products, "fixed_product", rounded)
    with caplog.at_level(logging.WARNING):
        assert problem("fixed products", CPU, torch.float32) == "is wrong here by up to 1"


def test_wrong_tokens_are_found(monkeypatch):
    plain = sampling.sample

    def wrong(logits, warp, keys, positions, **more):
        return plain(logits, warp, keys, positions + 1, **more)

    monkeypatch.setattr(sampling, "sample", wrong)
    assert problem("sampling", CPU, torch.float32) is not None


# `make soak` has all of them.
WRONG = [(0, set()), (4, {"wanted"})]
MORE_WRONG = [(1, set()), (1, {"scored_R"}), (0, {"wanted"})]


@pytest.mark.parametrize(
    ("row", "asks"), [*WRONG, *(pytest.param(*wrong, marks=pytest.mark.soak) for wrong in MORE_WRONG)]
)
def test_a_wrong_number_is_found_whatever_is_asked(monkeypatch, caplog, row, asks):
    plain = sampling.sample

    def wrong(*args, **more):
        found = plain(*args, **more)
        if asks <= more.keys() and row < found.shape[1]:
            found[-1, row, 3] += 0.01 if row else 1
        return found

    monkeypatch.setattr(sampling, "sample", wrong)
    with caplog.at_level(logging.WARNING):
        assert problem("sampling", CPU, torch.float32) is not None
    assert "the kernel for sampling is wrong here by up to" in caplog.text


def test_numbers_that_are_not_finite_are_found(monkeypatch):
    monkeypatch.setattr(attention, "attend", lambda query, *_, **__: torch.full_like(query, torch.nan))
    assert problem("attention", CPU, torch.float16, num_heads=2, key_heads=2, width=16) is not None


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler"),
        subprocess.CalledProcessError(1, ["gcc", "main.c"]),
        AssertionError("libcuda.so cannot found!\nPossible files are located at []"),
        PermissionError(13, "Permission denied", "/root/.triton"),
        ImportError("failed to map segment from shared object"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_kernel_that_fails_in_any_way_is_not_used(monkeypatch, caplog, error):
    def failing(*_, **__):
        raise error

    monkeypatch.setattr(attention, "attend", failing)
    with caplog.at_level(logging.WARNING):
        reason = problem("attention", CPU, torch.float32, num_heads=2, key_heads=2, width=16)
    first = str(error).splitlines()[0]
    assert reason == f"fails here: {type(error).__name__}: {first}"
    assert f"the kernel for attention {reason}; torch's own operations run instead" in caplog.text


def test_a_device_that_is_lost_ends_the_worker(monkeypatch):
    """The device is a stand-in: a lost one rejects the call that asks how it is."""
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: (_ for _ in ()).throw(lost))

    def failing(*_):
        raise ValueError("a kernel")

    monkeypatch.setitem(TRIALS, "sampling", failing)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        problem("sampling", torch.device("cuda"), torch.float32)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert problem("sampling", torch.device("cuda"), torch.float32) == "fails here: ValueError: a kernel"


def test_the_trial_has_the_largest_tile(monkeypatch):
    """The first prompt needs more shared memory than any decoding row: a GPU that lacks it says so here, not at each row."""
    plain, lines = attention.attend, []

    def noted(query, layer, seen, **more):
        lines.extend(seen.tables.lines)
        return plain(query, layer, seen, **more)

    monkeypatch.setattr(attention, "attend", noted)
    assert problem("attention", CPU, torch.float32, num_heads=4, key_heads=2, width=128) is None
    assert set(lines) == set(Tiling.of(CPU, torch.float32, group=2, width=128).sizes) == {16, 32}
