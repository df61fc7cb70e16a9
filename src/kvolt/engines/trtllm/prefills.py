"""Prefills: prompts that TensorRT-LLM computes for others (`context_only`), and the tickets by which it takes over.

The bytes go between the two TensorRT-LLMs, as its cache transceiver has it. Each choice is a request of its own there,
so a ticket has a state for each. Where TensorRT-LLM is not known to go on as one engine would (a grammar, logprobs of
the first token, a seed), nothing is computed ahead: the ticket says so, and decode computes the prompt itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from kvolt.core.errors import Cancelled, InvalidRequest, KvoltError
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Handoff, Request
from kvolt.engines.external.answers import Choice
from kvolt.engines.external.ending import ends
from kvolt.engines.trtllm.arguments import Seeds
from kvolt.engines.trtllm.requests import is_drawn_anew
from kvolt.engines.trtllm.tickets import ContextState, Ticket, decode_ticket, encode_ticket, state_of
from kvolt.runtime.tasks import Crew, Scope


def states_of(request: Request) -> tuple[ContextState, ...]:
    """What to go on with, for each choice; none where the prompt has to be computed here."""
    handoff = request.handoff
    if handoff is None or handoff.first_tokens is None or request.is_resumed:
        return ()
    ticket = decode_ticket(handoff.ticket)
    if ticket is None or len(ticket.choices) != request.sampling.num_choices:
        return ()
    first = tuple(each.first_gen_tokens[0] for each in ticket.choices)
    return ticket.choices if first == handoff.first_tokens else ()


def can_hand_over(request: Request, seeds: Seeds) -> bool:
    """Whether decode could go on after a first token that somebody else has told."""
    return (
        request.stop.max_tokens > 1
        and request.sampling.logprobs is None
        and request.grammar is None
        and not request.is_resumed
        and not is_drawn_anew(request, seeds)
    )


@dataclass(slots=True)
class _Kept:
    names: tuple[str, ...]
    timer: asyncio.TimerHandle


@dataclass(slots=True)
class Prefills:
    """See the module. `compute_one` is a choice's context-only result, once there is room; `keep` and `let_go` are
    told what becomes of it."""

    crew: Crew
    compute_one: Callable[[Choice], Awaitable[Any]]
    keep: Callable[[str], None]
    let_go: Callable[[str], None]
    hold_s: float
    seeds: Seeds
    eos_token_ids: Collection[int]
    _computing: dict[RequestId, asyncio.Task[Any]] = field(default_factory=dict)
    _kept: dict[RequestId, _Kept] = field(default_factory=dict)
    _number: int = 0

    async def compute(self, request: Request) -> Handoff:
        """Errors as of `submit`; cancelled, it leaves nothing."""
        request_id = request.request_id
        if request_id in self._computing or request_id in self._kept:
            raise InvalidRequest(f"request {request_id} is here already", param="request_id")
        if not can_hand_over(request, self.seeds):
            return self._handoff(Ticket())
        task = self.crew.start(self._compute(request), "prefill")
        self._computing[request_id] = task
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            self.release(request_id)
            raise
        finally:
            self._computing.pop(request_id, None)
        if task.cancelled():
            raise Cancelled("the prompt was let go")
        outcome: Handoff | KvoltError = task.result()
        if isinstance(outcome, KvoltError):
            raise outcome
        return outcome

    def release(self, request_id: RequestId) -> None:
        """Unknown ids are no error."""
        task = self._computing.get(request_id)
        if task is not None:
            task.cancel()
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            kept.timer.cancel()
            for name in kept.names:
                self.let_go(name)

    def close(self) -> None:
        for request_id in (*self._computing, *self._kept):
            self.release(request_id)

    async def _compute(self, request: Request) -> Handoff | KvoltError:
        self._number += 1
        choices = [
            Choice(request, index, f"{request.request_id}/p{self._number}/{index}")
            for index in request.open_choices
        ]
        results: dict[int, Any] = {}
        try:
            async with Scope("prefill") as scope:
                for choice in choices:
                    scope.start(self._compute_one(choice, results), "choice")
            return self._computed(request, choices, results)
        except KvoltError as error:
            self._let_go(choices)
            return error
        except BaseException:
            self._let_go(choices)
            raise

    async def _compute_one(self, choice: Choice, results: dict[int, Any]) -> None:
        results[choice.index] = await self.compute_one(choice)

    def _let_go(self, choices: list[Choice]) -> None:
        for choice in choices:
            self.let_go(choice.engine_id)

    def _computed(self, request: Request, choices: list[Choice], results: dict[int, Any]) -> Handoff:
        states = tuple(state_of(results[each.index].outputs[0].disaggregated_params) for each in choices)
        first = tuple(state.first_gen_tokens[0] for state in states)
        if not request.stop.min_tokens and any(ends(request, each, self.eos_token_ids) for each in first):
            self._let_go(choices)  # an answer that is over at once is decode's to tell
            return self._handoff(Ticket())
        ticket = encode_ticket(Ticket(states))
        for choice in choices:
            self.keep(choice.engine_id)
        timer = asyncio.get_running_loop().call_later(self.hold_s, self.release, request.request_id)
        self._kept[request.request_id] = _Kept(tuple(each.engine_id for each in choices), timer)
        return self._handoff(ticket, first, results[choices[0].index].cached_tokens)

    def _handoff(
        self, ticket: Ticket | bytes, first: tuple[int, ...] | None = None, cached: int | None = None
    ) -> Handoff:
        return Handoff(
            ticket=ticket if isinstance(ticket, bytes) else encode_ticket(ticket),
            prefill_instance=InstanceId(""),
            expires_in_s=self.hold_s,
            first_tokens=first,
            cached_tokens=cached,
        )
