"""Messages between the engine and its host, in plain types of kvolt, framed by `engines.framing`."""

from __future__ import annotations

from typing import Any

import msgspec

from kvolt.core.errors import ErrorInfo
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sglang.arguments import SglangArguments

# --- To the host ---------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    spec: EngineSpec
    arguments: SglangArguments
    model: str
    """Folder of the model."""
    folder: str
    """Folder for sockets and other files; exists as long as the host runs."""
    log_level: int


class Generate(msgspec.Struct, frozen=True, array_like=True, tag="generate"):
    """One choice."""

    rid: str
    input_ids: list[int]
    sampling: dict[str, Any]
    """Fields of SGLang's SamplingParams."""
    fields: dict[str, Any] = {}
    """Other fields of SGLang's TokenizedGenerateReqInput."""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    rid: str


class Flush(msgspec.Struct, frozen=True, array_like=True, tag="flush"):
    call: int
    timeout_s: float


class LoadLora(msgspec.Struct, frozen=True, array_like=True, tag="load_lora"):
    call: int
    name: str
    path: str


class UnloadLora(msgspec.Struct, frozen=True, array_like=True, tag="unload_lora"):
    call: int
    name: str


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    pass


Command = Start | Generate | Abort | Flush | LoadLora | UnloadLora | Stop


# --- From the host -------------------------------------------------------------------------------------


class KvSource(msgspec.Struct, frozen=True, array_like=True):
    """Endpoints of a rank's KV events and of their replay."""

    endpoint: str
    replay_endpoint: str


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a running SGLang."""

    version: str
    page_size: int
    context_length: int
    """Maximum tokens of prompt and answer."""
    max_prompt: int
    """Maximum tokens of a prompt."""
    max_total_tokens: int
    max_running_requests: int
    max_batch_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    num_ranks: int = 1
    is_seeded: bool = False
    """Whether seeds are supported (`enable_deterministic_inference`)."""
    has_grammars: bool = False
    has_priorities: bool = False
    has_lora: bool = False
    kv_sources: tuple[KvSource, ...] = ()
    metrics_folder: str | None = None
    bootstrap_port: int | None = None


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    facts: Facts


Logprob = tuple[float | None, int]
"""Logprob and token id. SGLang has no logprob for the first token of a prompt."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Output of a step for one choice."""

    rid: str
    token_ids: list[int]
    finish: dict[str, Any] | None = None
    """SGLang's finish reason: type, matched, message, status_code."""
    cached_tokens: int = 0
    logprobs: list[Logprob] | None = None
    top: list[list[Logprob] | None] | None = None
    prompt_logprobs: list[Logprob] | None = None
    prompt_top: list[list[Logprob] | None] | None = None


class RankLoad(msgspec.Struct, frozen=True, array_like=True):
    rank: int
    running: int
    waiting: int
    used_tokens: int


class Batch(msgspec.Struct, frozen=True, array_like=True, tag="batch"):
    """One message of a scheduler."""

    rows: list[Row]
    loads: list[RankLoad] = []
    kv_rank: int = 0
    kv_number: int = 0
    """Batches of KV events that this rank has published, including those of this step."""


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Result of a call; `error` if it failed."""

    call: int
    error: str | None = None


class Fatal(msgspec.Struct, frozen=True, array_like=True, tag="fatal"):
    error: ErrorInfo


Answer = Ready | Batch | Done | Fatal

decode_command = msgspec.msgpack.Decoder(Command).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
