"""The n-gram pool of rejection recycling: token runs rejected in one sample's Jacobi iterations, and their proposals.

Knows nothing of models or blocks. Source: pcLLM, section 3.2 (rejection recycling); Fu et al., "Break the sequential dependency
of LLM inference using lookahead decoding", 2024.
"""

from __future__ import annotations


class NgramPool:
    """The last `size` different runs, the most recent first, each of at most `longest` tokens."""

    __slots__ = ("_longest", "_runs", "_size")

    def __init__(self, size: int, longest: int) -> None:
        self._size, self._longest = size, longest
        self._runs: list[list[int]] = []

    def push(self, run: list[int]) -> None:
        """Put a run into the pool, cut to `longest` tokens; one that is there already becomes the most recent.

        A run of fewer than two tokens proposes nothing and is left out.
        """
        if len(run) < 2:
            return
        run = run[: self._longest]
        if run in self._runs:
            self._runs.remove(run)
        self._runs.insert(0, run)
        del self._runs[self._size :]

    def candidates(self, last: int, drafts: list[int], most: int) -> list[list[int]]:
        """Up to `most` different proposals for what follows the token `last`, each as long as the drafts.

        A run proposes the tokens after its first occurrence of `last`, cut to the number of drafts or filled up with the
        current drafts. Proposals that equal the drafts themselves are left out.
        """
        found: list[list[int]] = []
        for run in self._runs:
            # A token at the end of a run has nothing after it.
            if last not in run[:-1]:
                continue
            after = run[run.index(last) + 1 :][: len(drafts)]
            proposal = after + drafts[len(after) :]
            if proposal != drafts and proposal not in found:
                found.append(proposal)
            if len(found) == most:
                break
        return found
