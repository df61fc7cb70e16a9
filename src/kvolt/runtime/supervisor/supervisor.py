"""Runs the local processes of `kvolt serve`: performs what `supervisor_plan` decides.

Owns the children's processes, pipes and the status file; what they say is `supervisor_output`'s. It does
not know what a child is for; whether one is ready, it is told.

Each child leads a session of its own, so Ctrl-C reaches the supervisor alone. SIGTERM goes to the
child, which ends its own helpers in its own order; SIGKILL goes to its whole process group, and is
sent there once more when the child is gone, however it went. What ends the children of a killed
supervisor is in `stop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.runtime.clock import Clock
from kvolt.runtime.host.private_directory import make_private
from kvolt.runtime.stop import OrphanGuard, StopSignal, die_with_parent
from kvolt.runtime.supervisor import plan
from kvolt.runtime.supervisor.output import ChildOutput, RotatingFile, TerminalView
from kvolt.runtime.supervisor.plan import ChildState, Level, RestartRule, SupervisorPlan
from kvolt.runtime.tasks import Scope

STATUS_FILE = "supervisor.json"

_LAST_OUTPUT_TIMEOUT_S = 1.0
_REAP_TIMEOUT_S = 5.0


# --- Values -------------------------------------------------------------------------------------------


class ChildSpec(msgspec.Struct, frozen=True):
    """One process to keep running."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    """Added to the supervisor's own environment, which is passed on whole."""
    log_name: str = ""
    """Its file in the log folder; by default the name with `.log`."""
    stage: int = 0
    """Stop order: the highest stage ends first, those of one stage together."""
    affinity: tuple[int, ...] = ()
    """Cores to pin it to; none: wherever the system puts it."""


class SupervisorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    restart: RestartRule = RestartRule()
    stop_timeout_s: float = 30.0
    """From SIGTERM to SIGKILL."""
    log_limit_bytes: int = 64 * 1024 * 1024
    """Per child: one file of this size and one older."""


class ChildStatus(msgspec.Struct, frozen=True):
    name: str
    pid: int | None
    state: ChildState
    restarts: int
    started_at: float | None
    """Wall time at which its present process started."""
    uptime_s: float | None
    """When the snapshot was written; a reader of an old one counts from `started_at`."""


class SupervisorStatus(msgspec.Struct, frozen=True):
    """The status file. It outlives a killed supervisor, so check that `pid` still runs."""

    pid: int
    written_at: float
    stopping: bool
    exit_code: int | None
    """None until the supervisor is done."""
    children: tuple[ChildStatus, ...]


def read_status(log_dir: Path) -> SupervisorStatus | None:
    """The last snapshot; None where no supervisor has written one."""
    try:
        return msgspec.json.decode((log_dir / STATUS_FILE).read_bytes(), type=SupervisorStatus)
    except FileNotFoundError:
        return None


# --- The driver ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Life:
    """One process of a child, from its start to its end."""

    process: Process
    output: ChildOutput
    pipe: asyncio.ReadTransport
    started: float
    started_at: float


