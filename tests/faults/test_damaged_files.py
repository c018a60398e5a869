"""Commands over damaged and odd files of every kind: they end as documented, within 10 s of CPU time and 1 GB of memory.

In the short suite some dozens of files, with `--soak` a third of all, which is more than 2,000.
"""

import multiprocessing

import pytest

from tests.faults.damaged_files import KINDS, cases, make_world
from tests.faults.damaged_jobs import endings, serve
from tests.runs.jobs_of_tests import forked

FEW, MANY = 150, 3
"""One file in so many is tried, in the short suite and by `make soak`."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("world")
    maker = multiprocessing.get_context("spawn").Process(target=make_world, args=(folder,))
    maker.start()
    maker.join()
    assert maker.exitcode == 0
    return folder


def problems(world, kind: str, part: str):
    """What is wrong with the endings of a share of the files of a kind."""
    result = world / f"{kind}.jsonl"
    server = forked(serve, str(world), kind, str(result), part)
    server.join()
    assert server.exitcode == 0
    for ending in endings(result):
        if ending["problem"]:
            yield "\n  ".join([f"{ending['case']}: {ending['problem']}", ending["command"], ending["err"][-300:]])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_ends_as_documented(world, kind):
    assert not list(problems(world, kind, f"0/{FEW}"))


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_every_third_damaged_file_ends_as_documented(world, kind):
    assert not list(problems(world, kind, f"0/{MANY}"))


@pytest.mark.slow
def test_make_soak_tries_at_least_2000_files(world):
    assert sum(len(cases(world, kind)[::MANY]) for kind in KINDS) >= 2000
