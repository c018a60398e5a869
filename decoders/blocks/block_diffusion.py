"""`block_diffusion`: decodes blocks of masks one after the other, each in several denoising steps.

Each sample goes its own way; one forward serves samples in all phases:

    prefill -> draft -> draft -> .. -> commit -> draft -> ..

    phase     columns            a row sees
    prefill   0 .. start         its block and those before it; with a causal cache the columns to its left
    draft     start .. end       up to the end of the block; a causal front the columns to its left
    commit    start .. end       as in a prefill

A drafting forward runs the block and predicts a token for each of its masks; the schedule reveals some of them (schedules.py).
The keys and values of a finished block were computed while it still had masks, so a commit runs it once more if another block
follows. In models that predict the next token (`shift`), the last row of a commit (or of the prefill) predicts the first token of
the next block. With `fused` the prompt and finished blocks run along with the next draft.

    block        a b _ _ | _ _ _ _             size 4, sub-blocks of 2: the masks of the first part that has any are asked about
    draft            x y |                     x is surer: revealed
    next         a b x _ |

Sources: Cheng et al., "SDAR" (2025); Wu et al., "Fast-dLLM v2" (2025: sub-blocks); LLaDA2.1 (editing).
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from draftmill.decoders.base import HOLE
from draftmill.decoders.blocks.rules import Rules
from draftmill.decoders.blocks.samples import COMMIT, DRAFTED, PREFILL, BlockSample, Told
from draftmill.decoders.blocks.schedules import Draft, Drafted, choose, num_surer, share
from draftmill.decoders.blocks.settings import BlockDiffusionSettings
from draftmill.decoders.engine.algorithm import Algorithm, Notes
from draftmill.decoders.engine.asks import DRAFT, TARGET, Decoding, Noted, Spans, wide_span

if TYPE_CHECKING:
    from draftmill.decoders.engine.setup import Setup

Forwards = Generator[Any, Noted, None]


@dataclass(slots=True)
class Block:
    """The block at work, [start, end), with `begun` masks at first.

    `step` counts denoising steps of the sub-block so far, `post` those since the last mask was revealed, `drawn` the block's.
    """

    start: int
    end: int
    begun: int
    step: int = 0
    post: int = 0
    drawn: int = 0
    finished: bool = False


class Verifier(Protocol):
    """What `s2d2` adds: judges the drafts of a run of masks by the tokens to their left."""

    def wants(self, masks: list[int], draft: Draft, *, num_sure: int, progress: float) -> list[int]:
        """The places to verify; none if it does not pay."""
        ...

    def verdict(self, s: BlockSample, block: Block, run: list[int], draft: Draft) -> Generator[Any, Noted, list[Told]]:
        """Verify them; returns the accepted drafts, and the token that replaces the first rejected one."""
        ...

    def learn(self, decoded: int, *, verified: bool) -> None:
        """The step is over, and revealed so many tokens."""
        ...


def denoise(s: BlockSample, rules: Rules, verifier: Verifier | None = None) -> Decoding:
    """Fill block after block."""
    s.widen(rules.full(s.length))
    start = s.prompt // rules.size * rules.size
    # What is decided, but not yet in the cache.
    behind = (s.cached, start) if start else None
    while not s.is_over:
        end = min(start + rules.size, len(s.tokens))
        block = Block(start, end, s.tokens[start:end].count(HOLE))
        s.first, s.number = max(start, s.prompt), 0
        if behind and not rules.fused:
            yield from finish(s, rules, behind, block)
            behind = None
        yield from fill(s, rules, block, behind, verifier)
        behind, start = (start, end), end


def finish(s: BlockSample, rules: Rules, behind: tuple[int, int], block: Block) -> Forwards:
    """Leave decided blocks in the cache; where a row predicts the next token, the last one says the first of the next block."""
    low, high = behind
    says = bool(rules.shift) and s.tokens[high] == HOLE
    named = s.named(TARGET, [high - low - 1] * says, [high] * says)
    purpose = COMMIT if any(s.kinds) else PREFILL
    told = yield s.forward(purpose, s.tokens[low:high], kept(behind, rules), named)
    if says:
        s.reveal([Told(high, told.tokens[0], told.log_ps[0])], stops=rules.tau_edit is None)
        go_on(s, rules, block, quiet=False)


def kept(behind: tuple[int, int], rules: Rules) -> Spans:
    """The rows of decided blocks, as the cache is to hold them."""
    low, high = behind
    return wide_span(high - low, low, low, 0, 0, grain=rules.grain)


def fill(
    s: BlockSample, rules: Rules, block: Block, behind: tuple[int, int] | None, verifier: Verifier | None
) -> Forwards:
    """Draft and reveal until no mask of the block is left, or the completion ends."""
    while not (block.finished or s.is_over):
        masks = part_of(s, rules, block)
        draft = yield from drafted(s, rules, block, masks, behind)
        behind = None
        edits = edits_of(s, rules, block, draft)
        s.edit(edits)
        part = masks[0] // rules.sub_block if masks else None
        if masks:
            yield from decide(s, rules, block, masks, draft, verifier)
        else:
            if verifier:
                verifier.wants([], {}, num_sure=0, progress=1.0)
            block.post += 1
            s.look()
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
    if rules.tau_edit is None:
        return []
    places = range(max(rules.shift, s.prompt - block.start), block.end - block.start)
    return [place for place in places if s.tokens[block.start + place] != HOLE]


def drafted(
    s: BlockSample, rules: Rules, block: Block, masks: list[int], behind: tuple[int, int] | None
) -> Generator[Any, Noted, Draft]:
    """Predict a token for these masks, and for every place that may be edited."""
    start, end = block.start, block.end
    s.draws, s.number, block.drawn = s.draws + 1, block.drawn if rules.fresh else 0, block.drawn + 1
    tokens = [rules.mask if token == HOLE else token for token in s.tokens[start:end]]
    spans: Spans = ()
    front = front_of(rules, masks, end - start)
    if front:
        spans += wide_span(front, start, start, 0, 0)
    if start + front < end:
        spans += wide_span(end - start - front, start + front, start + front, end)
    if behind:
        tokens += s.tokens[slice(*behind)]
        spans += kept(behind, rules)
    places = sorted(masks + editable(s, rules, block))
    rows, positions = [max(place - rules.shift, 0) for place in places], [start + place for place in places]
    purpose = PREFILL if behind and not any(s.kinds) else DRAFTED
    told = yield s.forward(purpose, tokens, spans, s.named(DRAFT, rows, positions, cells=places))
    nothing = [0.0] * len(places)
    fields = (told.tokens, told.log_ps, told.sures, told.entropies or nothing, told.worths or nothing)
    return {place: Drafted(*row) for place, row in zip(places, zip(*fields, strict=True), strict=True)}


def front_of(rules: Rules, masks: list[int], size: int) -> int:
    """How many places of a block are drafted causally: those before its first mask."""
    if not rules.causal_draft:
        return 0
    return masks[0] if masks else size


def edits_of(s: BlockSample, rules: Rules, block: Block, draft: Draft) -> list[Told]:
    """The revealed tokens of which the draft is confident enough that they are others."""
    if rules.tau_edit is None:
        return []
    start, tau = block.start, rules.tau_edit
    return [
        Told(start + place, said.token, said.log_p)
        for place, said in draft.items()
        if s.tokens[start + place] not in {HOLE, said.token} and said.sure > tau
    ]


def decide(
    s: BlockSample, rules: Rules, block: Block, masks: list[int], draft: Draft, verifier: Verifier | None
) -> Forwards:
    """Reveal what a verification leaves of the draft, if there is one; then what the schedule chooses, up to the step's share."""
    judged: list[Told] = []
    run: list[int] = []
    if verifier:
        num_sure, left = num_surer(masks, draft, rules.tau), s.tokens[block.start : block.end].count(HOLE)
        run = verifier.wants(masks, draft, num_sure=num_sure, progress=(block.begun - left) / rules.size)
        if run:
            judged = yield from verifier.verdict(s, block, run, draft)
    done = {told.position - block.start for told in judged}
    missing = min(share(block.step, rules.sub_block, rules.steps), len(masks)) - len(judged)
    chosen = choose(rules.schedule, [place for place in masks if place not in done], missing, draft, rules.tau)
    news = judged + [Told(block.start + place, draft[place].token, draft[place].log_p) for place in chosen]
    if verifier:
        verifier.learn(len(news), verified=bool(run))
    s.reveal(news, [draft[place].token for place in run], stops=rules.tau_edit is None)


