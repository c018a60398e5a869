"""Noisy copies of greedy texts that advance as the model trains: Jacobi decoding, one iteration each time a text is trained on.

A job's traces hold the drafts of the model that decoded it. Here the rows that a training step computes anyway are the next
iterate: after the step, every draft in it becomes the model's prediction of it. So the drafts are those of the model as it
is, at no cost, and only the fixed points have to be decoded beforehand, by the cheapest decoder there is.

Every text has `versions` independent copies. A copy's block starts from random tokens of the prompt, as the decoder `jacobi`
starts, and starts again when it has reached the fixed point. The first time it also has a random number of right tokens, so
that blocks are not all at the same place.

Legend: N = texts, V = versions, W = tokens of a text's blocks, n = tokens of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from recipes.packing import IDS, NOISY, Packed, Trajectory


def texts(prompts: Sequence[IDS], completions: Sequence[IDS], block_size: int) -> list[Trajectory]:
    """Trajectories whose only states are the fixed points: whole blocks of `completions`, the rest is left out."""
    trajectories = []
    for prompt, tokens in zip(prompts, completions, strict=True):
        whole = len(tokens) // block_size * block_size
        blocks = [np.asarray(tokens[start : start + block_size])[None] for start in range(0, whole, block_size)]
        trajectories.append(Trajectory(prompt, blocks))
    return trajectories


class LiveDrafts:
    """The drafts of every text, int64 [N, V, W]; `texts` have equally many blocks of n tokens."""

    def __init__(self, texts: Sequence[Trajectory], block_size: int, versions: int, seed: int) -> None:
        self.texts, self.block_size = texts, block_size
        self.final = np.stack([np.concatenate([states[-1] for states in text.blocks]) for text in texts])
        rng = np.random.default_rng([seed, 4])
        self.drafts = np.stack([[self._fresh(number, rng) for _ in range(versions)] for number in range(len(texts))])
        blocks = self._blocks(self.drafts)
        right = np.arange(block_size) < rng.integers(block_size, size=(*blocks.shape[:-1], 1))
        np.copyto(blocks, self._blocks(self.final)[:, None], where=right)

    def _blocks(self, tokens: IDS) -> IDS:
        return tokens.reshape(*tokens.shape[:-1], -1, self.block_size)

    def _fresh(self, number: int, rng: np.random.Generator) -> IDS:
        return rng.choice(self.texts[number].prompt, size=self.final.shape[1])

    def versions(self, number: int) -> list[list[IDS]]:
        """Of one text, per version, the draft [n] of each block."""
        return [list(self._blocks(draft)) for draft in self.drafts[number]]

    def advance(
        self,
        numbers: Sequence[int],
        packed: Sequence[Packed],
        rows: Sequence[NDArray[np.int64]],
        predicted: Sequence[IDS],
        rng: np.random.Generator,
    ) -> None:
        """One iteration of texts `numbers`: `said[i]` is what the model says after the noisy rows `rows[i]` of `packed[i]`.

        Those are all the rows from a block's first wrong draft on. The wrong draft becomes the text's own token, as the
        decoder commits it, and each draft after it what the row before it says.
        """
        for number, sample, at, tokens in zip(numbers, packed, rows, predicted, strict=True):
            assert (sample.kind[at] == NOISY).all()
            place = sample.positions[at] - len(self.texts[number].prompt)
            version, final, draft = sample.version[at], self.final[number], self.drafts[number]
            inside = (place + 1) % self.block_size != 0
            wrong = draft != final
            draft[version[inside], place[inside] + 1] = tokens[inside]
            first = np.cumsum(self._blocks(wrong), -1).reshape(wrong.shape) == 1
            np.copyto(draft, final, where=first & wrong)
            done = (self._blocks(draft) == self._blocks(final)).all(-1, keepdims=True)
            fresh = np.stack([self._fresh(number, rng) for _ in draft])
            np.copyto(self._blocks(draft), self._blocks(fresh), where=done)
