"""The engine contract: what a worker asks of whatever computes.

Engines own their scheduling. `submit` only hands a request over; everything that comes of it leaves
through `steps`, one StepOutput for all sequences of a step. Each submitted request ends exactly once:
with a delta that has a finish reason for each of its choices, or in `StepOutput.failed`; an aborted or
withdrawn one just stops.

How a choice ends. Each choice ends by itself, at its own step; the request ends with the last of them.

- EOS, one of the card's `eos_token_ids`: finish STOP, no `stop_reason`. Not with `ignore_eos`.
- One of `stop_token_ids`: finish STOP, and the id is the `stop_reason`. An EOS among them counts as EOS, unless
  EOS is ignored.
- `max_tokens`: finish LENGTH, but STOP when that token is also one of the above.

The token that ends a choice is the last of its `token_ids`. Its text is no part of the answer: to leave it
out is up to the edge, which also knows stop strings. Neither EOS nor a stop token ends a choice with fewer than
`min_tokens` tokens before it; whether such a token is said and passed over or another one is taken in its place
is the engine's affair.

What is told. The delta with a choice's finish reason carries the `Usage` of that choice, and no other does:
`completion_tokens` counts all its tokens, the last and those of `resume` included; `prompt_tokens` is the same for
every choice, and is counted once by who adds them up. `reasoning_tokens` stays 0: only the edge sees text.

With `sampling.logprobs` every delta has one TokenLogprobs per token. `top` has as many as were asked for, the
most likely first; the chosen token need not be among them, and has the same figure if it is. Such a request has no
plain tokens. `prompt_logprobs` come with the first delta of choice 0, one per token of the prompt, None for the
first; not for a request that resumes, whose client has them.

The same request with the same seed has the same tokens, wherever and with whatever else it runs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.delta import StepOutput
from kvolt.core.ids import RequestId
from kvolt.core.request import Request


class Engine(Protocol):
    """The port. Capability protocols (Prefill, KvMovable, ...) are separate and optional."""

    @property
    def card(self) -> ModelCard:
        """The model served; the same for every instance that serves it. Known before `start`."""
        ...

    async def start(self) -> EngineInfo:
        """Load and be ready to compute."""
        ...

    def submit(self, request: Request) -> None:
        """Take a request. InvalidRequest or Unsupported when it can never run here; Overloaded when full."""
        ...

    def abort(self, request_id: RequestId) -> None:
        """Stop a request wherever it is and free what it holds. Unknown ids are no error."""
        ...

    async def withdraw(self, request_id: RequestId) -> bool:
        """Take a request back if it has not started; whether that was so."""
        ...

    def steps(self) -> AsyncIterator[StepOutput]:
        """The engine's output, without end. One reader. When it raises, the engine is dead."""
        ...

    async def close(self) -> None:
        """Stop computing and free everything; `steps` ends."""
        ...
