"""Rows that nothing can decode: each comes back failed with its class, and every other row of its unit comes back ok."""

import json
import os
import socket
import time
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftmill.actors.job import Job
from draftmill.actors.loop.runner import UnitRunner
from draftmill.actors.loop.worker import Turns, build_runner
from draftmill.actors.ray.pool import RayPool
from draftmill.actors.rows.unit_io import RowUnitIO
from draftmill.decoders.base import Request
from draftmill.jobs.cli import main
from draftmill.jobs.run import session
from draftmill.jobs.schedule.unit_leases import Limits
from tests.actors.fakes import FakeDecoder
from tests.actors.tokenizers_for_tests import model_info
from tests.runs.jobs_of_tests import rows_of, soak, write_spec
from tests.runs.local_pool import without_ray

TOKENIZE, NAN, RAISES, MEMORY, ABORT, ENDLESS = range(10, 16)
"""Token ids: a row that begins with one has that fate."""


def write_poison(path, *fates: int, rows: int = 16):
    """Healthy rows of three ids and two holes, among them one row for each fate, in different places."""
    with path.open("w") as file:
        for number in range(rows):
            first = fates[number // 3] if number % 3 == 1 and number // 3 < len(fates) else 20 + number
            tokens = [first, None, 21 + number % 7, None, 30]
            file.write(json.dumps({"id": f"row-{number}", "tokens": tokens}) + "\n")
    return path


def has(requests: list[Request], fate: int) -> bool:
    """Whether one of the samples has this fate."""
    return any(request.canvas[0] == fate for request in requests)


def poisoned_runner(job: Job, *, name: str, node: str, threads: int) -> UnitRunner:
    """A real worker whose maker, model and decoder fail for the rows that are marked."""
    runner = build_runner(job, name=name, node=node, threads=threads)
    decoder: Any = runner.decoder
    decoder.backbone.embedding_VD = decoder.backbone.embedding_VD.clone()
    decoder.backbone.embedding_VD[NAN] = torch.nan
    unit_io: Any = runner.unit_io
    admit, step, make = decoder.admit, decoder.step, unit_io._maker.make
    inside: dict[int, Request] = {}

    def poisoned_make(values: Any, key: int) -> Any:
        if values["tokens"][0] == TOKENIZE:
            raise KeyError("no such character")
        return make(values, key)

    def poisoned_admit(requests: list[Request], **known: Any) -> None:
        inside.update({request.index: request for request in requests})
        admit(requests, **known)

    def poisoned_step() -> Any:
        held = [inside[handle] for handle in runner._resident]
        if has(held, RAISES):
            raise RuntimeError("an operator that does not like this row")
        if has(held, MEMORY):
            torch.empty(2**58, dtype=torch.int64)
        return step()

    unit_io._maker = SimpleNamespace(make=poisoned_make)
    decoder.admit, decoder.step = poisoned_admit, poisoned_step
    return runner


def verdicts(run) -> dict[str, tuple[str, str]]:
    """(class, stage) of each row that failed."""
    rows = rows_of(run).to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: (row["error_kind"], row["error_stage"]) for row in rows if row["status"] == "failed"}


def test_a_row_that_can_not_be_decoded_is_failed_with_its_class_and_its_unit_is_ok(tmp_path):
    rows = write_poison(tmp_path / "rows.jsonl", TOKENIZE, NAN, RAISES, MEMORY)
    spec = write_spec(tmp_path, rows=rows, errors={"max_rate": 0.5})
    with without_ray(build=poisoned_runner):
        assert main(["run", str(spec), "--quiet"]) == 0
    assert verdicts(tmp_path / "run") == {
        "row-1": ("tokenize_error", "tokenize"),
        "row-4": ("nan_logits", "decode"),
        "row-7": ("decode_error", "decode"),
        "row-10": ("out_of_memory", "decode"),
    }
    assert main(["verify", str(tmp_path / "run")]) == 0
    with without_ray():
        assert main(["run", str(write_spec(tmp_path, rows=rows, out="well")), "--quiet"]) == 0
    well = {row["id"]: row["tokens"] for row in rows_of(tmp_path / "well").to_pylist()}
    found = {row["id"]: row["tokens"] for row in rows_of(tmp_path / "run").to_pylist() if row["status"] == "ok"}
    assert len(found) == 12 and all(well[name] == tokens for name, tokens in found.items())


class DeadlyWorker(Turns):
    """A worker without a model, which some rows kill, and others hold for ever; rows, units and files are real."""

    def __init__(self, name: str, job: Job, threads: int) -> None:
        unit_io = RowUnitIO(job, tokenizer=None, info=model_info(), worker=name, node=socket.gethostname())
        super().__init__(UnitRunner(FakeDecoder(trouble=self.decode), unit_io, worker=name), socket.gethostname())

    def decode(self, requests: list[Request]) -> None:
        if has(requests, ABORT):
            os.abort()
        while has(requests, ENDLESS):
            time.sleep(0.1)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("fate", [ABORT, *soak([ENDLESS])])
def test_a_row_that_kills_or_never_ends_is_found_alone(ray_session, tmp_path, monkeypatch, fate):
    rows = write_poison(tmp_path / "rows.jsonl", fate, rows=8)
    output = {"path": str(tmp_path / "run"), "unit_rows": 2}
    spec = write_spec(tmp_path, rows=rows, output=output, errors={"max_rate": 0.5})
    monkeypatch.setattr("draftmill.actors.ray.pool.RayPool", partial(RayPool, worker_class=DeadlyWorker))
    monkeypatch.setattr("draftmill.actors.ray.pool.early_workers", lambda *_: [])  # they would be of the usual class
    limits = Limits(deaths=1, lease_s=3.0 if fate == ENDLESS else 600.0)  # fewer workers have to die
    monkeypatch.setattr(session, "limits_of", lambda spec: limits)
    assert main(["run", str(spec), "--quiet"]) == 0
    assert verdicts(tmp_path / "run") == {"row-1": ("worker_died", "decode")}
    (reason,) = [row["error"] for row in rows_of(tmp_path / "run").to_pylist() if row["error"]]
    assert ("no progress for 3 s" in reason) == (fate == ENDLESS)
    assert main(["verify", str(tmp_path / "run")]) == 0
    log = "".join(path.read_text() for path in (tmp_path / "run" / "attempts").iterdir())
    assert log.count('"event": "quarantined"') == 1
