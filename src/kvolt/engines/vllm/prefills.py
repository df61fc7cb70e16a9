"""Remote prefill on vLLM: computes prompts and creates the tickets by which another vLLM pulls their KV.

NIXL moves the bytes; a ticket contains the parameters of vLLM's connector (`kv_transfer_params`) as plain data. The
first tokens are reported with the handoff, and decode continues after them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvolt.core.errors import MALFORMED, Cancelled, EngineFailed, InvalidRequest, KvoltError
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Handoff, Request
from kvolt.engines.external.answers import Choice
from kvolt.engines.vllm.plugins.kv_holds import DEADLINE_S, HOLD_S, RELEASE

MAX_TICKET_BYTES = 1 << 20
"""Room for two hundred thousand block ids of five bytes."""
_MIN_HOLD_S = 1.0
"""Minimum hold, also shortly before the request's deadline."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


class _Ticket(msgspec.Struct):
    """Parameters of vLLM's connector that its peer reads."""

    remote_block_ids: list[list[int]]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    remote_num_tokens: int
    do_remote_prefill: bool
    kvolt_hold_s: Annotated[float, Meta(gt=0)]
    """Present if the owner answers hold checks. Other KV is not used, since it may have been released during the
    read."""


@dataclass(slots=True, eq=False)
class _Prompt:
    request: Request
    done: asyncio.Future[None]
    tokens: dict[int, int] = field(default_factory=dict)
    """First token per choice."""
    choices: dict[str, Choice] = field(default_factory=dict)
    """Choices that are not computed yet, by engine id."""
    names: tuple[str, ...] = ()
    """Engine ids of all choices."""
    held_name: str = ""
    """Engine id of the choice whose blocks are held."""
    transfer: dict[str, Any] | None = None
    cached_tokens: int = 0
    is_end: bool = False
    """Whether a first token ends its choice; decode then reports it."""


