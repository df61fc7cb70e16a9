"""Explains how a request would be routed, for operators; on the request plane and the admin port.

The body is a chat or completion request. It is parsed, tokenized and hashed like a request to the public port, but
explained instead of sent: nothing is counted, reserved or admitted.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from kvolt.core.errors import InvalidRequest
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Handoff, LinkCosts, Request
from kvolt.frontend.model import Model, with_allowed_by_role
from kvolt.frontend.models import Models
from kvolt.frontend.openai_api.checks import parse_chat, parse_completion
from kvolt.frontend.openai_api.generation import chat_options, completion_options, list_prompts
from kvolt.frontend.openai_api.headers import parse_hints
from kvolt.frontend.openai_api.requests import ChatRequest, CompletionRequest, GenerationRequest
from kvolt.frontend.openai_api.templating import build_template_input
from kvolt.frontend.worker_request import build_request
from kvolt.journey.links import with_link_costs
from kvolt.journey.prefill import as_prefill_request
from kvolt.journey.prefill_mode import PrefillMode
from kvolt.router.explanation import Explanation, PrefillExplanation, explain_route
from kvolt.router.port import Router
from kvolt.router.service.client import RemoteRouter
from kvolt.runtime.endpoint.server import OWN_ENDPOINTS, EndpointServer, msgpack_decoder

FRONTEND_EXPLAIN_ENDPOINT = f"{OWN_ENDPOINTS}frontend.explain"
"""Endpoint on the request plane of every frontend; a drain does not wait for it."""


class ExplainRoute(msgspec.Struct, frozen=True):
    """Request for an Explanation."""

    body: bytes
    """JSON as for /v1/chat/completions if it has `messages`, else as for /v1/completions. `model` may be omitted if
    there is only one."""


class _Kind(msgspec.Struct):
    messages: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class RouteExplainer:
    """Handler of ExplainRoute."""

    def __init__(self, models: Models, process: str) -> None:
        self._models = models
        self._process = process

    def register_endpoint(self, server: EndpointServer) -> None:
        server.register(
            FRONTEND_EXPLAIN_ENDPOINT,
            InstanceId(""),
            server.wrap_generator(self._serve, msgpack_decoder(ExplainRoute)),
        )

    async def _serve(self, request_body: ExplainRoute) -> AsyncIterator[Explanation]:
        yield await self.explain(request_body.body)

    async def explain(self, body: bytes) -> Explanation:
        """Explain the routing of a request.

        Raises NotFound for an unknown model, InvalidRequest for an invalid body, Unsupported if the router has no
        costs.
        """
        model, request = await self._request(body)
        context = model.journey_context
        view = context.prefill_modes.explain(request)
        if view is None:
            return await self._explain_route(context.router, request)
        workers = await self._explain_route(view.target.router, as_prefill_request(request))
        chosen = next((each.terms.instance for each in workers.candidates if each.terms.is_chosen), None)
        if view.mode is PrefillMode.REMOTE and chosen is not None:
            request = _after_transfer(request, chosen, context.prefill_modes.link_costs_from(chosen))
        explanation = await self._explain_route(context.router, request)
        costs = {mode.value: cost for mode, cost in view.costs.items()}
        prefill = PrefillExplanation(mode=view.mode.value, mode_costs=costs, workers=workers)
        return msgspec.structs.replace(explanation, prefill=prefill)

    async def _explain_route(self, router: Router, request: Request) -> Explanation:
        if isinstance(router, RemoteRouter):
            return await router.explain(request)
        return explain_route(router, request, self._process)

    async def _request(self, body: bytes) -> tuple[Model, Request]:
        try:
            kind = msgspec.json.decode(body, type=_Kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidRequest(f"the body is not a JSON object: {error}", param="body") from error
        parsed = parse_completion(body) if kind.messages is msgspec.UNSET else parse_chat(body)
        generation_request: GenerationRequest = parsed.request
        name = generation_request.model
        model = self._models.single_model() if name is None else self._models.find(name)
        if isinstance(generation_request, ChatRequest):
            options, param = chat_options(generation_request, model.defaults), "messages"
            text = await model.processor.render(
                build_template_input(generation_request, options.tools, parsed.is_large)
            )
            prompts = await model.processor.encode([text], param, bool(generation_request.add_special_tokens))
        else:
            options, param = completion_options(generation_request, model.defaults), "prompt"
            prompts = await _completion_prompts(model, generation_request)
        if len(prompts) != 1:
            raise InvalidRequest("the request must have exactly one prompt", param=param)
        hints = with_allowed_by_role(
            model,
            parse_hints(
                {}, generation_request.nvext, generation_request.cache_salt, generation_request.priority
            ),
        )
        request_id = RequestId("explain")
        return model, build_request(
            request_id, model.card, prompts[0], options, hints, param, lora=model.lora
        )


def _after_transfer(request: Request, prefill_id: InstanceId, link_costs: LinkCosts | None) -> Request:
    """The request as the decode router sees it once that prefill worker has computed the prompt."""
    handoff = Handoff(ticket=b"", prefill_instance=prefill_id)
    return with_link_costs(msgspec.structs.replace(request, handoff=handoff), link_costs)


async def _completion_prompts(model: Model, generation_request: CompletionRequest) -> list[tuple[int, ...]]:
    if generation_request.prompt_embeds is not None:
        raise InvalidRequest("routing of prompt embeddings cannot be explained", param="prompt_embeds")
    prompts = list_prompts(generation_request)
    if isinstance(prompts[0], str):
        texts = [str(prompt) for prompt in prompts]
        return await model.processor.encode(
            texts, "prompt", generation_request.add_special_tokens is not False
        )
    return [tuple(map(int, prompt)) for prompt in prompts]
