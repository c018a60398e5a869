"""Notices: what receivers get, and that a slow, failing or absent one changes nothing and learns no more than it should."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftmill.jobs.driving.totals import Totals
from draftmill.jobs.schedule.scheduler import Scheduler
from draftmill.jobs.schedule.units import UnitSize
from draftmill.jobs.spec.job_spec import check_spec, load_spec
from draftmill.jobs.spec.notify_settings import NotifySettings
from draftmill.jobs.spec.spec_file import parse
from draftmill.jobs.watching import notify
from draftmill.jobs.watching.notify import StallWatcher, check_receivers, send, text_of
from draftmill.storage.errors import UserError
from tests.jobs.driving.test_cost import Hand

SECRET = "xoxb-9f3a1c7e5d2b"


def receiver(**keys: Any) -> NotifySettings:
    """A receiver as a spec has it."""
    return NotifySettings.model_validate(keys, strict=True)


def spec_with(notify: Any) -> dict[str, Any]:
    return {
        "task": {"kind": "complete"},
        "input": {"path": "rows.jsonl"},
        "model": {"path": "builtin:ar-tiny"},
        "decoder": {"kind": "autoregressive"},
        "output": {"path": "run"},
        "notify": notify,
    }


def program(tmp_path: Path, text: str) -> list[str]:
    path = tmp_path / "program.py"
    path.write_text(text)
    return [sys.executable, str(path)]


@contextmanager
def web_server(codes: list[int], *, wait_s: float = 0.0) -> Iterator[tuple[str, list[tuple[str, dict[str, str], Any]]]]:
    """A server that answers with these codes in turn, then 200: its URL, and the requests that it got."""
    got: list[tuple[str, dict[str, str], Any]] = []
    release = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            got.append((self.path, dict(self.headers), json.loads(body)))
            release.wait(wait_s)
            code = codes.pop(0) if codes else 200
            self.send_response(code)
            if code in {301, 302, 307}:
                self.send_header("Location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            return None

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", got
    finally:
        release.set()
        server.shutdown()
        server.server_close()


# ---- commands


def test_a_command_reads_the_notice_from_its_input(tmp_path: Path) -> None:
    out, told = tmp_path / "got.json", list[str]()
    one = receiver(command=program(tmp_path, f"import sys; open({str(out)!r}, 'w').write(sys.stdin.read())"))
    send([one], "finish", {"run": "job", "samples": {"ok": 3}}, told.append)
    assert json.loads(out.read_text()) == {"event": "finish", "run": "job", "samples": {"ok": 3}} and not told


def test_a_receiver_hears_only_of_the_events_that_it_wants(tmp_path: Path) -> None:
    out, told = tmp_path / "got", list[str]()
    one = receiver(command=program(tmp_path, f"open({str(out)!r}, 'a').write('x')"), on=["failure"])
    for event in ("finish", "failure", "stall", "interrupt"):
        send([one], event, {}, told.append)
    assert out.read_text() == "x" and not told


def test_a_command_that_fails_is_told_with_its_last_line_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_TOKEN", SECRET)
    told = list[str]()
    one = receiver(command=program(tmp_path, f"import sys; sys.exit('first\\nno: {SECRET}')"))
    send([one], "finish", {}, told.append)
    (message,) = told
    assert message.startswith("notify: command ") and message.endswith(": exit code 1: no: [hidden]")


def test_messages_name_a_command_by_its_words() -> None:
    assert text_of(receiver(command=["sh", "-c", "exit 1"])) == "command sh -c 'exit 1'"
    long = text_of(receiver(command=["sh", "-c", "x" * 100]))
    assert len(long) < 80 and long.endswith("xx...")


def test_a_command_that_prints_the_variable_of_a_webhook_does_not_get_it_into_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOK_PATH", SECRET)  # its name does not say that it is one
    told = list[str]()
    one = receiver(command=program(tmp_path, "import os, sys; sys.exit('no: ' + os.environ['HOOK_PATH'])"))
    other = receiver(webhook="https://host/${HOOK_PATH}", on=["interrupt"])
    send([one, other], "finish", {}, told.append)
    (message,) = told
    assert message.startswith("notify: command ") and message.endswith(": exit code 1: no: [hidden]")


@pytest.mark.slow
def test_a_command_that_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    pids, told = tmp_path / "pids", list[str]()
    text = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open({str(pids)!r}, "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
time.sleep(600)
"""
    one = receiver(command=program(tmp_path, text), timeout_s=5.0)
    send([one], "finish", {}, told.append)
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


