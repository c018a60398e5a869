"""What errors of a device mean: memory that ran out, a device that is lost, or a row that fails."""

import pickle
import subprocess
import sys

import pytest
import torch

from draftmill.actors.faults import DeviceLostError, let_go, lost_device, ran_out_of_memory
from draftmill.actors.loop.runner import UnitRunner
from draftmill.actors.messages import Receipt
from draftmill.decoders.backbones.split import GroupLostError
from draftmill.decoders.base import Request
from tests.actors.fakes import FakeClerk, FakeDecoder, lose_device, run_all, work

MEMORY = [
    torch.OutOfMemoryError("Tried to allocate 2.00 GiB"),
    torch.cuda.OutOfMemoryError("so full"),
    MemoryError(),
    RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:128] DefaultCPUAllocator: can't allocate memory: you tried to allocate"
    ),
    torch.AcceleratorError("CUDA error: out of memory"),
]
LOST = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    torch.AcceleratorError("CUDA error: something that nobody has seen yet"),
    RuntimeError("CUDA error: device-side assert triggered"),
    RuntimeError("CUDA error: an illegal instruction was encountered"),
    RuntimeError("CUDA error: unspecified launch failure"),
    RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    RuntimeError("CUDA error: misaligned address"),
    GroupLostError("the group of processes of this model is lost: OutOfMemoryError: CUDA out of memory"),
]
NEITHER = [
    RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
    torch.AcceleratorError("CUDA error: invalid configuration argument"),
    ValueError("a canvas without holes"),
    KeyError("memory"),
]


@pytest.mark.parametrize(
    ("kind", "error"),
    [*(("memory", e) for e in MEMORY), *(("lost", e) for e in LOST), *(("neither", e) for e in NEITHER)],
    ids=str,
)
def test_errors_are_known_by_their_classes_and_by_the_texts_of_the_libraries(kind, error):
    assert (ran_out_of_memory(error), lost_device(error)) == (kind == "memory", kind == "lost")


def raised_from(cause: Exception, *, hidden: bool = False) -> Exception:
    try:
        try:
            raise cause
        except Exception as error:  # noqa: BLE001
            raise KeyError("what came of it") from (None if hidden else error)
    except KeyError as error:
        return error


def test_what_an_error_was_raised_from_counts_unless_it_was_hidden_on_purpose():
    assert ran_out_of_memory(raised_from(torch.OutOfMemoryError("full")))
    assert lost_device(raised_from(RuntimeError("CUDA error: device-side assert triggered")))
    assert not ran_out_of_memory(raised_from(torch.OutOfMemoryError("full"), hidden=True))


def test_a_chain_that_leads_back_to_itself_ends():
    first, second = ValueError("one"), ValueError("two")
    first.__cause__, second.__cause__ = second, first
    assert not ran_out_of_memory(first)


def test_errors_are_told_apart_without_torch():
    code = (
        "import sys; from draftmill.actors.faults import ran_out_of_memory, let_go; error = RuntimeError('CUDA out of memory');"
        "assert ran_out_of_memory(error); let_go(error); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_lost_device_ends_the_worker_and_no_row_is_blamed_for_it():
    unit_io = FakeClerk({0: [2, 97, 3]})
    runner = UnitRunner(FakeDecoder(trouble=lose_device), unit_io)
    runner.add(work(0, 3))
    with pytest.raises(DeviceLostError, match="illegal memory access") as caught:
        run_all(runner)
    assert not unit_io.closed
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), DeviceLostError), "it has to reach the driver"


def test_an_allocator_that_can_not_even_free_has_lost_its_device(monkeypatch):
    def trouble(requests: list[Request]) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")

    def refuse() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", refuse)
    runner = UnitRunner(FakeDecoder(trouble=trouble), FakeClerk({0: [2, 2]}))
    runner.add(work(0, 2))
    with pytest.raises(DeviceLostError, match="illegal memory access"):
        run_all(runner)


def test_when_memory_ran_out_the_frames_are_let_go_before_the_allocator_frees(monkeypatch):
    held, freed = [], []

    class Big:
        def __del__(self) -> None:
            held.append("gone")

    def trouble(requests: list[Request]) -> None:
        if len(requests) > 1:
            big = Big()
            raise torch.OutOfMemoryError(f"CUDA out of memory beside {type(big).__name__}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(list(held)))
    runner = UnitRunner(FakeDecoder(max_rows=2, trouble=trouble), FakeClerk({0: [2, 2]}))
    runner.add(work(0, 2))
    (receipt,) = run_all(runner)
    assert isinstance(receipt, Receipt) and receipt.tally.ok == 2
    assert freed == [["gone"]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_memory_of_a_real_device_runs_out_and_comes_back():
    free, _ = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(4 * free, dtype=torch.uint8, device="cuda")
    assert ran_out_of_memory(caught.value) and not lost_device(caught.value)
    let_go(caught.value)
    assert torch.ones(1, device="cuda").item() == 1.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_an_assertion_on_a_real_device_is_a_lost_device():
    code = """
import torch
from draftmill.actors.faults import lost_device
try:
    torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")].sum().item()
except Exception as error:
    assert lost_device(error), repr(error)
else:
    raise SystemExit("no assertion")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
