"""Whether a container of draftmill is healthy: `python -m draftmill.infra.health` ends with 0, or 1 and the reason.

No process of draftmill or Ray may be stopped or dead, and a Ray node that has an agent must answer that its raylet is healthy.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

import psutil

AGENT = "http://{host}:52365/api/local_raylet_healthz"
"""Ray's agent on each node, at its default port; KubeRay's probes ask it, too."""

RAYLET = "/raylet/raylet"
WATCHED = (RAYLET, "/gcs/gcs_server", "/bin/draftmill", "draftmill.jobs.cli")
NAMES = {"raylet", "gcs_server", "draftmill"}
"""Of processes that ended: these have no command line."""

ENDED = {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD, psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP}
ANSWER_S = 10.0


def problem(*, agent: str = AGENT) -> str | None:
    """What is wrong; None if nothing is."""
    hosts = set()
    for process in psutil.process_iter(["name", "cmdline", "status"]):
        name, words = process.info["name"], process.info["cmdline"] or []
        is_watched = any(mark in word for word in words[:3] for mark in WATCHED) if words else name in NAMES
        if is_watched and process.info["status"] in ENDED:
            return f"process {process.pid} ({name}) is stopped or dead"
        if is_watched and words and RAYLET in words[0]:
            options = dict(word.split("=", 1) for word in words if "=" in word)
            hosts.add(options.get("--node_ip_address") or "127.0.0.1")
    return next(filter(None, (_ask_agent(agent.format(host=host)) for host in sorted(hosts))), None)


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
