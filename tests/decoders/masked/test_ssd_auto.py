"""`ssd` with `draft_length: auto`: the text of stepwise whatever is chosen, and a choice that pays, by a simulated clock."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftmill.decoders.backbones.load import inspect_model
from draftmill.decoders.base import ModelInfo, Request
from draftmill.decoders.common_settings import Sampling
from draftmill.decoders.draws.noise import sample_key
from draftmill.decoders.engine import engine
from draftmill.decoders.engine.budget import DraftBudget
from draftmill.decoders.engine.looks import NodeOffer
from draftmill.decoders.engine.node_lengths import NodeBudget
from draftmill.decoders.engine.setup import Setup
from draftmill.decoders.masked.settings import SelfSpeculativeSettings, StepwiseSettings
from draftmill.decoders.registry import build_decoder
from tests.decoders.backbones.masked_models import load
from tests.decoders.masked.ssd_support import decode, same
from tests.decoders.references.token_table import TokenTable
from tests.decoders.support import random_lengths, run_all

GREEDY = Sampling(temperature=0.0)


def auto(**more: Any):
    return SelfSpeculativeSettings(kind="ssd", draft_length="auto", **more)


# With a budget and a chain, drafts go on over a refresh: at a block's end, or every so many tokens.
LIVES: list[tuple[Any, int | None]] = [
    *(("none", None), ("dual_strict", None), ("dual_strict", 2), ("dual_strict", 5), ("dual_strict", 12)),
    *(("prefix", None), ("prefix", 4)),
]


@pytest.mark.parametrize("tree", ["chain", "mixed"])
@pytest.mark.parametrize(("cache", "refresh"), LIVES)
def test_any_choice_gives_the_text_of_stepwise(golden, monkeypatch, cache, refresh, tree):
    monkeypatch.setattr(DraftBudget, "plan", random_lengths)
    torch.manual_seed(0)
    rng = np.random.default_rng(3)
    shared: dict[str, Any] = {"block_length": 4, "cache": cache, "refresh": refresh}
    family = "dream" if refresh is None else "llada"
    backbone, info = load(golden / family, dtype="float64"), inspect_model(golden / family)
    canvases = [np.where(rng.random(18) < 0.8, -1, rng.integers(0, 80, 18)).astype(np.int32) for _ in range(6)]
    requests = [Request(at, sample_key(0, str(at)), canvas) for at, canvas in enumerate(canvases)]
    base, sampled = StepwiseSettings(kind="stepwise", **shared), Sampling(temperature=0.8)
    expected = decode(backbone, info, base, sampled, requests, rows=4)
    for rows in (1, 4):
        outcomes = decode(backbone, info, auto(tree=tree, **shared), sampled, requests, rows=rows)
        same(outcomes, expected)
        assert sum(outcome.accepted for outcome in outcomes.values()) > 0


@pytest.mark.parametrize(("cache", "refresh"), LIVES[1:])
def test_a_model_that_keeps_its_mind_pays_nothing_for_a_refresh_in_a_chain(monkeypatch, cache, refresh):
    monkeypatch.setattr(DraftBudget, "plan", lambda budget, slots_B, most_B, **_: np.minimum(most_B, 2))
    model = TokenTable(vocab_size=4, num_positions=7)
    model.table_PXV[:] = model.table_PXV[:, :1]
    info = ModelInfo("table", 4, 3, None, "masked", 0, (3,))
    nothing = [Request(0, 0, np.full(7, -1, dtype=np.int32))]
    settings = auto(block_length=3, cache=cache, refresh=refresh)
    (outcome,) = decode(model, info, settings, GREEDY, nothing, rows=1).values()
    assert outcome.nfe == 1 + -(-6 // 3), "two drafts a forward, after one that drafts"


def test_a_draft_over_a_refresh_is_charged_with_a_whole_canvas():
    budget = NodeBudget(2, range(5))
    budget.size([NodeOffer(4, 40, 8, 40, 3), NodeOffer(4, 8, 8, 30, 9)])
    assert budget._slot_rows(2).tolist() == [[40, 48, 56, 96, 104], [8, 16, 24, 32, 40]]
    mixed = NodeBudget(1, [0, 1, 3, 5])
    mixed.size([NodeOffer(3, 40, 8, 40, -1)])
    assert mixed._slot_rows(1).tolist() == [[40, 48, 64, 80]]


def test_a_slot_is_admitted_as_for_stepwise_and_nodes_take_what_is_left():
    class Counting(TokenTable):
        most_nodes = 0

        def forward(self, rows):
            self.most_nodes = max(self.most_nodes, len(rows.slots_B))
            return super().forward(rows)

    info = ModelInfo("table", 4, 3, None, "masked", 0, (3,))
    for num_tokens, rows, allowed in ((7 * 10, 4, 10), (7 * 4, 4, 4), (1, 4, 1)):
        model = Counting(vocab_size=4, num_positions=7)
        model.table_PXV[:] = model.table_PXV[:, :1]  # so that all drafts come true
        decoder = build_decoder(
            Setup(backbone=model, info=info, sampling=GREEDY, max_rows=rows, max_tokens=num_tokens), auto()
        )
        assert decoder.room(7) == min(rows, max(num_tokens // 7, 1))
        requests = [Request(at, at, np.full(7, -1, dtype=np.int32)) for at in range(24)]
        outcomes = run_all(decoder, requests)
        assert model.most_nodes <= allowed
        assert (sum(outcome.proposed for outcome in outcomes.values()) > 0) == (allowed > rows)


# ---- a simulated machine -------------------------------------------------------------------------------------------------


class Moody:
    """A model that mostly keeps its mind: what it says of a position also depends on the whole canvas, by `shake`.

    A forward takes `base` seconds and `per_row` for each row beyond `free` ones; its clock says a little more, `seconds` is true.
    """

    def __init__(self, *, shake, base=1.0, per_row=0.0, free=0, length=48, vocab_size=8):
        self.shake, self.base, self.per_row, self.free = shake, base, per_row, free
        generator = torch.Generator().manual_seed(0)
        self.vocab_size = self.width = vocab_size
        self.device, self.dtype, self.min_rows, self.num_rows_computed = torch.device("cpu"), torch.float64, 1, 0
        self.exact = True
        self.said_PV = 3 * torch.randn(length, vocab_size, generator=generator, dtype=torch.float64)
        self.moods_HPV = torch.randn(64, length, vocab_size, generator=generator, dtype=torch.float64)
        self.weights_P = torch.randint(1, 1 << 20, (length,), generator=generator)
        self.rng, self.now, self.seconds, self.num_forwards = np.random.default_rng(0), 0.0, 0.0, 0

    def allocate(self, num_slots, num_columns):
        """Nothing is kept."""

    def move_slot(self, source, target):
        """Nothing is kept."""

    def copy_prefix(self, source, target, num_columns):
        """Nothing is kept."""

    def copy_columns(self, slots_R, from_R, to_R):
        """Nothing is kept."""

    def forward(self, rows):
        moods_N = rows.token_N * self.weights_P[rows.position_N]
        moods_B = torch.zeros_like(rows.slots_B).index_add_(0, rows.owner_N, moods_N) % 61
        self.num_rows_computed = rows.num_rows
        took = self.base + self.per_row * max(self.num_rows_computed - self.free, 0)
        self.seconds, self.num_forwards = self.seconds + took, self.num_forwards + 1
        self.now += took * (1 + 0.1 * abs(self.rng.standard_normal()))
        return self.said_PV[rows.position_N] + self.shake * self.moods_HPV[moods_B[rows.owner_N], rows.position_N]

    def logits(self, hidden_RD):
        return hidden_RD.clone()

    def embed(self, tokens_R):
        raise NotImplementedError


def seconds_of(monkeypatch, settings, *, rows=4, count=24, **machine):
    """(Simulated seconds, forwards, canvases beside the roots) of a run; its texts are checked elsewhere."""
    model = Moody(**machine)
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: model.now, time=lambda: model.now))
    info = ModelInfo("moody", model.vocab_size, model.vocab_size - 1, None, "masked", 0, (model.vocab_size - 1,))
    rng = np.random.default_rng(1)
    lengths = rng.integers(24, 49, count)
    requests = [Request(at, at, np.full(int(length), -1, dtype=np.int32)) for at, length in enumerate(lengths)]
    decoder = build_decoder(
        Setup(backbone=model, info=info, sampling=GREEDY, max_rows=rows, max_tokens=1 << 20), settings
    )
    outcomes = run_all(decoder, requests)
    return model.seconds, model.num_forwards, sum(outcome.proposed for outcome in outcomes.values())


PLAIN = StepwiseSettings(kind="stepwise")
HOPELESS: dict[str, dict[str, Any]] = {
    "dear rows": {"shake": 0.6, "base": 0.1, "per_row": 0.02, "count": 64},
    "drafts that seldom come true": {"shake": 6.0, "per_row": 0.004, "count": 64},
    "a full machine": {"shake": 1.0, "per_row": 0.01, "rows": 16, "count": 100},
}


@pytest.mark.parametrize("case", HOPELESS)
def test_where_drafts_do_not_pay_little_is_lost_on_them(monkeypatch, case):
    plain, _, _ = seconds_of(monkeypatch, PLAIN, **HOPELESS[case])
    found, _, _ = seconds_of(monkeypatch, auto(), **HOPELESS[case])
    assert found < 1.04 * plain


WORTHWHILE: dict[str, dict[str, Any]] = {
    "one sample": {"shake": 0.05, "per_row": 0.0005, "rows": 1, "count": 8},
    "rows that are free": {"shake": 0.2},
    "rows that are free at first": {"shake": 0.2, "per_row": 0.02, "free": 800},
    "rows that cost a little": {"shake": 0.05, "per_row": 0.001},
}


@pytest.mark.parametrize("case", WORTHWHILE)
def test_where_drafts_pay_it_is_nearly_as_fast_as_the_best_number(monkeypatch, case):
    plain, _, _ = seconds_of(monkeypatch, PLAIN, **WORTHWHILE[case])
    found, _, _ = seconds_of(monkeypatch, auto(), **WORTHWHILE[case])
    numbers = [SelfSpeculativeSettings(kind="ssd", draft_length=number) for number in (2, 4, 16)]
    fixed = [seconds_of(monkeypatch, number, **WORTHWHILE[case])[0] for number in numbers]
    assert found < 0.75 * plain
    assert found < 1.15 * min(fixed)


def test_where_a_forward_costs_the_same_whatever_it_runs_drafts_are_long(monkeypatch):
    longest = SelfSpeculativeSettings(kind="ssd", draft_length=16)
    _, fewest, _ = seconds_of(monkeypatch, longest, shake=0.05)
    _, num_forwards, proposed = seconds_of(monkeypatch, auto(), shake=0.05)
    assert num_forwards < 1.2 * fewest
    assert proposed > 6 * 4 * num_forwards, "of four slots"
