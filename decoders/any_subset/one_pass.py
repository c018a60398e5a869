"""One-pass any-subset speculation: one forward verifies the drafts and makes the proposals for the next window.

Speculative acceptance is exact for any proposal that is known when the draft is drawn, so the rows that propose may be stale:
computed without the tokens that this forward decides. n = first undecided rank, D drafts at ranks n .. n+D-1.

    rows           rank          sight   for
    content        n-1 .. n+D-1  own     the last decided token and the drafts
    verification   n+a           n+a     a = 0..D; the last gives the bonus token
    stale (rows)   n+s+o         n+s     s in S, o >= 1: if the window ends at n+A, the next drafts come from the largest s <= A

S is 0..D with `rows: all`, {0, D} with `rows: ends`. A draft head corrects a stale row with what it has not seen.
Every forward decides at least one token, so NFE <= number of holes.

Beyond the paper (ASSD needs two forwards per iteration). The distribution is sequential by the argument of Leviathan et
al. (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from draftmill.decoders.any_subset.sequential import whole_prompt
from draftmill.decoders.any_subset.settings import AssdSettings
from draftmill.decoders.engine.algorithm import WHOLE, Algorithm
from draftmill.decoders.engine.asks import INDEPENDENT, JUDGE, MARKOV, NO_DRAFT, SEARCH, Decoding, Offer, Roll
from draftmill.decoders.engine.samples import Sample, equal_queries, fresh_queries
from draftmill.decoders.engine.setup import Setup


def one_pass(s: Sample, k: int, *, head: int, ends: bool, auto: bool) -> Decoding:
    """Verify, commit the drafts that hold and the token after them, draft the next window from the same forward."""
    drafts = list[int]()
    while s.decided < s.length:
        n, depth = s.decided, len(drafts)
        # This forward decides at least one token; the next window can hold the remaining ones.
        reach = min(k, s.length - n - 1)
        if auto:
            reach = (yield Offer(reach)) if (yield SEARCH) else 0
        cuts = stale_rows(depth, reach, ends=ends)
        # After the last rank of the canvas there is no row for a bonus.
        num_checks = min(depth + 1, s.length - n)
        queries: Sequence[int] = fresh_queries(n, num_checks)
        first_row = dict[int, int]()
        row = num_checks
        for cut, count in cuts:
            inside = min(count, s.length - n - cut - 1)
            if inside > 0:
                queries = (*queries, *equal_queries(n + cut + 1, inside, n + cut))
                first_row[cut], row = row, row + inside
        judged = [*drafts, NO_DRAFT][:num_checks]
        accepted, tokens, log_ps, _ = yield s.two_stream(n + depth, queries, JUDGE, judged)
        s.commit(tokens, log_ps, min(accepted + 1, num_checks), drafts, accepted)
        s.cached = n + accepted
        drafts = []
        if not (count := min(reach, s.length - s.decided)):
            continue
        cut = 0 if ends and accepted < depth else accepted
        _, drafts, _, _ = yield Roll(head, s.decided, count, row=first_row[cut] + accepted - cut, limit=n + cut)
        s.tokens[s.decided : s.decided + count] = drafts


def stale_rows(depth: int, reach: int, *, ends: bool) -> list[tuple[int, int]]:
    """For each s of S how many rows come after its rank; with `ends`, s = 0 serves every window that ends early."""
    if not reach:
        return []
    if not ends:
        return [(cut, reach) for cut in range(depth + 1)]
    return [(0, reach + max(depth - 1, 0)), *([(depth, reach)] if depth else [])]


def algorithm(setup: Setup, settings: AssdSettings, most_auto: int) -> Algorithm:
    """How the engine runs these settings; `k: auto` gives a sample at most so many drafts."""
    k, ends = most_auto if settings.k == "auto" else settings.k, settings.rows == "ends"
    head = INDEPENDENT if setup.heads is None else MARKOV
    # Content and query rows of an iteration in the middle of a sample whose windows have e drafts.
    stale = [sum(count for _, count in stale_rows(e, e, ends=ends)) for e in range(k + 1)]
    return Algorithm(
        decode=partial(one_pass, k=k, head=head, ends=ends, auto=settings.k == "auto"),
        kind="any_subset",
        window=k + 1,
        most_auto=k * (settings.k == "auto"),
        auto_rows=[2 * (e + 1) + rows for e, rows in enumerate(stale)],
        keeps_laws=True,
        joins_prompts=False,
        reusable=whole_prompt,
        cut_multiple=WHOLE,
    )
