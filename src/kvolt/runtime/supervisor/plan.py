"""What the local supervisor decides: who is started, restarted, stopped, and when it is over.

Pure: an event and the time go in, actions come out; `supervisor` performs them. It knows no process,
pipe, timer or clock.

    pending --Spawned--> starting --BecameReady--> running
       ^                     |                        |
       |                     +---------Exited---------+
    BackoffElapsed                      |
       |                                v
       +----- backoff <---- crash ------+------ exit code 2 ----> failed (first life)
                 |
            StopRequested         pending, starting, running --StopRequested--> stopping
                 v                                                                 |
              stopped <---------------------------Exited---------------------------+

Stopping goes by stage, highest first: the children of one stage stop in parallel, the next stage
begins when they are gone. So a frontend can finish its requests while its workers still serve.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvolt.core.errors import ConfigError, KvoltError

CONFIG_EXIT_CODE = 2
"""What a process exits with when its settings are wrong: trying again cannot help."""

STUCK_EXIT_CODE = 1


class ChildState(StrEnum):
    PENDING = "pending"
    """Its process was asked for and is not there yet."""
    STARTING = "starting"
    RUNNING = "running"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


ENDED = (ChildState.STOPPED, ChildState.FAILED)


class Spawned(msgspec.Struct, frozen=True):
    child: str


class SpawnFailed(msgspec.Struct, frozen=True):
    """No process came to be. Not retryable when the program itself is missing."""

    child: str
    reason: str
    retryable: bool


class BecameReady(msgspec.Struct, frozen=True):
    child: str


class Exited(msgspec.Struct, frozen=True):
    """The process is gone. `code` is negative for a signal; `last_words` is the error it ended with, if any."""

    child: str
    code: int
    uptime_s: float
    last_words: str = ""


class BackoffElapsed(msgspec.Struct, frozen=True):
    child: str


class KillTimeout(msgspec.Struct, frozen=True):
    """The time given to a child to end, by itself or by SIGKILL, is over."""

    child: str


class StopRequested(msgspec.Struct, frozen=True):
    """Everything is to end."""

    reason: str


ChildEvent = Spawned | SpawnFailed | BecameReady | Exited | BackoffElapsed | KillTimeout
Event = ChildEvent | StopRequested


class Level(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Spawn(msgspec.Struct, frozen=True):
    child: str


class StartTimer(msgspec.Struct, frozen=True):
    """Feed `fires` back after `delay_s`. Never cancelled: a timer that outlives its reason does no harm."""

    delay_s: float
    fires: BackoffElapsed | KillTimeout


class SendTerm(msgspec.Struct, frozen=True):
    child: str


class SendKill(msgspec.Struct, frozen=True):
    child: str


class Report(msgspec.Struct, frozen=True):
    """A line for the person at the terminal."""

    level: Level
    text: str


class Finish(msgspec.Struct, frozen=True):
    """Nothing runs any more; the supervisor's exit code."""

    code: int


Action = Spawn | StartTimer | SendTerm | SendKill | Report | Finish

_S = ChildState
_AFTER_EXIT = (_S.BACKOFF, _S.FAILED, _S.STOPPED)

TRANSITIONS: Mapping[tuple[ChildState, type[Event]], tuple[ChildState, ...]] = {
    (_S.PENDING, Spawned): (_S.STARTING,),
    (_S.PENDING, SpawnFailed): _AFTER_EXIT,
    (_S.PENDING, StopRequested): (_S.STOPPING,),
    (_S.STARTING, BecameReady): (_S.RUNNING,),
    (_S.STARTING, Exited): _AFTER_EXIT,
    (_S.STARTING, StopRequested): (_S.STOPPING,),
    (_S.RUNNING, Exited): _AFTER_EXIT,
    (_S.RUNNING, StopRequested): (_S.STOPPING,),
    (_S.BACKOFF, BackoffElapsed): (_S.PENDING,),
    (_S.BACKOFF, StopRequested): (_S.STOPPED,),
    # The stop overtook a spawn: the process is told to end as soon as it is there.
    (_S.STOPPING, Spawned): (_S.STOPPING,),
    (_S.STOPPING, SpawnFailed): (_S.STOPPED,),
    (_S.STOPPING, BecameReady): (_S.STOPPING,),
    (_S.STOPPING, Exited): (_S.STOPPED,),
    (_S.STOPPING, KillTimeout): (_S.STOPPING, _S.FAILED),
    # Timers that outlived their reason, and the exit of a child already given up on.
    (_S.STOPPED, BackoffElapsed): (_S.STOPPED,),
    (_S.STOPPED, KillTimeout): (_S.STOPPED,),
    (_S.FAILED, KillTimeout): (_S.FAILED,),
    (_S.FAILED, Exited): (_S.FAILED,),
}


class IllegalTransition(KvoltError):
    """An event that this state cannot take; nothing was changed. Fields: child, state, event."""


class RestartRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a crashed child comes back."""

    backoff_initial_s: float = 1.0
    backoff_max_s: float = 30.0
    stable_after_s: float = 10.0
    """Ready for this long, and the next crash starts again from the initial back-off."""


@dataclass(slots=True)
class _Child:
    name: str
    stage: int
    state: ChildState = ChildState.PENDING
    restarts: int = 0
    backoff_s: float = 0.0
    ready_at: float | None = None
    kill_sent: bool = False


class SupervisorPlan:
    """The machine. `stages` maps each child, in start order, to its stop stage."""

    def __init__(self, stages: Mapping[str, int], restart: RestartRule, stop_timeout_s: float) -> None:
        if not stages:
            raise ConfigError("a supervisor needs at least one child", remedy="name what is to be run")
        self._children = {name: _Child(name, stage) for name, stage in stages.items()}
        self._restart = restart
        self._stop_timeout_s = stop_timeout_s
        self._stopping = False
        self._finished = False
        self._exit_code = 0

    @property
    def stopping(self) -> bool:
        return self._stopping

    def state(self, child: str) -> ChildState:
        return self._children[child].state

    def restarts(self, child: str) -> int:
        return self._children[child].restarts

    def begin(self) -> list[Action]:
        """The first actions: every child in its order."""
        return [Spawn(name) for name in self._children]

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event; `now` is any monotonic time in seconds. Raises IllegalTransition."""
        if isinstance(event, StopRequested):
            return (
                [] if self._stopping else [Report(Level.INFO, f"stopping: {event.reason}"), *self._stop_all()]
            )
        child = self._children.get(event.child)
        if child is None or (child.state, type(event)) not in TRANSITIONS:
            state = "unknown" if child is None else child.state.value
            kind = type(event).__name__
            raise IllegalTransition(
                f"{event.child} is {state} and cannot take {kind}", child=event.child, state=state, event=kind
            )
        actions = self._take(child, event, now)
        if child.state is _S.FAILED and not self._stopping:
            actions += self._stop_all()
        return actions + self._next_stage()

    def _take(self, child: _Child, event: ChildEvent, now: float) -> list[Action]:
        if child.state in ENDED:
            return []
        match event:
            case Spawned() if child.state is _S.STOPPING:
                return self._ask_to_end(child)
            case Spawned():
                child.ready_at = None
                self._move(child, event, _S.STARTING)
            case BecameReady() if child.state is _S.STARTING:
                child.ready_at = now
                self._move(child, event, _S.RUNNING)
            case SpawnFailed(_, reason, retryable):
                text = f"could not be started: {reason}"
                return self._gone(child, event, now, text, retryable)
            case Exited(_, code, uptime_s, last_words):
                # A signal comes from outside: whatever the process said last is not its cause.
                said = f": {last_words}" if last_words and code >= 0 else ""
                text = f"{describe_exit(code)} after {uptime_s:.1f} s{said}"
                # Settings that worked once are not wrong now: a later life that gives up (discovery is away,
                # say) is tried again.
                return self._gone(child, event, now, text, code != CONFIG_EXIT_CODE or child.restarts > 0)
            case BackoffElapsed():
                child.restarts += 1
                self._move(child, event, _S.PENDING)
                return [Spawn(child.name)]
            case KillTimeout():
                return self._force(child, event)
        return []

    def _gone(self, child: _Child, event: ChildEvent, now: float, text: str, retryable: bool) -> list[Action]:
        if self._stopping:
            self._move(child, event, _S.STOPPED)
            return []
        if not retryable:
            self._exit_code = self._exit_code or CONFIG_EXIT_CODE
            self._move(child, event, _S.FAILED)
            return [
                Report(Level.ERROR, f"{child.name} {text}; a restart would not help, so everything stops")
            ]
        was_stable = child.ready_at is not None and now - child.ready_at >= self._restart.stable_after_s
        longer = self._restart.backoff_initial_s if was_stable or not child.backoff_s else child.backoff_s * 2
        child.backoff_s = min(longer, self._restart.backoff_max_s)
        self._move(child, event, _S.BACKOFF)
        return [
            Report(Level.WARNING, f"{child.name} {text}; starting it again in {child.backoff_s:g} s"),
            StartTimer(child.backoff_s, BackoffElapsed(child.name)),
        ]

    def _force(self, child: _Child, event: KillTimeout) -> list[Action]:
        if not child.kill_sent:
            child.kill_sent = True
            text = f"{child.name} did not end within {self._stop_timeout_s:g} s of SIGTERM and is killed"
            again = StartTimer(self._stop_timeout_s, KillTimeout(child.name))
            return [Report(Level.WARNING, text), SendKill(child.name), again]
        # Asleep in the kernel (a driver, a dead file system): waiting longer would hang the supervisor too.
        self._exit_code = self._exit_code or STUCK_EXIT_CODE
        self._move(child, event, _S.FAILED)
        return [Report(Level.ERROR, f"{child.name} does not end even by SIGKILL; it is left to the system")]

    def _stop_all(self) -> list[Action]:
        self._stopping = True
        for child in self._children.values():
            if child.state is _S.BACKOFF:  # it must not come back while it waits for its stage
                self._move(child, StopRequested(""), _S.STOPPED)
        return self._next_stage()

    def _next_stage(self) -> list[Action]:
        """Once stopping: tell the highest stage that still lives to end; when nothing lives, finish."""
        if not self._stopping or self._finished:
            return []
        alive = [child for child in reversed(self._children.values()) if child.state not in ENDED]
        if not alive:
            self._finished = True
            return [Finish(self._exit_code)]
        stage = max(child.stage for child in alive)
        actions: list[Action] = []
        for child in alive:
            if child.stage != stage or child.state is _S.STOPPING:
                continue
            has_process = child.state is not _S.PENDING
            self._move(child, StopRequested(""), _S.STOPPING)
            if has_process:
                actions += self._ask_to_end(child)
        return actions

    def _ask_to_end(self, child: _Child) -> list[Action]:
        return [SendTerm(child.name), StartTimer(self._stop_timeout_s, KillTimeout(child.name))]

    def _move(self, child: _Child, event: Event, to: ChildState) -> None:
        assert to in TRANSITIONS[child.state, type(event)], (child, event, to)
        child.state = to


def describe_exit(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"ended with exit code {code}" + (
            " (a configuration error)" if code == CONFIG_EXIT_CODE else ""
        )
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
