"""`s2d2`: the model verifies its own block drafts at block size 1, when the router decides that it pays.

A drafting forward predicts a token for every mask. The first run of masks is the span. If the router finds the span worth a
forward (verifier.py), its drafts are put in place, and the model predicts each of these positions from the tokens to its left
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
would add drafts). With a causal cache the text then has exactly the distribution of block size 1, and under coupled acceptance it
is the same text.

`fused: true`: one forward a round verifies drafts, commits tokens, and drafts for the next round. Any known proposal is
a valid draft. So a round's forward holds, for a sample with n decided tokens and k drafts after them:

    main     n-1 .. n+k     the last decided token and the drafts, each seeing the tokens to its left
    copies   n .. n+k       a mask at the place of each draft and after the last: the prediction at block size 1
    ahead    n+g .. n+g+k   masks that see the first g drafts and each other, as in a drafting forward

The copies verify the drafts and predict one more token: the recovered one, or the bonus after all drafts. The main rows
write the keys and values of the accepted drafts as a causal cache needs them, so no commit is needed. The masks ahead
predict the next drafts, if g drafts are accepted, as many as in the last round. If fewer are, the masks ahead saw rejected
tokens; so did the copies after the rejected draft, from which the next drafts then come. The first forward runs the prompt
without drafts. Models that predict the next token need no copies, since their main rows predict the same tokens.

    column    cached .. n+k | n+size+1 ..    | n+2(size+1) ..
    holds     main          | copies         | ahead

With a draft head (backbones/heads/markov.py) the masks ahead see the text alone (g = 0), and nothing is drafted in the forward.
After it the head draws the next drafts, one after the other, from the rows of these masks and the two tokens before each draft.

With a `drafter` no masks stand ahead: before each round another block-diffusion model runs the text that is new to it,
causally, and masks after it, which see all of both. What it predicts there in one forward is drafted. Or texts of earlier runs
draft.

The text is that of block size 1 (and of `s2d2` over a causal cache that verifies always): token for token under coupled
acceptance and at temperature 0, in distribution under rejection, since drafting and verification use different random numbers.

Source: "S2D2" (2026), section 3 and Algorithm 3; its public code for what a step does after a verification. The fused form goes
beyond it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from draftmill.decoders.base import ModelInfo
from draftmill.decoders.blocks.block_diffusion import algorithm_of, denoise, notes_of
from draftmill.decoders.blocks.samples import DRAFTED, PREFILL, VERIFY, BlockSample, Revealed
from draftmill.decoders.blocks.settings import Rules, S2d2Settings
from draftmill.decoders.blocks.verifier import SelfVerifier, measure_of
from draftmill.decoders.common_settings import DrafterPlace, RunDrafterSettings
from draftmill.decoders.engine import asks
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import Answer, Ask, Decoding, Roll, Run, Span
from draftmill.decoders.engine.auto import AutoLength, Way
from draftmill.decoders.engine.earlier_texts import EarlierTexts, texts_by, way_of
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup

if TYPE_CHECKING:
    from draftmill.decoders.fastest import FastestSettings

_MOST_AUTO: Final = 4
"""The most drafts where the clock chooses: each takes three columns of a slot, also in rounds without drafts."""
_TEXTS: Final = 0
"""The number of the way to draft by texts of earlier runs, where there are any; then comes the forward itself."""
_AHEAD, _COPIES = range(2)
"""The banks of drafts: a position may be drafted by a mask ahead and by a copy in one forward."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafted tokens, and the banks that they wait in; the first `guess` will likely be accepted."""

    tokens: list[int] = field(default_factory=list)
    banks: list[int] = field(default_factory=list)
    guess: int = 0


class Round(NamedTuple):
    """A round after `n` decided tokens: the positions that it verifies, and those that masks ahead of `drafts.guess` predict.
    With `redraft` the positions after n are drafted once more, from the copies; with `by_head` none is drafted in the forward. No
    draft is longer than `longest`."""

    n: int
    longest: int
    drafts: Drafts
    judged: list[int]
    ahead: list[int]
    redraft: bool
    by_head: bool = False


