"""CUDA graphs of a forward: network, output layer and draws start as one launch, whatever the model's depth.

A graph repeats the kernels of one forward with the addresses that they had. So forwards are filled up to a few sizes (buckets),
and all that changes between two of one size stands in one buffer that each copies anew. Rows that fill up are dead: they write a
column that no row sees, and what is drawn from them is not read. They cost little: a device reads all weights for one row, too.

    first time          operation by operation; then captured, replayed, and compared: a graph with another record is never used
    from then on        one copy down, one launch, one record up

All graphs of a process live and die together. They read the caches, the cells of drafts and each other's hidden states, and they
share one memory pool and, through cuBLAS, one workspace. So whatever moves memory that a graph reads drops all of them
(`drop_all`), and what is captured next has a new pool; nothing ever drops a single one.

Larger forwards run operation by operation: the device is then busy for longer than the host needs to start the next kernel. How
many rows that takes depends on the model (`rows_of_launches`). docs/engine.md says what else is not captured.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from draftmill.decoders.backbones.base import Model
from draftmill.decoders.backbones.rows import Sent
from draftmill.decoders.kernels.find import is_on

_log = logging.getLogger(__name__)
VARIABLE: Final = "DRAFTMILL_GRAPHS"
"""The environment variable: 0 turns graphs off, 1 or nothing leaves them on."""
LEAST_ROWS, _MOST_ROWS = 512, 2048
# What an H100 multiplies in bfloat16 in the time that the host takes to start a forward's kernels, about 3 ms.
_LAUNCH_FLOPS: Final = 2e12
_MOST_GRAPHS: Final = 128
# Capturing takes several times as long as a step: beyond twice the graphs that are kept, each must have been used so often.
_LEAST_USES: Final = 4
# Sizes: below the last of these each is four times the one before; then powers of two; above `_FINE` also three quarters of them.
_SMALL: Final = (4, 16)
_FINE: Final = 256
# Where launches cost more than rows, a forward is padded up to this multiple of its size rather than captured anew.
_MOST_FILLED: Final = 4
# A record has token ids, which must be equal, and log-probabilities, whose last bits may differ.
_ROUNDING: Final = 0.02


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What a forward leaves: the hidden states of its rows, its record (float64, flat), and how many rows it computed. `stays`:
    it is a graph's, which fills the same tensors each time; further work can be captured that reads them."""

    hidden_ND: Tensor
    record: Tensor
    num_computed: int
    stays: bool = False


class Recorder:
    """Captures CUDA graphs, which share their memory since only one runs at a time; tests have one that works on a CPU."""

    def __init__(self) -> None:
        self._pool: Any = None

    def capture(self, work: Callable[[], Work]) -> tuple[Callable[[], None], Work]:
        """Returns what repeats the work, and the tensors that it then fills again."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = work()
        except BaseException:
            # Where a capture can't be ended torch leaves its allocator as if it went on: it would free no memory any more.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            raise
        finally:
            torch.cuda.set_stream(stream)  # torch.cuda.graph leaves its own stream current where a capture fails
        return graph.replay, result

    def drop_pool(self) -> None:
        """All graphs are about to go: wait until none runs. What is captured from now on shares no memory with them: their pool
        must not be captured into again, and cuBLAS' workspace may lie in it."""
        if self._pool is not None:
            torch.cuda.synchronize()
            torch._C._cuda_clearCublasWorkspaces()
        self._pool = None


@dataclass(frozen=True, slots=True)
class _Graph:
    """`work` is kept because it holds tensors that the graph reads."""

    inputs: Tensor
    replay: Callable[[], None]
    result: Work
    work: Callable[[Any], Work]


# All graphs of this process that live now, by owner and what their forwards have in common.
_LIVING: Final[dict[Hashable, _Graph]] = {}
_RECORDERS: Final[list[Recorder]] = []
_NUMBERS: Final = itertools.count()


def drop_all() -> None:
    """Drop every graph of this process: memory that they read moves, or there are too many."""
    for recorder in _RECORDERS:
        recorder.drop_pool()
    _LIVING.clear()
    _RECORDERS.clear()


