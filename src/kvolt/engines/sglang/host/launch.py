"""Starts SGLang in the host process: builds its arguments, and describes the running engine.

Blocks while the model loads. Uses SGLang's own launcher without the processes that handle text. The symbols of SGLang
that the adapter uses are checked first, so that an incompatible version fails early.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvolt.core.errors import ConfigError, EngineFailed
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.external.requirements import (
    Requirement,
    check_names,
    check_requirement,
    check_reserved,
    kv_events_error,
    members,
)
from kvolt.engines.sglang.arguments import SglangArguments
from kvolt.engines.sglang.host.messages import Facts, KvSource, Start
from kvolt.engines.sglang.host.scheduler import run_scheduler
from kvolt.runtime.clock import Clock

_IO = "sglang.srt.managers.io_struct"
_OUTPUT = f"{_IO}:BatchTokenIDOutput"
_INPUT = f"{_IO}:TokenizedGenerateReqInput"
_PARAMS = "sglang.srt.sampling.sampling_params:SamplingParams"
_PARTS = "sglang.srt.managers.scheduler_components"

REQUIREMENT = Requirement(
    user="the sglang engine",
    distributions=("sglang",),
    tested=("0.5.23",),
    symbols=(
        *members(
            "sglang.srt.entrypoints.engine:Engine", "_launch_subprocesses _launch_detokenizer_subprocesses"
        ),
        *members("sglang.srt.server_args:ServerArgs", "resolve_once kv_events_config"),
        *members(
            "sglang.srt.server_args:PortArgs",
            "detokenizer_ipc_name tokenizer_ipc_name scheduler_input_ipc_name",
        ),
        *members("sglang.srt.arg_groups.overrides", "resolved_view model_config_of"),
        "sglang.srt.managers.scheduler:run_scheduler_process",
        *members(
            "sglang.srt.managers.load_snapshot", "create_load_snapshot_reader LoadSnapshot.num_used_tokens"
        ),
        "sglang.srt.managers.disagg_service:start_disagg_service",
        "sglang.srt.observability.req_time_stats:APIServerReqTimeStats",
        *members("sglang.srt.disaggregation.kv_events", "KVEventsConfig.bind ZmqEventPublisher.publish"),
        f"{_PARTS}.kv_events_publisher:SchedulerKvEventsPublisher.publish_kv_events",
        f"{_PARTS}.output_streamer:SchedulerOutputStreamer.stream_output",
        *members(_IO, "sock_send sock_recv AbortReq FlushCacheReqInput"),
        *members(_IO, "LoadLoRAAdapterReqInput UnloadLoRAAdapterReqInput"),
        *members(_OUTPUT, "output_ids finished_reasons cached_tokens dp_ranks"),
        *(f"{_OUTPUT}.output_{name}_logprobs_{part}" for name in ("token", "top") for part in ("val", "idx")),
        *(f"{_OUTPUT}.input_{name}_logprobs_{part}" for name in ("token", "top") for part in ("val", "idx")),
        *members(_INPUT, "input_ids sampling_params cache_salt lora_id lora_name"),
        *members(_INPUT, "routed_dp_rank priority logprob_start_len time_stats"),
        *members(_INPUT, "bootstrap_host bootstrap_port bootstrap_room"),
        *members(_PARAMS, "sampling_seed min_new_tokens structural_tag logit_bias"),
    ),
    remedy="install SGLang for your hardware as in its documentation",
)


_KEY = "args.engine_args"
_PAGE_SIZE = 16
"""Default. SGLang's own default is 1, which would need an index entry per token."""
_DISAGGREGATION = {Role.PREFILL: "prefill", Role.DECODE: "decode"}
_FIRST_LOAD_S = 30.0
"""Time for the schedulers' first load report after loading."""
_RESERVED = 2
"""Tokens of the context that requests cannot use: one of `max_req_len`, one of `max_new_tokens`."""


@dataclass(slots=True)
class Launched:
    """A running SGLang."""

    facts: Facts
    sockets: Any
    """The sockets of the schedulers: see `_Sockets`."""
    pids: Sequence[int]
    loads: Any
    """Reader of the schedulers' load reports."""
    lora_ids: dict[str, str]
    disaggregation: Any


