"""Query of the server's models before a run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec

from kvolt.bench.load.answer import error_message
from kvolt.bench.load.bodies import Target
from kvolt.bench.load.client import HttpClient
from kvolt.bench.load.http_reader import BodyReader
from kvolt.bench.load.sample import Failure
from kvolt.core.errors import ConfigError

_MAX_LISTING_BYTES = 4 << 20
_PATIENCE_S = 30.0


class _Model(msgspec.Struct):
    id: str


class _Listing(msgspec.Struct):
    data: list[_Model]


class _WholeAnswer:
    """Handler that collects the whole body."""

    def __init__(self) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_started = False
        self.status = 0
        self.body = b""
        self.failure: tuple[str, str] | None = None

    def sent(self, now: float) -> None: ...

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> BodyReader:
        self.has_started = True
        self.status = status
        return self._keep

    def _keep(self, pieces: list[bytes], now: float) -> None:
        if len(self.body) < _MAX_LISTING_BYTES:
            self.body += b"".join(pieces)

    def end(self, now: float) -> None:
        self._over()

    def fail(self, kind: str, message: str, now: float) -> None:
        self.failure = kind, message
        self._over()

    def _over(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


async def find_model(client: HttpClient, target: Target, requested: str | None) -> str:
    """The requested model, or the only one. Raises ConfigError if the server is unreachable or has several models."""
    answer = _WholeAnswer()
    call = client.submit(target.get("/models"), answer)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await answer.over
    except TimeoutError:
        client.give_up(call, Failure.TOTAL_TIMEOUT, f"no model list within {_PATIENCE_S:g} s")
    if answer.failure is not None:
        kind, message = answer.failure
        if kind == Failure.CONNECT or requested is None:
            raise ConfigError(
                f"{target.url} is unreachable: {message}",
                key="url",
                remedy="start a server with `kvolt serve`, or choose another with --url",
            )
        return requested
    if requested is not None:
        return requested  # not every server lists its models
    if answer.status in (401, 403):
        raise ConfigError(
            f"{target.url} responds {answer.status}: {error_message(answer.body)}",
            key="api_key",
            remedy="set --api-key or OPENAI_API_KEY",
        )
    try:
        names = [model.id for model in msgspec.json.decode(answer.body, type=_Listing).data]
    except msgspec.MsgspecError:
        raise ConfigError(
            f"{target.url}/models responds {answer.status} without a model list",
            key="url",
            remedy="check --url, or set --model",
        ) from None
    if len(names) == 1:
        return names[0]
    if not names:
        raise ConfigError(f"{target.url} serves no model", key="model", remedy="see `kvolt status`")
    raise ConfigError(
        f"{target.url} serves {len(names)} models: {', '.join(names)}",
        key="model",
        remedy="choose with --model NAME",
    )
