"""The scheduler as a state machine: hand-written stories, then random ones in a simulated world with poisoned rows."""

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmill.actors.messages import CHANGED_INPUT, MOST_UNITS, STORE_FULL, Failure, NodeLeaving, WorkerLost, WorkUnit
from draftmill.jobs.schedule import unit_leases
from draftmill.jobs.schedule.events import (
    Assign,
    Command,
    Drain,
    Event,
    Finish,
    KillWorker,
    LetGo,
    MoreRoom,
    Quarantine,
    Revoke,
    StartWorker,
    Tick,
)
from draftmill.jobs.schedule.scheduler import Scheduler
from draftmill.jobs.schedule.unit_leases import Limits
from draftmill.jobs.schedule.units import UnitSize
from tests.jobs.schedule.integrity import check_integrity
from tests.jobs.schedule.reports import answered, probe_done, unit_done, worker_up


def sizes(*tokens: int, rows: int = 4) -> list[UnitSize]:
    return [UnitSize(unit, rows, cost) for unit, cost in enumerate(tokens)]


def started(scheduler: Scheduler) -> list[Command]:
    """Bring up every worker that the scheduler asks for first; returns what follows."""
    commands = scheduler.on(Tick(0.0))
    return [c for start in commands if isinstance(start, StartWorker) for c in scheduler.on(worker_up(start.worker))]


def assigned(commands: list[Command]) -> list[tuple[str, int]]:
    return [(c.worker, c.unit.unit) for c in commands if isinstance(c, Assign)]


def units_of(commands: list[Command]) -> list[WorkUnit]:
    return [c.unit for c in commands if isinstance(c, Assign)]


def failure(work: WorkUnit, kind: str = "TASK") -> Failure:
    assert kind in {"TASK", "INFRA"}
    return Failure(work.lease, work.unit, "w0", kind, "boom", "decode", "it broke")  # type: ignore[arg-type]


def holding(scheduler: Scheduler, *, spent: int) -> list[WorkUnit]:
    """Bring up w0 and let it hold the units that it gets, of which the first `spent` have got their slots."""
    held = units_of(started(scheduler))
    while len(held) <= spent:
        held += units_of(scheduler.on(answered("w0", tuple(work.lease for work in held))))
    return held


def test_a_worker_on_a_machine_that_goes_ends_before_it_and_its_unit_goes_elsewhere_without_suspicion():
    scheduler = Scheduler(sizes(5, 4), workers=1)
    (first,) = units_of(started(scheduler))
    assert scheduler.on(NodeLeaving("w0", left_s=30.0)) == [StartWorker("w1")]
    assert scheduler.on(Tick(24.0)) == []
    assert scheduler.on(Tick(25.5)) == [LetGo("w0", lost=True)]
    (again,) = units_of(scheduler.on(worker_up("w1")))
    assert (again.unit, again.attempt) == (first.unit, 1)
    assert scheduler.on(WorkerLost("w0", "its node is gone")) == []
    scheduler = Scheduler(sizes(5), workers=1)
    started(scheduler)
    scheduler.on(NodeLeaving("w0", left_s=2.0))
    assert scheduler.on(Tick(0.9)) == []
    assert scheduler.on(Tick(1.0)) == [LetGo("w0", lost=True)], "half of a short time is for the work"
    scheduler = Scheduler(sizes(5), workers=1)
    started(scheduler)
    scheduler.on(NodeLeaving("w0"))
    assert scheduler.on(Tick(500.0)) == [], "an unknown end is waited for"


def test_workers_without_units_end_where_machines_come_and_go_and_are_not_started_again():
    scheduler = Scheduler(sizes(5, 5, 5, 5), workers=4, limits=Limits(idle_s=20.0, lease_s=10**6))
    held = units_of(started(scheduler))
    assert len(held) == 4
    for work in held[1:]:
        scheduler.on(unit_done(work.lease, work.unit))
    # one unit is left; one of the idle workers has taken a copy of it
    busy = {lease.worker for lease in scheduler.state.leases.values()}
    assert len(busy) == 2
    assert scheduler.on(Tick(1.0)) == []
    assert scheduler.on(Tick(20.9)) == []
    gone = [command.worker for command in scheduler.on(Tick(21.1)) if isinstance(command, LetGo)]
    assert len(gone) == 2 and not busy & set(gone)
    assert scheduler.on(Tick(100.0)) == [], "no worker is started again, and none that holds a unit ends"
    check_integrity(scheduler.state)
    assert scheduler.on(unit_done(held[0].lease, held[0].unit))[-1] == Finish("done")


