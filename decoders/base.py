"""The nouns that every decoder shares: Request, Outcome, EngineStats, and the Decoder interface.

Knows nothing of Ray, files or jobs. Imports no torch, so that planners and stores can use it cheaply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from draftmill.decoders.constraints.constraint import Constraint
    from draftmill.decoders.engine.penalties import Penalties

HOLE = -1
"""Marks a masked position of a canvas; never a token id."""


class StopText(Protocol):
    """Looks for stop strings in generated tokens (actors/rows/stop_text.py, which knows the vocabulary)."""

    def find(self, tokens: Sequence[int], num_checked: int) -> int | None:
        """The number of generated `tokens` to keep, up to the token that completes a stop string; None if there is none. The
        first `num_checked` tokens were searched before."""


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Settings of one request that replace the decoder's; None keeps the decoder's value. `top_p` = 1, `top_k` = 0 and
    `min_p` = 0 keep all tokens. Its text must match the `constraint`; `penalties` change the logits by what is known of it, and
    `stop_ids` end it, too. With `token_logprobs` the outcome has each generated token's log-probability, and with `top_logprobs`
    those of the model's most likely tokens in each place, where decoders know them (causal, any-subset)."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop_text: StopText | None = None
    token_logprobs: bool = False
    constraint: Constraint | None = None
    penalties: Penalties | None = None
    stop_ids: tuple[int, ...] = ()
    top_logprobs: int = 0


JOB_SETTINGS: Final = RowSettings()
"""The row settings of a request that has none."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to decode: its canvas and its own noise.

    `index` is the caller's handle and comes back in the Outcome. `key` (0 <= key < 2**64) seeds all of the sample's
    randomness. `canvas` is int32 [length] with HOLE where a token is to be generated; it may be empty or hole-free.
    `hole_order` gives the positions of the holes in the order of decoding; by default from left to right. A canvas to be
    scored has no holes: its tokens at the positions `scored` (int64, ascending) are scored, by default all from `score_from` on.
    `earlier` are texts of the row in other runs, int32, as their outcomes have them: a drafter may use them.

    A `probe` generates nothing: its outcome has no tokens, and its `logprob` says how well a canvas fits (Algorithm.probe).

    `settings` are the request's own; only some decoders use them (draftmill.actors.rows.row_settings names these).
    """

    index: int
    key: int
    canvas: NDArray[np.int32]
    hole_order: NDArray[np.int64] | None = None
    score_from: int | None = None
    settings: RowSettings = JOB_SETTINGS
    scored: NDArray[np.int64] | None = None
    probe: bool = False
    earlier: tuple[NDArray[np.int32], ...] = ()

    def to_score(self) -> NDArray[np.int64]:
        """The positions to score, ascending; ValueError if there is none, or if the canvas has a hole."""
        scored = self.scored
        if scored is None and self.score_from is not None:
            scored = np.arange(self.score_from, len(self.canvas), dtype=np.int64)
        if scored is None or not len(scored) or bool((self.canvas < 0).any()):
            raise ValueError("a text to score must have no holes, and a token to score")
        return scored


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One decoder iteration of one sample, for `trace: steps`."""

    iteration: int
    nfe: int
    proposed: list[int]
    committed: list[int]
    positions: list[int]


@dataclass(slots=True)
class Outcome:
    """The result of one request: its tokens, why it ended, and the counts for this sample alone.

    `tokens` holds the generated (or scored) ids in canvas order, `token_logprobs` the log-probability of each one, float32 of the
    same length, None unless the request scores or asks for them; so `top_logprobs`, the model's best tokens in each place and
    their log-probabilities, the best first. `accept_hist[j]` counts the iterations that committed j tokens.
    Times are seconds; `started_at_s` is Unix time. `batch_rows` is the mean number of active rows over its forwards.
    `pad_fraction` is computed-but-unused over computed token rows in its forwards. Where `error_kind` is not None the
    sample failed and `tokens` is empty. `nfe_kinds` splits `nfe` by the purpose of a forward (block decoders only). `reused` are
    the tokens that were drafted by an earlier run and held.

    Of a score: `is_greedy` says whether every scored token is the one that temperature 0 would choose, the most likely of the
    ids that can be generated; None where the score does not tell. `logprob_stderr` is the standard error of `logprob`, None
    unless it is an estimate.
    """

    index: int
    tokens: NDArray[np.int32]
    finish: str
    logprob: float | None
    nfe: int
    nfe_draft: int
    iterations: int
    proposed: int
    accepted: int
    accept_hist: list[int]
    wait_s: float
    prefill_s: float
    decode_s: float
    total_s: float
    device_s: float
    batch_rows: float
    pad_fraction: float
    started_at_s: float
    error_kind: str | None = None
    error: str | None = None
    trace: list[TraceStep] | None = None
    token_logprobs: NDArray[np.float32] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    nfe_kinds: dict[str, int] | None = None
    is_greedy: bool | None = None
    logprob_stderr: float | None = None
    reused: int = 0


