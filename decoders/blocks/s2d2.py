"""`s2d2`: the model verifies its own block drafts at block size 1, when the router decides that it pays.

A drafting forward predicts a token for every mask. The first run of masks is the span. If the router finds the span worth a
forward (routers.py), its drafts are put in place, and the model predicts each of these positions from the tokens to its left
alone. Drafts are accepted from left to right. The first rejected one is replaced by the verification's token, and nothing after
it is kept. There is no bonus token. Without a verification the schedule of `block_diffusion` chooses what to reveal; after one
it does so only if fewer tokens came out than the step's share.

    block        a b _ _ _ c _ _                        span: places 2 to 4; c was revealed by the schedule
    draft        a b x y z c u v
    verified     p(. | a b)  p(. | a b x)  p(. | a b x y)      without c, which is to the right

    rows of a verification     columns                  see
    the block, with drafts     start .. span's end      the columns to their left
    a mask for each draft      after the block          the columns to the left of the position that it copies, and itself

A copy predicts a position from the tokens to its left. A mask inside of the draft cannot, since the draft's own token stands
there. Models that predict the next token need copies only for position 0.

If every span is verified, no revealed token depends on tokens to its right (settings.py refuses fewer steps than positions, which
would add drafts). With a causal cache the text then has exactly the
distribution of block size 1, and under coupled acceptance it is the same text.

Source: "S2D2" (2026), section 3 and Algorithm 3; its public code for what a step does after a verification.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from draftmill.decoders.blocks.block_diffusion import Block, algorithm_of, denoise
from draftmill.decoders.blocks.routers import Route, first_run, measure_of, route_of, signals_of
from draftmill.decoders.blocks.rules import Rules
from draftmill.decoders.blocks.samples import VERIFY, BlockSample, Told
from draftmill.decoders.blocks.schedules import Draft
from draftmill.decoders.blocks.settings import S2d2Settings
from draftmill.decoders.engine.algorithm import Algorithm, Notes
from draftmill.decoders.engine.asks import JUDGE, SELF, Decoding, Noted, wide_span

if TYPE_CHECKING:
    from draftmill.decoders.engine.setup import Setup


def s2d2(s: BlockSample, rules: Rules, settings: S2d2Settings) -> Decoding:
    """Block diffusion with a verifier."""
    route = route_of(settings.router, settings.cost)
    yield from denoise(s, rules, SelfVerifier(rules, settings, route))


class SelfVerifier:
    """See the module's docstring and block_diffusion.Verifier."""

    def __init__(self, rules: Rules, settings: S2d2Settings, route: Route) -> None:
        self._rules, self._router, self._route = rules, settings.router, route

    def wants(self, masks: list[int], draft: Draft, *, num_sure: int, progress: float) -> list[int]:
        """See Verifier."""
        size = self._rules.sub_block
        signals = signals_of(self._router, masks, draft, num_sure=num_sure, progress=progress, size=size)
        return first_run(masks) if self._route.decide(signals) else []

    def learn(self, decoded: int, *, verified: bool) -> None:
        """See Verifier."""
        self._route.learn(decoded, verified=verified)

    def verdict(self, s: BlockSample, block: Block, run: list[int], draft: Draft) -> Generator[Any, Noted, list[Told]]:
        """See Verifier."""
        start, first, count, shift = block.start, block.start + run[0], len(run), self._rules.shift
        drafts, sures = [draft[place].token for place in run], [draft[place].sure for place in run]
        end = first + count
        spans = wide_span(end - start, start, start, 0, 0)
        copied = count if not shift else int(first == 0)
        if copied:
            # Column block.end + j stands for position first + j.
            spans += wide_span(copied, block.end, first, 0, block.end + 1 - first, own=SELF)
        rows = [end - start + j if j < copied else run[j] - shift for j in range(count)]
        tokens = s.tokens[start:first] + drafts + [self._rules.mask] * copied
        named = s.named(JUDGE, rows, list(range(first, end)), drafts=drafts, cells=run, sures=sures)
        told = yield s.forward(VERIFY, tokens, spans, named)
        s.proposed += count
        s.accepted += told.accepted
        judged = min(told.accepted + 1, count)
        return [Told(first + j, told.tokens[j], told.log_ps[j]) for j in range(judged)]


def algorithm(setup: Setup, settings: S2d2Settings) -> Algorithm:
    """How the engine runs these settings."""
    rules, sampling = Rules.of(settings, setup.info), setup.sampling
    by_ratio = settings.paper_compat if sampling.temperature == 0.0 else sampling.acceptance == "rejection"
    notes = Notes(
        entropy=settings.schedule == "entropy",
        worth=measure_of(settings.router, settings.estimator),
        by_ratio=by_ratio,
        temper=settings.temper,
        cells=rules.size,
        fresh=rules.fresh,
    )
    # Whether every token comes from a verification, which sees only the tokens to its left.
    known = settings.verifies_always and rules.tau_edit is None and rules.takes_all_steps
    return algorithm_of(rules, partial(s2d2, rules=rules, settings=settings), notes, knows_logprob=known)
