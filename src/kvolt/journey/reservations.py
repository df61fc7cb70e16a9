"""Router reservations of one request: the current one, and an alternative while a withdrawal is pending. Each is
released once.
"""

from __future__ import annotations

from kvolt.core.delta import Usage
from kvolt.router.breaker import Outcome
from kvolt.router.port import Decision, Router


class Reservations:
    """See the module."""

    __slots__ = ("_awaits_first_token", "_decision", "_has_failed", "_router", "alternative")

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
