"""Records what a real server answers, as the bytes it sent: the data of the tests in this folder.

    python tests/unit/engines/remote/record.py vllm http://127.0.0.1:8000      (or sglang)

The server must serve a small model; which one does not matter, but all of a kind are recorded from one. `MODEL` is the
served name. Answers are asked for with the very bodies that the engine sends.
"""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec.structs import replace

from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Sampling, StopConditions
from kvolt.engines.remote.dialect import Dialect
from kvolt.engines.remote.sglang_dialect import SglangDialect
from kvolt.engines.remote.vllm_dialect import VllmDialect

DATA = Path(__file__).parent / "data"
MODEL = "tiny"

GREEDY = Request(
    request_id=RequestId("r"),
    model=MODEL,
    token_ids=tuple(range(10, 110)),
    stop=StopConditions(max_tokens=6, ignore_eos=True),
    sampling=Sampling(temperature=0.0),
)


def asked(dialect: Dialect, first_tokens: list[int]) -> dict[str, tuple[str, bytes | None]]:
    stop = replace(GREEDY.stop, stop_token_ids=(first_tokens[2],), ignore_eos=False)
    return {
        "logprobs": (
            dialect.path,
            dialect.body(replace(GREEDY, sampling=replace(GREEDY.sampling, logprobs=2)), 0),
        ),
        "stopped": (dialect.path, dialect.body(replace(GREEDY, stop=stop), 0)),
        "resumed": (dialect.path, dialect.body(replace(GREEDY, prior_tokens=tuple(first_tokens[:2])), 0)),
        "too-long": (dialect.path, dialect.body(replace(GREEDY, token_ids=tuple(range(10, 110)) * 30), 0)),
        "models": ("/v1/models", None),
        "health": ("/health", None),
        "metrics": ("/metrics", None),
        "server-info": ("/server_info", None),
    }


def exchange(url: str, path: str, body: bytes | None) -> bytes:
    """All bytes of one answer: the connection is closed at its end, as we ask for it."""
    parts = urlsplit(url)
    head = f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n"
    if body is not None:
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    with socket.create_connection((parts.hostname or "", parts.port or 80), timeout=120) as sock:
        sock.sendall(head.encode() + b"\r\n" + (body or b""))
        received = b""
        while piece := sock.recv(65536):
            received += piece
    return received


def short(recorded: bytes) -> bytes:
    """Metrics without what nobody reads: fifty kilobytes of buckets."""
    head, _, body = recorded.partition(b"\r\n\r\n")
    if b"# HELP" not in body:
        return recorded
    left_out = (b"#", b"python_", b"process_")
    lines = [
        line
        for line in body.split(b"\n")
        if not line.startswith(left_out) and b"_bucket" not in line and b"_created" not in line
    ]
    body = b"\n".join(lines)
    head = re.sub(rb"content-length: \d+", b"content-length: %d" % len(body), head)
    return head + b"\r\n\r\n" + body


def tokens_of(recorded: bytes, kind: str) -> list[int]:
    body = recorded.partition(b"\r\n\r\n")[2]
    found: list[int] = []
    for line in body.replace(b"\r\n", b"\n").split(b"\n"):
        if line.startswith(b"data: {"):
            chunk = msgspec.json.decode(line[6:])
            if kind == "sglang":
                found = chunk["output_ids"]
            else:
                found += [token for choice in chunk["choices"] for token in choice["token_ids"]]
    return found


def main() -> None:
    kind, url = sys.argv[1:]
    dialect: Dialect = VllmDialect(url, MODEL) if kind == "vllm" else SglangDialect(url, ())
    folder = DATA / kind
    folder.mkdir(parents=True, exist_ok=True)
    first = exchange(url, dialect.path, dialect.body(GREEDY, 0))
    (folder / "greedy.http").write_bytes(first)
    for name, (path, body) in asked(dialect, tokens_of(first, kind)).items():
        (folder / f"{name}.http").write_bytes(short(exchange(url, path, body)))


if __name__ == "__main__":
    main()
