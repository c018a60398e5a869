"""Classifies an exception of a decoder: memory ran out, the device is lost, or neither.

After an out-of-memory error, memory is available again once the batch is dropped. A lost device (an illegal address, a
device-side assertion, an uncorrectable memory error) rejects every later call of the same process, so only another process can
continue. Errors are recognised by class, or by text if a library has no class for them. Does not import torch: a process that
has not loaded it uses no device.

Source: CUDA runtime API, "CUDA Error types" (which errors leave the process in an inconsistent state).
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator

_MEMORY = (
    *("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory"),
    # cuBLAS creates its handle at the first call, and reports the second error if memory for the handle is missing.
    *("cublas_status_alloc_failed", "cublas_status_not_initialized", "cudnn_status_alloc_failed"),
    *("unable to find an engine to execute this computation", "unable to find a valid cudnn algorithm"),
)
# decoders/backbones/split.py: without the other processes of its model, this one can decode nothing, whatever they died of.
_GROUP = "group of processes of this model is lost"
_LOST = (
    *("illegal memory access", "device-side assert", "illegal instruction", "illegal address", "misaligned address"),
    *("invalid program counter", "unspecified launch failure", "launch timed out", "hardware stack error"),
    *("ecc error", "nvlink error", "device is lost", "cuda_error_launch_failed", "cuda_error_assert"),
    *("cublas_status_execution_failed", "cudnn_status_execution_failed", "cudnn_status_internal_error"),
    _GROUP,
)
# Only one call failed: the device still works.
_REFUSED = (
    "invalid argument",
    "invalid configuration",
    "invalid device function",
    "too many resources",
    "not supported",
)


class DeviceLostError(RuntimeError):
    """The device rejects all further work of this process: the worker has to end."""


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the host or on a device, according to the error or one of its causes."""
    return not _says(error, (_GROUP,)) and any(
        isinstance(cause, MemoryError) or _is_torchs(cause, "OutOfMemoryError") or _says(cause, _MEMORY)
        for cause in _chain(error)
    )


def lost_device(error: BaseException) -> bool:
    """Whether no later call of this process can succeed on its device. Out of memory does not count as lost."""
    # torch's AcceleratorError is for errors of the device's runtime; few of them leave the device usable.
    return not ran_out_of_memory(error) and any(
        _says(cause, _LOST) or (_is_torchs(cause, "AcceleratorError") and not _says(cause, _REFUSED))
        for cause in _chain(error)
    )


def let_go(error: BaseException) -> None:
    """Free the objects held by an error's frames, and the device allocator's cached memory."""
    for cause in _chain(error):
        traceback.clear_frames(cause.__traceback__)
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _is_torchs(error: BaseException, name: str) -> bool:
    kind = getattr(sys.modules.get("torch"), name, None)
    return kind is not None and isinstance(error, kind)


def _says(error: BaseException, texts: tuple[str, ...]) -> bool:
    message = str(error).lower()
    return any(text in message for text in texts)
