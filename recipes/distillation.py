"""Progressive consistency distillation: trains a causal model to reach its own greedy text in fewer Jacobi iterations.

A step's loss is L_consistency + w_clean * L_AR + w_text * L_text. The first is the cross-entropy of the model at a block's
noisy copy against itself, detached, at the clean copy, over the rows from the first divergence on (pcLLM, equation 8,
with clean context for the teacher); the second, on prompts and clean copies, keeps the model at the text that it should
reach (equation 9). The third is not in the paper: the cross-entropy against the distribution of the model that all began with, on
windows of the corpus. A small model's greedy text is far less varied than the corpus; trained on it alone, the model
forgets what else it knew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from transformers import Qwen2ForCausalLM

from recipes import causal, loop, packing
from recipes.packing import Batch, Trajectory


@dataclass(frozen=True)
class Plan(loop.Schedule):
    """One round: `samples` trajectories and `batch_tokens` of corpus windows a step, noise ratios of `ratios` blocks.

    A trajectory is packed with `versions` noisy versions. `window` is the number of blocks that share noisy context
    (packing.visibility; None: all of them).
    """

    samples: int = 4
    versions: int = 3
    ratios: int = 16
    window: int | None = None
    clean_weight: float = 1.0
    text_weight: float = 1.0


def losses(model: Qwen2ForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Consistency and AR loss of a batch, each the mean over its rows in nats; the first is 0 without a noisy row."""
    with loop.autocast(batch.ids.device):
        mask = batch.visible.unsqueeze(1)
        hidden = model.model(
            input_ids=batch.ids, position_ids=batch.positions, attention_mask={"full_attention": mask}
        ).last_hidden_state.flatten(0, 1)
        student = model.lm_head(hidden[batch.student]).float()
        clean = model.lm_head(hidden[batch.inputs]).float()
        with torch.no_grad():
            teacher = model.lm_head(hidden[batch.teacher]).float().softmax(-1)
    return soft_cross_entropy(student, teacher), functional.cross_entropy(clean, batch.targets)


def soft_cross_entropy(logits: Tensor, law: Tensor) -> Tensor:
    """Mean over the rows [R, V] in nats; 0 where there are none."""
    return functional.cross_entropy(logits, law, reduction="sum") / max(1, len(logits))


def text_loss(model: Qwen2ForCausalLM, source: Qwen2ForCausalLM, windows: Tensor) -> Tensor:
    """Mean cross-entropy in nats of the model's distribution against the source's at every token of `windows` [B, L]."""
    with loop.autocast(windows.device):
        with torch.no_grad():
            law = source(input_ids=windows).logits.float().softmax(-1)
        logits = model(input_ids=windows).logits.float()
    return soft_cross_entropy(logits.flatten(0, 1), law.flatten(0, 1))


class Trainer(loop.Trainer[Qwen2ForCausalLM]):
    """Draws trajectories and corpus windows; a trajectory's place in the noise schedule is drawn each time."""

    def __init__(
        self,
        model: Qwen2ForCausalLM,
        plan: Plan,
        trajectories: Sequence[Trajectory],
        text: NDArray[np.int64],
        source: Qwen2ForCausalLM,
        *,
        device: torch.device,
    ) -> None:
        super().__init__(model, plan, device)
        self.plan, self.trajectories, self.text, self.source = plan, trajectories, text, source

    def batch(self, step: int) -> Batch:
        """The trajectories of a step, a function of (seed, step)."""
        rng = np.random.default_rng([self.plan.seed, step, 2])
        ratios = packing.progressive_ratios(self.plan.ratios)
        chosen = [self.trajectories[i] for i in rng.integers(len(self.trajectories), size=self.plan.samples)]
        places = rng.integers(len(ratios), size=(len(chosen), self.plan.versions))
        packed = [
            packing.pack(one, *(packing.noisy_states(one.blocks, ratios, int(offset)) for offset in offsets))
            for one, offsets in zip(chosen, places, strict=True)
        ]
        return packing.collate(packed, self.plan.window)

    def batch_loss(self, step: int) -> tuple[Tensor, int]:
        """The sum of the three losses and how many tokens were read."""
        plan, batch = self.plan, self.batch(step).to(self.device)
        consistency, clean = losses(self.model, batch)
        loss, tokens = consistency + plan.clean_weight * clean, batch.ids.numel()
        if plan.text_weight:
            length = plan.length(step)
            count = max(1, plan.batch_tokens // length)
            windows = causal.training_windows(self.text, seed=plan.seed, step=step, count=count, length=length)
            text = torch.from_numpy(windows).to(self.device)
            loss = loss + plan.text_weight * text_loss(self.model, self.source, text)
            tokens += windows.size
        return loss, tokens
