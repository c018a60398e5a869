"""Turns lm-evaluation-harness's texts into token ids as its own `hf` model does, so that both get the same answers.

    generate_until          context                          special tokens before it, as the tokenizer adds them
    loglikelihood           context | continuation           encoded together, cut where the context alone ends
    loglikelihood           prefix token | continuation      without a context
    loglikelihood_rolling   prefix token | text              windows of the model's length, each token scored once

The prefix token is the begin token, else the end token; any-subset models have none. The spelling of a special token is parsed
wherever it occurs, as in transformers. Different from `hf`: the model's length counts the last scored token, too, and a rolling
text has one begin token. Source: TemplateLM and HFLM of lm_eval 0.4.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from draftmill.actors.rows.text import Tokenizer
from draftmill.decoders.base import ModelInfo

Ids = tuple[int, ...]

UNLIMITED_WINDOW: Final = 2048
"""Tokens of a rolling window if the model has no maximum length, as in lm_eval."""

KEPT_CONTEXTS: Final = 4096
"""Encoded contexts that are kept: the choices of a question share their context."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The ids of a context, and those that are scored after it."""

    context: Ids
    scored: Ids


class Encoder:
    """The texts of requests as ids; see the module's docstring."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo) -> None:
        self._tokenizer = tokenizer
        self._most = info.max_length
        begin = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
        prefix = (
            None if info.kind == "any_subset" else begin
        )  # these models see no begin token, see actors/rows/prompts.py
        self._prefix: Ids = () if prefix is None else (prefix,)
        self._spelled = "" if begin is None else tokenizer.decode([begin])
        self.context = lru_cache(KEPT_CONTEXTS)(self._context)

    def _context(self, text: str) -> Ids:
        """Ids of a prompt: the tokenizer's special tokens come first, unless the text begins with the begin token itself."""
        begun = bool(self._spelled) and text.startswith(self._spelled)
        return (*(() if begun else self._tokenizer.lead), *self._tokenizer.parse(text))

    def pair(self, context: str, continuation: str) -> Scored:
        """Ids of a context and a continuation, of which the continuation is scored; white space between them belongs to it."""
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        if not bare:
            return self._behind_prefix(tuple(self._tokenizer.parse(continuation)))
        before, whole = self.context(bare), self._context(bare + continuation)
        # As in lm_eval, also where a token spans the border.
        return Scored(before, whole[len(before) :] or tuple(self._tokenizer.parse(continuation)))

    def _behind_prefix(self, tokens: Ids) -> Scored:
        begun = bool(self._prefix) and tokens[:1] == self._prefix
        return Scored(self._prefix, tokens[1:] if begun else tokens)

    def windows(self, text: str) -> Iterator[Scored]:
        """The windows of a text, each with all the context that fits before its scored tokens."""
        tokens = tuple(self._tokenizer.parse(text))
        most = UNLIMITED_WINDOW if self._most is None else self._most
        first = self._behind_prefix(tokens)
        tokens, done = first.scored, min(len(first.scored), most - len(first.context))
        if done:
            yield Scored(first.context, tokens[:done])
        while done < len(tokens):
            count = min(len(tokens) - done, most - 1)
            done += count
            yield Scored(tokens[done - most : done - count], tokens[done - count : done])
