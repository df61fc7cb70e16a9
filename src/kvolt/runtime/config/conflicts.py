"""Conflicts between settings that are valid separately."""

from __future__ import annotations

from collections.abc import Iterator

from kvolt.runtime.config.settings import Settings


def conflicts(settings: Settings) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """Yield for each conflict its keys, the problem and the remedy."""
    plane, discovery, supervisor = settings.plane, settings.discovery, settings.supervisor
    if plane.dead_after_s <= plane.heartbeat_s:
        problem = "plane.dead_after_s must be above plane.heartbeat_s"
        yield ("plane.dead_after_s", "plane.heartbeat_s"), problem, "use at least three heartbeats"
    if plane.max_message_bytes < plane.max_frame_bytes:
        problem = "plane.max_message_bytes must not be below plane.max_frame_bytes"
        yield (
            ("plane.max_message_bytes", "plane.max_frame_bytes"),
            problem,
            "raise the first or lower the second",
        )
    if supervisor.restart_backoff_max_s < supervisor.restart_backoff_s:
        problem = "supervisor.restart_backoff_max_s must not be below supervisor.restart_backoff_s"
        keys = ("supervisor.restart_backoff_max_s", "supervisor.restart_backoff_s")
        yield keys, problem, "raise the first or lower the second"
    if discovery.kind == "join" and discovery.join is None:
        yield (
            ("discovery.kind",),
            "discovery.kind=join requires the address of a join server",
            "set discovery.join or give --join HOST:PORT",
        )
    if discovery.kind != "join" and discovery.join is not None:
        problem = f'discovery.join is set, but discovery.kind is "{discovery.kind}"'
        yield ("discovery.join",), problem, "remove one of them"
    frontend = settings.frontend
    if (frontend.tls_cert is None) != (frontend.tls_key is None):
        keys = ("frontend.tls_cert", "frontend.tls_key")
        yield keys, "HTTPS needs frontend.tls_cert and frontend.tls_key", "set both"
    names = [worker.name for worker in settings.workers]
    for index, name in enumerate(names):
        if name in names[:index]:
            problem = f'duplicate worker name "{name}"'
            yield (f"workers.{index}.name", "workers"), problem, "give each entry its own name"
