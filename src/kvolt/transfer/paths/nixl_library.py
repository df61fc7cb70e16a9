"""NIXL library: detection, import and agent creation. Knows no slab and no peer.

An optional dependency. NIXL's progress thread would use a whole core even when idle, so it is disabled: NIXL moves
bytes and answers peers only while it is polled.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Any

from kvolt.core.errors import ConfigError, Unsupported

_NAMES = ("nixl", "nixl_cu13", "nixl_cu12")
"""Package names; the first one selects one of the others."""
_UCX = "UCX"
REMEDY = (
    "pip install --no-deps nixl-cu12==1.5.1 (its own dependencies would choose a torch), or leave NIXL off"
)


def find_package() -> str | None:
    """Name of the installed NIXL package."""
    return next((name for name in _NAMES if importlib.util.find_spec(name) is not None), None)


def require_package() -> None:
    """ConfigError if NIXL is not installed."""
    if find_package() is None:
        raise ConfigError("NIXL is enabled but not installed", key="transfer.nixl", remedy=REMEDY)


def new_agent(name: str, backend: str = _UCX) -> Any:
    """Create an agent; half a second the first time. One thread at a time. Unsupported if it fails."""
    try:
        library = _load()
        agent = library.nixl_agent(
            name, library.nixl_agent_config(enable_prog_thread=False, backends=[backend])
        )
    except Exception as error:  # NIXL's errors have no common base class
        hint = ". If UCX_TLS is set, it must include tcp" if backend == _UCX else ""
        raise Unsupported(f"the NIXL backend {backend} failed: {error!r}{hint}", feature="nixl") from None
    if backend not in agent.backends:
        raise Unsupported(f"this NIXL has no backend {backend}", feature="nixl")
    return agent


def _load() -> Any:
    """Import NIXL and undo its changes to the logging of the process."""
    name = find_package()
    if name is None:
        raise ModuleNotFoundError(REMEDY)
    raises = logging.raiseExceptions
    library = importlib.import_module(name)
    logging.raiseExceptions = raises
    logger = logging.getLogger("nixl")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
    logger.propagate = True
    if logger.level == logging.INFO:  # set by NIXL unless NIXL_LOG_LEVEL is set
        logger.setLevel(logging.WARNING)
    return library
