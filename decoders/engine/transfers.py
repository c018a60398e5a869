"""What crosses from the host to the device, and the seconds that the device was at work.

A transfer from pageable memory waits for the device; one from pinned memory does not. Seconds on a GPU are read from events when
something else has waited for the device anyway, so that timing never waits by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_T = TypeVar("_T")


def put(numbers: NDArray[np.generic], device: torch.device) -> Tensor:
    """Bring numbers to the device, without waiting for it."""
    held = torch.from_numpy(numbers)
    return held if device.type == "cpu" else held.pin_memory().to(device, non_blocking=True)


def marks(ids: Sequence[int], size: int, device: torch.device) -> Tensor:
    """True at these places among so many, on the device."""
    marked = np.zeros(size, dtype=np.bool_)
    marked[list(ids)] = True
    return put(marked, device)


class Coming:
    """Numbers on their way from the device to the host; other work may be started on the device before they are read."""

    def __init__(self, found: Tensor) -> None:
        self._copied: torch.cuda.Event | None = None
        if found.device.type == "cpu":
            # The memory may be a captured forward's, which the next one fills again.
            self._host = found.clone()
            return
        self._host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        self._host.copy_(found, non_blocking=True)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def numbers(self) -> NDArray[np.float64]:
        """What has come; waits for it, and for nothing that was started later."""
        if self._copied is not None:
            self._copied.synchronize()
        found: NDArray[np.float64] = self._host.numpy()
        return found


class Laps:
    """The seconds of calls, on a GPU between pairs of events."""

    def __init__(self) -> None:
        self.seconds = list[float]()
        self.events = list[tuple[torch.cuda.Event, torch.cuda.Event]]()

    def read(self) -> list[float]:
        """The seconds of each call. On a GPU something must have waited for them: then this does not wait."""
        for began, ended in self.events:
            ended.synchronize()
            self.seconds.append(began.elapsed_time(ended) / 1000.0)
        self.events.clear()
        return self.seconds


class Clock:
    """Times calls one by one; on a GPU by the device's own events around each."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._laps = Laps()
        self._is_paused = False

    def timed(self, function: Callable[[], _T]) -> _T:
        """Call and time a function; calls inside of `whole` are timed with it."""
        if self._is_paused:
            return function()
        if self._on_gpu:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            result = function()
            ended.record()
            self._laps.events.append((began, ended))
            return result
        began_s = time.perf_counter()
        result = function()
        self._laps.seconds.append(time.perf_counter() - began_s)
        return result

    def whole(self, function: Callable[[], _T]) -> _T:
        """Time a function as one lap, whatever it times itself."""

        def paused() -> _T:
            self._is_paused = True
            try:
                return function()
            finally:
                self._is_paused = False

        return self.timed(paused)

    def cut(self) -> Laps:
        """The calls since this was last asked."""
        laps, self._laps = self._laps, Laps()
        return laps

    def laps(self) -> list[float]:
        """Their seconds. On a GPU an answer must have come since: then nothing waits."""
        return self.cut().read()
