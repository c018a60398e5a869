"""The decode loop with samples that have several holes: the next hole is asked for when the one before it is filled."""

import numpy as np

from draftmill.actors.loop.runner import UnitRunner
from draftmill.actors.messages import Receipt, WorkUnit
from draftmill.actors.rows.fim import Infilling, Template
from draftmill.actors.rows.samples import Sample
from draftmill.decoders.base import HOLE, Request
from draftmill.decoders.draws.keys import hole_key
from tests.actors.fakes import FakeClerk, FakeDecoder, work

TEMPLATE = Template((), 90, 91, 92, suffix_first=False, ends=(90, 91, 92))


class HolesClerk(FakeClerk):
    """Units of samples with holes of given sizes: `lengths[unit][index]` holes of 2 tokens between pieces of one token."""

    def sample(self, unit: WorkUnit, index: int) -> Sample:
        count = self.lengths[unit.unit][index]
        pieces = tuple(np.array([10 * index + place], dtype=np.int32) for place in range(count + 1))
        sample = Sample(index, key=index)
        sample.fill(Infilling(TEMPLATE, pieces, (2,) * count, None))
        return sample


def run(decoder: FakeDecoder, unit_io: FakeClerk, *units: WorkUnit) -> list[Receipt]:
    runner = UnitRunner(decoder, unit_io)
    for unit in units:
        runner.add(unit)
    news: list[object] = []
    while runner.held:
        news += runner.step()
    runner.close()
    assert all(isinstance(one, Receipt) for one in news), news
    return [one for one in news if isinstance(one, Receipt)]


class Watching(FakeDecoder):
    """Keeps every request that it was given."""

    def __init__(self, max_rows: int) -> None:
        super().__init__(max_rows)
        self.requests: list[Request] = []

    def admit(self, requests, *, queued_at_s=None) -> None:
        assert queued_at_s is not None and len(queued_at_s) == len(requests)
        self.requests += requests
        super().admit(requests, queued_at_s=queued_at_s)


def test_each_hole_is_asked_for_with_the_fills_before_it_and_a_key_of_its_own():
    decoder, unit_io = Watching(1), HolesClerk({0: [3]})
    (receipt,) = run(decoder, unit_io, work(0, 1))
    # A fake fills a hole with its positions.
    assert [tuple(request.canvas[request.canvas != HOLE].tolist()) for request in decoder.requests] == [
        (90, 0, 91, 1, 2, 3, 92),
        (90, 0, 7, 8, 1, 91, 2, 3, 92),
        (90, 0, 7, 8, 1, 9, 10, 2, 91, 3, 92),
    ]
    assert [request.key for request in decoder.requests] == [0, hole_key(0, 1), hole_key(0, 2)]
    assert len({request.key for request in decoder.requests}) == 3
    (sample,) = unit_io.closed[0]
    assert sample.outcome is not None and sample.outcome.tokens.tolist() == [7, 8, 9, 10, 11, 12]
    assert receipt.tally.rows == 1 and (receipt.tally.new_tokens, receipt.tally.nfe) == (6, 6)
    assert receipt.tally.prompt_tokens == 7 + 9 + 11


def test_a_next_hole_comes_before_rows_that_still_wait_and_slots_stay_full():
    decoder, unit_io = Watching(2), HolesClerk({0: [2, 2, 1, 1]})
    run(decoder, unit_io, work(0, 4))
    assert set(decoder.widths) == {2}, "no slot stood idle"
    first = [request.canvas[1] for request in decoder.requests]
    assert sorted(first[:2]) == sorted(first[2:4]) == [0, 10], "the second holes of the first rows follow at once"


def test_a_unit_ends_when_the_last_hole_of_its_rows_is_filled():
    unit_io = HolesClerk({0: [1, 4], 1: [2]})
    receipts = run(FakeDecoder(2), unit_io, work(0, 2), work(1, 1))
    assert sorted(receipt.unit for receipt in receipts) == [0, 1]
    assert [len(sample.parts) for sample in unit_io.closed[0]] == [1, 4]
    assert sum(receipt.tally.new_tokens for receipt in receipts) == 2 * 7


def test_a_decoder_that_fails_once_changes_nothing():
    """Samples in their second hole are decoded again from there, with the same prompt and key."""

    def outcomes(fail_at: int | None, message: str) -> list[list[int]]:
        steps = 0

        def trouble(requests: list[Request]) -> None:
            nonlocal steps
            steps += 1
            if steps == fail_at and len(requests) > 1:  # alone, a sample would be to blame
                raise RuntimeError(message)

        unit_io = HolesClerk({0: [3, 2, 1, 4]})
        run(FakeDecoder(3, trouble=trouble), unit_io, work(0, 4))
        assert all(sample.error is None for sample in unit_io.closed[0])
        return [sample.outcome.tokens.tolist() for sample in unit_io.closed[0] if sample.outcome]

    quiet = outcomes(None, "")
    assert len(quiet) == 4
    for step in range(1, 7):
        assert outcomes(step, "a kernel failed") == quiet
        assert outcomes(step, "out of memory") == quiet


def test_a_row_whose_second_hole_fails_takes_no_neighbour_along():
    def trouble(requests: list[Request]) -> None:
        if any(request.canvas[1] == 10 and len(request.canvas) > 8 for request in requests):
            raise RuntimeError("this prompt")

    unit_io = HolesClerk({0: [2, 2, 2]})
    (receipt,) = run(FakeDecoder(3, trouble=trouble), unit_io, work(0, 3))
    errors = [None if sample.error is None else sample.error.kind for sample in unit_io.closed[0]]
    assert errors == [None, "decode_error", None]
    assert (receipt.tally.ok, receipt.tally.failed, receipt.tally.new_tokens) == (2, 1, 8)
