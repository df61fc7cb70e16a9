"""State machine of the local supervisor: start, restart and stop of its children, and its end.

Pure: an event and the time go in, actions come out, which `supervisor` executes.

    pending --Spawned--> running
       ^                    |
    BackoffElapsed        Exited
       |                    v
       +-- backoff <- crash-+- exit code 2 --> failed (first start)
              |
         StopRequested      pending, running --StopRequested--> stopping
              v                                                    |
           stopped <------------------Exited-----------------------+

Stopping goes by stage, highest first: the children of a stage stop in parallel, and the next stage follows when they
have exited. So a frontend can finish its requests while its workers still serve.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvolt.core.errors import ConfigError, KvoltError

CONFIG_EXIT_CODE = 2
"""Exit code of a process with invalid settings: a restart cannot help."""

STUCK_EXIT_CODE = 1
READY_FILE_VARIABLE = "KVOLT_READY_FILE"
"""Environment variable with the path of a file that a child creates when it has registered its first endpoint. The
supervisor removes it when it stops."""
SUPERVISOR_PID_VARIABLE = "KVOLT_SUPERVISOR_PID"
"""Environment variable with the process id of a child's supervisor."""


class ChildState(StrEnum):
    PENDING = "pending"
    """The process is being spawned."""
    RUNNING = "running"
    BACKOFF = "backoff"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"


ENDED = (ChildState.STOPPED, ChildState.FAILED)


class Spawned(msgspec.Struct, frozen=True):
    child: str


class SpawnFailed(msgspec.Struct, frozen=True):
    """The process could not be spawned. Not retryable if the program is missing."""

    child: str
    reason: str
    retryable: bool


class Exited(msgspec.Struct, frozen=True):
    """The process exited. `code` is negative for a signal; `last_words` is its last error line, if any. `was_serving`:
    whether it had registered an endpoint."""

    child: str
    code: int
    uptime_s: float
    last_words: str = ""
    was_serving: bool = False


class BackoffElapsed(msgspec.Struct, frozen=True):
    child: str


class KillTimeout(msgspec.Struct, frozen=True):
    """A child did not end within its time, after SIGTERM or SIGKILL."""

    child: str


class StopRequested(msgspec.Struct, frozen=True):
    """Stop all children."""

    reason: str


ChildEvent = Spawned | SpawnFailed | Exited | BackoffElapsed | KillTimeout
Event = ChildEvent | StopRequested


class Level(StrEnum):
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class Spawn(msgspec.Struct, frozen=True):
    child: str


class StartTimer(msgspec.Struct, frozen=True):
    """Feed `fires` back after `delay_s`. Never cancelled: an outdated timer is ignored."""

    delay_s: float
    fires: BackoffElapsed | KillTimeout


class SendTerm(msgspec.Struct, frozen=True):
    child: str


class SendKill(msgspec.Struct, frozen=True):
    child: str


class TerminalLine(msgspec.Struct, frozen=True):
    """A line for the terminal."""

    level: Level
    text: str


class Finish(msgspec.Struct, frozen=True):
    """All children have ended; exit with this code."""

    code: int


Action = Spawn | StartTimer | SendTerm | SendKill | TerminalLine | Finish

_S = ChildState
_AFTER_EXIT = (_S.BACKOFF, _S.FAILED, _S.STOPPED)

TRANSITIONS: Mapping[tuple[ChildState, type[Event]], tuple[ChildState, ...]] = {
    (_S.PENDING, Spawned): (_S.RUNNING,),
    (_S.PENDING, SpawnFailed): _AFTER_EXIT,
    (_S.PENDING, StopRequested): (_S.STOPPING,),
    (_S.RUNNING, Exited): _AFTER_EXIT,
    (_S.RUNNING, StopRequested): (_S.STOPPING,),
    (_S.BACKOFF, BackoffElapsed): (_S.PENDING,),
    (_S.BACKOFF, StopRequested): (_S.STOPPED,),
    # The stop came during a spawn: the process is terminated as soon as it exists.
    (_S.STOPPING, Spawned): (_S.STOPPING,),
    (_S.STOPPING, SpawnFailed): (_S.STOPPED,),
    (_S.STOPPING, Exited): (_S.STOPPED,),
    (_S.STOPPING, KillTimeout): (_S.STOPPING, _S.FAILED),
    # Outdated timers, and the exit of a child that was already given up.
    (_S.STOPPED, BackoffElapsed): (_S.STOPPED,),
    (_S.STOPPED, KillTimeout): (_S.STOPPED,),
    (_S.FAILED, KillTimeout): (_S.FAILED,),
    (_S.FAILED, Exited): (_S.FAILED,),
}


class IllegalTransition(KvoltError):
    """The event is not allowed in this state; nothing changed. Fields: child, state, event."""


class RestartRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Restart policy of a crashed child."""

    backoff_initial_s: float = 1.0
    backoff_max_s: float = 30.0
    stable_after_s: float = 10.0
    """After a run of this length that served, the next crash restarts with the initial back-off."""


@dataclass(slots=True)
class _Child:
    name: str
    stage: int
    state: ChildState = ChildState.PENDING
    restarts: int = 0
    backoff_s: float = 0.0
    kill_sent: bool = False


class SupervisorPlan:
    """The state machine. `stages` maps each child, in start order, to its stop stage."""

    def __init__(self, stages: Mapping[str, int], restart: RestartRule, stop_timeout_s: float) -> None:
        if not stages:
            raise ConfigError("a supervisor needs at least one child", remedy="specify at least one process")
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

    def start_actions(self) -> list[Action]:
        """Initial actions: spawn every child in order."""
        return [Spawn(name) for name in self._children]

    def handle(self, event: Event, now: float) -> list[Action]:
        """Handle one event; `now` is monotonic time in seconds. Raises IllegalTransition."""
        if isinstance(event, StopRequested):
            return (
                []
                if self._stopping
                else [TerminalLine(Level.INFO, f"stopping: {event.reason}"), *self._stop_all()]
            )
        child = self._children.get(event.child)
        if child is None or (child.state, type(event)) not in TRANSITIONS:
            state = "unknown" if child is None else child.state.value
            kind = type(event).__name__
            raise IllegalTransition(
                f"{event.child} is {state}, {kind} is not allowed", child=event.child, state=state, event=kind
            )
        actions = self._apply(child, event, now)
        if child.state is _S.FAILED and not self._stopping:
            actions += self._stop_all()
        return actions + self._next_stage()

    def _apply(self, child: _Child, event: ChildEvent, now: float) -> list[Action]:
        if child.state in ENDED:
            return []
        match event:
            case Spawned() if child.state is _S.STOPPING:
                return self._terminate(child)
            case Spawned():
                self._move(child, event, _S.RUNNING)
            case SpawnFailed(_, reason, retryable):
                text = f"could not be started: {reason}"
                return self._on_exit(child, event, now, text, retryable)
            case Exited(_, code, uptime_s, last_words):
                # A signal comes from outside, so the last line of output is not its cause.
                cause = f": {last_words}" if last_words and code >= 0 else ""
                kind = " (a configuration error)" if code == CONFIG_EXIT_CODE else ""
                text = f"{describe_exit(code)}{kind} after {uptime_s:.1f} s{cause}"
                # Settings that worked once are valid: retry a later start that fails (such as without discovery).
                return self._on_exit(child, event, now, text, code != CONFIG_EXIT_CODE or child.restarts > 0)
            case BackoffElapsed():
                child.restarts += 1
                self._move(child, event, _S.PENDING)
                return [Spawn(child.name)]
            case KillTimeout():
                return self._on_kill_timeout(child, event)
        return []

    def _on_exit(
        self, child: _Child, event: ChildEvent, now: float, text: str, retryable: bool
    ) -> list[Action]:
        if self._stopping:
            self._move(child, event, _S.STOPPED)
            return []
        if not retryable:
            self._exit_code = self._exit_code or CONFIG_EXIT_CODE
            self._move(child, event, _S.FAILED)
            return [TerminalLine(Level.ERROR, f"{child.name} {text}; stopping, since a restart cannot help")]
        was_stable = (
            isinstance(event, Exited) and event.was_serving and event.uptime_s >= self._restart.stable_after_s
        )
        backoff_s = (
            self._restart.backoff_initial_s if was_stable or not child.backoff_s else child.backoff_s * 2
        )
        child.backoff_s = min(backoff_s, self._restart.backoff_max_s)
        self._move(child, event, _S.BACKOFF)
        return [
            TerminalLine(Level.WARNING, f"{child.name} {text}; restarting in {child.backoff_s:g} s"),
            StartTimer(child.backoff_s, BackoffElapsed(child.name)),
        ]

    def _on_kill_timeout(self, child: _Child, event: KillTimeout) -> list[Action]:
        if not child.kill_sent:
            child.kill_sent = True
            text = f"{child.name} did not end within {self._stop_timeout_s:g} s of SIGTERM; killing it"
            timer = StartTimer(self._stop_timeout_s, KillTimeout(child.name))
            return [TerminalLine(Level.WARNING, text), SendKill(child.name), timer]
        # Blocked in the kernel (a driver, a hung file system): waiting longer would hang the supervisor too.
        self._exit_code = self._exit_code or STUCK_EXIT_CODE
        self._move(child, event, _S.FAILED)
        return [
            TerminalLine(Level.ERROR, f"{child.name} does not end after SIGKILL; leaving it to the system")
        ]

    def _stop_all(self) -> list[Action]:
        self._stopping = True
        for child in self._children.values():
            if child.state is _S.BACKOFF:  # must not restart while its stage waits
                self._move(child, StopRequested(""), _S.STOPPED)
        return self._next_stage()

    def _next_stage(self) -> list[Action]:
        """While stopping: terminate the highest stage that is still running; if there is none, finish."""
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
                actions += self._terminate(child)
        return actions

    def _terminate(self, child: _Child) -> list[Action]:
        return [SendTerm(child.name), StartTimer(self._stop_timeout_s, KillTimeout(child.name))]

    def _move(self, child: _Child, event: Event, to: ChildState) -> None:
        assert to in TRANSITIONS[child.state, type(event)], (child, event, to)
        child.state = to


def describe_exit(code: int) -> str:
    """Description of an exit code."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
