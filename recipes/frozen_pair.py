"""Hidden states of a frozen drafter and target at the masks after a text, to train and measure draft heads.

A window of the packed files is a text whose last tokens are masked, as `specdiff` gives it to its drafter. Both models run as
they do there, through the decoders' own backbones. Each mask gives a *row*: both hidden states and the true tokens
before it. A draft head is trained on rows alone, so each row costs its forwards only once.

Legend: B windows, L tokens of a window, T tokens of the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftmill.decoders.backbones.base import Model
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.heads.markov import MarkovHead, distance_index
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.rows import token_rows
from draftmill.decoders.base import ModelInfo
from draftmill.decoders.draws.schedule import noise_of_share


@dataclass(frozen=True)
class Frozen:
    """A model, what is known of it, and its output layer in float32: logits are hidden_ND @ output_DV + bias_V."""

    model: Model
    info: ModelInfo
    output_DV: Tensor
    bias_V: Tensor

    def log_law(self, hidden_ND: Tensor, never: Sequence[int]) -> Tensor:
        """Log-probabilities [N, V] at temperature 1, some ids impossible; gradients pass, which they don't in `model.logits`."""
        logits_NV = hidden_ND.float() @ self.output_DV + self.bias_V
        return logits_NV.index_fill(-1, torch.tensor(never, device=logits_NV.device), -torch.inf).log_softmax(-1)


@dataclass(frozen=True)
class Pair:
    """A causal target and the masked-diffusion model that drafts for it."""

    target: Frozen
    drafter: Frozen

    @property
    def mask_id(self) -> int:
        """The id of a token that the drafter must fill in."""
        assert self.drafter.info.mask_id is not None, "a drafter without a mask token"
        return self.drafter.info.mask_id

    def never(self) -> list[int]:
        """The ids that are impossible under both distributions: those that one of the models suppresses, and the mask."""
        return sorted({*self.target.info.suppressed, *self.drafter.info.suppressed, self.mask_id})


def load_pair(target: Path, drafter: Path, dtype: str = "float32") -> Pair:
    """Load both models; ValueError if their kinds are wrong or their vocabularies differ in size."""
    infos = inspect_model(target), inspect_model(drafter)
    if infos[1].mask_id is None or infos[0].kind != "causal":
        raise ValueError(
            f"a causal model and a masked-diffusion model are needed, not {infos[0].family}, {infos[1].family}"
        )
    if infos[0].vocab_size != infos[1].vocab_size:
        raise ValueError(f"{target} has {infos[0].vocab_size} ids, {drafter} {infos[1].vocab_size}")
    return Pair(load_frozen(target, infos[0], dtype), load_frozen(drafter, infos[1], dtype))


def load_frozen(folder: Path, info: ModelInfo, dtype: str) -> Frozen:
    """The model in a folder, and its output layer."""
    model = load_backbone(folder, dtype=dtype)
    # Recover the output layer from its outputs, since each backbone stores its weights differently.
    bias_1V = model.logits(torch.zeros(1, model.width, dtype=model.dtype, device=model.device)).float()
    output_DV = model.logits(torch.eye(model.width, dtype=model.dtype, device=model.device)).float() - bias_1V
    return Frozen(model, info, output_DV, bias_1V[0])


@dataclass(frozen=True)
class PairRows:
    """Masks in windows: the drafter's and the target's hidden states [N, D], the two tokens before each, its place [N].

    `place` counts the masks before it in its window, which are the tokens that the drafter has not seen.
    """

    drafter: Tensor
    target: Tensor
    prev: Tensor
    before: Tensor
    place: Tensor

    def __len__(self) -> int:
        return len(self.place)

    def take(self, index_N: Tensor) -> PairRows:
        """Some of the rows."""
        return PairRows(*(getattr(self, field.name)[index_N] for field in fields(self)))

    def half(self) -> PairRows:
        """The same in float16, for keeping many."""
        return PairRows(self.drafter.half(), self.target.half(), self.prev, self.before, self.place)


def join(parts: Sequence[PairRows]) -> PairRows:
    """All rows of several batches."""
    return PairRows(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(PairRows)))


# ---- rows --------------------------------------------------------------------------------------------------------