class _Sockets:
    """Replaces the TokenizerManager in SGLang's launcher: binds the sockets that the schedulers connect to."""

    def __init__(self, server_args: Any, port_args: Any) -> None:
        import zmq
        from sglang.srt.managers.disagg_service import start_disagg_service
        from sglang.srt.utils.network import get_zmq_socket

        context = zmq.Context(2)
        self.port_args = port_args
        self.tokens = get_zmq_socket(context, zmq.PULL, port_args.detokenizer_ipc_name, True)
        self.answers = get_zmq_socket(context, zmq.PULL, port_args.tokenizer_ipc_name, True)
        self.requests = get_zmq_socket(context, zmq.PUSH, port_args.scheduler_input_ipc_name, True)
        self.bootstrap_server = start_disagg_service()  # None except on prefill workers
        self.max_req_input_len = 0
        """Set by the launcher."""

    def set_startup_time(self, startup_time: Any) -> None:
        pass


def launch(start: Start, clock: Clock) -> Launched:
    """Start SGLang. ConfigError for wrong settings."""
    version = check_requirement(REQUIREMENT)
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    fields = server_args(start.spec, start.arguments, start.model)
    known = [name for name in ServerArgs.__struct_fields__ if not name.startswith("_")]
    check_names("SGLang", fields, known, _KEY, "see `launch_server --help`, with underscores")
    try:
        # SGLang reads this argument only after it has logged a lot.
        logging.getLogger("sglang").setLevel(str(fields["log_level"]).upper())
        load_plugins()
        args = ServerArgs(**fields)
        args.resolve_once()
        if publishes_kv_events(start.spec, start.arguments):
            _check_events(args)
        launched = _launch(args)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"SGLang refuses its arguments: {error}", key=_KEY, remedy="correct the value"
        ) from error
    except RuntimeError as error:
        raise EngineFailed(f"SGLang did not start: {error}", engine="sglang") from error
    sockets, _, ports, result, watchdog, _ = launched
    if watchdog is not None:
        watchdog.stop()  # the host monitors the processes itself
    return _describe(start, args, version, sockets, ports, result, clock)


def publishes_kv_events(spec: EngineSpec, arguments: SglangArguments) -> bool:
    """Decode workers of SGLang have no prefix cache, so they publish no KV events."""
    return arguments.kv_events and spec.role is not Role.DECODE


def server_args(spec: EngineSpec, arguments: SglangArguments, model: str) -> dict[str, Any]:
    """The user's arguments, with kvolt's defaults."""
    fields = dict(arguments.engine_args)
    check_reserved(fields, {"model_path": "set it as `model`", "skip_tokenizer_init": "leave it out"}, _KEY)
    defaults: dict[str, Any] = {
        "model_path": model,
        "page_size": _PAGE_SIZE,
        "log_level": "warning",
        "enable_metrics": True,
        "load_snapshot_publish_interval": 1,
    }
    if publishes_kv_events(spec, arguments):
        defaults["kv_events_config"] = json.dumps(_events_config(fields.get("dp_size", 1)))
    if arguments.loras:
        defaults["lora_paths"] = dict(arguments.loras)
        defaults["enable_lora"] = True
    if spec.role in _DISAGGREGATION:
        defaults["disaggregation_mode"] = _DISAGGREGATION[spec.role]
    fields = defaults | fields
    if isinstance(fields.get("kv_events_config"), dict):
        fields["kv_events_config"] = json.dumps(fields["kv_events_config"])
    return fields


def _events_config(num_ranks: int) -> dict[str, Any]:
    """Ports on loopback: rank n uses the first port plus n."""
    first, first_replay = _free_ports(num_ranks), _free_ports(num_ranks, offset=num_ranks)
    return {
        "publisher": "zmq",
        "endpoint": f"tcp://127.0.0.1:{first}",
        "replay_endpoint": f"tcp://127.0.0.1:{first_replay}",
        "bind": True,
    }


def _free_ports(number: int, offset: int = 0) -> int:
    """The first of so many consecutive free ports. (SGLang does not accept port 0.)"""
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1]) + offset
        if first + number < 65536 and all(_is_free(first + each) for each in range(number)):
            return first
    raise ConfigError("no ports are free for KV events", key="args.kv_events", remedy="set kv_events=false")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _check_events(args: Any) -> None:
    """ConfigError if SGLang would publish no KV events although `kv_events` is set."""
    from sglang.srt.arg_groups.overrides import resolved_view

    view = resolved_view(args)
    if view.disable_radix_cache:
        raise kv_events_error(
            "SGLang has no prefix cache with these settings (disable_radix_cache), so it publishes no KV events",
            f"{_KEY}.disable_radix_cache",
        )
    config = json.loads(view.kv_events_config or "{}")
    if config.get("publisher") != "zmq" or not str(config.get("endpoint", "")).startswith("tcp://"):
        raise kv_events_error("SGLang publishes no KV events with these settings", f"{_KEY}.kv_events_config")


