"""Frontends of a running cluster, found through discovery."""

from __future__ import annotations

from urllib.parse import urlsplit

from kvolt.api.cluster import Cluster, http_address, visit
from kvolt.core.endpoints import EndpointAddress, Instance
from kvolt.core.errors import ConfigError, KvoltError, Unavailable
from kvolt.runtime.config.settings import Settings
from kvolt.runtime.network import is_loopback, is_wildcard, split_address


async def running_urls(settings: Settings) -> list[str]:
    """URLs of the registered frontends of the namespace, sorted; empty if there are none.

    Raises KvoltError if a join server is set and cannot be reached.
    """
    try:
        async with visit(settings) as cluster:
            return sorted(await cluster.list_urls())
    except KvoltError:
        if settings.discovery.kind == "join":
            raise
        return []


def no_cluster_text(settings: Settings) -> str:
    where = settings.discovery.join or settings.discovery.path
    return f"nothing runs in namespace {settings.namespace!r} ({where})"


async def find_frontends(cluster: Cluster, settings: Settings, url: str | None) -> list[Instance]:
    """All frontends of the namespace, or those that listen at a URL; at least one."""
    known = await cluster.instances(EndpointAddress(settings.namespace, "frontend", "http"))
    remedy = "select the cluster with --join, --discovery-path or --namespace"
    if not known:
        raise Unavailable(
            f"no frontend is registered in {settings.namespace}",
            endpoint="frontend",
            reason="no_instances",
            remedy=f"start one, or {remedy}",
        )
    if url is None:
        return known
    matching = [instance for instance in known if _listens_at(http_address(instance), url)]
    if not matching:
        names = ", ".join(sorted({http_address(instance) or "?" for instance in known}))
        raise ConfigError(
            f"no registered frontend listens at {url}; registered: {names}",
            key="url",
            remedy=f"omit --url to use any frontend, or {remedy}",
        )
    return matching


def _listens_at(address: str | None, url: str) -> bool:
    try:
        split = urlsplit(url if "//" in url else f"//{url}")
        port = split.port or (443 if split.scheme == "https" else 80)
    except ValueError:
        return False
    if address is None or not split.hostname:
        return False
    host, listening = split_address(address)
    if listening != port:
        return False
    # A wildcard listen address matches any host.
    same = host == split.hostname or is_wildcard(host)
    return same or (is_loopback(host) and is_loopback(split.hostname))
