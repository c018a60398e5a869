"""Golden cases of the masked-diffusion samplers (LLaDA, Fast-dLLM, Dream): read, decoded by ours, compared.

The public code doesn't suppress the mask: its probability is part of every confidence there, so neither is it suppressed here.
"""

import json
from dataclasses import replace

import numpy as np

from draftmill.decoders.backbones.checkpoint import inspect_model
from draftmill.decoders.base import Request
from draftmill.decoders.common_settings import Sampling
from tests.decoders.support import engine, run_all

GREEDY = Sampling(temperature=0.0)
CACHES: dict = {"generate": "none", "prefix_cache": "prefix", "dual_cache": "dual_strict"}


def cases_of(folder, *groups):
    """One case a row: what the public code decoded in a batch is given row by row."""
    cases = json.loads((folder / "cases.json").read_text())
    return [row for group in groups for case in cases[group] for row in rows_of(case)]


def rows_of(case):
    if not isinstance(case["prompt"][0], list):
        return [case]
    fields = [name for name in case if isinstance(case[name], list) and name != "calls"]
    return [
        case | {name: case[name][row] for name in fields if name != "revealed_per_call"}
        for row in range(len(case["prompt"]))
    ]


def canvas_of(case, mask_id):
    tokens = np.array(case["prompt"] + [mask_id] * case["settings"]["gen_length"], dtype=np.int32)
    tokens[tokens == mask_id] = -1
    return tokens


def built(backbone, folder, settings, *, suppressed=(), rows=3):
    info = replace(inspect_model(folder), suppressed=suppressed)
    return engine(backbone, info, settings, GREEDY, rows=rows, trace=True)


def decoded(decoder, case, mask_id):
    return run_all(decoder, [Request(0, 1, canvas_of(case, mask_id))])[0]


def check(decoder, case, mask_id):
    """The public tokens, in the public order, in as many forwards."""
    outcome = decoded(decoder, case, mask_id)
    check_reveals(outcome, case, canvas_of(case, mask_id))
    assert outcome.nfe == case["nfe"]


def check_reveals(outcome, case, canvas):
    holes = np.flatnonzero(canvas < 0)
    assert outcome.tokens.tolist() == [case["output"][hole] for hole in holes]
    call_of = {position: step.nfe for step in outcome.trace for position in step.positions}
    assert [call_of[hole] for hole in holes][-len(case["reveal_call"]) :] == case["reveal_call"]
