"""Virtual time: an event loop whose clock jumps to the next timer as soon as nothing is ready.

Owns the order in which callbacks run. A run depends on nothing but what it was given: there are no
sockets, no threads, no wall clock; equal timers run in the order in which they were set; the time is
exactly the timer's own, so nothing drifts. It must not know what runs on it.

Several processes may share the loop: what a process starts runs in a context that names it (`in_process`), and
`stall` holds back everything in that context, as SIGSTOP would, until `resume`.

A test cannot hang on it: waiting for nothing is a `Deadlock`, spinning is a `Runaway`, and what is
left when `run_virtual` ends is a `Leak`.
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
"""Wall time of a virtual loop's start; any fixed date will do."""

_MAX_ITERATIONS = 50_000_000
_MAX_ITERATIONS_PER_INSTANT = 1_000_000
_MAX_SETTLING_ITERATIONS = 10_000
_COMPACT_FROM = 128
"""Below this many dead entries, sweeping a list costs more than carrying them."""

_PROCESS: contextvars.ContextVar[str | None] = contextvars.ContextVar("virtual process", default=None)

_CLEANUP_S = 60.0
"""Virtual seconds that cancelled tasks get for their `finally` blocks after a failed run."""


class Deadlock(AssertionError):
    """Nothing is ready and no timer is set, but the main task is not done. `tasks` is in creation order."""

    def __init__(self, tasks: list[str], positions: list[str]) -> None:
        lines = "".join(f"\n  {name}: {where}" for name, where in zip(tasks, positions, strict=True))
        super().__init__(f"every task waits for something that cannot happen any more:{lines}")
        self.tasks = tasks


class Runaway(AssertionError):
    """The run went past its cap on virtual time or on loop iterations."""


class Leak(AssertionError):
    """The main task is done, but something it started is not. `left` says what."""

    def __init__(self, left: list[str]) -> None:
        super().__init__("left behind:" + "".join(f"\n  {item}" for item in left))
        self.left = left


class Unhandled(AssertionError):
    """A callback or an unwatched task failed, and nobody but the loop's exception handler was told."""


def in_process(name: str, call: Callable[[], T]) -> T:
    """Run a call as part of the virtual process `name`; so is every task, timer and listener that it starts."""
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
        """Stalled processes, with the callbacks that came due since."""
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
            self._num_timers_cancelled = 1  # this one: it is marked after this call, and stays till its time

    def _run_once(self) -> None:
        """One iteration: jump if nothing is ready, move due timers to the ready queue, run what was in it."""
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
            self._refuse_to_spin()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled or (self._stalled and self._hold_back(handle)):
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
        """Run nothing of a process until `resume`; time goes on without it."""
        self._stalled.setdefault(process, [])

    def resume(self, process: str) -> None:
        """Run what came due, in the order of a real loop: callbacks that were ready, arrived bytes, timers."""
        for handle in self._stalled.pop(process, ()):
            if handle._cancelled:
                continue
            if isinstance(handle, asyncio.TimerHandle):
                self._num_timers_set += 1
                handle._scheduled = True  # type: ignore[attr-defined]
                heapq.heappush(self._timers, (self._now, self._num_timers_set, handle))
            else:
                self._ready.append(handle)

    def _hold_back(self, handle: Any) -> bool:
        held = self._stalled.get(handle._context.get(_PROCESS))
        if held is None:
            return False
        held.append(handle)
        return True

    def _refuse_to_spin(self) -> NoReturn:
        names = ", ".join(task.get_name() for task in self.pending_tasks())
        raise Runaway(f"{self._num_iterations} iterations at {self._now:g} s; tasks: {names}")

    # -- tasks

    def create_task(
        self, coro: Any, *, name: object = None, context: contextvars.Context | None = None, **options: Any
    ) -> asyncio.Task[Any]:
        self._num_tasks_created += 1
        # asyncio's default names count over the whole process, so a second run would read differently.
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

    # -- what a virtual loop does not have

    def call_soon_threadsafe(
        self,
        callback: Callable[[*Ts], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "another thread called into a virtual loop: its order would not be reproducible"
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
        """Run what is ready now, without letting time pass."""
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
        # A finished generator that is still referenced has lost its frame.
        return [gen for gen in self._asyncgens if gen.ag_frame is not None]

    def abandon(self) -> None:
        """Cancel what is left, oldest first, give it a little virtual time to clean up, and close."""
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
            pass  # the caller already raises what went wrong
        finally:
            self._timers.clear()
            self.close()


def run_virtual(
    main: Callable[[], Coroutine[Any, Any, T]],
    *,
    until_s: float = DAY_S,
    max_iterations: int = _MAX_ITERATIONS,
) -> T:
    """Run `main()` to its end on a new virtual loop, and check that it left nothing behind.

    Callbacks that are ready at the end still run; time does not pass any more.
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
    """The Clock port on a virtual loop (by default the running one)."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None, epoch_s: float = EPOCH_S) -> None:
        self._loop = loop or asyncio.get_running_loop()
        self._epoch_s = epoch_s

    def monotonic(self) -> float:
        return self._loop.time()

    def wall(self) -> float:
        return self._epoch_s + self._loop.time()


class InlineBlocking:
    """The Blocking port without threads: the call runs on the loop, after `latency_s` of virtual time.

    Even with no latency the caller is suspended once, as it would be with a thread.
    """

    def __init__(self, latency_s: float = 0.0) -> None:
        self.latency_s = latency_s

    async def run(self, call: Callable[[], T], timeout_s: float) -> T:
        await asyncio.sleep(min(self.latency_s, timeout_s))
        if self.latency_s > timeout_s:
            raise DeadlineExceeded("blocking call took too long", stage="blocking", after_s=timeout_s)
        return call()

    def dedicated(self, name: str, num_threads: int = 1) -> InlineBlocking:
        """Itself: calls on the loop never overlap."""
        return self


def _position(task: asyncio.Task[Any]) -> str:
    """The innermost suspended frame, which says what the task waits for."""
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
