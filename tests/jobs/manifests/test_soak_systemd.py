"""The units of systemd by systemd's own reading: valid, with the same words and times, and planted mistakes are found."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from draftmill.jobs.manifests.options import parse_schedule
from draftmill.jobs.manifests.templates import BY_SHELL
from tests.jobs.manifests.made import RICH, files_of, write_spec
from tests.jobs.manifests.test_quoting import NASTY, by_bash
from tests.jobs.manifests.test_schedule import SCHEDULES, plainly
from tests.jobs.manifests.validators import systemd_problems

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"),
]


@pytest.fixture
def program(tmp_path: Path) -> str:
    """A program that exists, in a folder with an awkward name that systemd takes: systemd-analyze looks for it."""
    return made(tmp_path / "an odd 100% folder")


def made(folder: Path) -> str:
    path = folder / "draftmill"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("rich", [False, True], ids=["defaults", "many options"])
def test_systemd_has_nothing_to_say_of_the_units(rich: bool, program: str, tmp_path: Path) -> None:
    options = RICH["systemd"] | {"user": "root"} if rich else {}
    spec = write_spec(tmp_path)
    assert systemd_problems(files_of(spec, "systemd", program=program, **options), tmp_path) == []


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("RestartPreventExitStatus", "RestartPreventExitCode", "RestartPreventExitCode"),
        ("Type=oneshot", "Type=onceshot", "onceshot"),
        ("OnCalendar=*-*-* 03:00:00", "OnCalendar=*-*-* 25:00:00", "25:00:00"),
        ('draftmill" run', 'drafmill" run', "not executable"),
        ("TimeoutStopSec=60", "TimeoutStopSec=soon", "soon"),
    ],
)
def test_a_planted_mistake_is_found(right: str, wrong: str, said: str, program: str, tmp_path: Path) -> None:
    units = files_of(write_spec(tmp_path), "systemd", program=program)
    assert any(right in text for text in units.values())
    changed = {name: text.replace(right, wrong) for name, text in units.items()}
    assert said in "\n".join(systemd_problems(changed, tmp_path))


@pytest.mark.parametrize("folder", ["an odd 100% folder", 'an "odd" folder', "it's", "$HOME", "a\\b"])
def test_systemd_reads_the_words_that_were_meant(folder: str, tmp_path: Path) -> None:
    program = made(tmp_path / folder)
    words = [word for word in NASTY if word.isprintable()]
    spec = write_spec(tmp_path, name='it\'s 100% $HOME \\ "odd".yaml')
    overrides = [
        f"name={word}x" for word in words if "\t" not in word and not re.search(r"[:{}\[\]&*!|>'\"%@`#?\\-]|<<", word)
    ]
    units = files_of(spec, "systemd", overrides, program=program)
    assert systemd_problems(units, tmp_path) == []
    (tmp_path / "nightly.service").write_text(next(iter(units.values())))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "nightly.service")],
        env=os.environ | {"SYSTEMD_LOG_LEVEL": "debug"},
        capture_output=True,
        text=True,
        check=False,
    )
    line = next(line for line in (done.stdout + done.stderr).splitlines() if "Command Line:" in line)
    read = [word.replace("$$", "$") for word in by_bash(line.partition("Command Line: ")[2])]
    sets = [word for override in overrides for word in ("--set", override)]
    before = [] if folder == "an odd 100% folder" else [*BY_SHELL]
    assert read[: len(before) + 3 + len(sets)] == [*before, program, "run", spec, *sets]


@pytest.mark.parametrize("text", SCHEDULES)
def test_the_timer_starts_when_cron_would(text: str) -> None:
    """The next starts by systemd, beside a plain reading of the cron expression minute by minute."""
    begin = datetime(2026, 11, 22, tzinfo=UTC)
    found: set[datetime] = set()
    for calendar in parse_schedule(text).calendars("UTC"):
        done = subprocess.run(
            ["systemd-analyze", "calendar", "--iterations=12", f"--base-time={begin:%Y-%m-%d %H:%M:%S} UTC", calendar],
            env=os.environ | {"TZ": "UTC"},
            capture_output=True,
            text=True,
            check=True,
        )
        times = re.findall(r"(?:Next elapse|Iter\. #\d+|\(in UTC\)): \w{3} (\S+ \S+) UTC", done.stdout)
        found |= {datetime.strptime(time, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC) for time in times}
    first = sorted(found)[:8]
    assert first
    assert all(plainly(text, moment) for moment in first)
    minutes = int((min(first[-1], begin + timedelta(days=10)) - begin).total_seconds()) // 60
    passed = [begin + timedelta(minutes=minute) for minute in range(1, minutes + 1)]
    assert [moment for moment in passed if plainly(text, moment)] == [
        moment for moment in first if moment <= passed[-1]
    ]
