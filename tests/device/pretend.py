"""A GPU that is not there: CPU tensors that claim to be on cuda:0, checked and counted as CUDA would treat them.

    with pretending() as counts:      a function that gets "cuda" as its device works on such tensors
        ...                           an operation on tensors of both devices raises RuntimeError, as on a GPU
    counts.launches                   operations that would start a kernel
    counts.down, counts.up            transfers to the device, and back
    counts.waits                      places where the host would wait for the device
    counts.idle                       those of them after which the device has nothing to do
    counts.shapes                     results whose shape depends on data

What it can't show: time, streams, memory, and errors that a GPU reports late. A kernel count is the number of operations of
PyTorch's own library that are not views; some of them start several kernels.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda:0")
ROOT = str(Path(__file__).parents[2]) + "/"

VIEWS = frozenset(
    [
        "_local_scalar_dense", "_reshape_alias", "_unsafe_view", "alias", "as_strided", "chunk", "detach", "diagonal", "empty",
        "empty_like", "empty_strided", "expand", "is_same_size", "lift_fresh", "narrow", "new_empty", "new_empty_strided",
        "permute", "reshape", "resolve_conj", "resolve_neg", "select", "slice", "split", "split_with_sizes", "squeeze",
        "sym_size", "t", "transpose", "unbind", "unfold", "unsafe_split", "unsqueeze", "view", "view_as",
    ]
)  # fmt: skip
SHAPES = frozenset(["nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select"])
WAITS = SHAPES | {"_local_scalar_dense", "bincount", "equal", "is_nonzero"}
INDEXING = frozenset(["index", "index_put", "index_put_", "_index_put_impl_"])


KINDS = ("launches", "down", "up", "waits", "shapes")


class Counts:
    """What happened on the pretended device, and where in the project."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start from zero."""
        self.launches = self.down = self.up = self.waits = self.shapes = self.idle = 0
        self.places: Counter[tuple[str, str]] = Counter()
        self.num_events = self.num_over = 0
        """Events that were recorded, and how many of them are known to be over."""

    def add(self, kind: str, what: str) -> None:
        """Count one event. A wait is for all that was started before, but for an event."""
        setattr(self, kind, getattr(self, kind) + 1)
        if kind == "waits":
            self.num_over, self.idle = self.num_events, self.idle + 1
        self.places[kind, f"{what} at {_place()}"] += 1

    def state(self) -> dict[str, int]:
        """The counts so far."""
        return {kind: getattr(self, kind) for kind in (*KINDS, "idle")}

    def __str__(self) -> str:
        """Where events happened, the most frequent first."""
        lines = (f"{count:5d}  {kind:7s} {place}" for (kind, place), count in self.places.most_common())
        return "\n".join(lines)


def _place() -> str:
    frame: Any = sys._getframe(2)
    while frame:
        name = frame.f_code.co_filename
        if name.startswith(ROOT) and "/.venv/" not in name and not name.endswith("pretend.py"):
            return f"{name.removeprefix(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of the project"


class OnDevice(torch.Tensor):
    """A CPU tensor that claims to be on cuda:0."""

    @classmethod
    def of(cls, data: torch.Tensor) -> OnDevice:
        """The same memory, as a tensor of the device."""
        return torch.Tensor._make_subclass(cls, data, data.requires_grad)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert _active, "a tensor of the pretended device has left it"
        with _active[-1]:
            return func(*args, **(kwargs or {}))


class _Launches(TorchDispatchMode):
    """Counts what reaches PyTorch's library while `working` is set: an operation of the device."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts, self.working = counts, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.working:
            self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        name, counts = func.overloadpacket.__name__, self.counts
        if name not in VIEWS:
            counts.launches += 1
        if name in WAITS:
            counts.add("waits", name)
        if name in SHAPES:
            counts.add("shapes", name)
        if name == "repeat_interleave" and func._overloadname == "Tensor" and kwargs.get("output_size") is None:
            counts.add("waits", name)
            counts.add("shapes", name)
        if name in INDEXING and any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]):
            # Writing one number under a mask is a masked_fill; all else looks for the mask's places first.
            if name != "index" and args[2].numel() == 1 and sum(one is not None for one in args[1]) == 1:
                return
            counts.add("waits", "a mask as index")
            counts.add("shapes", "a mask as index")


def _is_device(one: Any) -> bool:
    return (isinstance(one, str) and one.startswith("cuda")) or (isinstance(one, torch.device) and one.type == "cuda")


def _leaves(tree: Any) -> list[Any]:
    """What tuples, lists and dictionaries hold, in order. PyTorch's own walk takes half of the time of these tests."""
    leaves = list[Any]()
    _mapped(leaves.append, tree)
    return leaves