class Prefills:
    """See the module."""

    def __init__(
        self,
        make: Callable[[Choice, dict[str, Any] | None, bool], Any],
        post: Callable[[Callable[[], Awaitable[Any]]], None],
        core: Callable[[], Any],
        on_dropped: Callable[[list[str]], None],
    ) -> None:
        """`make`: converts a choice to a vLLM request. `post`: queues a call to the engine core. `on_dropped`: called
        with engine ids that give no further output."""
        self._make = make
        self._on_dropped = on_dropped
        self._post = post
        self._core = core
        self._prompts: dict[RequestId, _Prompt] = {}
        self._by_name: dict[str, _Prompt] = {}
        self._number = 0

    @property
    def num_open(self) -> int:
        """Sequences that are waiting or being computed."""
        return sum(len(prompt.choices) for prompt in self._prompts.values())

    def is_computing(self, request_id: RequestId) -> bool:
        prompt = self._prompts.get(request_id)
        return prompt is not None and bool(prompt.choices)

    async def compute(self, request: Request, hold_s: float) -> Handoff:
        """Compute a prompt. Errors as of `submit`. Cancelling releases everything."""
        request_id = request.request_id
        if request_id in self._prompts:
            raise InvalidRequest(f"request {request_id} exists already", param="request_id")
        if request.deadline_s is not None:
            hold_s = max(min(hold_s, request.deadline_s), _MIN_HOLD_S)
        prompt = _Prompt(request, asyncio.get_running_loop().create_future())
        self._number += 1
        for index in request.open_choices:
            name = f"{request_id}/p{self._number}/{index}"
            prompt.choices[name] = Choice(
                request, index, name, num_tokens=len(request.prior_tokens_of(index))
            )
        prompt.names = tuple(prompt.choices)
        prompt.held_name = prompt.names[0]
        # The blocks of one choice are pulled; the others share them and are computed for their first tokens only.
        transfer = {"do_remote_decode": True, HOLD_S: hold_s, DEADLINE_S: request.deadline_s}
        core_requests = [
            self._make(choice, transfer if name == prompt.held_name else None, True)
            for name, choice in prompt.choices.items()
        ]
        self._prompts[request_id] = prompt
        self._by_name.update(dict.fromkeys(prompt.choices, prompt))
        for each in core_requests:
            self._post(partial(self._core().add_request_async, each))
        try:
            await prompt.done
        except BaseException:
            self.release(request_id)
            raise
        # The reader may extend the connector's hold; this only forgets the prompt.
        asyncio.get_running_loop().call_later(hold_s, self._expire, prompt)
        return Handoff(
            ticket=_encode(prompt.transfer or {}),
            prefill_instance=InstanceId(""),
            expires_in_s=hold_s,
            first_tokens=_first_tokens(prompt),
            cached_tokens=prompt.cached_tokens,
        )

    def on_output(self, output: Any) -> bool:
        """Handle an output of the engine core. False if it does not belong to a remote prefill."""
        prompt = self._by_name.get(output.request_id)
        if prompt is None:
            return False
        choice = prompt.choices.get(output.request_id)
        if choice is None or prompt.done.done():
            return True
        if output.new_token_ids:
            prompt.tokens[choice.index] = output.new_token_ids[0]
        if output.prefill_stats is not None and output.request_id == prompt.held_name:
            prompt.cached_tokens = output.prefill_stats.num_cached_tokens
        if output.kv_transfer_params is not None:
            prompt.transfer = output.kv_transfer_params
        if output.finish_reason is None:
            return True
        reason = str(output.finish_reason)
        prompt.is_end = prompt.is_end or reason == "stop"
        del prompt.choices[output.request_id]
        if reason not in ("stop", "length"):
            prompt.done.set_exception(EngineFailed(f"vLLM ended the prompt: {reason}", engine="vllm"))
        elif not prompt.choices:
            prompt.done.set_result(None)
        return True

    def release(self, request_id: RequestId) -> None:
        """Release a prompt whose blocks were pulled or are not needed."""
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return
        self._forget(prompt)
        if not prompt.done.done():
            prompt.done.set_exception(Cancelled("the prompt was released"))
            prompt.done.exception()  # mark as retrieved, `compute` may have ended
        if prompt.choices:
            names = list(prompt.choices)
            self._on_dropped(names)
            self._post(partial(self._core().abort_requests_async, names))
        self._release_hold(prompt)  # also after an abort: the prompt may have been complete before it

    def _expire(self, prompt: _Prompt) -> None:
        if self._prompts.get(prompt.request.request_id) is prompt:
            self._forget(prompt)

    def _forget(self, prompt: _Prompt) -> None:
        del self._prompts[prompt.request.request_id]
        for name in prompt.names:
            self._by_name.pop(name, None)

    def _release_hold(self, prompt: _Prompt) -> None:
        """Make vLLM release the blocks before their lease ends: a request that is aborted before it starts carries the
        command to the connector."""
        self._number += 1
        name = f"release/{self._number}"
        request = prompt.request
        bare = Request(
            request_id=request.request_id,
            model=request.model,
            token_ids=request.token_ids[:1],
            stop=request.stop,
            routing=request.routing,  # to the DP rank with the blocks
        )
        release = self._make(Choice(bare, 0, name), {RELEASE: prompt.held_name}, True)
        release.abort_immediately = True
        self._on_dropped([name])
        self._post(partial(self._core().add_request_async, release))

    def fail_all(self, error: KvoltError) -> None:
        for prompt in self._prompts.values():
            if not prompt.done.done():
                prompt.done.set_exception(error)
                prompt.done.exception()
        self._prompts.clear()
        self._by_name.clear()


def _first_tokens(prompt: _Prompt) -> tuple[int, ...] | None:
    request = prompt.request
    num_left = min(
        request.stop.max_tokens - len(request.prior_tokens_of(index)) for index in request.open_choices
    )
    if prompt.is_end or request.sampling.logprobs is not None or num_left == 1:
        return None  # decode reports them, with finish reason or logprobs
    return tuple(prompt.tokens[index] for index in sorted(prompt.tokens))


def transfer_params(handoff: Handoff) -> dict[str, Any] | None:
    """Parameters of vLLM's connector to pull a prompt. None for an empty or invalid ticket: the prompt is
    recomputed."""
    if not handoff.ticket or len(handoff.ticket) > MAX_TICKET_BYTES:
        return None
    try:
        params = _decode(handoff.ticket)
    except MALFORMED:
        return None
    try:  # vLLM's connector does not validate it: a wrong one would crash the engine
        ticket = msgspec.convert(params, _Ticket)
    except msgspec.ValidationError:
        return None
    return params if ticket.remote_block_ids and RELEASE not in params else None
