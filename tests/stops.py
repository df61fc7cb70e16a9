"""Run a command while its processes are stopped at random, as by a busy machine.

    python -m tests.stops [--seed N] [--max-stop-s S] [--mean-pause-s S] -- COMMAND...

Every process that the command starts, directly or not, may be stopped (SIGSTOP) for up to `--max-stop-s` seconds and
then continued (SIGCONT). The command itself is not stopped. The seed determines times and choices; runs differ as far
as the processes start at other times. Exits with the exit code of the command.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Sequence

import psutil

MAX_STOP_S = 1.0
MEAN_PAUSE_S = 0.5
"""Mean time between two stops."""


class Stopper:
    """Stops one random child process at a time while a command runs."""

    def __init__(self, seed: int, max_stop_s: float, mean_pause_s: float) -> None:
        self._random = random.Random(seed)
        self._max_stop_s = max_stop_s
        self._mean_pause_s = mean_pause_s
        self.num_stops = 0

    def run(self, command: Sequence[str]) -> int:
        """Exit code of the command."""
        with subprocess.Popen(command) as process:
            try:
                while not _has_ended(process, self._random.expovariate(1 / self._mean_pause_s)):
                    self._stop_child(process)
            except BaseException:
                process.terminate()
                raise
            return process.returncode

    def _stop_child(self, process: subprocess.Popen[bytes]) -> None:
        children = psutil.Process(process.pid).children(recursive=True)
        if not children:
            return
        child = self._random.choice(children)
        # psutil refuses to signal another process that has the same pid by now.
        with contextlib.suppress(psutil.Error):
            child.suspend()
            self.num_stops += 1
            try:
                _has_ended(process, self._random.uniform(0, self._max_stop_s))
            finally:
                child.resume()


def _has_ended(process: subprocess.Popen[bytes], wait_s: float) -> bool:
    """Whether the command has ended, waiting at most this long for it."""
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        return False
    return True


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.stops", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seed", type=int, default=None, help="seed of the stops; default: a random one, printed"
    )
    parser.add_argument(
        "--max-stop-s", type=float, default=MAX_STOP_S, help="longest stop in seconds (%(default)s)"
    )
    parser.add_argument(
        "--mean-pause-s",
        type=float,
        default=MEAN_PAUSE_S,
        help="mean time between stops in seconds (%(default)s)",
    )
    parser.add_argument("command", nargs="+", help="the command, after --")
    options = parser.parse_args(arguments)
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    stopper = Stopper(seed, options.max_stop_s, options.mean_pause_s)
    started_at = time.monotonic()
    code = stopper.run(options.command)
    elapsed_s = time.monotonic() - started_at
    print(
        f"stops: seed={seed} stops={stopper.num_stops} elapsed={elapsed_s:.0f} s exit={code}", file=sys.stderr
    )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
