"""Prompt look-up: drafts what followed the last occurrence of the text's last tokens. A dictionary of n-grams, O(max_n) a token.

Source: Saxena, "Prompt lookup decoding", 2023.
"""

from __future__ import annotations

from typing import Final

# An n-gram is one integer: its tokens in this base, and a leading 1, so that lengths stay apart.
_BASE: Final = 1 << 20


class Lookup:
    """Knows where each n-gram of one sample's text last ended, if a token followed it."""

    __slots__ = ("_end_of", "_known", "_max_n", "_min_n")

    def __init__(self, max_n: int, min_n: int) -> None:
        self._max_n, self._min_n = max_n, min_n
        self._known = 1
        self._end_of: dict[int, int] = {}

    def drafts(self, text: list[int], length: int, most: int) -> list[int]:
        """Up to `most` tokens to follow `text[:length]`: those after the last occurrence of its last n tokens, for the largest n.

        A copy that reaches the end of the text goes on with what it has copied: a repetition goes on. Empty without a match.
        """
        found = self._match(text, length)
        period = length - found
        return [text[found + place % period] for place in range(most)] if found else []

    def _match(self, text: list[int], length: int) -> int:
        """The place after the longest earlier match of the text's end, the last one of several; 0 without a match."""
        end_of, found = self._end_of, 0
        # An n-gram is known as soon as a token follows it: all that end before the text's last token are.
        for end in range(self._known, length + 1):
            code, place = 0, 1
            for n in range(1, min(self._max_n, end) + 1):
                code += text[end - n] * place
                place *= _BASE
                if n < self._min_n:
                    continue
                if end < length:
                    end_of[code + place] = end
                elif n < length:
                    found = end_of.get(code + place, found)
        self._known = length
        return found
