"""The loop in which a system under test sits: prompts come in, times go out, a JSON line each.

Standard library only: this file runs in every peer's own environment. It knows no engine. Prompts and answers go over a
socket, whose descriptor is the last argument, since libraries print to stdout.

    harness -> {"prompts": [[token, ...], ...], "num_output": 64}
    system  -> {"times": [[seconds, ...], ...], "tokens": [[token, ...], ...]}

`times` are seconds since the batch was handed over, one for each output token of each sequence, taken when the token
is known to the caller. The first line a system writes is {"ready": {...}}: what it says of itself. It ends with the
socket.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence

Generate = Callable[[Sequence[Sequence[int]], int], "Answers"]


def options() -> dict[str, str]:
    """KEY=VALUE words of this command."""
    return {key: value for key, _, value in (word.partition("=") for word in sys.argv[3:-1])}


class Answers:
    """Collects the tokens of one batch, and when each was there."""

    def __init__(self, num_sequences: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_sequences)]
        self.times: list[list[float]] = [[] for _ in range(num_sequences)]
        self._start = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._start

    def add(self, sequence: int, tokens: Sequence[int], at: float) -> None:
        self.tokens[sequence].extend(tokens)
        self.times[sequence].extend([at] * len(tokens))


def serve(describe: Mapping[str, object], generate: Generate) -> None:
    with socket.socket(fileno=int(sys.argv[-1])) as link, link.makefile("rw") as lines:
        os.set_inheritable(link.fileno(), False)

        def say(message: Mapping[str, object]) -> None:
            lines.write(json.dumps(message) + "\n")
            lines.flush()

        say({"ready": describe})
        for line in lines:
            ask = json.loads(line)
            answers = generate(ask["prompts"], ask["num_output"])
            say({"times": answers.times, "tokens": answers.tokens})