def s2d2_fused(
    s: BlockSample,
    rules: Rules,
    *,
    by_ratio: bool,
    longest: int,
    drafter: ModelInfo | None = None,
    texts_of: Callable[[Sample], EarlierTexts] | None = None,
    auto: AutoLength | None = None,
    by_head: bool = False,
) -> Decoding:
    """Verify in every forward, and draft in it, if neither a `drafter` nor earlier texts do. `by_ratio`: a verified token is no
    draft, so copies are asked for drafts, too. With `auto` the clock says how many drafts there are, and whether texts give
    them. With `by_head` a draft head draws them after the forward, but for samples with a constraint."""
    s.widen(s.length)
    by_head = by_head and s.tracker is None  # drafts of a head are drawn without constraints
    texts = texts_of(s) if texts_of else None
    purpose, drafts = PREFILL if rules.start(s.prompt) else DRAFTED, Drafts()
    while not s.is_over:
        s.draws += 1
        most = longest if auto is None else auto()
        by_texts = texts is not None and (auto is None or auto.way == _TEXTS)
        drafts_here = drafter is None and not by_texts
        if drafter is not None:
            drafts = yield from drafts_by(s, rules, drafter)
        elif by_texts and texts is not None:
            tokens = texts.drafts(s.length - s.decided - 1)
            drafts = Drafts(tokens, [_AHEAD] * len(tokens))
        n, k, g = s.decided, len(drafts.tokens), drafts.guess
        judged = list(range(n, min(n + k + 1, s.length)))
        ahead = list(range(n + g + 1, min(n + g + 1 + most, s.length))) if drafts_here else []
        now = Round(n, longest, drafts, judged, ahead, redraft=by_ratio and g > 0, by_head=by_head)
        at_n = n + k - s.cached - rules.shift  # the row of the masks ahead that predicts position n
        answer = yield ask_of(s, rules, now, purpose, asks.SURE if texts else asks.JUDGE)
        purpose = VERIFY
        s.proposed += k
        s.accepted += answer.accepted
        news = [Revealed(*each) for each in zip(judged, answer.tokens, answer.log_ps, strict=False)]
        s.reveal(news[: answer.accepted + 1], drafts.tokens)
        after = n + min(answer.accepted + 1, len(judged))
        s.cached, s.is_over = after - 1, s.is_complete
        if texts is not None:
            texts.count()
        drafts, count = Drafts(), n + 1 + len(ahead) - after
        if by_head and count > 0 and not s.is_over:
            rolled = yield Roll(asks.MARKOV, after, count, at_n + after - n, n)
            drafts = Drafts(rolled.tokens, [_AHEAD] * count)
        elif drafts_here and not by_head:
            drafts = next_drafts(now, answer, range(after, min(after + most, s.length)))


def drafts_by(s: BlockSample, rules: Rules, drafter: ModelInfo) -> Generator[Any, Answer, Drafts]:
    """Another model's drafts for the places after the text, as many as it has room for."""
    n, cached, longest = s.decided, s.cached_draft, drafter.max_length
    count = min(rules.size, s.length - n, s.length if longest is None else longest - n)
    if count <= 0:
        return Drafts()
    assert drafter.mask_id is not None
    spans: tuple[int, ...] = Span(n - cached, cached, cached) if n > cached else ()
    spans += Span(count, n, n, n + count, asks.FAR)
    rows, places = [max(n + j - cached - drafter.shift, 0) for j in range(count)], range(n, n + count)
    tokens, runs = s.tokens[cached:n] + [drafter.mask_id] * count, s.runs(asks.DRAFT, rows, places)
    s.nfe_draft += 1
    # With a shift the last row predicts the next draft, so it runs once more.
    s.cached_draft = max(n - drafter.shift, 0)
    answer = yield Ask(tokens, spans, runs, [asks.NO_DRAFT] * count, model=1, when=s.draws)
    return Drafts(list(answer.tokens), [_AHEAD] * count)


def ask_of(s: BlockSample, rules: Rules, now: Round, purpose: int, kind: int) -> Ask:
    """The rows of a round: main, ahead, copies, in this order; what is judged, by rows of a `kind`, comes first."""
    n, g, size, cached = now.n, now.drafts.guess, now.longest, s.cached
    main = n + len(now.drafts.tokens) - cached
    spans: tuple[int, ...] = Span(main, cached, cached) if main else ()
    masks, column = len(now.ahead) + bool(now.ahead), n + 2 * (size + 1)
    if masks:
        spans += Span(masks, column, n + g, n + g, asks.FAR, own=column, till=column + masks)
    copied = int(n == 0) if rules.left_shift else len(now.judged)
    if copied:
        spans += Span(copied, n + size + 1, n, 0, size + 2, own=asks.SELF)
    tokens = s.tokens[cached:n] + now.drafts.tokens + [rules.mask] * (masks + copied)
    says = [main + masks + j if j < copied else n - 1 - cached + j for j in range(len(now.judged))]
    runs = list[int]()
    # The row after all drafts judges none, so its bank does not matter.
    for row, position, bank in zip(says, now.judged, [*now.drafts.banks, _COPIES], strict=False):
        runs += Run(row, 1, position, kind, bank=bank)
    if not now.by_head:
        runs += s.runs(asks.DRAFT, [main + position - n - g - rules.shift for position in now.ahead], now.ahead, _AHEAD)
    if now.redraft:
        runs += s.runs(asks.DRAFT, says[1:], now.judged[1:], _COPIES)
    num_sampled = sum(runs[1::6])
    drafts = [*now.drafts.tokens, asks.NO_DRAFT][: len(now.judged)]
    return s.forward(purpose, tokens, spans, runs, drafts + [asks.NO_DRAFT] * (num_sampled - len(drafts)))


