"""Rooms: notes that somebody left under a number, and those who come for them; either may be there first.

Owns who waits where, and until when. The number is the secret: a room that nobody has posted looks like any other, so
who has a wrong number waits until his time is over. A note goes to one guest, the first who came, and then the room is
as if it had never been: others wait on. A note that was sent is gone: if the connection breaks then, nobody has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvolt.core.errors import Cancelled, DeadlineExceeded, InvalidRequest, KvoltError, Overloaded
from kvolt.transfer.peer.progress import Progress, Timer

MAX_POSTS = 4096
MAX_GUESTS = 4096
"""Here, and as many of ours at peers."""
LAST_ROOM = (1 << 63) - 1


@dataclass(slots=True, eq=False)
class Posted:
    """A note in its room."""

    room: int
    note: bytes
    deadline: float
    on_over: Callable[[KvoltError | None], None]
    """Told once: None when it went to somebody, else why not."""
    timer: Timer | None = None


class Guest:
    """Somebody who waits for a note: one of ours, here or at a peer, or a peer's. It is told one thing, once."""

    def __init__(
        self,
        room: int,
        deadline: float,
        on_note: Callable[[bytes], bool],
        on_failed: Callable[[KvoltError], None],
    ) -> None:
        """`on_note` says whether it took the note: a peer may turn out to be gone."""
        self.room = room
        self.deadline = deadline
        self._on_note = on_note
        self._on_failed = on_failed
        self._leave: list[Callable[[], None]] = []
        self.is_over = False

    def then(self, leave: Callable[[], None]) -> None:
        """To be done when it waits no more, before it is told why."""
        self._leave.append(leave)

    def take(self, note: bytes) -> bool:
        if not self.go():
            return False
        return self._on_note(note)

    def fail(self, error: KvoltError) -> None:
        """Not an error for one that is over."""
        if self.go():
            self._on_failed(error)

    def go(self) -> bool:
        """It waits no more, and is told nothing. Whether it did."""
        if self.is_over:
            return False
        self.is_over = True
        for leave in self._leave:
            leave()
        return True


class Rooms:
    """See the module. In the progress thread only."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._posted: dict[int, Posted] = {}
        self._here: dict[int, dict[Guest, None]] = {}
        """By the room they wait for, in the order in which they came."""
        self._num_here = 0
        self._away: dict[Guest, None] = {}
        """Ours at peers."""

    def post(self, posted: Posted) -> None:
        """InvalidRequest for a room that is taken, Overloaded when there are too many, DeadlineExceeded when late."""
        room = posted.room
        if room in self._posted:
            raise InvalidRequest("this room is taken: choose another number", param="room")
        if len(self._posted) >= MAX_POSTS:
            raise Overloaded(f"{MAX_POSTS} rooms are posted already", queue="rooms", limit=MAX_POSTS)
        if posted.deadline <= self._progress.now():
            raise _unfetched()
        self._posted[room] = posted
        posted.timer = self._progress.at(posted.deadline, lambda: self._over(posted, _unfetched()))
        for guest in list(self._here.get(room, ())):
            if guest.take(posted.note):
                self._over(posted, None)
                return

    def take_back(self, posted: Posted) -> None:
        """Not an error for what is over, or never was."""
        self._over(posted, Cancelled("the note was taken back"))

    def meet_here(self, guest: Guest) -> None:
        """Overloaded when there are too many, DeadlineExceeded when it is late: then it was told nothing."""
        self._check(guest, self._num_here)
        posted = self._posted.get(guest.room)
        if posted is not None:
            if guest.take(posted.note):
                self._over(posted, None)
            return
        self._here.setdefault(guest.room, {})[guest] = None
        self._num_here += 1
        guest.then(lambda: self._left(guest))
        self._until_late(guest)

    def meet_away(self, guest: Guest) -> None:
        """One that a peer will be asked for. The same errors."""
        self._check(guest, len(self._away))
        self._away[guest] = None
        guest.then(lambda: self._away.pop(guest, None))
        self._until_late(guest)

    def close(self) -> None:
        error = Cancelled("the agent was closed")
        for posted in list(self._posted.values()):
            self._over(posted, error)
        for guest in [*self._away, *(each for guests in self._here.values() for each in guests)]:
            guest.fail(error)

    def _check(self, guest: Guest, num_guests: int) -> None:
        if num_guests >= MAX_GUESTS:
            raise Overloaded(f"{MAX_GUESTS} wait for a note already", queue="guests", limit=MAX_GUESTS)
        if guest.deadline <= self._progress.now():
            raise _unposted()

    def _until_late(self, guest: Guest) -> None:
        guest.then(self._progress.at(guest.deadline, lambda: guest.fail(_unposted())).cancel)

    def _left(self, guest: Guest) -> None:
        guests = self._here[guest.room]
        del guests[guest]
        self._num_here -= 1
        if not guests:
            del self._here[guest.room]

    def _over(self, posted: Posted, error: KvoltError | None) -> None:
        if self._posted.get(posted.room) is not posted:
            return
        del self._posted[posted.room]
        if posted.timer is not None:
            posted.timer.cancel()
        posted.on_over(error)


def _unfetched() -> KvoltError:
    return DeadlineExceeded("nobody has come for the note in time", stage="total")


def _unposted() -> KvoltError:
    return DeadlineExceeded("no note was posted in this room in time", stage="total")
