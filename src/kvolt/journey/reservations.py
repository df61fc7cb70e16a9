"""What a router counts as under way for one request: the place that it has, and another one while that is asked for it
back. Everything that was booked is freed once."""

from __future__ import annotations

from kvolt.core.delta import Usage
from kvolt.router.breaker import Outcome
from kvolt.router.port import Decision, Router


class Booked:
    """Of one journey, which says when."""

    __slots__ = ("_decision", "_has_failed", "_router", "_to_begin", "other")

    def __init__(self) -> None:
        self._router: Router | None = None
        self._decision: Decision | None = None
        self._to_begin = False
        """Whether it waits to hear of a first token."""
        self._has_failed = False
        """Whether a worker was reported to have failed it."""
        self.other: Decision | None = None
        """Booked as well, while its worker is asked to give it back."""

    def book(self, router: Router, decision: Decision) -> None:
        """By this router, for the next worker."""
        self._router, self._decision, self._to_begin = router, decision, True

    def begin(self, cached_tokens: int | None) -> bool:
        """A worker has said something: whether it was its first word."""
        if not self._to_begin:
            return False
        self._to_begin = False
        self.stay()
        if self._router is not None and self._decision is not None:
            self._router.begun(self._decision, cached_tokens)
        return True

    def stay(self) -> None:
        """It will not be moved: it has begun, is over, or its worker keeps it."""
        decision, self.other = self.other, None
        if self._router is not None and decision is not None:
            self._router.free(decision, None)

    def move(self) -> None:
        """Its worker has given it back."""
        decision, self.other = self.other, None
        self.free()
        self._decision = decision

    def free(self, usage: Usage | None = None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        """The place that it has, if it has any; with what its worker counted.

        A request counts as a failure of one worker at most: the next one that fails on it may be right to.
        """
        decision, self._decision = self._decision, None
        if outcome is Outcome.FAILED:
            outcome = Outcome.UNKNOWN if self._has_failed else outcome
            self._has_failed = True
        if self._router is not None and decision is not None:
            if decision.recall is not None:
                decision.recall.move = None
            self._router.free(decision, usage, outcome)
