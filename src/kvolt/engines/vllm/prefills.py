"""Prefills: prompts that vLLM computes for others, and the ticket by which another vLLM fetches their KV.

The bytes are NIXL's affair: the ticket carries what vLLM's connector says (`kv_transfer_params`), as data and nothing
that could be run. What a prompt's first tokens are is told at once, and decode goes on after them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvolt.core.errors import Cancelled, EngineFailed, InvalidRequest, KvoltError
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Handoff, Request
from kvolt.engines.external.answers import Choice
from kvolt.engines.vllm.plugins.side_channel import DEADLINE_S, HOLD_S

MAX_TICKET_BYTES = 1 << 20
"""A block's number takes up to five bytes: two hundred thousand blocks."""
RELEASE = "kvolt_release"
"""Among a request's transfer parameters: whose blocks are to be let go (see `nixl_connector`)."""
_MIN_HOLD_S = 1.0
"""Also of a request whose time is nearly over."""
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(dict[str, Any]).decode


class _Ticket(msgspec.Struct):
    """Of what vLLM's connector says, that which its peer reads."""

    remote_block_ids: list[list[int]]
    remote_engine_id: str
    remote_request_id: str
    remote_host: str
    remote_port: int
    tp_size: int
    remote_num_tokens: int
    do_remote_prefill: bool
    kvolt_hold_s: Annotated[float, Meta(gt=0)]
    """Of an owner that answers whether its hold is intact. KV of any other is not used: nothing shows that it was
    held until the read was over."""


@dataclass(slots=True, eq=False)
class _Prompt:
    request: Request
    done: asyncio.Future[None]
    tokens: dict[int, int] = field(default_factory=dict)
    """The first token of each choice."""
    choices: dict[str, Choice] = field(default_factory=dict)
    """Those that are not computed yet, by their names in the core."""
    names: tuple[str, ...] = ()
    """Of all of them."""
    fetched: str = ""
    """The name of the one whose blocks are kept."""
    transfer: dict[str, Any] | None = None
    cached: int = 0
    is_end: bool = False
    """Whether one of the first tokens ends its choice: then decode has to say it."""


