"""Which worker takes which unit: neighbours in the inputs together, fast workers the long ones, nobody one that ends late."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.makespans import makespan_bound, refill_makespan
from draftmill.actors.messages import Failure, WorkerLost, WorkUnit
from draftmill.jobs.schedule.events import Assign, Command, Event, Revoke, Tick
from draftmill.jobs.schedule.scheduler import Scheduler, WorkLeft, fitting_unit
from draftmill.jobs.schedule.unit_leases import KNOWN_S
from draftmill.jobs.schedule.units import LAST_UNITS, UnitSize, UnitSizes, WaitingUnits, first_of_last
from tests.jobs.schedule.integrity import check_integrity
from tests.jobs.schedule.reports import answered, unit_done, worker_up


class Team:
    """A scheduler whose workers w0, w1, ... are up and decode with constant speeds; 0 for one that reports no tokens."""

    def __init__(self, units: list[UnitSize], *speeds: int) -> None:
        self.scheduler = Scheduler(units, workers=len(speeds))
        self.speeds = {f"w{number}": speed for number, speed in enumerate(speeds)}
        self.held: dict[str, list[WorkUnit]] = {name: [] for name in self.speeds}
        self.taken: dict[str, list[int]] = {name: [] for name in self.speeds}
        self.now_s = 0.0
        self.tell(Tick(0.0))
        for name in self.speeds:
            self.tell(worker_up(name))

    def tell(self, event: Event) -> list[Command]:
        commands = self.scheduler.on(event)
        for command in commands:
            if isinstance(command, Assign):
                self.held[command.worker].append(command.unit)
                self.taken[command.worker].append(command.unit.unit)
            elif isinstance(command, Revoke):
                self.held[command.worker] = [w for w in self.held[command.worker] if w.lease != command.lease]
        if self.scheduler.finished is None:
            check_integrity(self.scheduler.state)
        return commands

    def decode(self, seconds: float) -> None:
        """All workers decode for some time and report it; no unit is finished, and none has room for the next one."""
        self.now_s += seconds
        self.tell(Tick(self.now_s))
        for name, speed in self.speeds.items():
            self.tell(answered(name, tokens=int(speed * seconds)))

    def finish(self, name: str) -> None:
        work = self.held[name].pop(0)
        self.tell(unit_done(work.lease, work.unit))


def units(*tokens: int, windows: tuple[int, ...] = ()) -> list[UnitSize]:
    return [UnitSize(unit, 4, cost, windows[unit] if windows else 0) for unit, cost in enumerate(tokens)]


def test_without_known_speeds_the_longest_waiting_unit_comes_next():
    team = Team(units(90, 80, 70, 60, 50), 0, 0)
    team.decode(100.0)
    team.finish("w1")
    team.finish("w0")
    assert team.taken == {"w0": [0, 3], "w1": [1, 2]}


def test_a_speed_counts_as_known_only_after_some_seconds():
    team = Team(units(1000, 900, 800, 10), 100, 1)
    team.decode(KNOWN_S - 1)
    assert team.scheduler.state.workers["w0"].speed == 0
    team.decode(1.0)
    assert team.scheduler.state.workers["w0"].speed == 100
    assert team.scheduler.state.workers["w1"].speed == 1


def test_near_the_end_the_fast_worker_takes_the_long_unit_and_the_slow_one_a_short_one():
    team = Team(units(1000, 1000, 900, 500, 60, 50), 100, 10)
    team.decode(9.9)  # w0 is about to finish, w1 has a tenth
    team.tell(answered("w1", tuple(work.lease for work in team.held["w1"])))  # w1 has room: it has far too much already
    assert team.taken == {"w0": [0], "w1": [1]}
    team.finish("w0")
    assert team.taken == {"w0": [0, 2], "w1": [1]}
    team.finish("w1")  # earlier than expected: of what is left, less than a tenth is its share
    assert team.taken == {"w0": [0, 2], "w1": [1, 4]}


def test_a_worker_without_a_known_speed_counts_as_an_average_one():
    team = Team(units(1000, 990, 980, 400, 300, 60), 100, 100)
    team.decode(9.0)
    team.tell(WorkerLost("w1", "killed", idle=True))
    team.speeds["w2"], team.held["w2"], team.taken["w2"] = 0, [], []
    team.tell(worker_up("w2"))
    assert team.taken["w2"], "it gets a unit although nothing is known of it"
    assert team.taken["w2"][0] in (1, 2)


def test_an_idle_slow_worker_leaves_the_last_unit_to_a_fast_one_until_that_is_gone():
    team = Team(units(1000, 90, 80), 100, 10)
    team.decode(9.0)
    team.finish("w1")
    assert team.taken == {"w0": [0], "w1": [1]}, "w0 would finish the last one in 1.8 s, w1 in 8 s"
    team.tell(WorkerLost("w0", "killed", idle=True))
    assert team.taken == {"w0": [0], "w1": [1, 2]}


def test_a_worker_whose_unit_runs_alone_keeps_no_other_from_taking_one():
    team = Team(units(1000, 90, 80), 100, 10)
    team.decode(9.0)
    team.scheduler.state.touched[0].alone = True  # after deaths; its worker can take no other unit now
    team.finish("w1")
    assert team.taken == {"w0": [0], "w1": [1, 2]}


def test_a_unit_of_an_early_window_that_comes_back_at_the_end_is_tried_again():
    early, last = units(*[100] * 3, windows=(0,) * 3), [UnitSize(3 + n, 4, 10, 1) for n in range(8)]
    team = Team([*early, *last], 10)
    assert team.taken["w0"] == [0]
    team.decode(9.0)
    work = team.held["w0"].pop(0)
    for _ in range(10):  # every other unit first: the lost one rests
        if len(team.taken["w0"]) == 1:
            team.tell(Failure(work.lease, work.unit, "w0", "INFRA", "store", "commit", "it broke"))
        team.decode(0.01)
        team.finish("w0")
    assert team.scheduler.remaining == 1
    team.decode(60.0)
    assert team.taken["w0"][-1] == 0
    team.finish("w0")
    assert team.scheduler.finished is not None


def test_an_idle_worker_copies_what_would_end_last_if_it_is_sooner():
    team = Team(units(1000, 900), 100, 10)
    team.decode(10.0)
    team.finish("w0")
    assert team.taken == {"w0": [0, 1], "w1": [1]}, "w1 needs another 80 s, w0 9 s"


def test_an_idle_worker_copies_nothing_that_its_holder_finishes_sooner():
    team = Team(units(1000, 900), 100, 10)
    team.decode(9.5)
    team.finish("w1")
    assert team.taken == {"w0": [0], "w1": [1]}


def test_every_share_is_in_proportion_to_the_speed_and_grows_more_certain_near_the_end():
    early = WorkLeft(waiting=1000, loads={"a": 0, "b": 0}, speeds={"a": 3.0, "b": 1.0})
    late = WorkLeft(waiting=0, loads={"a": 500, "b": 500}, speeds={"a": 3.0, "b": 1.0})
    assert (early.fitting("a"), early.fitting("b")) == (0.8 * 750, 0.8 * 250)
    assert (round(late.fitting("a")), round(late.fitting("b"))) == (0.9 * 750 - 500, 0.9 * 250 - 500)
    early.give("a", 600)
    assert early.remaining == 1000 and early.finish_s("a", 0) == 200
    assert early.is_first("b", 100) and not early.is_first("a", 100)


@pytest.mark.slow
@given(st.data())
def test_waiting_units_are_found_by_their_length_as_in_a_plain_list(data):
    sizes = units(
        *data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=30)),
        windows=tuple(sorted(data.draw(st.lists(st.integers(0, 3), min_size=30, max_size=30)))),
    )
    waiting, there = WaitingUnits(UnitSizes(sizes), 1), {size.unit for size in sizes}
    last_window = waiting._last_window
    gone: list[UnitSize] = []
    for _ in range(40):
        last = sorted((-sizes[u].tokens, u) for u in there if sizes[u].window >= last_window)
        what = data.draw(st.sampled_from(["take", "fitting", "back", "done"]))
        if what == "take":
            expected = waiting.next_tokens()
            taken = waiting.take()
            assert (taken is None) == (not there)
            assert taken is None or (taken in there and sizes[taken].tokens == expected)
        elif what == "fitting":
            limit = data.draw(st.integers(0, 21))
            fits = [unit for tokens, unit in last if -tokens <= limit]
            taken = waiting.take_fitting(limit)
            assert (taken is None) == (not fits)
            assert taken is None or (taken in fits and sizes[taken].tokens == sizes[fits[0]].tokens)
        else:
            taken = None
            if what == "back" and gone:
                size = gone.pop()
                waiting.put(size.unit)
                there.add(size.unit)
            elif what == "done" and there:
                finished = data.draw(st.sampled_from(sorted(there)))
                waiting.discard(finished)
                waiting.discard(finished)
                there.discard(finished)
        if taken is not None:
            there.discard(taken)
            gone.append(sizes[taken])
        assert sorted(waiting) == sorted(there) and waiting.tokens == sum(sizes[unit].tokens for unit in there)
        ends = [sizes[u].tokens for u in there if sizes[u].window >= last_window]
        assert waiting.shortest() == min(ends, default=None)
        assert waiting.is_last == bool(there and all(sizes[u].window >= last_window for u in there))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=20), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_some_worker_always_takes_a_unit_that_waits(tokens, speeds):
    sizes = units(*tokens)
    waiting = WaitingUnits(UnitSizes(sizes), len(speeds))
    loads = {f"w{number}": 0.0 for number in range(len(speeds))}
    known = {f"w{number}": float(speed) for number, speed in enumerate(speeds)}
    view = WorkLeft(sum(tokens), loads, known)
    taken: list[int] = []
    while waiting:
        found = [(name, unit) for name in loads if (unit := fitting_unit(waiting, view, name)) is not None]
        assert found, "units wait and nobody takes one"
        for name, unit in found:
            view.give(name, sizes[unit].tokens)
            taken.append(unit)
    assert sorted(taken) == list(range(len(tokens)))


def windows(*tokens: list[int]) -> list[UnitSize]:
    """Units of windows, numbered through."""
    found: list[UnitSize] = []
    for window, lengths in enumerate(tokens):
        found += [UnitSize(len(found) + n, 1, length, window) for n, length in enumerate(lengths)]
    return found


def dealt(units: list[UnitSize], workers: int) -> list[int]:
    waiting = WaitingUnits(UnitSizes(units), workers)
    return [unit for _ in units if (unit := waiting.take()) is not None]


def test_windows_come_one_after_the_other_and_the_last_ones_as_one():
    units = windows([9, 5], [7, 8], [3, 6] * LAST_UNITS, [1])
    in_the_end = sorted(units[4:], key=lambda size: (-size.tokens, size.unit))
    assert dealt(units, workers=2) == [0, 1, 2, 3, *(size.unit for size in in_the_end)]


def test_with_few_units_for_each_worker_the_longest_of_all_come_first():
    units = windows([9, 5], [7, 8], [3, 6])
    assert dealt(units, workers=1) == [0, 3, 2, 5, 1, 4]


def test_nowhere_but_at_the_end_does_a_long_unit_follow_a_short_one():
    rng = random.Random(0)
    units = windows(*([100 + n + rng.randint(0, 3) for n in range(0, 400, 10)] for _ in range(20)))
    tokens = [units[number].tokens for number in dealt(units, workers=4)]
    assert max(abs(after - before) for before, after in pairwise(tokens)) < 20


def test_units_that_are_done_are_passed_over_and_those_that_come_back_have_their_turn():
    units = windows(*([5, 4, 3] for _ in range(9)))
    waiting = WaitingUnits(UnitSizes(units), workers=1)
    assert [waiting.take() for _ in range(4)] == [0, 1, 2, 5]
    waiting.discard(4)
    waiting.put(1)
    assert [waiting.take() for _ in range(3)] == [1, 3, 6]
    for unit in range(27):
        waiting.discard(unit)
    assert not waiting and waiting.take() is None and waiting.tokens == 0


@pytest.mark.parametrize(("wanted", "first"), [(1, 2), (2, 1), (3, 1), (4, 0), (99, 0)])
def test_the_last_windows_are_as_many_as_it_takes(wanted, first):
    assert first_of_last([0, 0, 1, 1, 2], wanted) == first


@pytest.mark.parametrize("workers", [1, 4, 16, 64])
@pytest.mark.parametrize("last", [1, 5, 64])
def test_the_end_of_a_job_is_as_good_as_if_the_longest_of_all_had_come_first(workers, last):
    rng = random.Random(workers * 100 + last)
    tokens = [sorted((rng.randint(10, 1000) for _ in range(64)), reverse=True) for _ in range(40)]
    units = windows(*tokens[:-1], [1000, *tokens[-1][: last - 1]])  # the last window may be short, and of long ones
    costs = [float(units[number].tokens) for number in dealt(units, workers)]
    assert refill_makespan(costs, workers) <= 1.02 * makespan_bound(costs, workers)


def test_sizes_are_a_mapping_in_the_order_of_the_units():
    rng = random.Random(0)
    sizes = [UnitSize(unit, rng.randint(1, 9), rng.getrandbits(40), rng.randint(0, 5)) for unit in range(0, 999, 3)]
    plain = {size.unit: size for size in sizes}
    for order in (sizes, rng.sample(sizes, len(sizes))):
        found = UnitSizes(order)
        assert dict(found) == plain and list(found) == sorted(plain) and len(found) == len(plain)
        assert found.rows == sum(size.rows for size in sizes)
        assert 1 not in found and -3 not in found and found.get(10**6) is None
    with pytest.raises(KeyError):
        UnitSizes(sizes)[1]
    with pytest.raises(AssertionError):
        UnitSizes([sizes[0], sizes[0]])
