"""What a request brings for vLLM alone (`Request.extra`), as the extra arguments of its sampling parameters.

`vllm_xargs` go as they are, `prompt_embeds` in the prompt's place. `logits_processors` are vLLM's own, which are loaded
at its start and act on a request by the arguments that it brings: so one that is asked for must be loaded, and must be
told something. All else is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from importlib.metadata import entry_points
from typing import Any

import msgspec

from kvolt.core.errors import InvalidRequest
from kvolt.core.request import Request
from kvolt.engines.external.extras import refuse_extra
from kvolt.engines.vllm.prompt_embeds import EMBEDS

RESUMED = "kvolt_resumed"
"""The extra argument by which `worker_extension` knows how many tokens a seeded request has behind it."""
XARGS = "vllm_xargs"
PROCESSORS = "logits_processors"
_OURS = frozenset((RESUMED, "kv_transfer_params"))
"""Extra arguments that nobody else may set: they name blocks of others, or hold up the engine."""
_GROUP = "vllm.logits_processors"
"""Entry points of packages that bring some."""


class _Asked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    args: dict[str, Any] = {}


def loaded_processors(given: Iterable[Any]) -> frozenset[str]:
    """What vLLM's processors may be called: by their class, with or without its module, or by their entry point.
    `given` as vLLM's argument of that name has them, by `module:class` or as classes."""
    names: set[str] = set()
    for each in given:
        full = each if isinstance(each, str) else f"{each.__module__}:{each.__qualname__}"
        names |= {full, full.rpartition(":")[2]}
    return frozenset(names | {point.name for point in entry_points(group=_GROUP)})


def check_extra(request: Request, processors: Collection[str]) -> None:
    """Unsupported for what vLLM has no use for, InvalidRequest for what it cannot be given. `processors`: those that
    are loaded."""
    refuse_extra(request, "vLLM", (XARGS, PROCESSORS, EMBEDS))
    given = request.extra.get(XARGS)
    if given is not None and not (isinstance(given, dict) and all(isinstance(key, str) for key in given)):
        raise InvalidRequest("vllm_xargs must be names with their values", param=XARGS)
    for each in _asked(request):
        if each.name not in processors:
            known = ", ".join(sorted(processors)) or "none"
            raise InvalidRequest(
                f"vLLM has no logits processor {each.name[:80]!r} (it has: {known}); it loads them at its start, by "
                "engine_args.logits_processors",
                param=PROCESSORS,
            )
        if not each.args:
            raise InvalidRequest(
                f"vLLM's logits processor {each.name!r} acts on what it is told: give it args",
                param=PROCESSORS,
            )
    taken: set[str] = set()
    for param, key in _arguments(request):
        if key in _OURS:
            raise InvalidRequest(f"{key!r} is not a request's to set", param=param)
        if key in taken:
            raise InvalidRequest(f"{key!r} is given twice: vLLM has one place for it", param=param)
        taken.add(key)


def extra_args(request: Request) -> dict[str, Any]:
    """A dict of the caller's own. Of a request that was checked."""
    extra = dict(request.extra.get(XARGS) or {})
    for each in _asked(request):
        extra |= each.args
    return extra


def _arguments(request: Request) -> Iterator[tuple[str, str]]:
    for key in request.extra.get(XARGS) or {}:
        yield XARGS, key
    for each in _asked(request):
        for key in each.args:
            yield PROCESSORS, key


def _asked(request: Request) -> list[_Asked]:
    """As the edge has them: names, or names with their arguments."""
    given = request.extra.get(PROCESSORS)
    if not given:
        return []
    try:
        return [
            _Asked(each) if isinstance(each, str) else msgspec.convert(each, _Asked)
            for each in msgspec.convert(given, list[Any])
        ]
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"logits_processors: {error}", param=PROCESSORS) from error