@dataclass(slots=True)
class EngineStats:
    """Totals of one decoder since it was built; the worker reports their differences.

    lane_eff = active_slot_steps / slot_steps, where a step that runs only newly admitted samples counts just their slots, and
    slots whose samples wait until others' prompts have run do not count;
    token_padding_eff = useful_rows / computed_rows. Of the `prompt_rows` of samples' prompts,
    `prompt_rows_shared` were taken over from other samples (both 0 in decoders that take over none). Steps that `raised` decoded
    nothing: their samples are decoded again, one at a time (actors/loop/runner.py). `ways` are the committed tokens by what
    drafted when the clock chose it (engine/auto.py), `none` without drafts.
    """

    steps: int = 0
    forward_s: float = 0.0
    active_slot_steps: int = 0
    slot_steps: int = 0
    useful_rows: int = 0
    computed_rows: int = 0
    committed: int = 0
    prompt_rows: int = 0
    prompt_rows_shared: int = 0
    raised: int = 0
    ways: dict[str, int] = field(default_factory=dict)

    def __add__(self, other: EngineStats) -> EngineStats:
        return self._with(other, 1)

    def __sub__(self, other: EngineStats) -> EngineStats:
        return self._with(other, -1)

    def _with(self, other: EngineStats, sign: int) -> EngineStats:
        names = [name for name in EngineStats.__slots__ if name != "ways"]
        counts = {way: self.ways.get(way, 0) + sign * other.ways.get(way, 0) for way in self.ways | other.ways}
        return EngineStats(
            **{name: getattr(self, name) + sign * getattr(other, name) for name in names},
            ways={way: count for way, count in counts.items() if count},
        )


class Decoder(Protocol):
    """A batch of slots that one algorithm decodes, with one forward evaluation per step. The caller keeps the slots full:
    `while room(length): admit(...)`, then `step()`, which returns the finished samples and frees their slots. An exception out
    of `admit` or `step` leaves the decoder unusable until `clear`."""

    stats: EngineStats

    @property
    def active(self) -> int:
        """Number of samples that hold a slot."""

    def room(self, length: int) -> int:
        """The number of samples of canvas length `length` that could be admitted now."""

    def admit(self, requests: Sequence[Request], *, queued_at_s: Sequence[float] | None = None) -> None:
        """Give each request a slot; `room` must allow it. `queued_at_s` (time.perf_counter) is when the wait began."""

    def step(self) -> list[Outcome]:
        """Run one forward for the active slots and return the samples that finished."""

    def clear(self) -> list[int]:
        """Free every slot without an outcome; return the indices of the dropped requests."""


@runtime_checkable
class CachedDecoder(Decoder, Protocol):
    """A decoder whose samples have slots in the cache of a model; its batch has limits, and can be fitted into memory.
    `backbone` is the model (decoders/backbones/base.py)."""

    backbone: Any
    info: ModelInfo
    max_rows: int
    max_tokens: int

    def fit(self, free_bytes: int) -> None:
        """Limit the batch to `free_bytes` of device memory, measured after all models were loaded."""

    def most_rows(self, length: int) -> int:
        """The number of samples of this canvas length that can run at once; 0 if not even one fits into memory."""


ModelKind = Literal["any_subset", "causal", "masked", "ancestral", "blocks"]
"""What a model predicts. Any-subset: a token given any others. Causal: the next token. Masked diffusion: all masked tokens of a
text (`ancestral`: models that diffuse in continuous time, MDLM and SEDD). Block diffusion: the masked tokens of a block after
finished blocks."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a checkpoint that need no weights.

    `max_length` is the longest canvas that the model takes, None without a limit. `kind` decides which decoders can run it.
    `suppressed` are the ids that are never generated (the mask, ids without a token).

    A row at position i predicts the token at position i + `shift`: 1 in causal models and those made from them (Dream), 0 where
    a mask predicts its own token. With a shift no row predicts position 0; Dream's own code reads it from row 0.

    `block_size` is the block length in positions that a block-diffusion model was trained with; None for other models. With
    `prompt_block` the prompt is a block of its own, of any length, and the others are counted from its end. `left_shift` is the
    shift of rows that see nothing to their right, where it is another one: 1 in a diffusion model that is causal, too.
    """

    family: str
    vocab_size: int
    mask_id: int | None
    max_length: int | None
    kind: ModelKind
    num_parameters: int
    suppressed: tuple[int, ...] = field(default=())
    shift: int = 0
    block_size: int | None = None
    prompt_block: bool = False
    left_shift: int | None = None
