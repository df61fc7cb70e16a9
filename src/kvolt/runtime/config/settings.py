"""The config tree: every setting with its type, limits, default and help text.

Flags, environment names, `kvolt config` and the validation of config files are derived from these classes, so a new
setting is added only here. Reads no file and no environment; see `loader`.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, inspect

from kvolt.runtime.config.router_settings import ROUTER_NAMES, RouterName, RouterSettings
from kvolt.runtime.config.tier_settings import TierSettings

MIB = 1024 * 1024
_WEEK_S = 7 * 24 * 3600

Name = Annotated[
    str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9_-]*\Z", extra={"expects": "letters, digits, - and _"})
]
Text = Annotated[str, Meta(min_length=1)]
Host = Annotated[str, Meta(min_length=1, extra={"metavar": "HOST"})]
Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=1, le=1_000_000)]
Seconds = Annotated[float, Meta(gt=0, le=_WEEK_S)]
Grace = Annotated[float, Meta(ge=0, le=_WEEK_S)]
Bytes = Annotated[int, Meta(ge=1024, le=16 * 1024 * MIB)]
Role = Literal["aggregated", "prefill", "decode", "encode"]

_ADDRESS = {"address": True, "metavar": "HOST:PORT"}
_PATH = {"path": True, "metavar": "DIR"}


AliasScheme = Literal["none", "dynamo"]


class RuntimeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Listen addresses, startup and shutdown of a process."""

    host: Annotated[
        Host,
        Meta(
            description="Listen address of the request plane. Set it when other machines connect to this process."
        ),
    ] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Listen port of the request plane. 0 picks a free port.")] = 0
    advertise: Annotated[
        Text | None,
        Meta(
            description="Address that other machines use to reach this process, for NAT or wildcard listen "
            "addresses. Default: runtime.host."
        ),
    ] = None
    start_timeout_s: Annotated[
        Seconds, Meta(description="Maximum time for a process to become ready before it exits with an error.")
    ] = 30.0
    drain_timeout_s: Annotated[
        Grace, Meta(description="Time that running requests get to finish after a stop signal.")
    ] = 30.0


class DiscoverySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Discovery of processes."""

    kind: Annotated[
        Literal["mem", "file", "join"],
        Meta(
            description="Discovery backend. `file`: processes of one machine share a directory. `join`: register "
            "with a join server on another machine. `mem`: a single process."
        ),
    ] = "file"
    path: Annotated[
        Text | None,
        Meta(
            description="Directory of file discovery on this machine. Default: one per user.",
            extra=_PATH,
        ),
    ] = None
    join: Annotated[
        Text | None,
        Meta(
            description="Join server to register with (see --discovery-join-listen). Implies discovery.kind=join. "
            "Default: none.",
            extra=_ADDRESS,
        ),
    ] = None
    join_listen: Annotated[
        Text | None,
        Meta(
            description="Run a join server on this address, for `--join` on other machines. Default: none.",
            extra=_ADDRESS,
        ),
    ] = None
    ttl_s: Annotated[
        Seconds,
        Meta(
            description="Lease time-to-live. A process that does not renew its lease for this long is deregistered;"
            " a join server waits at most 60 s."
        ),
    ] = 5.0
    poll_s: Annotated[Seconds, Meta(description="Poll interval of file discovery.")] = 0.25


class PlaneSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request plane: calls and response streams between processes."""

    connect_timeout_s: Annotated[Seconds, Meta(description="Connect timeout of the request plane.")] = 5.0
    first_response_timeout_s: Annotated[
        Seconds,
        Meta(
            description="Maximum time to the first response of a call. Prefill calls get at least three times their"
            " predicted TTFT."
        ),
    ] = 60.0
    between_responses_timeout_s: Annotated[
        Seconds, Meta(description="Maximum time between two responses of a call.")
    ] = 30.0
    total_timeout_s: Annotated[Seconds, Meta(description="Maximum duration of a call.")] = 600.0
    heartbeat_s: Annotated[Seconds, Meta(description="Interval of heartbeats on an idle connection.")] = 1.0
    dead_after_s: Annotated[
        Seconds,
        Meta(
            description="A process whose connection is silent for this long gets no new calls. A closed connection "
            "counts as a lost process at once."
        ),
    ] = 3.0
    stall_grace_s: Annotated[
        Grace,
        Meta(
            description="How long a stalled process (stopped, swapping, out of CPU) keeps its streams while its "
            "connection stays open, and how long requests wait while no instance is reachable. Raise it"
            " for machines that pause longer, such as VMs under live migration. 0 ends streams after "
            "plane.dead_after_s."
        ),
    ] = 30.0
    max_frame_bytes: Annotated[
        Bytes,
        Meta(description="Maximum frame size of the request plane. Larger messages are split into frames."),
    ] = MIB
    max_message_bytes: Annotated[Bytes, Meta(description="Maximum message size of the request plane.")] = (
        64 * MIB
    )
    window_items: Annotated[
        Count,
        Meta(
            description="Flow-control window of a stream: number of unread responses. Deltas are merged while the "
            "window is full."
        ),
    ] = 256
    max_streams: Annotated[Count, Meta(description="Maximum number of open streams per connection.")] = 20_000


class EventsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Event plane: KV events and load reports."""

    kind: Annotated[
        Literal["mem", "zmq"],
        Meta(description="Event plane. `zmq`: between processes and machines. `mem`: a single process."),
    ] = "zmq"
    host: Annotated[Host, Meta(description="Listen address of the event publishers.")] = "127.0.0.1"
    queue_limit: Annotated[
        Count,
        Meta(
            description="Event queue length per subscriber. The oldest events are dropped when a slow subscriber "
            "fills it."
        ),
    ] = 10_000


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """KV transfer between workers."""

    shared_memory: Annotated[
        bool,
        Meta(
            description="Transfer KV between workers of one machine through shared memory. If false, they use TCP."
        ),
    ] = True
    nixl: Annotated[
        bool,
        Meta(
            description="Transfer KV by NIXL between workers that both enable it. Requires the `nixl` package."
        ),
    ] = False
    self_test: Annotated[
        bool,
        Meta(description="Measure the bandwidth to a worker after its first KV transfer, with about 8 MiB."),
    ] = True


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Admin port of each process: health, metrics, state."""

    host: Annotated[Host, Meta(description="Listen address of the admin port.")] = "127.0.0.1"
    port: Annotated[
        Port, Meta(description="Admin port of the process. 0 picks a free port, shown by `kvolt status`.")
    ] = 0
    enabled: Annotated[bool, Meta(description="Serve the admin port.")] = True


class MetricsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prometheus metrics."""

    aliases: Annotated[
        AliasScheme,
        Meta(
            description="`dynamo`: also serve metrics under Dynamo's names, for its dashboards and alerts. "
            "`none`: kvolt's names only."
        ),
    ] = "none"


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Logging."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Minimum log level: debug, info, warning or error."),
    ] = "info"
    format: Annotated[
        Literal["auto", "human", "json"],
        Meta(description="`human`, `json`, or `auto`: human on a terminal, JSON otherwise."),
    ] = "auto"


class FrontendSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI-compatible HTTP frontend."""

    host: Annotated[
        Host,
        Meta(description="Listen address of the HTTP API. 0.0.0.0 accepts remote clients."),
    ] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Port of the HTTP API. 0 picks a free port.")] = 8000
    processes: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="Number of HTTP processes that share the port. Above 1, a router process is started too. "
            "Raise it when the frontend saturates a CPU core.",
        ),
    ] = 1
    router: Annotated[
        RouterName,
        Meta(
            description="Routing policy. `latency`: lowest predicted latency given each worker's cached prefix and "
            "load. `classic`: Dynamo's KV cost. `round-robin`, `least-loaded`, `power-of-two` and "
            "`random` ignore the KV cache. `direct`: the worker named by the request. FILE.py:FUNCTION "
            "or MODULE:FUNCTION: a custom policy."
        ),
    ] = ROUTER_NAMES[0]
    max_body_bytes: Annotated[
        Bytes, Meta(description="Maximum size of a request body. Larger requests get a 413.")
    ] = 16 * MIB
    request_timeout_s: Annotated[
        Seconds, Meta(description="Maximum duration of a request, including queueing.")
    ] = 600.0
    header_timeout_s: Annotated[
        Seconds, Meta(description="Maximum time to receive the headers of a request.")
    ] = 10.0
    body_timeout_s: Annotated[Seconds, Meta(description="Maximum time to receive the body of a request.")] = (
        60.0
    )
    write_timeout_s: Annotated[
        Seconds, Meta(description="Close a connection whose client has not read its response for this long.")
    ] = 60.0
    namespaces: Annotated[
        Text | None,
        Meta(
            description="Comma-separated namespaces whose models are served. Default: the frontend's own namespace."
        ),
    ] = None
    max_requests: Annotated[
        Count,
        Meta(
            description="Maximum number of concurrent requests over all frontend processes. Further requests get a "
            "429."
        ),
    ] = 10_000
    hold_headers_s: Annotated[
        Seconds,
        Meta(
            description="Maximum time to hold back the headers of a streaming response, so that an error before the"
            " first token still sets the HTTP status."
        ),
    ] = 5.0
    strict_fields: Annotated[
        bool,
        Meta(
            description="Reject requests with unknown fields. If false, a response header lists the ignored fields."
        ),
    ] = False
    max_attempts: Annotated[
        Count, Meta(description="Maximum number of workers to try for a request before its first token.")
    ] = 3
    migration_limit: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Maximum number of migrations of a request to another worker when its worker is lost. 0 "
            "fails the request instead.",
        ),
    ] = 3
    prefill_choice: Annotated[
        Literal["predicted", "threshold"],
        Meta(
            description="When to use the prefill workers. `predicted`: unless another mode is predicted to be much "
            "cheaper. "
            "`threshold`: above prefill_min_tokens uncached tokens, up to prefill_max_queue_s."
        ),
    ] = "predicted"
    prefill_min_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Compute a prompt on the decode worker if at most this many of its tokens are uncached "
            "there. Prompts within one KV block are always computed there.",
        ),
    ] = 0
    decode_first: Annotated[
        str,
        Meta(
            description="Comma-separated models (`*`: all) whose decode worker gets the request at once and pulls "
            "KV during prefill. Default: prefill-first."
        ),
    ] = ""
    prefill_max_queue_s: Annotated[
        Seconds | None,
        Meta(
            description="Compute a prompt on the decode worker if the predicted queueing time at the prefill "
            "workers is longer. Default: no limit.",
        ),
    ] = None
    target_ttft_s: Annotated[
        Seconds | None,
        Meta(
            description="TTFT target. While the targets are met, all prompts go to prefill workers. Default: none."
        ),
    ] = None
    target_itl_s: Annotated[
        Seconds | None,
        Meta(description="Target for the mean inter-token latency of a request. Default: none."),
    ] = None
    token_cache_bytes: Annotated[Bytes, Meta(description="Memory for the tokenizer cache of each model.")] = (
        8 * MIB
    )
    processor: Annotated[
        Text,
        Meta(
            description="Renders prompts and parses tool calls and reasoning. `card`: kvolt's own. `vllm`: vLLM's "
            "(must be installed), for parsers that only vLLM has. Or the name of a plugin."
        ),
    ] = "card"
    tool_parser: Annotated[
        Text | None,
        Meta(
            description="Tool-call parser for all models, or `none`. Default: chosen by the chat template; none "
            "with the `vllm` processor."
        ),
    ] = None
    reasoning_parser: Annotated[
        Text | None,
        Meta(description="Reasoning parser for all models, or `none`. Default: as for the tool-call parser."),
    ] = None


class SupervisorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Process supervision by `kvolt serve`."""

    log_dir: Annotated[
        Text | None,
        Meta(
            description="Directory for the log files of the processes. Default: next to the discovery directory.",
            extra=_PATH,
        ),
    ] = None
    restart_backoff_s: Annotated[
        Seconds,
        Meta(
            description="Delay before the first restart of a failed process. It doubles with each further restart."
        ),
    ] = 0.5
    restart_backoff_max_s: Annotated[Seconds, Meta(description="Maximum delay between restarts.")] = 30.0
    stop_timeout_s: Annotated[
        Grace, Meta(description="Time that a process gets to stop before it is killed.")
    ] = 10.0


MAX_PER_PROCESS = 1024


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[workers]]` entry: `count` identical worker processes."""

    name: Annotated[Name, Meta(description="Name of this worker group in logs and in `kvolt status`.")] = (
        "worker"
    )
    role: Annotated[
        Role,
        Meta(
            description="Role of the workers: `prefill` computes prompts for `decode` workers, `aggregated` does "
            "both, `encode` computes media embeddings."
        ),
    ] = "aggregated"
    engine: Annotated[
        Text,
        Meta(
            description="Inference engine. `auto` is `sim` for models named sim-... and `native` otherwise."
        ),
    ] = "auto"
    model: Annotated[
        Text,
        Meta(description="Model to serve: a built-in name, a Hugging Face name, a folder or a GGUF file."),
    ] = "smollm2-135m"
    count: Annotated[int, Meta(ge=0, le=4096, description="Number of processes.")] = 1
    per_process: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_PER_PROCESS,
            description="Number of workers per process, for engines that support it (`sim`).",
        ),
    ] = 1
    devices: Annotated[list[str], Meta(description="GPUs of each process, by index or UUID.")] = []
    taints: Annotated[
        list[str], Meta(description="Labels that requests can require or prefer, such as gpu=h100.")
    ] = []
    stuck_after_s: Annotated[
        Seconds,
        Meta(
            description="Report the worker as unhealthy if its engine has work but completes no step for this long."
            " Before the first step the limit is ten times as long."
        ),
    ] = 30.0
    tiers: Annotated[
        TierSettings,
        Meta(description="KV cache tiers below the device: a table with `host`, `disk` and other keys."),
    ] = TierSettings()
    args: Annotated[
        dict[str, Any],
        Meta(
            description="Engine arguments, validated by the engine. `kvolt engine list NAME` shows them.",
            extra={"expects": "a table without dates"},
        ),
    ] = {}


