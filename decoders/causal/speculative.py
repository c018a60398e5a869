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
from typing import Any, Final, Literal, NamedTuple

from draftmill.decoders.causal import autoregressive
from draftmill.decoders.causal.autoregressive import prompt_but_one
from draftmill.decoders.causal.settings import (
    HeadDrafterSettings,
    ModelDrafterSettings,
    NgramDrafterSettings,
    SpeculativeSettings,
    SuffixDrafterSettings,
)
from draftmill.decoders.causal.suffix_index import Reader, SuffixIndex
from draftmill.decoders.common_settings import RunDrafterSettings
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import (
    DRAFT,
    FAR,
    JUDGE,
    MARKOV,
    MODEL,
    NO_DRAFT,
    SURE,
    Ask,
    Decoding,
    Roll,
    Run,
    Span,
)
from draftmill.decoders.engine.auto import AutoLength
from draftmill.decoders.engine.earlier_texts import EarlierTexts, texts_by
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup

MOST_AUTO: Final = 16
"""The most drafts that `k: auto` gives to a sample."""
# An n-gram is one integer: its tokens in this base, and a leading 1, so that lengths stay apart.
_BASE: Final = 1 << 20

Drafting = Generator[Any, Any, list[int]]
Drafter = Callable[[int], Drafting]
"""Drafts at most so many tokens after the decided ones of its sample, by asking a model or not."""
Length = Callable[[], int]
"""How many drafts the next iteration may have."""


class Block(NamedTuple):
    """What a head of blocks runs at once: the last token and masks, `size` in all, whose rows from `first` on draft. With
    `is_chain` one after the other, each corrected for the token before it."""

    size: int
    mask: int
    first: int
    is_chain: bool


def speculative(s: Sample, length: Length, drafter: Callable[[Sample], Drafter], kind: int) -> Decoding:
    """Draft, verify, commit the drafts that hold and the token after them. A length of 0 is plain decoding."""
    draft = drafter(s)
    while s.decided < s.length:
        n, drafts = s.decided, list[int]()
        if most := length():
            drafts = yield from draft(min(most, s.length - n - 1))
        s.tokens[n : n + len(drafts)] = drafts
        accepted, tokens, log_ps, _ = yield s.causal(n + len(drafts), len(drafts) + 1, kind, [*drafts, NO_DRAFT])
        s.cached = n + accepted
        s.cached_draft = min(s.cached_draft, s.cached)
        s.commit(tokens, log_ps, accepted + 1, drafts, accepted)


def by_model(s: Sample, max_length: int | None) -> Drafter:
    """A smaller model drafts, one token after the other; it takes texts of `max_length` tokens, longer ones get no drafts."""

    def draft(most: int) -> Drafting:
        n = s.decided
        if max_length is not None:
            most = min(most, max(max_length + 1 - n, 0))
        if not most:
            return []
        s.nfe_draft += most
        drafts: list[int] = (yield Roll(MODEL, n, most)).tokens
        return drafts

    return draft


def by_head(s: Sample, block: Block | None) -> Drafter:
    """A draft head drafts from the target's states: one token after the other, or a block at once. The first forward has no
    drafts: whether its prompt has run before depends on other samples. A head of tokens runs its own drafts again, since then
    their states are known."""
    read = s.draft_lag = s.cached_draft = 1

    def draft(most: int) -> Drafting:
        nonlocal read
        n, count = s.decided, most if block is None else min(most, block.size - block.first)
        if n == s.prompt or not count:
            return []
        if block is not None:
            s.nfe_draft += 1
            tokens = [s.tokens[n - 1], *[block.mask] * (block.size - 1)]
            seen = Span(block.size, n - 1, n - 1, n - 1 + block.size, FAR)
            if block.is_chain:
                yield Ask(tokens, seen, (), (), model=1)
                answer = yield Roll(MARKOV, n, count, block.first, n)
            else:
                run = Run(block.first, count, n, DRAFT)
                answer = yield Ask(tokens, seen, run, [NO_DRAFT] * count, model=1)
        else:
            s.nfe_draft += count
            s.cached_draft, read = read, n
            answer = yield Roll(MODEL, n, count)
        drafts: list[int] = answer.tokens
        return drafts

    return draft


