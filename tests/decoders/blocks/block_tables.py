"""Toy block-diffusion models: exact tables with a mask among their tokens, decoded by ours and by the plain reference."""

from copy import copy
from functools import cache

from draftmill.decoders.base import ModelInfo
from draftmill.decoders.common_settings import Sampling
from tests.decoders.references.blocks import PlainBlocks, decode_blocks
from tests.decoders.references.choosers import rule_of
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decode

GREEDY, SAMPLED = Sampling(temperature=0.0), Sampling(temperature=0.9)
REJECTING = Sampling(temperature=0.9, acceptance="rejection")


def table_info(vocab_size=3, *, shift=0, max_length=None):
    """A model of `vocab_size` tokens and a mask, which is the last id."""
    return ModelInfo(
        "token_table", vocab_size + 1, vocab_size, max_length, "blocks", 0, (vocab_size,), shift, block_size=None
    )


@cache
def _made(vocab_size, length, seed):
    return TokenTable(vocab_size=vocab_size + 1, num_positions=length, seed=seed)


def table(vocab_size=3, length=6, seed=1):
    """A model with a cache of its own."""
    return copy(_made(vocab_size, length, seed))


def refer(requests, info, settings, sampling, *, plain=decode_blocks, heads=None, **made):
    """The trails of the plain reference, by index."""
    model, more = PlainBlocks(table(info.mask_id, **made), info, settings, sampling), (heads.markov,) if heads else ()
    return {
        request.index: plain(model, request.canvas.tolist(), rule_of(request.key, sampling), *more)
        for request in requests
    }


def ours(requests, info, settings, sampling, *, rows=3, stops=None, trace=False, heads=None, prompt_rows=None, **made):
    more = {"stops": stops, "trace": trace, "heads": heads, "prompt_rows": prompt_rows}
    return decode(table(info.mask_id, **made), info, settings, sampling, requests, rows=rows, **more)


def check(outcomes, trails, requests):
    for request in requests:
        outcome, trail = outcomes[request.index], trails[request.index]
        prompt, length = int((request.canvas >= 0).sum()), len(request.canvas)
        assert outcome.tokens.tolist() == trail.canvas[prompt:length]
        assert outcome.nfe_kinds == trail.nfe
        assert outcome.nfe == sum(trail.nfe.values())
        assert (outcome.proposed, outcome.accepted) == (trail.proposed, trail.accepted)
