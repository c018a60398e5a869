"""Sweeps on a real Ray: the same processes work for every case and load each model once; a dead one is replaced."""

import os
import signal

import pytest

from draftmill.jobs.cli import main
from draftmill.jobs.sweep.sweep import SweepSession
from draftmill.storage.runs.metric_files import read_metrics
from draftmill.storage.stores.store import open_store
from tests.runs.jobs_of_tests import logged, rows_of
from tests.runs.test_sweep import write_sweep as write_sweep_of

pytestmark = pytest.mark.ray


@pytest.mark.slow
def test_a_dead_worker_is_replaced_a_too_large_case_fails_alone(ray_session, tmp_path, monkeypatch, capsys):
    cases: dict = {f"c{n}": {"decoder.k": 1 + n} for n in range(3)}
    original = SweepSession.decode
    killed: list[int] = []

    def killing(session: SweepSession, case, **options) -> None:
        original(session, case, **options)
        if case.name == "c0":
            killed.append(logged(tmp_path / "out" / "cases" / "c0", "worker_up")[0]["pid"])
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(SweepSession, "decode", killing)
    file = write_sweep_of(tmp_path, cases | {"large": {"workers.gpus": 8}}, output={"unit_rows": 3})
    file.write_text(file.read_text() + "metrics: [entropy]\n")
    assert main(["sweep", str(file), "--quiet"]) == 2
    assert (
        "large: workers: a worker needs 8 GPUs and 1 CPU on one node; the nodes have (2 CPUs)"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "out" / "cases" / "large").exists()
    assert len(killed) == 1
    for name in cases:
        table = read_metrics(open_store(str(tmp_path / "out" / "cases" / name)))
        assert table is not None and table.num_rows == 12, (
            "the workers that decode have made room for those that measure"
        )
    assert all(rows_of(tmp_path / "out" / "cases" / name).num_rows == 12 for name in cases)
    found = {name: logged(tmp_path / "out" / "cases" / name, "worker_up") for name in cases}
    later = [up for name in ("c1", "c2") for up in found[name]]
    assert killed[0] not in {up["pid"] for up in later}
    kept = {up["pid"] for up in found["c0"]} - {killed[0]}
    assert kept <= {up["pid"] for up in later}
    assert not any("model" in up["loaded"] for up in later if up["pid"] in kept), "it has the model already"
