"""Event loop with virtual time: the clock jumps to the next timer when no callback is ready.

Runs are deterministic: no sockets, threads or wall clock; timers with equal times run in the order in which they were
set; the time is exactly that of the timer, so it does not drift.

Several processes may share the loop: code started by a process runs in a context that names it (`in_process`), and
`stall` delays everything in that context until `resume`, like SIGSTOP.

A test cannot hang: waiting for nothing raises `Deadlock`, an endless loop raises `Runaway`, and tasks or timers left
at the end of `run_virtual` raise `Leak`.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar, TypeVarTuple

from kvolt.core.errors import DeadlineExceeded

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

DAY_S = 86_400.0
EPOCH_S = 1_700_000_000.0
"""Wall time at the start of a virtual loop; an arbitrary fixed date."""

_MAX_ITERATIONS = 50_000_000
_MAX_ITERATIONS_PER_INSTANT = 1_000_000
_MAX_SETTLING_ITERATIONS = 10_000
_COMPACT_FROM = 128
"""Below this number of dead entries, compacting a list costs more than keeping them."""

_PROCESS: contextvars.ContextVar[str | None] = contextvars.ContextVar("virtual process", default=None)

_CLEANUP_S = 60.0
"""Virtual seconds for the `finally` blocks of cancelled tasks after a failed run."""


class Deadlock(AssertionError):
    """No callback is ready and no timer is set, but the main task is not done. `tasks` is in creation order."""

    def __init__(self, tasks: list[str], positions: list[str]) -> None:
        lines = "".join(f"\n  {name}: {where}" for name, where in zip(tasks, positions, strict=True))
        super().__init__(f"all tasks wait, and no timer is set:{lines}")
        self.tasks = tasks


class Runaway(AssertionError):
    """The run exceeded its limit of virtual time or loop iterations."""


class Leak(AssertionError):
    """Tasks, timers or generators are left after the main task ended. `left` lists them."""

    def __init__(self, left: list[str]) -> None:
        super().__init__("left behind:" + "".join(f"\n  {item}" for item in left))
        self.left = left


class Unhandled(AssertionError):
    """An error reached only the loop's exception handler, from a callback or an unobserved task."""


def in_process(name: str, call: Callable[[], T]) -> T:
    """Run a call in the virtual process `name`, with all tasks, timers and listeners that it starts."""
    context = contextvars.copy_context()
    context.run(_PROCESS.set, name)
    return context.run(call)


