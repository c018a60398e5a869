"""Jobs on a GPU that is not there: the engine schedules, fills up, captures and replays as there; the model computes nothing.

Tokens follow a rule of their places, so that drafts of repeated text are often right. What kernels would be compiled for is
Triton's own answer to the arguments of each launch of attention.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftmill.decoders.backbones.base import Model
from draftmill.decoders.backbones.cache import SlotCache
from draftmill.decoders.backbones.invariance import NO_RULES
from draftmill.decoders.backbones.rows import TokenRows
from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.cuda_graphs import Work, drop_all
from draftmill.decoders.engine.memory import MemoryPlan
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.kernels.seen import Seen, Tiling
from draftmill.decoders.registry import build_decoder
from tests.decoders.support import decoder_settings, token_info

VOCAB, HEADS, KEY_HEADS, WIDTH, SLOTS = 97, 8, 2, 16, 64
DECODERS = {
    "autoregressive": decoder_settings("autoregressive"),
    "speculative": decoder_settings("speculative", k=4, drafter={"kind": "ngram"}),
}


@dataclass
class Simulated:
    """What a job did: its steps, those that were replays, captures, times that all graphs were dropped, and the variants of the
    attention kernels by their names."""

    steps: int = 0
    replayed: int = 0
    captured: int = 0
    dropped: int = 0
    variants: dict[str, set[str]] = field(default_factory=dict)
    lost: int = 0
    """Places of samples in steps in which they waited for others' prompts."""
    hidden: int = 0
    """Records that were read while the next forward ran."""

    def __str__(self) -> str:
        kinds = ", ".join(f"{len(keys)} of {name}" for name, keys in self.variants.items())
        return (
            f"{self.replayed} of {self.steps} steps replayed, {self.captured} captured, {self.dropped} drops; {kinds}"
        )


