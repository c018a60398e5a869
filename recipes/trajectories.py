"""Reads the Jacobi trajectories of a finished run: a `complete` job with decoder `jacobi` and `output.trace: steps`.

Every iteration's trace gives the draft that it read and the tokens that it committed. So a state of a block is its committed
tokens, then the draft. Drafts that end at the same position belong to one block; its first state is its first draft, its last
state the committed tokens. Knows the run directory's files, and nothing of jobs or models.

Legend: P = prompt tokens, S = states of a block, n = its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from draftmill.storage.runs.records import read_results
from draftmill.storage.stores.store import Store
from recipes.packing import IDS, Trajectory


def read(run: Store, prompts: Mapping[str, IDS]) -> list[Trajectory]:
    """The trajectories of the samples that came back ok, in the order of `prompts` (sample id -> token ids [P]).

    ValueError if the run has no traces, or if a prompt's length differs from the decoded one.
    """
    results = {row["id"]: row for row in _rows(run, "data/", ["id", "status", "tokens", "prompt_tokens"])}
    steps: dict[str, list[dict[str, Any]]] = {}
    for row in _rows(run, "traces/", ["id", "iteration", "proposed", "positions"]):
        steps.setdefault(row["id"], []).append(row)
    if not steps:
        raise ValueError("the run has no traces: its output.trace must be 'steps'")
    trajectories = []
    for name, prompt in prompts.items():
        if name not in results or results[name]["status"] != "ok":
            continue
        row = results[name]
        if row["prompt_tokens"] != len(prompt):
            raise ValueError(
                f"sample {name!r}: {row['prompt_tokens']} prompt tokens were decoded, {len(prompt)} are given"
            )
        drafts = [(step["positions"][0], step["proposed"]) for step in _in_order(steps[name]) if step["positions"]]
        trajectories.append(Trajectory(prompt, blocks_of(np.concatenate([prompt, row["tokens"]]), len(prompt), drafts)))
    return trajectories


def blocks_of(final: IDS, num_prompt: int, drafts: Sequence[tuple[int, Sequence[int]]]) -> list[IDS]:
    """The states [S, n] of every block of a sample, from `final` (prompt and completion) and its iterations' drafts.

    A draft is its first position and its tokens. Tokens of a block beyond the completion are left out, and so is a state
    that equals the one before it.
    """
    states: dict[int, list[tuple[int, Sequence[int]]]] = {}
    for start, tokens in drafts:
        if tokens:
            states.setdefault(start + len(tokens), []).append((start, tokens))
    blocks, first = [], num_prompt
    for end in sorted(states):
        last = min(end, len(final))
        rows = [np.concatenate([final[first:start], tokens])[: last - first] for start, tokens in states[end]]
        block = np.stack([*rows, final[first:last]]).astype(np.int64)
        blocks.append(block[np.append(True, (block[1:] != block[:-1]).any(1))])
        first = last
    return [block for block in blocks if block.shape[1]]


def _in_order(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(steps, key=lambda step: step["iteration"])


def _rows(store: Store, folder: str, columns: list[str]) -> Iterator[dict[str, Any]]:
    names = [file.name for file in store.list(folder)]
    for table in read_results(store, objects=names, columns=columns):
        yield from table.to_pylist()
