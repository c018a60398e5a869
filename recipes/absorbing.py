"""A masked-diffusion model and its training on packed files, with the bound of absorbing diffusion as loss.

The model is transformers' Llama without its causal mask, which is what a LLaDA checkpoint holds. A window of the packed
files loses n of its L tokens to the mask; every masked token is scored given all the others, and counts L / n. With n
uniform over 1 .. L that is the continuous-time bound with its weight of 1 / t (Sahoo et al., 2024, "Simple and effective
masked diffusion language models", eq. 10, log-linear schedule) with t on the grid of n / L, which says the same with less
variance (Nie et al., 2025, "Large language diffusion models", eq. 6).

Only half of the windows are masked that way. The others resemble decoding: a text's last tokens masked, as for
a drafter of a causal model, and holes. Nothing here knows of decoding.

Legend: B = windows, L = tokens of a window, R = masked tokens of a batch.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from recipes import causal, loop
from recipes.causal import Shape
from recipes.corpus import MASK_ID, TokenStream
from recipes.masking import random_mask, span_mask

PATTERNS = ("random", "suffix", "spans")
PATTERN_SHARES = (0.5, 0.25, 0.25)
LONGEST_SUFFIX = 32
HEAVIEST = 10.0
"""The largest weight of a token: a window with one mask would otherwise weigh as much as a hundred others."""
RMS_NORM_EPS, ROPE_THETA = 1e-5, 10_000.0
MASK_DRAWS = 2  # the stream of random numbers that masks a step's windows; `Schedule.length` has 1


def empty_model(shape: Shape) -> LlamaForCausalLM:
    """A model in float32 whose weights must still be filled in; the global generator is unchanged."""
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        max_position_embeddings=causal.MAX_LENGTH,
        rms_norm_eps=RMS_NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        return LlamaForCausalLM(config)


def shape_of(start: Path) -> Shape:
    """The sizes of the causal model in a folder that `recipes.ar` wrote."""
    config = json.loads((start / "config.json").read_text())
    return Shape(**{name: config[name] for name in Shape.__dataclass_fields__})


def model_from(start: Path) -> LlamaForCausalLM:
    """A model with the weights of a causal one, which makes training much shorter.

    Qwen2's biases of queries, keys and values do not exist in this layout and are dropped.
    """
    model, source = empty_model(shape_of(start)), causal.load_model(start, torch.device("cpu"))
    kept = {name: tensor for name, tensor in source.state_dict().items() if not name.endswith("proj.bias")}
    model.load_state_dict(kept)
    return model


def masked_logits(model: LlamaForCausalLM, ids: Tensor, masked: Tensor) -> Tensor:
    """Logits of the masked positions, row by row, [R, V]; every position of `ids` [B, L] sees its whole window."""
    length = ids.shape[1]
    everything = torch.ones(1, 1, length, length, dtype=torch.bool, device=ids.device)
    hidden = model.model(input_ids=ids.masked_fill(masked, MASK_ID), attention_mask=everything).last_hidden_state
    logits: Tensor = model.lm_head(hidden[masked])
    return logits


# ---- what is masked --------------------------------------------------------------------------------------------------


def mask_counts(rng: np.random.Generator, count: int, length: int) -> NDArray[np.int64]:
    """How many tokens of `count` windows to mask, uniform over 1 .. length, evenly spread over the windows."""
    times = (rng.permutation(count) + rng.random()) / count
    return np.clip(np.ceil(times * length), 1, length).astype(np.int64)


def suffix_mask(rng: np.random.Generator, length: int) -> NDArray[np.bool_]:
    """The last tokens [L], up to LONGEST_SUFFIX of them and at most half of the window."""
    masked = np.zeros(length, dtype=np.bool_)
    masked[length - int(rng.integers(1, min(LONGEST_SUFFIX, length // 2) + 1)) :] = True
    return masked


def draw_mask(rng: np.random.Generator, pattern: str, length: int, num_masked: int) -> NDArray[np.bool_]:
    """A mask [L] of one of PATTERNS, with `num_masked` positions; a suffix draws its own length."""
    if pattern == "suffix":
        return suffix_mask(rng, length)
    return (random_mask if pattern == "random" else span_mask)(rng, length, num_masked)


def draw_masks(rng: np.random.Generator, *, count: int, length: int) -> NDArray[np.bool_]:
    """What is masked in the windows of a step, [B, L]: PATTERNS in their shares, at least one token of each window."""
    patterns = rng.choice(PATTERNS, size=count, p=PATTERN_SHARES)
    sizes = mask_counts(rng, count, length).tolist()
    return np.stack([draw_mask(rng, pattern, length, size) for pattern, size in zip(patterns, sizes, strict=True)])


# ---- the objective ---------------------------------------------------------------------------------------------------


def token_weights(masked: Tensor, heaviest: float = HEAVIEST) -> Tensor:
    """The weight of each token, [B, L]: L / masked tokens of its window, at most `heaviest`; 0 for unmasked tokens."""
    share = masked.float().mean(1, keepdim=True)
    return masked / share.clamp(min=1.0 / heaviest)


def weighted_loss(model: LlamaForCausalLM, ids: Tensor, masked: Tensor) -> Tensor:
    """The weighted cross-entropy in nats of the masked tokens, over the number of all tokens [B, L]."""
    with loop.autocast(ids.device):
        logits = masked_logits(model, ids, masked)
    nats = functional.cross_entropy(logits.float(), ids[masked], reduction="none")
    return (nats * token_weights(masked)[masked]).sum() / ids.numel()


class Trainer(loop.Trainer[LlamaForCausalLM]):
    """Draws windows of packed files, masks them and scores the masked tokens."""

    def __init__(self, model: LlamaForCausalLM, plan: loop.Schedule, stream: TokenStream, device: torch.device) -> None:
        super().__init__(model, plan, device)
        self.ids = causal.pack(stream, plan.seed)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """The windows of a step and their masks, [B, L] each: a function of (seed, step)."""
        plan, length = self.schedule, self.schedule.length(step)
        count = max(1, plan.batch_tokens // length)
        ids = causal.training_windows(self.ids, seed=plan.seed, step=step, count=count, length=length - 1)
        masked = draw_masks(np.random.default_rng([plan.seed, step, MASK_DRAWS]), count=count, length=length)
        return torch.from_numpy(ids).to(self.device), torch.from_numpy(masked).to(self.device)

    def batch_loss(self, step: int) -> tuple[Tensor, int]:
        """The loss of the step's batch, and its tokens."""
        ids, masked = self.batch(step)
        return weighted_loss(self.model, ids, masked), ids.numel()
