"""Servers from the command line: the URL to use, and `/health` of a frontend on this machine."""

from __future__ import annotations

import argparse
import asyncio
import ssl
from collections.abc import Mapping

import msgspec

from kvolt.api.cluster import visit
from kvolt.cli.flags import add_group, option
from kvolt.cli.frontends import no_cluster_text, running_urls
from kvolt.core.errors import ConfigError, KvoltError, Unavailable
from kvolt.runtime.config.loader import LoadedConfig
from kvolt.runtime.config.settings import FrontendSettings, Settings
from kvolt.runtime.http.client import HttpClient
from kvolt.runtime.http.server_url import ServerUrl
from kvolt.runtime.network import SocketNetwork, join_address

_CLUSTER_KEYS = ("namespace", "discovery.join", "discovery.path")
"""Settings that choose a cluster."""

_CLUSTER_KEYS = ("namespace", "discovery.join", "discovery.path")
"""Settings that choose a cluster."""

_CLUSTER_KEYS = ("namespace", "discovery.join", "discovery.path")
"""Settings that choose a cluster."""

Served = dict[str, dict[str, int]]
"""Number of reachable workers by model and role."""


class _Health(msgspec.Struct):
    status: str
    roles: Served


def base_url(frontend: FrontendSettings) -> str:
    """URL of a frontend with these settings, from its own machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(frontend.host, frontend.host)
    scheme = "http" if frontend.tls_cert is None else "https"
    return f"{scheme}://{join_address(host, frontend.port)}"


def add_server_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags of `api_url`, and --model."""
    text = "Base URL of the server. Default: $OPENAI_BASE_URL, else the kvolt frontend that `kvolt status` shows."
    option(parser, "--url", None, text)
    option(parser, "--model", "NAME", "Model to use. Default: the only model that the server lists.")
    option(
        parser,
        "--api-key",
        "KEY",
        "Bearer token. Default: $OPENAI_API_KEY, if --url or $OPENAI_BASE_URL is set.",
    )
    option(parser, "--config", "FILE", "TOML config file, to find the frontend.")
    add_group(parser, "discovery")


def api_url(args: argparse.Namespace, loaded: LoadedConfig, environ: Mapping[str, str]) -> ServerUrl:
    """OpenAI API to use: --url and --api-key, else the environment, else a running frontend, else the settings'."""
    named = args.url or environ.get("OPENAI_BASE_URL")
    # The environment's key may be that of another provider: a frontend that was merely found does not get it.
    key = args.api_key or (environ.get("OPENAI_API_KEY") if named else None)
    return ServerUrl.parse(named or _frontend_url(loaded), key).of_api()


def _frontend_url(loaded: LoadedConfig) -> str:
    """Frontend at the address of the settings if it runs or is set explicitly, else another one of the namespace.

    Raises Unavailable if none runs in a cluster that is set explicitly: another cluster could answer at the address.
    """
    frontend = loaded.settings.frontend
    configured = base_url(frontend) if frontend.port else None
    if configured is not None and loaded.origins["frontend.port"] != "default":
        return configured
    running = asyncio.run(running_urls(loaded.settings))
    if running and configured not in running:
        return running[0]
    if not running and any(loaded.origins[key] != "default" for key in _CLUSTER_KEYS):
        raise Unavailable(
            no_cluster_text(loaded.settings),
            endpoint="frontend",
            reason="no_instances",
            remedy="start one with `kvolt serve`, or set --url",
        )
    if configured is None:
        raise ConfigError(
            "no frontend is running, and frontend.port is 0", key="url", remedy="set --url HOST:PORT"
        )
    return configured


async def served_models(base: str, timeout_s: float) -> Served | None:
    """Ready models of a frontend of this machine; None if it is unreachable or not a kvolt frontend."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if base.startswith("https:") else None
    if tls is not None:  # its certificate need not be for this address; nothing secret is sent
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    try:
        async with HttpClient(ServerUrl.parse(base), network=SocketNetwork(tls=tls)) as client:
            response = await client.fetch("/health", timeout_s)
        return msgspec.json.decode(response.body, type=_Health).roles  # status 503: no ready model
    except (KvoltError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


async def registered_models(settings: Settings) -> Served | None:
    """Registered workers by model and role, once a frontend is registered; for frontends that HTTP cannot ask."""
    async with visit(settings) as cluster:
        if not await cluster.list_urls():
            return None
        served: Served = {}
        for worker in await cluster.list_workers():
            roles = served.setdefault(worker.info.model, {})
            roles[worker.info.role] = roles.get(worker.info.role, 0) + 1
        return served
