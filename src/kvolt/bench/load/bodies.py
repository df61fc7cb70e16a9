"""Encoding of requests: OpenAI chat and completions bodies. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import msgspec

from kvolt.bench.load.workloads import Message, Prompt

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


class RequestMaker:
    """Encodes the requests of one run."""

    def __init__(
        self, model: str, endpoint: Endpoint, fields: dict[str, Any], ignore_eos: bool = True
    ) -> None:
        self._endpoint = endpoint
        self._fields: dict[str, Any] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if ignore_eos else {}),
        }
        self._more = fields

    def request(self, prompt: Prompt) -> tuple[str, bytes]:
        """Path and body of a request."""
        body = {**self._fields, "max_tokens": prompt.output_tokens}
        if self._endpoint is Endpoint.CHAT:
            path = "/chat/completions"
            body["messages"] = [
                {"role": message.role, "content": _text(message)} for message in prompt.messages
            ]
        else:
            path = "/completions"
            body["prompt"] = self._prompt(prompt.messages)
        return path, msgspec.json.encode({**body, **self._more})

    def _prompt(self, messages: Sequence[Message]) -> str | list[int]:
        if self._endpoint is Endpoint.COMPLETIONS:
            return "\n".join(_text(message) for message in messages)
        contents = [message.content for message in messages]
        return [token for content in contents if not isinstance(content, str) for token in content]


def _text(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    num_words = len(_WORDS)
    return " ".join([_WORDS[token % num_words] for token in message.content])
