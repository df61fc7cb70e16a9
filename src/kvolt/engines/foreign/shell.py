"""ForeignEngine: what every adapter is around an engine of others: started once, ended once, requests in, steps out.

Owns the life that a worker sees, the requests under way, what `submit` checks at once, and the steps that wait to be
read. An adapter says how its engine is launched and shut down, what of a request it cannot follow, how choices are
handed over and dropped (docs/adapters.md has a whole one); what it hears, it tells by `_answers` and `_unread`. Knows
no engine.

    new --start--> launching --> running --close, or a failure--> over
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from typing import ClassVar, Generic, Protocol, TypeVar

from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.delta import StepOutput
from kvolt.core.errors import EngineDied, EngineFailed, KvoltError, Overloaded, from_info, to_info
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.foreign.answers import Answers, Choice
from kvolt.engines.step_plan import Limits, check_request, check_vocabulary
from kvolt.engines.unread_steps import UnreadSteps
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

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


class ForeignEngine(ABC, Generic[L]):
    """See the module. For one loop. `close` it, also after it died."""

    name: ClassVar[str]
    """As registered: `vllm`."""
    title: ClassVar[str]
    """As people know it: `vLLM`."""

    def __init__(self) -> None:
        self._is_started = False
        self._running: L | None = None
        self._crew = Crew(self.name, self._on_error)
        """Without any of its tasks nothing goes on."""
        self._answers = Answers()
        self._unread = UnreadSteps()
        self._failure: KvoltError | None = None
        """Why it is over; None while it is not, or where it was closed."""
        self._last = Crew(
            f"{self.name} close", lambda error: None
        )  # whoever waits for these has their errors
        self._loading: asyncio.Task[object] | None = None
        self._closing: asyncio.Task[None] | None = None

    # --- what an adapter says

    @abstractmethod
    async def _launch(self) -> L:
        """Load, until it could answer. KvoltErrors as they are; others are EngineFailed. See `_load`."""

    async def _begin(self, running: L) -> None:
        """Listen to it, now that it runs."""

    @abstractmethod
    async def _shut_down(self) -> None:
        """All that is left of it, after the tasks of `_crew` have ended. Also of one that did not start."""

    def _check_own(self, request: Request, running: L) -> None:
        """Unsupported or InvalidRequest for what it would not answer as the contract says."""

    @abstractmethod
    def _hand_over(self, request: Request, choices: list[Choice]) -> None:
        """To the engine, which is to know each by its `engine_id`. Raises before it has any of them, or not at all."""

    @abstractmethod
    def _drop(self, engine_ids: list[str]) -> None:
        """Choices that the engine has and nobody waits for."""

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

    async def start(self) -> EngineInfo:
        """Errors of loading as they were raised. Cancelled, nothing goes on: `close` waits until it is gone."""
        if self._is_started or self._unread.is_over:
            raise EngineFailed(f"a {self.name} engine is started once", engine=self.name)
        self._is_started = True
        try:
            running = await self._launched()
            self._check_alive()
            self._running = running
            self._answers.eos_token_ids = frozenset(running.card.eos_token_ids)
            await self._begin(running)
            self._check_alive()
        except BaseException:
            self._end(None)
            raise
        return running.info

    async def _launched(self) -> L:
        try:
            return await self._launch()
        except KvoltError:
            raise
        except Exception as error:
            raise EngineFailed(f"{self.title} did not start: {error}", engine=self.name) from error

    async def _load(self, launch: Callable[[], T], let_go: Callable[[T], object]) -> T:
        """For `_launch`: in a thread, which nobody can stop. `close` waits for its end, and what comes too late is let
        go."""
        self._loading = loading = self._last.start(self._load_in_thread(launch, let_go), "launch")
        made: T = await asyncio.shield(loading)
        return made

    async def _load_in_thread(self, launch: Callable[[], T], let_go: Callable[[T], object]) -> T:
        launched = await asyncio.to_thread(launch)
        if self._unread.is_over:
            await asyncio.to_thread(let_go, launched)
        return launched

    def steps(self) -> AsyncIterator[StepOutput]:
        return self._unread.read()

    async def close(self) -> None:
        if self._closing is None:
            self._end(None)
            self._closing = self._last.start(self._close(), "close")
        await asyncio.shield(self._closing)  # whoever waits may go: the next one waits for the same end

    async def _close(self) -> None:
        if self._loading is not None:
            await asyncio.wait([self._loading])
        try:
            await self._crew.close()
        finally:
            await self._shut_down()

    def _on_error(self, error: BaseException) -> None:
        """One of our tasks ended by an error: nothing goes on without it."""
        log.error("%s failed", self.title, exc_info=error)
        said = str(error) or type(error).__name__
        self._end(EngineFailed(f"{self.title} ended: {said}", engine=self.name))

    def _end(self, failure: KvoltError | None) -> None:
        if self._unread.is_over:
            return
        self._failure = failure
        self._answers.clear()
        self._unread.end(failure)
        self._on_end()

    def _check_alive(self) -> None:
        if self._unread.is_over:
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
            self._answers.close(request.request_id)
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
            raise Overloaded("the engine's queue is full", queue="engine", limit=limit)

    def abort(self, request_id: RequestId) -> None:
        self._drop_all(self._answers.close(request_id))
        self._unread.forget(request_id)

    def _give_up(self, request_id: RequestId, error: KvoltError) -> None:
        """It cannot be answered, with all its choices; told with the next step."""
        self._drop_all(self._answers.fail(request_id, error))

    def _drop_all(self, engine_ids: list[str]) -> None:
        if engine_ids and not self._unread.is_over:
            self._drop(engine_ids)

    async def withdraw(self, request_id: RequestId) -> bool:
        if request_id not in self._answers or self._has_begun(request_id):
            return False
        self.abort(request_id)
        return True
