"""A block-diffusion model and its training on packed files: the bound on every block given the clean text before it.

The model is transformers' Qwen3, which is what an SDAR checkpoint holds, run over the sequence of `recipes.block_layout`:
a masked token is predicted at its own place. Sizes of blocks, and clean copies with and without sight of their own block's
later tokens, are mixed within a step: a decoder may use any of them. In blocks of one token the model predicts as a causal
one does, so the causal model that training starts from also teaches it (Hinton et al., 2015, "Distilling the knowledge in a
neural network"). Nothing here knows of decoding.

Legend: W = windows, L = tokens of a window, R = masked tokens of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle
from transformers import Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from recipes import absorbing, causal, loop
from recipes.block_layout import draw_layouts, draw_mask, visibility
from recipes.causal import Shape
from recipes.corpus import MASK_ID, TokenStream

RMS_NORM_EPS, ROPE_THETA = 1e-6, 10_000.0
PROBES, PROBE_LENGTH = 4, 256  # windows that measure the size of a causal model's queries and keys
TAUGHT = 0.75
"""The share of the teacher's distribution in the next-token loss; it carries more information than the true token."""
MASK_DRAWS = 2  # the stream of random numbers that lays out and masks a step's windows; `Schedule.length` has 1


def empty_model(shape: Shape) -> Qwen3ForCausalLM:
    """A model in float32 whose weights must still be filled in; the global generator is unchanged."""
    config = Qwen3Config(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.hidden_size // shape.num_attention_heads,
        max_position_embeddings=causal.MAX_LENGTH,
        rms_norm_eps=RMS_NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        attention_bias=False,
        tie_word_embeddings=True,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        return Qwen3ForCausalLM(config)


@torch.no_grad()
def sizes_of(model: Qwen2ForCausalLM, ids: Tensor) -> dict[str, Tensor]:
    """The size of a layer's queries and keys over the tokens [W, L], under Qwen3's names for their scales.

    It is the root mean square over a head's columns, the mean of heads and tokens.
    """
    sizes: dict[str, Tensor] = {}
    head = model.config.hidden_size // model.config.num_attention_heads

    def watch(module: nn.Module, name: str) -> RemovableHandle:
        def keep(_: nn.Module, __: object, out: Tensor) -> None:
            sizes[name] = out.unflatten(-1, (-1, head)).pow(2).mean(-1).sqrt().mean()

        return module.register_forward_hook(keep)

    ends = ("q_proj", "k_proj")
    projections = {name: module for name, module in model.named_modules() if name.endswith(ends)}
    hooks = [watch(module, name.replace("proj", "norm.weight")) for name, module in projections.items()]
    model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return sizes


def model_from(start: Path, ids: Tensor) -> Qwen3ForCausalLM:
    """A model with the weights of a causal one, which makes training much shorter.

    Qwen2's biases of queries, keys and values do not exist in this layout and are dropped. Qwen3 scales every query and
    key to a learned size: it starts as the mean size in the causal model over some text `ids` [W, L], so that its
    attention is nearly as sharp.
    """
    model, source = empty_model(absorbing.shape_of(start)), causal.load_model(start, torch.device("cpu"))
    kept = {name: tensor for name, tensor in source.state_dict().items() if not name.endswith("proj.bias")}
    norms = {name: size.expand(model.config.head_dim) for name, size in sizes_of(source, ids).items()}
    model.load_state_dict(kept | norms)
    return model


@dataclass(frozen=True)
class Batch:
    """Windows [W, L], what is masked of them, what a token counts, which rows see which [W, 2L, 2L], and in which windows
    blocks have one token [W]."""

    ids: Tensor
    masked: Tensor
    weight: Tensor
    visible: Tensor
    single: Tensor


def noisy_states(model: Qwen3ForCausalLM, noisy: Tensor, clean: Tensor, visible: Tensor) -> Tensor:
    """The last layer's states of a noisy copy [W, L] above its clean one [W, L]; `visible` [W or 1, 2L, 2L]."""
    length = noisy.shape[1]
    positions = torch.arange(length, device=noisy.device).repeat(2).unsqueeze(0)
    rows = torch.cat([noisy, clean], 1)
    out = model.model(input_ids=rows, attention_mask=visible.unsqueeze(1), position_ids=positions)
    states: Tensor = out.last_hidden_state[:, :length]
    return states


def masked_logits(model: Qwen3ForCausalLM, ids: Tensor, masked: Tensor, visible: Tensor) -> Tensor:
    """Logits of the masked positions, row by row, [R, V]; `visible` as above."""
    logits: Tensor = model.lm_head(noisy_states(model, ids.masked_fill(masked, MASK_ID), ids, visible)[masked])
    return logits


def next_token_law(teacher: Qwen2ForCausalLM, windows: Tensor) -> Tensor:
    """The causal model's distribution of every token of the windows [W, L] but the first, as probabilities [W * (L - 1), V]."""
    with torch.no_grad(), loop.autocast(windows.device):
        logits = teacher(input_ids=windows[:, :-1]).logits
    law: Tensor = logits.float().softmax(-1).flatten(0, 1)
    return law


def token_nats(logits: Tensor, batch: Batch, teacher: Qwen2ForCausalLM | None) -> Tensor:
    """The cross-entropy of every masked token [R]; in blocks of one token the teacher's distribution has share TAUGHT."""
    nats = functional.cross_entropy(logits, batch.ids[batch.masked], reduction="none")
    if teacher is None or not batch.single.any():
        return nats
    place = torch.arange(batch.ids.shape[1], device=batch.ids.device)
    taught = (batch.single.unsqueeze(1) & (place > 0))[batch.masked]
    soft = functional.cross_entropy(logits[taught], next_token_law(teacher, batch.ids[batch.single]), reduction="none")
    return nats.masked_scatter(taught, TAUGHT * soft + (1 - TAUGHT) * nats[taught])


def weighted_loss(model: Qwen3ForCausalLM, batch: Batch, teacher: Qwen2ForCausalLM | None = None) -> Tensor:
    """The weighted cross-entropy in nats of the masked tokens, over the number of all tokens."""
    with loop.autocast(batch.ids.device):
        logits = masked_logits(model, batch.ids, batch.masked, batch.visible)
    nats = token_nats(logits.float(), batch, teacher)
    return (nats * batch.weight[batch.masked]).sum() / batch.ids.numel()


class Trainer(loop.Trainer[Qwen3ForCausalLM]):
    """Draws windows of packed files, lays them out, masks them and scores what is masked.

    From step `teach_from` on the starting model's next-token distribution is a target, too.
    """

    def __init__(
        self, start: Path, plan: loop.Schedule, stream: TokenStream, device: torch.device, teach_from: int = 0
    ) -> None:
        self.ids = causal.pack(stream, plan.seed)
        probes = self.ids[: PROBES * PROBE_LENGTH].reshape(-1, min(PROBE_LENGTH, len(self.ids) // PROBES))
        super().__init__(model_from(start, torch.from_numpy(probes)), plan, device)
        self.teacher, self.teach_from = causal.load_model(start, device), teach_from

    def batch(self, step: int) -> Batch:
        """The windows of a step: a function of (seed, step)."""
        plan, length = self.schedule, self.schedule.length(step)
        count = max(1, plan.batch_tokens // length)
        ids = causal.training_windows(self.ids, seed=plan.seed, step=step, count=count, length=length - 1)
        rng = np.random.default_rng([plan.seed, step, MASK_DRAWS])
        layouts = draw_layouts(rng, count)
        masked, weight = zip(*(draw_mask(rng, length, layout.block) for layout in layouts), strict=True)
        drawn = [torch.from_numpy(part) for part in (ids, np.stack(masked), np.stack(weight))]
        seen = torch.stack([visibility(length, layout) for layout in layouts])
        single = torch.tensor([layout.block == 1 for layout in layouts])
        return Batch(*(part.to(self.device) for part in (*drawn, seen, single)))

    def batch_loss(self, step: int) -> tuple[Tensor, int]:
        """The loss of the step's batch, and its tokens."""
        batch, teacher = self.batch(step), self.teacher if step >= self.teach_from else None
        return weighted_loss(self.model, batch, teacher), batch.ids.numel()
