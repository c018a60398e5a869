"""Training rows for filling in the middle: a window of a file, cut in three, its middle moved to the end.

    text      def f(x):\\n | return x | \\nf(1)\\n
    row       <|fim_prefix|> def f(x):\\n <|fim_suffix|> \\nf(1)\\n <|fim_middle|> return x </s>

The three pieces are encoded one by one, as a job encodes what stands before and after a hole. Half of what is learnt stays
plain text, so that the model still continues a text as it did before.

Legend: B = rows of a batch, L = tokens of a row that are read (a row holds L + 1), T = tokens of the stream.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from recipes.corpus import EOS_ID, PAD_ID, TokenStream, encode
from recipes.masking import draw_windows

FIM_TOKENS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
PLAIN_SHARE = 0.4
HOLES = ("line", "line_end", "lines", "span")
HOLE_SHARES = (0.40, 0.20, 0.15, 0.25)
MOST_LINES = 4
LONGEST_SPAN = 240  # characters
MIDDLE_WEIGHT = 4.0
FIM_DRAWS = 7

_LINE = re.compile(r"[^\r\n]*[^\s][^\r\n]*")


@dataclass(frozen=True)
class Rows:
    """A batch: ids [B, L + 1], and what each token counts as a target [B, L + 1]; 0 where it is not to be predicted."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]


def draw_hole(rng: np.random.Generator, text: str) -> tuple[int, int]:
    """The characters [start, end) of a hole: a line, the end of one, a few lines, or any span; at least one character."""
    # The first line of a window may lack its beginning and the last one its end.
    lines = [match.span() for match in _LINE.finditer(text)]
    lines = lines[1:-1] or lines
    kind = str(rng.choice(HOLES, p=HOLE_SHARES))
    if kind == "span" or not lines:
        start = int(rng.integers(0, len(text)))
        return start, min(len(text), start + round(float(np.exp(rng.uniform(0, np.log(LONGEST_SPAN))))))
    first = int(rng.integers(0, len(lines)))
    start, end = lines[first]
    if kind == "line_end":
        start = int(rng.integers(start, end))
    elif kind == "lines":
        end = lines[min(len(lines) - 1, first + int(rng.integers(1, MOST_LINES)))][1]
    return start, end


def fim_row(
    tokenizer: PreTrainedTokenizerFast, text: str, hole: tuple[int, int], length: int
) -> tuple[list[int], list[float]]:
    """A row's ids and weights, at most `length` of each: what does not fit is cut from the far ends of the context."""
    before, after, last = fim_ids(tokenizer)
    prefix, middle, suffix = (encode(tokenizer, piece) for piece in pieces(text, hole))
    room = length - len(FIM_TOKENS) - 1
    middle = middle[:room]
    prefix, suffix = fit(prefix, suffix, room - len(middle))
    ids = [before, *prefix, after, *suffix, last, *middle, EOS_ID]
    context = [0.0, *([1.0] * len(prefix)), 0.0, *([1.0] * len(suffix)), 0.0]
    return ids, [*context, *([MIDDLE_WEIGHT] * (len(middle) + 1))]


def pieces(text: str, hole: tuple[int, int]) -> tuple[str, str, str]:
    """The text before the hole, in it, and after it."""
    start, end = hole
    return text[:start], text[start:end], text[end:]


def fit(prefix: Sequence[int], suffix: Sequence[int], room: int) -> tuple[list[int], list[int]]:
    """Cut a prefix and a suffix to `room` tokens: each gets half, plus what the other leaves unused."""
    before = min(len(prefix), max(room - len(suffix), room - room // 2))
    return list(prefix[len(prefix) - before :]), list(suffix[: room - before])


def fim_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[int, int, int]:
    """The ids of FIM_TOKENS."""
    vocabulary = tokenizer.get_vocab()
    first, second, third = (vocabulary[token] for token in FIM_TOKENS)
    return first, second, third


def text_of(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """The text of ids, special tokens included."""
    return str(tokenizer.decode(list(ids)))


def fim_rows(
    tokenizer: PreTrainedTokenizerFast, stream: TokenStream, rng: np.random.Generator, *, count: int, length: int
) -> Rows:
    """`count` rows of windows inside one file each, [B, L + 1]; shorter ones are padded, which counts nothing."""
    ids = np.full((count, length + 1), PAD_ID, dtype=np.int64)
    weights = np.zeros((count, length + 1), dtype=np.float32)
    for row, index in enumerate(draw_windows(stream, rng, count=count, length=length - len(FIM_TOKENS))):
        text = text_of(tokenizer, stream.ids[index].tolist()).strip("\ufffd")  # characters that the window cuts
        tokens, counts = fim_row(tokenizer, text, draw_hole(rng, text), length + 1)
        ids[row, : len(tokens)], weights[row, : len(tokens)] = tokens, counts
    return Rows(ids, weights)
