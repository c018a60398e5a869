"""`block_diffusion`: decodes blocks of masks one after the other, each in several denoising steps.

Each sample goes its own way; one forward serves samples in all phases:

    prefill -> draft -> draft -> .. -> commit -> draft -> ..

    phase     columns            a row sees
    prefill   0 .. start         its block and those before it; with a causal cache the columns to its left
    draft     start .. end       up to the end of the block; a causal front the columns to its left
    commit    start .. end       as in a prefill

A drafting forward runs the block and predicts a token for each of its masks; the schedule reveals some of them (below).
The keys and values of a finished block were computed while it still had masks, so a commit runs it once more if another block
follows. In models that predict the next token (`shift`), the last row of a commit (or of the prefill) predicts the first token of
the next block. With `fused` the prompt and finished blocks run along with the next draft. In a model with `prompt_block` blocks
begin where the prompt ends, and the prompt's rows see all of it (D2F).

    block        a b _ _ | _ _ _ _             size 4, sub-blocks of 2: the masks of the first part that has any are asked about
    draft            x y |                     x is surer: revealed
    next         a b x _ |

Which masks a denoising step reveals; at least one while there is any, and none twice. Ties are broken from left to right.

    static       the most confident, as many as the step's share
    dynamic      all with confidence above tau, if that is at least the share; else as `static`
    sequential   the leftmost, as many as the share
    entropy      by ascending entropy, while the entropies before the last one sum up to at most tau; at least one

Sources: Cheng et al., "SDAR" (2025); Wu et al., "Fast-dLLM v2" (2025: sub-blocks); LLaDA2.1 (editing);
schedules: SDAR and S2D2's public code; Ben-Hamu et al., "Accelerated sampling from masked diffusion models via entropy bounded
unmasking" (2025), section 4: the public code's version sums over the wrong axis.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from draftmill.decoders.base import HOLE
from draftmill.decoders.blocks.samples import COMMIT, DRAFTED, PREFILL, BlockSample, Revealed
from draftmill.decoders.blocks.settings import BlockDiffusionSettings, BlockSettings, Rules
from draftmill.decoders.draws.settings import Note
from draftmill.decoders.engine.algorithm import WHOLE, Algorithm
from draftmill.decoders.engine.asks import DRAFT, FAR, JUDGE, JUST_ONE, NO_DRAFT, Answer, Decoding, Span
from draftmill.decoders.engine.setup import Setup

if TYPE_CHECKING:
    from draftmill.decoders.blocks.verifier import SelfVerifier

Forwards = Generator[Any, Answer, None]


class Drafted(NamedTuple):
    """A drafted token: its log-probability under the model itself, its probability in the distribution that it was drawn from,
    and, where they are wanted, that distribution's entropy in nats and what a router measures of it."""

    token: int
    log_p: float
    sure: float
    entropy: float = 0.0
    measured: float = 0.0


Draft = Mapping[int, Drafted]
"""What a forward predicts for places of a block."""


@dataclass(slots=True)
class Block:
    """The block at work, [start, end), with `begun` masks at first. `step` counts denoising steps of the sub-block so far,
    `post` those since the last mask was revealed, `drawn` the block's."""

    start: int
    end: int
    begun: int
    step: int = 0
    post: int = 0
    drawn: int = 0
    finished: bool = False


def denoise(s: BlockSample, rules: Rules, verifier: SelfVerifier | None = None) -> Decoding:
    s.widen(rules.full(s.length, s.prompt))
    start = rules.start(s.prompt)
    # Decided positions that are not yet in the cache.
    uncached = (s.cached, start) if start else None
    while not s.is_over:
        end = min(start + rules.size, len(s.tokens))
        block = Block(start, end, s.tokens[start:end].count(HOLE))
        s.number = 0
        if uncached and not rules.settings.fused:
            yield from commit_block(s, rules, uncached, block)
            uncached = None
        yield from fill(s, rules, block, uncached, verifier)
        uncached, start = (start, end), end


def commit_block(s: BlockSample, rules: Rules, uncached: tuple[int, int], block: Block) -> Forwards:
    """Leave decided blocks in the cache; where a row predicts the next token, the last one says the first of the next block."""
    low, high = uncached
    predicts_next = rules.predicts_next and s.tokens[high] == HOLE
    runs = s.runs(JUDGE, [high - low - 1], [high]) if predicts_next else []
    purpose = COMMIT if any(s.kinds) else PREFILL
    answer = yield s.forward(purpose, s.tokens[low:high], commit_span(uncached, rules), runs, JUST_ONE[: len(runs)])
    if predicts_next:
        s.reveal([Revealed(high, answer.tokens[0], answer.log_ps[0])], stops=rules.settings.tau_edit is None)
        go_on(s, rules, block, quiet=False)


