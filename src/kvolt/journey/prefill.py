"""Prompts that are computed elsewhere: a worker that does nothing else computes one, and says how to go on with it.

Owns the call to such a worker, its booking included. What comes of it, and what is done when nothing does, is the
machine's to decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from kvolt.core.delta import Delta
from kvolt.core.errors import Cancelled, DeadlineExceeded, KvoltError, ProtocolError
from kvolt.core.ids import InstanceId
from kvolt.core.request import Handoff, LinkCosts, Rendezvous, Request
from kvolt.journey.dispatch import as_decided, deadlines_for
from kvolt.journey.links import with_links
from kvolt.journey.withdrawal import let_go
from kvolt.router.breaker import Outcome, outcome_of
from kvolt.router.port import Decision, Router
from kvolt.runtime.endpoint.address import Instance
from kvolt.runtime.endpoint.call import Call, Deadlines
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.plane.streams import StepSink
from kvolt.runtime.tasks import Crew

_decode_delta = msgspec.msgpack.Decoder(Delta).decode


@dataclass(frozen=True, slots=True)
class Leg:
    """Where the workers of one role are reached."""

    router: Router
    client: EndpointClient
    unfit: Callable[[], frozenset[InstanceId]] = frozenset
    """Those whose KV would be of no use to who answers: no prompt is computed there for others."""

    def candidates(self) -> list[Instance]:
        """Those that could compute a prompt for others now."""
        found, unfit = self.client.candidates(), self.unfit()
        return [each for each in found if each.id not in unfit] if unfit else found

    async def place(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        """Who is to compute its prompt for others. As `Router.route`."""
        return await self.router.route(as_prompt(request), excluded | self.unfit())


class PrefillCall:
    """One prompt at one prefill worker. `run` once; `cancel` at any time."""

    steps: StepSink | None = None
    """As a sink it takes items only."""

    def __init__(self, leg: Leg, request: Request, crew: Crew) -> None:
        """`crew`: for what nobody waits for."""
        self._leg = leg
        self._request = as_prompt(request)
        self._crew = crew
        self._done: asyncio.Future[Handoff] = asyncio.get_running_loop().create_future()
        self._call: Call | None = None
        self._is_sent = False
        self._handoff: Handoff | None = None
        self.decision: Decision | None = None
        """Where it went."""
        self.wait_s = 0.0
        """Until it was known where."""
        self.took_s = 0.0
        """From then on."""

    async def run(self, excluded: frozenset[InstanceId], deadlines: Deadlines) -> Handoff:
        """KvoltError when the prompt was not computed; then nothing is left of it."""
        await self.place(excluded)
        return await self.compute(deadlines)

    async def place(self, excluded: frozenset[InstanceId], links: LinkCosts | None = None) -> Decision:
        """Who is to compute it. Booked there until `compute` has ended, or `give_up` says that it will not be. `links`:
        to where it is answered, if that is known."""
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        decision = self.decision = await self._leg.place(with_links(self._request, links), excluded)
        self.wait_s = loop.time() - asked_at
        return decision

    def give_up(self) -> None:
        if self.decision is not None:
            self._leg.router.free(self.decision, None)

    async def compute(self, deadlines: Deadlines, meeting: Rendezvous | None = None) -> Handoff:
        """Where it was placed, for who goes on with it later or fetches it meanwhile. Errors as of `run`."""
        decision = self.decision
        assert decision is not None
        loop = asyncio.get_running_loop()
        request = as_decided(self._request, decision)
        if meeting is not None:
            request = msgspec.structs.replace(request, rendezvous=meeting)
        sent_at = loop.time()
        try:
            if self._done.done():  # cancelled meanwhile
                return self._done.result()
            limits = deadlines_for(deadlines, decision)
            self._call = await self._leg.client.call(
                request, self, instance=decision.instance, deadlines=limits, decode=_decode_delta
            )
            self._is_sent = True
            return await self._done
        except (asyncio.CancelledError, Cancelled, DeadlineExceeded):
            self.cancel()
            if self._is_sent:  # it may have been computed just before, and then nobody will ask for it
                let_go(self._crew, self._leg.client.plane, decision.instance, request.request_id)
            raise
        finally:
            self.took_s = loop.time() - sent_at
            self._leg.router.free(decision, None, self._outcome())

    def _outcome(self) -> Outcome:
        """What its end says about the worker: nothing where that never had it."""
        if not self._is_sent or not self._done.done() or self._done.cancelled():
            return Outcome.UNKNOWN
        error = self._done.exception()
        return outcome_of(error) if error is None or isinstance(error, KvoltError) else Outcome.UNKNOWN

    def cancel(self) -> None:
        """Stop here and there; `run` raises Cancelled."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        self._settle(Cancelled("the caller cancelled"))

    # --- as the sink of a call

    def on_item(self, delta: Any) -> None:
        if self._handoff is not None or delta.handoff is None:
            return  # nothing else is asked of it
        self._handoff = delta.handoff
        if self.decision is not None:
            self._leg.router.begun(self.decision, delta.cached_tokens)

    def on_end(self, error: KvoltError | None) -> None:
        if error is None and self._handoff is None:
            error = ProtocolError("a prefill worker ended without a handoff", rule="handoff")
        self._settle(error)

    def _settle(self, error: KvoltError | None) -> None:
        if self._done.done():
            return
        if error is not None or self._handoff is None:
            self._done.set_exception(error or Cancelled("the caller cancelled"))
            self._done.exception()  # `run` may have ended already
        else:
            self._done.set_result(self._handoff)


def as_prompt(request: Request) -> Request:
    """As those see it who compute its prompt for others. A rank that the caller has named is one of the worker that
    answers; whom it allows to answer need not compute the prompt."""
    routing = request.routing
    if routing.pinned_dp_rank is None and routing.allowed == routing.allowed_prefill:
        return request
    routing = msgspec.structs.replace(routing, pinned_dp_rank=None, allowed=routing.allowed_prefill)
    return msgspec.structs.replace(request, routing=routing)
