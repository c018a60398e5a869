"""One transfer down a forward: arrays of integers and float64 numbers in one buffer, cut up again on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decoders.engine.packing import Ints


class Parcel:
    """Named arrays on their way to the device."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, tuple[int, ...], bool, Ints]] = []

    def add(self, name: str, array: NDArray[Any]) -> None:
        """Add integers, or float64 numbers, which travel as their bits."""
        is_float = array.dtype == np.float64
        flat = np.ascontiguousarray(array).reshape(-1)
        self._parts.append((name, array.shape, is_float, flat.view(np.int64) if is_float else flat.astype(np.int64)))

    def maybe(self, name: str, array: NDArray[Any] | None) -> None:
        """Add an array if there is one."""
        if array is not None:
            self.add(name, array)

    def send(self, put: Callable[[Ints], Tensor]) -> dict[str, Tensor]:
        """Bring all to the device with one `put`; returns views of it by name."""
        whole = put(np.concatenate([flat for *_, flat in self._parts]))
        views, first = dict[str, Tensor](), 0
        for name, shape, is_float, flat in self._parts:
            view = whole[first : first + len(flat)]
            views[name] = (view.view(torch.float64) if is_float else view).view(shape)
            first += len(flat)
        return views
