"""The `router` section of the config tree: how the routers that know the workers' KV weigh things.

Part of `settings`, and like it knows nothing of where values come from.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

_WEEK_S = 7 * 24 * 3600
_Weight = Annotated[float, Meta(ge=0, le=1e6, extra={"metavar": "X"})]
_Share = Annotated[float, Meta(ge=0, le=1, extra={"metavar": "X"})]
_Factor = Annotated[float, Meta(gt=0, le=1e6, extra={"metavar": "X"})]
_Count = Annotated[int, Meta(ge=1, le=10_000_000)]
_Seconds = Annotated[float, Meta(gt=0, le=_WEEK_S)]
_Grace = Annotated[float, Meta(ge=0, le=_WEEK_S)]
_Text = Annotated[str, Meta(min_length=1)]
_Bytes = Annotated[int, Meta(ge=64 * 1024, le=1 << 40)]

ROUTER_NAMES = (
    "latency",
    "classic",
    "round-robin",
    "least-loaded",
    "power-of-two",
    "random",
    "direct",
)
"""The first is the default."""

RouterName = Annotated[
    str,
    Meta(
        pattern=rf"\A(?:{'|'.join(ROUTER_NAMES)}|.+:[A-Za-z_][A-Za-z0-9_]*)\Z",
        extra={
            "known": ROUTER_NAMES,
            "expects": f"one of {', '.join(ROUTER_NAMES)}, or FILE.py:FUNCTION or MODULE:FUNCTION",
        },
    ),
]


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The routers that know what workers hold (`latency`, `classic` and one's own)."""

    process: Annotated[
        bool,
        Meta(
            description="Let the namespace's router process (`kvolt router`) decide while there is one; several HTTP "
            "processes on one port always do."
        ),
    ] = False
    shadow: Annotated[
        _Text | None,
        Meta(
            description="A second policy (latency, classic, FILE.py:FUNCTION) that is asked beside and decides "
            "nothing: metrics tell how often it agrees and what it would change.",
            extra={"metavar": "NAME"},
        ),
    ] = None
    reload_s: Annotated[
        _Grace,
        Meta(description="How often the file of one's own policy is looked at for a change; 0 is never."),
    ] = 1.0
    gossip: Annotated[
        bool,
        Meta(
            description="Tell other routers of the same workers what is booked here, and hear what they have booked."
        ),
    ] = True
    temperature: Annotated[
        _Weight,
        Meta(description="0 takes the least costly worker; above it others too, the more the higher it is."),
    ] = 0.0
    overlap_weight: Annotated[
        _Weight,
        Meta(description="Of `classic`: what a block to compute counts beside a block in use."),
    ] = 1.0
    host_weight: Annotated[
        _Share,
        Meta(
            description="What a block in the memory of a worker's host counts beside one on its device, which need not "
            "be brought there."
        ),
    ] = 0.9
    disk_weight: Annotated[_Share, Meta(description="And one on its disk.")] = 0.7
    room_weight: Annotated[
        _Weight,
        Meta(description="Of `latency`: what a second counts of waiting for room in a worker's cache."),
    ] = 1.0
    saturated_seqs: Annotated[
        _Factor,
        Meta(
            description="A worker with so many times the requests that it computes at once has enough: while all "
            "have, requests wait here. Above 1 some wait there already when it ends others."
        ),
    ] = 1.25
    saturated_batches: Annotated[
        _Factor,
        Meta(description="So has one with more prompt tokens to compute than so many of its steps hold."),
    ] = 2.0
    queue: Annotated[
        bool,
        Meta(
            description="Whether requests wait here while all workers have enough, or are sent all the same."
        ),
    ] = True
    queue_requests: Annotated[
        _Count,
        Meta(
            description="Requests that wait here while all workers have enough; beyond it some are refused."
        ),
    ] = 4096
    queue_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 40)],
        Meta(description="The same in tokens of prompts and answers."),
    ] = 16_777_216
    queue_wait_s: Annotated[
        _Seconds | None,
        Meta(description="A request that waits longer is refused; as long as its own time lasts if not set."),
    ] = None
    queue_order: Annotated[
        Literal["fcfs", "shortest"],
        Meta(description="Of a tenant: who came first, or the shortest less what it has waited for."),
    ] = "fcfs"
    queue_quantum_tokens: Annotated[
        Annotated[int, Meta(ge=256, le=10_000_000)],
        Meta(description="What a turn is worth that tenants take while their requests wait."),
    ] = 4096
    queue_aging_tokens_per_s: Annotated[
        _Weight, Meta(description="Of `shortest`: tokens that a second of waiting makes up for.")
    ] = 1000.0
    queue_promote_s: Annotated[
        _Grace,
        Meta(
            description="Seconds after which a waiting request of a lower priority gets a share: one of every eight "
            "requests that leave the queue is such a one, whatever waits above it."
        ),
    ] = 10.0
    max_priority: Annotated[
        Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None,
        Meta(
            description="Highest priority that a client may ask for; a higher one counts as this one, and a response "
            "header says so. No limit if not set.",
        ),
    ] = None
    take_back_moves: Annotated[
        Annotated[int, Meta(ge=0, le=16)],
        Meta(description="How often a request that has not begun may be sent elsewhere; 0 for never."),
    ] = 2
    take_back_gain_s: Annotated[
        _Seconds, Meta(description="By how much earlier it must begin there, and in half the time.")
    ] = 0.25
    affinity_s: Annotated[
        _Weight,
        Meta(description="Of `latency`: seconds that the worker which served a session last is favoured by."),
    ] = 0.01
    affinity_blocks: Annotated[_Weight, Meta(description="The same of `classic`, in blocks.")] = 1.0
    affinity_half_life_s: Annotated[
        _Seconds, Meta(description="After so long without a request of the session half of that is left.")
    ] = 60.0
    affinity_sessions: Annotated[
        _Count,
        Meta(description="Sessions that are remembered; beyond it those of longest ago are forgotten."),
    ] = 65_536
    events: Annotated[
        bool,
        Meta(
            description="Follow the KV events of workers; else all are known by this router's own decisions alone."
        ),
    ] = True
    index_max_bytes: Annotated[
        _Bytes,
        Meta(
            description="Memory for what workers hold; beyond it the blocks used longest ago are forgotten."
        ),
    ] = 1024 * 1024 * 1024
    approximate_ttl_s: Annotated[
        _Seconds,
        Meta(description="How long a worker without KV events is taken to hold a prompt after its last use."),
    ] = 120.0
    approximate_max_bytes: Annotated[
        _Bytes, Meta(description="Memory for what such workers hold; beyond it the oldest are forgotten.")
    ] = 256 * 1024 * 1024
    correct_times: Annotated[
        bool,
        Meta(description="Correct the step times that a worker registered by when its answers really begin."),
    ] = True