def _mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with its leaves changed; a named tuple, such as `max` returns, stays one."""
    kind = type(tree)
    if kind is tuple or kind is list:
        return kind([_mapped(change, one) for one in tree])
    if kind is dict:
        return {key: _mapped(change, one) for key, one in tree.items()}
    if isinstance(tree, tuple) and kind is not torch.Size:
        children = [_mapped(change, one) for one in tree]
        return kind(*children) if hasattr(kind, "_fields") else kind(children)
    return change(tree)


class _Pretending(TorchFunctionMode):
    """Runs functions of device tensors on the CPU, and says what a GPU would have done."""

    def __init__(self, counts: Counts, launches: _Launches) -> None:
        super().__init__()
        self.counts, self.launches = counts, launches

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        flat = _leaves((args, kwargs))
        ours = [one for one in flat if isinstance(one, OnDevice)]
        if name == "__get__" and ours:
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            told = {"device": CUDA, "is_cuda": True, "is_cpu": False}
            if attribute in told:
                return told[attribute]
        host = [one for one in flat if isinstance(one, torch.Tensor) and not isinstance(one, OnDevice)]
        if name == "_has_compatible_shallow_copy_type" and ours and host:
            return False
        if name == "pin_memory":
            return args[0]
        kwargs.pop("pin_memory", None)
        if func is torch.device or name == "_parse_to" or not (ours or any(_is_device(one) for one in flat)):
            return func(*args, **kwargs)
        goes_up, crosses = self._transfer(name, args, kwargs), name == "copy_" and self._copied(args, kwargs)
        self._check(name, args, ours, host)
        return self._call(func, name, args, kwargs, stays=not goes_up, counts=not crosses)

    def _transfer(self, name: str, args: Any, kwargs: Any) -> bool:
        """Count what crosses between host and device; whether the result is the host's."""
        counts = self.counts
        if name == "tolist":
            counts.add("up", name)
            counts.add("waits", name)
        elif name in ("numpy", "__array__"):
            raise TypeError("can't convert a tensor on cuda:0 to numpy: copy it to the host first")
        elif name in ("tensor", "as_tensor", "new_tensor"):
            counts.add("down", name)
            counts.add("waits", name)
        elif name in ("to", "cpu", "cuda"):
            return self._moved(name, args, kwargs)
        return False

    def _copied(self, args: Any, kwargs: Any) -> bool:
        """Count a copy into a tensor that is there; whether it crosses between host and device, which starts no kernel."""
        target, source = (isinstance(one, OnDevice) for one in args[:2])
        if target != source:
            self.counts.add("down" if target else "up", "copy_")
            if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])):
                self.counts.add("waits", "copy_, without non_blocking")
        return target != source

    def _moved(self, name: str, args: Any, kwargs: Any) -> bool:
        target = {"cpu": "cpu", "cuda": "cuda", "to": None}[name]
        for one in (*args[1:], kwargs.get("device")) if name == "to" else ():
            if isinstance(one, torch.Tensor):
                target = "cuda" if isinstance(one, OnDevice) else "cpu"
            elif isinstance(one, (str, torch.device)):
                target = "cuda" if _is_device(one) else "cpu"
        was_ours = isinstance(args[0], OnDevice)
        if target == "cpu" and was_ours:
            self.counts.add("up", name)
            self.counts.add("waits", name)
            return True
        if target == "cuda" and isinstance(args[0], torch.Tensor) and not was_ours:
            self.counts.add("down", name)
            if not kwargs.get("non_blocking"):
                self.counts.add("waits", f"{name}, without non_blocking")
        return target is None and not was_ours

    def _check(self, name: str, args: Any, ours: list[Any], host: list[Any]) -> None:
        if name in ("__getitem__", "__setitem__") and ours:
            self._check_index(name, args, host)
        elif ours and name not in ("to", "copy_", "set_", "data") and any(one.dim() > 0 for one in host):
            raise RuntimeError(f"tensors of cuda:0 and of cpu in one operation, {name}, at {_place()}")

    def _check_index(self, name: str, args: Any, host: list[Any]) -> None:
        parts = args[1] if isinstance(args[1], tuple) else (args[1],)
        implied = sum(one.dim() > 0 for one in host) + sum(isinstance(one, list) for one in parts)
        tensors = [one for one in parts if isinstance(one, (torch.Tensor, list))]
        under_mask = len(tensors) == 1 and isinstance(tensors[0], torch.Tensor) and tensors[0].dtype == torch.bool
        if name == "__setitem__" and tensors and not under_mask and not isinstance(args[2], torch.Tensor):
            implied += 1
        for _ in range(implied):
            self.counts.add("down", "an index or a value of the host")
            self.counts.add("waits", "an index or a value of the host")

    def _call(self, func: Any, name: str, args: Any, kwargs: Any, *, stays: bool, counts: bool) -> Any:
        known: dict[int, tuple[torch.Tensor, OnDevice]] = {}

        def bare(one: Any) -> Any:
            if isinstance(one, OnDevice):
                plain = one.as_subclass(torch.Tensor)
                known[id(plain)] = (plain, one)
                return plain
            if _is_device(one):
                return "cpu" if isinstance(one, str) else torch.device("cpu")
            if isinstance(one, torch.Generator) and one.device.type == "cpu":
                raise RuntimeError(f"a generator of the cpu for a tensor on cuda:0, at {_place()}")
            return one

        def dressed(one: Any) -> Any:
            if not isinstance(one, torch.Tensor) or isinstance(one, OnDevice):
                return one
            plain, ours = known.get(id(one), (None, None))
            if plain is one:
                return ours if stays else one.clone()
            return OnDevice.of(one) if stays else one

        args, kwargs = _mapped(bare, (args, kwargs))
        whole, before = name == "scaled_dot_product_attention", self.launches.working
        self.counts.launches += whole
        self.launches.working = counts and not whole
        try:
            found = func(*args, **kwargs)
        finally:
            self.launches.working = before
        return _mapped(dressed, found)