def _default_workers() -> list[WorkerSettings]:
    return [WorkerSettings()]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The config tree."""

    namespace: Annotated[Name, Meta(description="Processes only see others of the same namespace.")] = (
        "default"
    )
    runtime: RuntimeSettings = RuntimeSettings()
    discovery: DiscoverySettings = DiscoverySettings()
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


class Leaf(msgspec.Struct, frozen=True):
    """One setting, as used by flags, environment, file validation and help."""

    section: str | None
    name: str
    type: Any
    default: Any
    info: inspect.Type
    description: str
    extra: dict[str, Any]

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def env(self) -> str:
        return "KVOLT_" + self.key.upper().replace(".", "_")

    @property
    def optional(self) -> bool:
        return isinstance(self.info, inspect.UnionType)

    @property
    def expects(self) -> str:
        """Description of the accepted values, such as `a whole number from 0 to 65535`."""
        return str(self.extra.get("expects") or _in_words(self.info))

    @property
    def choices(self) -> tuple[str, ...]:
        return (
            tuple(str(value) for value in self.info.values)
            if isinstance(self.info, inspect.LiteralType)
            else tuple(self.extra.get("known", ()))
        )

    @property
    def metavar(self) -> str:
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        units = {"s": "SECONDS", "bytes": "BYTES"}
        fallback = "N" if isinstance(self.info, inspect.IntType) else "TEXT"
        return str(self.extra.get("metavar") or units.get(self.name.rpartition("_")[2], fallback))


@cache
def leaves() -> dict[str, Leaf]:
    """Every scalar setting by its dotted key, in tree order; without `workers`."""
    settings = [leaf for leaf in leaves_of(Settings, None) if leaf.name not in (*sections(), "workers")]
    for name, section in sections().items():
        settings += leaves_of(section, name)
    return {leaf.key: leaf for leaf in settings}


@cache
def worker_leaves() -> dict[str, Leaf]:
    """Fields of a `[[workers]]` entry by name."""
    return {leaf.name: leaf for leaf in leaves_of(WorkerSettings, None)}


@cache
def sections() -> dict[str, type[msgspec.Struct]]:
    """Sections of the tree by name."""
    fields = msgspec.structs.fields(Settings)
    return {field.name: field.type for field in fields if isinstance(field.type, type(msgspec.Struct))}


def leaves_of(struct: type[msgspec.Struct], section: str | None) -> list[Leaf]:
    """Settings of one section class, with keys below `section`."""
    settings = []
    for field in msgspec.structs.fields(struct):
        info = inspect.type_info(field.type)
        meta = info if isinstance(info, inspect.Metadata) else inspect.Metadata(info)
        settings.append(
            Leaf(
                section=section,
                name=field.name,
                type=field.type,
                default=field.default_factory() if field.default is msgspec.NODEFAULT else field.default,
                info=meta.type,
                description=(meta.extra_json_schema or {}).get("description", ""),
                extra=meta.extra or {},
            )
        )
    return settings


def _in_words(info: inspect.Type) -> str:
    match info:
        case inspect.LiteralType():
            return "one of " + ", ".join(map(str, info.values))
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType(le=None):
            return f"a whole number from {info.ge}" if info.ge is not None else "a whole number"
        case inspect.IntType():
            return f"a whole number from {info.ge} to {info.le}"
        case inspect.FloatType() if info.gt is not None:
            return f"a number above {info.gt:g}, at most {info.le:g}"
        case inspect.FloatType():
            return f"a number from {info.ge:g} to {info.le:g}"
        case inspect.ListType():
            return "a list of text"
        case inspect.DictType():
            return "a table"
        case inspect.UnionType():
            return _in_words(info.types[0])
        case inspect.StrType() if info.min_length:
            return "text that is not empty"
        case _:
            return "text"
