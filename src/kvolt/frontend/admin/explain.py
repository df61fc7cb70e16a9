"""Where would this request go, and why? Answered for operators, on the request plane and the admin port.

The question is the body of a chat or a completion; it is read, put into tokens and hashed as if it had come to the
public port, and then explained instead of sent. Nothing is counted, booked or admitted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from kvolt.core.errors import InvalidRequest
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Request
from kvolt.frontend.models import Model, Models
from kvolt.frontend.openai_api.generation import chat_options, completion_options, prompts_of
from kvolt.frontend.openai_api.headers import hints
from kvolt.frontend.openai_api.requests import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    parse_chat,
    parse_completion,
)
from kvolt.frontend.openai_api.templating import template_input
from kvolt.frontend.roles import with_roles
from kvolt.frontend.worker_request import build_request
from kvolt.router.explanation import Explanation, explain_route
from kvolt.router.service.client import RemoteRouter
from kvolt.runtime.endpoint.server import OWN_ENDPOINTS, EndpointServer, decoder

FRONTEND_EXPLAIN_ENDPOINT = f"{OWN_ENDPOINTS}frontend.explain"
"""On the request plane of every frontend; no work that a drain would wait for."""


class ExplainRoute(msgspec.Struct, frozen=True):
    """Answered by one Explanation."""

    body: bytes
    """JSON as for /v1/chat/completions if it has `messages`, else as for /v1/completions. Without `model`: the only
    one."""


class _Kind(msgspec.Struct):
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    model: str | None = None


class RouteExplainer:
    """See the module."""

    def __init__(self, models: Models, process: str) -> None:
        self._models = models
        self._process = process

    def add_to(self, server: EndpointServer) -> None:
        server.add(
            FRONTEND_EXPLAIN_ENDPOINT, InstanceId(""), server.generator(self._serve, decoder(ExplainRoute))
        )

    async def _serve(self, question: ExplainRoute) -> AsyncIterator[Explanation]:
        yield await self.explain(question.body)

    async def explain(self, body: bytes) -> Explanation:
        """NotFound for a model that is not served; InvalidRequest for a body that could not be; Unsupported where the
        router weighs nothing."""
        model, request = await self._request(body)
        router = model.road.router
        if isinstance(router, RemoteRouter):
            return await router.explain(request)
        return explain_route(router, request, self._process)

    async def _request(self, body: bytes) -> tuple[Model, Request]:
        try:
            kind = msgspec.json.decode(body, type=_Kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the body is no JSON object: {error}", param="body") from error
        if kind.model is None:
            body = _with_model(body, self._models.only().name)
        parsed = parse_completion(body) if kind.messages is msgspec.UNSET else parse_chat(body)
        asked: GenerationRequest = parsed.request
        model = self._models.find(asked.model)
        if isinstance(asked, ChatRequest):
            options, param = chat_options(asked, model.defaults), "messages"
            text = await model.processor.render(template_input(asked, options.tools, parsed.is_large))
            prompts = await model.processor.encode([text], param, bool(asked.add_special_tokens))
        else:
            options, param = completion_options(asked, model.defaults), "prompt"
            prompts = await _completion_prompts(model, asked)
        if len(prompts) != 1:
            raise InvalidRequest("only one prompt can be explained at a time", param=param)
        said = with_roles(model, hints({}, asked.nvext, asked.cache_salt, asked.priority))
        request_id = RequestId("explain")
        return model, build_request(request_id, model.card, prompts[0], options, said, param, lora=model.lora)


async def _completion_prompts(model: Model, asked: CompletionRequest) -> list[tuple[int, ...]]:
    if asked.prompt_embeds is not None:
        raise InvalidRequest("where a prompt of vectors goes is not explained", param="prompt_embeds")
    prompts = prompts_of(asked)
    if isinstance(prompts[0], str):
        texts = [str(prompt) for prompt in prompts]
        return await model.processor.encode(texts, "prompt", asked.add_special_tokens is not False)
    return [tuple(map(int, prompt)) for prompt in prompts]


def _with_model(body: bytes, name: str) -> bytes:
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    return msgspec.json.encode({**fields, "model": name})
