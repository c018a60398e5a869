"""Addresses, tokens and versions of a cluster: each fault is one line that says what to do, before anything is sent."""

import os
import socket
import threading

import pytest

from draftmill.jobs.remote import cluster as cluster_module
from draftmill.jobs.remote.cluster import dashboard_url, reach, token_headers
from draftmill.storage.errors import UserError
from tests.jobs.remote.fake_cluster import answering

RAY = '{"ray_version": "2.60.0", "version": "4"}'


@pytest.fixture(autouse=True)
def no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "x")  # so that what is set meanwhile is undone
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("head", "http://head:8265"),
        ("head:80", "http://head:80"),
        ("http://head:8265/", "http://head:8265"),
        ("https://ray.example.org/team", "https://ray.example.org:443/team"),
        ("http://[::1]:8265", "http://[::1]:8265"),
    ],
)
def test_an_address_is_a_host_or_a_url(written, url):
    assert dashboard_url(written) == url


@pytest.mark.parametrize(
    "written",
    [
        "auto",
        "ray://head:10001",
        "http://",
        "head:99999",
        "ftp://head",
        "http://me:pass@head",
        "http://me:pass@head:99999",
        "http://h/?a=b",
    ],
)
def test_what_can_not_be_a_dashboard_is_refused_by_name(written):
    with pytest.raises(UserError, match="--address: ") as caught:
        dashboard_url(written)
    assert "pass" not in str(caught.value)


def test_a_cluster_that_answers_tells_its_version():
    with answering(200, RAY) as place:
        assert reach(dashboard_url(place), {}) == "2.60.0"


@pytest.mark.parametrize(
    ("status", "body", "headers", "words"),
    [
        (401, "", {}, "refuses the token, or needs one: set RAY_AUTH_MODE=token"),
        (403, "", {"Authorization": "Bearer x"}, "refuses the token"),
        (404, "", {}, r"did not answer as a Ray dashboard does \(.*\); its port is usually 8265"),
        (302, "http://127.0.0.1:1/", {}, "did not answer as a Ray dashboard does"),
        (200, "<html>", {}, "did not answer as a Ray dashboard does"),
        (200, "[]", {}, "did not answer as a Ray dashboard does"),
        (200, '{"ray_version": "2.9.3"}', {}, "runs Ray 2.9.3; 2.40 or newer is needed"),
    ],
)
def test_a_server_that_is_no_usable_cluster_is_said_in_one_line(status, body, headers, words):
    with answering(status, body) as place, pytest.raises(UserError, match=f"--address: .*{words}") as caught:
        reach(dashboard_url(place), headers)
    assert "\n" not in str(caught.value)


def test_nothing_listens():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(UserError, match=f"--address: nothing listens at 127.0.0.1:{port}"):
        reach(f"http://127.0.0.1:{port}", {})


def test_a_server_that_never_answers_and_one_that_speaks_no_http(monkeypatch):
    monkeypatch.setattr(cluster_module, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"http://127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(UserError, match=r"did not answer as a Ray dashboard does .*time"):
            reach(place, {})
        monkeypatch.setattr(cluster_module, "ANSWER_S", 20.0)

        def babble() -> None:
            for _ in range(4):  # the connections of the first half wait, too
                connection, _ = server.accept()
                connection.sendall(b"\x00\x01\x02 no HTTP\r\n")
                connection.close()

        threading.Thread(target=babble, daemon=True).start()
        with pytest.raises(UserError, match="did not answer as a Ray dashboard does"):
            reach(place, {})


def test_a_token_is_shown_only_where_one_is_set_and_rays_own_mode_says_the_same(monkeypatch, tmp_path):
    assert token_headers() == {}
    assert os.environ["RAY_AUTH_MODE"] == "disabled"
    monkeypatch.delenv("RAY_AUTH_MODE")
    file = tmp_path / "token"
    file.write_text("abc\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(file))
    assert token_headers() == {"Authorization": "Bearer abc"}
    assert os.environ["RAY_AUTH_MODE"] == "token"
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    assert token_headers() == {}


@pytest.mark.parametrize(
    ("variables", "field"),
    [
        ({"RAY_AUTH_MODE": "on"}, "RAY_AUTH_MODE"),
        ({"RAY_AUTH_TOKEN_PATH": "/nowhere/token"}, "RAY_AUTH_TOKEN_PATH"),
        ({"RAY_AUTH_TOKEN_PATH": "/dev/null"}, "RAY_AUTH_TOKEN_PATH"),
    ],
)
def test_a_token_that_is_missing_is_named(variables, field, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{field}: "):
        token_headers()


def test_the_token_travels_as_a_header_and_stays_out_of_messages():
    seen: list[dict[str, str]] = []
    with answering(403, "no", seen) as place, pytest.raises(UserError) as caught:
        reach(dashboard_url(place), {"Authorization": "Bearer very-secret-token"})
    assert seen[0]["Authorization"] == "Bearer very-secret-token"
    assert "very-secret-token" not in str(caught.value)