def next_drafts(now: Round, answer: Answer, positions: range) -> Drafts:
    """Take the next round's drafts from this round's predictions: the copies' where the chain broke early, else those ahead."""
    judges = len(now.judged)
    answers = {position: (judges + j, _AHEAD) for j, position in enumerate(now.ahead)}
    if answer.accepted < now.drafts.guess:
        first = judges + len(now.ahead) - 1 if now.redraft else 0
        answers |= {now.n + j: (first + j, _COPIES) for j in range(1, judges)}
    taken = [answers[position] for position in positions if position in answers]
    return Drafts(
        [answer.tokens[row] for row, _ in taken], [bank for _, bank in taken], min(answer.accepted, len(taken))
    )


def algorithm(setup: Setup, settings: S2d2Settings) -> Algorithm:
    if settings.drafts_in_verifications or settings.drafter is not None:
        return _fused(setup, settings, settings.drafter)
    rules, sampling = Rules(settings, setup.info), setup.sampling
    by_ratio = settings.paper_compat if sampling.temperature == 0.0 else sampling.acceptance == "rejection"
    measure = measure_of(settings.router, settings.estimator)
    # Whether every token comes from a verification, which sees only the tokens to its left.
    known = settings.verifies_always and rules.settings.tau_edit is None and rules.takes_all_steps

    def decode(s: BlockSample) -> Decoding:
        return denoise(s, rules, SelfVerifier(rules, settings))

    base = algorithm_of(rules, decode, notes_of(settings, measure), by_ratio=by_ratio, knows_logprob=known)
    return replace(base, measured=measure is not None, temper=settings.temper, keeps_laws=True)


def _fused(setup: Setup, settings: S2d2Settings, drafter: Any, clock: AutoLength | None = None) -> Algorithm:
    """Each verification drafts, or what the `drafter` names; with a `clock` either of them, as it says."""
    rules, by_model, texts_of, auto = Rules(settings, setup.info), isinstance(drafter, DrafterPlace), None, clock
    info = setup.drafter_info
    assert by_model == (info is not None), "decoder.drafter names a model, but none was loaded"
    by_ratio = setup.sampling.temperature != 0.0 and setup.sampling.acceptance == "rejection"
    most = rules.size
    if isinstance(drafter, RunDrafterSettings):
        texts_of, longest, own = texts_by(drafter, clock)
        most, auto = max(longest, most if clock else 0), clock or own
    given: dict[str, Any] = {
        "by_ratio": by_ratio,
        "longest": most,
        "drafter": info,
        "texts_of": texts_of,
        "auto": clock,
        "by_head": setup.heads is not None,
    }
    decode = partial(s2d2_fused, rules=rules, **given)
    return replace(
        algorithm_of(rules, decode, (), by_ratio=by_ratio, knows_logprob=True),
        window=2 * most + 1,
        columns=lambda length: length + 3 * (most + 1),
        auto=auto,
        temper=settings.temper,
        keeps_laws=texts_of is None,
        banks=2,
        windows="short" if by_model else None,
    )


def fastest(setup: Setup, settings: FastestSettings) -> Algorithm:
    """How the engine runs `fastest` on a block-diffusion model: without drafts a round decodes one token, at block size 1."""
    size = min(setup.info.block_size or _MOST_AUTO, _MOST_AUTO)
    like = S2d2Settings(kind="s2d2", fused=True, causal_cache=True, block_size=size)
    ways = [way_of(settings.drafter)] if isinstance(settings.drafter, RunDrafterSettings) else []
    return _fused(setup, like, settings.drafter, AutoLength(*ways, Way(size, name="self")))
