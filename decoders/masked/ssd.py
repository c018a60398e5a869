"""`ssd`: one forward drafts what the next forwards would reveal, and the next one verifies it.

The last forward's predictions for the remaining masks are the drafts: a token for each, in the order in which they would be
revealed (blocks first, then confidence). Where each step draws anew, the n-th draft is what the n-th next step would draw and
reveal if distributions stayed as they are (Algorithm.ahead). The first N drafts make a chain of canvases, each with one more
draft, and all of them run in one forward:

    node 0    the big _ sat _ _ .      the canvas as it is          next: cat at 2            the first draft: continue
    node 1    the big cat sat _ _ .    with the first draft         next: mat at 5            the second draft: continue
    node 2    the big cat sat _ mat .  with the first two drafts    next: on at 4             not the third: take it and stop

A node whose drafts are right reveals what `stepwise` reveals from that canvas, drafted or not. So every forward reveals at least
one token, a chain up to N + 1, and the text and the order of revealing are those of `stepwise`. The predictions of the last right
node are the next drafts. With `tree: mixed` there are up to 2 N nodes, which branch where another mask may come next. Two orders
of the same drafts lead to one node, so where only the order was wrong the walk goes on:

    likely: a, then b, then c      nodes: none, a, ab, b, abc      the choices b, a, c, d      walked: none, b, ab, abc

Each node has a slot of its own, or stands beside the others around a cache. There it runs the window that its forward of
`stepwise` would run, and reads every other position from the last node before it that ran it, in the same layer:

    block_length 3, refresh 9    the canvas     block 0   block 1         runs                reads
    node 0 (the root)            the big _      _ _ _     . . .           block 0             the cache
    node 1                       the big cat    _ _ _     . . .           blocks 0 and 1      the cache
    node 2                       the big cat    _ on _    . . .           block 1             block 0 as node 1 ran it, the cache

    columns                      0 .. canvas .. | node 1 | node 2 | ..

The root runs the whole canvas if its forward rebuilds the cache (a *refresh*); drafts end before the next one. Keys and values
that the last right node reads, and that the next forward won't compute again, are copied into the cache.

So a refresh is exact: a window reads the root's new keys and values in every layer, as `stepwise` would in its next forward.
Drafts end where the next one is due: at the block's end, or with `refresh` after that many tokens, and then they continue into
the next block. With `dual_relaxed` they continue past it, and the cache is rebuilt after the round: fewer forwards, but the
text may differ from that of `stepwise`.

With `drafter: {kind: run}` the tokens of the drafts are those of the row's text in an earlier run, while it foretells well.

`proposed` counts nodes beside the root: NFE + `proposed` are a sample's sequence-forwards.

Source: "Self speculative decoding for diffusion large language models" (SSD, Algorithm 1, figure 4). Differs on purpose: the
first forward's own token counts; blocks after the next one give drafts too; sampling is supported as well, since a draft
reads the noise of its position and step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final

from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import Decoding
from draftmill.decoders.engine.auto import AutoLength, Way
from draftmill.decoders.engine.earlier_texts import PlacedTexts
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.masked.canvas import Canvas, Draft, Node, NodeLayout, Pick, Windows
from draftmill.decoders.masked.settings import MaskedSettings, SelfSpeculativeSettings, StepwiseSettings
from draftmill.decoders.masked.stepwise import algorithm_of

if TYPE_CHECKING:
    from draftmill.decoders.fastest import FastestSettings

MOST_AHEAD: Final = 8
"""The number of later steps that masks are also drawn for; drafts beyond are those of the last of these steps."""

_MOST_AUTO: Final = 4
"""The most drafts where the clock chooses."""
_NEXT: Final = 0.4
"""How much less often a mask comes next than the one before it in the order of confidence: what saves most on mdm-tiny."""
_CHAIN, _MIXED = range(2)
"""The ways to draft, by number."""

Picks = Sequence[Sequence[Pick]]
"""The picks of a node, for each stretch that it was asked about."""


@dataclass(frozen=True, slots=True)
class Tree:
    """How `ssd` drafts: up to `drafts` of them, in a chain or `mixed`; with `auto` as many and in the way that the clock says."""

    drafts: int
    mixed: bool
    settings: MaskedSettings
    shift: int
    auto: AutoLength | None = None

    def now(self) -> tuple[int, bool]:
        """How many canvases with drafts the next forward may have, and whether they are mixed."""
        drafts, mixed = (self.drafts, self.mixed) if self.auto is None else (self.auto(), self.auto.way == _MIXED)
        return drafts + max(drafts - 1, 0) * mixed, mixed

    @property
    def cached(self) -> bool:
        """Whether nodes share a cache."""
        return self.settings.cache != "none"

    @property
    def relaxed(self) -> bool:
        """Whether drafts continue past a refresh without making one."""
        return self.settings.cache == "dual_relaxed"

    @property
    def crosses(self) -> bool:
        """Whether drafts continue into the next block and read the existing cache there."""
        return self.relaxed or (self.cached and self.settings.refresh is not None)

    @property
    def most_nodes(self) -> int:
        """The most canvases of a sample, the root included."""
        return 1 + self.drafts + (self.drafts - 1 if self.mixed else 0)

    def stride(self, length: int) -> int:
        """The columns of a node beside a canvas of this length."""
        if self.settings.block_length is None or self.settings.cache in {"none", "prefix"}:
            return length
        return min(length, self.settings.block_length + self.shift)

    def columns(self, length: int) -> int:
        """The columns of a canvas and its nodes around a cache."""
        # A node that enters the next block runs two blocks. Each such one continues a node of its own, if not the root.
        entering = max((self.most_nodes - 1) // 2, 1) if self.mixed else 1
        return length + (self.most_nodes - 1 + self.crosses * entering) * self.stride(length)


def ssd(s: Canvas, tree: Tree) -> Decoding:
    windows, known = Windows(s, tree.settings, tree.shift), Predictions()
    earlier = PlacedTexts(s, s.holes)
    while s.holes:
        runs = windows.next_runs(s.block(s.holes[0]))
        most, mixed = tree.now()
        ahead, deepest = reach(s, tree, windows, most)
        nodes = grow_tree(s.holes, partial(known.next, s, earlier, ahead), most, deepest, mixed=mixed)
        near = 1 + most + (s.size if tree.cached and tree.settings.block_length else 0)
        asked = NodeLayout(s, nodes, windows, runs, count=near, best=most + 1).asked
        answer = yield asked.ask()
        picks_A = map(iter, asked.picks(answer, asked.sure(s, tree.settings, answer)))
        node_picks_A = [[list(islice(picks, len(node.asked))) for node in nodes] for picks in picks_A]
        news, last = walk(nodes, node_picks_A[0])
        for number in {0, last} if last else (0,):
            step = s.decided - s.prompt + len(nodes[number].gone)
            known.learn(nodes[number], [node_picks[number] for node_picks in node_picks_A], step)
        if tree.cached and tree.settings.refresh is not None:
            windows.last = nodes[last].block
            s.copies = nodes[last].evictions(windows.window(windows.last))
        tried = [token for node in nodes[1:] for _, token in node.drafts - nodes[node.before].drafts]
        s.reveal(news, len(nodes) - 1, tried)
        earlier.learn([pick[1:3] for pick in news])


def reach(s: Canvas, tree: Tree, windows: Windows, most: int) -> tuple[int, int]:
    """The last block that has drafts in this round, and how many of them follow each other; the last mask needs none."""
    ahead, num_open = s.block(s.length), len(s.holes)
    if tree.cached:
        ahead = s.block(s.holes[0])
        num_open = bisect_left(s.holes, s.end_of(ahead))
        if tree.crosses and num_open < len(s.holes):
            ahead = s.block(s.holes[num_open])
            num_open = bisect_left(s.holes, s.end_of(ahead))
    most = min(most, num_open - 1)
    if tree.cached and tree.settings.refresh is not None and not tree.relaxed:
        most = min(most, tree.settings.refresh - windows.since() - 1)
    return ahead, most


def grow_tree(
    holes: Sequence[int], likely: Callable[[Collection[Draft]], list[Draft]], most: int, deepest: int, *, mixed: bool
) -> list[Node]:
    """The canvas, and up to `most` with drafts, at most `deepest` each. `likely` are the drafts that may follow others, in their
    order. A chain has the first ones alone. If `mixed`, each comes next with _NEXT times the probability of the one before it,
    and nodes are what is then reached with the greatest probability."""
    nodes, chances, before = [Node(frozenset(), 0, [])], dict[frozenset[Draft], float](), dict[frozenset[Draft], int]()
    reached, width = 1.0, len(holes) if mixed else 1
    while len(nodes) <= most:
        last, chance = nodes[-1].drafts, reached * (1.0 - _NEXT)
        for draft in likely(last)[:width] if len(last) < deepest else ():
            drafts = last | {draft}
            # Orders of the same drafts lead to one canvas.
            if drafts in chances or drafts not in before:
                before.setdefault(drafts, len(nodes) - 1)
                chances[drafts] = chances.get(drafts, 0.0) + chance
            chance *= _NEXT
        if not chances:
            break
        best = max(chances, key=chances.__getitem__)
        reached = chances.pop(best)
        nodes.append(Node(best, before[best], sorted(bisect_left(holes, position) for position, _ in best)))
    return nodes


def walk(nodes: Sequence[Node], node_picks: Sequence[Picks]) -> tuple[list[Pick], int]:
    """Follow the choices while there is a node that has them, whatever their order; returns these, and the last right node."""
    number_of = {node.drafts: number for number, node in enumerate(nodes)}
    news, node = list[Pick](), 0
    while True:
        choice = node_picks[node][0][0]
        news.append(choice)
        after = number_of.get(nodes[node].drafts | {choice[1:3]})
        if after is None:
            return news, node
        node = after


class Predictions:
    """The last predictions for the masks of each block, the surest first: the drafts of later rounds. A reading has the tokens
    that its own step would draw, and those of each later step that was asked for."""

    def __init__(self) -> None:
        # Of each block the first step, and the picks of that and of the next ones.
        self._known: dict[int, tuple[int, list[list[Pick]]]] = {}

    def learn(self, node: Node, picks_A: Sequence[Picks], first: int) -> None:
        """Take a node's readings of the steps from `first` on. Of a block that was read in part, the others stay as they were."""
        for block in dict.fromkeys(asked[0] for asked in node.asked):
            own = [index for index, asked in enumerate(node.asked) if asked[0] == block]
            stretches = [node.asked[index] for index in own]
            ranges = [(0, 1 << 60) if is_whole else (low, high) for _, low, high, _, is_whole in stretches]
            news = []
            for step, picks in enumerate(picks_A, first):
                old = [pick for pick in self._at(block, step) if not any(low <= pick[1] < high for low, high in ranges)]
                news.append(sorted([*old, *(pick for index in own for pick in picks[index])]))
            self._known[block] = first, news

    def _at(self, block: int, step: int) -> Sequence[Pick]:
        """The picks of a block for a step, or for the last one that there is."""
        if block not in self._known:
            return ()
        first, picks_A = self._known[block]
        return picks_A[min(max(step - first, 0), len(picks_A) - 1)]

    def next(self, s: Canvas, earlier: PlacedTexts, last_block: int, gone: Collection[Draft]) -> list[Draft]:
        """What may be revealed after `gone`, up to `last_block`: masks of the first block that has any, the surest first. A draft
        of a later block would stand in a node that runs other positions than its forward of `stepwise`."""
        places = {position for position, _ in gone}
        block = s.block(next((position for position in s.holes if position not in places), s.length))
        picks = self._at(block, s.decided - s.prompt + len(gone)) if block <= last_block else ()
        return earlier.redraft([pick[1:3] for pick in picks if s.tokens[pick[1]] < 0 and pick[1] not in places])