def commit_span(uncached: tuple[int, int], rules: Rules) -> Span:
    """The rows of decided blocks, as the cache is to hold them."""
    low, high = uncached
    if rules.prompt_block and rules.grain > 1:
        return Span(high - low, low, low, high)
    return Span(high - low, low, low, block=rules.grain)


def fill(
    s: BlockSample, rules: Rules, block: Block, uncached: tuple[int, int] | None, verifier: SelfVerifier | None
) -> Forwards:
    """Draft and reveal until no mask of the block is left, or the completion ends."""
    while not (block.finished or s.is_over):
        masks = part_of(s, rules, block)
        draft = yield from draft_masks(s, rules, block, masks, uncached)
        uncached = None
        edits = edits_of(s, rules, block, draft)
        s.edit(edits)
        part = masks[0] // rules.sub_block if masks else None
        if masks:
            yield from decide(s, rules, block, masks, draft, verifier)
        else:
            if verifier:
                verifier.wants([], {}, num_sure=0, progress=1.0)
            block.post += 1
            s.skip_iteration()
        left = part_of(s, rules, block)
        same = part == (left[0] // rules.sub_block if left else None)
        block.step = block.step + 1 if same else 0
        go_on(s, rules, block, quiet=not masks and not edits)


def part_of(s: BlockSample, rules: Rules, block: Block) -> list[int]:
    """The masks of the first sub-block that has any."""
    masks = [place for place, token in enumerate(s.tokens[block.start : block.end]) if token == HOLE]
    return [place for place in masks if place // rules.sub_block == masks[0] // rules.sub_block]


def editable(s: BlockSample, rules: Rules, block: Block) -> list[int]:
    """Where a revealed token may be replaced. With `shift` no row of the block predicts the block's first token."""
    if rules.settings.tau_edit is None:
        return []
    places = range(max(rules.shift, s.prompt - block.start), block.end - block.start)
    return [place for place in places if s.tokens[block.start + place] != HOLE]


def draft_masks(
    s: BlockSample, rules: Rules, block: Block, masks: list[int], uncached: tuple[int, int] | None
) -> Generator[Any, Answer, Draft]:
    """Predict a token for these masks, and for every place that may be edited."""
    start, end = block.start, block.end
    s.draws, s.number, block.drawn = s.draws + 1, block.drawn if rules.fresh else 0, block.drawn + 1
    tokens = [rules.mask if token == HOLE else token for token in s.tokens[start:end]]
    spans: tuple[int, ...] = ()
    front = front_of(rules, masks, end - start)
    if front:
        spans += Span(front, start, start)
    if start + front < end:
        spans += Span(end - start - front, start + front, start + front, end, FAR)
    if uncached:
        tokens += s.tokens[slice(*uncached)]
        spans += commit_span(uncached, rules)
    places = sorted(masks + editable(s, rules, block))
    rows, positions = [max(place - rules.shift, 0) for place in places], [start + place for place in places]
    purpose = PREFILL if uncached and not any(s.kinds) else DRAFTED
    answer = yield s.forward(purpose, tokens, spans, s.runs(DRAFT, rows, positions), [NO_DRAFT] * len(rows))
    sures = answer.notes[0]
    # Where entropies are wanted they are the second note; what a router wants is the last one.
    entropies, numbers = (answer.notes[1] if len(answer.notes) > 1 else sures), answer.notes[-1]
    fields = (answer.tokens, answer.log_ps, sures, entropies, numbers)
    return {place: Drafted(*row) for place, row in zip(places, zip(*fields, strict=True), strict=True)}


def front_of(rules: Rules, masks: list[int], size: int) -> int:
    """The number of places of a block that are drafted causally: those before its first mask."""
    return (masks[0] if masks else size) if rules.causal_draft else 0


def edits_of(s: BlockSample, rules: Rules, block: Block, draft: Draft) -> list[Revealed]:
    """New tokens for revealed places: drafts that differ, with a confidence above `tau_edit`."""
    if rules.settings.tau_edit is None:
        return []
    start, tau = block.start, rules.settings.tau_edit
    return [
        Revealed(start + place, choice.token, choice.log_p)
        for place, choice in draft.items()
        if s.tokens[start + place] not in {HOLE, choice.token} and choice.sure > tau
    ]


def decide(
    s: BlockSample, rules: Rules, block: Block, masks: list[int], draft: Draft, verifier: SelfVerifier | None
) -> Forwards:
    """Reveal what a verification leaves of the draft, if there is one; then what the schedule chooses, up to the step's share."""
    judged: list[Revealed] = []
    run: list[int] = []
    if verifier:
        num_sure, left = num_surer(masks, draft, rules.settings.tau), s.tokens[block.start : block.end].count(HOLE)
        run = verifier.wants(masks, draft, num_sure=num_sure, progress=(block.begun - left) / rules.size)
        if run:
            judged = yield from verifier.verdict(s, block, run, draft)
    done = {revealed.position - block.start for revealed in judged}
    missing = min(share(block.step, rules.sub_block, rules.settings.steps), len(masks)) - len(judged)
    rest = [place for place in masks if place not in done]
    chosen = choose(rules.settings.schedule, rest, missing, draft, rules.settings.tau)
    news = judged + [Revealed(block.start + place, draft[place].token, draft[place].log_p) for place in chosen]
    if verifier:
        verifier.route.learn(len(news), verified=bool(run))
    s.reveal(news, [draft[place].token for place in run], stops=rules.settings.tau_edit is None)


def go_on(s: BlockSample, rules: Rules, block: Block, *, quiet: bool) -> None:
    """After a step: is the block finished, and the sample over? `quiet`: nothing was left to reveal or edit."""
    finished = HOLE not in s.tokens[block.start : block.end]
    if rules.settings.tau_edit is None:
        block.finished, s.is_over = finished, s.is_complete
        return
    block.finished = finished and (quiet or block.post >= rules.settings.post_steps)
    if block.finished:
        s.end_edited(block.start, block.end)
        s.is_over = block.end >= s.length


def share(step: int, size: int, steps: int | None) -> int:
    """The number of masks to reveal in step number `step`, where `size` places take `steps` (None: one each)."""
    if steps is None or steps >= size:
        return 1
    return size // steps + (step < size % steps)


def choose(schedule: str, masks: list[int], share: int, draft: Draft, tau: float) -> list[int]:
    """The places of the masks to reveal, in this order; `share` is the number that a step should reveal, 0 for none."""
    if share <= 0 or not masks:
        return []
    if schedule == "sequential":
        return masks[:share]
    if schedule == "entropy":
        return _within(sorted(masks, key=lambda place: _number(draft[place].entropy)), draft, tau)
    if schedule == "dynamic":
        share = max(share, num_surer(masks, draft, tau))
    return sorted(masks, key=lambda place: -_number(draft[place].sure))[:share]


def num_surer(masks: list[int], draft: Draft, tau: float) -> int:
    return sum(draft[place].sure > tau for place in masks)


def _within(places: list[int], draft: Draft, tau: float) -> list[int]:
    """The first place, and those after it while the entropies before the last one sum up to at most tau."""
    spent = 0.0
    for count, place in enumerate(places):
        entropy = draft[place].entropy
        spent += entropy
        if count and not spent - entropy <= tau:
            return places[:count]
    return places


def _number(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def algorithm(setup: Setup, settings: BlockDiffusionSettings) -> Algorithm:
    rules = Rules(settings, setup.info)
    one_by_one = settings.schedule in {"static", "sequential"} and rules.takes_all_steps
    return algorithm_of(
        rules,
        partial(denoise, rules=rules),
        notes_of(settings),
        by_ratio=setup.sampling.acceptance == "rejection" and setup.sampling.temperature > 0.0,
        # Whether every token is revealed alone, given all that was revealed before.
        knows_logprob=rules.settings.tau_edit is None and (rules.size == 1 or one_by_one),
    )


def notes_of(settings: BlockSettings, measure: Note | None = None) -> tuple[Note, ...]:
    """The notes of each drafted row: those that a schedule reads, and then the one that a router reads."""
    return ("top1", *(("entropy",) if settings.schedule == "entropy" else ()), *((measure,) if measure else ()))


def algorithm_of(
    rules: Rules, decode: Any, notes: tuple[Note, ...], *, by_ratio: bool, knows_logprob: bool
) -> Algorithm:
    # The rows of a prompt that see all of it are no other prompt's.
    whole = rules.prompt_block and rules.grain > 1
    return Algorithm(
        decode=decode,
        kind="blocks",
        sample=BlockSample,
        window=rules.size,
        columns=rules.columns,
        # The last row of the blocks before the first mask is run by every sample: it may predict that mask.
        reusable=lambda sample: 0 if whole else max(rules.start(sample.prompt) - 1, 0),
        cut_multiple=WHOLE if whole else rules.grain,
        # A prompt shorter than a block needs no prefill: its sample drafts at once.
        has_prompt=lambda sample: rules.start(sample.prompt) > 0,
        joins_prompts=False,
        notes=notes,
        warped=True,
        fresh=rules.fresh,
        by_ratio=by_ratio,
        knows_logprob=knows_logprob,
    )
