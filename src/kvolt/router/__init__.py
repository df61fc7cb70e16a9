"""Request routing: chooses a worker for each request.

The names exported here need no runtime: a Selector with its index and policies, or a complete Standalone router. They
are imported on first use, as processes that need one module of this package import it too.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvolt.router.choice import CandidateCost, WorkerChoice
    from kvolt.router.index.prefix_index import BlockIndex, PrefixIndex
    from kvolt.router.policy.policy import (
        ClassicWeights,
        LatencyWeights,
        Policy,
        RequestView,
        WorkersView,
        classic,
        latency,
    )
    from kvolt.router.selection.selector import Selector
    from kvolt.router.service.builders import hashes_of, prompt_of, request_of, worker_info
    from kvolt.router.service.standalone import Reservation, Standalone, StandaloneOptions
    from kvolt.router.service.standalone_state import EventsMissed, StandaloneEvent, StandaloneIndex
    from kvolt.router.worker_rank import WorkerDpRank, WorkerRankLoad

_NAMES = {
    "choice": ("CandidateCost", "WorkerChoice"),
    "index.prefix_index": ("BlockIndex", "PrefixIndex"),
    "policy.policy": (
        *("ClassicWeights", "LatencyWeights", "Policy", "RequestView", "WorkersView"),
        *("classic", "latency"),
    ),
    "selection.selector": ("Selector",),
    "service.builders": ("hashes_of", "prompt_of", "request_of", "worker_info"),
    "service.standalone": ("Reservation", "Standalone", "StandaloneOptions"),
    "service.standalone_state": ("EventsMissed", "StandaloneEvent", "StandaloneIndex"),
    "worker_rank": ("WorkerDpRank", "WorkerRankLoad"),
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "BlockIndex",
    "CandidateCost",
    "ClassicWeights",
    "EventsMissed",
    "LatencyWeights",
    "Policy",
    "PrefixIndex",
    "RequestView",
    "Reservation",
    "Selector",
    "Standalone",
    "StandaloneEvent",
    "StandaloneIndex",
    "StandaloneOptions",
    "WorkerChoice",
    "WorkerDpRank",
    "WorkerRankLoad",
    "WorkersView",
    "classic",
    "hashes_of",
    "latency",
    "prompt_of",
    "request_of",
    "worker_info",
]


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return __all__
