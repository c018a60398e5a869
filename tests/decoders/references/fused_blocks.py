"""A plain reference of S2D2's fused rounds (blocks/s2d2.py): one sample, no cache, no stops; uses blocks.py."""

from collections.abc import Sequence

from torch import Tensor

from draftmill.decoders.backbones.heads.markov import MarkovHead
from draftmill.decoders.base import HOLE
from tests.decoders.references.blocks import BlockTrail, PlainBlocks, Row
from tests.decoders.references.choosers import Rule

Drafts = list[tuple[int, Tensor]]
"""Tokens, and the distributions that they were drawn from."""


def decode_fused(model: PlainBlocks, canvas: Sequence[int], rule: Rule, head: MarkovHead | None = None) -> BlockTrail:
    """Complete the canvas, a prompt and then holes: every round judges the last one's drafts and makes the next ones, by `head`
    if there is one."""
    length, tokens = len(canvas), [token for token in canvas if token != HOLE]
    trail, drafts = BlockTrail(list(canvas)), Drafts()
    kind, guess = "prefill" if len(tokens) >= (1 if model.info.prompt_block else model.size) else "draft", 0
    while len(tokens) < length:
        trail.nfe[kind] += 1
        trail.drafts += 1
        kind, fed = "verify", [*tokens, *(token for token, _ in drafts)]
        new, accepted = _judged(model, tokens, drafts, rule, trail.drafts, length)
        trail.proposed += len(drafts)
        trail.accepted += accepted
        text, guess, decided, tokens = tokens, min(guess, len(drafts)), len(tokens), [*tokens, *new]
        if head is not None:
            drafts = _headed(model, head, text, tokens, rule, length)
            continue
        last = min(len(tokens) + model.size, decided + guess + model.size + 1, length)
        places = range(len(tokens), last)
        known = fed[: decided + guess]
        laws = [
            at_size_one(model, fed, place)
            if accepted < guess and place <= len(fed)
            else _ahead(model, known, place, length)
            for place in places
        ]
        guess = accepted
        drafts = [(rule.draft(law, at, trail.drafts), law) for at, law in zip(places, laws, strict=True)]
    trail.canvas[:] = tokens
    return trail


def _judged(
    model: PlainBlocks, tokens: list[int], drafts: Drafts, rule: Rule, when: int, length: int
) -> tuple[list[int], int]:
    """The tokens that a round commits, and how many drafts it accepts."""
    new = list[int]()
    for token, q_law in drafts:
        place = len(tokens) + len(new)
        passed, said = rule.settle(at_size_one(model, [*tokens, *new], place), q_law, token, place, when)
        new.append(said)
        if not passed:
            return new, len(new) - 1
    place = len(tokens) + len(new)
    if place < length:
        new.append(rule.direct(at_size_one(model, [*tokens, *new], place), place, when))
    return new, len(drafts)


def at_size_one(model: PlainBlocks, fed: list[int], place: int) -> Tensor:
    """The distribution at block size 1 of a place, given the tokens to its left."""
    return model.law(*model.verifying(fed, 0, place))


def _headed(
    model: PlainBlocks, head: MarkovHead, text: list[int], tokens: list[int], rule: Rule, length: int
) -> Drafts:
    """Drafts after `tokens`, one after the other, from masks that saw no more than `text`."""
    drafts = Drafts()
    for place in range(len(tokens), min(len(text) + model.size + 1, length)):
        before, where = [*tokens, *(token for token, _ in drafts)], masks_after(model, text, place, length)
        law = model.headed(*where, head, before, place - len(text))
        drafts.append((rule.draft(law, place, len(tokens)), law))
    return drafts


def _ahead(model: PlainBlocks, fed: list[int], place: int, length: int) -> Tensor:
    """The predictions of masks after these tokens."""
    return model.law(*masks_after(model, fed, place, length))


def masks_after(model: PlainBlocks, fed: list[int], place: int, length: int) -> tuple[list[Row], int]:
    """Tokens, masks after them, which see the tokens and each other, and the column that predicts a place."""
    mask, end = model.info.mask_id, min(len(fed) + model.size + 1, length)
    assert mask is not None
    left = [(token, at, at, frozenset(range(at + 1))) for at, token in enumerate(fed)]
    ahead = [(mask, at, at, frozenset(range(end))) for at in range(len(fed), end)]
    return [*left, *ahead], place - model.info.shift
