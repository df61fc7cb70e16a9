"""Port for the request and response formats of one kind of server.

Each choice of a request is a call of its own: choices end, fail and resume separately, and the server would split them
anyway. The first choice uses the request's seed, the others the following numbers, as in vLLM.
"""

from __future__ import annotations

from typing import Protocol

from kvolt.core.errors import ProtocolError, Unsupported
from kvolt.core.request import Request
from kvolt.engines.external.answers import ChoiceOutput
from kvolt.engines.external.requests import OUTPUT_PENALTIES, check_resumable, refuse_extra
from kvolt.engines.kv_formats.schema import SourceEngine


class AnswerReader(Protocol):
    """Parses the events of one answer, in order. An error fails the request; ProtocolError for a malformed chunk."""

    was_cut: bool
    """Whether the answer was ended here and the server would continue."""

    def read(self, event: bytes) -> ChoiceOutput | None:
        """Output of an event, if any."""
        ...

    def end(self) -> ChoiceOutput | None:
        """Output that was held back until the end of the stream."""
        ...


class Dialect(Protocol):
    kind: SourceEngine
    path: str
    reports_cached_first: bool
    """Whether the first chunk contains the number of cached tokens; otherwise only the last one may."""
    clear_path: str
    """Path that clears the server's cache."""
    clear_remedy: str

    sampling_fields: frozenset[str]
    """Fields of `Sampling` that the server's API can express."""

    def body(self, request: Request, index: int) -> bytes: ...

    def reader(self, request: Request, index: int) -> AnswerReader: ...


def check_supported(request: Request) -> None:
    """Raise Unsupported for requests that no server over HTTP can serve correctly."""
    refuse_extra(request, "an attached server")
    refused = {
        "media": bool(request.media),
        "lora": request.lora is not None,
        "handoff": request.prefill_only or request.handoff is not None or request.rendezvous is not None,
        "prompt_logprobs": request.sampling.prompt_logprobs is not None and not request.has_prior_tokens,
    }
    for feature, is_requested in refused.items():
        if is_requested:
            raise Unsupported(f"an attached server does not support {feature}", feature=feature)
    if request.num_prior_tokens:
        check_resumable(
            request,
            "an attached server",
            "an attached server cannot resume with presence or frequency penalties: resumed tokens would count as "
            "part of the prompt",
            OUTPUT_PENALTIES,
        )


def seed_of(request: Request, index: int) -> int | None:
    seed = request.sampling.seed
    return None if seed is None else seed + index


def tokens_left(request: Request, index: int) -> tuple[int, int]:
    """Rest of `max_tokens` and `min_tokens` after resumed tokens."""
    num_resumed = len(request.prior_tokens_of(index))
    stop = request.stop
    return stop.max_tokens - num_resumed, max(stop.min_tokens - num_resumed, 0)


def malformed_chunk(error: Exception) -> ProtocolError:
    return ProtocolError(f"malformed chunk: {error}", rule="chunk")
