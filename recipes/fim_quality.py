"""Measures a model that fills in the middle, on held-out files: as a plain language model, and on single hidden lines.

A line counts as found where greedy decoding gives it to the character and then ends. The same lines are asked of the model
before it was trained on, which sees what stands before the line and nothing after it; there a line end is the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from recipes import causal_folder
from recipes.corpus import EOS_ID, Prepared, TokenStream, encode
from recipes.evaluation import Quality, window_indices
from recipes.fim_windows import FIM_TOKENS, fim_ids, fit, pieces, text_of

WINDOW = 320
MOST_NEW = 64


@dataclass(frozen=True)
class Line:
    """A hidden line and the text of its window on both sides."""

    before: str
    middle: str
    after: str


@dataclass(frozen=True)
class Exact:
    """How many of some hidden lines were found to the character."""

    hits: int
    lines: int

    @property
    def share(self) -> float:
        return self.hits / self.lines


@dataclass(frozen=True)
class Report:
    """`plain[model][length]`; of hidden lines `exact[way]` of filling them in, and `nats[after]` a token of the true line."""

    plain: dict[str, dict[int, Quality]]
    exact: dict[str, Exact]
    nats: dict[str, float]


def held_out_lines(prepared: Prepared, count: int, seed: int = 0) -> list[Line]:
    """`count` lines of windows of held-out files, one of each window, evenly over the files; ValueError for too few."""
    rng, tokenizer, stream = np.random.default_rng(seed), prepared.tokenizer, prepared.held_out
    lines = [line for text in window_texts(tokenizer, stream, count) if (line := one_line(rng, text)) is not None]
    if len(lines) < count // 2:
        raise ValueError(f"the held-out files have {len(lines)} windows with a line to hide, {count} are wanted")
    return lines


def window_texts(tokenizer: PreTrainedTokenizerFast, stream: TokenStream, count: int) -> Iterator[str]:
    """The text of each of `count` windows of the stream."""
    for index in window_indices(stream, length=WINDOW, limit=count):
        for row in stream.ids[index]:
            yield text_of(tokenizer, row.tolist()).strip("\ufffd")


def one_line(rng: np.random.Generator, text: str) -> Line | None:
    """A random whole line of the text that is not blank; None if there is none."""
    lines = text.split("\n")
    starts = np.cumsum([0, *(len(line) + 1 for line in lines)])
    inner = [place for place in range(1, len(lines) - 1) if sum(map(str.isalnum, lines[place])) >= 3]
    if not inner:
        return None
    place = int(rng.choice(inner))
    start = int(starts[place])
    return Line(*pieces(text, (start, start + len(lines[place]))))


@torch.no_grad()
def greedy(model: Qwen2ForCausalLM, prompt: Sequence[int], ended: Callable[[list[int]], bool]) -> list[int]:
    """The model's greedy completion until it has `ended` (without the end token), at most MOST_NEW tokens."""
    tokens: list[int] = []
    ids, past = torch.tensor([list(prompt)], device=model.device), None
    while len(tokens) < MOST_NEW and not ended(tokens):
        out = model(input_ids=ids, past_key_values=past, use_cache=True)
        past, token = out.past_key_values, int(out.logits[0, -1].argmax())
        if token == EOS_ID:
            break
        tokens.append(token)
        ids = torch.tensor([[token]], device=model.device)
    return tokens


def fim_prompt(tokenizer: PreTrainedTokenizerFast, line: Line, most: int) -> list[int]:
    """Prefix, suffix and their three tokens, at most `most` tokens."""
    before, after, last = fim_ids(tokenizer)
    prefix, suffix = fit(encode(tokenizer, line.before), encode(tokenizer, line.after), most - len(FIM_TOKENS))
    return [before, *prefix, after, *suffix, last]


