"""Diagram of the journey machine for docs/journey.md, from every transition that the machine makes.

python -m tools.journey_diagram      writes docs/images/journey-machine.svg
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import get_args

from tools.state_diagram import state_diagram

from kvolt.core.endpoints import EndpointAddress, Instance
from kvolt.core.errors import DeadlineExceeded, InvalidRequest, KvoltError, Unavailable, WorkerLost
from kvolt.core.ids import InstanceId
from kvolt.journey import events
from kvolt.journey.events import Event, JourneyState
from kvolt.journey.machine import IllegalTransition, JourneyMachine
from kvolt.router.port import Decision

IMAGE = Path(__file__).parents[1] / "docs" / "images" / "journey-machine.svg"

_DECISION = Decision(
    Instance(id=InstanceId("w0"), endpoint=EndpointAddress("ns", "c", "generate"), address="host:1")
)
_LOST, _INVALID = WorkerLost("gone"), InvalidRequest("bad")
_TIMEOUT = DeadlineExceeded("late", stage="total")

_EVENTS: tuple[Event, ...] = (
    events.Start(),
    events.Start(is_remote_prefill=True),
    events.Prefilled(),
    events.PrefillFailed(_LOST, _DECISION.instance.id),
    events.PrefillFailed(_TIMEOUT, _DECISION.instance.id),
    events.PrefillFailed(Unavailable("no worker"), None),
    events.Routed(_DECISION),
    events.Opened(),
    events.Delivered(),
    events.Failed(_LOST),
    events.Failed(_INVALID),
    events.WithdrawalConfirmed(_DECISION),
    events.Finished(),
    events.Stopped(),
)
"""Every event type, with one example per outcome."""

Transition = tuple[JourneyState, str, JourneyState]


def transitions() -> list[Transition]:
    """All transitions (state, event, next state), in the order of states and events."""
    unordered = {move for machine in _explore() for move, _ in _next_transitions(machine)}
    states, events = list(JourneyState), [kind.__name__ for kind in get_args(Event)]
    return sorted(
        unordered, key=lambda move: (states.index(move[0]), states.index(move[2]), events.index(move[1]))
    )


def diagram() -> str:
    """The SVG; events between the same two states share an arrow."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for before, event, after in transitions():
        arrows.setdefault((before.value, after.value), []).append(event)
    return state_diagram(
        [state.value for state in JourneyState], {edge: ", ".join(events) for edge, events in arrows.items()}
    )


def _explore() -> Iterator[JourneyMachine]:
    """One machine per reachable situation, with low limits."""
    waiting = deque([JourneyMachine(max_attempts=2, max_moves=1, migration_limit=2)])
    seen = {_situation(waiting[0])}
    while waiting:
        machine = waiting.popleft()
        yield machine
        for _, after in _next_transitions(machine):
            situation = _situation(after)
            if situation not in seen:
                seen.add(situation)
                waiting.append(after)


def _next_transitions(machine: JourneyMachine) -> Iterator[tuple[Transition, JourneyMachine]]:
    for event in _EVENTS:
        after = copy.copy(machine)
        try:
            after.handle(event)
        except IllegalTransition:
            continue
        yield (machine.state, type(event).__name__, after.state), after


def _situation(machine: JourneyMachine) -> Hashable:
    values = (getattr(machine, name) for name in JourneyMachine.__slots__)
    return tuple(each.code if isinstance(each, KvoltError) else each for each in values)


def main() -> None:
    IMAGE.write_text(diagram())


if __name__ == "__main__":
    main()
