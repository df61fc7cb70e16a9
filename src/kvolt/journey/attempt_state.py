"""State of one request across attempts: the request to send next, its handoff, its reservations, the time since a
failure."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from kvolt.core.delta import Delta, Usage
from kvolt.core.errors import KvoltError
from kvolt.core.request import Handoff, Rendezvous, Request
from kvolt.journey.context import JourneyStats, Receiver, RerouteKey, RerouteOutcome
from kvolt.journey.events import JourneyState
from kvolt.journey.migration import migrated_request, splice_delta
from kvolt.router.breaker import Outcome
from kvolt.router.port import Decision, Router

log = logging.getLogger(__name__)

_UNRESOLVED_RENDEZVOUS = Rendezvous(mailbox=0, address="")
"""Marks a request with remote prefill for the decode router, before the prefill worker is chosen."""


class AttemptState:
    """Attempt state of one request. Routing and retry decisions are made elsewhere."""

    def __init__(self, request: Request, stats: JourneyStats, now: Callable[[], float]) -> None:
        self._original = request
        self._stats = stats
        self._now = now
        self._handoff: Handoff | None = None
        """From the prefill worker, with remote prefill."""
        self._is_handoff_used = False
        """A decode worker has pulled the handoff: another one cannot use it."""
        self._is_migrated = False
        self._cached_tokens: int | None = None
        """Cached prompt tokens reported by the first worker."""
        self._failed_at: float | None = None
        """Start of the search for another worker."""
        self.request = request
        """Request to send to the next worker."""

    # --- remote prefill

    def expect_remote_prefill(self) -> None:
        """Decode-first: the prompt is computed elsewhere, at a rendezvous that is resolved after routing."""
        self.request = msgspec.structs.replace(self.request, rendezvous=_UNRESOLVED_RENDEZVOUS)

    def set_handoff(self, handoff: Handoff) -> None:
        """Continue with the KV of a completed remote prefill."""
        self._handoff = handoff
        self.request = msgspec.structs.replace(self.request, handoff=handoff)
        self._cached_tokens = handoff.cached_tokens

    def _has_only_prefill_tokens(self, receiver: Receiver) -> bool:
        """Whether the answer consists of prefill's first tokens only; a retry can start from those as well."""
        first_tokens = None if self._handoff is None else self._handoff.first_tokens
        if first_tokens is None:
            return False
        received = [tuple(each or ()) for each in receiver.received_tokens()]
        return received == [(token,) for token in first_tokens]

    def _with_handoff(self) -> Request:
        """The original request, with the handoff unless a worker has used it."""
        return msgspec.structs.replace(
            self._original, handoff=None if self._is_handoff_used else self._handoff
        )

    # --- output of workers

    def on_first_delta(self, cached_tokens: int | None) -> None:
        """First delta of a worker."""
        self._is_handoff_used = True
        self.end_reroute(RerouteOutcome.SUCCESS)
        if not self._is_migrated and self._handoff is None:
            self._cached_tokens = cached_tokens

    def splice(self, delta: Delta, has_started: bool) -> Delta:
        """Adjust a delta so that the answer looks like one worker's. `has_started`: a delta was delivered before."""
        if self._is_migrated or self._handoff is not None:
            return splice_delta(delta, self._cached_tokens, has_started=has_started)
        return delta

    def has_progress(self, state: JourneyState, receiver: Receiver) -> bool:
        """Whether the receiver got output that the machine has not seen in this state."""
        if state is JourneyState.MIGRATING:
            return migrated_request(self._with_handoff(), receiver.received_tokens()) != self.request
        if state is not JourneyState.WAITING or not receiver.has_started:
            return False
        return not self._has_only_prefill_tokens(receiver)

    # --- retries and migrations

    def prepare_retry(self, partial: Receiver | None) -> None:
        """Called before routing again. `partial`: receiver of a partial answer; the request then migrates."""
        if self._failed_at is None:
            self._failed_at = self._now()
        if partial is not None:
            self._is_migrated = True
            # The prompt's KV may still be on the prefill worker.
            self.request = migrated_request(self._with_handoff(), partial.received_tokens())

    def count_retry(self, failure: KvoltError, decision: Decision) -> None:
        """Count a retry or migration once its next worker is known."""
        stats, request_id = self._stats, self._original.request_id
        if not self._is_migrated:
            stats.retries[failure.code] += 1
            log.info("request rerouted: request_id=%s reason=%s", request_id, failure.message)
            return
        stats.migrations[failure.code] += 1
        log.info(
            "request migrated: request_id=%s worker=%s instance=%s tokens=%d reason=%s",
            request_id,
            decision.instance.process,
            decision.instance.id,
            self.request.num_prior_tokens,
            failure.message,
        )

    def end_reroute(self, outcome: RerouteOutcome) -> None:
        """The search for another worker ended: a token, an error or a cancellation."""
        if self._failed_at is not None:
            took_s = self._now() - self._failed_at
            self._failed_at = None
            self._stats.reroute_s[RerouteKey(self._is_migrated, outcome)].observe(took_s)


class Reservations:
    """Router reservations of one request: the current one, and an alternative while a withdrawal is pending. Each is
    released once."""

    def __init__(self) -> None:
        self._router: Router | None = None
        self._decision: Decision | None = None
        self._awaits_first_token = False
        """The first token has not been reported to the router."""
        self._has_failed = False
        """One failure was attributed to a worker already."""
        self.alternative: Decision | None = None
        """Reserved by the router in case the current worker returns the request."""

    def set_current(self, router: Router, decision: Decision) -> None:
        """Track the reservation of the next attempt."""
        self._router, self._decision, self._awaits_first_token = router, decision, True

    def on_first_delta(self, cached_tokens: int | None) -> bool:
        """Report the first token to the router. True for the first delta of an attempt."""
        if not self._awaits_first_token:
            return False
        self._awaits_first_token = False
        self.release_alternative()
        if self._router is not None and self._decision is not None:
            self._router.mark_first_token(self._decision, cached_tokens)
        return True

    def release_alternative(self) -> None:
        """The request stays where it is, or is over."""
        decision, self.alternative = self.alternative, None
        if self._router is not None and decision is not None:
            self._router.release(decision, None)

    def switch_to_alternative(self) -> None:
        """The worker returned the request."""
        decision, self.alternative = self.alternative, None
        self.release()
        self._decision = decision

    def release(self, usage: Usage | None = None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        """Release the current reservation, if any, with the worker's token counts.

        At most one worker is blamed for a request: if the next one fails as well, the request may be the cause.
        """
        decision, self._decision = self._decision, None
        if outcome is Outcome.FAILED:
            outcome = Outcome.UNKNOWN if self._has_failed else outcome
            self._has_failed = True
        if self._router is not None and decision is not None:
            if decision.withdraw_hook is not None:
                decision.withdraw_hook.try_move = None
            self._router.release(decision, usage, outcome)
