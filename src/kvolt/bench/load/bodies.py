"""Encoding of requests: OpenAI chat and completions bodies in HTTP/1.1. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit

import msgspec

from kvolt import __version__
from kvolt.bench.load.workloads import Message, Prompt
from kvolt.core.errors import ConfigError
from kvolt.runtime.network import join_address

_WORD_LIST = """
the of and to in is that it for on with as are this be by from at have or one had not but what all were when we
there can an your which their said if do will each about how up out them then she many some so these would other
into has more her two like him see time could no make than first been its who now people my made over did down only
way find use may water long little very after words called just where most know get through back much go good new
write our me man too any day same right look think also around another came come work three must because does part
even place well such here take why help put different away again off went old number great tell men say small every
found still between name should home big give air line set own under read last never us left end along while might
next sound below saw something thought both few those always show large often together asked house world going want
"""
_WORDS = tuple(_WORD_LIST.split())
"""Words that are one token each, after a space, in common vocabularies."""


class Endpoint(StrEnum):
    """Request type."""

    CHAT = "chat"
    """Chat messages of words."""
    COMPLETIONS = "completions"
    """Completion prompt of words."""
    TOKENS = "tokens"
    """Completion prompt of token ids, with exact lengths, if the server supports them."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Address and API path of a server."""

    host: str
    port: int
    path: str
    """Base path of the API, for example /v1."""
    secure: bool = False
    api_key: str | None = None

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)

    @property
    def url(self) -> str:
        return f"http{'s' if self.secure else ''}://{self.address}{self.path}"

    def get(self, path: str) -> bytes:
        return self._head("GET", path) + b"\r\n"

    def post(self, path: str, body: bytes) -> bytes:
        head = self._head("POST", path)
        return b"%sContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (head, len(body), body)

    def _head(self, method: str, path: str) -> bytes:
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        return (
            f"{method} {self.path}{path} HTTP/1.1\r\nHost: {self.address}\r\n"
            f"User-Agent: kvolt-bench/{__version__}\r\nAccept: */*\r\n{key}"
        ).encode()


def parse_target(url: str, api_key: str | None = None) -> Target:
    """Parse a server URL; the scheme and /v1 are optional."""
    remedy = "write it as http://HOST:PORT"
    text = url.strip()
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(f"invalid URL {text!r}", key="url", remedy=remedy)
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"invalid URL {text}: {error}", key="url", remedy=remedy) from error
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or port == 0
        or parts.query
        or parts.username
    ):
        raise ConfigError(f"invalid server URL {text}", key="url", remedy=remedy)
    key = (api_key or "").strip()
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("the API key contains invalid characters", key="api_key", remedy="check --api-key")
    path = re.sub(r"/(chat/)?completions$", "", parts.path.rstrip("/"))
    secure = parts.scheme == "https"
    return Target(
        host=parts.hostname,
        port=port or (443 if secure else 80),
        path=path if re.search(r"/v\d\w*(/|$)", path) else f"{path}/v1",
        secure=secure,
        api_key=key or None,
    )


class RequestMaker:
    """Encodes the requests of one run to one server."""

    def __init__(
        self, target: Target, model: str, endpoint: Endpoint, fields: dict[str, Any], ignore_eos: bool = True
    ) -> None:
        self._target = target
        self._endpoint = endpoint
        self._fields: dict[str, Any] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if ignore_eos else {}),
        }
        self._more = fields

    def request(self, prompt: Prompt) -> bytes:
        body = {**self._fields, "max_tokens": prompt.output_tokens}
        if self._endpoint is Endpoint.CHAT:
            path = "/chat/completions"
            body["messages"] = [
                {"role": message.role, "content": _text(message)} for message in prompt.messages
            ]
        else:
            path = "/completions"
            body["prompt"] = self._prompt(prompt.messages)
        return self._target.post(path, msgspec.json.encode({**body, **self._more}))

    def _prompt(self, messages: Sequence[Message]) -> str | list[int]:
        if self._endpoint is Endpoint.COMPLETIONS:
            return "\n".join(_text(said) for said in messages)
        return [token for said in messages if not isinstance(said.content, str) for token in said.content]


def _text(said: Message) -> str:
    if isinstance(said.content, str):
        return said.content
    num_words = len(_WORDS)
    return " ".join([_WORDS[token % num_words] for token in said.content])