def by_lookup(s: Sample, max_n: int, min_n: int) -> Drafter:
    """The text so far drafts. A look-up is no forward, but is counted as one of the drafter's."""
    lookup = Lookup(max_n, min_n)

    def draft(most: int) -> Drafting:
        yield from ()
        if not most:
            return []
        s.nfe_draft += 1
        return lookup.drafts(s.tokens, s.decided, most)

    return draft


def among_texts(s: Sample, length: Length, index: SuffixIndex) -> Decoding:
    """All texts of the worker draft, and are read into its index as far as they are decided. Look-ups are counted as above."""
    reader, known = Reader(index), 0

    def read() -> None:
        nonlocal known
        reader.read(s.tokens[known : s.decided])
        known = s.decided

    def draft(most: int) -> Drafting:
        yield from ()
        read()
        if not most:
            return []
        s.nfe_draft += 1
        return reader.drafts(most)

    read()
    yield from speculative(s, length, lambda _: draft, SURE)
    read()


def by_earlier_texts(s: Sample, texts_of: Callable[[Sample], EarlierTexts]) -> Decoding:
    """The sample's texts in earlier runs draft. A look-up is counted as above."""
    texts = texts_of(s)

    def draft(room: int) -> Drafting:
        yield from ()
        return texts.drafts(room)

    yield from speculative(s, lambda: FAR, lambda _: draft, SURE)
    texts.count()


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


def algorithm(setup: Setup, settings: SpeculativeSettings) -> Algorithm:
    """How the engine runs these settings; without drafts they are the baseline."""
    if settings.k == 0:
        return autoregressive.algorithm(setup, settings)
    if isinstance(settings.drafter, HeadDrafterSettings):
        return _with_head(setup, settings.k)
    if isinstance(settings.drafter, RunDrafterSettings):
        texts_of, most, auto = texts_by(settings.drafter)
        decode = partial(by_earlier_texts, texts_of=texts_of)
        return Algorithm(decode=decode, window=most + 1, auto=auto, reusable=prompt_but_one)
    k, auto = settings.k, None
    if k == "auto":
        k, auto = (
            MOST_AUTO,
            AutoLength(MOST_AUTO, settling=2 if isinstance(settings.drafter, ModelDrafterSettings) else 1),
        )
    length, kind = auto or (lambda: k), SURE
    drafter: Callable[[Sample], Drafter]
    match settings.drafter:
        case SuffixDrafterSettings():
            decode = partial(among_texts, length=length, index=SuffixIndex(settings.drafter))
            return Algorithm(decode=decode, window=k + 1, auto=auto, reusable=prompt_but_one)
        case NgramDrafterSettings(max_n=max_n, min_n=min_n):
            drafter = partial(by_lookup, max_n=max_n, min_n=min_n)
        case _:
            assert setup.drafter is not None, "decoder.drafter names a model, but none was loaded"
            longest, kind = None if setup.drafter_info is None else setup.drafter_info.max_length, JUDGE
            drafter = partial(by_model, max_length=longest)
    return Algorithm(
        decode=partial(speculative, length=length, drafter=drafter, kind=kind),
        window=k + 1,
        auto=auto,
        keeps_laws=kind == JUDGE,
        reusable=prompt_but_one,
    )


def _with_head(setup: Setup, most: int | Literal["auto"]) -> Algorithm:
    """How the engine runs a draft head. Its blocks are whole also where the text ends within them, so that a draft's distribution
    does not depend on how many there are."""
    assert setup.drafter is not None, "decoder.drafter names a draft head, but none was loaded"
    head: Any = setup.drafter.speculator  # type: ignore[attr-defined]
    block, k = None, MOST_AUTO if most == "auto" else most
    if head.most_drafts is not None:
        block = Block(head.block_size, head.mask_id, not head.from_anchor, head.markov_rank > 0)
        k = min(k, head.most_drafts)
    auto = AutoLength(k, shares_cost=block is not None, settling=2) if most == "auto" else None
    return Algorithm(
        decode=partial(speculative, length=auto or (lambda: k), drafter=partial(by_head, block=block), kind=JUDGE),
        window=k + 1,
        columns=lambda length: length + (block.size if block else 0),
        auto=auto,
        keeps_laws=True,
        reads_states=True,
        reusable=prompt_but_one,
    )
