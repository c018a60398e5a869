"""`speculative`: drafts from a small model or from the text so far, verified in one forward of the target.

    tokens      .. the | cat  sat  in              D tokens decided, three drafts
    target says    cat | sat  on   .               the row of each token predicts the next one
    committed   .. the   cat  sat  on |            two drafts accepted, `in` replaced; with `in` accepted, `.` would be the bonus

The first forward runs the prompt and the first drafts together, so a sample never needs more forwards than `autoregressive`.
A sample with fewer drafts has fewer rows. Drafts never reach the canvas's end: there is always a place for the token after them.
Under `coupled` acceptance the text is the sequential one whatever is drafted; under `rejection` it has its distribution.

A drafting model has its own cache, and is behind by what was accepted last:

    column               .. D-2  D-1 | D    D+1  D+2           D decided tokens, three drafts
    drafter's forwards   [catch up.. ]  [D]  [D+1]             the last draft is run only when it was accepted: then it is
    target's forward              [D-1   D    D+1  D+2]        caught up with the bonus in the drafter's next forward

Sources: Leviathan et al., 2023, Algorithm 1; Chen et al., 2023; Saxena, "Prompt lookup decoding", 2023.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, Final, NamedTuple

from draftmill.decoders.causal import autoregressive
from draftmill.decoders.causal.autoregressive import prompt_but_one
from draftmill.decoders.causal.settings import (
    HeadDrafterSettings,
    NgramDrafterSettings,
    SpeculativeSettings,
    SuffixDrafterSettings,
)
from draftmill.decoders.causal.suffix_index import Reader, SuffixIndex
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import (
    DRAFT,
    FAR,
    JUDGE,
    MARKOV,
    MODEL,
    NO_DRAFT,
    SEARCH,
    SURE,
    Ask,
    Decoding,
    Offer,
    Roll,
    Run,
    Span,
)
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup

MOST_AUTO: Final = 16
"""The most drafts that `k: auto` gives to a sample."""
# An n-gram is one integer: its tokens in this base, and a leading 1, so that lengths stay apart.
_BASE: Final = 1 << 20

Drafting = Generator[Any, Any, list[int]]
Drafter = Callable[[int], Drafting]
"""Drafts up to the given number of tokens after the decided ones of its sample, with a model or without."""
Allot = Callable[[int], Generator[Any, Any, int]]
"""How many drafts a sample could have -> how many it gets."""


class Block(NamedTuple):
    """What a head of blocks runs at once: the last token and masks, `size` in all, whose rows from `first` on draft. With
    `is_chain` one after the other, each corrected for the token before it."""

    size: int
    mask: int
    first: int
    is_chain: bool


def speculative(s: Sample, k: int, drafter: Callable[[Sample], Drafter], kind: int, *, searches: bool) -> Decoding:
    """Draft, verify, commit the drafts that hold and the token after them. With `searches`, drafting may be skipped."""
    draft = drafter(s)
    while s.decided < s.length:
        n, drafts = s.decided, list[int]()
        if not searches or (yield SEARCH):
            drafts = yield from draft(min(k, s.length - n - 1))
        s.tokens[n : n + len(drafts)] = drafts
        accepted, tokens, log_ps, _ = yield s.causal(n + len(drafts), len(drafts) + 1, kind, [*drafts, NO_DRAFT])
        s.cached = n + accepted
        s.cached_draft = min(s.cached_draft, s.cached)
        s.commit(tokens, log_ps, accepted + 1, drafts, accepted)


def by_model(s: Sample, max_length: int | None, allot: Allot) -> Drafter:
    """A smaller model drafts, one token after the other; it takes texts of `max_length` tokens, longer ones get no drafts."""

    def draft(most: int) -> Drafting:
        n = s.decided
        if max_length is not None:
            most = min(most, max(max_length + 1 - n, 0))
        count = yield from allot(most)
        if not count:
            return []
        s.nfe_draft += count
        drafts: list[int] = (yield Roll(MODEL, n, count)).tokens
        return drafts

    return draft


def by_head(s: Sample, block: Block | None, allot: Allot) -> Drafter:
    """A draft head drafts from the target's states: one token after the other, or a block at once. The first forward has no
    drafts: whether its prompt has run before depends on other samples. A head of tokens runs its own drafts again, since then
    their states are known."""
    read = s.draft_lag = s.cached_draft = 1

    def draft(most: int) -> Drafting:
        nonlocal read
        n = s.decided
        if n == s.prompt:
            return []
        count = yield from allot(most if block is None else min(most, block.size - block.first))
        if not count:
            return []
        if block is not None:
            s.nfe_draft += 1
            tokens = [s.tokens[n - 1], *[block.mask] * (block.size - 1)]
            seen = Span(block.size, n - 1, n - 1, n - 1 + block.size, FAR)
            if block.is_chain:
                yield Ask(tokens, seen, (), (), model=1, num_drafts=count)
                answer = yield Roll(MARKOV, n, count, block.first, n)
            else:
                run = Run(block.first, count, n, DRAFT)
                answer = yield Ask(tokens, seen, run, [NO_DRAFT] * count, model=1, num_drafts=count)
        else:
            s.nfe_draft += count
            s.cached_draft, read = read, n
            answer = yield Roll(MODEL, n, count)
        drafts: list[int] = answer.tokens
        return drafts

    return draft


def by_lookup(s: Sample, max_n: int, min_n: int, allot: Allot) -> Drafter:
    """The text so far drafts. A look-up is no forward, but is counted as one of the drafter's."""
    lookup = Lookup(max_n, min_n)

    def draft(most: int) -> Drafting:
        drafts = list[int]()
        if most:
            s.nfe_draft += 1
            drafts = lookup.drafts(s.tokens, s.decided, most)
        count = yield from allot(len(drafts))
        return drafts[:count]

    return draft


