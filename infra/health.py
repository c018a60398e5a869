"""Whether a container of draftmill is healthy: `python -m draftmill.infra.health` ends with 0, or 1 and the reason.

Standard library only.

No process of draftmill or Ray may be stopped or dead, and a Ray node that has an agent must answer that its raylet is healthy.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

AGENT = "http://{host}:52365/api/local_raylet_healthz"
"""Ray's agent on each node, at its default port; KubeRay's probes ask it, too."""

WATCHED = (b"/raylet/raylet", b"/gcs/gcs_server", b"/bin/draftmill", b"draftmill.jobs.cli")
ANSWER_S = 10.0


def problem(proc: Path = Path("/proc"), *, agent: str = AGENT) -> str | None:
    """What is wrong; None if nothing is."""
    hosts = set()
    for pid, command, state in _processes(proc):
        if state in "ZTtX":
            return f"process {pid} ({command[0].decode(errors='replace')}) is stopped or dead"
        if b"/raylet/raylet" in command[0]:
            hosts.add(_option(command, b"--node_ip_address") or "127.0.0.1")
    return next(filter(None, (_ask_agent(agent.format(host=host)) for host in sorted(hosts))), None)


def _processes(proc: Path) -> Iterator[tuple[str, list[bytes], str]]:
    """Process id, command line and state of each watched process. A zombie has no command line, but still a name."""
    for folder in proc.glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            name, _, rest = (folder / "stat").read_bytes().partition(b"(")[2].rpartition(b") ")
        except OSError:  # it has ended meanwhile
            continue
        state = rest[:1].decode()
        if any(mark in word for word in command[:3] for mark in WATCHED):
            yield folder.name, command, state
        elif state == "Z" and name in {b"raylet", b"gcs_server", b"draftmill"}:
            yield folder.name, [name], state


def _option(command: list[bytes], name: bytes) -> str | None:
    values = (word.partition(b"=")[2].decode() for word in command if word.startswith(name + b"="))
    return next(values, None)


def _ask_agent(url: str) -> str | None:
    """What the agent says; None if all is well, or nothing listens: a Ray of draftmill's own may have no agent."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
            text = answer.read(1000).decode(errors="replace")
    except urllib.error.HTTPError as error:
        return f"{url} answers {error.code}"
    except urllib.error.URLError as error:
        return None if isinstance(error.reason, ConnectionRefusedError) else f"{url}: {error.reason}"
    except (OSError, TimeoutError) as error:
        return f"{url}: {error}"
    return None if "success" in text else f"{url} answers {text!r}"


def main() -> int:
    """Print the problem, if there is one."""
    reason = problem()
    print(reason or "healthy")
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main())
