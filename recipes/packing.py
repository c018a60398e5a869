"""Packs Jacobi trajectories into one sequence per sample, in which noisy and clean copies of every block share a forward.

    prompt | noisy_0 | clean_0 | noisy_1 | clean_1 | ...      noisy_j and clean_j stand at the same positions

    a row of       sees, at its own position or before it
    prompt         the prompt
    clean_j        the prompt, clean_0 .. clean_j
    noisy_j        the prompt, clean_i of earlier windows of blocks, noisy_i of its own window up to noisy_j

noisy_j is a state of block j's Jacobi iteration, clean_j its fixed point. With one window for all blocks this is the
noise-conditioned mask of the paper (anonymous, "AR models can be faster and more accurate parallel decoders than
diffusion LLMs", pcLLM, section 3.1, figure 1b); windows of one block give its clean-context mask (figure 1a).

Legend: B = samples, L = rows of a packed sequence, P = prompt tokens, K = blocks, S = states of a block, n = its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PROMPT, NOISY, CLEAN, PADDING = range(4)
IDS = NDArray[np.int64]


@dataclass(frozen=True)
class Trajectory:
    """One sample: its prompt [P] and, per block, the states [S, n], from the first draft to the fixed point."""

    prompt: IDS
    blocks: list[IDS]


@dataclass(frozen=True)
class Packed:
    """One sample's rows [L]: tokens, positions, what kind of copy they belong to, and of which block (-1: the prompt)."""

    ids: IDS
    positions: IDS
    kind: IDS
    block: IDS


def progressive_ratios(window: int) -> NDArray[np.float64]:
    """The noise ratios of a window's blocks: 0, 1/w, ..., (w-1)/w (pcLLM, equation 7)."""
    return np.arange(window) / window


def noise(states: IDS) -> NDArray[np.float64]:
    """The noise ratio of every state [S, n]: the share of the block from its first difference to the fixed point on."""
    differs = states != states[-1]
    first = np.where(differs.any(1), differs.argmax(1), states.shape[1])
    return 1 - first / states.shape[1]


def noisy_states(blocks: Sequence[IDS], ratios: NDArray[np.float64], offset: int = 0) -> list[IDS]:
    """Per block j the state [n] whose noise ratio is nearest to `ratios[(j + offset) mod w]`, the earliest among equals."""
    return [
        states[np.abs(noise(states) - ratios[(j + offset) % len(ratios)]).argmin()] for j, states in enumerate(blocks)
    ]


def pack(trajectory: Trajectory, noisy: Sequence[IDS]) -> Packed:
    """The rows of one sample whose blocks' noisy copies are `noisy`, each [n]."""
    num_prompt = len(trajectory.prompt)
    ids, kind, block = [trajectory.prompt], [np.full(num_prompt, PROMPT)], [np.full(num_prompt, -1)]
    positions, start = [np.arange(num_prompt)], num_prompt
    for j, (state, states) in enumerate(zip(noisy, trajectory.blocks, strict=True)):
        n = len(state)
        for copy, name in ((state, NOISY), (states[-1], CLEAN)):
            ids.append(copy)
            positions.append(np.arange(start, start + n))
            kind.append(np.full(n, name))
            block.append(np.full(n, j))
        start += n
    return Packed(np.concatenate(ids), np.concatenate(positions), np.concatenate(kind), np.concatenate(block))


def visibility(kind: Tensor, block: Tensor, positions: Tensor, window: int | None) -> Tensor:
    """Which row [.., L] sees which [.., L, L], `window` blocks to a window (None: one window). A padding row sees itself."""
    group = torch.zeros_like(block) if window is None else block.div(window, rounding_mode="floor")
    kind_q, kind_k = kind.unsqueeze(-1), kind.unsqueeze(-2)
    group_q, group_k = group.unsqueeze(-1), group.unsqueeze(-2)
    same_copy = (kind_q == kind_k) & ((kind_q == CLEAN) | (group_q == group_k))
    clean_before = (kind_q == NOISY) & (kind_k == CLEAN) & (group_k < group_q)
    seen = (positions.unsqueeze(-2) <= positions.unsqueeze(-1)) & ((kind_k == PROMPT) | same_copy | clean_before)
    padding = (kind_q == PADDING) | (kind_k == PADDING)
    return torch.where(padding, torch.eye(kind.shape[-1], dtype=torch.bool, device=kind.device), seen)


@dataclass(frozen=True)
class Batch:
    """Samples side by side, padded on the right: rows [B, L] as in Packed, and indices into the B * L rows.

    `student[r]` is a noisy row from its block's first divergence on, `teacher[r]` the clean row at its position;
    `inputs[r]` is a prompt or clean row whose next token is `targets[r]`.
    """

    ids: Tensor
    positions: Tensor
    visible: Tensor
    student: Tensor
    teacher: Tensor
    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(**{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})


def collate(samples: Sequence[Packed], window: int | None) -> Batch:
    """One batch of `samples`; `window` as in `visibility`."""
    length = max(len(sample.ids) for sample in samples)
    ids, positions, block = (_padded(samples, name, length, 0) for name in ("ids", "positions", "block"))
    kind = _padded(samples, "kind", length, PADDING)
    pairs = [_pairs(sample) for sample in samples]
    student, teacher, inputs, following = (
        torch.from_numpy(np.concatenate([rows[part] + row * length for row, rows in enumerate(pairs)]))
        for part in range(4)
    )
    visible = visibility(kind, block, positions, window)
    return Batch(ids, positions, visible, student, teacher, inputs, ids.flatten()[following])


def _padded(samples: Sequence[Packed], name: str, length: int, fill: int) -> Tensor:
    rows = [getattr(sample, name) for sample in samples]
    return torch.from_numpy(np.stack([np.pad(row, (0, length - len(row)), constant_values=fill) for row in rows]))


def _pairs(sample: Packed) -> tuple[IDS, IDS, IDS, IDS]:
    """Rows of one sample: student and teacher of the consistency loss; inputs of the AR loss and the rows that follow."""
    noisy, clean = np.flatnonzero(sample.kind == NOISY), np.flatnonzero(sample.kind == CLEAN)
    block, differs = sample.block[noisy], sample.ids[noisy] != sample.ids[clean]
    seen = np.cumsum(differs)
    starts = np.searchsorted(block, block)  # of each row's block
    diverged = seen > (seen - differs)[starts]
    line = np.flatnonzero(sample.kind != NOISY)
    return noisy[diverged], clean[diverged], line[:-1], line[1:]