def among_texts(s: Sample, k: int, index: SuffixIndex, allot: Allot, *, searches: bool) -> Decoding:
    """All texts of the worker draft, and are read into its index as far as they are decided. Look-ups are counted as above."""
    reader, known = Reader(index), 0

    def read() -> None:
        nonlocal known
        reader.read(s.tokens[known : s.decided])
        known = s.decided

    def draft(most: int) -> Drafting:
        drafts = list[int]()
        read()
        if most:
            s.nfe_draft += 1
            drafts = reader.drafts(most)
        count = yield from allot(len(drafts))
        return drafts[:count]

    read()
    yield from speculative(s, k, lambda _: draft, SURE, searches=searches)
    read()


class Lookup:
    """Knows where each n-gram of one sample's text last ended, if a token followed it; O(max_n) a token."""

    __slots__ = ("_end_of", "_known", "_max_n", "_min_n")

    def __init__(self, max_n: int, min_n: int) -> None:
        self._max_n, self._min_n = max_n, min_n
        self._known = 1
        self._end_of: dict[int, int] = {}

    def drafts(self, text: list[int], length: int, most: int) -> list[int]:
        """Up to `most` tokens to follow `text[:length]`: those after the last occurrence of its last n tokens, for the largest
        n. A copy that reaches the end of the text continues with what it has copied: a repetition continues. Empty without a
        match."""
        start = self._match(text, length)
        period = length - start
        return [text[start + place % period] for place in range(most)] if start else []

    def _match(self, text: list[int], length: int) -> int:
        """The place after the longest earlier match of the text's end, the last one of several; 0 without a match."""
        end_of, after = self._end_of, 0
        # An n-gram is known as soon as a token follows it: all that end before the text's last token are.
        for end in range(self._known, length + 1):
            code, place = 0, 1
            for n in range(1, min(self._max_n, end) + 1):
                code += text[end - n] * place
                place *= _BASE
                if n < self._min_n:
                    continue
                if end < length:
                    end_of[code + place] = end
                elif n < length:
                    after = end_of.get(code + place, after)
        self._known = length
        return after


def allot_drafts(most: int, *, is_auto: bool) -> Generator[Any, Any, int]:
    """All drafts that there can be, or as many as the budget gives."""
    return (yield Offer(most)) if is_auto else most


def algorithm(setup: Setup, settings: SpeculativeSettings) -> Algorithm:
    """How the engine runs these settings; without drafts they are the baseline."""
    if settings.k == 0:
        return autoregressive.algorithm(setup, settings)
    is_auto = settings.k == "auto"
    k = MOST_AUTO if settings.k == "auto" else settings.k
    allot, kind = partial(allot_drafts, is_auto=is_auto), SURE
    drafter: Callable[[Sample], Drafter]
    match settings.drafter:
        case SuffixDrafterSettings():
            decode = partial(among_texts, k=k, index=SuffixIndex(settings.drafter), allot=allot, searches=is_auto)
            return Algorithm(decode=decode, window=k + 1, most_auto=k * is_auto, reusable=prompt_but_one)
        case NgramDrafterSettings(max_n=max_n, min_n=min_n):
            drafter = partial(by_lookup, max_n=max_n, min_n=min_n, allot=allot)
        case HeadDrafterSettings():
            return _with_head(setup, k, allot, is_auto=is_auto)
        case _:
            assert setup.drafter is not None, "decoder.drafter names a model, but none was loaded"
            longest, kind = None if setup.drafter_info is None else setup.drafter_info.max_length, JUDGE
            drafter = partial(by_model, max_length=longest, allot=allot)
    return Algorithm(
        decode=partial(speculative, k=k, drafter=drafter, kind=kind, searches=is_auto),
        window=k + 1,
        most_auto=k * is_auto,
        keeps_laws=kind == JUDGE,
        reusable=prompt_but_one,
    )


def _with_head(setup: Setup, k: int, allot: Allot, *, is_auto: bool) -> Algorithm:
    """How the engine runs a draft head. Its blocks are whole also where the text ends within them, so that a draft's distribution
    does not depend on how many there are."""
    assert setup.drafter is not None, "decoder.drafter names a draft head, but none was loaded"
    head: Any = setup.drafter.speculator  # type: ignore[attr-defined]
    block = None
    if head.most_drafts is not None:
        block, k = (
            Block(head.block_size, head.mask_id, not head.from_anchor, head.markov_rank > 0),
            min(k, head.most_drafts),
        )
    return Algorithm(
        decode=partial(
            speculative, k=k, drafter=partial(by_head, block=block, allot=allot), kind=JUDGE, searches=is_auto
        ),
        window=k + 1,
        columns=lambda length: length + (block.size if block else 0),
        most_auto=k * is_auto,
        draft_forwards=[0, *[1] * k] if is_auto and block else None,
        keeps_laws=True,
        reads_states=True,
        reusable=prompt_but_one,
    )
