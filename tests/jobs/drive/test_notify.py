"""Notices: what receivers get, and that a slow, failing or absent one changes nothing and learns no more than it should."""

import json
import re
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

from draftmill.jobs.config.sections import NotifySettings
from draftmill.jobs.config.spec import check_spec, load_spec
from draftmill.jobs.config.yaml_file import parse
from draftmill.jobs.drive.notify import check_receivers, send, text_of
from draftmill.jobs.drive.totals import Totals
from draftmill.jobs.run import outcome
from draftmill.jobs.schedule.scheduler import Scheduler
from draftmill.jobs.schedule.units import UnitSize
from draftmill.storage.errors import UserError
from draftmill.storage.stores.store import open_store
from tests.jobs.specs import completion

SECRET = "xoxb-9f3a1c7e5d2b"


def receiver(**keys) -> NotifySettings:
    return NotifySettings.model_validate(keys, strict=True)


def spec_with(notify) -> dict:
    return completion(notify=notify)


def program(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def test_a_command_reads_the_notice_from_its_input(tmp_path):
    out, told = tmp_path / "got.json", list[str]()
    one = receiver(command=program(tmp_path, f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"))
    send([one], "finish", {"run": "job", "samples": {"ok": 3}}, told.append)
    assert json.loads(out.read_text()) == {"event": "finish", "run": "job", "samples": {"ok": 3}} and not told


def test_a_receiver_hears_only_of_the_events_that_it_wants(tmp_path):
    out, told = tmp_path / "got", list[str]()
    one = receiver(command=program(tmp_path, f"open({str(out)!r}, 'a').write('x')"), on=["failure"])
    for event in ("finish", "failure", "stall", "interrupt"):
        send([one], event, {}, told.append)
    assert out.read_text() == "x" and not told


def test_a_command_that_fails_is_told_with_its_last_line_and_without_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("HOOK_TOKEN", SECRET)
    told = list[str]()
    one = receiver(command=program(tmp_path, f"import sys; sys.exit('first\\nno: {SECRET}')"))
    send([one], "finish", {}, told.append)
    (message,) = told
    assert message.startswith("notify: command ") and message.endswith(": exit code 1: no: [hidden]")


def test_messages_name_a_command_by_its_words():
    assert text_of(receiver(command=["sh", "-c", "exit 1"])) == "command sh -c 'exit 1'"
    long = text_of(receiver(command=["sh", "-c", "x" * 100]))
    assert len(long) < 80 and long.endswith("xx...")


@pytest.mark.slow
def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path):
    pids, told = tmp_path / "pids", list[str]()
    text = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open({str(pids)!r}, "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""
    send([receiver(command=program(tmp_path, text))], "finish", {}, told.append, timeout_s=5.0)
    assert len(told) == 1 and told[0].endswith("killed after 5 s")
    for pid in map(int, pids.read_text().split()):
        until_s = time.monotonic() + 10
        while runs(pid) and time.monotonic() < until_s:
            time.sleep(0.05)
        assert not runs(pid)


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("one", "said"),
    [
        ({}, "command"),
        ({"webhook": "https://host/x"}, "webhook"),
        ({"command": ["curl", "-H", "Authorization: Bearer abcdefgh12"]}, "the command has the driver's environment"),
        ({"command": ["curl", "https://u:pw123456@host"]}, "the command has the driver's environment"),
        ({"command": ["x"], "on": ["end"]}, "finish"),
        ({"command": []}, "command"),
    ],
)
def test_a_spec_holds_no_credentials_and_nothing_that_makes_no_sense(one, said):
    with pytest.raises(UserError) as error:
        check_spec(spec_with([one]))
    assert "notify" in str(error.value) and said in str(error.value)
    assert "pw123456" not in str(error.value)


def test_one_receiver_needs_no_list_and_a_command_may_name_variables():
    one = {"command": ["sh", "-c", 'curl -H "Authorization: Bearer $TOKEN" -d @- https://host/x']}
    assert check_spec(spec_with(one)).notify == check_spec(spec_with([one])).notify
    assert check_spec(spec_with(one)).notify[0].on == ("finish", "failure", "stall")


def test_the_specs_of_the_docs_are_read_as_they_are_written(tmp_path):
    """YAML 1.1 reads the key `on` as true."""
    docs = (Path(__file__).parents[3] / "docs" / "watching.md").read_text()
    (section,) = re.findall(r"```yaml\n(notify:.*?)```", docs, re.DOTALL)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(spec_with([]) | {"notify": None}).replace("notify: null", section))
    receivers = load_spec(path).notify
    assert len(receivers) == 2 and receivers[0].on == ("failure", "stall")
    for word in ("yes: 1", "No: 1", "<<: {off: 1}"):
        assert all(isinstance(key, str) for key in parse(word, "here"))
    assert parse("{true: yes}", "here") == {True: True}


def test_one_word_needs_no_list():
    one = receiver(command="page-me", on="stall")
    assert (one.command, one.on) == (("page-me",), ("stall",))


def test_notices_are_no_part_of_what_decides_results():
    plain = {**spec_with([])}
    assert check_spec(plain).results_key() == check_spec(spec_with({"command": ["x"]})).results_key()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["no-such-command-here"], "'no-such-command-here' is not a command here"),
        ("sh -c true", "'sh -c true' is not a command here; write its words as a list"),
    ],
)
def test_a_command_that_is_not_there_is_refused_at_once(command, said):
    with pytest.raises(UserError) as error:
        check_receivers([receiver(command=["sh"]), receiver(command=command)])
    assert str(error.value) == f"notify.1.command: {said}"


def test_a_stall_is_sent_once_until_there_is_progress_again(monkeypatch):
    notices, arrived = list[dict](), threading.Semaphore(0)

    def collect(receivers: list[NotifySettings], event: str, notice: dict, tell) -> None:
        notices.append({"event": event, "to": len(receivers), **notice})
        arrived.release()

    monkeypatch.setattr(outcome, "send", collect)
    totals, scheduler = Totals(units=2, rows=8), Scheduler([UnitSize(0, 4, 4)], workers=1)
    spec = check_spec(spec_with([{"command": ["sh"]}, {"command": ["sh"]}]))
    watcher = outcome.RunOutcome(spec, open_store("memory://stalls"))
    for still_s in (0.0, outcome.STALL_S - 1, outcome.STALL_S, outcome.STALL_S + 70):
        totals.still_s = still_s
        watcher.look(totals, scheduler)
    assert arrived.acquire(timeout=10)
    (notice,) = notices
    assert (notice["event"], notice["to"], notice["seconds_without_progress"]) == ("stall", 2, outcome.STALL_S)
    for still_s in (1.0, outcome.STALL_S + 2):
        totals.still_s = still_s
        watcher.look(totals, scheduler)
    assert arrived.acquire(timeout=10) and len(notices) == 2
