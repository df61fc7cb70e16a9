"""Blocking HTTP client for `/health` of a frontend on this machine."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request

from kvolt.runtime.network import join_address


def base_url(host: str, port: int) -> str:
    """URL of a frontend listening on `host`, from its own machine."""
    return f"http://{join_address({'0.0.0.0': '127.0.0.1', '::': '::1'}.get(host, host), port)}"


Served = dict[str, dict[str, int]]
"""Number of reachable workers by model and role."""


def served_models(base: str, timeout_s: float) -> Served | None:
    """Ready models of the frontend; None if it is unreachable or not a kvolt frontend."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy for local addresses
    try:
        with opener.open(f"{base}/health", timeout=timeout_s) as response:
            body = response.read(1 << 20)
    except urllib.error.HTTPError as answer:
        with answer:  # 503: no ready model
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
