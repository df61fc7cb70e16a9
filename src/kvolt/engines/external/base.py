"""ExternalEngine: what every adapter is around an engine of others: started once, ended once, requests in, steps out.

Owns the life that a worker sees, the requests under way, what `submit` checks at once, and the steps that wait to be
read. An adapter says how its engine is launched, what of a request it cannot follow, how choices are handed over and
dropped (docs/adapters.md has a whole one); what it hears, it tells by `_answers` and `_unread`. Knows no engine.

    new --start--> starting --> running --close, a failed start, a task's error--> over --> closed
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.delta import StepOutput
from kvolt.core.errors import EngineDied, EngineFailed, KvoltError, Overloaded, from_info, to_info
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.external.answers import Answers, Choice
from kvolt.engines.unread_steps import UnreadSteps
from kvolt.runtime.tasks import Crew
from kvolt.scheduler.step_plan import Limits, check_request, check_vocabulary

log = logging.getLogger(__name__)

_STOP_S = 30.0
"""For what an engine does when it is told to end, and for calls that are under way then."""
_MANY_BLOCKS = 1 << 40
"""Where an engine does not tell how many it has."""


class Launched(Protocol):
    """What is known of an engine that runs; adapters keep more."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def info(self) -> EngineInfo: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def vocab_size(self) -> int | None:
        """None where it does not tell."""
        ...


L = TypeVar("L", bound=Launched)
T = TypeVar("T")