def _launch(args: Any) -> Any:
    from sglang.srt.entrypoints.engine import Engine

    class Launcher(Engine):  # type: ignore[misc]
        """Without the detokenizer process."""

        @classmethod
        def _launch_detokenizer_subprocesses(cls, **_: Any) -> tuple[list[Any], list[str]]:
            return [], []

    return Launcher._launch_subprocesses(
        server_args=args,
        init_tokenizer_manager_func=lambda server_args, ports: (_Sockets(server_args, ports), None),
        run_scheduler_process_func=run_scheduler,
        run_detokenizer_process_func=None,
    )


def _describe(
    start: Start, args: Any, version: str, sockets: _Sockets, ports: Any, result: Any, clock: Clock
) -> Launched:
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.managers.load_snapshot import create_load_snapshot_reader

    view, config, info = resolved_view(args), model_config_of(args), result.scheduler_infos[0]
    loads = create_load_snapshot_reader(ports, caller="TokenizerManager")
    num_ranks = view.dp_size
    total = info["max_total_num_tokens"]
    max_prompt = info["max_req_input_len"] - 1
    paths = view.lora_paths or ()
    is_prefill = start.spec.role is Role.PREFILL
    facts = Facts(
        version=version,
        page_size=view.page_size,
        context_length=min(config.context_len, total) - _RESERVED,
        max_prompt=max_prompt,
        max_total_tokens=total,
        max_running_requests=_max_running(loads, clock),
        max_batch_tokens=view.chunked_prefill_size if (view.chunked_prefill_size or 0) > 0 else max_prompt,
        vocab_size=config.vocab_size,
        eos_token_ids=tuple(sorted(config.hf_eos_token_id or ())),
        num_ranks=num_ranks,
        is_seeded=bool(view.enable_deterministic_inference),
        has_grammars=view.grammar_backend not in (None, "none"),
        has_priorities=bool(view.enable_priority_scheduling),
        has_lora=bool(view.enable_lora),
        kv_sources=_sources(json.loads(view.kv_events_config), num_ranks)
        if start.arguments.kv_events
        else (),
        metrics_folder=_metrics_folder() if view.enable_metrics else None,
        bootstrap_port=view.disaggregation_bootstrap_port if is_prefill else None,
    )
    return Launched(
        facts=facts,
        sockets=sockets,
        pids=list(result.all_child_pids),
        loads=loads,
        lora_ids={each.lora_name: each.lora_id for each in paths},
        disaggregation=DisaggregationMode(view.disaggregation_mode),
    )


def _sources(config: dict[str, Any], num_ranks: int) -> tuple[KvSource, ...]:
    """Endpoints per rank: SGLang uses consecutive ports. A wildcard address becomes loopback."""

    def of_rank(endpoint: str, rank: int) -> str:
        host, _, port = endpoint.rpartition(":")
        host = "tcp://127.0.0.1" if host in ("tcp://*", "tcp://0.0.0.0") else host
        return f"{host}:{int(port) + rank}"

    endpoint, replay = config["endpoint"], config.get("replay_endpoint")
    return tuple(
        KvSource(of_rank(endpoint, rank), of_rank(replay, rank) if replay else "")
        for rank in range(num_ranks)
    )


def _max_running(loads: Any, clock: Clock) -> int:
    """Maximum of running requests, which the schedulers decide and report with their load."""
    from time import sleep

    end = clock.monotonic() + _FIRST_LOAD_S
    while clock.monotonic() < end:
        max_running = max((int(each.max_running_requests) for each in loads.read_all()), default=0)
        if max_running:
            return max_running
        sleep(0.02)
    raise EngineFailed("SGLang's schedulers report no load", engine="sglang")


def _metrics_folder() -> str | None:
    """Folder with the metrics of SGLang's processes (multiprocess mode of prometheus_client)."""
    from sglang.srt.utils import common

    folder = getattr(common, "prometheus_multiproc_dir", None)
    return None if folder is None else str(Path(os.fspath(folder.name)))
