"""Remote prefill on TensorRT-LLM (`context_only` requests), and the tickets for decode workers.

TensorRT-LLM's cache transceiver moves the bytes. Each choice is a request of its own, so a ticket has a state per
choice. If continuing is not known to be equivalent (grammar, logprobs of the first token, some seeds), nothing is
computed: the ticket is empty, and the decode worker computes the prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from kvolt.core.errors import Cancelled, InvalidRequest, KvoltError
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Handoff, Request
from kvolt.engines.external.answers import Choice, is_end_token
from kvolt.engines.trtllm.arguments import Seeds
from kvolt.engines.trtllm.requests import needs_sampler_state
from kvolt.engines.trtllm.sequences import Sequences
from kvolt.engines.trtllm.tickets import ContextState, Ticket, context_state, decode_ticket, encode_ticket
from kvolt.runtime.tasks import Scope, TaskGroup


def context_states(request: Request) -> tuple[ContextState, ...]:
    """State to continue from, per choice; empty if the prompt must be computed here."""
    handoff = request.handoff
    if handoff is None or handoff.first_tokens is None or request.has_prior_tokens:
        return ()
    ticket = decode_ticket(handoff.ticket)
    if ticket is None or len(ticket.choices) != request.sampling.num_choices:
        return ()
    first = tuple(each.first_gen_tokens[0] for each in ticket.choices)
    return ticket.choices if first == handoff.first_tokens else ()


def can_prefill_remotely(request: Request, seeds: Seeds) -> bool:
    """Whether the decode worker can continue after a first token sampled by the prefill worker."""
    return (
        request.stop.max_tokens > 1
        and request.sampling.logprobs is None
        and request.grammar is None
        and not request.has_prior_tokens
        and not needs_sampler_state(request, seeds)
    )


@dataclass(slots=True)
class _HeldPrompt:
    names: tuple[str, ...]
    timer: asyncio.TimerHandle


@dataclass(slots=True)
class Prefills:
    """See the module."""

    task_group: TaskGroup
    sequences: Sequences
    hold_s: float
    seeds: Seeds
    eos_token_ids: Collection[int]
    _computing: dict[RequestId, asyncio.Task[Any]] = field(default_factory=dict)
    _held: dict[RequestId, _HeldPrompt] = field(default_factory=dict)
    _number: int = 0

    async def compute(self, request: Request) -> Handoff:
        """Compute a prompt. Errors as of `submit`. Cancelling releases everything."""
        request_id = request.request_id
        if request_id in self._computing or request_id in self._held:
            raise InvalidRequest(f"request {request_id} exists already", param="request_id")
        if not can_prefill_remotely(request, self.seeds):
            return self._handoff(Ticket())
        task = self.task_group.start(self._compute(request), "prefill")
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
            raise Cancelled("the prompt was released")
        outcome: Handoff | KvoltError = task.result()
        if isinstance(outcome, KvoltError):
            raise outcome
        return outcome

    def release(self, request_id: RequestId) -> None:
        """Release a prompt, or stop computing it. Unknown ids are ignored."""
        task = self._computing.get(request_id)
        if task is not None:
            task.cancel()
        held = self._held.pop(request_id, None)
        if held is not None:
            held.timer.cancel()
            for name in held.names:
                self.sequences.drop(name)

    def close(self) -> None:
        for request_id in (*self._computing, *self._held):
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
            self._drop_choices(choices)
            return error
        except BaseException:
            self._drop_choices(choices)
            raise

    async def _compute_one(self, choice: Choice, results: dict[int, Any]) -> None:
        results[choice.index] = await self.sequences.compute_prompt(choice)

    def _drop_choices(self, choices: list[Choice]) -> None:
        for choice in choices:
            self.sequences.drop(choice.engine_id)

    def _computed(self, request: Request, choices: list[Choice], results: dict[int, Any]) -> Handoff:
        states = tuple(context_state(results[each.index].outputs[0].disaggregated_params) for each in choices)
        first = tuple(state.first_gen_tokens[0] for state in states)
        if not request.stop.min_tokens and any(
            is_end_token(request, each, self.eos_token_ids) for each in first
        ):
            self._drop_choices(choices)  # the decode worker reports an answer that ends at its first token
            return self._handoff(Ticket())
        ticket = encode_ticket(Ticket(states))
        for choice in choices:
            self.sequences.hold(choice.engine_id)
        timer = asyncio.get_running_loop().call_later(self.hold_s, self.release, request.request_id)
        self._held[request.request_id] = _HeldPrompt(tuple(each.engine_id for each in choices), timer)
        return self._handoff(ticket, first, results[choices[0].index].cached_tokens)

    def _handoff(
        self, ticket: Ticket | bytes, first: tuple[int, ...] | None = None, cached_tokens: int | None = None
    ) -> Handoff:
        return Handoff(
            ticket=ticket if isinstance(ticket, bytes) else encode_ticket(ticket),
            prefill_instance=InstanceId(""),
            expires_in_s=self.hold_s,
            first_tokens=first,
            cached_tokens=cached_tokens,
        )