def test_as_many_workers_stay_as_units_are_left_even_if_these_rest():
    scheduler = Scheduler(sizes(5, 5), workers=2, limits=Limits(idle_s=1.0, rest_s=50.0))
    held = units_of(started(scheduler))
    again = [units_of(scheduler.on(failure(work)))[0] for work in held]  # units that have failed are not copied
    assert [scheduler.on(failure(work, "INFRA")) for work in again] == [[], []]
    assert not [command for now_s in (1.0, 3.0, 40.0) for command in scheduler.on(Tick(now_s))]
    assert len(assigned(scheduler.on(Tick(51.0)))) == 2


def test_workers_that_still_start_end_too_once_no_unit_is_left_for_them():
    scheduler = Scheduler(sizes(5, 5, 5), workers=3, limits=Limits(idle_s=20.0))
    assert [type(command) for command in scheduler.on(Tick(0.0))] == [StartWorker] * 3
    (first, ahead) = units_of(scheduler.on(worker_up("w0")) + scheduler.on(answered("w0", (0,))))
    for work in (first, ahead):
        scheduler.on(unit_done(work.lease, work.unit))
    assert scheduler.on(Tick(1.0)) == []
    assert scheduler.on(Tick(30.0)) == [LetGo("w2"), LetGo("w1")]


def test_idle_workers_stay_where_machines_do_not_come_and_go():
    scheduler = Scheduler(sizes(5, 5, 5), workers=3)
    for work in units_of(started(scheduler))[1:]:
        scheduler.on(unit_done(work.lease, work.unit))
    assert scheduler.on(Tick(500.0)) == []


def test_the_longest_units_go_first_and_the_next_one_when_most_samples_have_a_slot():
    scheduler = Scheduler(sizes(5, 9, 7), workers=1)
    (first,) = units_of(started(scheduler))
    assert first.unit == 1
    assert scheduler.on(answered("w0")) == []
    (second,) = units_of(scheduler.on(answered("w0", (first.lease,))))
    assert second.unit == 2
    assert scheduler.on(answered("w0", (first.lease,))) == []
    assert assigned(scheduler.on(answered("w0", (first.lease, second.lease)))) == [("w0", 0)]


def test_a_worker_never_holds_more_than_a_few_units():
    scheduler = Scheduler(sizes(*[5] * 9), workers=1)
    held = holding(scheduler, spent=MOST_UNITS - 1)
    assert len(held) == MOST_UNITS
    assert scheduler.on(answered("w0", tuple(work.lease for work in held))) == []


def test_a_worker_that_reports_a_lease_it_has_lost_gets_nothing_for_it():
    scheduler = Scheduler(sizes(9, 8, 7), workers=1)
    (first,) = units_of(started(scheduler))
    (second,) = units_of(scheduler.on(unit_done(first.lease, first.unit)))
    assert scheduler.on(answered("w0", (first.lease,))) == []
    assert assigned(scheduler.on(answered("w0", (first.lease, second.lease)))) == [("w0", 2)]


def test_no_more_workers_are_started_than_units_remain():
    commands = Scheduler(sizes(5, 6), workers=8).on(Tick(0.0))
    assert commands == [StartWorker("w0"), StartWorker("w1")]


def test_where_there_is_more_room_more_workers_are_started_but_never_fewer_wanted():
    scheduler = Scheduler(sizes(9, 8, 7, 6), workers=1)
    started(scheduler)
    assert scheduler.on(MoreRoom(3)) == [StartWorker("w1"), StartWorker("w2")]
    assert scheduler.on(MoreRoom(2)) == [] and scheduler.wanted == 3
    assert scheduler.on(MoreRoom(9)) == [StartWorker("w3")], "no more than units remain"


def test_a_job_without_units_is_done_at_once():
    assert Scheduler([], workers=1).on(Tick(0.0)) == [Finish("done")]


def test_the_job_is_done_when_the_last_unit_is():
    scheduler = Scheduler(sizes(5, 6), workers=1)
    first, second = holding(scheduler, spent=1)
    assert scheduler.on(unit_done(first.lease, first.unit)) == []
    assert scheduler.on(unit_done(second.lease, second.unit)) == [Finish("done")]
    assert scheduler.on(Tick(9.0)) == []


