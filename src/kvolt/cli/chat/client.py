"""Client of OpenAI-compatible servers: models, streamed answers, and the mapping of HTTP errors.

Knows nothing of terminals or conversations. Errors carry their remedy as a field.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from kvolt.cli.chat.stream import ChunkReader, Piece, error_message, one_line, read_json
from kvolt.core.errors import (
    ConnectFailed,
    DeadlineExceeded,
    InvalidRequest,
    KvoltError,
    NotFound,
    Overloaded,
    ProtocolError,
    Unavailable,
    Unsupported,
    WorkerLost,
    with_fields,
)
from kvolt.runtime.http.client import HttpClient
from kvolt.runtime.http.client_call import Timeouts
from kvolt.runtime.http.server_url import ServerUrl
from kvolt.runtime.http.sse import DONE, EventReader
from kvolt.runtime.http.streamed_response import StreamedResponse

ANSWER_LIMIT_BYTES = 64 << 20
_OTHER_LIMIT_BYTES = 4 << 20
"""Maximum size of a model list or an error."""
_START = "start a server with `kvolt serve`, or set --url"
_SET_KEY = "set --api-key, or OPENAI_API_KEY with --url"


class ChatClient:
    """Client of one server. Each request uses its own connection; closing it cancels the request."""

    def __init__(self, server: ServerUrl, timeout_s: float = 300.0, connect_s: float = 10.0) -> None:
        self._server = server
        self._connect_s = connect_s
        self.url = server.text
        self._timeouts = Timeouts(timeout_s, timeout_s)

    async def models(self) -> list[str]:
        """Names of the served models, without kvolt's aliases of them."""
        async with self._open("/models") as response:
            listed = read_json(await response.read(_OTHER_LIMIT_BYTES))
        data = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(data, list):
            raise self._incompatible("invalid model list")
        models = {str(model["id"]): model for model in data if isinstance(model, dict) and "id" in model}
        return [name for name, model in models.items() if not _is_alias(model, models)]

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[Piece, None]:
        """Stream an answer. Closing the iterator cancels the request."""
        # json accepts lone surrogates, msgspec does not.
        async with self._open("/chat/completions", json.dumps(body).encode()) as response:
            reader = ChunkReader()
            if not response.headers.get("content-type", "").lower().startswith("text/event-stream"):
                yield reader.read(await response.read(ANSWER_LIMIT_BYTES))  # the server does not stream
                return
            async for event in _events(response):
                if event == DONE:
                    return
                yield reader.read(event)
            if not reader.finished:
                raise WorkerLost("the stream ended early", address=self.url)

    @asynccontextmanager
    async def _open(self, path: str, body: bytes | None = None) -> AsyncIterator[StreamedResponse]:
        async with HttpClient(self._server, connect_s=self._connect_s) as client:
            try:
                async with client.open(path, body, self._timeouts) as response:
                    if response.status != 200:
                        body = await response.read(_OTHER_LIMIT_BYTES)
                        raise _response_error(response.status, response.headers, body)
                    yield response
            except ConnectFailed as error:
                raise with_fields(error, remedy=_START) from error
            except WorkerLost as error:
                raise WorkerLost(f"the answer was cut off: {error.message}", **error.fields) from error
            except ProtocolError as error:
                if error.fields.get("rule") != "http":
                    raise
                raise self._incompatible(error.message) from error

    def _incompatible(self, why: str) -> ProtocolError:
        return ProtocolError(f"{self.url} is not an OpenAI-compatible server: {why}", rule="openai")


async def _events(response: StreamedResponse) -> AsyncIterator[bytes]:
    reader = EventReader()
    num_bytes = 0
    async for data in response:
        num_bytes += len(data)
        if num_bytes > ANSWER_LIMIT_BYTES:
            raise ProtocolError(f"the answer is over {ANSWER_LIMIT_BYTES} bytes", rule="answer size")
        for event in reader.feed(data):
            yield event


def _response_error(status: int, headers: Mapping[str, str], body: bytes) -> KvoltError:
    """Map a response other than 200 to an error."""
    try:
        text = error_message(read_json(body), body)
    except ProtocolError:
        text = one_line(body.decode(errors="replace"))
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else ""
    message = f"the server responded {status}: {text or phrase}"
    match status:
        case 401 | 403:
            return InvalidRequest(message, remedy=_SET_KEY)
        case 404:
            return NotFound(message, remedy="check --url and --model")
        case 408 | 504:
            return DeadlineExceeded(message, stage="total")
        case 429 | 503:
            wait_s = headers.get("retry-after", "")
            if wait_s.isdecimal():
                message += f" (try again in {wait_s} s)"
            return Overloaded(message) if status == 429 else Unavailable(message)
        case 501:
            return Unsupported(message)
        case _ if 300 <= status < 400:
            return InvalidRequest(f"the server redirects to {one_line(headers.get('location', '?'))}")
        case _ if 400 <= status < 500:
            return InvalidRequest(message)
        case _:
            return KvoltError(message)


def _is_alias(model: Mapping[str, Any], listed: Mapping[str, Any]) -> bool:
    """Whether an entry of kvolt's list is another name of a listed model."""
    name = model.get("alias_of")
    return isinstance(name, str) and name in listed
