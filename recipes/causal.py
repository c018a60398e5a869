"""A causal language model and its training on packed files: next-token loss over windows of one long stream.

The model is transformers' Qwen2ForCausalLM itself. The files, each between a begin and an end token, stand in one stream
in an order drawn from the seed; a window is any stretch of it and attends to all of itself, so it may cross from one
file into another (neighbours are random, so text before a begin token carries no information). Nothing here knows of
decoding.

Legend: B = windows, L = tokens of a window, T = tokens of the stream.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM

from draftmill.decoders.backbones.load import load_weights
from draftmill.decoders.backbones.quantized import find_form
from recipes import loop
from recipes.corpus import BOS_ID, EOS_ID, PAD_ID, TokenStream

MAX_LENGTH = 512


@dataclass(frozen=True)
class Shape:
    """A model's sizes, named as in config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int = 2048


def qwen2_config(shape: Shape) -> dict[str, Any]:
    """The whole of config.json. `draftmill.max_length` is the longest window trained on, in tokens."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        **asdict(shape),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": MAX_LENGTH,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "torch_dtype": "float16",
        "draftmill": {"max_length": MAX_LENGTH},
    }


def new_model(shape: Shape, seed: int) -> Qwen2ForCausalLM:
    """A model in float32 with weights drawn from `seed`; the global generator is left as it was."""
    settings = {key: value for key, value in qwen2_config(shape).items() if key != "torch_dtype"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(Qwen2Config(**settings, use_cache=False))


def load_model(folder: Path, device: torch.device) -> Qwen2ForCausalLM:
    """The stored model in float32: figures are measured on what is shipped."""
    config = Qwen2Config.from_pretrained(folder, attn_implementation="sdpa", use_cache=False)
    model = Qwen2ForCausalLM(config)
    weights = load_weights(folder, dtype=torch.float32, form=find_form(config.to_dict()))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if {*missing} - {"lm_head.weight"} or unexpected:
        raise ValueError(f"{folder}: {missing} missing, {unexpected} not of the model")
    torch.nn.Module.to(model, device)
    return model.eval()


def pack(stream: TokenStream, seed: int) -> NDArray[np.int64]:
    """All files end to end, int64 [T]: begin token, file, end token, in an order drawn from `seed`."""
    order = np.random.default_rng(seed).permutation(len(stream.bounds) - 1)
    parts = [
        part
        for file in order
        for part in ([BOS_ID], stream.ids[stream.bounds[file] : stream.bounds[file + 1]], [EOS_ID])
    ]
    return np.concatenate(parts)


def training_windows(ids: NDArray[np.int64], *, seed: int, step: int, count: int, length: int) -> NDArray[np.int64]:
    """The windows of one step, int64 [B, L + 1], from anywhere in `ids` [T]: `length` inputs and a last target."""
    starts = np.random.default_rng([seed, step]).integers(0, len(ids) - length, size=count)
    windows: NDArray[np.int64] = ids[starts[:, None] + np.arange(length + 1)]
    return windows


def next_token_loss(model: Qwen2ForCausalLM, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats of every token [B, L + 1] but the first, given those before it in its window."""
    with loop.autocast(windows.device):
        logits = model(input_ids=windows[:, :-1]).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())


class Trainer(loop.Trainer[Qwen2ForCausalLM]):
    """Draws windows of packed files and scores them by the next-token loss."""

    def __init__(self, model: Qwen2ForCausalLM, plan: loop.Schedule, stream: TokenStream, device: torch.device) -> None:
        super().__init__(model, plan, device)
        self.ids = pack(stream, plan.seed)

    def batch_loss(self, step: int) -> tuple[Tensor, int]:
        """The next-token loss of a batch whose windows have this step's length, and its tokens."""
        plan, length = self.schedule, self.schedule.length(step)
        count = max(1, plan.batch_tokens // length)
        windows = training_windows(self.ids, seed=plan.seed, step=step, count=count, length=length)
        return next_token_loss(self.model, torch.from_numpy(windows).to(self.device)), count * length