class ExternalEngine(ABC, Generic[L]):
    """See the module. For one loop. `close` it, also after it died."""

    name: str
    """As registered: `vllm`."""
    title: str
    """As people know it: `vLLM`."""

    def __init__(self) -> None:
        self._running: L | None = None
        self._crew = Crew(self.name, self._on_error)
        """An error of one of its tasks is the engine's death."""
        self._answers = Answers()
        self._unread = UnreadSteps()
        self._failure: KvoltError | None = None
        """Why it is over; None while it is not, or where it was closed."""
        self._life = Crew(f"{self.name} life", lambda error: None)
        """Start, end, and calls that block: whoever waits for these has their errors."""
        self._starting: asyncio.Task[EngineInfo] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._blocked: dict[asyncio.Task[Any], None] = {}
        """Calls in threads, which nobody can stop."""
        self._let_go: Callable[[], object] | None = None
        """What is left to do with what was loaded. For a thread."""

    # --- what an adapter says

    @abstractmethod
    async def _launch(self) -> L:
        """Until it could answer; see `_load`. KvoltErrors as they are, others become EngineFailed."""

    async def _begin(self, running: L) -> None:
        """Listen to it, now that it runs (see `_go_on`)."""

    async def _shut_down(self) -> None:
        """What is left after all tasks have ended, and what was loaded was let go. Also of one that did not start."""

    def _check_own(self, request: Request, running: L) -> None:
        """Unsupported or InvalidRequest for what it would not answer as the contract says."""

    @abstractmethod
    def _hand_over(self, request: Request, choices: list[Choice]) -> None:
        """To the engine, which is to know each by its `engine_id`. What it raises is the request's failure, and those
        that it has by then are dropped."""

    @abstractmethod
    def _drop(self, engine_ids: list[str]) -> None:
        """Choices that nobody waits for. The engine may not know all of them."""

    def _on_end(self) -> None:
        """It is over, `_failure` says why: once, before anything is shut down."""

    @property
    def _num_waiting(self) -> int:
        """Sequences beyond those that it can run at once."""
        info = self._known.info
        return self._answers.num_choices - info.capacity.max_num_seqs * len(info.dp_ranks)

    def _has_begun(self, request_id: RequestId) -> bool:
        """Where only the engine knows: one that has said nothing is taken for one that has not."""
        return self._answers.has_begun(request_id)

    # --- life

    @property
    def card(self) -> ModelCard:
        return self._known.card

    @property
    def _known(self) -> L:
        if self._running is None:
            raise EngineFailed(f"the {self.name} engine knows its model once it is started", engine=self.name)
        return self._running

    @property
    def _is_over(self) -> bool:
        return self._unread.is_over

    async def start(self) -> EngineInfo:
        """Errors of loading as they were raised. Cancelled, it ends by itself: `close` waits until it is gone."""
        if self._starting is not None or self._is_over:
            raise EngineFailed(f"a {self.name} engine is started once", engine=self.name)
        self._starting = starting = self._life.start(self._start(), "start")
        try:
            await asyncio.wait([starting])
        except asyncio.CancelledError:
            self._begin_close()
            raise
        error = self._failure or (None if starting.cancelled() else starting.exception())
        if error is None and self._is_over:
            error = self._death()
        if error is not None:
            await self.close()
            raise error
        info: EngineInfo = starting.result()
        return info

    async def _start(self) -> EngineInfo:
        try:
            running = self._running = await self._launch()
            self._answers.eos_token_ids = frozenset(running.card.eos_token_ids)
            await self._begin(running)
        except KvoltError:
            raise
        except Exception as error:
            raise EngineFailed(f"{self.title} did not start: {error}", engine=self.name) from error
        return running.info

    async def _load(self, launch: Callable[[], T], let_go: Callable[[T], object]) -> T:
        """For `_launch`: in a thread. `let_go`: of what it has made, once, when the engine is closed; in a thread."""

        def load() -> T:
            made = launch()
            self._let_go = lambda: let_go(made)
            return made

        return await self._blocking(load)

    async def _blocking(self, call: Callable[[], T]) -> T:
        """In a thread. Who waits may go; what was loaded is not let go before it has ended, or had its time to."""
        self._check_alive()
        task: asyncio.Task[T] = self._life.start(asyncio.to_thread(call), "call")
        self._blocked[task] = None
        task.add_done_callback(lambda task: self._blocked.pop(task, None))
        return await asyncio.shield(task)

    def _go_on(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Start what has to go on for as long as the engine does."""
        self._crew.start(self._on_and_on(work, name), name)

    async def _on_and_on(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        await work()
        raise EngineFailed(f"its {name} have come to an end", engine=self.name)

    def steps(self) -> AsyncIterator[StepOutput]:
        return self._unread.read()

    async def close(self) -> None:
        await asyncio.shield(self._begin_close())  # whoever waits may go: the next one waits for the same end

    def _begin_close(self) -> asyncio.Task[None]:
        if self._closing is None:
            self._end(None)
            self._closing = self._life.start(self._close(), "close")
        return self._closing

    async def _close(self) -> None:
        if self._starting is not None:
            await asyncio.wait([self._starting])  # it was cancelled when all was over
        await self._crew.close()
        while self._blocked and self._let_go is None:  # it is being loaded, which nobody can stop
            await asyncio.wait([*self._blocked])
        if self._blocked:
            await asyncio.wait([*self._blocked], timeout=_STOP_S)
        let_go, self._let_go = self._let_go, None
        try:
            if let_go is not None:
                async with asyncio.timeout(_STOP_S):
                    await asyncio.to_thread(let_go)
        except Exception as error:  # also that it takes too long: there is no more that could be done
            log.warning("%s did not end as it should: %r", self.title, error)
        try:
            await self._shut_down()
        except Exception:  # who closes it cannot help it
            log.exception("%s left something behind", self.title)

    def _on_error(self, error: BaseException) -> None:
        """One of our tasks ended by an error: nothing goes on without it."""
        if self._is_over:
            log.debug("%s: after its end", self.title, exc_info=error)
            return
        log.error("%s failed", self.title, exc_info=error)
        said = str(error) or type(error).__name__
        self._end(EngineFailed(f"{self.title} ended: {said}", engine=self.name))

    def _end(self, failure: KvoltError | None) -> None:
        if self._is_over:
            return
        self._failure = failure
        self._answers.clear()
        self._unread.end(failure)
        if self._starting is not None:
            self._starting.cancel()  # it may wait for an answer that does not come any more
        try:
            self._on_end()
        except Exception:  # what is over is to be shut down all the same
            log.exception("%s did not end in order", self.title)

    def _check_alive(self) -> None:
        if self._is_over:
            raise self._death()

    def _death(self) -> KvoltError:
        """As requests are told that were with it, or come too late: another worker may do better. A new one each time:
        an exception that is raised twice grows its traceback."""
        failure = self._failure
        if failure is None:
            return EngineDied("the engine has ended", engine=self.name)
        if isinstance(failure, EngineFailed):
            return EngineDied(failure.message.partition("\n")[0], engine=self.name)
        return from_info(to_info(failure))

    # --- requests

    def submit(self, request: Request) -> None:
        self._check(request)
        choices = self._answers.open(request)
        try:
            self._hand_over(request, choices)
        except BaseException:
            self._drop_all(self._answers.close(request.request_id))
            raise

    def _check(self, request: Request) -> None:
        self._check_alive()
        running = self._known
        check_request(request, running.limits, running.info.capacity.kv_total_blocks or _MANY_BLOCKS)
        if running.vocab_size is not None:
            check_vocabulary(request, running.vocab_size)
        self._check_own(request, running)
        limit = running.limits.max_waiting
        if self._num_waiting >= limit:
            raise Overloaded(f"too much waits at {self.title}", queue="engine", limit=limit)

    def abort(self, request_id: RequestId) -> None:
        self._drop_all(self._answers.close(request_id))
        self._unread.forget(request_id)

    def _give_up(self, request_id: RequestId, error: KvoltError) -> None:
        """It cannot be answered, with all its choices; told with the next step."""
        self._drop_all(self._answers.fail(request_id, error))

    def _drop_all(self, engine_ids: list[str]) -> None:
        if engine_ids and not self._is_over:
            self._drop(engine_ids)

    async def withdraw(self, request_id: RequestId) -> bool:
        if request_id not in self._answers or self._has_begun(request_id):
            return False
        self.abort(request_id)
        return True
