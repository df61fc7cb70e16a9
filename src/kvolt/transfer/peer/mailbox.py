"""Mailboxes: messages posted under a number, and their waiters. Either side may come first.

The mailbox number is the secret. An unknown number looks like an empty mailbox, so a reader with an unknown key times
out. The first waiter gets the message and the mailbox is removed; other waiters keep waiting. A message is sent at most
once: it is lost if the connection breaks after that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvolt.core.errors import Cancelled, DeadlineExceeded, InvalidRequest, KvoltError, Overloaded
from kvolt.transfer.reads.progress import ProgressThread, Timer

MAX_POSTS = 4096
MAX_WAITERS = 4096
"""Limit for local waiters, and separately for waiters at peers."""
MAX_MAILBOX = (1 << 63) - 1


@dataclass(slots=True, eq=False)
class PostedMessage:
    """A message in its mailbox."""

    mailbox: int
    message: bytes
    deadline: float
    on_done: Callable[[KvoltError | None], None]
    """Called once: None after delivery, else the error."""
    timer: Timer | None = None


class Waiter:
    """Waiter for a message, local or of a peer. Completes once."""

    def __init__(
        self,
        mailbox: int,
        deadline: float,
        on_message: Callable[[bytes], bool],
        on_error: Callable[[KvoltError], None],
    ) -> None:
        """`on_message` returns whether the message was accepted; False if the peer is gone."""
        self.mailbox = mailbox
        self.deadline = deadline
        self._on_message = on_message
        self._on_error = on_error
        self._cleanups: list[Callable[[], None]] = []
        self.is_done = False

    def add_cleanup(self, cleanup: Callable[[], None]) -> None:
        """Run `cleanup` on completion, before the callback."""
        self._cleanups.append(cleanup)

    def deliver(self, message: bytes) -> bool:
        if not self.cancel():
            return False
        return self._on_message(message)

    def fail(self, error: KvoltError) -> None:
        """No-op if done."""
        if self.cancel():
            self._on_error(error)

    def cancel(self) -> bool:
        """Complete without a callback. Return whether the waiter was pending."""
        if self.is_done:
            return False
        self.is_done = True
        for cleanup in self._cleanups:
            cleanup()
        return True


class Mailboxes:
    """Mailboxes of an agent. Progress thread only."""

    def __init__(self, progress: ProgressThread) -> None:
        self._progress = progress
        self._posted: dict[int, PostedMessage] = {}
        self._local: dict[int, dict[Waiter, None]] = {}
        """By mailbox, in order of arrival."""
        self._num_local = 0
        self._remote: dict[Waiter, None] = {}
        """Local waiters for mailboxes of peers."""

    def post(self, posted: PostedMessage) -> None:
        """InvalidRequest if the mailbox is in use, Overloaded at the limit, DeadlineExceeded if already expired."""
        mailbox = posted.mailbox
        if mailbox in self._posted:
            raise InvalidRequest("this mailbox is in use: choose another number", param="mailbox")
        if len(self._posted) >= MAX_POSTS:
            raise Overloaded(
                f"too many posted messages: limit is {MAX_POSTS}", queue="mailboxes", limit=MAX_POSTS
            )
        if posted.deadline <= self._progress.now():
            raise _not_received_error()
        self._posted[mailbox] = posted
        posted.timer = self._progress.call_at(
            posted.deadline, lambda: self._finish(posted, _not_received_error())
        )
        for waiter in list(self._local.get(mailbox, ())):
            if waiter.deliver(posted.message):
                self._finish(posted, None)
                return

    def withdraw(self, posted: PostedMessage) -> None:
        """No-op if done or unknown."""
        self._finish(posted, Cancelled("the message was withdrawn"))

    def wait_local(self, waiter: Waiter) -> None:
        """Wait for a local mailbox. Overloaded at the limit or DeadlineExceeded if already expired; `waiter` is
        unchanged."""
        self._check_limits(waiter, self._num_local)
        posted = self._posted.get(waiter.mailbox)
        if posted is not None:
            if waiter.deliver(posted.message):
                self._finish(posted, None)
            return
        self._local.setdefault(waiter.mailbox, {})[waiter] = None
        self._num_local += 1
        waiter.add_cleanup(lambda: self._remove_local(waiter))
        self._start_timeout(waiter)

    def wait_remote(self, waiter: Waiter) -> None:
        """Track a waiter for a mailbox of a peer. Raises like `wait_local`."""
        self._check_limits(waiter, len(self._remote))
        self._remote[waiter] = None
        waiter.add_cleanup(lambda: self._remote.pop(waiter, None))
        self._start_timeout(waiter)

    def close(self) -> None:
        error = Cancelled("the agent was closed")
        for posted in list(self._posted.values()):
            self._finish(posted, error)
        for waiter in [*self._remote, *(each for waiters in self._local.values() for each in waiters)]:
            waiter.fail(error)

    def _check_limits(self, waiter: Waiter, num_waiters: int) -> None:
        if num_waiters >= MAX_WAITERS:
            raise Overloaded(f"too many waiters: limit is {MAX_WAITERS}", queue="waiters", limit=MAX_WAITERS)
        if waiter.deadline <= self._progress.now():
            raise _not_posted_error()

    def _start_timeout(self, waiter: Waiter) -> None:
        waiter.add_cleanup(
            self._progress.call_at(waiter.deadline, lambda: waiter.fail(_not_posted_error())).cancel
        )

    def _remove_local(self, waiter: Waiter) -> None:
        waiters = self._local[waiter.mailbox]
        del waiters[waiter]
        self._num_local -= 1
        if not waiters:
            del self._local[waiter.mailbox]

    def _finish(self, posted: PostedMessage, error: KvoltError | None) -> None:
        if self._posted.get(posted.mailbox) is not posted:
            return
        del self._posted[posted.mailbox]
        if posted.timer is not None:
            posted.timer.cancel()
        posted.on_done(error)


def _not_received_error() -> KvoltError:
    return DeadlineExceeded("the message was not received before the deadline", stage="total")


def _not_posted_error() -> KvoltError:
    return DeadlineExceeded("no message was posted before the deadline", stage="total")
