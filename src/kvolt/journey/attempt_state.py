"""What the workers of one request are asked: first all of it, then what is left of it where one was lost.

Owns how far a request has come between workers: the KV of its prompt that one may go on with, what was said of the
prompt, and since when another worker is looked for. That it goes on elsewhere, and where, others decide.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from kvolt.core.delta import Delta
from kvolt.core.errors import KvoltError
from kvolt.core.request import Handoff, Request
from kvolt.journey.context import Receiver
from kvolt.journey.machine import State
from kvolt.journey.migration import as_one, going_on
from kvolt.journey.rendezvous import SOMEWHERE
from kvolt.journey.stats import Elsewhere, JourneyStats, Outcome
from kvolt.router.port import Decision

log = logging.getLogger(__name__)


class Asked:
    """One request's."""

    __slots__ = (
        "_cached_tokens",
        "_failed_at",
        "_handoff",
        "_is_resumed",
        "_is_taken",
        "_now",
        "_stats",
        "_whole",
        "request",
    )

    def __init__(self, request: Request, stats: JourneyStats, now: Callable[[], float]) -> None:
        self._whole = request
        self._stats = stats
        self._now = now
        self._handoff: Handoff | None = None
        """Of whoever computed the prompt, if that was somebody else."""
        self._is_taken = False
        """Whether a worker has gone on with the handoff: then it is of no use to another one."""
        self._is_resumed = False
        self._cached_tokens: int | None = None
        """What the first worker said of the prompt."""
        self._failed_at: float | None = None
        """Since when another worker is looked for."""
        self.request = request
        """What the next worker is asked."""

    # --- prompts that others compute

    def expect_prompt(self) -> None:
        """Somebody computes the prompt while the worker has it; where is said once that is known."""
        self.request = msgspec.structs.replace(self.request, rendezvous=SOMEWHERE)

    def take_over(self, handoff: Handoff) -> None:
        """Somebody has computed the prompt."""
        self._handoff = handoff
        self.request = msgspec.structs.replace(self.request, handoff=handoff)
        self._cached_tokens = handoff.cached_tokens

    def _has_prefills_word_only(self, receiver: Receiver) -> bool:
        """Whether all that was told is what came with the handoff: another worker can begin with that as well."""
        told = None if self._handoff is None else self._handoff.first_tokens
        if told is None:
            return False
        return [tuple(each or ()) for each in receiver.so_far()] == [(token,) for token in told]

    def _with_handoff(self) -> Request:
        """The request with its prompt's KV, as long as nobody has fetched that."""
        return msgspec.structs.replace(self._whole, handoff=None if self._is_taken else self._handoff)

    # --- what a worker says

    def begun(self, cached_tokens: int | None) -> None:
        """The first word of a worker."""
        self._is_taken = True
        self.found(Outcome.SUCCESS)
        if not self._is_resumed and self._handoff is None:
            self._cached_tokens = cached_tokens

    def told(self, delta: Delta, is_told: bool) -> Delta:
        """As if one worker had said it all; `is_told`: whether anything was told before."""
        if self._is_resumed or self._handoff is not None:
            return as_one(delta, self._cached_tokens, is_told=is_told)
        return delta

    def got_further(self, state: State, receiver: Receiver) -> bool:
        """Whether the receiver has got anything that the machine, in this state, does not know of."""
        if state is State.RESUMING:
            return going_on(self._with_handoff(), receiver.so_far()) != self.request
        if state is not State.WAITING or not receiver.has_begun:
            return False
        return not self._has_prefills_word_only(receiver)

    # --- elsewhere

    def look_elsewhere(self, amid: Receiver | None) -> None:
        """Before a router is asked again. `amid`: who has the beginning of the answer, if it had begun."""
        if self._failed_at is None:
            self._failed_at = self._now()
        if amid is not None:
            self._is_resumed = True
            # Its KV may still lie where its prompt was computed.
            self.request = going_on(self._with_handoff(), amid.so_far())

    def count_elsewhere(self, failure: KvoltError, decision: Decision) -> None:
        """Another worker will have it."""
        stats, request_id = self._stats, self._whole.request_id
        if not self._is_resumed:
            stats.retries[failure.code] += 1
            log.info("request rerouted: id=%s reason=%s", request_id, failure.message)
            return
        stats.migrations[failure.code] += 1
        log.info(
            "request %s goes on at %s after %d tokens: %s",
            request_id,
            decision.instance.id,
            self.request.num_resumed_tokens,
            failure.message,
        )

    def found(self, outcome: Outcome) -> None:
        """Nobody is looked for any more."""
        if self._failed_at is not None:
            took_s = self._now() - self._failed_at
            self._failed_at = None
            self._stats.elsewhere_s[Elsewhere(self._is_resumed, outcome)].observe(took_s)
