"""Prompt templates for filling in the middle with causal models: each family's special tokens, found in its tokenizer.

    psm    lead  prefix-token P suffix-token S middle-token         the model then generates the text between P and S
    spm    lead  suffix-token S prefix-token P [middle-token]

P is the text before the hole, S the text after it; `lead` are the tokens that the tokenizer puts before any text.
Templates from the model cards: Qwen2.5-Coder, CodeGemma, StarCoder and StarCoder2, CodeLlama, DeepSeek-Coder, Codestral.
Pure; knows no rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from draftmill.actors.rows.text import Tokenizer
from draftmill.actors.task import Fim, Infill, Task
from draftmill.decoders.base import ModelInfo
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
        parts = [(self.prefix, before), (self.suffix, after)]
        ordered = reversed(parts) if self.suffix_first else parts
        found = [np.asarray(self.lead, dtype=np.int32)]
        for token, ids in ordered:
            found += [np.asarray([token], dtype=np.int32), ids]
        found.append(np.asarray([] if self.middle is None else [self.middle], dtype=np.int32))
        return np.concatenate(found)

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
        raise UserError(
            "a causal model needs a tokenizer's special tokens to fill a hole; model.tokenizer is 'none'", field=FIELD
        )
    ids = {token: number for token, number in tokenizer.vocabulary().items() if number < info.vocab_size}
    if isinstance(fim, Fim):
        missing = [token for token in (*_asked_with(fim), *fim.ends) if token not in ids]
        if missing:
            raise UserError(f"the model's tokenizer has no token {', '.join(map(repr, missing))}", field=FIELD)
        return _template(fim, ids, tokenizer)
    found = next((one for one in KNOWN if all(token in ids for token in _asked_with(one.fim))), None)
    return _refuse() if found is None else _template(found.fim, ids, tokenizer, begins=found.begins)


def _template(fim: Fim, ids: dict[str, int], tokenizer: Tokenizer, *, begins: bool = False) -> Template:
    lead = tokenizer.lead
    if begins and not lead and tokenizer.bos_id is not None:
        lead = (tokenizer.bos_id,)
    asked = [ids[token] for token in _asked_with(fim)]
    ends = {*asked, *(ids[token] for token in fim.ends if token in ids)}
    middle = None if fim.middle is None else ids[fim.middle]
    return Template(lead, ids[fim.prefix], ids[fim.suffix], middle, fim.order == "spm", tuple(sorted(ends)))


def _asked_with(fim: Fim) -> list[str]:
    return [token for token in (fim.prefix, fim.suffix, fim.middle) if token is not None]


def _refuse() -> NoReturn:
    known = "; ".join(f"{' '.join(_asked_with(one.fim))} ({one.models})" for one in KNOWN)
    raise UserError(
        "'auto': a causal model fills holes only if it was trained to fill in the middle, and this tokenizer lacks the "
        f"tokens for it; known: {known}; for others give {{prefix: ..., suffix: ..., middle: ..., order: psm or spm}}",
        field=FIELD,
    )
