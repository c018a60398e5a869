"""Hole lengths: how often the right one is found, beside the true length, a fixed one and a random one.

    python -m benchmarks.lengths          held-out code and prose, spans of 1 to 24 tokens and whole lines
    python -m benchmarks.lengths --quick  a small part, as a check

Each strategy is a job over the same texts at temperature 0. Code is of the standard library's held-out files; prose is the
language reference in `pydoc_data`, which no builtin model has seen. CAL's bias is the published one, and one that is fitted to
the model here, on files of its training: for lengths that are more than 4 tokens from the true one, as in CAL, appendix A.
Intervals are 95 % bootstrap intervals over texts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import draftmill
from benchmarks.any_subset import BUILTIN, drain
from draftmill.actors.rows.lengths import Bias
from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.base import HOLE, Request, RowSettings
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.masked.settings import StepwiseSettings
from draftmill.decoders.registry import build_decoder
from recipes.corpus import encode, split, standard_library

LONGEST, SIDE, FIXED = 24, 48, 12
MARKER = "<hole>"


@dataclass(frozen=True, slots=True)
class Hidden:
    """A text with a hole: what is before it, what it hides, and what is after it."""

    before: str
    inside: str
    after: str
    length: int


def spans(texts: Sequence[str], tokenizer: Any, count: int, *, lines: bool) -> list[Hidden]:
    """Texts of about `SIDE` tokens on each side of a hole: random spans of tokens, or whole lines."""
    rng, found = np.random.default_rng(0), list[Hidden]()
    while len(found) < count:
        text = texts[int(rng.integers(len(texts)))]
        rows = text.split("\n")
        if lines and len(rows) > 8:
            index = int(rng.integers(4, len(rows) - 3))
            before, after = "\n".join([*rows[:index], ""]), "\n".join(["", *rows[index + 1 : index + 40]])
            inside = rows[index]
        else:
            ids, length = encode(tokenizer, text), int(rng.integers(1, LONGEST + 1))
            if lines or len(ids) < 2 * SIDE + LONGEST + 2:
                continue
            start = int(rng.integers(SIDE, len(ids) - SIDE - length))
            edges = (start - SIDE, start, start + length, start + length + SIDE)
            before, inside, after = (tokenizer.decode(ids[low:high]) for low, high in pairwise(edges))
        before = tokenizer.decode(encode(tokenizer, before)[-SIDE:])
        after = tokenizer.decode(encode(tokenizer, after)[:SIDE])
        length = len(encode(tokenizer, inside))
        whole = before + inside + after
        if inside.strip() and length <= LONGEST and "\ufffd" not in whole and MARKER not in whole:
            found.append(Hidden(before, inside, after, length))
    return found


def decoded(
    texts: Sequence[Hidden], sizes: Sequence[str], model: str, decoder: str, bias: Bias | None
) -> list[dict[str, Any]]:
    """The result rows of a job whose holes have these sizes, as their markers say them."""
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            {"id": str(n), "text": f"{text.before}<hole:{size}>{text.after}"}
            for n, (text, size) in enumerate(zip(texts, sizes, strict=True))
        ]
        (Path(folder) / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
        spec = {
            "model": {"path": f"builtin:{model}"},
            "decoder": {"kind": decoder},
            "sampling": {"temperature": 0.0},
            "task": {"kind": "infill", "mask": {"kind": "marker", "marker": MARKER, "bias": bias}},
            "input": {"path": str(Path(folder) / "in.jsonl")},
            "output": {"path": str(Path(folder) / "run")},
            "workers": {"cpus": 1},
        }
        done = draftmill.run(spec, local=True)
        results = {row["id"]: row for row in done.rows(done.columns)}
    return [results[str(n)] for n in range(len(texts))]


def interval(values: NDArray[np.float64]) -> str:
    """A mean and its 95 % interval."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (2000, len(values)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return f"{values.mean():.3f} ({low:.3f} .. {high:.3f})"