# ---- webhooks


def test_a_webhook_gets_the_notice_as_a_post_with_values_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK_PATH", SECRET)
    monkeypatch.setenv("HOOK_KEY", "Bearer-value")
    told = list[str]()
    with web_server([]) as (url, got):
        one = receiver(webhook=url + "/services/${HOOK_PATH}", headers={"Authorization": "Bearer ${HOOK_KEY}"})
        send([one], "failure", {"run": "job", "exit_code": 3}, told.append)
    ((path, headers, body),) = got
    assert path == f"/services/{SECRET}" and headers["Authorization"] == "Bearer Bearer-value"
    assert headers["Content-Type"] == "application/json" and not told
    assert body == {"event": "failure", "run": "job", "exit_code": 3}


def test_a_webhook_that_is_out_of_order_is_tried_again_and_one_that_refuses_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notify, "RETRY_S", 0.01)
    told = list[str]()
    with web_server([503, 503]) as (url, got):
        send([receiver(webhook=url)], "finish", {}, told.append)
        assert len(got) == 3 and not told
    with web_server([404]) as (url, got):
        send([receiver(webhook=url)], "finish", {}, told.append)
        assert len(got) == 1 and told == [f"notify: webhook {url}: it answered 404"]


def test_a_redirect_is_not_followed_to_another_place() -> None:
    told = list[str]()
    with web_server([302]) as (url, got):
        send([receiver(webhook=url)], "finish", {}, told.append)
        assert [path for path, *_ in got] == ["/"] or [path for path, *_ in got] == [""]
    assert told == [f"notify: webhook {url}: it answered 302"]


def test_a_webhook_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "SLACK_S", 5.0)
    told = list[str]()
    with web_server([], wait_s=60.0) as (url, _):
        send([receiver(webhook=url, timeout_s=0.5)], "finish", {}, told.append)
    assert len(told) == 1 and "can't be reached" in told[0]


def test_a_message_about_a_webhook_never_has_the_value_of_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "RETRY_S", 0.01)
    monkeypatch.setenv("WHERE", f"http://127.0.0.1:9/{SECRET} x")  # a URL that is not one: errors quote it
    told = list[str]()
    send([receiver(webhook="${WHERE}")], "finish", {}, told.append)
    assert len(told) == 1 and "${WHERE}" in told[0] and SECRET not in told[0]


# ---- what a spec may say


