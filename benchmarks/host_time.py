"""What the host does in a step whose work on the device takes no time: graphs that were captured, but repeat nothing.

    python -m benchmarks.host_time [--slots 16 64] [--steps 150]

Below this time no step can be, however fast the device is. The tokens mean nothing: every replay leaves the first one's record.
Median of the steps that replay one forward, in CPU time of one thread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

import draftmill.decoders.builtin
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.cuda_graphs import Work
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder
from draftmill.decoders.settings import DecoderSettings
from tests.decoders.replaying import use_references

BUILTIN = Path(draftmill.decoders.builtin.__path__[0])
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "autoregressive": ("ar-tiny", {"kind": "autoregressive"}),
    "speculative, look-up, k = 4": ("ar-tiny", {"kind": "speculative", "k": 4}),
    "jacobi, 8": ("ar-tiny", {"kind": "jacobi", "block_size": 8}),
    "any_subset": ("asarm-tiny", {"kind": "any_subset"}),
    "block_diffusion": ("block-tiny", {"kind": "block_diffusion"}),
}
PROMPT, NEW = 8, 120


class Nothing:
    """Captures the record of a forward, and never runs it again."""

    def capture(self, work: Callable[[], Work]) -> tuple[Callable[[], None], Work]:
        """See draftmill.decoders.engine.cuda_graphs.Recorder."""
        return (lambda: None), work()

    def drop_pool(self) -> None:
        """See Recorder; there is none."""


def engine_of(name: str, slots: int) -> Any:
    """An engine full of samples of one length."""
    model, given = CASES[name]
    folder = BUILTIN / model
    settings: Any = TypeAdapter(DecoderSettings).validate_python(given)
    info = inspect_model(folder)
    setup = Setup(
        backbone=load_backbone(folder, dtype="float32", device="cpu"),
        info=info,
        sampling=Sampling(),
        max_rows=slots,
        max_tokens=slots * 2 * (PROMPT + NEW),
        stops=None if model == "asarm-tiny" else Stops(),
        prompt_rows=slots * PROMPT,
    )
    decoder, rng = build_decoder(setup, settings), np.random.default_rng(0)
    canvases = rng.integers(10, info.vocab_size - 10, (slots, PROMPT + NEW)).astype(np.int32)
    canvases[:, PROMPT:] = -1
    decoder.admit([Request(index, index, canvas) for index, canvas in enumerate(canvases)])
    return decoder


def step_seconds(name: str, slots: int, steps: int) -> list[float]:
    """CPU seconds of steps that replay a forward, while all samples run."""
    engine, times = engine_of(name, slots), list[float]()
    graphs = engine.target.graphs
    while engine.active == slots and len(times) < steps:
        replayed, began_s = graphs.num_replayed, time.process_time()
        engine.step()
        if graphs.num_replayed == replayed + 1 and engine.active == slots:
            times.append(time.process_time() - began_s)
    return times


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--steps", type=int, default=150)
    flags = parser.parse_args()
    torch.set_num_threads(1)
    print("| decoder | slots | steps | us a step | us a sample |\n|---|---:|---:|---:|---:|")
    with pytest.MonkeyPatch.context() as patch:
        use_references(patch)
        patch.setattr("draftmill.decoders.engine.cuda_graphs.find_recorder", lambda device: Nothing())
        for name in CASES:
            for slots in flags.slots:
                times = step_seconds(name, slots, flags.steps)
                each = statistics.median(times) * 1e6 if times else float("nan")
                print(f"| {name} | {slots} | {len(times)} | {each:,.0f} | {each / slots:.1f} |", flush=True)


if __name__ == "__main__":
    main()
