"""Whole jobs by the command line's own code, with one worker in this process in the place of Ray."""

from pathlib import Path

import pytest
import yaml

from draftmill.jobs.cli import main
from tests.runs.local_pool import BackendHere


def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, `draftmill run` and `rerun` decode in this process."""
    monkeypatch.setattr("draftmill.jobs.run.job.backend_of", lambda **_: BackendHere())


def run(spec: dict, file: Path, command: str = "run") -> int:
    """The exit code of the command line on a spec, which is written to `file`."""
    file.write_text(yaml.safe_dump(spec))
    return main([command, str(file), *(["--quiet"] if command == "run" else [])])
