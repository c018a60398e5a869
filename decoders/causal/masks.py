"""`speculative` with `drafter: {kind: masks}`: masks in the forward that verifies draft for the next one (I-DLM).

Masks stand behind the drafts, and see the text, the drafts and the masks before them, as any row sees its left. Each predicts the
token after its own place. So once all drafts hold, and with them the token after these, the masks have drafted what follows:

    tokens      .. the | cat  sat   M    M         two drafts, two masks
    row says       cat | sat  on    the  mat       both drafts hold: `on` is decided, and `the mat` are the next drafts
    row says       dog | ..                        `cat` is refused, and the masks have seen it: their drafts are lost

After a refusal the masks stand behind the last decided token again. Under coupled acceptance such a forward still has drafts:
what the rows behind the refused one have said.

    tokens      .. the dog | runs  on              guesses, in their own columns
                        M   M                      masks at the same places, which see only the text

A forward of the first kind without drafts is I-DLM's cold start, also a sample's first one, which runs the prompt. Masks are rows
of the target: they cost no forward, of the target or of a drafter.

Source: Yu et al., "Introspective diffusion language models" (I-DLM), 2026, arXiv 2604.11035, and its public code. That draws no
drafts but judges them as if it had (docs/differences.md); here they are drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from draftmill.decoders.causal.settings import MasksDrafterSettings, SpeculativeSettings
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import DRAFT, FAR, JUDGE, NO_DRAFT, Ask, Decoding, Run, Span
from draftmill.decoders.engine.auto import AutoLength, Way
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup

_MOST_AUTO: Final = 8
"""The most masks that `k: auto` gives to a sample."""


def by_masks(s: Sample, length: Callable[[], int], mask: int, *, guesses: bool, adapted: bool = False) -> Decoding:
    """Up to `length()` drafts and as many masks a forward. With `guesses` drafts may come without a distribution. If `adapted`,
    each row of a mask has other weights, so that a prompt may have none."""
    if adapted and mask in s.tokens[: s.prompt]:
        raise ValueError(
            f"the prompt has the model's mask, id {mask}, which an adapter (decoder.drafter.path) would change"
        )
    drafts, seen = list[int](), 0
    while s.decided < s.length:
        n, start, most = s.decided, s.cached, length()
        drafts = drafts[: min(most, s.length - n - 1)]
        seen = min(seen, len(drafts))
        end, judged, count = n + len(drafts), len(drafts) + 1, max(min(most, s.length - n - seen - 2), 0)
        spans: tuple[int, ...] = Span(end - start, start, start)
        runs: tuple[int, ...] = Run(n - 1 - start, judged, n, JUDGE)
        if count:  # which see the first `seen` drafts
            is_behind = seen == len(drafts)
            spans += Span(count, end, end) if is_behind else Span(count, end, n + seen, n + seen, FAR, own=end)
            runs += Run(end - start, count, n + seen + 1, DRAFT)
        tokens = [*s.tokens[start:n], *drafts, *[mask] * count]
        accepted, found, log_ps, _ = yield Ask(tokens, spans, runs, [*drafts, *[NO_DRAFT] * (1 + count)])
        s.cached = n + accepted
        s.commit(found[:judged], log_ps[:judged], accepted + 1, drafts, accepted)
        if accepted >= seen:
            drafts = found[judged + accepted - seen :]
            seen = len(drafts)
        else:
            drafts, seen = found[accepted + 1 : judged] if guesses else [], 0


def algorithm(setup: Setup, settings: SpeculativeSettings) -> Algorithm:
    drafter, mask, k = settings.drafter, setup.info.mask_id, settings.k
    assert isinstance(drafter, MasksDrafterSettings) and mask is not None, "the settings ask for a mask"
    auto = AutoLength(Way(_MOST_AUTO, shares_cost=True, name="masks")) if k == "auto" else None
    most = _MOST_AUTO if k == "auto" else k
    guesses, adapted = setup.sampling.acceptance == "coupled", drafter.path is not None
    return Algorithm(
        decode=partial(by_masks, length=auto or (lambda: most), mask=mask, guesses=guesses, adapted=adapted),
        window=2 * most + 1,
        columns=lambda length: length + most,
        auto=auto,
        keeps_laws=True,
    )
