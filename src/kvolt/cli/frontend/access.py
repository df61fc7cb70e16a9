"""API keys of a frontend process."""

from __future__ import annotations

import logging
from pathlib import Path

from kvolt.cli.process import Process
from kvolt.frontend.tenants.access import AccessGuard
from kvolt.frontend.tenants.key_file import FileKeyStore
from kvolt.frontend.tenants.live_keys import LiveKeys
from kvolt.frontend.tenants.shared_budgets import SharedBudgets
from kvolt.frontend.tenants.store import KeyStore, open_plugin_store
from kvolt.runtime.config.settings import FrontendSettings
from kvolt.runtime.network import is_loopback

log = logging.getLogger(__name__)


def key_store(frontend: FrontendSettings) -> KeyStore | None:
    """Configured store of API keys. Raises ConfigError for an unknown plugin."""
    if frontend.key_store is not None:
        return open_plugin_store(frontend.key_store)
    return None if frontend.api_keys is None else FileKeyStore(Path(frontend.api_keys))


async def open_access(process: Process, is_first: bool) -> AccessGuard | None:
    """Check of API keys, or None without keys. Raises ConfigError if the keys cannot be read.

    `is_first`: of the processes that share a port; the others do not repeat its warning.
    """
    frontend, runtime = process.settings.frontend, process.runtime
    store = key_store(frontend)
    if store is None:
        if is_first and not is_loopback(frontend.host):
            log.warning(
                "HTTP API open to everyone who reaches it: host=%s remedy=%s",
                frontend.host,
                "create keys with `kvolt key create` and set --api-keys FILE",
            )
        return None
    keys = LiveKeys(store, runtime.ports.blocking)
    budgets = SharedBudgets(runtime, process.settings.namespace, lambda: keys.table.tenants)

    async def close(drain_s: float) -> None:
        await budgets.close()
        await keys.close()

    process.before_close(close)
    await keys.start()
    await budgets.start()
    return AccessGuard(keys, budgets, runtime.ports.clock)
