"""What holds of every decoder's slots: junk in dead cells and what a slot held before change nothing, and all sums agree."""

import numpy as np
import pytest
import torch

from draftmill.decoders.backbones.rows import TokenRows, seen_columns
from draftmill.decoders.engine.model_runner import seconds_of
from draftmill.decoders.settings import DECODERS
from tests.decoders import results
from tests.decoders.support import run_all

# The counts of `fastest` depend on time; what it runs is in test_fastest.py.
EVERY = pytest.mark.parametrize("kind", [kind for kind in DECODERS if kind != "fastest"])


def some_cases(kind, *, scores=False):
    """A few settings of a decoder, from the whole matrix of results, each with one of its samplings; and those of its scores."""
    cases = [case for case in results.cases() if case.settings["kind"] == kind]
    few = [case for case in cases if case.estimate is None]
    few = few[:: max(1, len(few) // 8)] + [case for case in cases if scores and case.estimate is not None]
    for number, case in enumerate(few):
        yield case, case.samplings[number % len(case.samplings)]


def said(outcomes):
    names = ["nfe", "nfe_draft", "iterations", "proposed", "accepted", "accept_hist", "trace", "logprob"]
    names += ["logprob_stderr", "is_greedy"]
    return {i: (one.tokens.tolist(), *(getattr(one, name) for name in names)) for i, one in outcomes.items()}


def seen_by(backbone, rows):
    """The cells that a row may see, [S, W]."""
    seen_SW = torch.zeros_like(backbone.tokens_SW, dtype=torch.bool)
    if isinstance(rows, TokenRows):
        row_N, column_N = seen_columns(rows.low_IN, rows.high_IN, rows.shape.num_columns).nonzero(as_tuple=True)
        seen_SW[rows.slot_N[row_N], column_N] = True
    else:
        for row, slot in enumerate(rows.slots_G.tolist()):
            seen_SW[slot, : int(rows.limit_Q[rows.owner_Q == row].max())] = True
    return seen_SW


def poison(backbone):
    """Fill every cell that no row may see with other junk before each forward; slots that don't take part stay as they are."""
    forward = backbone.forward

    def poisoned(rows):
        kept_SW = seen_by(backbone, rows)
        others = torch.ones(len(kept_SW), dtype=torch.bool)
        others[rows.slots_G] = False
        kept_SW[others] = True
        held_SW = backbone.tokens_SW
        backbone.tokens_SW = torch.where(kept_SW, held_SW, torch.randint_like(held_SW, backbone.vocab_size))
        return forward(rows)

    backbone.forward = poisoned


@pytest.mark.one_in(5)
@EVERY
def test_junk_in_dead_columns_and_freed_slots_changes_nothing(kind):
    for case, sampling in some_cases(kind):
        requests = results.requests_of(case)
        clean = run_all(results.engine_of(case, sampling, 4), requests)
        decoder = results.engine_of(case, sampling, 4)
        for model in decoder.models:
            poison(model.backbone)
        assert said(run_all(decoder, requests)) == said(clean), case.name


@pytest.mark.one_in(5)
@EVERY
def test_a_cleared_decoder_is_as_a_new_one(kind):
    for case, sampling in some_cases(kind, scores=True):
        decoder, requests = results.engine_of(case, sampling, 3), results.requests_of(case)
        decoder.admit(requests[:3])
        ended = {outcome.index for outcome in decoder.step()}
        assert sorted({*decoder.clear(), *ended}) == [0, 1, 2] and decoder.active == 0
        assert said(run_all(decoder, requests)) == said(run_all(results.engine_of(case, sampling, 3), requests)), (
            case.name
        )


@pytest.mark.one_in(5)
@EVERY
def test_no_sample_hears_of_its_neighbours_or_of_the_order_of_refills(kind):
    for case, sampling in some_cases(kind, scores=True):
        requests, found = results.requests_of(case), []
        for rows, order in ((1, 1), (3, -1), (16, 1)):
            found.append(said(run_all(results.engine_of(case, sampling, rows), requests[::order])))
        assert found[0] == found[1] == found[2], case.name


@pytest.mark.one_in(5)
@EVERY
def test_traces_counts_and_seconds_add_up(kind):
    for case, sampling in some_cases(kind):
        decoder, requests = results.engine_of(case, sampling, 4), results.requests_of(case)
        seconds = [list[float]() for _ in decoder.models]
        for model, spent in zip(decoder.models, seconds, strict=True):

            def cut(ask=model.clock.cut, spent=spent):
                spent += seconds_of(told := ask())
                return told

            model.clock.cut = cut
        outcomes, stats = run_all(decoder, requests), decoder.stats
        total_s = sum(one.device_s for one in outcomes.values())
        assert total_s == pytest.approx(stats.forward_s) == pytest.approx(sum(map(sum, seconds)))
        assert all(sum(spent) > 0 for spent in seconds)
        assert sum(one.nfe for one in outcomes.values()) == stats.active_slot_steps
        assert stats.committed == sum(len(one.tokens) for one in outcomes.values())
        assert 0 < stats.useful_rows <= stats.computed_rows
        for request in requests:
            one = outcomes[request.index]
            assert 1.0 <= one.batch_rows <= 4.0 and 0.0 <= one.pad_fraction < 1.0
            assert one.total_s == pytest.approx(one.wait_s + one.prefill_s + one.decode_s)
            assert one.wait_s >= 0 and one.prefill_s > 0 and one.decode_s >= 0
            placed = {p: t for step in one.trace for p, t in zip(step.positions, step.committed, strict=True)}
            assert [placed[place] for place in np.flatnonzero(request.canvas < 0).tolist()] == one.tokens.tolist()
            # A step of a block that reveals nothing leaves no trace.
            assert len(one.trace) == one.iterations or kind in ("block_diffusion", "s2d2")
            assert sum(len(step.proposed) for step in one.trace) == one.proposed
