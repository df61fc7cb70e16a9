"""Asks a frontend of this machine, over HTTP like any client, what it serves. Blocking."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request

from kvolt.runtime.network import join_address


def base_url(host: str, port: int) -> str:
    """Where a frontend that listens on this host is reached from its own machine."""
    return f"http://{join_address({'0.0.0.0': '127.0.0.1', '::': '::1'}.get(host, host), port)}"


Served = dict[str, dict[str, int]]
"""Models, each with its number of workers that can be reached, by role."""


def served_models(base: str, timeout_s: float) -> Served | None:
    """The models ready there.

    None when nobody answers, or somebody who is no kvolt frontend.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # what is here needs no proxy
    try:
        with opener.open(f"{base}/health", timeout=timeout_s) as response:
            body = response.read(1 << 20)
    except urllib.error.HTTPError as answer:
        with answer:  # 503: no model yet
            body = _read(answer)
    except (OSError, http.client.HTTPException):
        return None
    try:
        health = json.loads(body)
    except ValueError:
        return None
    roles = health.get("roles") if isinstance(health, dict) and "status" in health else None
    if not isinstance(roles, dict):
        return None
    return {
        str(name): {str(role): int(count) for role, count in counts.items()} for name, counts in roles.items()
    }


def _read(answer: urllib.error.HTTPError) -> bytes:
    try:
        return answer.read(1 << 20)
    except (OSError, http.client.HTTPException):
        return b""
