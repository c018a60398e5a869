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

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from draftmill.decoders.causal import autoregressive, masks
from draftmill.decoders.causal import settings as causal
from draftmill.decoders.causal.jacobi import fill_with_prompt
from draftmill.decoders.causal.suffix_index import Reader, SuffixIndex
from draftmill.decoders.common_settings import RunDrafterSettings
from draftmill.decoders.engine import asks
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import Ask, Decoding, Roll, Run, Span
from draftmill.decoders.engine.auto import AutoLength, Way
from draftmill.decoders.engine.earlier_texts import EarlierTexts, texts_by, way_of
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup

if TYPE_CHECKING:
    from draftmill.decoders.fastest import FastestSettings

MOST_AUTO: Final = 16
"""The most drafts that `k: auto` gives to a sample."""
_MOST: Final = 64
"""The largest `k`."""
# An n-gram is one integer: its tokens in this base, and a leading 1, so that lengths stay apart.
_BASE: Final = 1 << 20

Drafting = Generator[Any, Any, list[int]] | list[int]
"""The drafts, or a generator that returns them: one that asks a model."""


@dataclass(frozen=True, slots=True)
class Drafter:
    """What drafts for one sample. `draft` gives at most so many tokens after the decided ones; `end` comes before another one
    drafts, and when the sample has ended."""

    draft: Callable[[int], Drafting]
    end: Callable[[], None] = lambda: None


Length = Callable[[], int]
"""How many drafts the next iteration may have."""


def speculative(s: Sample, length: Length, drafter: Callable[[Sample], Drafter], kind: int) -> Decoding:
    """Draft, verify, commit the drafts that hold and the token after them. A length of 0 is plain decoding."""
    drafts_by = drafter(s)
    while s.decided < s.length:
        n, drafts = s.decided, list[int]()
        if most := length():
            found = drafts_by.draft(min(most, s.length - n - 1))
            drafts = found if isinstance(found, list) else (yield from found)
        s.tokens[n : n + len(drafts)] = drafts
        accepted, tokens, log_ps, _ = yield s.causal(n + len(drafts), len(drafts) + 1, kind, [*drafts, asks.NO_DRAFT])
        s.cached = n + accepted
        s.cached_draft = min(s.cached_draft, s.cached)
        s.tokens[n : n + len(tokens)] = tokens  # those behind the accepted ones are guesses
        s.commit(tokens, log_ps, accepted + 1, drafts, accepted)
    drafts_by.end()


def by_any(s: Sample, auto: AutoLength, makers: Sequence[Callable[[Sample], Drafter]]) -> Drafter:
    """One of several drafters at a time, as the clock says."""
    drafters = [make(s) for make in makers]
    last = drafters[0]

    def draft(most: int) -> Drafting:
        nonlocal last
        now = drafters[auto.way]
        if now is not last:
            last.end()
            last = now
        return now.draft(most)

    def end() -> None:
        for drafter in drafters:
            drafter.end()

    return Drafter(draft, end)


def by_guesses(s: Sample) -> Drafter:
    """What the last forward said of the places behind the accepted drafts: Jacobi decoding (jacobi.py)."""
    is_filled = False

    def draft(most: int) -> Drafting:
        nonlocal is_filled
        if not is_filled:
            fill_with_prompt(s)
        is_filled = True
        return s.tokens[s.decided : s.decided + most]

    return Drafter(draft)


def by_model(s: Sample, max_length: int | None) -> Drafter:
    """A smaller model drafts, one token after the other; it takes texts of `max_length` tokens, longer ones get no drafts."""

    def draft(most: int) -> Drafting:
        n = s.decided
        if max_length is not None:
            most = min(most, max(max_length + 1 - n, 0))
        if not most:
            return []
        s.nfe_draft += most
        return (yield Roll(asks.MODEL, n, most)).tokens

    return Drafter(draft)


def by_head(s: Sample, head: Any) -> Drafter:
    """A draft head (heads/files.py, SpeculatorConfig) drafts from the target's states: one token after the other, or a block at
    once. The first forward has no drafts: whether its prompt has run before depends on other samples. A head of tokens runs its
    own drafts again, since then their states are known. Blocks are whole also where the text ends within them, so that a
    draft's distribution does not depend on how many there are."""
    read = s.draft_lag = s.cached_draft = 1

    def draft(most: int) -> Drafting:
        nonlocal read
        n, count = s.decided, most if head.most_drafts is None else min(most, head.most_drafts)
        if n == s.prompt or not count:
            return []
        if head.most_drafts is not None:
            s.nfe_draft += 1
            size, first = head.block_size, int(not head.from_anchor)
            tokens = [s.tokens[n - 1], *[head.mask_id] * (size - 1)]
            seen = Span(size, n - 1, n - 1, n - 1 + size, asks.FAR)
            if head.markov_rank:  # one after the other, each corrected for the token before it
                yield Ask(tokens, seen, (), (), model=1)
                answer = yield Roll(asks.MARKOV, n, count, first, n)
            else:
                run = Run(first, count, n, asks.DRAFT)
                answer = yield Ask(tokens, seen, run, [asks.NO_DRAFT] * count, model=1)
        else:
            s.nfe_draft += count
            s.cached_draft, read = read, n
            answer = yield Roll(asks.MODEL, n, count)
        return answer.tokens

    return Drafter(draft)


