"""Restricts requests with optional features (`Request.extra`) to workers that support them."""

from __future__ import annotations

import msgspec

from kvolt.core.errors import InvalidRequest
from kvolt.frontend.models import Model
from kvolt.frontend.openai_api.headers import RequestHints
from kvolt.runtime.endpoint.address import Instance
from kvolt.runtime.plane.wire import MALFORMED

_REMEDIES = {
    "vllm_xargs": "omit it, or serve the model with --engine vllm",
    "prompt_embeds": "send a prompt, or serve the model with --engine vllm --arg engine_args.enable_prompt_embeds=true "
    "(and no prefill workers)",
}


class _Extras(msgspec.Struct, frozen=True):
    """Partial EngineInfo."""

    extras: tuple[str, ...] = ()


_decode_extras = msgspec.msgpack.Decoder(_Extras).decode


def require_extra(model: Model, hints: RequestHints, name: str) -> RequestHints:
    """Restrict the allowed workers to those that support an extra; raises InvalidRequest if there are none."""
    candidates = model.candidates()
    supporting = [each.id for each in candidates if name in _extras(each)]
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


def _extras(instance: Instance) -> tuple[str, ...]:
    try:
        return _decode_extras(instance.info).extras
    except MALFORMED:
        return ()
