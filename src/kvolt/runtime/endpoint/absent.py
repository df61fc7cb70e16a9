"""AbsentInstances: instances that vanished from discovery without draining, and may register again. Pure.

A stall may outlast a lease. A client that is connected notices the stall by itself; one that is not, and one that was
stalled itself, sees the expired lease first.
"""

from __future__ import annotations

from collections.abc import Callable

from kvolt.core.endpoints import Instance
from kvolt.core.ids import InstanceId


class AbsentInstances:
    """See the module. Each instance is expected back until a time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._expected: dict[InstanceId, tuple[Instance, float]] = {}

    def expect(self, instance: Instance, for_s: float) -> None:
        self._expected[instance.id] = (instance, self._now() + for_s)

    def is_expected(self, instance: Instance) -> bool:
        """Whether this registration of the instance is still the last one, and expected back."""
        self._prune()
        return self._expected.get(instance.id, (None, 0.0))[0] is instance

    def ids(self) -> list[InstanceId]:
        self._prune()
        return list(self._expected)

    def discard(self, instance_id: InstanceId) -> None:
        self._expected.pop(instance_id, None)

    def pop_at(self, address: str) -> list[Instance]:
        """Remove and return the instances at an address."""
        instances = [instance for instance, _ in self._expected.values() if instance.address == address]
        for instance in instances:
            del self._expected[instance.id]
        return instances

    def waits_s(self) -> list[float]:
        """Time for which each of them is still expected."""
        self._prune()
        now = self._now()
        return [until - now for _, until in self._expected.values()]

    def _prune(self) -> None:
        now = self._now()
        self._expected = {key: each for key, each in self._expected.items() if now < each[1]}