class Hollow(Model):
    """A backbone without weights, whose attention is launched and whose states are zero. `num_weights` decides what a launch is
    worth."""

    has_sums = False

    def __init__(self, num_weights: int) -> None:
        self.device, self.dtype = torch.device("cpu"), torch.bfloat16
        self.vocab_size, self.width, self.num_weights = VOCAB, 4, num_weights
        self.rules, self.min_rows, self.exact, self.captures, self.num_rows_computed = NO_RULES, 1, False, True, 0
        self.tiling = Tiling.of(self.device, self.dtype, group=HEADS // KEY_HEADS, width=WIDTH)
        self.cache = SlotCache(1, KEY_HEADS, WIDTH, dtype=self.dtype, device=self.device, pooled=True)
        from draftmill.decoders.kernels.attention import attend

        self._attend: Any = attend

    def forward(self, rows: TokenRows) -> Tensor:
        """States of zeros, [N, 4]."""
        self.num_rows_computed = rows.num_rows
        start_N, _ = self.cache.cells(rows.slot_N, rows.column_N, rows.start_N)
        widest = self.cache.num_columns
        seen = Seen(rows.slot_N, rows.low_IN, rows.high_IN, tables=rows.tables, start_N=start_N, num_columns=widest)
        query_NHd = torch.empty(rows.num_rows, HEADS, WIDTH, dtype=self.dtype)
        self._attend(query_NHd, self.cache.layers_2SKWd[0], seen, scaling=1.0)
        return torch.zeros(rows.num_rows, 4)

    def raw_logits(self, hidden_RD: Tensor) -> Tensor:
        return torch.zeros(len(hidden_RD), VOCAB)


class _Launches:
    """Stands for a kernel of Triton: notes what each launch would be compiled for."""

    def __init__(self, kernel: Any, keys: set[str]) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler.compiler import make_backend
        from triton.runtime.jit import create_function_from_signature

        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._bind, self._keys = create_function_from_signature(kernel.signature, kernel.params, backend), keys

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            _, specialization, options = self._bind(*args, **kwargs)
            self._keys.add(f"{specialization} {options}")

        return launch


class _Recorder:
    """Captures nothing and repeats nothing: the record that a step left stays right for no other, which `_sample` mends."""

    def __init__(self) -> None:
        self.num_dropped = 0

    def capture(self, work: Any) -> tuple[Any, Work]:
        found = work()

        def replay() -> None:
            again = work()
            found.record.copy_(again.record)

        return replay, found

    def drop_pool(self) -> None:
        self.num_dropped += 1


def _sample(logits_RV: Tensor, warp: Any, key_R2: Tensor, position_R: Tensor, *, wanted: Any = (), **_: Any) -> Tensor:
    """Tokens that repeat themselves for some places, and no notes."""
    token_R = (position_R // 12 + position_R % 4) % VOCAB
    return torch.stack([token_R.double(), torch.zeros(len(token_R), dtype=torch.float64)]).unsqueeze(0)


def requests_of(count: int, *, ascending: bool, new: tuple[int, int] = (16, 64)) -> list[Request]:
    """Prompts of 20 to 500 tokens, and how many tokens come."""
    rng, made = np.random.default_rng(0), []
    lengths = rng.integers(20, 501, count)
    for index, length in enumerate(sorted(lengths.tolist()) if ascending else lengths.tolist()):
        canvas = rng.integers(0, VOCAB, length + int(rng.integers(*new))).astype(np.int32)
        canvas[length:] = -1
        made.append(Request(index, index, canvas))
    return made


def simulate(decoder: str, requests: list[Request], *, num_weights: int, cells: int = 1 << 17) -> Simulated:
    """Run a job of these requests with 64 slots."""
    from draftmill.decoders.kernels import attention

    found, recorder = Simulated(variants={"attend_tiles": set(), "add_shares": set()}), _Recorder()
    with pytest.MonkeyPatch.context() as patch:
        for name, keys in found.variants.items():
            patch.setattr(attention, name, _Launches(getattr(attention, name), keys))
        patch.setattr("draftmill.decoders.engine.cuda_graphs.find_recorder", lambda device: recorder)
        patch.setattr("draftmill.decoders.engine.sampler.find_sampling", lambda *_: _sample)
        drop_all()
        backbone: Any = Hollow(num_weights)
        patch.setattr("draftmill.decoders.engine.engine.hides_host", lambda backbone: True)
        setup = Setup(backbone=backbone, info=token_info(VOCAB), sampling=Sampling(), max_rows=SLOTS, max_tokens=cells)
        engine: Any = build_decoder(setup, DECODERS[decoder])
        engine.plan = engine._capacity.plan = MemoryPlan(
            1 << 28, 0, slots=cells * backbone.cell_bytes, prompt_rows=1 << 14
        )
        settle = engine._settle

        def read(running: Any) -> Any:
            found.hidden += engine.launched is not running
            return settle(running)

        def launched(turn: Any, launch: Any = engine._launch) -> Any:
            engine.launched = launch(turn)
            return engine.launched

        engine._settle, engine._launch = read, launched
        waiting, texts = list(reversed(requests)), Counter[int]()
        while waiting or engine.active:
            while waiting and engine.room(len(waiting[-1].canvas)):
                engine.admit([waiting.pop()])
            for outcome in engine.step():
                assert outcome.error is None, outcome.error
                texts[outcome.index] += 1
        assert texts == Counter(range(len(requests)))
        graphs = engine.target.graphs
        found.steps, found.replayed, found.captured = engine.stats.steps, graphs.num_replayed, graphs.num_captured
        found.dropped, found.lost = recorder.num_dropped, engine.stats.slot_steps - engine.stats.active_slot_steps
        assert graphs.stopped is None
        drop_all()
    return found


if __name__ == "__main__":
    for name in DECODERS:
        for ascending in (False, True):
            for num_weights in (100_000_000, 8_000_000_000):
                print(name, "ascending" if ascending else "mixed", num_weights)
                print("   ", simulate(name, requests_of(200, ascending=ascending), num_weights=num_weights))