class Prefills:
    """See the module. `make`: a choice as vLLM's request. `post`: to the core, in order."""

    def __init__(
        self,
        make: Callable[[Choice, dict[str, Any] | None, bool], Any],
        post: Callable[[Callable[[], Awaitable[Any]]], None],
        core: Callable[[], Any],
        forget: Callable[[list[str]], None],
    ) -> None:
        """`forget`: nothing more is heard of these."""
        self._make = make
        self._forget = forget
        self._post = post
        self._core = core
        self._prompts: dict[RequestId, _Prompt] = {}
        self._by_name: dict[str, _Prompt] = {}
        self._number = 0

    @property
    def num_open(self) -> int:
        """Sequences that are computed, or wait for it."""
        return sum(len(prompt.choices) for prompt in self._prompts.values())

    def is_computing(self, request_id: RequestId) -> bool:
        prompt = self._prompts.get(request_id)
        return prompt is not None and bool(prompt.choices)

    async def compute(self, request: Request, hold_s: float) -> Handoff:
        """Errors as of `submit`; cancelled, it leaves nothing."""
        request_id = request.request_id
        if request_id in self._prompts:
            raise InvalidRequest(f"request {request_id} is here already", param="request_id")
        if request.deadline_s is not None:
            hold_s = max(min(hold_s, request.deadline_s), _MIN_HOLD_S)
        prompt = _Prompt(request, asyncio.get_running_loop().create_future())
        self._number += 1
        for index in request.open_choices:
            name = f"{request_id}/p{self._number}/{index}"
            prompt.choices[name] = Choice(request, index, name, num_tokens=len(request.resumed(index)))
        prompt.names = tuple(prompt.choices)
        prompt.fetched = prompt.names[0]
        # One of them is fetched: the others are computed for their first tokens only, by the same blocks.
        held = {"do_remote_decode": True, HOLD_S: hold_s, DEADLINE_S: request.deadline_s}
        made = [
            self._make(choice, held if name == prompt.fetched else None, True)
            for name, choice in prompt.choices.items()
        ]
        self._prompts[request_id] = prompt
        self._by_name.update(dict.fromkeys(prompt.choices, prompt))
        for each in made:
            self._post(partial(self._core().add_request_async, each))
        try:
            await prompt.done
        except BaseException:
            self.release(request_id)
            raise
        # The connector's hold may last longer, renewed by the reader: here the prompt is only forgotten.
        asyncio.get_running_loop().call_later(hold_s, self._expire, prompt)
        return Handoff(
            ticket=_encode(prompt.transfer or {}),
            prefill_instance=InstanceId(""),
            expires_in_s=hold_s,
            first_tokens=_first_tokens(prompt),
            cached_tokens=prompt.cached,
        )

    def take(self, output: Any) -> bool:
        """Whether it was of a prompt of ours."""
        prompt = self._by_name.get(output.request_id)
        if prompt is None:
            return False
        choice = prompt.choices.get(output.request_id)
        if choice is None or prompt.done.done():
            return True
        if output.new_token_ids:
            prompt.tokens[choice.index] = output.new_token_ids[0]
        if output.prefill_stats is not None and output.request_id == prompt.fetched:
            prompt.cached = output.prefill_stats.num_cached_tokens
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
        """The blocks were taken, or nobody wants them."""
        prompt = self._prompts.get(request_id)
        if prompt is None:
            return
        self._drop(prompt)
        if not prompt.done.done():
            prompt.done.set_exception(Cancelled("the prompt was let go"))
            prompt.done.exception()  # it may be that nobody waits
        if prompt.choices:
            names = list(prompt.choices)
            self._forget(names)
            self._post(partial(self._core().abort_requests_async, names))
        self._let_go(prompt)  # also where it was aborted: it may have been ready before vLLM heard of that

    def _expire(self, prompt: _Prompt) -> None:
        if self._prompts.get(prompt.request.request_id) is prompt:
            self._drop(prompt)

    def _drop(self, prompt: _Prompt) -> None:
        del self._prompts[prompt.request.request_id]
        for name in prompt.names:
            self._by_name.pop(name, None)

    def _let_go(self, prompt: _Prompt) -> None:
        """vLLM keeps the blocks until they are fetched or their lease is over. A request that is aborted before it
        begins takes the word to its connector."""
        self._number += 1
        name = f"release/{self._number}"
        given = prompt.request
        bare = Request(
            request_id=given.request_id,
            model=given.model,
            token_ids=given.token_ids[:1],
            stop=given.stop,
            routing=given.routing,  # to the rank that has them
        )
        release = self._make(Choice(bare, 0, name), {RELEASE: prompt.fetched}, True)
        release.abort_immediately = True
        self._forget([name])
        self._post(partial(self._core().add_request_async, release))

    def end(self, error: KvoltError) -> None:
        for prompt in self._prompts.values():
            if not prompt.done.done():
                prompt.done.set_exception(error)
                prompt.done.exception()
        self._prompts.clear()
        self._by_name.clear()


def _first_tokens(prompt: _Prompt) -> tuple[int, ...] | None:
    request = prompt.request
    num_left = min(request.stop.max_tokens - len(request.resumed(index)) for index in request.open_choices)
    if prompt.is_end or request.sampling.logprobs is not None or num_left == 1:
        return None  # decode tells them, with their end or their figures
    return tuple(prompt.tokens[index] for index in sorted(prompt.tokens))


def transfer_params(handoff: Handoff) -> dict[str, Any] | None:
    """What vLLM's connector needs to fetch a prompt; None where the ticket says nothing: it is computed again."""
    if not handoff.ticket or len(handoff.ticket) > MAX_TICKET_BYTES:
        return None
    try:
        given = _decode(handoff.ticket)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    try:  # what vLLM's connector takes for granted: a wrong one would end its engine
        ticket = msgspec.convert(given, _Ticket)
    except msgspec.ValidationError:
        return None
    return given if ticket.remote_block_ids and RELEASE not in given else None