def compare(name: str, texts: Sequence[Hidden], model: str, decoder: str, bias: Bias | None) -> None:
    """A table row for each strategy."""
    rng, masked = np.random.default_rng(1), model == "mdm-tiny"
    found = f"1-{LONGEST}"
    strategies: dict[str, tuple[list[str], Bias | None]] = {
        "true": ([str(text.length) for text in texts], None),
        f"fixed, {FIXED}": ([str(FIXED)] * len(texts), None),
        "random": ([str(rng.integers(1, LONGEST + 1)) for _ in texts], None),
        "found, CAL's bias" if masked else "found": ([found] * len(texts), None),
    }
    if bias is not None:
        strategies["found, fitted bias"] = ([found] * len(texts), bias)
    for strategy, (sizes, own) in strategies.items():
        rows = decoded(texts, sizes, model, decoder, own)
        lengths = np.array([row["fills"][0]["end"] - row["fills"][0]["start"] for row in rows])
        true = np.array([text.length for text in texts])
        fills = [row["fills"][0]["text"] == text.inside for row, text in zip(rows, texts, strict=True)]
        cells = (
            interval((lengths == true).astype(np.float64)),
            interval(np.abs(lengths - true).astype(np.float64)),
            interval(np.array(fills, dtype=np.float64)),
            f"{np.mean([row['nfe'] for row in rows]):.1f}",
        )
        print(f"| {name} | {model} | {strategy} | {' | '.join(cells)} |", flush=True)


def fitted(texts: Sequence[Hidden], tokenizer: Any) -> Bias:
    """The bias of mdm-tiny, by least squares: a, c, e >= 0 for each pair of decays b and d on a grid."""
    folder = BUILTIN.parent / "mdm-tiny"
    setup = Setup(
        backbone=load_backbone(folder, device="cpu"),
        info=inspect_model(folder),
        sampling=Sampling(temperature=0.0),
        max_rows=64,
        max_tokens=1 << 20,
    )
    requests, lengths = list[Request](), list[int]()
    for text in texts:
        before, after = (encode(tokenizer, part) for part in (text.before, text.after))
        for length in (1, 2, 3, 4, 6, 8, 12, 16, 20, 24):
            if abs(length - text.length) <= 4:
                continue
            canvas = np.array([*before, *[HOLE] * length, *after], dtype=np.int32)
            where = np.arange(len(before), len(before) + length, dtype=np.int64)
            settings = RowSettings(temperature=0.0)
            requests.append(Request(len(requests), 0, canvas, settings=settings, probe=True, scored=where))
            lengths.append(length)
    outcomes = drain(build_decoder(setup, StepwiseSettings(kind="stepwise")), requests)
    by_index = {outcome.index: np.exp(outcome.logprob or 0.0) for outcome in outcomes}
    seen = np.unique(lengths)
    mean = np.array([np.mean([by_index[n] for n, each in enumerate(lengths) if each == length]) for length in seen])
    best: tuple[float, Bias] | None = None
    for b in np.linspace(0.1, 2.0, 20):
        for d in np.linspace(0.005, 0.1, 20):
            terms = np.stack([np.exp(-b * seen), np.exp(-d * seen), np.ones(len(seen))], 1)
            (a, c, e), *_ = np.linalg.lstsq(terms, mean, rcond=None)
            error = float(((terms @ [a, c, e] - mean) ** 2).sum())
            if min(a, c, e) >= 0 and (best is None or error < best[0]):
                best = error, (float(a), float(b), float(c), float(d), float(e))
    assert best is not None, "some bias fits"
    a, b, c, d, e = (round(each, 4) for each in best[1])
    return a, b, c, d, e


def main() -> None:
    """Print the tables."""
    from pydoc_data.topics import topics

    from transformers import PreTrainedTokenizerFast

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--samples", type=int, default=200)
    options = parser.parse_args()
    count = 8 if options.quick else options.samples
    tokenizer = PreTrainedTokenizerFast.from_pretrained(BUILTIN)
    train, held_out = split(standard_library())
    code, prose = [file.text for file in held_out], list(topics.values())
    bias = fitted(spans([file.text for file in train], tokenizer, count, lines=False), tokenizer)
    print(f"the bias of mdm-tiny, fitted to {count} texts: {list(bias)}\n")
    print("| texts | model | lengths | exact lengths | mean error, tokens | exact fills | NFE |")
    print("|---" * 7 + "|")
    for name, texts, lines in (
        ("code, spans", code, False),
        ("code, lines", code, True),
        ("prose, spans", prose, False),
    ):
        hidden = spans(texts, tokenizer, count, lines=lines)
        compare(name, hidden, "asarm-tiny", "assd", None)
        compare(name, hidden, "mdm-tiny", "stepwise", bias)


if __name__ == "__main__":
    main()
