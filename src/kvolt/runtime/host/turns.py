"""Exclusive use of cores or devices among the processes of one user on one machine.

For measurements that concurrent ones would distort, such as the steps that engines measure at start. There is one
lock file per name in the user's state directory; the kernel releases a lock when its process ends. The wait is
bounded; if the lock cannot be acquired (unusable directory, time-out), the caller continues without it.
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
from kvolt.runtime.host.private_directory import make_private, untrusted_reason

log = logging.getLogger(__name__)

WAIT_S = 30.0
"""Maximum wait: enough for a dozen engines that measure one after the other."""
_RETRY_S = 0.05


@contextmanager
def host_turn(names: Sequence[str]) -> Iterator[None]:
    """Hold the named locks among all processes of this user on this machine."""
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
    """Hold the locks of all names, acquired in sorted order to prevent deadlocks."""
    deadline = now() + wait_s
    with ExitStack() as locks:
        try:
            make_private(folder)
            reason = untrusted_reason(folder)
            if reason is not None:
                raise OSError(f"{folder} {reason}")
            for name in sorted(names):
                descriptor = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                locks.callback(os.close, descriptor)
                while not _try_lock(descriptor):
                    if now() >= deadline:
                        raise OSError(f"{name} is in use after {wait_s:g} s")
                    sleep(_RETRY_S)
        except OSError as error:
            log.warning("measuring without exclusive use: reason=%s", error)
            locks.close()
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