def by_lookup(s: Sample, max_n: int, min_n: int) -> Drafter:
    """The text so far drafts. A look-up is no forward, but is counted as one of the drafter's."""
    lookup = Lookup(max_n, min_n)

    def draft(most: int) -> Drafting:
        if not most:
            return []
        s.nfe_draft += 1
        return lookup.drafts(s.tokens, s.decided, most)

    return Drafter(draft)


def among_texts(s: Sample, index: SuffixIndex) -> Drafter:
    """All texts of the worker draft, and are read into its index as far as they are decided. Look-ups are counted as above."""
    reader, known = Reader(index), 0

    def read() -> None:
        nonlocal known
        reader.read(s.tokens[known : s.decided])
        known = s.decided

    def draft(most: int) -> Drafting:
        read()
        if not most:
            return []
        s.nfe_draft += 1
        return reader.drafts(most)

    read()
    return Drafter(draft, read)


def by_earlier_texts(s: Sample, texts_of: Callable[[Sample], EarlierTexts]) -> Drafter:
    """The sample's texts in earlier runs draft: they know how many drafts pay. A look-up is counted as above."""
    texts = texts_of(s)
    return Drafter(lambda most: texts.drafts(s.length - s.decided - 1), texts.count)


class Lookup:
    """Knows where each n-gram of one sample's text last ended, if a token followed it; O(max_n) a token."""

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


class Means(NamedTuple):
    """What makes a sample's drafter, and how the engine runs it: with `most` tokens a draft, `behind` the canvas so many columns,
    rows of a `kind` that judge; `settling` and `shares_cost` are AutoLength's."""

    drafter: Callable[[Sample], Drafter]
    name: str
    most: int = _MOST
    kind: int = asks.SURE
    behind: int = 0
    shares_cost: bool = False
    settling: int = 1
    reads_states: bool = False

    def algorithm(self, length: Length, auto: AutoLength | None) -> Algorithm:
        return Algorithm(
            decode=partial(speculative, length=length, drafter=self.drafter, kind=self.kind),
            window=self.most + 1,
            columns=lambda length: length + self.behind,
            auto=auto,
            keeps_laws=self.kind == asks.JUDGE,
            reads_states=self.reads_states,
        )


def means_of(setup: Setup, drafter: Any) -> Means:
    """How these settings draft, but those of earlier runs."""
    match drafter:
        case causal.NgramDrafterSettings(max_n=max_n, min_n=min_n):
            return Means(partial(by_lookup, max_n=max_n, min_n=min_n), "ngram")
        case causal.SuffixDrafterSettings():
            return Means(partial(among_texts, index=SuffixIndex(drafter)), "suffix")
        case causal.HeadDrafterSettings():
            assert setup.drafter is not None, "decoder.drafter names a draft head, but none was loaded"
            head: Any = setup.drafter.speculator  # type: ignore[attr-defined]
            most, is_block = head.most_drafts or _MOST, head.most_drafts is not None
            behind = head.block_size if is_block else 0
            return Means(partial(by_head, head=head), "head", most, asks.JUDGE, behind, is_block, 2, reads_states=True)
    assert setup.drafter is not None, "decoder.drafter names a model, but none was loaded"
    longest = None if setup.drafter_info is None else setup.drafter_info.max_length
    return Means(partial(by_model, max_length=longest), "model", kind=asks.JUDGE, settling=2)


def algorithm(setup: Setup, settings: causal.SpeculativeSettings) -> Algorithm:
    if settings.k == 0:
        return autoregressive.algorithm(setup, settings)
    if isinstance(settings.drafter, RunDrafterSettings):
        texts_of, most, auto = texts_by(settings.drafter)
        return Means(partial(by_earlier_texts, texts_of=texts_of), "run", most).algorithm(lambda: asks.FAR, auto)
    if isinstance(settings.drafter, causal.MasksDrafterSettings):
        return masks.algorithm(setup, settings)
    means = means_of(setup, settings.drafter)
    if settings.k != "auto":
        k = min(settings.k, means.most)
        return means._replace(most=k).algorithm(lambda: k, None)
    means = means._replace(most=min(means.most, MOST_AUTO))
    auto = AutoLength(Way(means.most, 0, means.shares_cost, means.name), settling=means.settling)
    return means.algorithm(auto, auto)


def fastest(setup: Setup, settings: FastestSettings) -> Algorithm:
    """How the engine runs `fastest` on a causal model: nothing drafts, or what the settings name, or look-ups, or guesses."""
    named, most = settings.drafter, MOST_AUTO
    means = [means_of(setup, causal.NgramDrafterSettings(kind="ngram")), Means(by_guesses, "jacobi", shares_cost=True)]
    if named is not None and not isinstance(named, RunDrafterSettings):
        means.insert(0, means_of(setup, named))
    ways = [Way(min(each.most, MOST_AUTO), 0, each.shares_cost, each.name) for each in means]
    runs = [way_of(named)] if isinstance(named, RunDrafterSettings) else []
    auto = AutoLength(*runs, *ways, settling=max(each.settling for each in means))
    if isinstance(named, RunDrafterSettings):
        texts_of, most, _ = texts_by(named, auto)
        means.insert(0, Means(partial(by_earlier_texts, texts_of=texts_of), "run"))
    drafter = partial(by_any, auto=auto, makers=[each.drafter for each in means])
    base = means[0]._replace(drafter=drafter, most=max(most, MOST_AUTO)).algorithm(auto, auto)
    return replace(base, follows=Sample.causal_next)