class Graphs:
    """The graphs of one model, of forwards of up to `most_rows` rows."""

    def __init__(self, recorder: Recorder, device: torch.device, most_rows: int = LEAST_ROWS) -> None:
        self._recorder, self._device, self._number = recorder, device, next(_NUMBERS)
        self.most_rows = most_rows
        self._chosen = list[dict[str, int]]()
        self.stopped: str | None = None
        """Why there are no graphs from now on; None while they are used."""
        self.num_replayed = self.num_captured = 0
        """Forwards that were replayed, and those that were captured."""

    def size(self, count: int) -> int | None:
        """The bucket size for `count` rows; None if they are too many."""
        if count > self.most_rows:
            return None
        power = 1 << max(0, count - 1).bit_length()
        if power > _FINE and count <= power // 4 * 3:
            return power // 4 * 3
        return next((size for size in _SMALL if count <= size), power)

    @property
    def is_launch_bound(self) -> bool:
        """Whether a usual forward takes a device less time than the host needs to start its kernels."""
        return self.most_rows > LEAST_ROWS

    def choose(self, sizes: dict[str, int]) -> dict[str, int]:
        """The sizes of the axes of a batch: these, or where rows cost less than launches larger ones that were chosen before."""
        if not self.is_launch_bound:
            return sizes
        for chosen in self._chosen:
            fits = all((size == 0) == (chosen[axis] == 0) and size <= chosen[axis] for axis, size in sizes.items())
            if fits and sum(chosen.values()) <= _MOST_FILLED * sum(sizes.values()):
                return chosen
        self._chosen.append(sizes)
        return sizes

    def run(self, key: Hashable, batch: Sent[Any], work: Callable[[Any], Work]) -> Work:
        """Do the work with what the batch brings. Works of one key differ in the batch's numbers alone."""
        key = self._number, key, batch.signature
        graph = _LIVING.get(key)
        if graph is not None:
            self._fill(graph.inputs, batch)
            graph.replay()
            self.num_replayed += 1
            return graph.result
        result = work(batch.to(self._device))
        # Capture more graphs only while the existing ones have been replayed often enough.
        pays = self.num_captured < 2 * _MOST_GRAPHS or self.num_replayed >= _LEAST_USES * self.num_captured
        if self.stopped is None and pays:
            if len(_LIVING) >= _MOST_GRAPHS:
                drop_all()
            self._capture(key, batch, work, result)
        return result

    def _fill(self, inputs: Tensor, batch: Sent[Any]) -> None:
        flat = torch.from_numpy(batch.flat())
        inputs.copy_(flat if self._device.type == "cpu" else flat.pin_memory(), non_blocking=True)

    def _capture(
        self, key: tuple[Hashable, ...], batch: Sent[Any], work: Callable[[Any], Work], expected: Work
    ) -> None:
        """Keep the graph of this work, if it can be captured and gives what the work gave; else there are none from now on.
        Where memory runs out, all graphs are dropped, and captured again as their forwards come again."""
        self.num_captured += 1
        if self._recorder not in _RECORDERS:
            _RECORDERS.append(self._recorder)
        try:
            inputs = torch.zeros(len(batch.flat()), dtype=torch.int64, device=self._device)
            sent = batch.cut(inputs)
            self._fill(inputs, batch)
            replay, result = self._recorder.capture(lambda: work(sent))
            replay()
            found, wanted = torch.stack([result.record, expected.record]).cpu()
            wrong = _differing(found, wanted, batch.num_sums)
        except torch.OutOfMemoryError:
            drop_all()
            return
        except Exception as error:  # noqa: BLE001 - whatever it is, steps run without graphs; a lost device rejects the next one
            why = (str(error).splitlines() or [""])[0][:200]
            self._stop(f"a step could not be captured: {type(error).__name__}: {why}")
            return
        if not len(wrong):
            _LIVING[key] = _Graph(inputs, replay, replace(result, stays=True), work)
            return
        number = int(wrong[0])
        self._stop(
            f"a captured step gave another result: {len(wrong)} of {len(result.record)} numbers; number {number} is "
            f"{float(result.record[number])}, not {float(expected.record[number])}; graph {key[1:]}"
        )

    def _stop(self, reason: str) -> None:
        self.stopped = reason
        drop_all()
        _log.warning(
            "CUDA graphs are not used from now on: %s. Steps run operation by operation, which is slower.", reason
        )


def _differing(record: Tensor, expected: Tensor, num_sums: int) -> Tensor:
    """Which numbers of two records do not agree. A sample may have NaN or an infinity, which must then be in both. Of the sums of
    states at the end only whether they are finite is read."""
    same = (record == expected) | (record.isnan() & expected.isnan()) | ((record - expected).abs() <= _ROUNDING)
    sums = slice(len(record) - num_sums, None)
    same[sums] = record[sums].isfinite() == expected[sums].isfinite()
    return torch.nonzero(~same).flatten()


def find_graphs(backbone: Model) -> Graphs | None:
    """The graphs of a model whose forwards can be captured."""
    recorder = find_recorder(backbone.device) if backbone.captures else None
    return None if recorder is None else Graphs(recorder, backbone.device, rows_of_launches(backbone.num_weights))


def rows_of_launches(num_weights: int) -> int:
    """Of how many rows a forward takes a device about as long as the host needs to start its kernels: LEAST_ROWS or more."""
    return max(LEAST_ROWS, min(_MOST_ROWS, int(_LAUNCH_FLOPS / max(1, 2 * num_weights))))


def find_recorder(device: torch.device) -> Recorder | None:
    """What captures on this device; None if nothing does, or it is not wanted."""
    there = is_on(VARIABLE) and device.type == "cuda" and torch.version.cuda is not None
    return _recorder_of(device) if there else None


@cache
def _recorder_of(device: torch.device) -> Recorder:
    """One for all graphs of a device, which share its pool."""
    return Recorder()


def why_no_graphs(backbone: Model) -> str:
    """Why `find_graphs` found none for this model, in a few words."""
    if not is_on(VARIABLE):
        return f"{VARIABLE} is 0"
    if backbone.device.type != "cuda" or torch.version.cuda is None:
        return "they are for NVIDIA GPUs"
    if not backbone.captures:
        return "this model's forwards are not captured: it is split, or runs without the kernels"
    return "this decoder's forwards are not captured"
