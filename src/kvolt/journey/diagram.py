"""The journey machine as a picture, for docs/journey.md: every move that it makes when everything is tried on it.

    python -m kvolt.journey.diagram docs/journey.md      draws it anew on that page

What is drawn is what the machine does and not what somebody remembers. Needed by nobody who serves.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import get_args

from kvolt.core.errors import DeadlineExceeded, InvalidRequest, KvoltError, Unavailable, WorkerLost
from kvolt.core.ids import InstanceId
from kvolt.journey.machine import (
    Delivered,
    Event,
    Failed,
    Finished,
    IllegalTransition,
    JourneyMachine,
    Opened,
    Prefilled,
    PrefillFailed,
    Routed,
    Start,
    State,
    Stopped,
    TakenBack,
)
from kvolt.router.port import Decision
from kvolt.runtime.endpoint.address import EndpointAddress, Instance

BEGIN, END = "<!-- begin: journey machine -->", "<!-- end: journey machine -->"

_SOMEBODY = Decision(
    Instance(id=InstanceId("w0"), endpoint=EndpointAddress("ns", "c", "generate"), address="host:1")
)
_LOST, _REFUSED = WorkerLost("gone"), InvalidRequest("bad")
_LATE = DeadlineExceeded("late", stage="total")

_TRIED: tuple[Event, ...] = (
    Start(),
    Start(is_remote=True),
    Prefilled(),
    PrefillFailed(_LOST, _SOMEBODY.instance.id),
    PrefillFailed(_LATE, _SOMEBODY.instance.id),
    PrefillFailed(Unavailable("nobody"), None),
    Routed(_SOMEBODY),
    Opened(),
    Delivered(),
    Failed(_LOST),
    Failed(_REFUSED),
    TakenBack(_SOMEBODY),
    Finished(),
    Stopped(),
)
"""One of each kind, and of those with several outcomes one for each."""

Move = tuple[State, str, State]


def moves() -> list[Move]:
    """From where, by which event, to where: all that a machine can do, in the order of its states and events."""
    found = {move for machine in _reached() for move, _ in _next(machine)}
    states, events = list(State), [kind.__name__ for kind in get_args(Event)]
    return sorted(
        found, key=lambda move: (states.index(move[0]), states.index(move[2]), events.index(move[1]))
    )


def mermaid() -> str:
    """A state diagram; events that lead from one state to another are on one arrow."""
    arrows: dict[tuple[State, State], list[str]] = {}
    for before, event, after in moves():
        arrows.setdefault((before, after), []).append(event)
    lines = [f"    {before} --> {after}: {', '.join(events)}" for (before, after), events in arrows.items()]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {State.NEW}", *lines, f"    {State.DONE} --> [*]"])


def drawn_on(page: str) -> str:
    """The page with the picture as it is now, between its two marks. ValueError for a page that has none."""
    before, mark, rest = page.partition(BEGIN)
    _, other_mark, after = rest.partition(END)
    if not mark or not other_mark:
        raise ValueError(f"the page has no place for it: {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n```mermaid\n{mermaid()}\n```\n\n{END}{after}"


def _reached() -> Iterator[JourneyMachine]:
    """One machine for each situation that there is, with limits that are soon reached."""
    waiting = deque([JourneyMachine(max_attempts=2, max_moves=1, migration_limit=2)])
    seen = {_situation(waiting[0])}
    while waiting:
        machine = waiting.popleft()
        yield machine
        for _, after in _next(machine):
            situation = _situation(after)
            if situation not in seen:
                seen.add(situation)
                waiting.append(after)


def _next(machine: JourneyMachine) -> Iterator[tuple[Move, JourneyMachine]]:
    for event in _TRIED:
        after = copy.copy(machine)
        try:
            after.on(event)
        except IllegalTransition:
            continue
        yield (machine.state, type(event).__name__, after.state), after


def _situation(machine: JourneyMachine) -> Hashable:
    values = (getattr(machine, name) for name in JourneyMachine.__slots__)
    return tuple(each.code if isinstance(each, KvoltError) else each for each in values)


def main() -> None:
    page = Path(sys.argv[1])
    page.write_text(drawn_on(page.read_text()))


if __name__ == "__main__":
    main()
