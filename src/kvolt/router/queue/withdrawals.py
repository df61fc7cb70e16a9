"""TakeBack: requests that were sent to a worker and have not begun, and whether they would be better off elsewhere.

A request is bound by what was known when it came. When another worker has room by then, the last one in the longest
queue is asked back: whoever carries it is told where it could go (`Recall`), and moves it if its worker says that it
has not begun. That costs a message to and fro and its place in the queue, so it is done only where it would begin much
earlier, and to one request a few times at most: nothing goes back and forth.

Owns which requests those are. Knows neither loop nor clock; when to look is its owner's to say.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvolt.core.delta import Usage
from kvolt.core.errors import KvoltError
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request
from kvolt.router.place import Place
from kvolt.router.port import Decision, Recall

_EVERY_S = 0.02
"""Between two looks, however much happens: each asks for what a decision would come to."""
_MOST_AT_ONCE = 4
_MOST_LOOKED_AT = 8
"""Of the requests at the end of a queue, until one is found that can be moved."""
_SHARE = 0.5
"""Of the time that it would still take where it is, what must be gained at least."""
_LATE = 2.0
"""So many times what was foreseen, without a token, and one that is alone there is taken to be stuck."""
_SLOWEST = 3.0
"""By how much a worker may be slower than foreseen, as far as one request shows."""


class Movable(Protocol):
    """The router's part that is asked: see `queued.LateRouter`."""

    def try_route(
        self, request: Request, excluded: frozenset[InstanceId] = frozenset()
    ) -> Decision | None: ...

    def free(self, decision: Decision, usage: Usage | None) -> None: ...

    def foresee_s(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> float | None: ...

    def queue_s(self, decision: Decision) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeBackOptions:
    max_moves: int = 2
    """Of one request. 0: none is ever taken back."""
    min_gain_s: float = 0.25


@dataclass(slots=True, eq=False)
class _Sent:
    decision: Decision
    request: Request
    excluded: frozenset[InstanceId]
    at: float
    num_moves: int
    is_asked: bool = False
    """It was asked back already; if it is still here, its worker had begun it."""

    @property
    def foreseen_s(self) -> float:
        return (self.decision.predicted_ms or 0.0) / 1e3


class _Queue:
    """Those that one place has and has not begun, the last one last."""

    __slots__ = ("num_asked", "sent")

    def __init__(self) -> None:
        self.sent: OrderedDict[int, _Sent] = OrderedDict()
        """By booking."""
        self.num_asked = 0
        """Of these, they are as good as gone."""

    @property
    def first(self) -> _Sent:
        return next(iter(self.sent.values()))

    def pop(self, booking: int) -> None:
        sent = self.sent.pop(booking, None)
        if sent is not None:
            self.num_asked -= sent.is_asked

    def ask(self, sent: _Sent) -> None:
        sent.is_asked = True
        self.num_asked += 1


class TakeBack:
    """See the module."""

    def __init__(self, router: Movable, now: Callable[[], float], options: TakeBackOptions) -> None:
        self._router = router
        self._now = now
        self._options = options
        self._looked_at = float("-inf")
        self._places: dict[Place, _Queue] = {}
        """Where something has not begun."""

    @property
    def num_unstarted(self) -> int:
        return sum(len(queue.sent) for queue in self._places.values())

    def sent(self, decision: Decision, request: Request, excluded: frozenset[InstanceId]) -> None:
        self._add(_Sent(decision, request, excluded, self._now(), 0))

    def forget(self, decision: Decision) -> None:
        """It has begun, or is over. Not an error for one that is not here."""
        place = _place(decision)
        queue = self._places.get(place)
        if queue is not None:
            queue.pop(decision.booking)
            if not queue.sent:
                del self._places[place]

    def is_due(self, now: float) -> bool:
        """Whether it is time for another look, and there is anything to look at."""
        return bool(self._places) and self._options.max_moves > 0 and now - self._looked_at >= _EVERY_S

    def check(self) -> int:
        """Ask back what would be better off elsewhere; how many."""
        now = self._now()
        if not self.is_due(now):
            return 0
        self._looked_at = now
        num_asked = 0
        while num_asked < _MOST_AT_ONCE and self._move_one(now):
            num_asked += 1
        return num_asked

    # ---

    def _add(self, sent: _Sent) -> None:
        if self._options.max_moves:
            queue = self._places.setdefault(_place(sent.decision), _Queue())
            queue.sent[sent.decision.booking] = sent

    def _move_one(self, now: float) -> bool:
        waits = [(self._stay_s(queue, now), place) for place, queue in self._places.items()]
        stay_s, place = max(waits, default=(0.0, None))
        if place is None or stay_s < self._options.min_gain_s:
            return False
        queue = self._places[place]
        sent = self._last_movable(queue)
        return sent is not None and self._move(queue, sent, stay_s, now)

    def _stay_s(self, queue: _Queue, now: float) -> float:
        """Until the last one begins that was not asked for, if it stays."""
        first = queue.first
        late_s = now - first.at
        if len(queue.sent) == 1:  # it is being computed, unless it is late
            return late_s if late_s >= max(_LATE * first.foreseen_s, self._options.min_gain_s) else 0.0
        slower = min(max(late_s / max(first.foreseen_s, self._options.min_gain_s), 1.0), _SLOWEST)
        left = 1.0 - queue.num_asked / len(queue.sent)
        return slower * left * self._router.queue_s(first.decision)

    def _last_movable(self, queue: _Queue) -> _Sent | None:
        for _, sent in zip(range(_MOST_LOOKED_AT), reversed(queue.sent.values()), strict=False):
            recall = sent.decision.recall
            is_pinned = bool(sent.request.routing.pins)
            is_free = sent.num_moves < self._options.max_moves and not (sent.is_asked or is_pinned)
            if is_free and recall is not None and recall.move is not None:
                return sent
        return None

    def _move(self, queue: _Queue, sent: _Sent, stay_s: float, now: float) -> bool:
        excluded = sent.excluded | {sent.decision.instance.id}
        try:
            go_s = self._router.foresee_s(sent.request, excluded)
            if go_s is None or stay_s - go_s < max(self._options.min_gain_s, _SHARE * stay_s):
                return False
            decision = self._router.try_route(sent.request, excluded)
        except KvoltError:  # nobody else could take it
            queue.ask(sent)
            return False
        recall = sent.decision.recall
        if decision is None or recall is None or recall.move is None:
            return False
        decision = msgspec.structs.replace(decision, recall=Recall())
        self._add(_Sent(decision, sent.request, sent.excluded, now, sent.num_moves + 1))
        queue.ask(sent)
        if recall.move(decision):
            return True
        self.forget(decision)
        self._router.free(decision, None)
        return False


def _place(decision: Decision) -> Place:
    return Place(decision.instance.id, decision.dp_rank or 0)
