"""The config tree: every setting of kvolt with its type, limits, default and one line of help.

Flags, environment names, `kvolt config` and the checks of a config file are all derived from these
classes, so a setting is added here and nowhere else. This module must not know where values come
from: it reads no file and no environment.
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


class RuntimeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How this process starts, listens and stops."""

    host: Annotated[Host, Meta(description="Address the request plane listens on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Port of the request plane; 0 takes any free one.")] = 0
    advertise: Annotated[
        Text | None,
        Meta(description="Address at which other machines reach this one; runtime.host if not set."),
    ] = None
    start_timeout_s: Annotated[
        Seconds, Meta(description="A process not ready after this long is given up.")
    ] = 30.0
    drain_timeout_s: Annotated[
        Grace, Meta(description="Time that running requests get to finish when a process stops.")
    ] = 30.0


class DiscoverySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How processes find each other."""

    kind: Annotated[
        Literal["mem", "file", "join"],
        Meta(
            description="mem: this process only; file: this machine; join: a join server on another machine."
        ),
    ] = "file"
    path: Annotated[
        Text | None,
        Meta(
            description="Directory that the processes of one machine share; per user if not set.", extra=_PATH
        ),
    ] = None
    join: Annotated[
        Text | None,
        Meta(
            description="Join server to register with; setting it makes discovery.kind join.", extra=_ADDRESS
        ),
    ] = None
    join_listen: Annotated[
        Text | None, Meta(description="Serve discovery to other machines on this address.", extra=_ADDRESS)
    ] = None
    ttl_s: Annotated[
        Seconds,
        Meta(
            description="A process silent for this long is taken off the list; by a join server after 60 s at most."
        ),
    ] = 5.0
    poll_s: Annotated[Seconds, Meta(description="How often file discovery looks for changes.")] = 0.25


class PlaneSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The request plane: calls and their streams between processes."""

    connect_timeout_s: Annotated[Seconds, Meta(description="Limit for opening a connection.")] = 5.0
    first_response_timeout_s: Annotated[
        Seconds,
        Meta(
            description="Limit until a call's first response; for a prompt, at least three times the predicted time "
            "to the first token."
        ),
    ] = 60.0
    between_responses_timeout_s: Annotated[Seconds, Meta(description="Limit between a call's responses.")] = (
        30.0
    )
    total_timeout_s: Annotated[Seconds, Meta(description="Limit for a whole call.")] = 600.0
    heartbeat_s: Annotated[Seconds, Meta(description="How often an idle connection says that it lives.")] = (
        1.0
    )
    dead_after_s: Annotated[
        Seconds,
        Meta(
            description="A process whose connection is silent for this long gets no new calls. One whose connection "
            "closes is lost at once."
        ),
    ] = 3.0
    stall_grace_s: Annotated[
        Grace,
        Meta(
            description="How long a stalled process (stopped, swapping, out of CPU) keeps its streams while its "
            "connection stays open, and how long requests wait while no instance can be reached. Raise it for machines "
            "that pause longer, such as VMs under live migration; 0 ends streams after plane.dead_after_s."
        ),
    ] = 30.0
    max_frame_bytes: Annotated[Bytes, Meta(description="Largest frame on the wire.")] = MIB
    max_message_bytes: Annotated[Bytes, Meta(description="Largest message, in however many frames.")] = (
        64 * MIB
    )
    window_items: Annotated[
        Count, Meta(description="Responses a stream may have unread before deltas merge.")
    ] = 256
    max_streams: Annotated[Count, Meta(description="Open streams per connection.")] = 20_000


class EventsSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The event plane: KV events and load figures."""

    kind: Annotated[
        Literal["mem", "zmq"],
        Meta(description="mem: this process only; zmq: between processes and machines."),
    ] = "zmq"
    host: Annotated[Host, Meta(description="Address that events are published on.")] = "127.0.0.1"
    queue_limit: Annotated[
        Count, Meta(description="Events held for a slow reader before the oldest drop.")
    ] = 10_000


class TransferSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How KV moves between workers."""

    shared_memory: Annotated[
        bool, Meta(description="Read the memory of workers on this machine; off, they use TCP, too.")
    ] = True
    nixl: Annotated[
        bool, Meta(description="Use NIXL with workers that have it on, too; it must be installed.")
    ] = False
    self_test: Annotated[
        bool, Meta(description="Measure the paths to a worker when KV first came from it: about 8 MiB.")
    ] = True


class AdminSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The admin port of each process: health, metrics, state."""

    host: Annotated[Host, Meta(description="Address the admin port listens on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Admin port; 0 takes any free one.")] = 0
    enabled: Annotated[bool, Meta(description="Whether there is an admin port at all.")] = True


class LogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is logged, and how."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="Least important level that is logged."),
    ] = "info"
    format: Annotated[
        Literal["auto", "human", "json"], Meta(description="auto: human on a terminal, json elsewhere.")
    ] = "auto"


class FrontendSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP edge that clients talk to."""

    host: Annotated[Host, Meta(description="Address the HTTP API listens on.")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="Port of the HTTP API; 0 takes any free one.")] = 8000
    processes: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description="HTTP processes that share the port; more than one get a router process besides.",
        ),
    ] = 1
    router: Annotated[
        RouterName,
        Meta(
            description="Who gets a request: by the KV that workers hold, where it adds the fewest seconds (latency) "
            "or blocks, as Dynamo counts them (classic); each worker in turn; the one with the fewest of this "
            "process's requests under way, of all or of two that are drawn; any; only whom the caller names (direct); "
            "or by one's own function (FILE.py:FUNCTION, MODULE:FUNCTION)."
        ),
    ] = ROUTER_NAMES[0]
    max_body_bytes: Annotated[Bytes, Meta(description="Largest request body.")] = 16 * MIB
    request_timeout_s: Annotated[Seconds, Meta(description="Limit for one request, queueing included.")] = (
        600.0
    )
    header_timeout_s: Annotated[
        Seconds, Meta(description="Limit for a request's headers to arrive, however slowly they drip.")
    ] = 10.0
    body_timeout_s: Annotated[Seconds, Meta(description="Limit for a request's body to arrive.")] = 60.0
    write_timeout_s: Annotated[
        Seconds, Meta(description="A client that leaves its answer unread for this long is cut off.")
    ] = 60.0
    namespaces: Annotated[
        Text | None,
        Meta(description="Namespaces whose models are served, with commas between; its own if not set."),
    ] = None
    max_requests: Annotated[
        Count, Meta(description="Requests answered at once, over all processes; more get a 429.")
    ] = 10_000
    hold_headers_s: Annotated[
        Seconds,
        Meta(description="How long a stream's headers wait for its first token or an early error."),
    ] = 5.0
    strict_fields: Annotated[
        bool, Meta(description="Refuse requests with unknown fields; else a header names the ignored ones.")
    ] = False
    max_attempts: Annotated[
        Count, Meta(description="Workers that a request is tried on before its first token.")
    ] = 3
    migration_limit: Annotated[
        int,
        Meta(
            ge=0,
            le=1000,
            description="Migrations that a request may make to other workers when its worker is lost; 0: it fails.",
        ),
    ] = 3
    prefill_choice: Annotated[
        Literal["predicted", "threshold"],
        Meta(
            description="Whether a prompt goes to a prefill worker, where there are any: `predicted`, by what each way "
            "would cost; `threshold`, whenever it is long enough and their queue short enough."
        ),
    ] = "predicted"
    prefill_min_tokens: Annotated[
        int,
        Meta(
            ge=0,
            description="Prompts of which a decode worker lacks as many tokens or fewer are computed there, though "
            "there are prefill workers; and so is what fits into one KV block.",
        ),
    ] = 0
    decode_first: Annotated[
        str,
        Meta(
            description="Models, separated by commas, whose decode workers have a request at the same time as who "
            "computes its prompt, and fetch the KV meanwhile; `*` for all. Else prefill comes first."
        ),
    ] = ""
    prefill_max_queue_s: Annotated[
        Seconds | None,
        Meta(
            description="With a longer queue at the prefill workers a prompt is computed where it is answered.",
        ),
    ] = None
    target_ttft_s: Annotated[
        Seconds | None,
        Meta(
            description="The first token is promised within this time: while prefill workers keep that, they compute "
            "all prompts, whatever each way would cost."
        ),
    ] = None
    target_itl_s: Annotated[
        Seconds | None,
        Meta(description="Likewise: the time between two tokens of an answer, on average."),
    ] = None
    token_cache_bytes: Annotated[
        Bytes, Meta(description="Memory for each model's tokenized pieces of chats.")
    ] = 8 * MIB
    processor: Annotated[
        Text,
        Meta(
            description="Whose code renders prompts and reads tool calls and reasoning: `card`, kvolt's own; `vllm`, "
            "vLLM's, which must be installed here, for a model whose parser only vLLM has or answers as those of "
            "`vllm serve`; or one that a package offers."
        ),
    ] = "card"
    tool_parser: Annotated[
        Text | None,
        Meta(
            description="Parser of tool calls for all models, of those that the processor has; `none` for none. If not "
            "set, by each one's chat template; with `vllm` none."
        ),
    ] = None
    reasoning_parser: Annotated[
        Text | None,
        Meta(
            description="Parser of reasoning for all models, of those that the processor has; `none` for none. If not "
            "set, by each one's chat template; with `vllm` none."
        ),
    ] = None
    metrics_prefix: Annotated[Text, Meta(description="What the names of the edge's metrics begin with.")] = (
        "dynamo_frontend"
    )


class SupervisorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kvolt serve`, which starts the other processes and keeps them alive."""

    log_dir: Annotated[
        Text | None,
        Meta(
            description="Directory for the processes' logs; beside the discovery directory if not set.",
            extra=_PATH,
        ),
    ] = None
    restart_backoff_s: Annotated[Seconds, Meta(description="Wait before the first restart of a process.")] = (
        0.5
    )
    restart_backoff_max_s: Annotated[Seconds, Meta(description="Longest wait between restarts.")] = 30.0
    stop_timeout_s: Annotated[Grace, Meta(description="Wait for a process to stop before it is killed.")] = (
        10.0
    )


MAX_PER_PROCESS = 1024


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[workers]]` entry: `count` equal processes."""

    name: Annotated[Name, Meta(description="Name of this group, in logs and in `kvolt status`.")] = "worker"
    role: Annotated[Role, Meta(description="What these workers do.")] = "aggregated"
    engine: Annotated[
        Text, Meta(description="What computes; auto is sim for a model named sim-..., and native for others.")
    ] = "auto"
    model: Annotated[Text, Meta(description="Model that is served: a name, a folder or a file.")] = (
        "smollm2-135m"
    )
    count: Annotated[int, Meta(ge=0, le=4096, description="How many processes.")] = 1
    per_process: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_PER_PROCESS,
            description="Workers in each process, for engines that can have several (sim).",
        ),
    ] = 1
    devices: Annotated[list[str], Meta(description="Devices that each process may use, by index or id.")] = []
    taints: Annotated[
        list[str], Meta(description="Properties that requests may demand or prefer, such as gpu=h100.")
    ] = []
    stuck_after_s: Annotated[
        Seconds,
        Meta(
            description="An engine with work and no step for this long is unhealthy; ten times as long at first."
        ),
    ] = 30.0
    tiers: Annotated[
        TierSettings,
        Meta(description="Where KV goes that leaves the device: a table with host, disk and more."),
    ] = TierSettings()
    args: Annotated[
        dict[str, Any],
        Meta(
            description="Arguments of the engine, checked by the engine.",
            extra={"expects": "a table without dates"},
        ),
    ] = {}


def _default_workers() -> list[WorkerSettings]:
    return [WorkerSettings()]


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole tree."""

    namespace: Annotated[Name, Meta(description="Processes see each other only within one namespace.")] = (
        "default"
    )
    runtime: RuntimeSettings = RuntimeSettings()
    discovery: DiscoverySettings = DiscoverySettings()
    plane: PlaneSettings = PlaneSettings()
    events: EventsSettings = EventsSettings()
    transfer: TransferSettings = TransferSettings()
    admin: AdminSettings = AdminSettings()
    log: LogSettings = LogSettings()
    frontend: FrontendSettings = FrontendSettings()
    router: RouterSettings = RouterSettings()
    supervisor: SupervisorSettings = SupervisorSettings()
    workers: list[WorkerSettings] = msgspec.field(default_factory=_default_workers)


class Leaf(msgspec.Struct, frozen=True):
    """One setting, as flags, environment, file checks and help need to know it."""

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
        """The values it takes, in words: `a whole number from 0 to 65535`."""
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
    """Every scalar setting by its dotted key, in the order of the tree. `workers` is not among them."""
    found = [leaf for leaf in _leaves_of(Settings, None) if leaf.name not in (*sections(), "workers")]
    for name, section in sections().items():
        found += _leaves_of(section, name)
    return {leaf.key: leaf for leaf in found}


@cache
def worker_leaves() -> dict[str, Leaf]:
    """The fields of one `[[workers]]` entry by name."""
    return {leaf.name: leaf for leaf in _leaves_of(WorkerSettings, None)}


@cache
def sections() -> dict[str, type[msgspec.Struct]]:
    """The sections of the tree, by name."""
    fields = msgspec.structs.fields(Settings)
    return {field.name: field.type for field in fields if isinstance(field.type, type(msgspec.Struct))}


def _leaves_of(struct: type[msgspec.Struct], section: str | None) -> list[Leaf]:
    found = []
    for field in msgspec.structs.fields(struct):
        info = inspect.type_info(field.type)
        meta = info if isinstance(info, inspect.Metadata) else inspect.Metadata(info)
        found.append(
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
    return found


def _in_words(info: inspect.Type) -> str:
    match info:
        case inspect.LiteralType():
            return "one of " + ", ".join(map(str, info.values))
        case inspect.BoolType():
            return "true or false"
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
