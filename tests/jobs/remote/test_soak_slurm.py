"""The batch script on a real Slurm with two virtual nodes: Ray over both, a real job, requeues that resume, and cancelling."""

import sys
from contextlib import chdir
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from draftmill.jobs.cli import main
from tests.jobs.remote.made import text_of, write_spec
from tests.jobs.remote.slurm_here import Slurm, missing, slurm_here, wait_until

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(2000),
    pytest.mark.skipif(bool(missing()), reason=missing() or "Slurm is here"),
]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory):
    with slurm_here(tmp_path_factory.mktemp("slurm")) as running:
        yield running


def batch_script(folder: Path, rows: int) -> tuple[str, Path]:
    """A job of one worker on each of two nodes, in a folder with an awkward name; returns the script and the run directory."""
    place = folder / 'a "100%" $HOME folder'
    place.mkdir()
    spec = write_spec(
        place,
        input={"path": "builtin:python-stdlib", "chunk_chars": 200, "limit": rows},
        task={"kind": "complete", "max_new_tokens": 32, "ignore_eos": True},
        model={"path": "builtin:ar-tiny", "device": "cpu"},
        workers={"count": 2, "gpus": 2.0, "cpus": 1},
        output={"path": "runs/one", "unit_rows": 8},
    )
    script = place / "job.sh"
    with chdir(place):
        text = text_of(spec, "slurm", nodes=2, shared_path=("/tmp", sys.prefix))
    script.write_text(text.replace("--mem=8G", "--mem=1G"))
    return str(script), place / "runs" / "one"


def units(run: Path) -> dict[str, tuple[int, bytes]]:
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in sorted(run.glob("data/unit-*.parquet"))}


def log_of(slurm: Slurm, job: str) -> str:
    """What the job has written, for the messages of failed checks."""
    return "\n".join(path.read_text() for path in slurm.folder.parent.rglob(f"nightly-{job}.log"))


def test_a_job_runs_on_ray_over_both_nodes(slurm, tmp_path):
    script, run = batch_script(tmp_path, rows=64)
    job = slurm.submit(script)
    wait_until(lambda: slurm.state(job) in {"COMPLETED", "FAILED"}, 800, "the job did not end")
    assert slurm.exit_code(job) == 0, log_of(slurm, job)
    assert (run / "_SUCCESS").exists(), log_of(slurm, job)
    assert (
        len({worker for path in run.glob("data/*.parquet") for worker in pq.read_table(path)["worker"].to_pylist()})
        == 2
    )
    assert main(["verify", str(run)]) == 0
    mark, commands = f"/tmp/ray-{job}-".encode(), map(read, Path("/proc").glob("[0-9]*/cmdline"))
    assert not [command for command in commands if mark in command and b"slurm" not in command], "its Ray still runs"


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_a_job_that_nears_its_limit_is_requeued_and_resumes(slurm, tmp_path):
    script, run = batch_script(tmp_path, rows=400)
    job = slurm.submit(script)
    wait_until(lambda: len(units(run)) >= 4, 800, "no units")
    slurm.call("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before the limit: --signal=B:USR1@120
    wait_until(lambda: slurm.state(job) == "PENDING", 120, f"not requeued: {log_of(slurm, job)}")
    before = units(run)
    assert not (run / "_SUCCESS").exists()
    slurm.start_now(job)
    wait_until(lambda: slurm.state(job) in {"COMPLETED", "FAILED"}, 800, "the job did not end")
    assert slurm.exit_code(job) == 0, log_of(slurm, job)
    after = units(run)
    assert len(before) < len(after) == 50
    assert {name: after[name] for name in before} == before
    assert main(["verify", str(run)]) == 0
    assert "requeued, restart 1 of 3" in log_of(slurm, job)


def test_a_cancelled_job_stays_cancelled_and_what_it_committed_stays(slurm, tmp_path):
    script, run = batch_script(tmp_path, rows=400)
    job = slurm.submit(script)
    wait_until(lambda: len(units(run)) >= 2, 800, "no units")
    before = units(run)
    slurm.call("scancel", job)
    wait_until(lambda: slurm.call("squeue", "-h", "-j", job) == "", 120, "still there")
    assert slurm.state(job) == "CANCELLED"
    after = units(run)
    assert {name: after[name] for name in before} == before
