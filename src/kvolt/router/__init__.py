"""Request routing: chooses a worker for each request.

The names exported here need no runtime: a Selector with its index and policies, or a complete Standalone router.
"""

from kvolt.router.index.overlap import EmptyPrefixIndex, PrefixIndex
from kvolt.router.index.prefix_index import BlockIndex
from kvolt.router.policy.choice import CandidateCost, Choice
from kvolt.router.policy.policy import (
    ClassicWeights,
    LatencyWeights,
    Policy,
    RequestView,
    WorkersView,
    classic,
    latency,
)
from kvolt.router.policy.selector import Selector
from kvolt.router.service.builders import hashes_of, prompt_of, request_of, worker_info
from kvolt.router.service.standalone import Reservation, Standalone, StandaloneOptions
from kvolt.router.service.standalone_state import EventsMissed, StandaloneEvent, StandaloneIndex
from kvolt.router.worker_rank import WorkerDpRank, WorkerRankLoad

__all__ = [
    "BlockIndex",
    "CandidateCost",
    "Choice",
    "ClassicWeights",
    "EmptyPrefixIndex",
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