def test_an_idle_worker_takes_a_copy_and_the_loser_is_told_to_forget_it():
    scheduler = Scheduler(sizes(9, 8), workers=2)
    work = {a.unit: a for a in units_of(started(scheduler))}
    commands = scheduler.on(unit_done(work[1].lease, 1))
    (copy,) = units_of(commands)
    assert copy.unit == 0 and copy.lease != work[0].lease
    assert scheduler.on(unit_done(copy.lease, 0)) == [Revoke("w0", work[0].lease), Finish("done")]


def test_a_unit_that_has_failed_is_not_copied_but_tried_again_until_its_rows_are_examined():
    scheduler = Scheduler(sizes(9, 8), workers=2, limits=Limits(attempts=2))
    work = {unit.unit: unit for unit in units_of(started(scheduler))}
    (copy,) = units_of(scheduler.on(unit_done(work[1].lease, 1)))
    assert scheduler.on(failure(work[0])) == []
    assert [probe.probe for probe in units_of(scheduler.on(failure(copy)))] == [True, True]


def test_a_dead_worker_is_replaced_and_its_units_are_leased_again():
    scheduler = Scheduler(sizes(9, 8), workers=1)
    holding(scheduler, spent=1)
    assert scheduler.on(WorkerLost("w0", "killed")) == [StartWorker("w1")]
    (first,) = units_of(scheduler.on(worker_up("w1")))
    (second,) = units_of(scheduler.on(answered("w1", (first.lease,))))
    assert [(work.unit, work.attempt) for work in (first, second)] == [(0, 2), (1, 2)]


def test_a_unit_that_took_two_workers_with_it_runs_alone_and_its_neighbour_is_cleared():
    scheduler = Scheduler(sizes(9, 8), workers=1)
    started(scheduler)
    scheduler.on(WorkerLost("w0", "killed"))
    scheduler.on(worker_up("w1"))
    scheduler.on(WorkerLost("w1", "killed"))
    (only,) = units_of(scheduler.on(worker_up("w2")))
    assert not only.probe
    (other,) = units_of(scheduler.on(unit_done(only.lease, only.unit)))
    assert {only.unit, other.unit} == {0, 1}


@pytest.mark.parametrize("device", [False, True], ids=["process", "device"])
def test_bisection_finds_the_row_that_kills_and_the_others_come_back(device):
    scheduler = Scheduler(sizes(9, rows=8), workers=1)
    commands, probes, deaths, now_s = started(scheduler), 0, 0, 0.0
    while not (units_of(commands) and units_of(commands)[0].verdicts):
        works = units_of(commands)
        probes += sum(work.probe for work in works)
        if not works:  # it rests
            now_s += 10.0
            commands = scheduler.on(Tick(now_s))
        elif works[0].start <= 5 < works[0].stop:
            deaths += 1
            holder = next(lease.worker for lease in scheduler.state.leases.values())
            (start,) = scheduler.on(WorkerLost(holder, "device-side assert", device=device))[-1:]
            assert isinstance(start, StartWorker)
            commands = scheduler.on(worker_up(start.worker))
        else:
            commands = scheduler.on(probe_done(works[0].lease))
        check_integrity(scheduler.state)
    (work,) = units_of(commands)
    (verdict,) = work.verdicts
    assert (verdict.start, verdict.stop, verdict.kind) == (5, 6, "worker_died")
    assert "device-side assert" in verdict.message and probes <= 8
    if device:  # two on the machines' account, three of the whole unit, then by halves, the last one twice
        assert deaths == 5 + 4
    else:
        assert now_s == 0.0
    assert scheduler.on(unit_done(work.lease, work.unit)) == [Finish("done")]


def test_a_lost_device_is_the_machines_fault_and_its_units_rest_and_go_elsewhere():
    scheduler = Scheduler(sizes(9, 8), workers=1)
    holding(scheduler, spent=1)
    assert scheduler.on(WorkerLost("w0", "illegal memory access", device=True)) == [StartWorker("w1")]
    assert not units_of(scheduler.on(worker_up("w1")))
    (first,) = units_of(scheduler.on(Tick(1.0)))
    (second,) = units_of(scheduler.on(answered("w1", (first.lease,))))
    assert [(work.unit, work.attempt) for work in (first, second)] == [(0, 2), (1, 2)]
    assert not any(unit.suspect for unit in scheduler.state.touched.values())


