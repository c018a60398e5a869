"""`draftmill submit` and `draftmill stop` on a real Ray with its job API: shipped code, exit codes, following, stopping."""

import json
import os
import random
import sys
from pathlib import Path

import pytest
import yaml

from draftmill.jobs.cli import main
from draftmill.jobs.drive.log import shown
from draftmill.jobs.remote.cluster import RayJobs
from draftmill.jobs.remote.submit import follow
from draftmill.storage.failpoints import VARIABLE
from tests.runs.jobs_of_tests import GOLDEN, VOCABULARY, job_over, rows_of, write_namesakes
from tests.runs.local_pool import without_ray

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def address():
    """The dashboard of a cluster of this machine that knows nothing of the checkout, and finds this Python by its name."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        patch.delenv("PYTHONPATH")
        patch.delenv(VARIABLE, raising=False)
        head = {"num_cpus": 4, "object_store_memory": 100 * 2**20, "include_dashboard": True, "dashboard_port": 0}
        head["dashboard_agent_listen_port"] = 0  # its default is one port for all clusters of a machine
        cluster = Cluster(initialize_head=True, head_node_args=head)
        # Another Ray on the machine. Ray's job API tells drivers the address of the one that was started last.
        other = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 * 2**20})
        yield f"http://{cluster.webui_url}"
        cluster.shutdown()
        other.shutdown()


def folder_of(tmp_path: Path, name: str, rows: int, *, bad: int = 0, **changes) -> Path:
    """A folder to ship: a spec with its rows and its model; `bad` rows can't be read. The results go to a shared folder."""
    folder = tmp_path / name
    folder.mkdir()
    write_namesakes(folder)
    rng = random.Random(0)
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(rows):
            tokens = [None if rng.random() < 0.5 else rng.randrange(6, VOCABULARY) for _ in range(12)]
            file.write(json.dumps({"id": f"row-{number}", "tokens": "none" if number < bad else tokens}) + "\n")
    (folder / "model").symlink_to(GOLDEN)
    output = {"path": str(tmp_path / "runs" / name), "unit_rows": 4}
    spec = job_over("rows.jsonl", workers={"count": 1}, output=output)
    (folder / "job.yaml").write_text(yaml.safe_dump(spec | changes))
    return folder


def submitted(tmp_path: Path, address: str, *options: str) -> int:
    shared = ["--shared", str(tmp_path / "runs"), "--shared", str(GOLDEN)]
    return main(["submit", "job.yaml", "--address", address, "--working-dir", ".", *shared, *options])


def test_submitted_jobs_ship_their_code_and_end_with_the_drivers_own_exit_codes(address, tmp_path, monkeypatch, capfd):
    fine = folder_of(tmp_path, "fine", 12)
    others = {
        3: folder_of(tmp_path, "too-many-fail", 12, bad=1, errors={"max_rate": 0.0}),
        2: folder_of(tmp_path, "no-such-column", 3, input={"path": "rows.jsonl", "columns": {"tokens": "ids"}}),
    }
    for folder in others.values():  # they run beside the first
        monkeypatch.chdir(folder)
        assert submitted(tmp_path, address, "--no-wait") == 0
    names = capfd.readouterr().out.split()
    monkeypatch.chdir(fine)
    assert submitted(tmp_path, address) == 0
    assert "12  (12 ok, 0 failed, 0 skipped)" in capfd.readouterr().out
    client = RayJobs(address)
    with shown():
        for code, name in zip(others, names, strict=True):
            assert follow(client, name) == code, capfd.readouterr()
    assert "input.columns" in capfd.readouterr().out, "the job's own words"
    with without_ray():
        assert main(["run", "job.yaml", "--quiet", "--set", f"output.path={tmp_path / 'here'}"]) == 0
    assert rows_of(tmp_path / "runs" / "fine").equals(rows_of(tmp_path / "here"))


@pytest.mark.soak
def test_a_stopped_job_ends_with_4_and_the_next_submission_resumes_it(address, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(folder_of(tmp_path, "long", 100))
    variables = {VARIABLE: "worker.step=sleep:20:600"}  # after a few units the worker makes no progress
    (tmp_path / "env.json").write_text(json.dumps({"env_vars": variables}))
    assert (
        submitted(tmp_path, address, "--no-wait", "--grace-seconds", "6", "--runtime-env", str(tmp_path / "env.json"))
        == 0
    )
    name = capfd.readouterr().out.strip()
    data = tmp_path / "runs" / "long" / "data"
    while not data.exists() or not list(data.glob("unit-*")):
        pass  # the condition is polled, not assumed
    before = {path.name: path.stat().st_mtime_ns for path in data.glob("unit-*")}
    assert main(["stop", str(tmp_path / "runs" / "long"), "--address", address]) == 0
    assert "has ended (STOPPED)" in capfd.readouterr().err
    assert submitted(tmp_path, address) == 0
    told = capfd.readouterr()
    assert f"submitted {name[:-1]}2" in told.err
    assert "resuming: " in told.out
    after = {path.name: path.stat().st_mtime_ns for path in data.glob("unit-*")}
    assert before.items() <= after.items(), "what was committed was decoded again"
    assert main(["verify", str(tmp_path / "runs" / "long")]) == 0
