"""Turns: exclusive use of cores or devices among the processes of one user on one machine.

For measurements that others' would falsify, such as the steps that engines measure at start. A turn is a lock file per
name in the user's state directory; the kernel releases it when its process ends, however it ends. The wait is
bounded, and where there can be no turn (an unusable directory, a wait that was too long) the caller goes ahead.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import sleep as sleep_s

from kvolt.runtime.clock import SystemClock
from kvolt.runtime.config.loader import state_dir
from kvolt.runtime.host.private_directory import distrust, make_private

log = logging.getLogger(__name__)

WAIT_S = 30.0
"""Longest wait for a turn: a dozen engines that measure one after the other."""
_RETRY_S = 0.05


@contextmanager
def host_turn(names: Sequence[str]) -> Iterator[None]:
    """A turn among all processes of this user on this machine."""
    with turn(names, Path(state_dir(os.environ)) / "turns", WAIT_S, SystemClock().monotonic, sleep_s):
        yield


@contextmanager
def turn(
    names: Sequence[str],
    folder: Path,
    wait_s: float,
    now: Callable[[], float],
    sleep: Callable[[float], None],
) -> Iterator[None]:
    """Hold the locks of all names, in their order in the alphabet so that two processes cannot block each other."""
    give_up_at = now() + wait_s
    with ExitStack() as held:
        try:
            make_private(folder)
            doubt = distrust(folder)
            if doubt is not None:
                raise OSError(f"{folder} {doubt}")
            for name in sorted(names):
                descriptor = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                held.callback(os.close, descriptor)
                while not _try_lock(descriptor):
                    if now() >= give_up_at:
                        raise OSError(f"{name} is in use after {wait_s:g} s")
                    sleep(_RETRY_S)
        except OSError as error:
            log.warning("measuring without a turn: reason=%s", error)
            held.close()
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