def test_task_failures_are_retried_and_then_the_guilty_row_is_quarantined():
    scheduler = Scheduler(sizes(9, rows=2), workers=1, limits=Limits(attempts=2))
    (work,) = units_of(started(scheduler))
    (work,) = units_of(scheduler.on(failure(work)))
    assert (work.attempt, work.probe) == (2, False)
    (work,) = units_of(scheduler.on(failure(work)))
    quarantined = []
    while work.probe:
        guilty = work.start == 0
        commands = scheduler.on(failure(work) if guilty else probe_done(work.lease))
        quarantined += [c for c in commands if isinstance(c, Quarantine)]
        (work,) = units_of(commands)
    assert [(q.rows.start, q.rows.stop, q.rows.kind) for q in quarantined] == [(0, 1, "boom")]


def test_infra_failures_rest_longer_each_time_and_have_their_own_bound():
    scheduler = Scheduler(sizes(9), workers=1, limits=Limits(infra=3))
    (work,) = units_of(started(scheduler))
    assert scheduler.on(failure(work, "INFRA")) == []
    assert scheduler.on(Tick(0.5)) == []
    (work,) = units_of(scheduler.on(Tick(1.0)))
    assert scheduler.on(failure(work, "INFRA")) == []
    assert scheduler.on(Tick(2.5)) == []
    (work,) = units_of(scheduler.on(Tick(3.0)))
    (finish,) = scheduler.on(failure(work, "INFRA"))
    assert isinstance(finish, Finish) and finish.how == "failed" and "it broke" in finish.message


def test_a_full_disk_is_tried_three_times_and_ends_the_job_with_its_own_word():
    scheduler = Scheduler(sizes(9), workers=1, limits=Limits(rest_s=0.0))
    (work,) = units_of(started(scheduler))
    for attempt in (1, 2):
        assert scheduler.on(replace(failure(work, "INFRA"), error_kind=STORE_FULL)) == []
        (work,) = units_of(scheduler.on(Tick(float(attempt))))
    (finish,) = scheduler.on(replace(failure(work, "INFRA"), error_kind=STORE_FULL))
    assert isinstance(finish, Finish) and finish.how == "full" and finish.message.endswith("failed 3 times: it broke")


def test_a_changed_input_ends_the_job_at_once():
    scheduler = Scheduler(sizes(9), workers=1, limits=Limits())
    (work,) = units_of(started(scheduler))
    (finish,) = scheduler.on(replace(failure(work, "INFRA"), error_kind=CHANGED_INPUT))
    assert isinstance(finish, Finish) and finish.how == "unusable" and finish.message == "it broke"


def test_a_worker_that_is_not_heard_of_is_killed_and_its_late_answer_still_counts():
    scheduler = Scheduler(sizes(9), workers=1, limits=Limits(lease_s=10.0))
    (work,) = units_of(started(scheduler))
    scheduler.on(Tick(9.0))
    scheduler.on(answered("w0"))
    assert scheduler.on(Tick(15.0)) == []
    kill, start = scheduler.on(Tick(20.0))
    assert isinstance(kill, KillWorker) and kill.worker == "w0" and start == StartWorker("w1")
    assert scheduler.on(unit_done(work.lease, work.unit)) == [Finish("done")]


def test_a_worker_that_answers_but_gets_nowhere_is_killed_too():
    scheduler = Scheduler(sizes(9), workers=1, limits=Limits(lease_s=10.0))
    started(scheduler)
    scheduler.on(Tick(9.0))
    scheduler.on(answered("w0", moved=False))
    kill, _ = scheduler.on(Tick(10.5))
    assert isinstance(kill, KillWorker) and kill.reason == "no progress for 10 s"


def test_workers_that_never_start_end_the_job():
    scheduler = Scheduler(sizes(9), workers=1, limits=Limits(starts=2))
    scheduler.on(Tick(0.0))
    assert scheduler.on(WorkerLost("w0", "no such model")) == [StartWorker("w1")]
    (finish,) = scheduler.on(WorkerLost("w1", "no such model"))
    assert finish == Finish("failed", "workers can't start: no such model")