class VirtualLoop(asyncio.BaseEventLoop):
    """An asyncio loop on virtual time, starting at 0.0."""

    # Kept by BaseEventLoop, but not declared in its stubs.
    _ready: deque[asyncio.Handle]
    _stopping: bool
    _asyncgens: weakref.WeakSet[Any]

    def __init__(self, *, until_s: float = DAY_S, max_iterations: int = _MAX_ITERATIONS) -> None:
        super().__init__()
        self._now = 0.0
        self._until_s = until_s
        self._thread = threading.get_ident()
        # The sequence number keeps equal times in the order in which they were set, which a heap of
        # bare TimerHandles does not, and lets tuples be compared without a call into Python.
        self._timers: list[tuple[float, int, Any]] = []
        self._num_timers_set = 0
        self._num_timers_cancelled = 0
        self._tasks: list[weakref.ref[asyncio.Task[Any]]] = []
        self._num_tasks_created = 0
        self._sweep_tasks_at = _COMPACT_FROM
        self._max_iterations = max_iterations
        self._num_iterations = 0
        self._iteration_limit = min(max_iterations, _MAX_ITERATIONS_PER_INSTANT)
        self._stalled: dict[str, list[asyncio.Handle]] = {}
        """Delayed callbacks of each stalled process."""
        self.unhandled: list[str] = []

    def time(self) -> float:
        return self._now

    # -- callbacks and timers

    def call_at(
        self,
        when: float,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("the virtual loop is closed")
        if math.isnan(when):
            raise ValueError("a timer needs a time, not NaN")
        timer: Any = asyncio.TimerHandle(when, callback, args, self, context)
        timer._scheduled = True
        self._num_timers_set += 1
        heapq.heappush(self._timers, (when, self._num_timers_set, timer))
        return timer  # type: ignore[no-any-return]

    def _timer_handle_cancelled(self, handle: Any) -> None:
        if not handle._scheduled:
            return
        self._num_timers_cancelled += 1
        dead, timers = self._num_timers_cancelled, self._timers
        if dead > _COMPACT_FROM and dead * 2 > len(timers):
            timers[:] = [entry for entry in timers if not entry[2]._cancelled]  # _run_once holds the list
            heapq.heapify(timers)
            self._num_timers_cancelled = 1  # this one is marked after this call and stays until its time

    def _run_once(self) -> None:
        """One iteration: jump if nothing is ready, move due timers to the ready queue, run its callbacks."""
        ready, timers = self._ready, self._timers
        if not ready and not self._stopping:
            self._jump()
        now = self._now
        while timers and timers[0][0] <= now:
            timer = heapq.heappop(timers)[2]
            timer._scheduled = False
            if timer._cancelled:
                self._num_timers_cancelled -= 1
            else:
                ready.append(timer)
        self._num_iterations += 1
        if self._num_iterations > self._iteration_limit:
            self._raise_runaway()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled or (self._stalled and self._delay_if_stalled(handle)):
                continue
            handle._run()

    def _jump(self) -> None:
        timers = self._timers
        while timers and timers[0][2]._cancelled:
            heapq.heappop(timers)[2]._scheduled = False
            self._num_timers_cancelled -= 1
        if not timers:
            tasks = self.pending_tasks()
            raise Deadlock([task.get_name() for task in tasks], [_position(task) for task in tasks])
        when = timers[0][0]
        if when > self._until_s:
            raise Runaway(
                f"the next timer is at {when:g} s, past the cap of {self._until_s:g} s of virtual time"
            )
        if when > self._now:
            self._now = when
            self._iteration_limit = min(
                self._max_iterations, self._num_iterations + _MAX_ITERATIONS_PER_INSTANT
            )

    # -- stalled processes

    def stall(self, process: str) -> None:
        """Delay all callbacks of a process until `resume`."""
        self._stalled.setdefault(process, [])

    def resume(self, process: str) -> None:
        """Run delayed callbacks in the order of a real loop: ready callbacks, received bytes, timers."""
        for handle in self._stalled.pop(process, ()):
            if handle._cancelled:
                continue
            if isinstance(handle, asyncio.TimerHandle):
                self._num_timers_set += 1
                handle._scheduled = True  # type: ignore[attr-defined]
                heapq.heappush(self._timers, (self._now, self._num_timers_set, handle))
            else:
                self._ready.append(handle)

    def _delay_if_stalled(self, handle: Any) -> bool:
        held = self._stalled.get(handle._context.get(_PROCESS))
        if held is None:
            return False
        held.append(handle)
        return True

    def _raise_runaway(self) -> NoReturn:
        names = ", ".join(task.get_name() for task in self.pending_tasks())
        raise Runaway(f"{self._num_iterations} iterations at {self._now:g} s; tasks: {names}")

    # -- tasks

    def create_task(
        self, coro: Any, *, name: object = None, context: contextvars.Context | None = None, **options: Any
    ) -> asyncio.Task[Any]:
        self._num_tasks_created += 1
        # asyncio's default names count over the whole process, so they would differ in a second run.
        label = f"task-{self._num_tasks_created}" if name is None else name
        task = super().create_task(coro, name=label, context=context, **options)
        self._tasks.append(weakref.ref(task))
        if len(self._tasks) > self._sweep_tasks_at:
            self._tasks = [weakref.ref(task) for task in self.pending_tasks()]
            self._sweep_tasks_at = max(_COMPACT_FROM, 2 * len(self._tasks))
        return task

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        """Tasks that are not done, in creation order."""
        tasks = [reference() for reference in self._tasks]
        return [task for task in tasks if task is not None and not task.done()]

    # -- unsupported

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "a virtual loop cannot be called from another thread: its order would not be reproducible"
            )
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> NoReturn:
        raise RuntimeError("a virtual loop has no threads: run blocking calls through the Blocking port")

    async def create_connection(self, *args: Any, **options: Any) -> NoReturn:
        raise RuntimeError("a virtual loop has no sockets: connect through the Network port")

    async def create_server(self, *args: Any, **options: Any) -> NoReturn:
        raise RuntimeError("a virtual loop has no sockets: listen through the Network port")

    async def create_datagram_endpoint(self, *args: Any, **options: Any) -> NoReturn:
        raise RuntimeError("a virtual loop has no sockets")

    # -- the end of a run

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.unhandled.append(f"{context.get('message')}: {context.get('exception')!r}")
        super().default_exception_handler(context)

    def settle(self) -> None:
        """Run ready callbacks without advancing the time."""
        for _ in range(_MAX_SETTLING_ITERATIONS):
            if not self._ready and not (self._timers and self._timers[0][0] <= self._now):
                return
            self.stop()
            self.run_forever()

    def leftovers(self) -> list[str]:
        """Unfinished tasks, armed timers and open async generators, each in a stable order."""
        tasks = [f"task {task.get_name()}: {_position(task)}" for task in self.pending_tasks()]
        timers = [
            f"timer at {when:g} s: {_callback_name(timer._callback)}"
            for when, _, timer in sorted(self._timers)
            if not timer._cancelled
        ]
        generators = sorted(f"async generator {gen.__qualname__}" for gen in self._open_generators())
        return tasks + timers + generators

    def _open_generators(self) -> list[Any]:
        # A finished generator that is still referenced has no frame.
        return [gen for gen in self._asyncgens if gen.ag_frame is not None]

    def abandon(self) -> None:
        """Cancel remaining tasks, oldest first, give them some virtual time to clean up, and close."""
        for process in list(self._stalled):
            self.resume(process)
        tasks = self.pending_tasks()
        for task in tasks:
            task.cancel()
        self._until_s = self._now + _CLEANUP_S
        self._max_iterations = self._num_iterations + _MAX_ITERATIONS_PER_INSTANT
        self._iteration_limit = self._max_iterations
        try:
            for task in tasks:
                if not task.done():
                    self.run_until_complete(asyncio.wait([task]))
            if self._open_generators():
                self.run_until_complete(self.shutdown_asyncgens())
        except (Deadlock, Runaway):
            pass  # the caller already raises the error
        finally:
            self._timers.clear()
            self.close()


