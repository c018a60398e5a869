"""A Hugging Face hub on this machine: as much of its protocol as publishing and reading a dataset needs, and faults.

Blobs are kept by their SHA-256 as in git-lfs, and files are visible from the commit on that names them.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

TOKEN = "hf_secretsecretsecret"


class Hub:
    """Datasets, blobs, and the requests so far. A request that matches a pattern of `faults` is answered with its status."""

    def __init__(self) -> None:
        self.url = ""
        self.datasets: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.commits: list[str] = []
        self.blobs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.faults: list[tuple[str, int]] = []
        self.tokens: set[str | None] = set()

    def sent(self) -> int:
        """How many blobs were sent."""
        return sum(line.startswith("PUT /lfs/") for line in self.requests)

    def answer(self, method: str, path: str, body: bytes) -> tuple:
        """The status, and JSON data or bytes."""
        for fault in self.faults:
            if re.search(fault[0], f"{method} {path}"):
                return fault[1], {"error": f"refused: {fault[1]}"}
        if method == "PUT":
            self.blobs[hashlib.sha256(body).hexdigest()] = body
            return 200, {}
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given['organization']}/{given['name']}"
            if name in self.datasets:
                return 409, {"error": "exists", "url": f"{self.url}/datasets/{name}"}
            self.datasets[name], self.private[name] = {}, given["visibility"] == "private"
            return 200, {"url": f"{self.url}/datasets/{name}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        match = re.match(r"(?:/api)?/datasets/([^/]+/[^/]+?)(?:\.git|/|$)(.*)", path)
        files = self.datasets.get(match[1]) if match else None
        if match is None or files is None:
            return 404, {"error": "no such dataset"}
        return self._of_dataset(match[1], match[2], files, body)

    def _of_dataset(self, name: str, rest: str, files: dict[str, bytes], body: bytes) -> tuple:
        if rest.startswith("preupload/"):
            modes = {
                path["path"]: "lfs" if path["path"].endswith(".parquet") else "regular"
                for path in json.loads(body)["files"]
            }
            known = {path: _oid(files[path], mode) for path, mode in modes.items() if path in files}
            answers = [
                {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": known.get(path)}
                for path, mode in modes.items()
            ]
            return 200, {"files": answers}
        if rest.endswith("info/lfs/objects/batch"):
            objects = [
                {
                    **one,
                    **(
                        {}
                        if one["oid"] in self.blobs
                        else {"actions": {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}}}
                    ),
                }
                for one in json.loads(body)["objects"]
            ]
            return 200, {"objects": objects, "transfer": "basic"}
        if rest.startswith("commit/"):
            fresh = dict(files)
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    fresh[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    fresh[value["path"]] = self.blobs[value["oid"]]
                elif line["key"] == "deletedFile":
                    del fresh[value["path"]]
            self.datasets[name] = fresh
            self.commits.append(name)
            return 200, {"commitUrl": f"{self.url}/datasets/{name}/commit/0", "commitOid": "0" * 40}
        if rest.startswith("tree/"):
            return self._tree(rest, files)
        if rest.startswith("resolve/"):
            path = rest.split("/", 2)[2]
            return (200, files[path]) if path in files else (404, {"error": "no such file"})
        return 200, {"id": name, "sha": "0" * 40, "private": self.private[name], "siblings": [], "tags": []}

    def _tree(self, rest: str, files: dict[str, bytes]) -> tuple:
        folder = "".join(f"{part}/" for part in rest.split("?", maxsplit=1)[0].replace("%2F", "/").split("/")[2:])
        inside = {path.removeprefix(folder): data for path, data in files.items() if path.startswith(folder)}
        if folder and not inside:
            return 404, {"error": "no such entry"}
        recursive = "recursive=true" in rest.lower()
        found = [
            {"type": "file", "path": f"{folder}{path}", "size": len(data), "oid": _oid(data, "regular")}
            for path, data in inside.items()
            if recursive or "/" not in path
        ]
        folders = {path.split("/")[0] for path in inside if "/" in path}
        return 200, [*found, *({"type": "directory", "path": f"{folder}{one}", "oid": "1"} for one in folders)]


def _oid(data: bytes, mode: str) -> str:
    if mode == "lfs":
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


@contextmanager
def serving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that huggingface_hub uses during the block, with a token."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if self.headers.get("Transfer-Encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            hub.requests.append(f"{self.command} {self.path}")
            hub.tokens.add(self.headers.get("Authorization"))
            status, data = hub.answer(self.command, self.path, body)
            if status == 200 and isinstance(data, bytes) and (asked := self.headers.get("Range")):
                first, last = map(int, asked.removeprefix("bytes=").split("-"))
                status, data = 206, data[first : last + 1]
            data = data if isinstance(data, bytes) else json.dumps(data).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if status == 404:
                self.send_header("X-Error-Code", "EntryNotFound" if "/tree/" in self.path else "RepoNotFound")
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = do_HEAD = _answer

        def log_message(self, *_) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        hub.url = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        template = "{repo_id}/resolve/{revision}/{filename}"
        changed = {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": f"{hub.url}/{template}"}
        for name, value in {**changed, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        yield hub
        server.shutdown()