class _Event:
    """An event of the device. Reading it is a wait, unless the host has already waited for it or for something later."""

    def __init__(self, counts: Counts, *, enable_timing: bool = False) -> None:
        self.counts, self.recorded, self.has_time, self.launches = counts, -1, enable_timing, 0

    def record(self) -> None:
        self.counts.num_events += 1
        self.recorded, self.launches = self.counts.num_events, self.counts.launches

    def synchronize(self) -> None:
        over = self.counts.num_over
        if self.recorded > over:
            self.counts.add("waits", "an event")
            self.counts.num_over = self.recorded
            self.counts.idle -= self.launches < self.counts.launches

    def elapsed_time(self, later: _Event) -> float:
        assert self.has_time and later.has_time, "an event that notes no time"
        assert later.recorded >= self.recorded >= 0, "an event that was never recorded"
        return 1.0


_active: list[_Pretending] = []


def as_one_launch(reference: Callable[..., Any]) -> Callable[..., Any]:
    """A function that stands for a kernel: whatever operations it takes, they count as one launch."""

    def launched(*args: Any, **more: Any) -> Any:
        counts = _active[-1].counts
        before = counts.launches
        found = reference(*args, **more)
        counts.launches = before + 1
        return found

    return launched


@contextmanager
def pretending() -> Iterator[Counts]:
    """Pretend inside; yields the counts. Of models, load those that shall be on the device with `device="cuda"`."""
    counts = Counts()
    launches = _Launches(counts)
    mode = _Pretending(counts, launches)
    _active.append(mode)
    try:
        with (
            mock.patch("torch.cuda.synchronize", lambda *_: counts.add("waits", "synchronize")),
            mock.patch("torch.cuda.Event", partial(_Event, counts)),
            mock.patch("torch.cuda.is_available", lambda: True),
            mock.patch("torch.cuda.device_count", lambda: 1),
            mode,
            launches,
        ):
            yield counts
    finally:
        _active.pop()
