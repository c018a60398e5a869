"""The engines of `benchmarks.real`: ours, transformers' `generate` and continuous batching, ctranslate2; all greedy.

Each engine decodes the same prompts to the same number of tokens, end tokens switched off, with a given number of rows.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
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


@dataclass
class Engines:
    """Every engine over the checkpoint in `folder`; models are loaded when they are first run."""

    folder: Path
    prompts: list[list[int]]
    new_tokens: int
    threads: int
    converted: Path

    def all(self) -> dict[str, Engine]:
        """Engines by name; those whose package is missing are left out."""
        ours = {f"ours, {name}": self._ours(settings) for name, settings in OURS.items()}
        theirs: dict[str, Engine] = {"generate": self.generate, "continuous batching": self.continuous}
        if importlib.util.find_spec("ctranslate2") is not None:
            theirs["ctranslate2"] = self.ctranslate2
        return ours | theirs

    # ---- ours ----------------------------------------------------------------------------------------------------

    @cached_property
    def backbone(self) -> Model:
        """The model as our workers load it."""
        return load_backbone(self.folder, device="cpu")

    def _ours(self, settings: DecoderChoice) -> Engine:
        def run(rows: int) -> Texts:
            info, columns = inspect_model(self.folder), max(map(len, self.prompts)) + self.new_tokens
            decoder = build_decoder(
                Setup(
                    backbone=self.backbone,
                    info=info,
                    sampling=Sampling(temperature=0.0),
                    max_rows=rows,
                    max_tokens=rows * columns,
                    stops=Stops(),
                ),
                settings,
            )
            requests = sorted(self._requests(), key=lambda request: -len(request.canvas))
            return {outcome.index: outcome.tokens.tolist() for outcome in drain(decoder, requests)}

        return run

    def _requests(self) -> list[Request]:
        requests = []
        for index, ids in enumerate(self.prompts):
            canvas = np.full(len(ids) + self.new_tokens, -1, dtype=np.int32)
            canvas[: len(ids)] = ids
            requests.append(Request(index, sample_key(0, str(index)), canvas))
        return requests

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

    def continuous(self, rows: int) -> Texts:
        """transformers' continuous batching, which chooses its own batches and ignores `rows`."""
        from transformers import GenerationConfig

        config = GenerationConfig(max_new_tokens=self.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        results = self._paged.generate_batch(inputs=self.prompts, generation_config=config, progress_bar=False)
        return {int(name.rpartition("_")[2]): list(result.generated_tokens) for name, result in results.items()}

    @cached_property
    def _paged(self) -> Any:
        """A separate model, since continuous batching changes its attention."""
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    # ---- ctranslate2 ---------------------------------------------------------------------------------------------

    @cached_property
    def _generator(self) -> Any:
        import ctranslate2
        from ctranslate2.converters import TransformersConverter

        if not (self.converted / "model.bin").is_file():
            TransformersConverter(str(self.folder)).convert(str(self.converted), force=True)
        return ctranslate2.Generator(
            str(self.converted), device="cpu", compute_type="float32", inter_threads=1, intra_threads=self.threads
        )

    @cached_property
    def _names(self) -> list[list[str]]:
        from transformers import PreTrainedTokenizerFast

        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(self.folder)
        return [tokenizer.convert_ids_to_tokens(ids) for ids in self.prompts]

    def ctranslate2(self, rows: int) -> Texts:
        """ctranslate2 in float32, batches of prompts of like length."""
        order = sorted(range(len(self.prompts)), key=lambda index: len(self.prompts[index]))
        results = self._generator.generate_batch(
            [self._names[index] for index in order],
            max_batch_size=rows,
            max_length=self.new_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token="<file_sep>",  # a token that these texts never contain, so none ends early
        )
        return {index: list(result.sequences_ids[0]) for index, result in zip(order, results, strict=True)}


def best_rows(engine: Engine, batches: Sequence[int], *, by_cpu: bool) -> tuple[int, dict[int, Measured]]:
    """The number of rows at which an engine is fastest, and one run at each."""
    runs = {rows: measure(engine, rows) for rows in batches}
    fastest = min(runs, key=lambda rows: runs[rows].cpu_s if by_cpu else runs[rows].wall_s)
    return fastest, runs
