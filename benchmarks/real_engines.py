"""The engines of `benchmarks.real`: draftmill's decoders and transformers' `generate`; all greedy.

Each engine decodes the same prompts to the same number of tokens, end tokens off, in batches of a given number of rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.any_subset import drain
from draftmill.decoders.backbones.base import Model
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.base import Request
from draftmill.decoders.causal.settings import AutoregressiveSettings, NgramDrafterSettings, SpeculativeSettings
from draftmill.decoders.common_settings import DecoderChoice, Sampling
from draftmill.decoders.draws.keys import sample_key
from draftmill.decoders.engine.ends import Stops
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.registry import build_decoder

Texts = dict[int, list[int]]
Engine = Callable[[int], Texts]
"""A function from the number of rows to new tokens by prompt."""

OURS: dict[str, DecoderChoice] = {
    "autoregressive": AutoregressiveSettings(kind="autoregressive"),
    "n-gram, k = 5": SpeculativeSettings(kind="speculative", k=5, drafter=NgramDrafterSettings(kind="ngram")),
    "n-gram, k = auto": SpeculativeSettings(kind="speculative", k="auto", drafter=NgramDrafterSettings(kind="ngram")),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One run: its texts, seconds on the clock, and seconds of CPU of this process."""

    texts: Texts
    wall_s: float
    cpu_s: float

    @property
    def count(self) -> int:
        """New tokens."""
        return sum(map(len, self.texts.values()))


def measure(engine: Engine, rows: int) -> Measured:
    """Time one run of an engine."""
    wall, cpu = time.perf_counter(), time.process_time()
    texts = engine(rows)
    return Measured(texts, time.perf_counter() - wall, time.process_time() - cpu)


_inspect = cache(inspect_model)  # a worker does it once, when it loads the model


def decode(
    folder: Path,
    backbone: Model,
    settings: DecoderChoice,
    prompts: Sequence[Sequence[int]],
    new_tokens: Sequence[int],
    rows: int,
) -> Texts:
    """The new tokens of every prompt, greedily, with `rows` slots; long requests come first."""
    setup = Setup(
        backbone=backbone,
        info=_inspect(folder),
        sampling=Sampling(temperature=0.0),
        max_rows=rows,
        max_tokens=1 << 24,
        stops=Stops(),
    )
    requests = []
    for index, (ids, count) in enumerate(zip(prompts, new_tokens, strict=True)):
        canvas = np.full(len(ids) + count, -1, dtype=np.int32)
        canvas[: len(ids)] = ids
        requests.append(Request(index, sample_key(0, str(index)), canvas))
    requests.sort(key=lambda request: -len(request.canvas))
    return {outcome.index: outcome.tokens.tolist() for outcome in drain(build_decoder(setup, settings), requests)}


@dataclass
class Engines:
    """Every engine over the checkpoint in `folder`; models are loaded when they are first run."""

    folder: Path
    prompts: list[list[int]]
    new_tokens: int

    def all(self) -> dict[str, Engine]:
        """Engines by name."""
        ours = {f"ours, {name}": self._ours(settings) for name, settings in OURS.items()}
        return ours | {"generate": self.generate}

    # ---- ours ----------------------------------------------------------------------------------------------------

    @cached_property
    def backbone(self) -> Model:
        """The model as our workers load it."""
        return load_backbone(self.folder, device="cpu")

    def _ours(self, settings: DecoderChoice) -> Engine:
        def run(rows: int) -> Texts:
            new_tokens = [self.new_tokens] * len(self.prompts)
            return decode(self.folder, self.backbone, settings, self.prompts, new_tokens, rows)

        return run

    # ---- transformers --------------------------------------------------------------------------------------------

    @cached_property
    def model(self) -> Any:
        """The model as transformers loads it, without end tokens."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return model

    @torch.inference_mode()
    def generate(self, rows: int) -> Texts:
        """Static batches of prompts of like length, padded on the left."""
        order = sorted(range(len(self.prompts)), key=lambda index: len(self.prompts[index]))
        texts: Texts = {}
        for start in range(0, len(order), rows):
            chosen = order[start : start + rows]
            width = max(len(self.prompts[index]) for index in chosen)
            ids = torch.tensor([[0] * (width - len(self.prompts[i])) + self.prompts[i] for i in chosen])
            seen = torch.tensor([[0] * (width - len(self.prompts[i])) + [1] * len(self.prompts[i]) for i in chosen])
            out = self.model.generate(ids, attention_mask=seen, max_new_tokens=self.new_tokens, do_sample=False)
            texts |= dict(zip(chosen, out[:, width:].tolist(), strict=True))
        return texts


def best_rows(engine: Engine, batches: Sequence[int], *, by_cpu: bool) -> tuple[int, dict[int, Measured]]:
    """The number of rows at which an engine is fastest, and one run at each."""
    runs = {rows: measure(engine, rows) for rows in batches}
    fastest = min(runs, key=lambda rows: runs[rows].cpu_s if by_cpu else runs[rows].wall_s)
    return fastest, runs
