"""An imitation of the Hugging Face hub on loopback: enough of its API for the real client library.

Repositories with commits, large files behind a redirect with their checksum, ranges, gated and missing ones; and
switches for what goes wrong: connections cut in the middle, wrong bytes, no ranges, a server that fails.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self
from urllib.parse import unquote, urlsplit

LARGE = (".safetensors", ".gguf", ".bin", "tokenizer.json")
TOKEN = "hf_imitation"


@dataclass(slots=True)
class Repo:
    """One commit, on `main` and under the names in `tags`."""

    files: Mapping[str, bytes]
    gated: bool = False
    tags: tuple[str, ...] = ()

    @property
    def commit(self) -> str:
        digest = hashlib.sha1()
        for name in sorted(self.files):
            digest.update(name.encode() + self.files[name])
        return digest.hexdigest()

    def has(self, revision: str) -> bool:
        return revision in ("main", self.commit, *self.tags)


class Asked(NamedTuple):
    """A request that came."""

    method: str
    path: str
    range: str | None
    token: str | None


@dataclass(slots=True)
class Faults:
    cut_after: list[int] = field(default_factory=list)
    """Each number cuts one answer with large bytes after that many of them, the first that is long enough."""
    cut_always_after: int | None = None
    corrupt: bool = False
    no_ranges: bool = False
    failing: int = 0
    """So many answers with large bytes are a 503."""
    hold: threading.Event | None = None
    """Large answers wait for it after their first half."""


class FakeHub:
    def __init__(self, repos: Mapping[str, Repo]) -> None:
        self.repos = dict(repos)
        self.faults = Faults()
        self.asked: list[Asked] = []
        hub = self

        class Handler(_Handler):
            served = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        # As the real one's, on another host: the client takes a file's facts from the redirect, not from there.
        self.large_url = self.url.replace("127.0.0.1", "localhost")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def large_asked(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.path.startswith("/large/")]

    def blob(self, sha256: str) -> bytes | None:
        for repo in self.repos.values():
            for data in repo.files.values():
                if hashlib.sha256(data).hexdigest() == sha256:
                    return data
        return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization")
        self.served.asked.append(Asked(self.command, path, self.headers.get("Range"), token))
        parts = path.strip("/").split("/")
        if parts[0] == "large":
            self._large(parts[1])
            return
        api = parts[:2] == ["api", "models"]
        owner = parts[2:] if api else parts
        repo = self.served.repos.get("/".join(owner[:2]))
        if repo is None:
            self._refuse(401, "RepoNotFound")
        elif repo.gated and token != f"Bearer {TOKEN}":
            self._refuse(401, "GatedRepo")
        elif len(owner) > 3 and not repo.has(owner[3]):
            self._refuse(404, "RevisionNotFound")
        elif not api:
            self._file(repo, "/".join(owner[4:]))
        elif owner[2:3] == ["tree"]:
            self._json([_tree_entry(name, data) for name, data in repo.files.items()])
        else:
            siblings = [_sibling(name, data) for name, data in repo.files.items()]
            self._json({"id": "/".join(owner[:2]), "sha": repo.commit, "siblings": siblings})

    def _file(self, repo: Repo, name: str) -> None:
        data = repo.files.get(name)
        if data is None:
            self._refuse(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": repo.commit}
        if not name.endswith(LARGE):
            self._send(200, data, headers | {"ETag": f'"{_git_id(data)}"'})
            return
        digest = hashlib.sha256(data).hexdigest()
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data))}
        self._send(302, b"", headers | linked | {"Location": f"{self.served.large_url}/large/{digest}"})

    def _large(self, sha256: str) -> None:
        data, faults = self.served.blob(sha256), self.served.faults
        assert data is not None
        if self.command == "GET" and faults.failing:
            faults.failing -= 1
            self._refuse(503, "Busy")
            return
        start = 0
        if self.headers.get("Range") and not faults.no_ranges:
            start = int(self.headers["Range"].removeprefix("bytes=").rstrip("-"))
        rest = data[start:]
        if faults.corrupt:
            rest = bytes(len(rest))
        ranged = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        self._send(
            206 if start else 200, rest, ranged | {"ETag": f'"{sha256}"', "Accept-Ranges": "bytes"}, True
        )

    def _send(self, status: int, data: bytes, headers: Mapping[str, str], large: bool = False) -> None:
        faults = self.served.faults
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cut = faults.cut_always_after
        if large and faults.cut_after and faults.cut_after[0] < len(data):
            cut = faults.cut_after.pop(0)
        with suppress(OSError):  # a client that has gone
            if large and faults.hold is not None:
                self.wfile.write(data[: len(data) // 2])
                self.wfile.flush()
                faults.hold.wait(20)
                data = data[len(data) // 2 :]
            if large and cut is not None and cut < len(data):
                self.wfile.write(data[:cut])
                self.wfile.flush()
                self.close_connection = True
                return
            self.wfile.write(data)

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _json(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _sibling(name: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": _git_id(data)}
    if name.endswith(LARGE):
        entry["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 130}
    return entry


def _tree_entry(name: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": _git_id(data)}
    if name.endswith(LARGE):
        entry["lfs"] = {"size": len(data), "oid": hashlib.sha256(data).hexdigest(), "pointerSize": 130}
    return entry
