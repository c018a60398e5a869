"""What a decoder asks the engine: rows of one sample for the next forward, and what shall be drawn from them.

A decoder is a generator over one sample. It yields an `Ask` and is sent an `Answer`; the engine runs the asks of all samples
together. Rows come as *spans*: runs of rows with consecutive columns and positions. A span is nine numbers:

    COUNT      rows of the span
    COLUMN     the column that its first row writes (the rows after it: the columns after it)
    POSITION   the position of its first row
    FLOOR,LAG  a row at column c sees the columns below max(FLOOR, c + 1 - LAG)
    OWN        and the columns from OWN up to its own
    ASKED      its last so many rows are answered
    RANK       the rank that the first answered row speaks of (the rows after it: the ranks after it)
    KIND       how a token is drawn there

    rule                                    FLOOR    LAG   OWN
    causal                                  0        0     FAR
    the whole canvas, in both directions    length   FAR   FAR
    a candidate beside the chain            prefix   FAR   its first column
    content of an any-subset canvas         prompt   0     FAR
    a query that sees all ranks before it   0        1     FAR
    queries that see the same n ranks       n        FAR   FAR

In an any-subset model columns are ranks, and only *queries* are answered: rows without a token, in spans of their own. Rows that
are not answered may be drawn from after all, by a `Roll` that follows.

The spans of a block-diffusion model are *wide*: two numbers more. The rows that are answered are named one by one (`Named`),
since masks are scattered, and a position's token may be predicted by the row of another one.

    GRAIN      the limit of a row at column c is max(FLOOR, (c // GRAIN + 1) GRAIN - LAG): the end of its block, with LAG 0
    TILL       a row sees the columns from OWN up to max(its own, TILL - 1); with OWN = SELF its own column alone

    rule                                    FLOOR    LAG   OWN    GRAIN    TILL
    its block and those before it           0        0     FAR    size     0
    masks that see each other               prefix   FAR   first  1        the column after the last
    a copy of a place to its left           0        l     SELF   1        0      l: its column + 1 - its position

Pure: imports no torch. Sources: docs/engine.md.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.engine.looks import Look

COUNT, COLUMN, POSITION, FLOOR, LAG, OWN, ASKED, RANK, KIND = range(9)
FIELDS: Final = 9
GRAIN, TILL = 9, 10
WIDE: Final = 11
"""Numbers of a wide span."""

FAR: Final = 1 << 40
"""As LAG: only FLOOR counts. As OWN: there are no such columns."""
SELF: Final = -1
"""As OWN: a row's own column alone."""

TARGET, DRAFT, JUDGE, SURE, LOOSE, GIVEN = range(6)
"""Kinds of answered rows. TARGET: the model's own token. DRAFT: a token that will be judged; under the rejection rule its
distribution q is kept. JUDGE: a draft against the kept q. SURE: a draft that had no alternative (q is a point mass). LOOSE: as
TARGET, of a decoder that verifies nothing; each rank is asked about once. GIVEN: as TARGET, but the log-probability is
that of the row's draft, a token of a text that is scored."""

BARE, MARKOV, MODEL = range(3)
"""What draws a Roll's drafts: the rows' own distributions, the model's draft head (decoders/backbones/heads.py), or forwards of
a drafting model, one a draft."""

NO_DRAFT: Final = -1
"""In `Ask.drafts`: the row judges no draft."""
JUST_ONE: Final = (NO_DRAFT,)

DRAFTED: Final = -2
"""As a row's token: the one that its model has drafted last in this slot, which the host has not read. -1 is a hole."""

Spans = tuple[int, ...]
"""FIELDS numbers a span, or WIDE."""


def wide_span(
    count: int, column: int, position: int, floor: int, lag: int = FAR, *, own: int = FAR, till: int = 0, grain: int = 1
) -> Spans:
    """A wide span; what of it is answered, the ask names."""
    return (count, column, position, floor, lag, own, 0, 0, 0, grain, till)


class Named(NamedTuple):
    """Answered rows, one by one: parallel lists.

    `rows` are numbers among the ask's rows (a row may be asked twice), `positions` those that they speak of, none below `first`,
    from which on positions may be asked about from now on. `drafts` are those that they judge, or NO_DRAFT. Under the rejection
    rule a DRAFT row leaves its hidden state in its one of the sample's `cells`; a JUDGE row finds there that of its draft, which
    had probability `sures`. The JUDGE rows are one chain. `when` is the number of these draws among the sample's; under coupled
    acceptance `number` is that of the noise, if steps draw anew.
    """

    rows: list[int]
    positions: list[int]
    kinds: list[int]
    drafts: list[int]
    cells: list[int]
    sures: list[float]
    first: int
    when: int
    number: int = 0


