"""Filling in the middle with causal models: each family's prompt template, and a row whose holes are filled one after another.

    psm    lead  prefix-token P suffix-token S middle-token         the model then generates the text between P and S
    spm    lead  suffix-token S prefix-token P [middle-token]

P is the text before the hole, S the text after it; `lead` are the tokens that the tokenizer puts before any text.
Templates from the model cards: Qwen2.5-Coder, CodeGemma, StarCoder and StarCoder2, CodeLlama, DeepSeek-Coder, Codestral.

    row       t0 [hole] t1 [hole] t2
    first     P = t0                S = t1 t2
    second    P = t0 fill t1        S = t2

A hole sees the fills of the holes before it. Holes after it are skipped: the texts around them are joined. If P and S
exceed the model's limit, they are cut at the ends that are farthest from the hole. Pure; reads no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Fim, Infill, Task
from draftmill.decoders.base import HOLE, ModelInfo, Outcome, Request, RowSettings, TraceStep
from draftmill.decoders.constraints.constraint import Constraint
from draftmill.decoders.draws.keys import hole_key
from draftmill.storage.errors import UserError

FIELD: Final = "task.fim"


@dataclass(frozen=True, slots=True)
class FimFamily:
    """Models that share a template; with `begins`, a prompt starts with the begin token even if the tokenizer adds none."""

    models: str
    fim: Fim
    begins: bool = False


KNOWN: Final = (
    FimFamily(
        "Qwen2.5-Coder, CodeGemma",
        Fim(
            prefix="<|fim_prefix|>",
            suffix="<|fim_suffix|>",
            middle="<|fim_middle|>",
            ends=(
                *("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|im_start|>", "<|im_end|>"),
                "<|file_separator|>",
            ),
        ),
    ),
    FimFamily(
        "StarCoder, StarCoder2",
        Fim(
            prefix="<fim_prefix>",
            suffix="<fim_suffix>",
            middle="<fim_middle>",
            ends=("<|endoftext|>", "<fim_pad>", "<file_sep>", "<repo_name>", "<reponame>", "<filename>"),
        ),
    ),
    FimFamily("CodeLlama", Fim(prefix="▁<PRE>", suffix="▁<SUF>", middle="▁<MID>", ends=("▁<EOT>",)), begins=True),
    FimFamily(
        "DeepSeek-Coder",
        Fim(
            prefix="<｜fim▁begin｜>",
            suffix="<｜fim▁hole｜>",
            middle="<｜fim▁end｜>",
            ends=("<｜end▁of▁sentence｜>", "<|EOT|>"),
        ),
        begins=True,
    ),
    FimFamily("Codestral", Fim(prefix="[PREFIX]", suffix="[SUFFIX]", order="spm", ends=("[MIDDLE]",)), begins=True),
)
"""The families that `auto` knows. A tokenizer may have only some of the `ends`: Qwen2.5-Coder and CodeGemma differ in them."""


@dataclass(frozen=True, slots=True)
class Template:
    """A Fim as token ids. `ends` end a hole, as do the checkpoint's end tokens; they include the template's control tokens."""

    lead: tuple[int, ...]
    prefix: int
    suffix: int
    middle: int | None
    suffix_first: bool
    ends: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """The number of prompt tokens other than prefix and suffix."""
        return len(self.lead) + 2 + (self.middle is not None)

    def prompt(self, before: NDArray[np.int32], after: NDArray[np.int32]) -> NDArray[np.int32]:
        """The prompt, int32, for the ids before and after the hole."""
        sides = [(self.prefix, before), (self.suffix, after)]
        prompt = np.asarray(self.lead, dtype=np.int32)
        for token, ids in reversed(sides) if self.suffix_first else sides:
            prompt = np.concatenate([prompt, np.asarray([token], dtype=np.int32), ids])
        return prompt if self.middle is None else np.append(prompt, np.int32(self.middle))

    def key(self) -> dict[str, Any]:
        """The parts that change results, as JSON data."""
        order = "spm" if self.suffix_first else "psm"
        return {"prefix": self.prefix, "suffix": self.suffix, "middle": self.middle, "order": order}


def fills_in_middle(task: Task, info: ModelInfo) -> bool:
    """Whether a causal model fills the holes, one after another."""
    return isinstance(task, Infill) and info.kind == "causal"


def template_of(fim: Any, tokenizer: Tokenizer | None, info: ModelInfo) -> Template:
    """The template of `task.fim` in the tokenizer's ids; UserError if the tokenizer lacks one of its tokens."""
    if tokenizer is None:
        reason = "a causal model needs a tokenizer's special tokens to fill a hole"
        raise UserError(f"{reason}; model.tokenizer is 'none'", field=FIELD)
    ids = {token: number for token, number in tokenizer.vocabulary().items() if number < info.vocab_size}
    if isinstance(fim, Fim):
        missing = [token for token in (*_prompt_tokens(fim), *fim.ends) if token not in ids]
        if missing:
            raise UserError(f"the model's tokenizer has no token {', '.join(map(repr, missing))}", field=FIELD)
        return _template(fim, ids, tokenizer)
    for family in KNOWN:
        if all(token in ids for token in _prompt_tokens(family.fim)):
            return _template(family.fim, ids, tokenizer, begins=family.begins)
    known = "; ".join(f"{' '.join(_prompt_tokens(family.fim))} ({family.models})" for family in KNOWN)
    raise UserError(
        "'auto': a causal model fills holes only if it was trained to fill in the middle, and this tokenizer lacks the "
        f"tokens for it; known: {known}; for others give {{prefix: ..., suffix: ..., middle: ..., order: psm or spm}}",
        field=FIELD,
    )


