"""Stall of the frontend's event loop by one large request.

    python -m benchmarks.frontend.stalls

One frontend and one sim worker as processes. While a large body is processed, a second client requests `/live`
repeatedly on one connection; the time of its slowest answer is the stall. The last column is the same without a large
body: on a busy machine it is not zero.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.frontend import tiny_model
from benchmarks.harness import parser_for, report, run, say, table
from benchmarks.processes import KVOLT, Processes, arg_flags, free_port

_MODEL = tiny_model.NAME
_PAUSE_S = 0.001
_CHAT = "/v1/chat/completions"

Body = dict[str, Any]


def _chat(**more: Any) -> Body:
    return {"messages": [{"role": "user", "content": "hello"}], **more}


def _message(content: str) -> Body:
    return {"messages": [{"role": "user", "content": content}]}


def _numbered(count: int) -> dict[str, int]:
    return {f"k{n}": n for n in range(count)}


def _tool(number: int, num_properties: int = 0) -> Body:
    properties = {f"p{n}": {"type": "string", "description": "some text"} for n in range(num_properties)}
    parameters = {"parameters": {"type": "object", "properties": properties}} if properties else {}
    return {"type": "function", "function": {"name": f"f{number}", **parameters}}


def _token_ids() -> list[int]:
    return [7 + n % 200 for n in range(1_000_000)]


_BODIES: dict[str, tuple[str, Callable[[], Body]]] = {
    "small chat": (_CHAT, _chat),
    "190,000 template kwargs": (_CHAT, lambda: _chat(chat_template_kwargs=_numbered(190_000))),
    "90,000 nested kwargs": (_CHAT, lambda: _chat(chat_template_kwargs={"a": _numbered(90_000)})),
    "16,384 messages": (
        _CHAT,
        lambda: {"messages": [_message(f"hi {n}")["messages"][0] for n in range(16_384)]},
    ),
    "message of 15 MB": (_CHAT, lambda: _message("word " * 3_000_000)),
    "message of 14 MB, escapes": (_CHAT, lambda: _message('\n"' * 3_500_000)),
    "2,900,000 escapes": (_CHAT, lambda: _message('\n"' * 1_450_000)),
    "unknown fields of 15 MB": (_CHAT, lambda: _chat(unknown=["x" * 10] * 1_050_000)),
    "1,000,000 token ids": ("/v1/completions", lambda: {"prompt": _token_ids()}),
    "100,000 tools": (_CHAT, lambda: _chat(tools=[_tool(n) for n in range(100_000)])),
    "1,536 tools": (_CHAT, lambda: _chat(tools=[_tool(n, 15) for n in range(1536)])),
    "detokenize 1,000,000": ("/detokenize", lambda: {"tokens": _token_ids()}),
    "tokenize 10 MB": ("/tokenize", lambda: {"prompt": "word " * 2_000_000, "return_token_strs": True}),
}


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


def _measure(port: int, names: list[str], quiet_s: float) -> list[tuple[str, ...]]:
    control, theirs = multiprocessing.Pipe()
    poller = multiprocessing.get_context("spawn").Process(target=_poll, args=(port, theirs))
    poller.start()
    rows: list[tuple[str, ...]] = []
    try:
        for name in names:
            path, make = _BODIES[name]
            limit = {"max_tokens": 1} if path.startswith("/v1") else {}
            body = json.dumps({"model": _MODEL, **limit, **make()}).encode()
            time.sleep(quiet_s)
            _longest(control)
            time.sleep(quiet_s)
            quiet = _longest(control)
            started = time.perf_counter()
            status, message = _post(port, path, body)
            total = time.perf_counter() - started
            stall = _longest(control)
            times = (f"{total:.2f}", f"{stall * 1e3:.1f}", f"{quiet * 1e3:.1f}")
            rows.append((name, f"{len(body) / 1e6:.1f}", str(status), *times, message))
            say("  ".join(rows[-1]))
    finally:
        control.send(None)
        poller.join()
    return rows


def main() -> None:
    options = parser_for(__file__, __doc__).parse_args()
    with Processes("stalls") as processes:
        env, port = processes.environ(), free_port()
        processes.start("frontend", [*KVOLT, "frontend", "--port", str(port)], env)
        engine = {"context_length": 2**21, "kv_blocks": 2**18, "latency": '{"base_s": 0.001}'}
        processes.start("worker", [*KVOLT, "worker", _MODEL, "--engine", "sim", *arg_flags(engine)], env)
        processes.wait_answer(port, _MODEL)
        rows = _measure(port, *((["small chat"], 0.1) if options.smoke else (list(_BODIES), 1.0)))
    text = table("body | MB | status | total s | stall ms | without | answer", rows)
    report(options, text, {"rows": rows})


if __name__ == "__main__":
    run(main)
