"""The `router` section of the config tree: KV-aware routing. Part of `settings`."""

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
    """KV-aware routing (`latency`, `classic` and custom policies)."""

    process: Annotated[
        bool,
        Meta(
            description="Route through the router process of the namespace (`kvolt router`) while one is running. "
            "Always on with several frontend processes."
        ),
    ] = False
    shadow: Annotated[
        _Text | None,
        Meta(
            description="Second routing policy (`latency`, `classic` or FILE.py:FUNCTION), evaluated for metrics "
            "only. Use it to compare a policy with the active one. Default: none.",
            extra={"metavar": "NAME"},
        ),
    ] = None
    reload_s: Annotated[
        _Grace,
        Meta(description="Poll interval for changes of a custom policy file. 0 disables reloading."),
    ] = 1.0
    gossip: Annotated[
        bool,
        Meta(description="Exchange load reservations with other routers of the same workers."),
    ] = True
    temperature: Annotated[
        _Weight,
        Meta(
            description="Softmax temperature over the normalized worker costs. 0 always picks the cheapest worker."
        ),
    ] = 0.0
    overlap_weight: Annotated[
        _Weight,
        Meta(
            description="`classic`: weight of a block to prefill relative to a block in use. Raise it to favour "
            "cache hits."
        ),
    ] = 1.0
    host_weight: Annotated[
        _Share,
        Meta(description="Value of a cached block in host memory, as a fraction of one on the device."),
    ] = 0.9
    disk_weight: Annotated[
        _Share, Meta(description="Value of a cached block on disk, as a fraction of one on the device.")
    ] = 0.7
    room_weight: Annotated[
        _Weight,
        Meta(description="`latency`: weight of a second spent waiting for free KV blocks."),
    ] = 1.0
    saturated_seqs: Annotated[
        _Factor,
        Meta(
            description="A worker is saturated at this multiple of its maximum batch size, in requests. While all "
            "workers are saturated, requests wait in the router queue."
        ),
    ] = 1.25
    saturated_batches: Annotated[
        _Factor,
        Meta(
            description="A worker is also saturated when its pending prefill tokens exceed this many full steps."
        ),
    ] = 2.0
    queue: Annotated[
        bool,
        Meta(
            description="Queue requests in the router while all workers are saturated. If false, they are sent to "
            "workers immediately."
        ),
    ] = True
    queue_requests: Annotated[
        _Count,
        Meta(
            description="Maximum number of requests in the router queue. Beyond it, requests are rejected with a "
            "429."
        ),
    ] = 4096
    queue_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 40)],
        Meta(description="Maximum number of prompt and expected output tokens in the router queue."),
    ] = 16_777_216
    queue_wait_s: Annotated[
        _Seconds | None,
        Meta(
            description="Maximum queueing time of a request before it is rejected. Default: the request's own "
            "timeout."
        ),
    ] = None
    queue_order: Annotated[
        Literal["fcfs", "shortest"],
        Meta(
            description="Order within a tenant. `fcfs`: by arrival. `shortest`: fewest tokens first, with aging."
        ),
    ] = "fcfs"
    queue_quantum_tokens: Annotated[
        Annotated[int, Meta(ge=256, le=10_000_000)],
        Meta(description="Deficit-round-robin quantum per tenant, in tokens."),
    ] = 4096
    queue_aging_tokens_per_s: Annotated[
        _Weight,
        Meta(description="`shortest`: tokens deducted from a request's length per second of waiting."),
    ] = 1000.0
    queue_promote_s: Annotated[
        _Grace,
        Meta(
            description="Waiting time after which a lower-priority request may be promoted: one of eight dequeued "
            "requests is a promoted one. Prevents starvation."
        ),
    ] = 10.0
    max_priority: Annotated[
        Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None,
        Meta(
            description="Maximum priority that clients can request. Higher values are clamped and reported in a "
            "response header. Default: no limit.",
        ),
    ] = None
    withdraw_max_moves: Annotated[
        Annotated[int, Meta(ge=0, le=16)],
        Meta(
            description="Maximum number of times that a request queued at a worker is moved to another worker. 0 "
            "disables moving."
        ),
    ] = 2
    withdraw_min_gain_s: Annotated[
        _Seconds,
        Meta(
            description="Minimum predicted TTFT gain before a queued request moves to another worker; its TTFT must"
            " also be at least halved."
        ),
    ] = 0.25
    affinity_s: Annotated[
        _Weight,
        Meta(description="`latency`: bonus for the worker that last served the session, in seconds."),
    ] = 0.01
    affinity_blocks: Annotated[
        _Weight, Meta(description="`classic`: bonus for the worker that last served the session, in blocks.")
    ] = 1.0
    affinity_half_life_s: Annotated[
        _Seconds, Meta(description="Half-life of the session bonus after the session's last request.")
    ] = 60.0
    affinity_sessions: Annotated[
        _Count,
        Meta(description="Maximum number of tracked sessions. The least recently used are dropped first."),
    ] = 65_536
    events: Annotated[
        bool,
        Meta(
            description="Follow the KV events of workers. If false, cached prefixes are estimated from routing "
            "decisions."
        ),
    ] = True
    index_max_bytes: Annotated[
        _Bytes,
        Meta(
            description="Memory limit of the prefix index. The least recently used blocks are dropped first."
        ),
    ] = 1024 * 1024 * 1024
    approximate_ttl_s: Annotated[
        _Seconds,
        Meta(
            description="How long a prompt is assumed to stay cached on a worker that publishes no KV events."
        ),
    ] = 120.0
    approximate_max_bytes: Annotated[
        _Bytes, Meta(description="Memory limit of the prefix index for workers without KV events.")
    ] = 256 * 1024 * 1024
    correct_times: Annotated[
        bool,
        Meta(description="Correct a worker's published step times by its observed TTFT."),
    ] = True
