"""Trains the two-stream model: the any-subset joint loss over masked windows.

Loss: mean cross-entropy over the masked positions, each under its own rank's visibility, in one two-stream forward
(Guo and Ermon, "Reviving Any-Subset Autoregressive Models", the joint training loss).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from recipes import loop
from recipes.corpus import TokenStream
from recipes.masking import MaskSchedule, Windows, decoding_ranks, training_batch
from recipes.two_stream import Canvas, QueryRows, TwoStream


@dataclass(frozen=True)
class Plan(loop.Schedule):
    """How to train: the loop's schedule, and which tokens are masked."""

    masks: MaskSchedule = field(default_factory=MaskSchedule)


def to_rows(windows: Windows, device: torch.device) -> tuple[Canvas, QueryRows, Tensor]:
    """The model's inputs for a batch and the true tokens [N] of its query rows, one row per masked position."""
    masked = torch.from_numpy(windows.masked).to(device)
    ids = torch.from_numpy(windows.ids).to(device)
    rank = torch.from_numpy(decoding_ranks(windows.masked)).to(device)
    index = masked.flatten().nonzero().squeeze(1)
    query = QueryRows(index, torch.from_numpy(windows.limit).to(device))
    return Canvas(ids, rank, (~masked).sum(1)), query, ids.flatten().index_select(0, index)


def joint_loss(model: TwoStream, windows: Windows, device: torch.device) -> Tensor:
    """Mean cross-entropy in nats over every masked position of the batch."""
    canvas, query, targets = to_rows(windows, device)
    with loop.autocast(device):
        logits = model.logits(model.read(canvas, model.context(canvas), query))
    return functional.cross_entropy(logits.float(), targets)


class Trainer(loop.Trainer[TwoStream]):
    """Draws the batches of a stream of tokens and scores them by the joint loss."""

    def __init__(self, model: TwoStream, plan: Plan, stream: TokenStream, device: torch.device) -> None:
        super().__init__(model, plan, device)
        self.plan, self.stream = plan, stream

    def batch_loss(self, step: int) -> tuple[Tensor, int]:
        """The joint loss of a batch whose windows have this step's length, and its tokens."""
        length = self.plan.length(step)
        count = max(1, self.plan.batch_tokens // length)
        windows = training_batch(
            self.stream, self.plan.masks, seed=self.plan.seed, step=step, count=count, length=length
        )
        return joint_loss(self.model, windows, self.device), count * length