def test_a_worker_that_hangs_at_its_start_is_replaced_and_in_the_end_done_without():
    scheduler = Scheduler(sizes(9, 8, 7, 6), workers=2, limits=Limits(starts=1, start_s=100.0, lease_s=1e6))
    assert scheduler.on(Tick(0.0)) == [StartWorker("w0"), StartWorker("w1")]
    scheduler.on(Tick(50.0))
    scheduler.on(worker_up("w0"))
    assert scheduler.on(Tick(99.0)) == []
    assert scheduler.on(Tick(100.5)) == [KillWorker("w1", "not up after 100 s"), StartWorker("w2")]
    assert scheduler.on(Tick(200.0)) == []
    assert scheduler.on(Tick(201.0)) == [KillWorker("w2", "not up after 100 s")], "w0 goes on alone"
    assert scheduler.wanted == 1 and scheduler.finished is None
    check_integrity(scheduler.state)


def test_a_job_none_of_whose_workers_comes_up_ends():
    scheduler = Scheduler(sizes(9, 8), workers=2, limits=Limits(starts=1, start_s=100.0))
    scheduler.on(Tick(0.0))
    assert scheduler.on(Tick(101.0))[-1] == Finish("failed", "workers can't start: not up after 100 s")


def test_draining_keeps_the_units_that_run_and_gives_back_the_next():
    scheduler = Scheduler(sizes(9, 8, 7), workers=1)
    first, second, third = holding(scheduler, spent=2)
    assert scheduler.on(Drain()) == [Revoke("w0", third.lease)]
    assert scheduler.on(unit_done(first.lease, first.unit)) == []
    assert scheduler.on(unit_done(second.lease, second.unit)) == [Finish("drained")]


def test_a_worker_whose_machine_is_to_go_ends_what_runs_while_another_takes_the_rest():
    scheduler = Scheduler(sizes(9, 8, 7), workers=1)
    first, second, third = holding(scheduler, spent=2)
    assert scheduler.on(NodeLeaving("w0")) == [Revoke("w0", third.lease), StartWorker("w1")]
    assert scheduler.on(NodeLeaving("w0")) == []
    assert assigned(scheduler.on(worker_up("w1"))) == [("w1", third.unit)]
    assert scheduler.on(unit_done(first.lease, first.unit)) == []
    assert scheduler.on(unit_done(second.lease, second.unit)) == [LetGo("w0")]
    assert scheduler.on(WorkerLost("w0", "its node is gone")) == []


def test_an_idle_worker_whose_machine_is_to_go_is_let_go_at_once():
    scheduler = Scheduler(sizes(9), workers=1)
    scheduler.on(Tick(0.0))
    assert scheduler.on(NodeLeaving("w0")) == [LetGo("w0"), StartWorker("w1")]


def test_units_that_were_lost_with_a_machine_that_had_to_go_are_under_no_suspicion():
    scheduler = Scheduler(sizes(9), workers=1)
    scheduler.on(Tick(0.0))
    for round_ in range(20):
        (work,) = units_of(scheduler.on(worker_up(f"w{round_}")))
        assert work.attempt == 1
        scheduler.on(NodeLeaving(f"w{round_}"))
        scheduler.on(WorkerLost(f"w{round_}", "its node is gone"))
    assert not scheduler.state.touched[0].suspect and scheduler.finished is None


def test_workers_that_were_dead_before_a_row_reached_them_do_not_speak_against_it():
    scheduler = Scheduler(sizes(9, rows=1), workers=1, limits=Limits(attempts=1))
    (work,) = units_of(started(scheduler))
    (probe,) = units_of(scheduler.on(failure(work)))
    for round_ in range(10):
        assert probe.probe
        assert scheduler.on(WorkerLost(f"w{round_}", "its node is gone", idle=True)) == [StartWorker(f"w{round_ + 1}")]
        (probe,) = units_of(scheduler.on(worker_up(f"w{round_ + 1}")))
    (work,) = units_of(scheduler.on(probe_done(probe.lease)))
    assert not work.verdicts


def test_workers_that_keep_dying_with_nothing_in_hand_end_the_job():
    scheduler = Scheduler(sizes(9), workers=1, limits=Limits(fruitless=4))
    started(scheduler)
    for round_ in range(3):
        scheduler.on(WorkerLost(f"w{round_}", "out of memory", idle=True))
        scheduler.on(worker_up(f"w{round_ + 1}"))
    assert scheduler.on(WorkerLost("w3", "out of memory", idle=True)) == [
        Finish("failed", "workers keep dying: out of memory")
    ]