def read_rows(pair: Pair, ids_BL: NDArray[np.int64], num_masks_B: NDArray[np.int64]) -> PairRows:
    """Run both models over the windows, whose last `num_masks_B` tokens (fewer than L) the drafter sees as masks."""
    device = pair.drafter.model.device
    ids, num_masks = torch.from_numpy(ids_BL).to(device), torch.from_numpy(num_masks_B).to(device)
    length = ids.shape[1]
    place_BL = torch.arange(length, device=device) - (length - num_masks.unsqueeze(1))
    masked_BL = place_BL >= 0
    window, position = masked_BL.nonzero(as_tuple=True)
    shown_BL = ids.masked_fill(masked_BL, pair.mask_id)
    sigma_G = torch.tensor(
        [noise_of_share(share) for share in masked_BL.double().mean(1).tolist()], dtype=torch.float64
    )
    theirs = _forward(pair.drafter.model, shown_BL, causal=False, sigma_G=sigma_G)
    truth = _forward(pair.target.model, ids, causal=True)
    return PairRows(
        drafter=theirs[window, position - pair.drafter.info.shift],
        target=truth[window, position - 1],
        prev=ids[window, position - 1],
        before=ids[window, (position - 2).clamp(min=0)],
        place=place_BL[masked_BL],
    )


def _forward(model: Model, ids_BL: Tensor, *, causal: bool, sigma_G: Tensor | None = None) -> Tensor:
    count, length = ids_BL.shape
    model.allocate(count, length)
    column_N = torch.arange(length, device=ids_BL.device).repeat(count)
    high_N = column_N + 1 if causal else torch.full_like(column_N, length)
    sight = torch.zeros_like(column_N).unsqueeze(0), high_N.unsqueeze(0)
    rows = token_rows(range(count), [length] * count, ids_BL.flatten(), column_N, column_N, sight, sigma_G=sigma_G)
    return model.forward(rows).unflatten(0, (count, length))


@dataclass(frozen=True)
class Windows:
    """Which windows to read: tokens per batch, lengths with their shares, and up to `most_masks` masks per window.

    The cost of a forward depends on its window's length, not on its masks: so windows are short and have many masks.
    """

    batch_tokens: int = 2048
    lengths: tuple[int, ...] = (40, 80, 160)
    length_shares: tuple[float, ...] = (0.4, 0.4, 0.2)
    most_masks: int = 16

    def draw(self, ids_T: NDArray[np.int64], *, seed: int, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The windows of a batch [B, L], from anywhere in `ids_T`, and how many masks each has [B]."""
        rng = np.random.default_rng([seed, step, 3])
        length = int(rng.choice(self.lengths, p=self.length_shares))
        starts = rng.integers(0, len(ids_T) - length + 1, size=max(1, self.batch_tokens // length))
        # The larger of two uniform draws: at least one mask, but rather many.
        num_masks = rng.integers(1, min(self.most_masks, length - 1) + 1, size=(2, len(starts))).max(0)
        return ids_T[starts[:, None] + np.arange(length)], num_masks


def read_step(pair: Pair, ids_T: NDArray[np.int64], windows: Windows, seed: int, step: int) -> PairRows:
    """The rows of a batch of windows drawn from `ids_T`."""
    return read_rows(pair, *windows.draw(ids_T, seed=seed, step=step))


def collect_rows(
    read: Callable[[int], PairRows], *, count: int, report: Callable[[int], None] = lambda done: None
) -> PairRows:
    """At least `count` rows in float16, of which `read` gives those of a step; `report(rows so far)` after every one."""
    parts, done = list[PairRows](), 0
    while done < count:
        parts.append(read(len(parts)).half())
        done += len(parts[-1])
        report(done)
    return join(parts)


# ---- distributions ---------------------------------------------------------------------------------------------------


def target_law(pair: Pair, rows: PairRows) -> Tensor:
    """Log-probabilities [N, V] of the target in float32 at temperature 1, without ids that the drafter cannot predict."""
    return pair.target.log_law(rows.target, pair.never())


def draft_law(pair: Pair, rows: PairRows, head: MarkovHead | None) -> Tensor:
    """Log-probabilities [N, V] of the drafter in float32 at temperature 1, corrected by the head; gradients reach the head."""
    hidden, embed = rows.drafter.float(), pair.drafter.model.embed
    if head is not None:
        here = torch.zeros_like(rows.place)
        hidden = head(
            hidden,
            prev_RD=embed(rows.prev).float(),
            prev_distance_R=distance_index(here, here - 1),
            before_RD=embed(rows.before).float(),
            before_distance_R=distance_index(here, here - 2),
            num_unseen_R=rows.place,
        )
    return pair.drafter.log_law(hidden, pair.never())
