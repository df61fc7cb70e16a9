"""Runs the local processes of `kvolt serve`: executes the actions of `plan`.

Manages the children's processes, pipes and the status file; `output` handles their output.

Each child leads its own session, so Ctrl-C reaches only the supervisor. SIGTERM is sent to the child, which stops its
helper processes in its own order; SIGKILL is sent to its whole process group, and once more after the child has
ended. `process` ends the children of a killed supervisor.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.runtime.clock import Clock
from kvolt.runtime.host.private_directory import make_private
from kvolt.runtime.stop import StopSignal
from kvolt.runtime.supervisor import plan
from kvolt.runtime.supervisor.output import ChildOutput, RotatingFile, TerminalView
from kvolt.runtime.supervisor.plan import ChildState, Level, RestartRule, SupervisorPlan
from kvolt.runtime.supervisor.process import ChildProcess, OrphanGuard, end_child
from kvolt.runtime.tasks import Scope

STATUS_FILE = "supervisor.json"


# --- Values -------------------------------------------------------------------------------------------


class ChildSpec(msgspec.Struct, frozen=True):
    """A process to keep running."""

    name: str
    argv: tuple[str, ...]
    env: dict[str, str] = {}
    """Added to the supervisor's own environment."""
    stage: int = 0
    """Stop stage: the highest stage stops first; children of one stage stop together."""
    affinity: tuple[int, ...] = ()
    """Cores to pin the process to; empty: no pinning."""


class SupervisorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    restart: RestartRule = RestartRule()
    stop_timeout_s: float = 30.0
    """From SIGTERM to SIGKILL."""
    log_limit_bytes: int = 64 * 1024 * 1024
    """Per child: the current file and one rotated file of this size."""


class ChildStatus(msgspec.Struct, frozen=True):
    name: str
    pid: int | None
    state: ChildState
    restarts: int
    started_at: float | None
    """Wall time at which the current process started."""
    uptime_s: float | None
    """At the time of the snapshot; for an old one, compute it from `started_at`."""


class SupervisorStatus(msgspec.Struct, frozen=True):
    """Contents of the status file. It outlives a killed supervisor: check that `pid` is running."""

    pid: int
    written_at: float
    stopping: bool
    exit_code: int | None
    """None until the supervisor has finished."""
    children: tuple[ChildStatus, ...]


# --- The driver ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """One process of a child."""

    process: ChildProcess
    output: ChildOutput
    started: float
    started_at: float


