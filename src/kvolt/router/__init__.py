"""Who gets what: chooses a worker for each request.

What is named here can be used with no runtime: a Selector, its index and its policies, or all of it in a Standalone.
"""

from kvolt.router.index.overlap import Holders, NoHolders
from kvolt.router.index.prefix_index import BlockIndex
from kvolt.router.place import Place
from kvolt.router.policy.policy import (
    ClassicWeights,
    LatencyWeights,
    Policy,
    RequestView,
    WorkersView,
    classic,
    latency,
)
from kvolt.router.policy.selector import Choice, Explained, PlaceLoad, Selector
from kvolt.router.service.builders import hashes_of, prompt_of, request_of, worker_info
from kvolt.router.service.standalone import Reservation, Standalone, StandaloneOptions
from kvolt.router.service.standalone_state import EventsMissed, PostedEvent, PostedIndex

__all__ = [
    "BlockIndex",
    "Choice",
    "ClassicWeights",
    "EventsMissed",
    "Explained",
    "Holders",
    "LatencyWeights",
    "NoHolders",
    "Place",
    "PlaceLoad",
    "Policy",
    "PostedEvent",
    "PostedIndex",
    "RequestView",
    "Reservation",
    "Selector",
    "Standalone",
    "StandaloneOptions",
    "WorkersView",
    "classic",
    "hashes_of",
    "latency",
    "prompt_of",
    "request_of",
    "worker_info",
]
