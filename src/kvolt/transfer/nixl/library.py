"""The NIXL library: looked for, loaded and made into an agent only where somebody wants it. Knows no slab and no peer.

An extra, which `pip install kvolt` does without. NIXL's own progress thread would take a whole core even while nothing
moves, so it is off: bytes move, and peers are answered, while somebody asks NIXL how things are.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from typing import Any

from kvolt.core.errors import ConfigError, Unsupported

_NAMES = ("nixl", "nixl_cu13", "nixl_cu12")
"""The first chooses between the others."""
_BETWEEN_PROCESSES = "UCX"
REMEDY = (
    "pip install --no-deps nixl-cu12==1.5.1 (its own dependencies would choose a torch), or leave NIXL off"
)


def find() -> str | None:
    """The name of the package that is installed."""
    return next((name for name in _NAMES if importlib.util.find_spec(name) is not None), None)


def require() -> None:
    """ConfigError where it is not installed."""
    if find() is None:
        raise ConfigError("NIXL is asked for and not installed", key="transfer.nixl", remedy=REMEDY)


def new_agent(name: str, backend: str = _BETWEEN_PROCESSES) -> Any:
    """Takes half a second the first time. For one thread at a time. Unsupported where it does not work here."""
    try:
        library = _load()
        agent = library.nixl_agent(
            name, library.nixl_agent_config(enable_prog_thread=False, backends=[backend])
        )
    except Exception as error:  # NIXL's errors have no base of their own
        hint = ". Where UCX_TLS is set, it must have tcp in it" if backend == _BETWEEN_PROCESSES else ""
        raise Unsupported(f"NIXL's {backend} does not work here: {error!r}{hint}", feature="nixl") from None
    if backend not in agent.backends:
        raise Unsupported(f"NIXL has no {backend} here", feature="nixl")
    return agent


def _load() -> Any:
    """Its import sets up the logging of the whole process, which is not its business: undone here."""
    name = find()
    if name is None:
        raise ModuleNotFoundError(REMEDY)
    raises = logging.raiseExceptions
    library = importlib.import_module(name)
    logging.raiseExceptions = raises
    its = logging.getLogger("nixl")
    for handler in list(its.handlers):
        its.removeHandler(handler)
    its.propagate = True
    if its.level == logging.INFO:  # its own choice, unless NIXL_LOG_LEVEL says so
        its.setLevel(logging.WARNING)
    return library
