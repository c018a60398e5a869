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
from dataclasses import replace
from functools import partial
from typing import Any

from draftmill.decoders.blocks import s2d2_fused
from draftmill.decoders.blocks.block_diffusion import Block, Draft, algorithm_of, denoise, notes_of
from draftmill.decoders.blocks.routers import Route, first_run, measure_of, route_of, signals_of
from draftmill.decoders.blocks.rules import Rules
from draftmill.decoders.blocks.samples import VERIFY, BlockSample, Revealed
from draftmill.decoders.blocks.settings import S2d2Settings
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import JUDGE, SELF, Answer, Decoding, Span
from draftmill.decoders.engine.setup import Setup


def s2d2(s: BlockSample, rules: Rules, settings: S2d2Settings) -> Decoding:
    """Block diffusion with a verifier."""
    route = route_of(settings.router, settings.cost)
    yield from denoise(s, rules, SelfVerifier(rules, settings, route))


class SelfVerifier:
    """See the module's docstring and block_diffusion.Verifier."""

    def __init__(self, rules: Rules, settings: S2d2Settings, route: Route) -> None:
        self._rules, self._settings, self._route = rules, settings, route

    def wants(self, masks: list[int], draft: Draft, *, num_sure: int, progress: float) -> list[int]:
        signals = signals_of(
            self._settings.router,
            self._settings.estimator,
            masks,
            {place: draft[place].measured for place in masks},
            num_sure=num_sure,
            progress=progress,
            size=self._rules.sub_block,
            most_entropy=self._rules.most_entropy,
        )
        return first_run(masks) if self._route.decide(signals) else []

    def learn(self, decoded: int, *, verified: bool) -> None:
        self._route.learn(decoded, verified=verified)

    def verdict(
        self, s: BlockSample, block: Block, run: list[int], draft: Draft
    ) -> Generator[Any, Answer, list[Revealed]]:
        start, first, count, shift = block.start, block.start + run[0], len(run), self._rules.shift
        drafts, end = [draft[place].token for place in run], first + count
        spans: tuple[int, ...] = Span(end - start, start, start)
        copied = count if not shift else int(first == 0)
        if copied:
            # Column block.end + j stands for position first + j.
            spans += Span(copied, block.end, first, 0, block.end + 1 - first, own=SELF)
        rows = [end - start + j if j < copied else run[j] - shift for j in range(count)]
        tokens = s.tokens[start:first] + drafts + [self._rules.mask] * copied
        told = yield s.forward(VERIFY, tokens, spans, s.runs(JUDGE, rows, range(first, end)), drafts)
        s.proposed += count
        s.accepted += told.accepted
        judged = min(told.accepted + 1, count)
        return [Revealed(first + j, told.tokens[j], told.log_ps[j]) for j in range(judged)]


def algorithm(setup: Setup, settings: S2d2Settings) -> Algorithm:
    """How the engine runs these settings."""
    if settings.drafts_in_verifications:
        return s2d2_fused.algorithm(setup, settings)
    rules, sampling = Rules.of(settings, setup.info), setup.sampling
    by_ratio = settings.paper_compat if sampling.temperature == 0.0 else sampling.acceptance == "rejection"
    measure = measure_of(settings.router, settings.estimator)
    # Whether every token comes from a verification, which sees only the tokens to its left.
    known = settings.verifies_always and rules.tau_edit is None and rules.takes_all_steps
    decode, notes = partial(s2d2, rules=rules, settings=settings), notes_of(settings, measure)
    made = algorithm_of(rules, decode, notes, by_ratio=by_ratio, knows_logprob=known)
    return replace(made, measured=measure is not None, temper=settings.temper, keeps_laws=True)