def test_at_the_end_of_a_job_what_may_be_lost_is_copied_first():
    scheduler = Scheduler(sizes(9, 8), workers=2)
    held = dict(assigned(started(scheduler)))
    scheduler.on(NodeLeaving("w1"))
    assert assigned(scheduler.on(worker_up("w2"))) == [("w2", held["w1"])]


def test_draining_an_idle_job_ends_it_at_once():
    scheduler = Scheduler(sizes(9), workers=1)
    scheduler.on(Tick(0.0))
    assert scheduler.on(Drain()) == [Finish("drained")]


class World:
    """Workers that decode, die and lie, around a real scheduler; every choice is drawn."""

    def __init__(self, scheduler: Scheduler, poison: set[tuple[int, int]]) -> None:
        self.scheduler = scheduler
        self.poison = poison
        self.now_s = 0.0
        self.starting: list[str] = []
        self.up: dict[str, list[WorkUnit]] = {}
        self.dead: set[str] = set()  # died with nothing in hand, and nobody knows
        self.zombies: list[WorkUnit] = []  # leases of workers that are written off and may still write
        self.commits: Counter[int] = Counter()
        self.verdicts: dict[int, set[int]] = {}
        self.quarantined: set[tuple[int, int]] = set()
        self.faults = 0
        self.idle_deaths = 0

    def tell(self, event: Event) -> None:
        commands = self.scheduler.on(event)
        for command in commands:
            self.obey(command)
        if self.scheduler.finished is None:
            check_integrity(self.scheduler.state)
        while found := sorted(name for name in self.dead if self.up.get(name)):
            name = found[0]
            self.dead.discard(name)
            del self.up[name]
            self.tell(WorkerLost(name, "its node is gone", idle=True))

    def obey(self, command: Command) -> None:
        if isinstance(command, StartWorker):
            self.starting.append(command.worker)
        elif isinstance(command, Assign):
            self.up[command.worker].append(command.unit)
            assert len(self.up[command.worker]) <= MOST_UNITS
        elif isinstance(command, Revoke):
            held = self.up[command.worker]
            self.up[command.worker] = [work for work in held if work.lease != command.lease]
        elif isinstance(command, LetGo):
            assert not self.up.pop(command.worker, [])
        elif isinstance(command, KillWorker) and command.worker in self.starting:
            self.starting.remove(command.worker)
        elif isinstance(command, KillWorker):
            self.zombies += [work for work in self.up.pop(command.worker) if not self.is_poisoned(work)]
        elif isinstance(command, Quarantine):
            self.quarantined |= {(command.unit, row) for row in range(command.rows.start, command.rows.stop)}

    def is_poisoned(self, work: WorkUnit) -> bool:
        spared = {row for verdict in work.verdicts for row in range(verdict.start, verdict.stop)}
        return any((work.unit, row) in self.poison for row in range(work.start, work.stop) if row not in spared)

    def die(self, worker: str) -> None:
        del self.up[worker]
        self.tell(WorkerLost(worker, "segfault"))

    def work(self, worker: str) -> None:
        """The worker ends its oldest unit, or dies of it."""
        work = self.up[worker][0]
        if self.is_poisoned(work):
            return self.die(worker)
        self.up[worker].pop(0)
        return self.answer(work)

    def answer(self, work: WorkUnit) -> None:
        if work.probe:
            self.tell(probe_done(work.lease))
            return
        if not self.commits[work.unit]:  # conditional creation: the first file stays
            self.commits[work.unit] += 1
            self.verdicts[work.unit] = {row for v in work.verdicts for row in range(v.start, v.stop)}
        self.tell(unit_done(work.lease, work.unit))

    def fail(self, worker: str, kind: str) -> None:
        self.tell(failure(self.up[worker].pop(0), kind))

    def tick(self, seconds: float) -> None:
        self.now_s += seconds
        self.tell(Tick(self.now_s))


