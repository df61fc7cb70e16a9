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

    process: bool = False
    """Route through the router process of the namespace (`kvolt router`) while one is running. Always on with
    several frontend processes."""
    shadow: Annotated[_Text | None, Meta(extra={"metavar": "NAME"})] = None
    """Second routing policy (`latency`, `classic` or FILE.py:FUNCTION), evaluated for metrics only. Use it to
    compare a policy with the active one. Default: none."""
    reload_s: _Grace = 1.0
    """Poll interval for changes of a custom policy file. 0 disables reloading."""
    gossip: bool = True
    """Exchange load reservations with other routers of the same workers."""
    temperature: _Weight = 0.0
    """Softmax temperature over the normalized worker costs. 0 always picks the cheapest worker."""
    overlap_weight: _Weight = 1.0
    """`classic`: weight of a block to prefill relative to a block in use. Raise it to favour cache hits."""
    host_weight: _Share = 0.9
    """Value of a cached block in host memory, as a fraction of one on the device."""
    disk_weight: _Share = 0.7
    """Value of a cached block on disk, as a fraction of one on the device."""
    room_weight: _Weight = 1.0
    """`latency`: weight of a second spent waiting for free KV blocks."""
    saturated_seqs: _Factor = 1.25
    """A worker is saturated at this multiple of its maximum batch size, in requests. While all workers are
    saturated, requests wait in the router queue."""
    saturated_batches: _Factor = 2.0
    """A worker is also saturated when its pending prefill tokens exceed this many full steps."""
    queue: bool = True
    """Queue requests in the router while all workers are saturated. If false, they are sent to workers
    immediately."""
    queue_requests: _Count = 4096
    """Maximum number of requests in the router queue. Beyond it, requests are rejected with a 429."""
    queue_tokens: Annotated[int, Meta(ge=1, le=1 << 40)] = 16_777_216
    """Maximum number of prompt and expected output tokens in the router queue."""
    queue_wait_s: _Seconds | None = None
    """Maximum queueing time of a request before it is rejected. Default: the request's own timeout."""
    queue_order: Literal["fcfs", "shortest"] = "fcfs"
    """Order within a tenant. `fcfs`: by arrival. `shortest`: fewest tokens first, with aging."""
    queue_quantum_tokens: Annotated[int, Meta(ge=256, le=10_000_000)] = 4096
    """Deficit-round-robin quantum per tenant, in tokens."""
    queue_aging_tokens_per_s: _Weight = 1000.0
    """`shortest`: tokens deducted from a request's length per second of waiting."""
    queue_promote_s: _Grace = 10.0
    """Waiting time after which a lower-priority request may be promoted: one of eight dequeued requests is a
    promoted one. Prevents starvation."""
    pace_prompts: bool = True
    """Send a prompt to its worker when the worker is about to finish the prompts before it, instead of at once, so
    that it does not delay them. Turn it off for workers that order prompts themselves. Requires `queue`."""
    max_priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    """Maximum priority that clients can request. Higher values are clamped and reported in a response header.
    Default: no limit."""
    withdraw_max_moves: Annotated[int, Meta(ge=0, le=16)] = 2
    """Maximum number of times that a request queued at a worker is moved to another worker. 0 disables
    moving."""
    withdraw_min_gain_s: _Seconds = 0.25
    """Minimum predicted TTFT gain before a queued request moves to another worker; its TTFT must also be at
    least halved."""
    affinity_s: _Weight = 0.01
    """`latency`: bonus for the worker that last served the session, in seconds."""
    affinity_blocks: _Weight = 1.0
    """`classic`: bonus for the worker that last served the session, in blocks."""
    affinity_half_life_s: _Seconds = 60.0
    """Half-life of the session bonus after the session's last request."""
    affinity_sessions: _Count = 65_536
    """Maximum number of tracked sessions. The least recently used are dropped first."""
    events: bool = True
    """Follow the KV events of workers. If false, cached prefixes are estimated from routing decisions."""
    index_max_bytes: _Bytes = 1024 * 1024 * 1024
    """Memory limit of the prefix index. The least recently used blocks are dropped first."""
    approximate_ttl_s: _Seconds = 120.0
    """How long a prompt is assumed to stay cached on a worker that publishes no KV events."""
    approximate_max_bytes: _Bytes = 256 * 1024 * 1024
    """Memory limit of the prefix index for workers without KV events."""
    correct_times: bool = True
    """Correct a worker's published step times by its observed TTFT."""
