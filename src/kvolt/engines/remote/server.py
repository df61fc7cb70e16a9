"""Properties of a server: kind, model, block size and limits, from its API. `RemoteArguments` override them."""

from __future__ import annotations

from typing import Literal, TypeVar, cast

import msgspec

from kvolt.core.errors import ConfigError, EngineDied, Unavailable
from kvolt.engines.remote.arguments import RemoteArguments
from kvolt.engines.remote.refusals import refusal
from kvolt.engines.remote.server_load import read_cache_facts
from kvolt.runtime.http.client import HttpClient
from kvolt.runtime.http.streamed_response import Fetched

T = TypeVar("T")

_UNKNOWN_SEQS = 256
_UNKNOWN_BATCH_TOKENS = 8192
_UNKNOWN_TOKENS = 1 << 20
"""Default KV size in tokens: large enough that no request is refused for it."""


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    """Base model of a LoRA adapter."""
    owned_by: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Sglang(msgspec.Struct):
    """Response of /server_info."""

    page_size: int | None = None
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    chunked_prefill_size: int | None = None
    context_length: int | None = None
    dp_size: int = 1
    model_path: str | None = None
    tokenizer_path: str | None = None


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    kind: Literal["vllm", "sglang"]
    model: str
    sources: tuple[str, ...]
    """Possible names or folders of the model's files, most likely first."""
    context_length: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_batch_tokens: int
    num_ranks: int

    def is_same(self, other: ServerFacts) -> bool:
        """Whether a restarted server is equivalent: same model and blocks."""
        mine = (self.kind, self.model, self.context_length, self.block_size)
        return mine == (other.kind, other.model, other.context_length, other.block_size)


class _Reported(msgspec.Struct, frozen=True, kw_only=True):
    """What a server reports about itself."""

    sources: tuple[str | None, ...]
    context_length: int | None
    block_size: int | None
    num_blocks: int | None
    max_num_seqs: int | None = None
    max_batch_tokens: int | None = None
    num_ranks: int = 1


async def inspect(client: HttpClient, arguments: RemoteArguments, hint: str | None = None) -> ServerFacts:
    """Query the server. `hint`: model to use if it is served. ConfigError if it can never be attached; other errors
    if it is not reachable or not ready."""
    timeout_s = arguments.probe_timeout_s
    models = _decoded(client, await client.fetch("/v1/models", timeout_s), _Models)
    model = _choose(client, models, arguments.model, hint)
    kind = arguments.kind
    if kind == "auto":
        kind = await _kind_of(client, model, timeout_s)
    reported = await (_of_sglang if kind == "sglang" else _of_vllm)(client, model, timeout_s)
    block_size = arguments.block_size or reported.block_size
    if not reported.context_length:
        raise ConfigError(
            f"{client.url.text} does not report max_model_len",
            key="kind",
            remedy="attach a vLLM or an SGLang server",
        )
    if not block_size:
        raise ConfigError(
            f"{client.url.text} does not report its block size",
            key="block_size",
            remedy="set block_size=TOKENS",
        )
    batch_tokens = reported.max_batch_tokens
    return ServerFacts(
        kind=kind,
        model=model.id,
        sources=tuple(dict.fromkeys(each for each in (*reported.sources, model.id) if each)),
        context_length=reported.context_length,
        block_size=block_size,
        num_blocks=arguments.kv_blocks or reported.num_blocks or _UNKNOWN_TOKENS // block_size,
        max_num_seqs=arguments.max_num_seqs or reported.max_num_seqs or _UNKNOWN_SEQS,
        max_batch_tokens=batch_tokens if batch_tokens and batch_tokens > 0 else _UNKNOWN_BATCH_TOKENS,
        num_ranks=reported.num_ranks,
    )


def _choose(client: HttpClient, models: _Models, model: str | None, hint: str | None) -> _Model:
    served = [each for each in models.data if each.parent is None]
    names = [each.id for each in served]
    if not served:
        raise Unavailable(f"{client.url.text} serves no model yet", reason="no_model")
    for name in (model, hint):
        if name in names:
            return served[names.index(name)]
        if name is not None and name == model:
            raise ConfigError(
                f"{client.url.text} does not serve {model!r}",
                key="model",
                remedy=f"served models: {', '.join(names)}",
            )
    return served[0]


async def _kind_of(client: HttpClient, model: _Model, timeout_s: float) -> Literal["vllm", "sglang"]:
    if model.owned_by in ("vllm", "sglang"):
        return cast('Literal["vllm", "sglang"]', model.owned_by)
    response = await client.fetch("/server_info", timeout_s)
    if response.status == 200 and b"max_total_num_tokens" in response.body:
        return "sglang"
    if model.owned_by == "kvolt":
        raise ConfigError(
            f"{client.url.text} is a kvolt frontend, not a vLLM or SGLang server",
            key="url",
            remedy="join its cluster with --join HOST:PORT, the address of its --discovery-join-listen",
        )
    raise ConfigError(
        f"{client.url.text} was recognized neither as vLLM nor as SGLang",
        key="kind",
        remedy="set kind=vllm or kind=sglang if it is compatible with one of them",
    )


async def _of_vllm(client: HttpClient, model: _Model, timeout_s: float) -> _Reported:
    response = await client.fetch("/metrics", timeout_s)
    facts = read_cache_facts(response.body.decode(errors="replace") if response.status == 200 else "")
    return _Reported(
        sources=(model.root,),
        context_length=model.max_model_len,
        block_size=facts.block_size,
        num_blocks=facts.num_blocks,
        num_ranks=facts.num_ranks,
    )


async def _of_sglang(client: HttpClient, model: _Model, timeout_s: float) -> _Reported:
    response = await client.fetch("/server_info", timeout_s)
    if response.status == 404:  # name in older versions
        response = await client.fetch("/get_server_info", timeout_s)
    info = _decoded(client, response, _Sglang)
    num_tokens, page = info.max_total_num_tokens, info.page_size
    return _Reported(
        sources=(info.tokenizer_path, info.model_path, model.root),
        context_length=model.max_model_len or info.context_length,
        block_size=page,
        num_blocks=num_tokens // page if num_tokens and page else None,
        max_num_seqs=info.max_running_requests,
        max_batch_tokens=info.chunked_prefill_size,
        num_ranks=info.dp_size,
    )


def _decoded(client: HttpClient, response: Fetched, kind: type[T]) -> T:
    url = client.url.text
    if response.status in (401, 403):
        raise ConfigError(
            f"{url} rejected the API key (status {response.status})", key="api_key", remedy="set api_key"
        )
    if response.status == 404:
        raise ConfigError(
            f"{url} is not an OpenAI server", key="url", remedy="set the server's URL without a path"
        )
    if response.status >= 500:  # it is starting or shutting down
        raise Unavailable(f"{url} is not ready (status {response.status})", reason="not_ready")
    if response.status != 200:
        raise refusal(url, response.status, response.body)
    try:
        return msgspec.json.decode(response.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineDied(f"{url} sent a malformed description: {error}", engine="remote") from error
