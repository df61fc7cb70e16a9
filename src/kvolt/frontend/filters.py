"""Restricts requests with optional features (`Request.extra`) to workers that support them."""

from __future__ import annotations

import msgspec

from kvolt.core.errors import InvalidRequest
from kvolt.frontend.models import Model
from kvolt.frontend.openai_api.headers import RequestHints

_REMEDIES = {
    "vllm_xargs": "omit it, or serve the model with --engine vllm",
    "prompt_embeds": "send a prompt, or serve the model with --engine vllm --arg engine_args.enable_prompt_embeds=true "
    "(and no prefill workers)",
}


def require_extra(model: Model, hints: RequestHints, name: str) -> RequestHints:
    """Restrict the allowed workers to those that support an extra; raises InvalidRequest if there are none."""
    candidates, infos = model.candidates(), model.registrations.infos()
    supporting = [each.id for each in candidates if (info := infos.get(each.id)) and name in info.extras]
    if len(supporting) == len(candidates):
        return hints
    allowed = hints.routing.allowed
    if allowed:
        supporting = [each for each in supporting if each in allowed]
    if not supporting:
        raise InvalidRequest(
            f"no worker of model {model.name!r} supports {name}: {_REMEDIES.get(name, 'omit it')}", param=name
        )
    routing = msgspec.structs.replace(hints.routing, allowed=tuple(supporting))
    return msgspec.structs.replace(hints, routing=routing)
