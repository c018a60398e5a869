"""The recipe of EAGLE-3 heads: training sees what drafting sees, and the folder is one that decodes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from draftmill.decoders.backbones.heads.files import read_speculator
from draftmill.decoders.backbones.heads.published import load_speculator
from draftmill.decoders.backbones.load import load_backbone
from draftmill.decoders.backbones.rows import causal_rows
from recipes import eagle_head
from recipes.eagle_head import HeadPlan, Target, Trainee
from recipes.head_training import fit_heads

MICRO = Path(__file__).parents[2] / "decoders" / "builtin" / "ar-micro"
PLAN = HeadPlan(steps=12, windows=2, length=16, warmup=2, layer_ids=(1, 2))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainee, list[float]]:
    """A head of a few steps on text that repeats itself, and its losses."""
    out = tmp_path_factory.mktemp("heads") / "head"
    config = eagle_head.config_of(MICRO, PLAN.layer_ids)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    trainee = Trainee(Target(MICRO, PLAN.layer_ids), read_speculator(out), PLAN)
    ids, losses = np.resize(np.random.default_rng(0).integers(10, 2000, 24), 400), list[float]()
    fit_heads(trainee.stack, PLAN, lambda step: trainee.loss(ids, step), lambda step, loss: losses.append(loss))
    trainee.save(out, config)
    return out, trainee, losses


def test_training_lowers_the_loss(trained):
    _, _, losses = trained
    assert losses[7] < losses[0]  # the last third has another loss


@torch.no_grad()
def test_training_gives_the_laws_that_the_head_drafts_by(trained, monkeypatch):
    """Row by row: from the target's states, and after one and two steps from the head's own; weights are stored in halves."""
    out, trainee, _ = trained
    monkeypatch.setattr("recipes.loop.torch.autocast", lambda *_, **__: torch.no_grad())
    tokens_L = torch.tensor(np.random.default_rng(1).integers(10, 2000, 12))
    laws = trainee.laws(tokens_L.unsqueeze(0))
    target = cast("Any", load_backbone(MICRO, dtype="float32", device="cpu"))
    head = load_speculator(out, target)
    for last in (0, 4, 8):
        for one in (target, head):
            one.allocate(1, 32)
        target.tap(head)
        target.forward(causal_rows([0], [last + 1], [0], tokens_L[: last + 1]))
        rows = causal_rows([0], [last + 1], [0], tokens_L[1 : last + 2])
        for step in range(3):
            rows = replace(rows, position_N=rows.position_N + 1, takes_drafts=step > 0)
            log_q_V = head.logits(head.forward(rows))[-1].log_softmax(-1)
            torch.testing.assert_close(log_q_V, laws[step][1][last], atol=0.05, rtol=0.05)
            place = last + 1 + step
            rows = causal_rows([0], [1], [place], tokens_L[place + 1 :][:1])