def exact_infill(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, lines: Sequence[Line]) -> Exact:
    """Fill in each line from the text before and after it."""
    most = model.config.max_position_embeddings - MOST_NEW
    answers = (greedy(model, fim_prompt(tokenizer, line, most), lambda ids: False) for line in lines)
    hits = sum(text_of(tokenizer, ids) == line.middle for ids, line in zip(answers, lines, strict=True))
    return Exact(hits, len(lines))


def exact_left(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, lines: Sequence[Line]) -> Exact:
    """Fill in each line from the text before it alone; line ends generated before the line are ignored.

    Indentation shares a token with the line ends before it, so the model generates these.
    """

    def text(ids: list[int]) -> str:
        return text_of(tokenizer, ids).lstrip("\n")

    most = model.config.max_position_embeddings - MOST_NEW
    hits = 0
    for line in lines:
        prompt = encode(tokenizer, line.before.rstrip("\n"))[-most:] or [EOS_ID]
        answer = greedy(model, prompt, lambda ids: "\n" in text(ids))
        hits += text(answer).split("\n")[0] == line.middle
    return Exact(hits, len(lines))


@torch.no_grad()
def surprise(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, lines: Sequence[Line]) -> float:
    """Nats per token of the true lines and their ends, given the text before and after them."""
    most, nats, count = model.config.max_position_embeddings - MOST_NEW, 0.0, 0
    for line in lines:
        prompt, wanted = fim_prompt(tokenizer, line, most), [*encode(tokenizer, line.middle)[: MOST_NEW - 1], EOS_ID]
        ids = torch.tensor([[*prompt, *wanted]], device=model.device)
        law = model(input_ids=ids[:, :-1]).logits[0, len(prompt) - 1 :].log_softmax(-1)
        nats -= float(law.gather(1, ids[0, len(prompt) :, None]).sum())
        count += len(wanted)
    return nats / count


def surprises(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, lines: Sequence[Line]) -> dict[str, float]:
    """`surprise` with the line's own suffix, with an empty one, and with that of another line."""
    others = [replace(line, after=lines[(place - 7) % len(lines)].after) for place, line in enumerate(lines)]
    return {
        "its own": surprise(model, tokenizer, lines),
        "none": surprise(model, tokenizer, [replace(line, after="") for line in lines]),
        "that of another line": surprise(model, tokenizer, others),
    }


def measure(model: Qwen2ForCausalLM, start: Qwen2ForCausalLM, prepared: Prepared, lines: int) -> Report:
    """Quality of the model and of the one that its training started from."""
    wanted, tokenizer = held_out_lines(prepared, lines), prepared.tokenizer
    return Report(
        {
            "this model": causal_folder.qualities(model, prepared),
            "its start": {256: causal_folder.quality(start, prepared, length=256)},
        },
        {
            "this model, text on both sides": exact_infill(model, tokenizer, wanted),
            "this model, text before the line": exact_left(model, tokenizer, wanted),
            "its start, text before the line": exact_left(start, tokenizer, wanted),
        },
        surprises(model, tokenizer, wanted),
    )


def tables(report: Report) -> Iterator[str]:
    """Both tables in Markdown."""
    yield "Single lines hidden in windows of held-out files, filled in greedily: how many come back to the character."
    yield ""
    yield "| | exact | lines | share |"
    yield "|---|---|---|---|"
    for way, exact in report.exact.items():
        yield f"| {way} | {exact.hits} | {exact.lines} | {exact.share:.1%} |"
    yield ""
    yield "Nats per token of the true lines, by the text after the hole:"
    yield ""
    yield "| text after the hole | nats |"
    yield "|---|---|"
    for after, nats in report.nats.items():
        yield f"| {after} | {nats:.3f} |"
    yield ""
    yield "As a plain language model: consecutive windows of every held-out file, every token but a window's first, given"
    yield "those before it in the window."
    for who, scores in report.plain.items():
        yield ""
        yield f"{who[0].upper()}{who[1:]}:"
        yield ""
        yield from causal_folder.quality_table(scores)
