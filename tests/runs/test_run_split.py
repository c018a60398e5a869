"""Jobs with a model split over two processes: a whole run on a real Ray that loses a process; refusals before loading."""

import json
import os
import signal
import threading
import time

import pytest
import yaml

from draftmill.jobs.cli import main
from draftmill.jobs.config.spec import JobSpec
from tests.actors.group_processes import followers
from tests.decoders.backbones.causal_models import save_random
from tests.runs.causal_jobs import TOKENIZER, job_spec, results_of, run_here, save_model

ROWS = [{"id": f"r{number:02}", "prompt": f"row {number}"} for number in range(24)]
SPLIT = {"gpus_per_model": 2, "gpus": 0, "cpus": 2}


def written(spec: JobSpec, folder) -> str:
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(spec.model_dump(mode="json")))
    return str(path)


def kill_one_while_the_first_unit_is_written(data, killed: list[int]) -> None:
    """Kill a second process of a group that this process's own Ray started, once a file of a unit is there."""
    until_s = time.monotonic() + 200
    while not killed and time.monotonic() < until_s:
        time.sleep(0.01)
        if not any(data.glob("*")):
            continue
        for pid in followers()[:1]:
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_a_job_with_a_split_model_that_loses_a_process_writes_the_texts_of_one_process(ray_session, tmp_path):
    save_model(tmp_path / "model", ends=[2])
    killed: list[int] = []
    output = {"path": str(tmp_path / "run"), "unit_rows": 2}
    spec = job_spec(tmp_path, ROWS, workers=SPLIT, output=output, batching={"max_rows": 2})
    killer = threading.Thread(target=kill_one_while_the_first_unit_is_written, args=(tmp_path / "run" / "data", killed))
    killer.start()
    assert main(["run", written(spec, tmp_path), "--quiet"]) == 0
    killer.join()
    assert len(killed) == 1
    lines = [line for file in (tmp_path / "run" / "attempts").rglob("*") if file.is_file() for line in file.open()]
    events = [json.loads(line).get("event") for line in lines]
    assert events.count("worker_up") >= 2 and "worker_died" in events
    found = results_of(spec)
    alone = run_here(job_spec(tmp_path, ROWS, output={"path": str(tmp_path / "alone"), "unit_rows": 8}))
    assert {key: row["text"] for key, row in found.items()} == {key: row["text"] for key, row in alone.items()}
    assert {row["status"] for row in found.values()} == {"ok"}


def refused(spec: dict | JobSpec, folder, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert isinstance(spec, JobSpec)
    assert main(["run", written(spec, folder), "--quiet", *options]) == 2
    assert not (folder / "run").exists()
    return capsys.readouterr().err


def test_a_family_without_a_plan_is_refused_by_name_before_its_weights_are_read(tmp_path, capsys):
    save_random(tmp_path / "model", "gpt2", vocab_size=2048)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((TOKENIZER / name).read_bytes())
    said = refused(job_spec(tmp_path, ROWS, workers=SPLIT), tmp_path, capsys)
    assert "workers.gpus_per_model: 2, but models of family 'gpt2' can't be split; allowed: 1 " in said


def test_local_refuses_a_split_model(tmp_path, capsys):
    save_model(tmp_path / "model", ends=[2])
    said = refused(job_spec(tmp_path, ROWS, workers=SPLIT), tmp_path, capsys, "--local")
    assert "workers.gpus_per_model: 2, but --local is one process" in said