class Supervisor:
    """Keeps the children running until told to stop, or until one cannot be run at all.

    `ready(name)` returns once that child serves; without it a child counts as running when it is started.
    `on_event` is told of each child's every change; it must not block.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        log_dir: Path,
        clock: Clock,
        stop: StopSignal,
        config: SupervisorConfig | None = None,
        view: TerminalView | None = None,
        ready: Callable[[str], Awaitable[object]] | None = None,
        on_event: Callable[[ChildStatus], None] | None = None,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        if len(self._specs) != len(specs):
            raise ConfigError("two children have the same name", key="name", remedy="give each its own")
        self._log_dir = log_dir
        self._clock = clock
        self._stop = stop
        self._config = config or SupervisorConfig()
        self._view = view or TerminalView(sys.stdout, list(self._specs))
        self._ready = ready
        self._on_event = on_event
        stages = {spec.name: spec.stage for spec in specs}
        self._plan = SupervisorPlan(stages, self._config.restart, self._config.stop_timeout_s)
        self._lives: dict[str, _Life] = {}
        self._told: dict[str, tuple[ChildState, int | None]] = {}
        self._exit_code: int | None = None
        self._finished = asyncio.Event()
        self._scope = Scope("supervisor")
        self._guard: OrphanGuard | None = None
        self._log_files: dict[str, RotatingFile] = {}

    async def run(self) -> int:
        """Run until all is over; the exit code: 0 after a stop, 2 when a child's settings are wrong.

        For a graceful end use the StopSignal. Cancelling this call kills the children at once.
        """
        with contextlib.ExitStack() as files:
            self._open_logs(files)
            self._guard = await OrphanGuard.start()
            try:
                async with self._scope:
                    self._scope.start(self._await_stop(), "stop")
                    self._perform(self._plan.begin())
                    self._publish()
                    await self._finished.wait()
                    self._scope.cancel()
            finally:
                await self._guard.close()
                await self._view.close()
        assert self._exit_code is not None
        return self._exit_code

    def _open_logs(self, files: contextlib.ExitStack) -> None:
        try:
            make_private(self._log_dir)
            for spec in self._specs.values():
                path = self._log_dir / (spec.log_name or f"{spec.name}.log")
                log_file = RotatingFile(path, self._config.log_limit_bytes)
                self._log_files[spec.name] = log_file
                files.callback(log_file.close)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"cannot write logs to {self._log_dir}: {reason}",
                key="log_dir",
                remedy="name a folder of your own",
            ) from error

    def status(self) -> SupervisorStatus:
        children = tuple(self._child_status(name) for name in self._specs)
        return SupervisorStatus(
            os.getpid(), self._clock.wall(), self._plan.stopping, self._exit_code, children
        )

    def _child_status(self, name: str) -> ChildStatus:
        life = self._lives.get(name)
        state, restarts = self._plan.state(name), self._plan.restarts(name)
        if life is None:
            return ChildStatus(name, None, state, restarts, None, None)
        uptime_s = self._clock.monotonic() - life.started
        return ChildStatus(name, life.process.pid, state, restarts, life.started_at, uptime_s)

    def _feed(self, event: plan.Event) -> None:
        self._perform(self._plan.handle(event, self._clock.monotonic()))
        self._publish()

    def _perform(self, actions: Sequence[plan.Action]) -> None:
        for action in actions:
            match action:
                case plan.Spawn(child):
                    self._scope.start(self._live(self._specs[child]), child)
                case plan.StartTimer(delay_s, fires):
                    self._scope.start(self._fire(delay_s, fires), "timer")
                case plan.SendTerm(child):
                    with contextlib.suppress(ProcessLookupError):
                        self._lives[child].process.terminate()
                case plan.SendKill(child):
                    _kill_group(self._lives[child].process.pid)
                case plan.Report(level, text):
                    self._view.say(level, text)
                case plan.Finish(code):
                    self._exit_code = code
                    self._finished.set()

    def _publish(self) -> None:
        """Write the status file, then tell `on_event` which children have changed."""
        status = self.status()
        path = self._log_dir / STATUS_FILE
        fresh = path.with_name(f".{STATUS_FILE}.{os.getpid()}")
        try:
            fresh.write_bytes(msgspec.json.format(msgspec.json.encode(status)))
            fresh.replace(path)
        except OSError as error:
            self._view.say(Level.WARNING, f"{path} cannot be written: {error}")
        for child in status.children:
            told = (child.state, child.pid)
            if self._told.get(child.name) != told:
                self._told[child.name] = told
                if self._on_event is not None:
                    self._on_event(child)

    async def _await_stop(self) -> None:
        self._feed(plan.StopRequested(await self._stop.wait()))

    async def _fire(self, delay_s: float, event: plan.Event) -> None:
        await asyncio.sleep(delay_s)
        self._feed(event)

    async def _live(self, spec: ChildSpec) -> None:
        """One process of a child, from fork to the last line it wrote."""
        try:
            life = await self._spawn(spec)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError | PermissionError)
            self._feed(plan.SpawnFailed(spec.name, error.strerror or str(error), retryable=not missing))
            return
        pid = life.process.pid
        assert self._guard is not None
        self._guard.watch(pid)
        self._lives[spec.name] = life
        readiness: asyncio.Task[Any] | None = None
        try:
            self._feed(plan.Spawned(spec.name))
            readiness = self._scope.start(self._await_ready(spec.name), f"{spec.name}/ready")
            await life.process.wait()
            _kill_group(pid)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_OUTPUT_TIMEOUT_S):
                    await life.output.ended.wait()
        finally:
            await self._bury(life)
            self._guard.forget(pid)
            del self._lives[spec.name]
            if readiness is not None:
                readiness.cancel()
        code = life.process.returncode
        assert code is not None
        uptime_s = self._clock.monotonic() - life.started
        self._feed(plan.Exited(spec.name, code, uptime_s, life.output.last_words))

    async def _spawn(self, spec: ChildSpec) -> _Life:
        env = {"PYTHONUNBUFFERED": "1", **os.environ, **spec.env}
        program = shutil.which(spec.argv[0], path=env.get("PATH"))
        if program is None:
            raise FileNotFoundError(2, f"there is no program {spec.argv[0]}")
        # A pipe of our own: asyncio's would keep `wait` from returning while a helper of the child holds it.
        reads, writes = os.pipe()
        try:
            pipe, output = await asyncio.get_running_loop().connect_read_pipe(
                lambda: ChildOutput(spec.name, self._log_files[spec.name], self._view),
                os.fdopen(reads, "rb", 0),
            )
            try:
                process = await asyncio.create_subprocess_exec(
                    *die_with_parent([program, *spec.argv[1:]], spec.affinity),
                    stdin=DEVNULL,
                    stdout=writes,
                    stderr=writes,
                    env=env,
                    start_new_session=True,
                )
            except BaseException:
                pipe.close()
                raise
        finally:
            os.close(writes)
        return _Life(process, output, pipe, self._clock.monotonic(), self._clock.wall())

    async def _await_ready(self, name: str) -> None:
        if self._ready is not None:
            await self._ready(name)
        self._feed(plan.BecameReady(name))

    async def _bury(self, life: _Life) -> None:
        """Leave nothing of it behind, also when the wait for its end was cancelled."""
        if life.process.returncode is None:
            _kill_group(life.process.pid)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REAP_TIMEOUT_S):
                    await life.process.wait()
        life.pipe.close()


def _kill_group(group: int) -> None:
    # Gone already, or (macOS) only zombies are left in it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
