"""How long one large request keeps the frontend's event loop from other clients.

    python -m benchmarks.frontend.stalls

One frontend and one sim worker as processes. While a large body is on its way a second client asks `/live` again and
again on one connection; the time of its slowest answer is the stall. The same without a large body is in the last
column: on a machine that does other things as well it is not zero.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.frontend import tiny_model
from benchmarks.frontend.system import Processes, clean_environ, free_port

_MODEL = tiny_model.NAME
_PAUSE_S = 0.001
_QUIET_S = 1.0
_HELLO = [{"role": "user", "content": "hello"}]
_CHAT, _TEXT = "/v1/chat/completions", "/v1/completions"

Body = dict[str, Any]
_BODIES: dict[str, tuple[str, Callable[[], Body]]] = {
    "small chat": (_CHAT, lambda: {"messages": _HELLO}),
    "190,000 template kwargs": (
        _CHAT,
        lambda: {"messages": _HELLO, "chat_template_kwargs": {f"k{n}": n for n in range(190_000)}},
    ),
    "90,000 nested kwargs": (
        _CHAT,
        lambda: {"messages": _HELLO, "chat_template_kwargs": {"a": {f"k{n}": n for n in range(90_000)}}},
    ),
    "16,384 messages": (
        _CHAT,
        lambda: {"messages": [{"role": "user", "content": f"hi {n}"} for n in range(16_384)]},
    ),
    "message of 15 MB": (_CHAT, lambda: {"messages": [{"role": "user", "content": "word " * 3_000_000}]}),
    "message of 14 MB, escapes": (
        _CHAT,
        lambda: {"messages": [{"role": "user", "content": '\n"' * 3_500_000}]},
    ),
    "2,900,000 escapes": (_CHAT, lambda: {"messages": [{"role": "user", "content": '\n"' * 1_450_000}]}),
    "unknown fields of 15 MB": (_CHAT, lambda: {"messages": _HELLO, "unknown": ["x" * 10] * 1_050_000}),
    "1,000,000 token ids": (_TEXT, lambda: {"prompt": [7 + n % 200 for n in range(1_000_000)]}),
    "100,000 tools": (
        _CHAT,
        lambda: {
            "messages": _HELLO,
            "tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(100_000)],
        },
    ),
    "1,536 tools": (_CHAT, lambda: {"messages": _HELLO, "tools": [_tool(n) for n in range(1536)]}),
    "detokenize 1,000,000": ("/detokenize", lambda: {"tokens": [7 + n % 200 for n in range(1_000_000)]}),
    "tokenize 10 MB": ("/tokenize", lambda: {"prompt": "word " * 2_000_000, "return_token_strs": True}),
}


def _tool(number: int) -> Body:
    properties = {f"p{n}": {"type": "string", "description": "some text"} for n in range(15)}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}


def _poll(port: int, control: Connection) -> None:
    """In a process of its own. For each message one reply: the longest answer since the last, in seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    longest = 0.0
    while True:
        if control.poll():
            if control.recv() is None:
                return
            control.send(longest)
            longest = 0.0
        started = time.perf_counter()
        connection.request("GET", "/live")
        connection.getresponse().read()
        longest = max(longest, time.perf_counter() - started)
        time.sleep(_PAUSE_S)


def _post(port: int, path: str, body: bytes) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", path, body, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    message = "" if response.status == 200 else json.loads(answer)["error"]["message"]
    return response.status, message[:70]


def _longest(control: Connection) -> float:
    control.send(True)
    return float(control.recv())


def _measure(port: int, only: list[str]) -> None:
    control, theirs = multiprocessing.Pipe()
    poller = multiprocessing.get_context("spawn").Process(target=_poll, args=(port, theirs))
    poller.start()
    print(f"{'body':28}{'MB':>6}{'status':>8}{'total s':>9}{'stall ms':>10}{'without':>9}  answer")
    try:
        for name, (path, make) in _BODIES.items():
            if only and not any(word in name for word in only):
                continue
            limit = {"max_tokens": 1} if path.startswith("/v1") else {}
            body = json.dumps({"model": _MODEL, **limit, **make()}).encode()
            time.sleep(_QUIET_S)
            _longest(control)
            time.sleep(_QUIET_S)
            quiet = _longest(control)
            started = time.perf_counter()
            status, message = _post(port, path, body)
            total = time.perf_counter() - started
            stall = _longest(control)
            print(
                f"{name:28}{len(body) / 1e6:6.1f}{status:8}{total:9.2f}{stall * 1e3:10.1f}{quiet * 1e3:9.1f}"
                f"  {message}",
                flush=True,
            )
    finally:
        control.send(None)
        poller.join()


def main(arguments: list[str]) -> None:
    with Processes("kvolt") as processes:
        env = clean_environ(
            KVOLT_DISCOVERY_PATH=str(processes.folder / "discovery"), KVOLT_LOG_LEVEL="warning"
        )
        port = free_port()
        kvolt = [sys.executable, "-m", "kvolt"]
        processes.start("frontend", [*kvolt, "frontend", "--port", str(port)], env)
        engine = {"context_length": 2**21, "kv_blocks": 2**18, "latency": '{"base_s": 0.001}'}
        given = [part for name, value in engine.items() for part in ("--arg", f"{name}={value}")]
        processes.start("worker", [*kvolt, "worker", _MODEL, "--engine", "sim", *given], env)
        processes.wait_ready(port)
        _measure(port, arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
