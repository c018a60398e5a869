"""Penalties, biases and bans: how the logits of a row change with what it knows of its text. Pure: imports no torch.

    text      the cat saw the _        the row after it; no n-gram of 2 tokens may come twice
    entries   the    cat    saw        the tokens whose logits change
    before    0      0      1.5        their biases
    factor    1.2    1.2    1.2        the repetition penalty, of all that is known, the prompt too
    after     -1.0   -inf   -0.5       presence and frequency penalties of what was generated; -inf: banned

A logit x becomes penalty(x + before) + after (Warp). Temperature, top-k, top-p and min-p come after it. Definitions and order are
those of transformers' generation/logits_process.py, and for presence and frequency those of OpenAI's API.

In any order a row knows tokens to its right, too: they count like all others, and a ban looks at every window of known tokens
around the place. Where bans leave no token at all, the bans that depend on the text are lifted in that place.
"""

from __future__ import annotations

from collections import ChainMap, Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.base import HOLE, ModelInfo
from draftmill.decoders.constraints.trackers import Known

Entries = tuple[NDArray[np.int64], NDArray[np.float64]]
"""Tokens, [E], no two alike, and the change of each: before, factor and after, [3, E]."""
_NEVER: Final = -np.inf


@dataclass(frozen=True, slots=True)
class Penalties:
    """What changes the logits of a request. `repetition` divides (or multiplies) the logits of tokens that are known, `presence`
    is subtracted from those that were generated, `frequency` once for each time. No run of `ngram` tokens comes twice (0: any
    may). `biases` are added to single tokens. `banned` are never generated: tokens, or runs of tokens, of which the last one to
    come is refused. The first `min_new` positions of a completion hold none of its `ends`."""

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    ngram: int = 0
    biases: tuple[tuple[int, float], ...] = ()
    banned: tuple[tuple[int, ...], ...] = ()
    min_new: int = 0
    ends: tuple[int, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether it matters which tokens are known."""
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)

    @property
    def bans(self) -> bool:
        """Whether tokens are banned that are not banned everywhere."""
        return bool(self.ngram or self.min_new or any(len(run) > 1 for run in self.banned))


class PenaltyTracker:
    """Penalties at work on one sample. `canvas` holds HOLE where a token is to be generated; `in_order`: from left to right."""

    def __init__(self, penalties: Penalties, canvas: Sequence[int], info: ModelInfo, *, in_order: bool) -> None:
        self.penalties, self._in_order, self._vocab_size = penalties, in_order, info.vocab_size
        self._token_at = {position: token for position, token in enumerate(canvas) if token != HOLE}
        self._first = next((position for position, token in enumerate(canvas) if token == HOLE), len(canvas))
        self._given, self._generated = frozenset(self._token_at.values()), Counter[int]()
        self._biases = dict(penalties.biases)
        self._never = frozenset(run[0] for run in penalties.banned if len(run) == 1)
        self._impossible = self._never.union(info.suppressed)
        self._runs = _by_neighbour(penalties.banned)
        self._grams = defaultdict[tuple[int, tuple[int, ...]], set[int]](set)
        if penalties.ngram:
            for start in range(len(canvas) - penalties.ngram + 1):
                self._add_gram(self._window(start, self._token_at))
        self._at, self._tokens, self._changes = dict[int, int](), np.zeros(8, np.int64), np.zeros((3, 8))
        self._after = dict[tuple[int, ...], tuple[Mapping[int, int], Entries]]()  # with these drafts
        seen = sorted(self._given) if penalties.repetition != 1.0 else []
        for token in dict.fromkeys([*self._biases, *sorted(self._never), *seen]):
            self._set(token)

    def decide(self, position: int, token: int) -> None:
        self._token_at[position] = token
        self._generated[token] += 1
        self._after = {}
        if self.penalties.counts:
            self._set(token)
        for start in range(position - self.penalties.ngram + 1, position + 1):
            self._add_gram(self._window(start, self._token_at))

    def _set(self, token: int) -> None:
        """Bring the entry of a token up to date."""
        index = self._at.setdefault(token, len(self._at))
        if index == len(self._tokens):
            self._tokens, self._changes = np.tile(self._tokens, 2), np.tile(self._changes, (1, 2))
        self._tokens[index] = token
        count = self._generated[token]
        self._changes[:, index] = self._change(token, is_known=count > 0 or token in self._given, count=count)

    def _change(self, token: int, *, is_known: bool, count: int) -> tuple[float, float, float]:
        penalties = self.penalties
        after = -(penalties.presence * (count > 0) + penalties.frequency * count)
        factor = penalties.repetition if is_known else 1.0
        return self._biases.get(token, 0.0), factor, _NEVER if token in self._never else after

    def entries(self, position: int, known: Known) -> Entries:
        """How the logits of a row change that speaks of a position, and knows these drafts beside what is decided."""
        drafts = tuple(sorted(token for _, token in known)) if self.penalties.counts else ()
        at, (tokens, changes) = self._with(drafts)
        if not (bans := sorted(self.bans(position, known))):
            return tokens, changes
        inside, others = [at[token] for token in bans if token in at], [token for token in bans if token not in at]
        changes = np.concatenate([changes, np.tile(np.array([[0.0], [1.0], [_NEVER]]), len(others))], 1)
        changes[2, inside] = _NEVER
        return np.concatenate([tokens, np.array(others, dtype=np.int64)]), changes

    def _with(self, drafts: tuple[int, ...]) -> tuple[Mapping[int, int], Entries]:
        count = len(self._at)
        base = self._tokens[:count], self._changes[:, :count]
        if not drafts:
            return self._at, base
        if drafts not in self._after:
            drafted = Counter(drafts)
            news = [token for token in drafted if token not in self._at]
            at = self._at | {token: count + place for place, token in enumerate(news)}
            changes = np.concatenate([base[1], np.zeros((3, len(news)))], 1)
            for token, more in drafted.items():
                changes[:, at[token]] = self._change(token, is_known=True, count=self._generated[token] + more)
            self._after[drafts] = at, (np.concatenate([base[0], np.array(news, dtype=np.int64)]), changes)
        return self._after[drafts]

    def bans(self, position: int, known: Known) -> set[int]:
        """The tokens that may not stand at a position for what is known of the text."""
        if not self.penalties.bans:
            return set()
        token_at = ChainMap(dict(known), self._token_at) if known else self._token_at
        bans = set(self.penalties.ends if position - self._first < self.penalties.min_new else ())
        bans |= set(self._run_bans(position, token_at))
        if self.penalties.ngram:
            bans |= self._gram_bans(position, token_at, known)
        return set() if len(bans | self._impossible) >= self._vocab_size else bans

    def _run_bans(self, position: int, token_at: Mapping[int, int]) -> Iterator[int]:
        """The tokens that would complete a banned run."""
        for side in (-1, 1):
            for place, run in self._runs.get((side, token_at.get(position + side, HOLE)), ()):
                start = position - place
                if all(token_at.get(start + at) == token for at, token in enumerate(run) if at != place):
                    yield run[place]

    def _window(self, start: int, token_at: Mapping[int, int]) -> tuple[int, ...]:
        """The tokens from a position on, HOLE where one is not known."""
        return tuple(token_at.get(start + place, HOLE) for place in range(self.penalties.ngram))

    def _add_gram(self, gram: tuple[int, ...]) -> None:
        if HOLE not in gram:
            for place in self._places:
                self._grams[place, gram[:place] + gram[place + 1 :]].add(gram[place])

    @property
    def _places(self) -> range:
        """Where in an n-gram the token may be that completes it: last, if tokens come in order."""
        return range(self.penalties.ngram - 1 if self._in_order else 0, self.penalties.ngram)

    def _gram_bans(self, position: int, token_at: Mapping[int, int], known: Known) -> set[int]:
        bans, size = set[int](), self.penalties.ngram
        starts = {start for at, _ in known for start in range(at - size + 1, at + 1)}
        drafted = [gram for start in starts if HOLE not in (gram := self._window(start, token_at))]
        for place in self._places:
            window = self._window(position - place, token_at)
            rest = window[:place] + window[place + 1 :]
            if HOLE in rest:
                continue
            bans |= self._grams.get((place, rest), set())
            bans |= {gram[place] for gram in drafted if gram[:place] + gram[place + 1 :] == rest}
        return bans if self._in_order else bans | set(self._twice(position, token_at, known))

    def _twice(self, position: int, token_at: Mapping[int, int], known: Known) -> Iterator[int]:
        """The tokens with which two windows around a position would be alike."""
        size = self.penalties.ngram
        for apart in range(1, size):
            token = token_at.get(position + apart)
            if token is None:
                continue
            filled = ChainMap({position: token}, dict(known), self._token_at)
            for start in range(position - size + 1, position - apart + 1):
                window = self._window(start, filled)
                if HOLE not in window and window == self._window(start + apart, filled):
                    yield token


def _by_neighbour(runs: Sequence[tuple[int, ...]]) -> dict[tuple[int, int], list[tuple[int, tuple[int, ...]]]]:
    """Each place of each banned run, by the side (-1 or 1) and the token of a neighbour in it."""
    found = defaultdict[tuple[int, int], list[tuple[int, tuple[int, ...]]]](list)
    for run in runs:
        for place in range(len(run) if len(run) > 1 else 0):
            side = -1 if place else 1
            found[side, run[place + side]].append((place, run))
    return dict(found)
