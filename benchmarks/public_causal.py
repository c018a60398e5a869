"""The public baselines for causal models: transformers' `generate`, assisted generation, and batch-1 Jacobi decoding.

Each runs as its users run it: `generate` in static batches, padded on the left; assisted generation
and prompt look-up at batch 1, since transformers refuses more; Jacobi decoding as in the public code of its authors
(Hu et al., pcLLM: drafts drawn from the prompt, a growing cache cut back after every forward, batch 1, greedy only).

Legend: L tokens of a draft.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from draftmill.decoders.base import Request


@dataclass(frozen=True, slots=True)
class Generated:
    """New tokens by request index, forwards of the model (one of a batch counts once), seconds."""

    tokens: dict[int, list[int]]
    forwards: int
    seconds: float

    @property
    def count(self) -> int:
        """New tokens of all requests."""
        return sum(len(tokens) for tokens in self.tokens.values())

    @property
    def rate(self) -> float:
        """New tokens per second."""
        return self.count / self.seconds


@dataclass(frozen=True, slots=True)
class _Prompt:
    index: int
    ids: list[int]
    max_new: int


def _prompts(requests: Sequence[Request]) -> list[_Prompt]:
    """The requests' prompts, the shortest first, which needs the least padding in static batches."""
    canvases = [(request.index, request.canvas[request.canvas >= 0].tolist(), request.canvas) for request in requests]
    prompts = [_Prompt(index, ids, len(canvas) - len(ids)) for index, ids, canvas in canvases]
    return sorted(prompts, key=lambda prompt: len(prompt.ids))


class PublicCausal:
    """The loops over one model, and over a smaller one that assists it; `stop_ids` end a text."""

    def __init__(self, target: Path, assistant: Path, *, device: str, dtype: torch.dtype) -> None:
        def load(folder: Path) -> Any:
            model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
            return model.to(device).eval()

        self._model, self._assistant, self._device = load(target), load(assistant), torch.device(device)
        self.stop_ids: list[int] = []
        self.temperature = 0.0
        self._forwards = 0
        self._model.register_forward_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._forwards += 1

    @contextmanager
    def _assisting(self, num_drafts: int | None) -> Iterator[None]:
        """Fix the number of drafts, or leave transformers' own defaults."""
        config = self._assistant.generation_config
        before = config.num_assistant_tokens, config.assistant_confidence_threshold
        if num_drafts is not None:
            config.num_assistant_tokens, config.assistant_confidence_threshold = num_drafts, 0.0
        yield
        config.num_assistant_tokens, config.assistant_confidence_threshold = before

    # ---- transformers --------------------------------------------------------------------------------------------

    def generate(self, requests: Sequence[Request], *, rows: int) -> Generated:
        """Static batches of `rows`, sorted by length."""
        prompts = _prompts(requests)
        batches = [prompts[start : start + rows] for start in range(0, len(prompts), rows)]
        return self._time(self._generate, batches)

    def with_assistant(self, requests: Sequence[Request], *, num_drafts: int | None = None) -> Generated:
        """Assisted generation at batch 1, with transformers' own draft lengths or a fixed one."""
        with self._assisting(num_drafts):
            return self._time(partial(self._generate, assistant_model=self._assistant), _alone(requests))

    def lookup(self, requests: Sequence[Request], *, num_drafts: int) -> Generated:
        """Prompt look-up at batch 1."""
        return self._time(partial(self._generate, prompt_lookup_num_tokens=num_drafts), _alone(requests))

    @torch.inference_mode()
    def _generate(self, batch: list[_Prompt], **more: Any) -> list[list[int]]:
        width = max(len(prompt.ids) for prompt in batch)
        padded = torch.tensor([[0] * (width - len(prompt.ids)) + prompt.ids for prompt in batch], device=self._device)
        lengths = torch.tensor([[len(prompt.ids)] for prompt in batch], device=self._device)
        seen = torch.arange(width, device=self._device) >= width - lengths
        drawn = (
            {"do_sample": True, "temperature": self.temperature, "top_k": 0}
            if self.temperature
            else {"do_sample": False}
        )
        rows = self._model.generate(
            padded,
            attention_mask=seen.long(),
            max_new_tokens=max(prompt.max_new for prompt in batch),
            eos_token_id=self.stop_ids or None,
            pad_token_id=0,
            **drawn,
            **more,
        )
        return [
            self._until_end(row[: prompt.max_new]) for row, prompt in zip(rows[:, width:].tolist(), batch, strict=True)
        ]

    def _until_end(self, tokens: list[int]) -> list[int]:
        """The tokens up to the first stop id, which stays."""
        end = next((place for place, token in enumerate(tokens, 1) if token in self.stop_ids), len(tokens))
        return tokens[:end]

    # ---- Jacobi --------------------------------------------------------------------------------------------------

    def jacobi(self, requests: Sequence[Request], *, block_size: int) -> Generated:
        """Greedy Jacobi decoding in blocks, one sample at a time; a sample is cut at its stop and its length afterwards."""
        return self._time(lambda batch: [self._jacobi(batch[0], block_size)], _alone(requests))

    @torch.inference_mode()
    def _jacobi(self, prompt: _Prompt, block_size: int) -> list[int]:
        text, cache = list(prompt.ids), DynamicCache(config=self._model.config)
        # The prompt and the first drafts run together: the predictions for the drafts are the first block's next state.
        drafts = self._greedy(text + random.choices(text, k=block_size), cache)[-block_size - 1 : -1]
        cache.crop(-block_size)
        while len(text) - len(prompt.ids) < prompt.max_new:
            predicted = self._greedy(drafts, cache)
            right = next((i for i in range(1, len(drafts)) if drafts[i] != predicted[i - 1]), len(drafts))
            text += drafts[:right]
            cache.crop(right - len(drafts))
            if any(token in self.stop_ids for token in drafts[:right]):
                break
            if right < len(drafts):
                drafts = predicted[right - 1 : -1]
            else:
                drafts = [predicted[-1], *random.choices(text, k=block_size - 1)]
        return self._until_end(text[len(prompt.ids) :][: prompt.max_new])

    def _greedy(self, tokens_L: list[int], cache: DynamicCache) -> list[int]:
        """The model's next token after each of these tokens, which are added to the cache."""
        logits_LV: Tensor = self._model(
            torch.tensor([tokens_L], device=self._device), past_key_values=cache, use_cache=True
        ).logits[0]
        return logits_LV.argmax(-1).tolist()

    # ---- the clock -----------------------------------------------------------------------------------------------

    def _time(self, run: Callable[[list[_Prompt]], list[list[int]]], batches: list[list[_Prompt]]) -> Generated:
        before, started, tokens = self._forwards, time.perf_counter(), dict[int, list[int]]()
        for batch in batches:
            tokens |= {prompt.index: text for prompt, text in zip(batch, run(batch), strict=True)}
        return Generated(tokens, self._forwards - before, time.perf_counter() - started)


def _alone(requests: Sequence[Request]) -> list[list[_Prompt]]:
    return [[prompt] for prompt in _prompts(requests)]
