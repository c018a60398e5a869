"""Packs Jacobi trajectories: one sequence per sample with noisy and clean copies of every block.

    prompt | noisy_0 | clean_0 | noisy_1 | clean_1 | ...      noisy_j and clean_j have the same positions

    a row of       sees, at its own position or before it
    prompt         the prompt
    clean_j        the prompt, clean_0 .. clean_j
    noisy_j        the prompt, clean_i of earlier windows of blocks, noisy_i of its own window up to noisy_j

noisy_j is a state of block j's Jacobi iteration, clean_j its fixed point. With one window for all blocks this is the
noise-conditioned mask of the paper (anonymous, "AR models can be faster and more accurate parallel decoders than
diffusion LLMs", pcLLM, section 3.1, figure 1b); windows of one block give its clean-context mask (figure 1a). Several
noisy versions of the whole sample, which do not see each other, can share its prompt and clean copies: the paper has one.

Legend: L = rows of a packed sequence, P = prompt tokens, K = blocks, S = states of a block, n = its tokens.
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
    """One sample's rows [L]: tokens, positions, their kind, of which block they are (-1: the prompt) and which version."""

    ids: IDS
    positions: IDS
    kind: IDS
    block: IDS
    version: IDS


def progressive_ratios(window: int) -> NDArray[np.float64]:
    """The noise ratios of a window's blocks: 0, 1/w, ..., (w-1)/w (pcLLM, equation 7)."""
    return np.arange(window) / window


def noise(states: IDS) -> NDArray[np.float64]:
    """The noise ratio of every state [S, n]: the share of the block from its first difference to the fixed point on."""
    differs = states != states[-1]
    first = np.where(differs.any(1), differs.argmax(1), states.shape[1])
    return 1 - first / states.shape[1]


def noisy_states(blocks: Sequence[IDS], ratios: NDArray[np.float64], offset: int = 0) -> list[IDS]:
    """Per block j the state [n] whose noise ratio is nearest to `ratios[(j + offset) mod w]`, the earliest on ties."""
    return [
        states[np.abs(noise(states) - ratios[(j + offset) % len(ratios)]).argmin()] for j, states in enumerate(blocks)
    ]


def pack(trajectory: Trajectory, *versions: Sequence[IDS]) -> Packed:
    """The rows of one sample; every version gives the noisy copy [n] of each block."""
    num_prompt = len(trajectory.prompt)
    pieces = [_piece(trajectory.prompt, 0, PROMPT, -1, 0)]
    start = num_prompt
    for j, states in enumerate(trajectory.blocks):
        pieces += [_piece(noisy[j], start, NOISY, j, number) for number, noisy in enumerate(versions)]
        pieces.append(_piece(states[-1], start, CLEAN, j, 0))
        start += len(states[-1])
    return Packed(*(np.concatenate(rows) for rows in zip(*pieces, strict=True)))


def _piece(ids: IDS, start: int, *constants: int) -> tuple[IDS, ...]:
    return (ids, np.arange(start, start + len(ids)), *(np.full(len(ids), constant) for constant in constants))


def visibility(rows: dict[str, Tensor], window: int | None) -> Tensor:
    """Which row [.., L] sees which [.., L, L], `window` blocks to a window (None: one window). A padding row sees itself.

    `rows` has positions, kind, block and version of every row.
    """
    block = rows["block"]
    group = torch.zeros_like(block) if window is None else block.div(window, rounding_mode="floor")
    of_q = {name: row.unsqueeze(-1) for name, row in {**rows, "group": group}.items()}
    of_k = {name: row.unsqueeze(-2) for name, row in {**rows, "group": group}.items()}
    from_noisy, to_clean = of_q["kind"] == NOISY, of_k["kind"] == CLEAN
    same_noisy = (of_k["kind"] == NOISY) & (of_q["version"] == of_k["version"]) & (of_q["group"] == of_k["group"])
    copies = torch.where(from_noisy, same_noisy | (to_clean & (of_k["group"] < of_q["group"])), to_clean)
    seen = (of_k["positions"] <= of_q["positions"]) & ((of_k["kind"] == PROMPT) | copies)
    padding = (of_q["kind"] == PADDING) | (of_k["kind"] == PADDING)
    return torch.where(padding, torch.eye(block.shape[-1], dtype=torch.bool, device=block.device), seen)


@dataclass(frozen=True)
class Batch:
    """Samples side by side, padded on the right: rows [B, L] as in Packed, and indices into the B * L rows.

    `student[r]` is a noisy row from its block's first divergence on, `teacher[r]` the clean row at its position, and
    `depth[r]` how many rows it is from that divergence; `inputs[r]` is a prompt or clean row whose next token is `targets[r]`.
    """

    ids: Tensor
    positions: Tensor
    visible: Tensor
    student: Tensor
    teacher: Tensor
    depth: Tensor
    inputs: Tensor
    targets: Tensor

    def to(self, device: torch.device) -> Batch:
        return Batch(**{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})


def collate(samples: Sequence[Packed], window: int | None) -> Batch:
    """One batch of `samples`; `window` as in `visibility`."""
    length = max(len(sample.ids) for sample in samples)
    fill = {"ids": 0, "positions": 0, "kind": PADDING, "block": 0, "version": 0}
    rows = {name: _padded(samples, name, length, value) for name, value in fill.items()}
    pairs = [_pairs(sample) for sample in samples]
    student, teacher, inputs, following = (
        torch.from_numpy(np.concatenate([pair[part] + number * length for number, pair in enumerate(pairs)]))
        for part in range(4)
    )
    depth = torch.from_numpy(np.concatenate([pair[4] for pair in pairs]))
    targets = rows["ids"].flatten()[following]
    visible = visibility(rows, window)
    return Batch(rows["ids"], rows["positions"], visible, student, teacher, depth, inputs, targets)


def _padded(samples: Sequence[Packed], name: str, length: int, fill: int) -> Tensor:
    rows = [getattr(sample, name) for sample in samples]
    return torch.from_numpy(np.stack([np.pad(row, (0, length - len(row)), constant_values=fill) for row in rows]))


def _pairs(sample: Packed) -> tuple[IDS, IDS, IDS, IDS, IDS]:
    """Rows of one sample: student and teacher of the consistency loss; inputs of the AR loss and the rows that follow; depths."""
    noisy, line = np.flatnonzero(sample.kind == NOISY), np.flatnonzero(sample.kind != NOISY)
    clean = line[sample.positions[noisy]]  # the prompt and the clean copies, end to end, stand at 0, 1, 2, ...
    run = sample.block[noisy] * (1 + sample.version.max()) + sample.version[noisy]
    differs = sample.ids[noisy] != sample.ids[clean]
    seen = np.cumsum(differs)
    starts = np.searchsorted(run, run)  # of each row's noisy copy
    diverged = seen > (seen - differs)[starts]
    since = np.cumsum(diverged)
    depth = (since - (since - diverged)[starts] - 1)[diverged]
    return noisy[diverged], clean[diverged], line[:-1], line[1:], depth