def run_virtual(
    main: Callable[[], Coroutine[Any, Any, T]],
    *,
    until_s: float = DAY_S,
    max_iterations: int = _MAX_ITERATIONS,
) -> T:
    """Run `main()` on a new virtual loop and check that it leaves nothing behind.

    Callbacks that are ready at the end still run, without advancing the time.
    """
    loop = VirtualLoop(until_s=until_s, max_iterations=max_iterations)
    try:
        result = loop.run_until_complete(loop.create_task(main(), name="main"))
        loop.settle()
        left = loop.leftovers()
        if left:
            raise Leak(left)
        if loop.unhandled:
            raise Unhandled("; ".join(loop.unhandled))
        return result  # type: ignore[no-any-return]
    finally:
        loop.abandon()


class VirtualClock:
    """Clock port of a virtual loop. Default: the running one."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None, epoch_s: float = EPOCH_S) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._epoch_s = epoch_s

    def monotonic(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return self._epoch_s + self._loop.time()


class InlineBlocking:
    """Blocking port without threads: calls run on the loop after `latency_s` of virtual time.

    Without latency the caller is still suspended once, as with a thread.
    """

    def __init__(self, latency_s: float = 0.0) -> None:
        self.latency_s = latency_s

    async def run(self, call: Callable[[], T], timeout_s: float) -> T:
        await asyncio.sleep(min(self.latency_s, timeout_s))
        if self.latency_s > timeout_s:
            raise DeadlineExceeded("blocking call timed out", stage="blocking", after_s=timeout_s)
        return call()

    def dedicated(self, name: str, num_threads: int = 1) -> InlineBlocking:
        """Return itself: calls on the loop never overlap."""
        return self


def _position(task: asyncio.Task[Any]) -> str:
    """Innermost suspended frame, which shows what the task waits for."""
    awaited: Any = task.get_coro()
    where = "not started"
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        frame = frame or getattr(awaited, "ag_frame", None)
        if frame is not None:
            where = f"{frame.f_code.co_qualname} line {frame.f_lineno}"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return where


def _callback_name(callback: Any) -> str:
    return getattr(callback, "__qualname__", None) or type(callback).__name__
