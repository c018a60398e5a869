"""Toy drafters of `specdiff`: tables with a mask among their tokens, and what is known of them."""

import itertools
from copy import copy
from functools import cache

from draftmill.decoders.base import ModelInfo
from draftmill.decoders.common_settings import DrafterPlace
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import decoder_settings

VOCAB, MASK, LENGTH = 3, 3, 7
TARGET_INFO = ModelInfo("token_table", VOCAB, None, None, "causal", 0)
PLACE = DrafterPlace(path="drafter")


def mask_info(*, max_length=None, shift=0, mask_id=MASK, vocab_size=VOCAB + 1):
    """What is known of a drafter."""
    return ModelInfo("masked_table", vocab_size, mask_id, max_length, "masked", 0, (mask_id,), shift)


def specdiff(gamma, steps=2, **more):
    return decoder_settings("specdiff", gamma=gamma, steps=steps, drafter=PLACE, **more)


@cache
def _made(vocab_size, length, seed):
    return TokenTable(vocab_size=vocab_size, num_positions=length, seed=seed)


def target(seed=1, length=LENGTH):
    """A causal model. Nothing was allocated in what is copied, so that only the table itself is shared."""
    return copy(_made(VOCAB, length, seed))


def drafter(seed=3, length=LENGTH):
    """A masked model that knows nothing of the target."""
    return copy(_made(VOCAB + 1, length, seed))


@cache
def _faithful(length):
    known = drafter(length=length)
    known.table_PXV = known.table_PXV.clone()
    theirs, weight = target(length=length), VOCAB + 2
    for place in range(1, length):
        for prefix in itertools.product(range(VOCAB), repeat=place):
            # Every number of masks from `place` on; what is not visible is the digit VOCAB (theirs) or VOCAB + 1.
            context = (VOCAB + 1) ** length - 1 + sum((t - VOCAB) * (VOCAB + 1) ** i for i, t in enumerate(prefix))
            row_V = theirs.table_PXV[place - 1, context]
            for end in range(place + 1, length + 1):
                held = [*prefix, *[MASK] * (end - place)]
                code = weight**length - 1 + sum((t - VOCAB - 1) * weight**i for i, t in enumerate(held))
                known.table_PXV[place, code, :VOCAB] = row_V
    return known


def faithful(length=5):
    """A drafter that says of the first mask behind a text what the target says."""
    return copy(_faithful(length))