def go_on(s: BlockSample, rules: Rules, block: Block, *, quiet: bool) -> None:
    """After a step: is the block finished, and the sample over? `quiet`: nothing was left to reveal or edit."""
    finished = HOLE not in s.tokens[block.start : block.end]
    if rules.tau_edit is None:
        block.finished, s.is_over = finished, s.is_complete
        return
    block.finished = finished and (quiet or block.post >= rules.post_steps)
    if block.finished:
        s.end_edited(block.start, block.end)
        s.is_over = block.end >= s.length


def algorithm(setup: Setup, settings: BlockDiffusionSettings) -> Algorithm:
    """How the engine runs these settings."""
    rules = Rules.of(settings, setup.info)
    one_by_one = settings.schedule in {"static", "sequential"} and rules.takes_all_steps
    return algorithm_of(
        rules,
        partial(denoise, rules=rules),
        Notes(entropy=settings.schedule == "entropy", fresh=rules.fresh),
        # Whether every token is revealed alone, given all that was revealed before.
        knows_logprob=rules.tau_edit is None and (rules.size == 1 or one_by_one),
    )


def algorithm_of(rules: Rules, decode: Any, notes: Notes, *, knows_logprob: bool) -> Algorithm:
    """What block decoders share."""
    return Algorithm(
        decode=decode,
        kind="blocks",
        window=rules.size,
        knows_logprob=knows_logprob,
        joins_prompts=False,
        columns=rules.columns,
        sample=BlockSample,
        # A prompt shorter than a block needs no prefill: its sample drafts at once.
        has_prompt=lambda sample: sample.prompt >= rules.size,
        # The last row of the blocks before the first mask is run by every sample: it may predict that mask.
        shared=lambda sample: max(sample.prompt // rules.size * rules.size - 1, 0),
        grain=rules.grain,
        notes=notes,
    )