class Window(NamedTuple):
    """A forward of a masked-diffusion model that drafts: its rows are a whole window of text and masks, and see each other.

    `share` of the window are masks; the iteration makes `num_drafts` drafts, in this forward and others.
    """

    share: float
    num_drafts: int


class Ask(NamedTuple):
    """One sample's part of a forward of the model `model`: 0 is the target, 1 the drafting model.

    `tokens` are those of the rows in `spans`. `drafts` has an entry for each answered row: the draft that it judges, or NO_DRAFT.
    `queries` are the spans of an any-subset model's query rows. With `named` rows the spans are wide, and `drafts` empty.
    `window` is for a drafting model that runs windows.
    """

    model: int
    tokens: list[int]
    spans: Spans
    drafts: list[int] | tuple[int, ...]
    queries: Spans = ()
    named: Named | None = None
    window: Window | None = None


class Roll(NamedTuple):
    """Asks for drafts of the ranks `rank` .. `rank + num_drafts - 1`, from query rows of the sample's last forward.

    Draft j comes from the row `row + j` (BARE), or from that row, corrected with the tokens that it has not seen, those at ranks
    from `limit` on (MARKOV). Answered before the next forward. Those of a drafting model come from all its rows, since each is a
    token.

    A MODEL runs its columns up to `rank`, then each draft but the last; no draft leaves the device before the window is complete.
    """

    head: int
    rank: int
    num_drafts: int
    row: int = 0
    limit: int = 0
    model: int = 0


class Weights(NamedTuple):
    """Asks for a draft of `rank` from a distribution of the decoder's own: `tokens` have these `weights`, all others none.

    Without any tokens all are alike. The sampling settings apply as to a model's distribution. Answered before the next forward.
    """

    rank: int
    tokens: list[int]
    weights: list[int]


class Answer(NamedTuple):
    """`accepted` is how many leading drafts hold. `tokens` and `log_ps` have an entry for each answered row.

    Under coupled acceptance each token is the target's own. Under the rejection rule the first `accepted` tokens are the drafts,
    the next one comes from the residual or is the bonus, and the others mean nothing. `log_ps` are log-probabilities under the
    model itself (temperature 1, no truncation); those of drafts by another model, a Roll or Weights are not computed and are 0.
    """

    accepted: int
    tokens: list[int]
    log_ps: list[float]


class Noted(NamedTuple):
    """The answer to named rows: an `Answer`, and what else the decoder wants to know of each row (`algorithm.Notes`).

    `sures` are the tokens' probabilities in the distributions that they were drawn from, at temperature 0 in the model's own.
    `entropies` and `worths` are empty if they are not wanted.
    """

    accepted: int
    tokens: list[int]
    log_ps: list[float]
    sures: list[float]
    entropies: list[float]
    worths: list[float]


class GivenRows(NamedTuple):
    """A canvas whose tokens are all known, as the rows of a forward that keeps nothing.

    `tokens` are those of the rows in the wide `spans`. `rows` are numbers among them (a row may be read twice), each of which is
    asked for the log-probability of its one of `wanted`. `share` of the canvas are masks, for a model that diffuses.
    """

    tokens: NDArray[np.int64]
    spans: Spans
    rows: NDArray[np.int64]
    wanted: NDArray[np.int64]
    share: float | None = None


class Score(NamedTuple):
    """Asks for some canvases of a text, each of which is an evaluation, after an Offer of them (score_engine.py).

    Answered with two arrays for each canvas: the log-probabilities, and whether each token is the model's first choice. Or with
    None where memory ran out: then none of them counts, and they are to be offered again.
    """

    canvases: list[GivenRows]


class Search(NamedTuple):
    """Asks whether drafting may pay in this step at all (draft lengths `auto`); answered with a bool before the forward."""


class Offer(NamedTuple):
    """Offers up to `most` drafts (draft lengths `auto`), or canvases; answered with the number to take, before the forward."""

    most: int


SEARCH: Final = Search()

Wish = Ask | Roll | Weights | Search | Offer | Look | Score
Decoding = Generator[Wish, Any, None]
"""A decoder at work on one sample: it is sent a number for a Search or an Offer, else an Answer, and ends with the sample."""
