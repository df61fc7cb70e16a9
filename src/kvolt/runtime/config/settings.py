"""The config tree: every setting with its type, limits, default and, as the string below it, its help text.

`leaves` derives flags, environment names, `kvolt config` and the validation of config files from these classes, so a
new setting is added only here. Reads no file and no environment; see `loader`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvolt.runtime.config.router_settings import ROUTER_NAMES, RouterName, RouterSettings

MIB = 1024 * 1024
_WEEK_S = 7 * 24 * 3600

Name = Annotated[
    str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9_-]*\Z", extra={"expects": "letters, digits, - and _"})
]
Text = Annotated[str, Meta(min_length=1)]
Origin = Annotated[
    str,
    Meta(pattern=r"\A(\*|[A-Za-z][A-Za-z0-9+.-]*://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?)\Z"),
]
Host = Annotated[str, Meta(min_length=1, extra={"metavar": "HOST"})]
Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Seconds = Annotated[float, Meta(gt=0, le=_WEEK_S)]
Grace = Annotated[float, Meta(ge=0, le=_WEEK_S)]
Bytes = Annotated[int, Meta(ge=1024, le=16 * 1024 * MIB)]
Role = Literal["aggregated", "prefill", "decode", "encode"]

_ADDRESS = {"address": True, "metavar": "HOST:PORT"}
_PATH = {"path": True, "metavar": "DIR"}
_FILE = {"path": True, "metavar": "FILE"}


AliasScheme = Literal["none", "dynamo"]


class RuntimeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Listen addresses, startup and shutdown of a process."""

    host: Host = "127.0.0.1"
    """Listen address of the request plane. Set it when other machines connect to this process."""
    port: Port = 0
    """Listen port of the request plane. 0 picks a free port."""
    advertise: Text | None = None
    """Address that other machines connect to. Set it behind NAT and for wildcard listen addresses.
    Default: runtime.host."""
    start_timeout_s: Seconds = 30.0
    """Maximum time for a process to become ready before it exits with an error."""
    drain_timeout_s: Grace = 30.0
    """Time that running requests get to finish after a stop signal."""


class DiscoverySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Discovery of processes."""

    kind: Literal["mem", "file", "join"] = "file"
    """Discovery backend. `file`: processes of one machine share a directory. `join`: register with a join
    server on another machine. `mem`: a single process."""
    path: Annotated[Text | None, Meta(extra=_PATH)] = None
    """Directory of file discovery. Default: one per user."""
    join: Annotated[Text | None, Meta(extra=_ADDRESS)] = None
    """Join server to register with, on another machine. It listens on `--discovery-join-listen`. Implies
    discovery.kind=join. Default: none."""
    join_listen: Annotated[Text | None, Meta(extra=_ADDRESS)] = None
    """Run a join server here for `--join`. Default: none."""
    ttl_s: Seconds = 5.0
    """Lease time-to-live. A process that does not renew its lease for this long is deregistered; a join
    server waits at most 60 s."""
    poll_s: Seconds = 0.25
    """Poll interval of file discovery."""


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Membership in a cluster: keys and certificates for connections between processes."""

    key: Annotated[Text | None, Meta(extra=_FILE)] = None
    """Cluster key (`kvolt cluster init` creates one). Authenticates and encrypts all connections between
    processes. All processes of a cluster need it. Default: none, for processes of one machine."""
    join_token: Annotated[Text | None, Meta(extra={"secret": True})] = None
    """Join token (`kvolt cluster token` creates one), in place of a cluster key on this machine: exchanged once for
    a certificate at the join server. Each start of a process needs a new one; other users see it among the flags,
    not in KVOLT_CLUSTER_JOIN_TOKEN. Default: none."""
    insecure_network: bool = False
    """Listen for other machines without a cluster key. Anyone who reaches the ports controls the cluster: set
    it only in a network that trusted machines alone can reach."""
    certificate: Annotated[Text | None, Meta(extra=_FILE)] = None
    """Certificate chain of this process from your own authority, in place of a cluster key; with the URI
    kvolt://ROLE/NAME as alternative name. Needs cluster.private_key and cluster.authority. Default: none."""
    private_key: Annotated[Text | None, Meta(extra=_FILE)] = None
    """Private key of cluster.certificate. Default: none."""
    authority: Annotated[Text | None, Meta(extra=_FILE)] = None
    """Certificates of the authorities that sign the processes' certificates. Default: none."""


class PlaneSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request plane: calls and response streams between processes."""

    connect_timeout_s: Seconds = 5.0
    """Connect timeout of the request plane."""
    first_response_timeout_s: Seconds = 60.0
    """Maximum time to the first response of a call. Prefill calls get at least three times their predicted
    TTFT."""
    between_responses_timeout_s: Seconds = 30.0
    """Maximum time between two responses of a call."""
    total_timeout_s: Seconds = 600.0
    """Maximum duration of a call."""
    heartbeat_s: Seconds = 1.0
    """Interval of heartbeats on an idle connection."""
    dead_after_s: Seconds = 3.0
    """A process whose connection is silent for this long gets no new calls. A closed connection counts as a
    lost process at once."""
    stall_grace_s: Grace = 30.0
    """How long a stalled process (stopped, swapping, out of CPU) keeps its streams while its connection stays
    open, and how long requests wait while no instance is reachable. Raise it for machines that pause longer,
    such as VMs under live migration. 0 ends streams after plane.dead_after_s."""
    max_frame_bytes: Bytes = MIB
    """Maximum frame size of the request plane. Larger messages are split into frames."""
    max_message_bytes: Bytes = 64 * MIB
    """Maximum message size of the request plane."""
    window_items: Count = 256
    """Flow-control window of a stream: number of unread responses. Deltas are merged while the window is
    full."""
    max_streams: Count = 20_000
    """Maximum number of open streams per connection."""


class EventsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Event plane: KV events and load reports."""

    kind: Literal["mem", "zmq"] = "zmq"
    """Event plane. `zmq`: between processes and machines, over the request plane with a cluster key. `mem`: a single
    process."""
    host: Host = "127.0.0.1"
    """Listen address of the event publishers. Not used with a cluster key."""


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV transfer between workers."""

    shared_memory: bool = True
    """Transfer KV between workers of one machine through shared memory. If false, they use TCP."""
    nixl: bool = False
    """Transfer KV by NIXL between workers that both enable it. Requires the `nixl` package."""
    self_test: bool = True
    """Measure the bandwidth to a worker after its first KV transfer, with about 8 MiB."""


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Admin port of each process: health, metrics, state."""

    host: Host = "127.0.0.1"
    """Listen address of the admin port."""
    port: Port = 0
    """Admin port of the process. 0 picks a free port, shown by `kvolt status`."""
    enabled: bool = True
    """Serve the admin port."""


class MetricsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prometheus metrics."""

    aliases: AliasScheme = "none"
    """dynamo: serve metrics under Dynamo's names too, for its dashboards and alerts."""


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logging."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum log level: debug, info, warning or error."""
    format: Literal["auto", "human", "json"] = "auto"
    """human, json or auto: human on a terminal and in `kvolt serve`, else JSON."""


class FrontendSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI-compatible HTTP frontend."""

    host: Host = "127.0.0.1"
    """Listen address of the HTTP API; 0.0.0.0 accepts remote clients."""
    port: Port = 8000
    """Port of the HTTP API; 0: a free one."""
    processes: Annotated[int, Meta(ge=1, le=256)] = 1
    """Number of HTTP processes. They share the port; above 1, a router process is started too. Raise it when
    the frontend saturates a CPU core."""
    router: RouterName = ROUTER_NAMES[0]
    """Routing policy: latency, classic, round-robin, least-loaded, power-of-two, random, direct, or
    FILE.py:FUNCTION. `latency`: lowest predicted latency given each worker's cached prefix and load.
    `classic`: Dynamo's KV cost. `round-robin`, `least-loaded`, `power-of-two` and `random` ignore the KV cache.
    `direct`: the worker named by the request. `FILE.py:FUNCTION` or `MODULE:FUNCTION`: a custom policy."""
    max_body_bytes: Bytes = 16 * MIB
    """Maximum size of a request body. Larger requests get a 413."""
    tls_cert: Annotated[Text | None, Meta(extra=_FILE)] = None
    """Certificate chain for HTTPS, PEM; read again when it changes. Default: none, plain HTTP."""
    tls_key: Annotated[Text | None, Meta(extra=_FILE)] = None
    """Private key of frontend.tls_cert, PEM. Default: none."""
    tls_client_authority: Annotated[Text | None, Meta(extra=_FILE)] = None
    """Authorities of client certificates, PEM. If set, clients need a certificate of one of them. Default:
    none."""
    cors_origins: Annotated[list[Origin], Meta(extra={"expects": "SCHEME://HOST[:PORT] or *"})] = []
    """Origins whose web pages may call the API from a browser, such as https://chat.example.com; * for all.
    Empty: none."""
    request_timeout_s: Seconds = 600.0
    """Maximum duration of a request, including queueing."""
    header_timeout_s: Seconds = 10.0
    """Maximum time to receive the headers of a request."""
    body_timeout_s: Seconds = 60.0
    """Maximum time to receive the body of a request."""
    write_timeout_s: Seconds = 60.0
    """Close a connection whose client has not read its response for this long."""
    namespaces: Text | None = None
    """Comma-separated namespaces whose models are served. Default: the frontend's own namespace."""
    max_requests: Count = 10_000
    """Maximum number of concurrent requests over all frontend processes. Further requests get a 429."""
    hold_headers_s: Seconds = 5.0
    """Maximum time to hold back the headers of a streaming response, so that an error before the first token
    still sets the HTTP status."""
    strict_fields: bool = False
    """Reject requests with unknown fields. If false, a response header lists the ignored fields."""
    max_attempts: Count = 3
    """Maximum number of workers to try for a request before its first token."""
    migration_limit: Annotated[int, Meta(ge=0, le=1000)] = 3
    """Maximum number of migrations of a request to another worker when its worker is lost. 0 fails the
    request instead."""
    prefill_choice: Literal["predicted", "threshold"] = "predicted"
    """Use of prefill workers: predicted or threshold. `predicted`: unless another mode is predicted to be
    much cheaper. `threshold`: above prefill_min_tokens uncached tokens, up to prefill_max_queue_s."""
    prefill_min_tokens: Annotated[int, Meta(ge=0)] = 0
    """Compute a prompt on the decode worker if at most this many of its tokens are uncached there. Prompts
    within one KV block are always computed there."""
    decode_first: str = ""
    """Models (A,B or *) whose decode worker gets the request at once. It pulls KV during prefill. Default:
    none."""
    prefill_max_queue_s: Seconds | None = None
    """Compute a prompt on the decode worker if the predicted queueing time at the prefill workers is longer.
    Default: no limit."""
    target_ttft_s: Seconds | None = None
    """TTFT target: while it is met, all prompts go to prefill workers. Default: none."""
    target_itl_s: Seconds | None = None
    """The same for the mean inter-token latency. Default: none."""
    token_cache_bytes: Bytes = 8 * MIB
    """Memory for the tokenizer cache of each model."""
    processor: Text = "card"
    """Chat processor: card, vllm, plugin. It renders prompts and parses answers. `card`: kvolt's own. `vllm`:
    vLLM's (must be installed), for parsers that only vLLM has. Others: by the name of the plugin."""
    tool_parser: Text | None = None
    """Tool-call parser, or none. Applies to all models; the `vllm` processor has no default. Default: by the
    template."""
    api_keys: Annotated[Text | None, Meta(extra=_FILE)] = None
    """API keys of clients (`kvolt key`). Default: none. Requests then need one of these keys, and the limits of its
    tenant apply. A changed file is read again within two seconds."""
    key_store: Text | None = None
    """API keys from a plugin in place of a file: NAME or NAME:ARGUMENT (entry points `kvolt.key_stores`).
    Default: none."""
    reasoning_parser: Text | None = None
    """Reasoning parser, or none. Applies to all models; the `vllm` processor has no default. Default: by the
    template."""


class SupervisorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Process supervision by `kvolt serve`."""

    log_dir: Annotated[Text | None, Meta(extra=_PATH)] = None
    """Directory for the log files of the processes. Default: `logs` in this user's
    runtime directory."""
    restart_backoff_s: Seconds = 0.5
    """Delay before the first restart of a failed process. It doubles with each further restart."""
    restart_backoff_max_s: Seconds = 30.0
    """Maximum delay between restarts."""
    stop_timeout_s: Grace = 10.0
    """Time that a process gets to stop before it is killed."""


MAX_PER_PROCESS = 1024


class TierSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV cache tiers of a worker: blocks evicted from the device are kept here for reuse."""

    host: str = ""
    """Host memory for KV blocks: 4GiB, 1000blocks, or 2x the device capacity. Empty: no host tier."""
    host_high_water: Annotated[float, Meta(ge=0, le=0.5)] = 0.25
    """Maximum fraction of the host tier for blocks that wait to be written to a lower tier."""
    disk: str = ""
    """Disk space for KV blocks, which survive restarts. Empty: no disk tier."""
    disk_dir: str = ""
    """Directory of the disk tier; each worker uses its own subdirectory. Empty: the user's cache
    directory."""
    disk_touches: Annotated[int, Meta(ge=1, le=15)] = 1
    """Write a block to disk after it has been used this many times."""
    disk_compression: Literal["none", "fp8"] = "none"
    """`fp8` stores KV on disk with 8 bits per value: lossy, two to four times the capacity."""
    disk_low_water: Annotated[float, Meta(ge=0, le=0.5)] = 0.01
    """Start evicting when less than this fraction of the disk slots is free."""
    disk_high_water: Annotated[float, Meta(ge=0, le=0.5)] = 0.02
    """Evict until this fraction of the disk slots is free. 0 evicts only when the disk tier is full."""
    disk_direct: bool = False
    """Onboard blocks from disk to the device by NIXL, bypassing host memory where GPUDirect Storage is
    available."""
    object: str = ""
    """Object store shared by all workers: s3://BUCKET/PREFIX, gs://, az:// or a directory. Empty: none."""
    object_touches: Annotated[int, Meta(ge=1, le=15)] = 2
    """Write a block to the object store after it has been used this many times."""
    object_compression: Literal["none", "zstd"] = "none"
    """Compression of blocks written to the object store. Both formats can be read."""
    pool: str = ""
    """Socket of a `kvolt cache serve` on this host whose pool to use. Empty: none."""
    peers: bool = False
    """Onboard blocks from the tiers of other workers, and serve blocks to them. Set it for all workers of a
    model."""
    shared: bool = False
    """`kvolt serve` creates one pool for all workers of this machine instead of one per worker."""
    depth: Annotated[int, Meta(ge=0)] = 0
    """Offload only the first blocks of each prompt, at most this many. 0: no limit."""
    min_priority: int | None = None
    """Offload only KV of requests with at least this priority. Default: all requests."""
    tenants: tuple[str, ...] = ()
    """Offload only KV of these tenants. Empty: all tenants."""
    eviction: Literal["lru", "s3fifo", "tinylfu"] = "lru"
    """Eviction policy of the tiers."""


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[workers]]` entry: `count` identical worker processes."""

    name: Name = "worker"
    """Name of this worker group in logs and in `kvolt status`."""
    role: Role = "aggregated"
    """Role of the workers: `prefill` computes prompts for `decode` workers, `aggregated` does both, `encode`
    computes media embeddings."""
    engine: Text = "auto"
    """Inference engine. `auto` is `sim` for models named sim-... and `native` otherwise."""
    model: Text = "smollm2-135m"
    """Model to serve: a built-in name, a Hugging Face name, a folder or a GGUF file."""
    served_names: list[str] = []
    """Names of the model for clients: the first in answers and metrics, the others as aliases. Empty: the
    model as given; for a GGUF file its name without .gguf."""
    generation_config: Text = "auto"
    """Generation defaults of requests. `auto`: those of the model's generation_config.json or GGUF file.
    `none`: OpenAI's. Or a folder with another generation_config.json."""
    count: Annotated[int, Meta(ge=0, le=4096)] = 1
    """Number of processes."""
    per_process: Annotated[int, Meta(ge=1, le=MAX_PER_PROCESS)] = 1
    """Number of workers per process, for engines that support it (`sim`)."""
    devices: list[str] = []
    """GPUs of each process, by index or UUID."""
    taints: list[str] = []
    """Labels that requests can require or prefer, such as gpu=h100."""
    stuck_after_s: Seconds = 30.0
    """Report the worker as unhealthy if its engine has work but completes no step for this long. Before the
    first step the limit is ten times as long."""
    tiers: TierSettings = TierSettings()
    """KV cache tiers below the device: a table with `host`, `disk` and other keys."""
    args: Annotated[dict[str, Any], Meta(extra={"expects": "a table without dates"})] = {}
    """Engine arguments, validated by the engine. `kvolt engine list NAME` shows them."""


def _default_workers() -> list[WorkerSettings]:
    return [WorkerSettings()]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The config tree."""

    namespace: Name = "default"
    """Processes see only those of their namespace."""
    runtime: RuntimeSettings = RuntimeSettings()
    discovery: DiscoverySettings = DiscoverySettings()
    cluster: ClusterSettings = ClusterSettings()
    plane: PlaneSettings = PlaneSettings()
    events: EventsSettings = EventsSettings()
    transfer: TransferSettings = TransferSettings()
    admin: AdminSettings = AdminSettings()
    metrics: MetricsSettings = MetricsSettings()
    log: LogSettings = LogSettings()
    frontend: FrontendSettings = FrontendSettings()
    router: RouterSettings = RouterSettings()
    supervisor: SupervisorSettings = SupervisorSettings()
    workers: list[WorkerSettings] = msgspec.field(default_factory=_default_workers)