def algorithm(setup: Setup, settings: SelfSpeculativeSettings) -> Algorithm:
    return _algorithm_of(setup, Tree(settings.draft_length, settings.tree == "mixed", settings, setup.info.shift))


def fastest(setup: Setup, settings: FastestSettings) -> Algorithm:
    """How the engine runs `fastest` on a masked-diffusion model: without drafts a round is a step of `stepwise`."""
    like = settings.baseline
    assert isinstance(like, StepwiseSettings)
    auto = AutoLength(Way(_MOST_AUTO, name="chain"), Way(_MOST_AUTO, least=1, name="mixed"))
    return replace(_algorithm_of(setup, Tree(_MOST_AUTO, True, like, setup.info.shift, auto)), auto=auto)


def _algorithm_of(setup: Setup, tree: Tree) -> Algorithm:
    # At temperature 0 all steps draw alike.
    anew = tree.settings.draws_anew and setup.sampling.temperature > 0.0
    base = algorithm_of(partial(ssd, tree=tree), setup, tree.settings, knows_logprob=True)
    base = replace(base, ahead=min(tree.drafts, MOST_AHEAD) if anew else 0)
    if tree.cached:
        return replace(base, columns=tree.columns)
    return replace(base, num_slots=tree.most_nodes * base.num_slots)
