"""What a decoder asks the engine: rows of one sample for a forward, and which of them are sampled. Pure: imports no torch.

A decoder is a generator over one sample. It yields an `Ask` and is sent an `Answer`; the engine runs the asks of all samples
together (docs/engine.md). Rows come as *spans*, sampled rows as *runs*:

    rows      0 1 2 3 4 5 | 6 7 8             two spans: consecutive columns and positions each
    sampled         2 3 4 |   7               two runs: consecutive rows, which speak of consecutive ranks

Which columns a row at column c sees:

    rule                                    below    lag   block  own     till
    causal                                  0        0     1      FAR     0
    the first n columns                     n        FAR   1      FAR     0
    its block and those before it           0        0     size   FAR     0
    a query that sees all ranks before it   0        1     1      FAR     0
    a candidate beside the chain            prefix   FAR   1      its first column
    masks that see a prefix and each other  prefix   FAR   1      first   the column after the last
    a copy of a place to its left           0        l     1      SELF    0        l: its column + 1 - its position

In an any-subset model columns are ranks, and only *queries* are sampled: rows without a token, in spans of their own.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

FAR: Final = 1 << 40
"""As `lag`: only `below` counts. As `own`: there are no such columns."""
SELF: Final = -1
"""As `own`: a row's own column alone."""

TARGET, DRAFT, JUDGE, SURE, TARGET_ONCE, SCORE = range(6)
"""Kinds of sampled rows. TARGET: the model's own token. DRAFT: a token that will be judged; under the rejection rule its
distribution q is kept. JUDGE: judges a draft by the kept q, follows those that do, or stands alone. SURE: the same for a draft
that had no alternative (q is a point mass). TARGET_ONCE: as TARGET, of a rank that is asked about once. SCORE: as TARGET, but
the log-probability is that of the row's draft, a token of a text that is scored."""

NO_DRAFT: Final = -1
"""In `Ask.drafts`: the row judges no draft."""
JUST_ONE: Final = (NO_DRAFT,)

UNREAD: Final = -2
"""As a row's token: the one that its model has drawn at this rank, which the host has not read. -1 is a hole."""


class Span(NamedTuple):
    """A run of `num_rows` rows from a column and a position on; spans are added up as flat numbers. A row at column c sees the
    columns below max(below, the end of its block - lag), where blocks of columns have `block` each, and those from `own` up to
    max(c, till - 1). `node` numbers the canvases of a sample, where it runs several."""

    num_rows: int
    column: int
    position: int
    below: int = 0
    lag: int = 0
    block: int = 1
    own: int = FAR
    till: int = 0
    node: int = 0


class Run(NamedTuple):
    """`num_rows` sampled rows from number `row` of the ask on, for the ranks from `rank` on; runs are added up as flat numbers.
    `draw` numbers the noise where steps draw anew. Under the rejection rule what is known of a draft waits in a `bank`."""

    row: int
    num_rows: int
    rank: int
    kind: int
    draw: int = 0
    bank: int = 0


MOST_STRETCHES: Final = 5
"""How many stretches of columns a row may see; a node of `ssd` needs no more (masked/ssd.py)."""


class Ask(NamedTuple):
    """One sample's part of a forward of the model `model`: 0 is the target, 1 the drafting model.

    `tokens` are those of the rows in `spans`; a hole reads as the model's mask. `drafts` has an entry for each sampled row: the
    draft that it judges, or NO_DRAFT; rows that judge come first. `queries` are the spans of an any-subset model's query rows,
    to which the numbers of `runs` then refer. `when` numbers the draws of the sample under the rejection rule, by default by its
    decided tokens.

    `stretches` say what rows see in place of the rule above: MOST_STRETCHES pairs [low, high) of columns a span, the empty ones
    last. `partners` names for each sampled row another row, by which its logits are guided (Algorithm.guidance). `sigmas` are the
    total noise of each canvas, for a model that is conditioned on it.
    """

    tokens: Sequence[int] | Ints
    spans: Sequence[int]
    runs: Sequence[int] | Ints
    drafts: Sequence[int] | Ints
    queries: Sequence[int] = ()
    model: int = 0
    when: int = -1
    stretches: Sequence[int] = ()
    partners: Sequence[int] | Ints = ()
    sigmas: Sequence[float] = ()


INDEPENDENT, MARKOV, MODEL = range(3)
"""What draws a Roll's drafts: the rows' own distributions, the model's draft head (decoders/backbones/heads.py), or forwards of
a drafting model, one a draft."""


class Roll(NamedTuple):
    """Asks for drafts of the ranks `rank` .. `rank + num_drafts - 1`, which stay on the device until all are drawn.
    Those of a MODEL: it runs its columns up to `rank`, then each draft but the last. All others come from rows of the
    sample's last forward (of an any-subset model: query rows), before the next one. Draft j comes from the row `row + j`;
    with MARKOV it is corrected with the tokens that the row has not seen, those at ranks from `limit` on."""

    head: int
    rank: int
    num_drafts: int
    row: int = 0
    limit: int = 0


class SampleFrom(NamedTuple):
    """Asks for a draft of `rank` from a distribution of the decoder's own: `tokens` have these `weights`, all others none.
    Without any tokens all are alike. The sampling settings apply as to a model's distribution. Answered before the next
    forward."""

    rank: int
    tokens: list[int]
    weights: list[int]


class Answer(NamedTuple):
    """`accepted` is how many leading drafts hold. `tokens` and `log_ps` have an entry for each sampled row.

    Under coupled acceptance each token is the target's own. Under the rejection rule the first `accepted` tokens are the drafts,
    the next one comes from the residual or is the bonus, and the others mean nothing. `log_ps` are log-probabilities under the
    model itself (temperature 1, no truncation); those of drafts by another model, a Roll or SampleFrom are not computed and are
    0.

    `notes` are what else the algorithm wants to know of each row, in its order (Algorithm.notes). Lists; in masked diffusion
    arrays [A, R], of this step and of those ahead (Algorithm.ahead).
    """

    accepted: int
    tokens: Any
    log_ps: Any
    notes: Any = ()


Wish = Ask | Roll | SampleFrom
Decoding = Generator[Wish, Any, None]
"""A decoder at work on one sample: it is sent an Answer for each, and ends with the sample."""
