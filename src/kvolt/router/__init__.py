"""Who gets what: chooses a worker for each request.

What is named here can be used with no runtime: a Selector, its index and its policies, or all of it in a Standalone.
"""

from kvolt.router.by_hand import hashes_of, prompt_of, request_of, worker_info
from kvolt.router.index import BlockIndex
from kvolt.router.overlap import Holders, NoHolders
from kvolt.router.place import Place
from kvolt.router.policy import (
    ClassicWeights,
    LatencyWeights,
    Policy,
    RequestView,
    WorkersView,
    classic,
    latency,
)
from kvolt.router.posted import EventsMissed, PostedEvent, PostedIndex
from kvolt.router.selector import Choice, Explained, PlaceLoad, Selector
from kvolt.router.standalone import Reservation, Standalone, StandaloneOptions

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