@pytest.mark.parametrize(
    ("one", "said"),
    [
        ({}, "needs one of `command` and `webhook`"),
        ({"command": ["x"], "webhook": "http://a"}, "needs one of `command` and `webhook`"),
        ({"webhook": "ftp://a/b"}, "allowed: http:// and https:// URLs"),
        ({"webhook": "https://user:pw123456@host/x"}, "no credentials in the spec; write ${NAME}"),
        ({"webhook": "https://host/x?token=abcdefgh"}, "'token' looks like a credential"),
        ({"webhook": "https://hooks.slack.com/services/T0/B0/abcdef"}, "hooks.slack.com is a credential"),
        ({"webhook": "https://host/x", "headers": {"Authorization": "Bearer abcdefgh"}}, "'Authorization' looks like"),
        ({"webhook": "https://host/x", "headers": {"X-Other": "Basic abcdefghij"}}, "'X-Other' looks like"),
        ({"command": ["curl", "-H", "Authorization: Bearer abcdefgh12"]}, "the command has the driver's environment"),
        ({"command": ["curl", "https://u:pw123456@host"]}, "the command has the driver's environment"),
        ({"command": ["x"], "headers": {"A": "b"}}, "headers: only with `webhook`"),
        ({"command": ["x"], "on": ["end"]}, "finish"),
        ({"command": ["x"], "timeout_s": 0.0}, "timeout_s"),
        ({"command": []}, "command"),
    ],
)
def test_a_spec_holds_no_credentials_and_nothing_that_makes_no_sense(one: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as error:
        check_spec(spec_with([one]))
    assert "notify" in str(error.value) and said in str(error.value)
    assert "pw123456" not in str(error.value)


@pytest.mark.parametrize(
    "one",
    [
        {"webhook": "https://hooks.slack.com/services/${SLACK_PATH}"},
        {"webhook": "${HOOK_URL}"},
        {"webhook": "https://host/x?token=${HOOK_TOKEN}&channel=runs"},
        {"webhook": "http://monitor.local:8080/runs", "headers": {"Authorization": "Bearer ${TOKEN}"}},
        {"command": ["sh", "-c", 'curl -H "Authorization: Bearer $TOKEN" -d @- https://host/x']},
    ],
)
def test_a_spec_may_name_variables_and_one_receiver_needs_no_list(one: dict[str, Any]) -> None:
    assert check_spec(spec_with(one)).notify == check_spec(spec_with([one])).notify
    assert check_spec(spec_with(one)).notify[0].on == ("finish", "failure", "stall")


def test_the_specs_of_the_docs_are_read_as_they_are_written(tmp_path: Path) -> None:
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


def test_one_word_needs_no_list() -> None:
    one = receiver(command="page-me", on="stall")
    assert (one.command, one.on) == (("page-me",), ("stall",))


def test_notices_are_no_part_of_what_decides_results() -> None:
    plain = {**spec_with([])}
    assert check_spec(plain).results_key() == check_spec(spec_with({"command": ["x"]})).results_key()


def test_a_variable_that_is_not_set_and_a_command_that_is_not_there_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    for one, field in (
        ({"webhook": "https://host/${NOT_SET}"}, "notify.1.webhook: the environment variable NOT_SET is not set"),
        ({"webhook": "https://host", "headers": {"A": "${NOT_SET}"}}, "notify.1.headers.A: the environment"),
        ({"command": ["no-such-command-here"]}, "notify.1.command: 'no-such-command-here' is not a command here"),
        ({"command": "sh -c true"}, "notify.1.command: 'sh -c true' is not a command here; write its words as a list"),
    ):
        with pytest.raises(UserError) as error:
            check_receivers([receiver(command=["sh"]), receiver(**one)])
        assert str(error.value).startswith(field)
    assert "NOT_SET" not in os.environ


# ---- a run that stands still


class Sent:
    """Collects what would be sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.notices: list[dict[str, Any]] = []
        self.arrived = threading.Semaphore(0)
        monkeypatch.setattr(notify, "send", self.send)

    def send(self, receivers: list[NotifySettings], event: str, notice: dict[str, Any], tell: Any) -> None:
        self.notices.append({"event": event, "to": receivers[0].stall_s, **notice})
        self.arrived.release()


def test_a_run_that_stands_still_is_told_once_until_it_moves_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, sent = Hand(), Sent(monkeypatch)
    totals = Totals(units=2, rows=8, clock=clock)
    scheduler = Scheduler([UnitSize(0, 4, 4)], workers=1)
    receivers = [
        receiver(command=["sh"], stall_s=60.0),
        receiver(command=["sh"], stall_s=30.0),
        receiver(command=["sh"], on=["finish"], stall_s=1.0),
    ]
    watcher = StallWatcher(receivers, lambda totals, still_s: {"still_s": still_s}, print, clock=clock)

    def pass_time(seconds: int) -> None:
        for _ in range(seconds):
            clock.now_s += 1.0
            watcher.look(totals, scheduler)

    pass_time(29)
    assert not sent.notices
    pass_time(71)
    for _ in range(2):
        assert sent.arrived.acquire(timeout=10)
    assert sorted((one["to"], one["still_s"]) for one in sent.notices) == [(30.0, 30.0), (60.0, 60.0)]
    totals.units_done = 1
    pass_time(32)
    assert sent.arrived.acquire(timeout=10) and len(sent.notices) == 3
    clock.now_s += 3600.0  # the driver itself was suspended
    watcher.look(totals, scheduler)
    assert len(sent.notices) == 3
