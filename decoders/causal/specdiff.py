"""`specdiff`: speculative decoding with a masked-diffusion model as the drafter.

    window       the | cat | [M]  [M]  [M]  [M]         four drafts in T = 2 forwards, left to right
    forward 1              | sat   on  [M]  [M]         the first chunk of ceil(4 / 2), tokens independent
    forward 2              | sat   on   a   mat         the second, which sees the first
    target's forward  cat  | sat   on   a   mat         as in `speculative`: accepts some, adds one

A diffusion model fills all masks at once. So drafts are long, and their cost depends on the steps rather than on their number.

q is the warped softmax of the forward that revealed a token. From left to right, q is the token's distribution given exactly the
tokens before it, so the rejection rule is exact. In the `native` order, which is random, a token may depend on later ones: q is
then not conditioned on the tokens before it alone, and under rejection the texts do not follow the target's distribution.
Coupled acceptance is exact in any order.

The drafts of one forward are independent: their distribution is a product of marginals, and later drafts are accepted less
often. A draft head (backbones/heads.py, trained for this pair of models) makes it a chain: from left to right, each row is
corrected for the token before it, known or just drafted, and for the number of tokens that the row has not seen. q is then the
distribution of the corrected row, so all of the above holds. The products are small, but run one after the other.

The model sees its whole window in both directions, so nothing is cached and each forward runs the window. A `short` window holds
as much of the text as fits, and the masks; a `full` one has as many tokens as the model was trained on, with masks to the end.
A token that the model does not know reads as a mask.

Differs from Christopher et al., "Speculative Diffusion Decoding" (2025), Algorithm 1: it starts from Gaussian noise, where
absorbing diffusion starts from masks; its indices are off; and it does not define q for a draft of several steps.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import numpy as np

from draftmill.decoders.base import ModelInfo
from draftmill.decoders.causal.settings import SpecDiffSettings
from draftmill.decoders.causal.speculative import Drafter, Drafting, speculative
from draftmill.decoders.draws import keys
from draftmill.decoders.draws.schedule import noise_of_share
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import DRAFT, FAR, JUDGE, MARKOV, NO_DRAFT, Ask, Roll, Span
from draftmill.decoders.engine.auto import AutoLength, Way
from draftmill.decoders.engine.samples import Sample, runs_of
from draftmill.decoders.engine.setup import Setup

MOST_AUTO: Final = 32
"""The most drafts that `auto` gives to a sample; the paper's best are 30 to 45."""


def by_diffusion(s: Sample, settings: SpecDiffSettings, info: ModelInfo, vocab_size: int, *, has_head: bool) -> Drafter:
    """Reveal masks after the text, chunk by chunk; the text in the window has at least one token. `info` and `vocab_size` are the
    drafter's; a head may correct its rows."""
    window = partial(_window, s, info, vocab_size, is_full=settings.window == "full")

    def draft(most: int) -> Drafting:
        n, count = s.decided, most if info.max_length is None else min(most, info.max_length - 1)
        order = np.arange(count)
        if settings.order == "native":
            order = keys.uniforms(s.key, n + order, keys.ORDER, draw=n).argsort(kind="stable")
        # The last drafts of a canvas are fewer and take fewer forwards.
        size = -(-(count if settings.gamma == "auto" else settings.gamma) // settings.steps)
        drafts: list[int | None] = [None] * count
        for first in range(0, count, max(size, 1)):
            now_D = np.sort(order[first : first + size])
            start, tokens, share = window(drafts)
            sigmas, row = (noise_of_share(share),), n - start - info.shift
            ask = partial(Ask, tokens, Span(len(tokens), 0, 0, len(tokens), FAR), model=1, sigmas=sigmas)
            s.nfe_draft += 1
            if has_head:
                yield ask(runs=(), drafts=())
                begin = int(now_D[0])
                answer = yield Roll(MARKOV, n + begin, len(now_D), row + begin, n + begin)
            else:
                answer = yield ask(runs=runs_of(row + now_D, n + now_D, DRAFT), drafts=[NO_DRAFT] * len(now_D))
            for offset, token in zip(now_D.tolist(), answer.tokens, strict=True):
                drafts[offset] = s.tokens[n + offset] = token
        return s.tokens[n : n + count]

    return Drafter(draft)


def _window(
    s: Sample, info: ModelInfo, vocab_size: int, drafts: list[int | None], *, is_full: bool
) -> tuple[int, list[int], float]:
    """The rank at which the window begins; its tokens: all of the text where it fits, else its end; drafts, and masks; and the
    share of these."""
    end, mask, longest = s.decided + len(drafts), info.mask_id, info.max_length
    assert mask is not None, "a drafter without a mask token"
    start = 0 if longest is None else max(end - longest, 0)
    tokens = [*s.tokens[start : s.decided], *(mask if draft is None else draft for draft in drafts)]
    tokens = [token if token < vocab_size else mask for token in tokens]
    if is_full and longest is not None:
        tokens += [mask] * (longest - len(tokens))
    return start, tokens, tokens.count(mask) / len(tokens)


def algorithm(setup: Setup, settings: SpecDiffSettings) -> Algorithm:
    """How the engine runs these settings. Raises ValueError if `window: full` is impossible with the drafter."""
    drafter, info = setup.drafter, setup.drafter_info
    assert drafter is not None and info is not None, "decoder.drafter names a model, but none was loaded"
    settings.check_drafter(info)
    has_head = setup.heads is not None
    assert not (has_head and settings.order == "native"), "a head corrects for what stands before"
    k, auto = settings.gamma, None
    if k == "auto":
        k, auto = MOST_AUTO, AutoLength(Way(MOST_AUTO, shares_cost=True))
    drafts = partial(by_diffusion, settings=settings, info=info, vocab_size=drafter.vocab_size, has_head=has_head)
    return Algorithm(
        decode=partial(speculative, length=auto or (lambda: k), drafter=drafts, kind=JUDGE),
        window=k + 1,
        auto=auto,
        keeps_laws=True,
        windows=settings.window,
    )
