"""The public baseline for block diffusion: the published samplers' loop, one sample at a time.

It follows the public code of SDAR (Cheng et al., 2025) and of S2D2 (Han et al., 2026): a growing cache, cut back after every
forward that isn't kept; every finished block, also the last one, runs once more for its keys and values; attention masks of the
whole canvas are made at once; a verification runs the whole block in two copies; and every step synchronises with the host. At
block size 1 it is the baseline of S2D2's speed-ups: two forwards per token. The network is transformers' Qwen3 with the
checkpoint's own weights.

S2D2's public code draws at random even at temperature 0. This loop accepts a draft if it is the verifier's choice, and else takes
that choice, so that its text can be compared.

Legend: T tokens of a block.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM

from benchmarks.public_causal import Generated
from draftmill.decoders.base import HOLE, ModelInfo, Request


@dataclass(slots=True)
class _Sample:
    """One canvas of whole blocks, its cache, and the attention masks of drafts and of finished blocks."""

    canvas_L: Tensor
    size: int
    drafts_LL: Tensor
    kept_LL: Tensor
    cache: DynamicCache = field(default_factory=DynamicCache)


class PublicBlock:
    """One sample at a time, greedily; see the module's docstring. `suppressed` ids are never revealed."""

    def __init__(self, model: Any, mask_id: int, suppressed: list[int], device: torch.device) -> None:
        self._model, self._mask_id, self._suppressed, self._device = model, mask_id, suppressed, device
        self._forwards = 0

    @classmethod
    def of(cls, folder: Path, info: ModelInfo, device: str) -> PublicBlock:
        """The loop over the weights of an SDAR model, by transformers' Qwen3."""
        assert info.mask_id is not None, "a block-diffusion model without a mask"
        fields = json.loads((folder / "config.json").read_text()) | {"model_type": "qwen3", "architectures": None}
        config: Any = Qwen3Config.from_dict(fields)
        more: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "sdpa"}
        model: Any = Qwen3ForCausalLM.from_pretrained(folder, config=config, **more)
        place = torch.device(device)
        return cls(model.to(place).eval(), info.mask_id, sorted({*info.suppressed, info.mask_id}), place)

    def block_diffusion(
        self, requests: Sequence[Request], *, block_size: int, tau: float | None, causal_cache: bool = False
    ) -> Generated:
        """Complete every canvas: per forward all tokens with confidence above `tau`, at least one; with `tau` None one."""
        return self._time(requests, partial(self._decode, size=block_size, tau=tau, causal=causal_cache, verify=False))

    def s2d2(self, requests: Sequence[Request], *, block_size: int, causal_cache: bool = True) -> Generated:
        """Complete every canvas, every drafted span verified."""
        return self._time(requests, partial(self._decode, size=block_size, tau=None, causal=causal_cache, verify=True))

    @torch.no_grad()
    def _time(self, requests: Sequence[Request], decode: Callable[[Tensor, int], Tensor]) -> Generated:
        before, texts, started = self._forwards, dict[int, list[int]](), time.perf_counter()
        for request in requests:
            canvas_L = torch.from_numpy(request.canvas.astype("int64")).to(self._device)
            num_prompt = int((canvas_L != HOLE).sum())
            texts[request.index] = decode(canvas_L, num_prompt)[num_prompt : len(canvas_L)].tolist()
        return Generated(texts, self._forwards - before, time.perf_counter() - started)

    # ---- one sample ----------------------------------------------------------------------------------------------

    def _decode(
        self, given_L: Tensor, num_prompt: int, *, size: int, tau: float | None, causal: bool, verify: bool
    ) -> Tensor:
        sample = self._begin(given_L, size, causal)
        first = num_prompt // size * size
        if first:
            self._run(sample, 0, first, sample.kept_LL, keep=True)
        for start in range(first, len(sample.canvas_L), size):
            block_T = sample.canvas_L[start : start + size]
            while bool((block_T == self._mask_id).any()):
                logits_TV = self._run(sample, start, start + size, sample.drafts_LL)
                if verify:
                    self._verify(sample, start, logits_TV.argmax(-1))
                else:
                    self._reveal(block_T, logits_TV, tau)
            self._run(sample, start, start + size, sample.kept_LL, keep=True)
        return sample.canvas_L

    def _begin(self, given_L: Tensor, size: int, causal: bool) -> _Sample:
        length = -(-len(given_L) // size) * size
        canvas_L = torch.full((length,), self._mask_id, device=self._device)
        canvas_L[: len(given_L)] = torch.where(given_L == HOLE, self._mask_id, given_L)
        blocks_L = torch.arange(length, device=self._device) // size
        drafts_LL = blocks_L <= blocks_L[:, None]
        kept_LL = torch.ones_like(drafts_LL).tril() if causal else drafts_LL
        return _Sample(canvas_L, size, drafts_LL, kept_LL)

    def _reveal(self, block_T: Tensor, logits_TV: Tensor, tau: float | None) -> None:
        sure_T, tokens_T = torch.softmax(logits_TV.float(), -1).max(-1)
        sure_T = sure_T.masked_fill(block_T != self._mask_id, -torch.inf)
        chosen = [int(sure_T.argmax())]
        if tau is not None and int((sure_T > tau).sum()):
            chosen = (sure_T > tau).nonzero()[:, 0].tolist()
        block_T[chosen] = tokens_T[chosen]

    def _verify(self, sample: _Sample, start: int, drafts_T: Tensor) -> None:
        """Replace the first run of masks by its accepted drafts and the token that corrects the first rejected one."""
        block_T = sample.canvas_L[start : start + sample.size]
        masks = (block_T == self._mask_id).tolist()
        first = masks.index(True)
        last = next((place for place in range(first, len(masks)) if not masks[place]), len(masks))
        filled_T = torch.where(block_T == self._mask_id, drafts_T, block_T)
        right = self._copies(sample, start, filled_T).argmax(-1)[first:last].tolist()
        drafts = filled_T[first:last].tolist()
        count = next(
            (place for place, (draft, token) in enumerate(zip(drafts, right, strict=True)) if draft != token), None
        )
        tokens = drafts if count is None else right[: count + 1]
        block_T[first : first + len(tokens)] = torch.tensor(tokens, device=self._device)

    # ---- forwards ------------------------------------------------------------------------------------------------

    def _run(self, sample: _Sample, start: int, end: int, mask_LL: Tensor, *, keep: bool = False) -> Tensor:
        """The logits [T, V] of the canvas from `start` to `end`; the cache goes back to `start` unless they are kept."""
        places_T = torch.arange(start, end, device=self._device)
        logits_TV = self._forward(sample, sample.canvas_L[start:end], places_T, mask_LL[start:end, :end])
        if not keep:
            sample.cache.crop(start - end)
        return logits_TV

    def _copies(self, sample: _Sample, start: int, filled_T: Tensor) -> Tensor:
        """The predictions of each place from the tokens to its left alone: the rows of a second copy, all masks, [T, V]."""
        size = len(filled_T)
        eye, below = torch.eye(size, device=self._device), torch.ones(size, size, device=self._device).tril()
        seen = torch.cat([torch.cat([below, below - eye]), torch.cat([torch.zeros_like(eye), eye])], 1)
        seen = torch.cat([torch.ones(2 * size, start, device=self._device), seen], 1)
        places_T = torch.arange(start, start + size, device=self._device)
        tokens = torch.cat([filled_T, torch.full_like(filled_T, self._mask_id)])
        logits = self._forward(sample, tokens, torch.cat([places_T, places_T]), seen.bool())
        sample.cache.crop(-2 * size)
        return logits[size:]

    def _forward(self, sample: _Sample, tokens_T: Tensor, places_T: Tensor, seen: Tensor) -> Tensor:
        self._forwards += 1
        output = self._model(
            tokens_T[None],
            attention_mask=seen[None, None],
            position_ids=places_T[None],
            past_key_values=sample.cache,
            use_cache=True,
        )
        logits_TV: Tensor = output.logits[0]
        logits_TV[:, self._suppressed] = -torch.inf
        return logits_TV
