"""Runs the `kvolt` command with a sampler in it: `python -m benchmarks.frontend.profiled VERB ...`.

A timer of CPU time interrupts the main thread, and the handler notes the stack; the process runs at full
speed between samples, unlike under a tracing profiler. Time in C (a socket write, the tokenizer) counts
for the line that called it or, in the event loop, for what runs next.

Takes commands on its input: `start`, and `stop PATH`, which writes what was counted as JSON.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType

from kvolt.cli.main import main

_INTERVAL_S = 0.002


class Sampler:
    """Counts samples by function and by line, where time was spent and on the way there."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.num_samples = 0
        self.own: Counter[str] = Counter()
        self.total: Counter[str] = Counter()
        self.lines: Counter[str] = Counter()

    def take(self, _: int, frame: FrameType | None) -> None:
        if frame is None:
            return
        self.num_samples += 1
        name = _function(frame)
        self.own[name] += 1
        self.lines[f"{_file(frame)}:{frame.f_lineno} {frame.f_code.co_name}"] += 1
        seen = set()
        above: FrameType | None = frame
        while above is not None:
            seen.add(_function(above))
            above = above.f_back
        self.total.update(seen)

    def obey(self, command: str) -> None:
        verb, _, path = command.strip().partition(" ")
        if verb == "start":
            self._clear()
            signal.setitimer(signal.ITIMER_PROF, _INTERVAL_S, _INTERVAL_S)
        elif verb == "stop":
            signal.setitimer(signal.ITIMER_PROF, 0)
            found = {
                "num_samples": self.num_samples,
                "own": self.own,
                "total": self.total,
                "lines": self.lines,
            }
            part = Path(path + ".part")
            part.write_text(json.dumps(found))
            part.rename(path)


def _function(frame: FrameType) -> str:
    return f"{_file(frame)} {frame.f_code.co_qualname}"


def _file(frame: FrameType) -> str:
    """The path from its package on; long enough to tell files apart."""
    return "/".join(Path(frame.f_code.co_filename).parts[-3:])


def _listen(sampler: Sampler) -> None:
    for line in sys.stdin:
        sampler.obey(line)


if __name__ == "__main__":
    the_sampler = Sampler()
    signal.signal(signal.SIGPROF, the_sampler.take)
    signal.siginterrupt(signal.SIGPROF, False)
    threading.Thread(target=_listen, args=(the_sampler,), daemon=True).start()
    sys.exit(main())