class Supervisor:
    """Keeps the children running until a stop is requested or a child cannot run.

    A child counts as running when its process has started. `on_event` is called on every change of a child; it must
    not block.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        log_dir: Path,
        clock: Clock,
        stop: StopSignal,
        config: SupervisorConfig | None = None,
        view: TerminalView | None = None,
        on_event: Callable[[ChildStatus], None] | None = None,
    ) -> None:
        self._specs = {spec.name: spec for spec in specs}
        if len(self._specs) != len(specs):
            raise ConfigError("two children have the same name", key="name", remedy="use unique names")
        self._log_dir = log_dir
        self._clock = clock
        self._stop = stop
        self._config = config or SupervisorConfig()
        self._view = view or TerminalView(sys.stdout, list(self._specs))
        self._on_event = on_event
        stages = {spec.name: spec.stage for spec in specs}
        self._plan = SupervisorPlan(stages, self._config.restart, self._config.stop_timeout_s)
        self._processes: dict[str, _Run] = {}
        self._published: dict[str, tuple[ChildState, int | None]] = {}
        self._exit_code: int | None = None
        self._finished = asyncio.Event()
        self._scope = Scope("supervisor")
        self._guard: OrphanGuard | None = None
        self._log_files: dict[str, RotatingFile] = {}

    async def run(self) -> int:
        """Run until all children have ended. Exit code: 0 after a stop, 2 if a child's settings are invalid.

        Stop gracefully by the StopSignal. Cancelling this call kills the children immediately.
        """
        with contextlib.ExitStack() as files:
            self._open_logs(files)
            self._guard = await OrphanGuard.start()
            try:
                async with self._scope:
                    self._scope.start(self._await_stop(), "stop")
                    self._perform(self._plan.start_actions())
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
                path = self._log_dir / f"{spec.name}.log"
                log_file = RotatingFile(path, self._config.log_limit_bytes)
                self._log_files[spec.name] = log_file
                files.callback(log_file.close)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(
                f"cannot write logs to {self._log_dir}: {reason}",
                key="log_dir",
                remedy="specify a directory of your own",
            ) from error

    def status(self) -> SupervisorStatus:
        children = tuple(self._child_status(name) for name in self._specs)
        return SupervisorStatus(
            os.getpid(), self._clock.wall(), self._plan.stopping, self._exit_code, children
        )

    def _child_status(self, name: str) -> ChildStatus:
        run = self._processes.get(name)
        state, restarts = self._plan.state(name), self._plan.restarts(name)
        if run is None:
            return ChildStatus(name, None, state, restarts, None, None)
        uptime_s = self._clock.monotonic() - run.started
        return ChildStatus(name, run.process.pid, state, restarts, run.started_at, uptime_s)

    def _feed(self, event: plan.Event) -> None:
        self._perform(self._plan.handle(event, self._clock.monotonic()))
        self._publish()

    def _perform(self, actions: Sequence[plan.Action]) -> None:
        for action in actions:
            match action:
                case plan.Spawn(child):
                    self._scope.start(self._run_child(self._specs[child]), child)
                case plan.StartTimer(delay_s, fires):
                    self._scope.start(self._run_timer(delay_s, fires), "timer")
                case plan.SendTerm(child):
                    self._processes[child].process.terminate()
                case plan.SendKill(child):
                    self._processes[child].process.kill()
                case plan.TerminalLine(level, text):
                    self._view.show_own(level, text)
                case plan.Finish(code):
                    self._exit_code = code
                    self._finished.set()

    def _publish(self) -> None:
        """Write the status file, then call `on_event` for children that have changed."""
        status = self.status()
        path = self._log_dir / STATUS_FILE
        temp = path.with_name(f".{STATUS_FILE}.{os.getpid()}")
        try:
            temp.write_bytes(msgspec.json.format(msgspec.json.encode(status)))
            temp.replace(path)
        except OSError as error:
            self._view.show_own(Level.WARNING, f"cannot write {path}: {error}")
        for child in status.children:
            current = (child.state, child.pid)
            if self._published.get(child.name) != current:
                self._published[child.name] = current
                if self._on_event is not None:
                    self._on_event(child)

    async def _await_stop(self) -> None:
        reason = await self._stop.wait()
        for name in self._specs:
            with contextlib.suppress(OSError):
                self._ready_file(name).unlink()
        self._feed(plan.StopRequested(reason))

    def _ready_file(self, child: str) -> Path:
        return self._log_dir / f".{child}.ready"

    async def _run_timer(self, delay_s: float, event: plan.Event) -> None:
        await asyncio.sleep(delay_s)
        self._feed(event)

    async def _run_child(self, spec: ChildSpec) -> None:
        """Run one process of a child, from its start to its last line of output."""
        output = ChildOutput(spec.name, self._log_files[spec.name], self._view)
        ready_file = self._ready_file(spec.name)
        ready_file.unlink(missing_ok=True)
        try:
            process = await ChildProcess.start(
                spec.argv,
                output,
                env={
                    "PYTHONUNBUFFERED": "1",
                    **os.environ,
                    plan.READY_FILE_VARIABLE: str(ready_file),
                    plan.SUPERVISOR_PID_VARIABLE: str(os.getpid()),
                    **spec.env,
                },
                affinity=spec.affinity,
                leads_group=True,
            )
        except OSError as error:
            missing = isinstance(error, FileNotFoundError | PermissionError)
            self._feed(plan.SpawnFailed(spec.name, error.strerror or str(error), retryable=not missing))
            return
        assert self._guard is not None
        self._guard.watch(process.pid)
        run = _Run(process, output, self._clock.monotonic(), self._clock.wall())
        self._processes[spec.name] = run
        try:
            self._feed(plan.Spawned(spec.name))
            await process.wait_exit()
        finally:
            await end_child(process)  # if it still runs, the wait was cancelled
            self._guard.unwatch(process.pid)
            del self._processes[spec.name]
        assert process.exit_code is not None
        uptime_s = self._clock.monotonic() - run.started
        was_serving = ready_file.exists()
        ready_file.unlink(missing_ok=True)
        self._feed(plan.Exited(spec.name, process.exit_code, uptime_s, output.last_words, was_serving))
