"""A server that streams what a test tells it to, and a terminal in which a command runs."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

CERTIFICATE = Path(__file__).parent / "test_chat_tls.pem"
"""A self-signed one for localhost, with its key: good for these tests and nothing else."""

DONE = b"data: [DONE]\n\n"


def event(content: str | None = None, finish: str | None = None, **delta: Any) -> bytes:
    """One chunk of an answer as it crosses the wire."""
    if content is not None:
        delta["content"] = content
    chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


def whole(*texts: str) -> Script:
    """An ordinary answer: a token per event, usage, and the end."""
    events = [event("", role="assistant"), *(event(text) for text in texts), event(finish="stop")]
    return Script([*events, usage(7, len(texts)), DONE])


@dataclass
class Script:
    """One answer: bytes are sent as they are cut here, an Event is waited for."""

    parts: Sequence[bytes | threading.Event]
    status: int = 200
    content_type: str = "text/event-stream"
    headers: Mapping[str, str] = field(default_factory=dict)
    breaks_off: bool = False
    """The connection goes without the end of the body."""


def refusal(status: int, body: bytes, **headers: str) -> Script:
    return Script([body], status, "application/json", headers)


@dataclass
class Asked:
    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]


class Server:
    """`with Server(...) as server`: answers each chat request with the next script."""

    def __init__(self, *scripts: Script, models: Sequence[str] = ("m",), tls: bool = False) -> None:
        self.scripts = deque(scripts)
        self.models: bytes | Script = json.dumps({"data": [{"id": name} for name in models]}).encode()
        self.asked: list[Asked] = []
        self.gone = threading.Event()
        """A client has closed its connection in the middle of an answer."""
        lab = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_args: object) -> None:
                pass

            def do_GET(self) -> None:
                lab.asked.append(Asked(self.path, dict(self.headers), {}))
                script = lab.models
                self.send(Script([script], 200, "application/json") if isinstance(script, bytes) else script)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                lab.asked.append(Asked(self.path, dict(self.headers), body))
                self.send(lab.scripts.popleft())

            def send(self, script: Script) -> None:
                self.close_connection = True
                self.send_response(script.status)
                self.send_header("content-type", script.content_type)
                self.send_header("transfer-encoding", "chunked")
                for name, value in script.headers.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                try:
                    for part in script.parts:
                        if isinstance(part, threading.Event):
                            self.wait(part)
                        elif part:
                            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
                    if not script.breaks_off:
                        self.wfile.write(b"0\r\n\r\n")
                except OSError:
                    lab.gone.set()

            def wait(self, part: threading.Event) -> None:
                while not part.wait(0.005):
                    readable, _, _ = select.select([self.connection], [], [], 0)
                    if readable and not self.connection.recv(1):
                        raise ConnectionResetError

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(CERTIFICATE)
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
            self._http.handle_error = lambda *_args: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self.port = self._http.server_address[1]
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.address}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A command with a terminal of its own, so that control keys are signals to it."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], cwd: Path) -> None:
        self.keys, screen = pty.openpty()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _TAKE_TERMINAL, *command],
                stdin=screen,
                stdout=screen,
                stderr=screen,
                env={**env, "TERM": "xterm", "COLUMNS": "120"},
                cwd=cwd,
                start_new_session=True,
            )
        finally:
            os.close(screen)
        self.text = ""
        self._seen = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def type(self, keys: str) -> None:
        os.write(self.keys, keys.encode())

    def at_prompt(self, keys: str) -> None:
        """Type where a line is being read, as late as a person would: between the prompt and the wait for
        keys, Python's readline notes a signal only at the next key."""
        self.sees("> ")
        time.sleep(0.2 if keys < " " else 0)
        self.type(keys)

    def sees(self, pattern: str, timeout_s: float = 20.0) -> re.Match[str]:
        """Wait for a pattern after what was seen before."""
        deadline = time.monotonic() + timeout_s
        while (found := re.compile(pattern).search(self.text, self._seen)) is None:
            assert time.monotonic() < deadline, f"waited in vain for {pattern!r} in {self.text!r}"
            if not self._read() and self._process.poll() is not None:
                raise AssertionError(f"it ended without {pattern!r}: {self.text!r}")
        self._seen = found.end()
        return found

    def ended(self, timeout_s: float = 20.0) -> int:
        """Its exit code; reads what it says up to then."""
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end: {self.text!r}"
            self._read()
        while self._read():
            pass
        return self._process.returncode

    def _read(self) -> bool:
        if not select.select([self.keys], [], [], 0.05)[0]:
            return False
        try:
            data = os.read(self.keys, 65536)
        except OSError:  # Linux: nobody has it open any more
            return False
        self.text += data.decode(errors="replace")
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self.keys)