def _template(fim: Fim, ids: dict[str, int], tokenizer: Tokenizer, *, begins: bool = False) -> Template:
    lead = tokenizer.lead
    if begins and not lead and tokenizer.bos_id is not None:
        lead = (tokenizer.bos_id,)
    ends = {ids[token] for token in (*_prompt_tokens(fim), *fim.ends) if token in ids}
    middle = None if fim.middle is None else ids[fim.middle]
    return Template(lead, ids[fim.prefix], ids[fim.suffix], middle, fim.order == "spm", tuple(sorted(ends)))


def _prompt_tokens(fim: Fim) -> list[str]:
    return [token for token in (fim.prefix, fim.suffix, fim.middle) if token is not None]


IDS = NDArray[np.int32]
Requests = Generator[Request, Outcome, Outcome]
"""The requests of one sample: each is sent its outcome, and the last outcome is that of the sample. Indices are the caller's."""


@dataclass(frozen=True, slots=True)
class AskedHole:
    """One hole's canvas: the prompt, int32, then a HOLE for each token the hole may have; `cut` tokens did not fit."""

    canvas: IDS
    cut: int

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return int((self.canvas != HOLE).sum())


@dataclass(frozen=True, slots=True)
class TextPart:
    """One hole's request and its outcome."""

    asked: AskedHole
    outcome: Outcome

    @property
    def fill(self) -> IDS:
        """The hole's tokens, without the end token."""
        return self.outcome.tokens[: -1 if self.outcome.finish == "eos" else None]


@dataclass(frozen=True, slots=True)
class Infilling:
    """A row's visible `pieces`, one more than its holes; the `limits` of its holes in tokens; the model's `max_length`; what each
    hole must match, if anything."""

    template: Template
    pieces: tuple[IDS, ...]
    limits: tuple[int, ...]
    max_length: int | None
    constraints: tuple[Constraint, ...] = ()

    @property
    def longest(self) -> int:
        """The maximum length of this row's canvases, in tokens."""
        length = self.template.num_tokens + sum(map(len, self.pieces)) + sum(self.limits)
        return length if self.max_length is None else min(length, self.max_length)

    @property
    def room(self) -> int | None:
        """Tokens of prefix and suffix that fit next to the largest hole; None if there is no limit."""
        if self.max_length is None or not self.limits:
            return None
        return self.max_length - self.template.num_tokens - max(self.limits)

    def ask(self, fills: Sequence[IDS]) -> AskedHole:
        """The canvas of the next hole, after those that have `fills`; empty if the row has no holes."""
        if not self.limits:
            return AskedHole(np.zeros(0, dtype=np.int32), 0)
        hole = len(fills)
        before = np.concatenate(self.filled(fills)[: 2 * hole + 1])
        after = np.concatenate(self.pieces[hole + 1 :])
        total = len(before) + len(after)
        if self.max_length is not None:
            before, after = cut(before, after, self.max_length - self.template.num_tokens - self.limits[hole])
        prompt = self.template.prompt(before, after)
        holes = np.full(self.limits[hole], HOLE, dtype=np.int32)
        return AskedHole(np.append(prompt, holes), total - len(before) - len(after))

    def filled(self, fills: Sequence[IDS]) -> list[IDS]:
        """The row's pieces and the fills between them, in order."""
        return [*chain.from_iterable(zip(self.pieces, fills, strict=False)), *self.pieces[len(fills) :]]


