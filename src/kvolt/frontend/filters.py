"""Who of a model's workers takes what only some engines do: `Request.extra`, by what they registered with."""

from __future__ import annotations

import msgspec

from kvolt.core.errors import InvalidRequest
from kvolt.frontend.models import Model
from kvolt.frontend.openai_api.headers import RequestHints
from kvolt.runtime.endpoint.address import Instance
from kvolt.runtime.plane.wire import MALFORMED

_REMEDIES = {
    "vllm_xargs": "leave it out, or serve the model with --engine vllm",
    "prompt_embeds": "send a prompt, or serve the model with --engine vllm --arg engine_args.enable_prompt_embeds=true "
    "(and no prefill workers)",
}


class _Taking(msgspec.Struct, frozen=True):
    """An EngineInfo of which only this is read."""

    extras: tuple[str, ...] = ()


_decode_taking = msgspec.msgpack.Decoder(_Taking).decode


def to_takers(model: Model, said: RequestHints, name: str) -> RequestHints:
    """With only those workers allowed that take it. InvalidRequest where nobody does, with what can be done."""
    candidates = model.candidates()
    takers = [each.id for each in candidates if name in _extras(each)]
    if len(takers) == len(candidates):
        return said
    allowed = said.routing.allowed
    if allowed:
        takers = [each for each in takers if each in allowed]
    if not takers:
        raise InvalidRequest(
            f"no worker of {model.name!r} takes {name}: {_REMEDIES.get(name, 'leave it out')}", param=name
        )
    routing = msgspec.structs.replace(said.routing, allowed=tuple(takers))
    return msgspec.structs.replace(said, routing=routing)


def _extras(instance: Instance) -> tuple[str, ...]:
    try:
        return _decode_taking(instance.info).extras
    except MALFORMED:
        return ()
