"""Context-free grammars by the library llguidance, for texts that are written from left to right.

A grammar has no states that could be numbered, so the library's matcher follows each sample: it takes the tokens that are
decided, and for a draft window takes the drafts and goes back. It does not say how far a text's end is, so a text that reaches
its limit before it ends fails its row; an automaton never lets that happen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Final

import numpy as np

from draftmill.decoders.constraints.automaton import Bools
from draftmill.decoders.constraints.trackers import Allowed, Known, Tracker

_NUMBERS: Final = count()

Encode = Callable[[str], list[int]]


class _Tokens:
    """The vocabulary as the library reads it. It encodes what a grammar forces, and masks what would spell it otherwise."""

    is_tokenizer_wrapper = True

    def __init__(self, spelled: Sequence[bytes | None], encode: Encode, end: int) -> None:
        self.eos_token_id, self.bos_token_id = end, None
        self.tokens = [text or b"" for text in spelled]
        self.special_token_ids = [token for token, text in enumerate(spelled) if text is None]
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


class Grammar:
    """A Lark grammar, in llguidance's dialect, over a vocabulary: the bytes of each token, and what makes ids of a text.
    ValueError if it is none. `ends` end a text."""

    def __init__(self, text: str, spelled: Sequence[bytes | None], encode: Encode, ends: Sequence[int]) -> None:
        from llguidance import LLMatcher, LLTokenizer

        self._grammar = LLMatcher.grammar_from_lark(text)
        self._tokenizer: Any = LLTokenizer(_Tokens(spelled, encode, ends[0]))  # type: ignore[arg-type]
        problem = LLMatcher.validate_grammar(self._grammar, self._tokenizer)
        if problem:
            raise ValueError(f"not a grammar that llguidance can read: {problem}")
        self.vocab_size = len(spelled)

    def matcher(self) -> Any:
        """A matcher before the first token."""
        from llguidance import LLMatcher

        return LLMatcher(self._tokenizer, self._grammar)


class ByGrammar(Tracker):
    """For a text that is decided from the first position on, and that one of `ends` ends."""

    def __init__(self, grammar: Grammar, ends: tuple[int, ...]) -> None:
        self._matcher, self._vocab_size, self._ends = grammar.matcher(), grammar.vocab_size, list(ends)
        self._has_ended = False

    def decide(self, position: int, token: int) -> None:
        self._has_ended = self._has_ended or token in self._ends
        if not self._has_ended:
            self._matcher.consume_token(token)

    def allowed(self, position: int, known: Known) -> Allowed:
        """See Tracker; each set has a new name."""
        drafts = [token for _, token in sorted(known)]
        if any(token in self._ends for token in drafts):
            return None
        taken = self._matcher.try_consume_tokens(drafts)
        allowed_V = None if taken < len(drafts) else self._set()
        if taken:
            self._matcher.rollback(taken)
        return None if allowed_V is None else (("grammar", next(_NUMBERS)), lambda: allowed_V)

    def _set(self) -> Bools:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        allowed_V = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)
        allowed_V[self._ends] = self._matcher.is_accepting()
        return allowed_V

    @property
    def is_met(self) -> bool:
        return bool(self._matcher.is_accepting())