def fill_holes(row: Infilling, key: int, settings: RowSettings, parts: list[TextPart]) -> Requests:
    """Fills the holes of a row one after another, up to one that fails, and adds each to `parts`.

    A request depends only on the row, the key and the fills so far, so it is the same after any failure or retry.
    """
    while len(parts) < len(row.limits) and not (parts and parts[-1].outcome.error_kind):
        asked = row.ask([part.fill for part in parts])
        if row.constraints:
            settings = replace(settings, constraint=row.constraints[len(parts)])
        outcome = yield Request(0, hole_key(key, len(parts)), asked.canvas, settings=settings)
        parts.append(TextPart(asked, outcome))
    return together(parts)


def cut(before: IDS, after: IDS, room: int) -> tuple[IDS, IDS]:
    """The tokens nearest to the hole: each side gets half of the room, plus what the other side does not use of its half."""
    front = min(len(before), max(room - len(after), room - room // 2))
    return before[len(before) - front :], after[: room - front]


_COSTS: Final = ("nfe", "nfe_draft", "wait_s", "prefill_s", "decode_s", "total_s", "device_s")
_DRAFTS: Final = ("iterations", "proposed", "accepted", "reused")


def costs(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Forwards and times of several requests of a row: sums; `batch_rows` and `pad_fraction` are means over forwards."""
    forwards = max(1, sum(outcome.nfe for outcome in outcomes))
    return {
        **{name: sum(getattr(outcome, name) for outcome in outcomes) for name in _COSTS},
        "batch_rows": sum(outcome.batch_rows * outcome.nfe for outcome in outcomes) / forwards,
        "pad_fraction": sum(outcome.pad_fraction * outcome.nfe for outcome in outcomes) / forwards,
        "started_at_s": outcomes[0].started_at_s,
    }


def together(parts: Sequence[TextPart]) -> Outcome:
    """One outcome for all holes so far. Counts and times are sums; what one of them lacks is None.

    `finish` is `eos` if every hole ended so, else `length`. If a hole failed, so did the row.
    """
    outcomes = [part.outcome for part in parts]
    last = outcomes[-1]
    if len(outcomes) == 1:
        return last
    failed = last.error_kind is not None

    def joined(name: str, join: Callable[[Any], Any]) -> Any:
        values = [getattr(outcome, name) for outcome in outcomes]
        return None if any(value is None for value in values) else join(values)

    return replace(
        last,
        tokens=last.tokens if failed else np.concatenate([outcome.tokens for outcome in outcomes]),
        finish="eos" if all(outcome.finish == "eos" for outcome in outcomes) else "length",
        logprob=joined("logprob", sum),
        **costs(outcomes),
        **{name: sum(getattr(outcome, name) for outcome in outcomes) for name in _DRAFTS},
        accept_hist=list(map(sum, zip_longest(*(outcome.accept_hist for outcome in outcomes), fillvalue=0))),
        trace=_traces(outcomes),
        token_logprobs=None if failed else joined("token_logprobs", np.concatenate),
        top_logprobs=None if failed else joined("top_logprobs", lambda tops: [*chain(*tops)]),
    )


def _traces(outcomes: Sequence[Outcome]) -> list[TraceStep] | None:
    """The steps of all holes, numbered consecutively; positions refer to each hole's own canvas."""
    if outcomes[0].trace is None:
        return None
    steps: list[TraceStep] = []
    nfe = 0
    for outcome in outcomes:
        first = len(steps)
        for step in outcome.trace or ():
            steps.append(replace(step, iteration=first + step.iteration, nfe=nfe + step.nfe))
        nfe += outcome.nfe
    return steps
