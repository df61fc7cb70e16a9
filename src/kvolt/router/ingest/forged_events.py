"""Events about a worker that another process has published."""

from __future__ import annotations

import logging

from kvolt.core.endpoints import Instance
from kvolt.runtime.events.port import Event
from kvolt.runtime.logs import is_logged

log = logging.getLogger(__name__)


class ForgedEvents:
    """Recognizes and counts them, by the identities in certificates. Without a cluster key there are none."""

    def __init__(self) -> None:
        self.num_events = 0

    def is_forged(self, event: Event, instance: Instance) -> bool:
        """Whether an event about this instance is not from its process."""
        if event.identity == instance.identity:
            return False
        self.num_events += 1
        if is_logged(self.num_events):
            log.warning(
                "event refused: topic=%s peer=%s reason=it is about %s of %s refused=%d",
                event.topic,
                event.identity,
                instance.id,
                instance.identity,
                self.num_events,
            )
        return True
