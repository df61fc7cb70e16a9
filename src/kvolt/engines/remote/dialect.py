"""Dialect: what engine and server say to each other, in the words of one kind of server.

Each choice of a request is a call of its own: choices end, fail and resume apart, and a server would make as many
requests of them anyway. The first has the request's seed, the others those after it, as vLLM counts them.
"""

from __future__ import annotations

from typing import Protocol

from kvolt.core.errors import ProtocolError, Unsupported
from kvolt.core.request import Request
from kvolt.engines.external.answers import News
from kvolt.engines.external.extras import refuse_extra
from kvolt.engines.external.resuming import OUTPUT_PENALTIES, check_resumable
from kvolt.engines.kv_formats.schema import Engine


class AnswerReader(Protocol):
    """One answer's events, in order. What it raises fails the request; ProtocolError for what is no chunk."""

    was_cut: bool
    """The answer was ended here, by what the server would not look at: it has to be stopped."""

    def read(self, event: bytes) -> News | None:
        """None where there is nothing to tell of it, or not yet."""
        ...

    def end(self) -> News | None:
        """The server has said that this was all: what was held back."""
        ...


class Dialect(Protocol):
    kind: Engine
    path: str
    tells_cached_first: bool
    """Whether the first chunk says how much of the prompt was cached; else only the last does, if any."""
    clear_path: str
    """Where it is asked to forget its cached blocks."""
    clear_remedy: str

    def check(self, request: Request) -> None:
        """Unsupported for what the server has no way to do, before anything is sent."""
        ...

    def body(self, request: Request, index: int) -> bytes: ...

    def reader(self, request: Request, index: int) -> AnswerReader: ...


def check_asked(request: Request) -> None:
    """Unsupported for what no server behind HTTP can do, or could not do right."""
    refuse_extra(request, "an attached server")
    refused = {
        "media": bool(request.media),
        "lora": request.lora is not None,
        "handoff": request.prefill_only or request.handoff is not None or request.rendezvous is not None,
        "prompt_logprobs": request.sampling.prompt_logprobs is not None and not request.is_resumed,
    }
    for feature, is_wanted in refused.items():
        if is_wanted:
            raise Unsupported(f"an attached server is not asked for {feature}", feature=feature)
    if request.num_resumed_tokens:
        check_resumable(
            request,
            "an attached server",
            "an attached server cannot go on with presence or frequency penalties: it would count what is resumed "
            "as the prompt's",
            OUTPUT_PENALTIES,
        )


def seed_of(request: Request, index: int) -> int | None:
    seed = request.sampling.seed
    return None if seed is None else seed + index


def tokens_left(request: Request, index: int) -> tuple[int, int]:
    """Of `max_tokens` and `min_tokens`, for who goes on after what was resumed."""
    num_resumed = len(request.resumed(index))
    stop = request.stop
    return stop.max_tokens - num_resumed, max(stop.min_tokens - num_resumed, 0)


def no_chunk(error: Exception) -> ProtocolError:
    return ProtocolError(f"what came is no chunk of an answer: {error}", rule="chunk")
