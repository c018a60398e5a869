"""`jacobi`: every forward refines a block of drafts and commits those that equal the target's own tokens.

The drafts stand in the undecided columns. A forward runs the last decided token and the drafts after it under plain causal
visibility, so every row predicts the target's next token. Drafts that equal the prediction of the row before them, from the
first one on, are accepted, and so is the prediction after them. The predictions of the other rows are the next drafts.

    column      .. D-1 | D   D+1  D+2  D+3          D tokens decided, four drafts
    tokens      .. the | cat sat  mat  .
    target says    cat | sat on   .    ""           for the column after: two drafts were right
    next        .. the   cat sat  on | .    ""      three tokens committed, the drafts after them replaced

Every forward commits at least one token, so there are never more forwards than in `autoregressive`. A token is
argmax(log p + g) with the noise g of its position: the fixed point is the sequential text at any temperature.

`window: fixed` finishes a block of n tokens before the next begins; `running` always keeps n drafts ahead. The token after a
fully accepted block is the next block's first. If a block ends with the token after the accepted drafts, the next block's n
drafts run in the same forward that finds its first token, so no forward is spent on that token alone. Drafts never extend
beyond the canvas, and the last position is never fed, since nothing comes after it.

With tracing, the TraceStep of an iteration holds, as `proposed`, the drafts as they were fed: the first at positions[0], the
others after it, up to the end of the block (or window, or the position before the canvas's last). With `window: fixed` block i
is [P + i n, P + (i + 1) n) for a prompt of P tokens. Its state in an iteration is what the steps before have committed of it,
then `proposed`; the block's first step shows the initial state, and the outcome's tokens the fixed point. A canvas of whole
blocks and one token more shows every state in full.

Source: Hu et al., "Fast and accurate causal parallel decoding using Jacobi forcing" (pcLLM), section 2 and figure 4 (running
window); Santilli et al., 2023.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from draftmill.decoders.causal.autoregressive import prompt_but_one
from draftmill.decoders.causal.settings import JacobiSettings
from draftmill.decoders.draws import keys
from draftmill.decoders.engine.algorithm import Algorithm
from draftmill.decoders.engine.asks import NO_DRAFT, TARGET, Decoding
from draftmill.decoders.engine.samples import Sample
from draftmill.decoders.engine.setup import Setup


def jacobi(s: Sample, block_size: int, *, running: bool) -> Decoding:
    """Refine `block_size` drafts with each forward."""
    fill_with_prompt(s)
    last = s.length - 1
    while s.decided < s.length:
        d = s.decided
        end = min(d + block_size if running else s.prompt + ((d - s.prompt) // block_size + 1) * block_size, last)
        drafts = s.tokens[d:end]
        accepted, tokens, log_ps, _ = yield s.causal(end, end - d + 1, TARGET, [*drafts, NO_DRAFT])
        s.tokens[d : end + 1] = tokens
        s.cached = d + accepted
        s.commit(tokens, log_ps, accepted + 1, drafts, accepted, shown=len(drafts))


def fill_with_prompt(s: Sample) -> None:
    """Fill every hole with a random token of the prompt, so that every window has drafts."""
    positions = np.arange(s.prompt, s.length, dtype=np.int64)
    places = (keys.uniforms(s.key, positions, keys.JACOBI) * s.prompt).astype(np.int64)
    s.tokens[s.prompt :] = [s.tokens[place] for place in places.tolist()]


def algorithm(setup: Setup, settings: JacobiSettings) -> Algorithm:
    """How the engine runs these settings."""
    return Algorithm(
        decode=partial(jacobi, block_size=settings.block_size, running=settings.window == "running"),
        window=settings.block_size + 1,
        reusable=prompt_but_one,
    )
