"""Which models a server has: asked over the same client, before a run."""

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
    """A Handler that keeps the body."""

    def __init__(self) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun = False
        self.status = 0
        self.body = b""
        self.failure: tuple[str, str] | None = None

    def sent(self, now: float) -> None: ...

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> BodyReader:
        self.begun = True
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


async def find_model(client: HttpClient, target: Target, wanted: str | None) -> str:
    """The wanted model, or the only one. ConfigError when nobody answers there, or somebody must choose."""
    answer = _WholeAnswer()
    call = client.submit(target.get("/models"), answer)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await answer.over
    except TimeoutError:
        client.give_up(call, Failure.TOTAL_TIMEOUT, f"it lists no models within {_PATIENCE_S:g} s")
    if answer.failure is not None:
        kind, message = answer.failure
        if kind == Failure.CONNECT or wanted is None:
            raise ConfigError(
                f"nothing answers at {target.url}: {message}",
                key="url",
                remedy="start a server with `kvolt serve`, or name another with --url",
            )
        return wanted
    if wanted is not None:
        return wanted  # a server may well answer without listing
    if answer.status in (401, 403):
        raise ConfigError(
            f"{target.url} answers {answer.status}: {error_message(answer.body)}",
            key="api_key",
            remedy="give a key with --api-key or OPENAI_API_KEY",
        )
    try:
        names = [model.id for model in msgspec.json.decode(answer.body, type=_Listing).data]
    except msgspec.MsgspecError:
        raise ConfigError(
            f"{target.url}/models answers {answer.status} and no list of models",
            key="url",
            remedy="check --url, or name the model with --model",
        ) from None
    if len(names) == 1:
        return names[0]
    if not names:
        raise ConfigError(f"{target.url} serves no model yet", key="model", remedy="see `kvolt status`")
    raise ConfigError(
        f"{target.url} serves {len(names)} models: {', '.join(names)}",
        key="model",
        remedy="choose with --model NAME",
    )
