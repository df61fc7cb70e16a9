"""One process of a pair: takes commands as JSON lines over a socket, answers as JSON lines.

Started by `pair`: `python -m benchmarks.transfer.side JOB`. Ends when its socket does. What libraries
print has nothing to do with it, which is why it is a socket.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import socket
import sys
from typing import Any

from benchmarks.transfer.memories import Memories

POLL = "poll"
"""A command without an answer: make progress until the next one comes."""


def main() -> None:
    job: dict[str, Any] = json.loads(sys.argv[1])
    link = socket.socket(fileno=int(sys.argv[2]))
    if job["core"] is not None:
        os.sched_setaffinity(0, {job["core"]})
    lines = link.makefile("rb")
    try:
        module = importlib.import_module(f"benchmarks.transfer.{job['module']}")
        side = getattr(module, job["side"])(Memories(*job["memories"]))
    except Exception as error:
        _send(link, {"error": f"{type(error).__name__}: {error}"})
        return
    _send(link, side.hello())
    for line in lines:
        command = json.loads(line)
        if command["do"] == POLL:
            while not select.select([link], [], [], 0)[0]:
                side.progress()
            continue
        try:
            _send(link, getattr(side, command.pop("do"))(**command))
        except Exception as error:
            _send(link, {"error": f"{type(error).__name__}: {error}"})


def _send(link: socket.socket, answer: Any) -> None:
    link.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
