"""Progressive consistency distillation: trains a causal model to reach its own greedy text in fewer Jacobi iterations.

A step's loss is L_consistency + w_clean * L_AR + w_text * L_text. The first is the cross-entropy of the model at a block's
noisy copy against itself, detached, at the clean copy, over the rows from the first divergence on (pcLLM, equation 8,
with clean context for the teacher); the second, on prompts and clean copies, keeps the model at the text that it should
reach (equation 9). The third is not in the paper: the cross-entropy against the distribution of the model that all began with, on
windows of the corpus. A small model's greedy text is far less varied than the corpus; trained on it alone, the model
forgets what else it knew.

Not in the paper either, each off by default: `fade` weighs a row less the further it is behind the divergence, since a draft
is accepted only if all before it are; `sharp` moves a share of the teacher's distribution to its first choice, which is what
greedy decoding accepts; `soft_clean` measures L_AR against the distribution of the model that all began with, where the
fixed points' tokens would teach it to be too sure of them. LiveTrainer takes its noisy copies from the model as it trains.
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
from recipes.live_drafts import LiveDrafts
from recipes.packing import Batch, Trajectory


@dataclass(frozen=True)
class Plan(loop.Schedule):
    """One round: `samples` trajectories and `batch_tokens` of corpus windows a step, noise ratios of `ratios` blocks.

    A trajectory is packed with `versions` noisy versions. `window` is the number of blocks that share noisy context
    (packing.visibility; None: all of them). `fade` is the weight of a row over that of the row before it.
    """

    samples: int = 4
    versions: int = 3
    ratios: int = 16
    window: int | None = None
    clean_weight: float = 1.0
    text_weight: float = 1.0
    fade: float = 1.0
    sharp: float = 0.0
    soft_clean: bool = False


@dataclass(frozen=True)
class Losses:
    """The consistency and the AR loss of a batch, each the mean over its rows in nats, and what the student rows say [R].

    The consistency loss is 0 without a noisy row.
    """

    consistency: Tensor
    clean: Tensor
    predicted: Tensor


def losses(
    model: Qwen2ForCausalLM,
    batch: Batch,
    *,
    fade: float = 1.0,
    sharp: float = 0.0,
    source: Qwen2ForCausalLM | None = None,
) -> Losses:
    """The losses of a batch; with a `source`, the AR loss is against its distribution instead of the tokens."""
    with loop.autocast(batch.ids.device):
        mask = batch.visible.unsqueeze(1)
        hidden = model.model(
            input_ids=batch.ids, position_ids=batch.positions, attention_mask={"full_attention": mask}
        ).last_hidden_state.flatten(0, 1)
        student = model.lm_head(hidden[batch.student]).float()
        clean = model.lm_head(hidden[batch.inputs]).float()
        with torch.no_grad():
            teacher = sharpen(model.lm_head(hidden[batch.teacher]).float().softmax(-1), sharp)
            law = None if source is None else source_law(source, batch)
    weights = fade ** batch.depth.float()
    consistency = -((teacher * student.log_softmax(-1)).sum(-1) * weights).sum() / weights.sum().clamp(min=1.0)
    return Losses(
        consistency, functional.cross_entropy(clean, batch.targets if law is None else law), student.argmax(-1)
    )


def sharpen(law: Tensor, share: float) -> Tensor:
    """The distributions [R, V] with `share` of each moved to its most likely token."""
    first = functional.one_hot(law.argmax(-1), law.shape[-1])
    return law + share * (first - law)


def source_law(source: Qwen2ForCausalLM, batch: Batch) -> Tensor:
    """The source's distribution after every row of `batch.inputs`, [R, V], from the prompts and clean copies alone."""
    samples, places = batch.inputs // batch.ids.shape[1], batch.positions.flatten()[batch.inputs]
    lines = batch.ids.new_zeros(len(batch.ids), int(places.max()) + 1)
    lines[samples, places] = batch.ids.flatten()[batch.inputs]
    hidden = source.model(input_ids=lines).last_hidden_state
    law: Tensor = source.lm_head(hidden[samples, places]).float().softmax(-1)
    return law


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
            packing.pack(
                trajectory, *(packing.noisy_states(trajectory.blocks, ratios, int(offset)) for offset in offsets)
            )
            for trajectory, offsets in zip(chosen, places, strict=True)
        ]
        return packing.collate(packed, self.plan.window)

    def trajectory_losses(self, step: int) -> tuple[Losses, int]:
        """The losses of a step's trajectories, and how many tokens were read."""
        batch = self.batch(step).to(self.device)
        return self.losses(batch), batch.ids.numel()

    def losses(self, batch: Batch) -> Losses:
        """The losses of a batch as the plan has them."""
        plan = self.plan
        source = self.source if plan.soft_clean else None
        return losses(self.model, batch, fade=plan.fade, sharp=plan.sharp, source=source)

    def batch_loss(self, step: int) -> tuple[Tensor, int]:
        """The sum of the three losses and how many tokens were read."""
        plan = self.plan
        losses, tokens = self.trajectory_losses(step)
        loss = losses.consistency + plan.clean_weight * losses.clean
        if plan.text_weight:
            length = plan.length(step)
            count = max(1, plan.batch_tokens // length)
            windows = causal.training_windows(self.text, seed=plan.seed, step=step, count=count, length=length)
            text = torch.from_numpy(windows).to(self.device)
            loss = loss + plan.text_weight * text_loss(self.model, self.source, text)
            tokens += windows.size
        return loss, tokens


class LiveTrainer(Trainer):
    """Takes the noisy copies from `drafts`, which every step carries one Jacobi iteration further.

    A step's texts are neighbours in length, `most_rows` rows of them at most, so that little of a batch is padding.
    """

    def __init__(
        self,
        model: Qwen2ForCausalLM,
        plan: Plan,
        drafts: LiveDrafts,
        text: NDArray[np.int64],
        source: Qwen2ForCausalLM,
        *,
        device: torch.device,
        most_rows: int,
    ) -> None:
        super().__init__(model, plan, drafts.texts, text, source, device=device)
        self.drafts, self.most_rows = drafts, most_rows
        self.by_length = sorted(range(len(drafts.texts)), key=lambda number: len(drafts.texts[number].prompt))

    def more_state(self) -> dict[str, Tensor]:
        """The drafts."""
        return {"drafts": torch.from_numpy(self.drafts.drafts)}

    def trajectory_losses(self, step: int) -> tuple[Losses, int]:
        """The losses of a step's texts; moves their drafts on."""
        rng = np.random.default_rng([self.plan.seed, step, 2])
        numbers = self._neighbours(rng)
        packed = [packing.pack(self.drafts.texts[i], *self.drafts.versions(i)) for i in numbers]
        batch = packing.collate(packed, self.plan.window)
        losses = self.losses(batch.to(self.device))
        length, rows, predicted = batch.ids.shape[1], batch.student.numpy(), losses.predicted.cpu().numpy()
        of = [rows // length == place for place in range(len(numbers))]
        self.drafts.advance(
            numbers, packed, [rows[mine] % length for mine in of], [predicted[mine] for mine in of], rng
        )
        return losses, batch.ids.numel()

    def _neighbours(self, rng: np.random.Generator) -> list[int]:
        """Texts of about the same length: one that is drawn, and some of those just below it."""
        last = int(rng.integers(len(self.by_length)))
        new = self.drafts.final.shape[1]
        rows = len(self.drafts.texts[self.by_length[last]].prompt) + (1 + self.plan.versions) * new
        count = max(1, self.most_rows // rows)
        below = np.arange(max(0, last - 4 * count), last)
        others = rng.choice(below, size=min(count - 1, len(below)), replace=False)
        return [self.by_length[i] for i in (last, *others)]
