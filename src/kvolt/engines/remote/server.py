"""What a server says of itself: which kind it is, what it serves, and how its KV is cut into blocks.

Owns the addresses of such facts and their shapes. What an operator has said (`RemoteArguments`) goes before them.
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

from kvolt.core.errors import ConfigError, EngineDied, Unavailable
from kvolt.engines.remote.arguments import RemoteArguments
from kvolt.engines.remote.figures import read_cache_facts
from kvolt.engines.remote.refusals import refusal
from kvolt.runtime.http.client import Fetched, HttpClient

T = TypeVar("T")

_UNKNOWN_SEQS = 256
_UNKNOWN_BATCH_TOKENS = 8192
_UNKNOWN_TOKENS = 1 << 20
"""Of KV, in all: so many that nobody is refused for want of them."""


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    """Of an adapter: the model that it belongs to."""
    owned_by: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Sglang(msgspec.Struct):
    """Of /server_info."""

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
    """Names or folders of the model's files as the server knows them, the likeliest first."""
    context_length: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_batch_tokens: int
    num_ranks: int

    def is_same(self, other: ServerFacts) -> bool:
        """Whether requests and blocks mean the same to both: a server that was started again."""
        mine = (self.kind, self.model, self.context_length, self.block_size)
        return mine == (other.kind, other.model, other.context_length, other.block_size)


async def inspect(client: HttpClient, arguments: RemoteArguments, hint: str | None = None) -> ServerFacts:
    """Ask the server. `hint` is a model that is taken if it is served there. ConfigError for what cannot be attached,
    whatever comes; other errors where it is not there, or not ready."""
    timeout_s = arguments.probe_timeout_s
    models = _decoded(client, await client.fetch("/v1/models", timeout_s), _Models)
    model = _choose(client, models, arguments.model, hint)
    kind = arguments.kind
    if kind == "auto":
        kind = await _kind_of(client, model, timeout_s)
    if kind == "sglang":
        return await _of_sglang(client, arguments, model)
    return await _of_vllm(client, arguments, model)


def _choose(client: HttpClient, models: _Models, wanted: str | None, hint: str | None) -> _Model:
    served = [model for model in models.data if model.parent is None]
    names = [model.id for model in served]
    if not served:
        raise Unavailable(f"{client.url.text} serves no model yet", reason="no_model")
    for name in (wanted, hint):
        if name in names:
            return served[names.index(name)]
        if name is not None and name == wanted:
            raise ConfigError(
                f"{client.url.text} does not serve {wanted!r}",
                key="model",
                remedy=f"served there: {', '.join(names)}",
            )
    return served[0]


async def _kind_of(client: HttpClient, model: _Model, timeout_s: float) -> Literal["vllm", "sglang"]:
    match model.owned_by:
        case "vllm":
            return "vllm"
        case "sglang":
            return "sglang"
    found = await client.fetch("/server_info", timeout_s)
    if found.status == 200 and b"max_total_num_tokens" in found.body:
        return "sglang"
    raise ConfigError(
        f"{client.url.text} is neither vLLM nor SGLang by what it says",
        key="kind",
        remedy="give kind=vllm or kind=sglang if it speaks like one of them",
    )


async def _of_vllm(client: HttpClient, arguments: RemoteArguments, model: _Model) -> ServerFacts:
    found = await client.fetch("/metrics", arguments.probe_timeout_s)
    facts = read_cache_facts(found.body.decode(errors="replace") if found.status == 200 else "")
    return _facts(
        client,
        arguments,
        model,
        kind="vllm",
        sources=(model.root,),
        context=model.max_model_len,
        block_size=facts.block_size,
        num_blocks=facts.num_blocks,
        limits=(None, None, facts.num_ranks),
    )


async def _of_sglang(client: HttpClient, arguments: RemoteArguments, model: _Model) -> ServerFacts:
    found = await client.fetch("/server_info", arguments.probe_timeout_s)
    if found.status == 404:  # its older name
        found = await client.fetch("/get_server_info", arguments.probe_timeout_s)
    told = _decoded(client, found, _Sglang)
    num_tokens, page = told.max_total_num_tokens, told.page_size
    return _facts(
        client,
        arguments,
        model,
        kind="sglang",
        sources=(told.tokenizer_path, told.model_path, model.root),
        context=model.max_model_len or told.context_length,
        block_size=page,
        num_blocks=num_tokens // page if num_tokens and page else None,
        limits=(told.max_running_requests, told.chunked_prefill_size, told.dp_size),
    )


def _facts(
    client: HttpClient,
    arguments: RemoteArguments,
    model: _Model,
    *,
    kind: Literal["vllm", "sglang"],
    sources: tuple[str | None, ...],
    context: int | None,
    block_size: int | None,
    num_blocks: int | None,
    limits: tuple[int | None, int | None, int],
) -> ServerFacts:
    block_size = arguments.block_size or block_size
    missing = "max_model_len" if not context else "its block size" if not block_size else None
    if not context or not block_size:
        raise ConfigError(
            f"{client.url.text} does not tell {missing}",
            key="block_size" if context else "kind",
            remedy="give block_size=TOKENS" if context else "attach a vLLM or an SGLang server",
        )
    max_num_seqs, batch_tokens, num_ranks = limits
    return ServerFacts(
        kind=kind,
        model=model.id,
        sources=tuple(dict.fromkeys(each for each in (*sources, model.id) if each)),
        context_length=context,
        block_size=block_size,
        num_blocks=arguments.kv_blocks or num_blocks or _UNKNOWN_TOKENS // block_size,
        max_num_seqs=arguments.max_num_seqs or max_num_seqs or _UNKNOWN_SEQS,
        max_batch_tokens=batch_tokens if batch_tokens and batch_tokens > 0 else _UNKNOWN_BATCH_TOKENS,
        num_ranks=num_ranks,
    )


def _decoded(client: HttpClient, found: Fetched, kind: type[T]) -> T:
    url = client.url.text
    if found.status in (401, 403):
        raise ConfigError(
            f"{url} does not take our key (status {found.status})", key="api_key", remedy="give its api_key"
        )
    if found.status == 404:
        raise ConfigError(f"{url} is no OpenAI server", key="url", remedy="name the server, without a path")
    if found.status >= 500:  # it starts, or ends
        raise Unavailable(f"{url} is not ready (status {found.status})", reason="not_ready")
    if found.status != 200:
        raise refusal(url, found.status, found.body)
    try:
        return msgspec.json.decode(found.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineDied(f"{url} says of itself what cannot be read: {error}", engine="remote") from error
