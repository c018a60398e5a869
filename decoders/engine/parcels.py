"""One transfer down a forward: arrays of integers and float64 numbers in one buffer, cut up again on the device.

Everything that a forward and its answers need to know of the host is enclosed before the forward begins; the work on the device
finds it by name. A captured graph (graphs.py) reads the same buffer each time, so its parcels must have one signature.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.decoders.engine.packing import Ints
from draftmill.decoders.engine.transfers import put

Sent = Mapping[str, Tensor]
"""What has arrived on the device, by name: int64, or float64."""


class Parcel:
    """Named arrays on their way to the device."""

    def __init__(self) -> None:
        self._arrays = dict[str, NDArray[Any]]()

    def enclose(self, array: NDArray[Any], *, size: int | None = None, fill: int = 0) -> str:
        """Add integers or truth values, which become int64, or float64 numbers, which travel as their bits.

        The last axis is filled up to `size` entries. Returns the name.
        """
        missing = 0 if size is None else size - array.shape[-1]
        if missing > 0:
            array = np.concatenate([array, np.full((*array.shape[:-1], missing), fill, dtype=array.dtype)], axis=-1)
        name = str(len(self._arrays))
        self._arrays[name] = array if array.dtype == np.float64 else array.astype(np.int64, copy=False)
        return name

    @property
    def signature(self) -> Hashable:
        """Names, shapes and kinds of the arrays: what decides how the buffer is cut up."""
        return tuple((name, array.shape, array.dtype == np.float64) for name, array in self._arrays.items())

    def flat(self) -> Ints:
        """All arrays as one."""
        return np.concatenate(
            [np.ascontiguousarray(array).reshape(-1).view(np.int64) for array in self._arrays.values()]
        )

    def cut(self, whole: Tensor) -> Sent:
        """Views of a buffer that holds, or will hold, `flat`."""
        views, first = dict[str, Tensor](), 0
        for name, array in self._arrays.items():
            view = whole[first : first + array.size]
            views[name] = (view.view(torch.float64) if array.dtype == np.float64 else view).view(array.shape)
            first += array.size
        return views

    def send(self, device: torch.device) -> Sent:
        """Bring all to the device, by one transfer; to a CPU nothing has to be copied."""
        if device.type == "cpu":
            return {name: torch.from_numpy(array) for name, array in self._arrays.items()}
        return self.cut(put(self.flat(), device))
