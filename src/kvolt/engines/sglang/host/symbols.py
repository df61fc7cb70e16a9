"""SGLang symbols that the adapter uses, checked at start so that an incompatible version fails early."""

from __future__ import annotations

from kvolt.engines.external.requirements import Requirement

_IO = "sglang.srt.managers.io_struct"
_ENGINE = "sglang.srt.entrypoints.engine:Engine"
_OUTPUT = f"{_IO}:BatchTokenIDOutput"
_INPUT = f"{_IO}:TokenizedGenerateReqInput"
_PARAMS = "sglang.srt.sampling.sampling_params:SamplingParams"
_PARTS = "sglang.srt.managers.scheduler_components"

REQUIREMENT = Requirement(
    user="the sglang engine",
    distributions=("sglang",),
    tested=("0.5.23",),
    symbols=(
        f"{_ENGINE}._launch_subprocesses",
        f"{_ENGINE}._launch_detokenizer_subprocesses",
        "sglang.srt.server_args:ServerArgs.resolve_once",
        "sglang.srt.server_args:ServerArgs.kv_events_config",
        "sglang.srt.server_args:PortArgs.detokenizer_ipc_name",
        "sglang.srt.server_args:PortArgs.tokenizer_ipc_name",
        "sglang.srt.server_args:PortArgs.scheduler_input_ipc_name",
        "sglang.srt.arg_groups.overrides:resolved_view",
        "sglang.srt.arg_groups.overrides:model_config_of",
        "sglang.srt.managers.scheduler:run_scheduler_process",
        "sglang.srt.managers.load_snapshot:create_load_snapshot_reader",
        "sglang.srt.managers.load_snapshot:LoadSnapshot.num_used_tokens",
        "sglang.srt.managers.disagg_service:start_disagg_service",
        "sglang.srt.observability.req_time_stats:APIServerReqTimeStats",
        "sglang.srt.disaggregation.kv_events:KVEventsConfig.bind",
        "sglang.srt.disaggregation.kv_events:ZmqEventPublisher.publish",
        f"{_PARTS}.kv_events_publisher:SchedulerKvEventsPublisher.publish_kv_events",
        f"{_PARTS}.output_streamer:SchedulerOutputStreamer.stream_output",
        *(f"{_IO}:{name}" for name in ("sock_send", "sock_recv", "AbortReq", "FlushCacheReqInput")),
        *(f"{_IO}:{name}" for name in ("LoadLoRAAdapterReqInput", "UnloadLoRAAdapterReqInput")),
        *(f"{_OUTPUT}.{name}" for name in ("output_ids", "finished_reasons", "cached_tokens", "dp_ranks")),
        *(f"{_OUTPUT}.output_{name}_logprobs_{part}" for name in ("token", "top") for part in ("val", "idx")),
        *(f"{_OUTPUT}.input_{name}_logprobs_{part}" for name in ("token", "top") for part in ("val", "idx")),
        *(
            f"{_INPUT}.{name}"
            for name in ("input_ids", "sampling_params", "cache_salt", "lora_id", "lora_name")
        ),
        *(f"{_INPUT}.{name}" for name in ("routed_dp_rank", "priority", "logprob_start_len", "time_stats")),
        *(f"{_INPUT}.{name}" for name in ("bootstrap_host", "bootstrap_port", "bootstrap_room")),
        *(
            f"{_PARAMS}.{name}"
            for name in ("sampling_seed", "min_new_tokens", "structural_tag", "logit_bias")
        ),
    ),
    remedy="install SGLang for your hardware as in its documentation",
)