def random_step(world: World, data: st.DataObject) -> None:
    """One thing happens: mostly progress, sometimes a fault."""
    busy = sorted(name for name, held in world.up.items() if held)
    choices = ["tick"] + ["start"] * 3 * bool(world.starting) + (["work"] * 4 + ["report"] * 3) * bool(busy)
    idle = sorted(world.up.keys() - set(busy) - world.dead)
    choices += ["die idle"] * bool(idle and world.idle_deaths < 6)
    faults = ["die", "leave"] * bool(world.up) + ["fail", "stall"] * bool(busy) + ["zombie"] * bool(world.zombies)
    choice = data.draw(st.sampled_from(choices + (faults if world.faults < 6 else [])))
    world.faults += choice in {"die", "leave", "fail", "stall"}
    if choice == "tick":
        world.tick(data.draw(st.sampled_from([0.0, 0.3, 2.0])))
    elif choice == "start":
        name = world.starting.pop(0)
        world.up[name] = []
        world.tell(worker_up(name))
    elif choice == "work":
        world.work(data.draw(st.sampled_from(busy)))
    elif choice == "report":
        name = data.draw(st.sampled_from(busy))
        held = [work.lease for work in world.up[name]]
        spent, tokens = held[: data.draw(st.integers(0, len(held)))], data.draw(st.sampled_from([0, 1, 5, 100]))
        world.tell(answered(name, tuple(spent), tokens=tokens))
    elif choice == "die":
        world.die(data.draw(st.sampled_from(sorted(world.up))))
    elif choice == "die idle":
        world.idle_deaths += 1
        world.dead.add(data.draw(st.sampled_from(idle)))
    elif choice == "leave":
        world.tell(NodeLeaving(data.draw(st.sampled_from(sorted(world.up)))))
    elif choice == "fail":
        world.fail(data.draw(st.sampled_from(busy)), data.draw(st.sampled_from(["TASK", "INFRA"])))
    elif choice == "stall":
        world.tick(1000.0)
    elif choice == "zombie":
        world.answer(world.zombies.pop(0))


def fair_end(world: World) -> None:
    """From here on nothing goes wrong but what is poisoned."""
    for _ in range(3000):
        if world.scheduler.finished is not None:
            return
        world.tick(0.5)
        for name in list(world.up):
            world.tell(answered(name, tuple(work.lease for work in world.up[name]), tokens=int(name[1:]) % 3))
        while world.starting:
            name = world.starting.pop()
            world.up[name] = []
            world.tell(worker_up(name))
        for name in sorted(world.up):
            if world.up.get(name):
                world.work(name)
    raise AssertionError("the job does not end")


@settings(deadline=None)
@given(st.data())
def test_whatever_happens_every_unit_is_committed_once_and_only_the_guilty_are_quarantined(data):
    rows = data.draw(st.integers(1, 6))
    units = [UnitSize(n, rows, data.draw(st.integers(1, 9)), n // 3) for n in range(data.draw(st.integers(1, 6)))]
    cells = st.tuples(st.integers(0, len(units) - 1), st.integers(0, rows - 1))
    world = World(Scheduler(units, workers=data.draw(st.integers(1, 4))), data.draw(st.sets(cells, max_size=3)))
    with patch.object(unit_leases, "KNOWN_S", data.draw(st.sampled_from([0.1, 5.0]))):  # speeds may matter soon
        world.tick(0.0)
        for _ in range(data.draw(st.integers(0, 40))):
            if world.scheduler.finished is None:
                random_step(world, data)
        fair_end(world)
    assert world.scheduler.finished == Finish("done")
    assert world.commits == Counter({unit.unit: 1 for unit in units})
    blamed = {(unit, row) for unit, found in world.verdicts.items() for row in found}
    assert blamed >= world.poison
    if not world.faults:
        assert blamed == world.poison


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_the_same_events_give_the_same_commands(data):
    units = sizes(*data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)))
    log: list[tuple[Event, list[Command]]] = []
    scheduler = Scheduler(units, workers=2)
    world = World(scheduler, set())
    plain_on = scheduler.on

    def recorded(event: Event) -> list[Command]:
        log.append((event, plain_on(event)))
        return log[-1][1]

    scheduler.on = recorded  # type: ignore[method-assign]
    world.tick(0.0)
    for _ in range(20):
        if scheduler.finished is None:
            random_step(world, data)
    twin = Scheduler(units, workers=2)
    assert [twin.on(event) for event, _ in log] == [commands for _, commands in log]


def test_many_units_are_taken_in_and_dealt_out():
    scheduler = Scheduler((UnitSize(unit, 1, unit % 1000) for unit in range(100_000)), workers=4)
    work = units_of(started(scheduler))
    for _ in range(1000):
        work += units_of(scheduler.on(unit_done(work[0].lease, work.pop(0).unit)))
    assert scheduler.remaining == 99_000
