"""Progressive consistency distillation: trains a causal model to reach its own greedy text in fewer Jacobi iterations.

A step's loss is L_consistency + w_clean * L_AR(trajectories) + w_text * L_AR(corpus). The first is the cross-entropy of
the model at a block's noisy copy against itself, detached, at the clean copy, over the rows from the first divergence
on (pcLLM, equation 8, with clean context for the teacher); the second keeps the model at the text it was to reach
(equation 9); the third is not in the paper: the model's own greedy text is far less varied than the corpus, and without
it the held-out perplexity grows.
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

    `window` is the number of blocks that share noisy context (packing.visibility; None: all of them).
    """

    samples: int = 4
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
    consistency = functional.cross_entropy(student, teacher, reduction="sum") / max(1, len(batch.student))
    return consistency, functional.cross_entropy(clean, batch.targets)


class Trainer(loop.Trainer[Qwen2ForCausalLM]):
    """Draws trajectories and corpus windows; a trajectory's place in the noise schedule is drawn each time."""

    def __init__(
        self,
        model: Qwen2ForCausalLM,
        plan: Plan,
        trajectories: Sequence[Trajectory],
        text: NDArray[np.int64],
        device: torch.device,
    ) -> None:
        super().__init__(model, plan, device)
        self.plan, self.trajectories, self.text = plan, trajectories, text

    def batch(self, step: int) -> Batch:
        """The trajectories of a step, a function of (seed, step)."""
        rng = np.random.default_rng([self.plan.seed, step, 2])
        ratios = packing.progressive_ratios(self.plan.ratios)
        chosen = [self.trajectories[i] for i in rng.integers(len(self.trajectories), size=self.plan.samples)]
        packed = [
            packing.pack(one, packing.noisy_states(one.blocks, ratios, int(rng.integers(len(ratios)))))
            for one in chosen
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
            loss = loss + plan.text_weight * causal.next_token_loss(
                self.model, torch.from_numpy(windows).to(self.device)
            )
            tokens += windows.size
        return loss, tokens
