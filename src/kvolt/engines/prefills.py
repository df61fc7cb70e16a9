"""Prefills: prompts that an engine computes for others to go on with.

Owns the rules of the Prefill protocol for engines with our scheduler: such a prompt is a request of one token whose
blocks are kept, and what that token is goes into the handoff. Its blocks are told as they come to who watches it
(`KvPlaced.computed_kv`). Blocks of prompts that others have computed, which came ahead of their requests, wait as long
as those for others do (`expires_at`). Knows no loop: whoever has one calls `expire` when `next_expiry` has come, and
`tell` when a step was planned and when it was computed, if something `is_watched`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import msgspec

from kvolt.core.errors import Cancelled, ErrorInfo, NotFound, to_info
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Handoff, Request
from kvolt.engines.contract import KvHeld
from kvolt.engines.kv_exchange import held_of
from kvolt.kv import Names
from kvolt.scheduler.scheduler import Scheduler
from kvolt.scheduler.step_plan import Advanced, check_request

HOLD_S = 30.0
"""How long prefilled blocks wait to be fetched, unless told otherwise."""

Done = Callable[[Handoff | ErrorInfo], None]
Told = Callable[[KvHeld | ErrorInfo], None]


@dataclass(slots=True)
class _Prefill:
    request: Request
    done: Done
    tokens: dict[int, int] = field(default_factory=dict)
    cached_tokens: int | None = None
    can_tell: bool = True
    """Whether its first tokens can be told before decode goes on."""
    is_read: bool = False
    """Whether somebody was told of its blocks, and may be reading them."""


@dataclass(slots=True)
class _Watch:
    after: int
    told: Told


class Prefills:
    """See the module. `now` is any clock that does not go back; `abort` forgets what was submitted."""

    def __init__(
        self,
        scheduler: Scheduler,
        abort: Callable[[RequestId], None],
        now: Callable[[], float],
        hold_s: float = HOLD_S,
    ) -> None:
        self._scheduler = scheduler
        self._abort = abort
        self._now = now
        self._hold_s = hold_s
        self._open: dict[RequestId, _Prefill] = {}
        self._expiry: dict[RequestId, float] = {}
        self._watches: dict[RequestId, _Watch] = {}

    @property
    def expires_at(self) -> float:
        """When that is let go which is kept from now on."""
        return self._now() + self._hold_s

    @property
    def num_open(self) -> int:
        """Prompts that are being computed."""
        return len(self._open)

    def start(self, request: Request, submit: Callable[[Request], None], done: Done) -> None:
        """Compute a prompt and sample its first tokens; `done` is called by a later step. Errors as of `submit`,
        which must keep the blocks."""
        scheduler = self._scheduler
        check_request(request, scheduler.limits, scheduler.pool.num_blocks, scheduler.is_on_paper)
        num_tokens = len(request.resume) + 1
        stop = msgspec.structs.replace(
            request.stop, max_tokens=num_tokens, min_tokens=min(request.stop.min_tokens, num_tokens)
        )
        submit(msgspec.structs.replace(request, stop=stop, handoff=None))
        can_tell = request.sampling.logprobs is None and request.sampling.prompt_logprobs is None
        self._open[request.request_id] = _Prefill(request, done, can_tell=can_tell)

    def take(self, one: Advanced) -> bool:
        """Whether a new token belongs to a prompt that is computed for others: then nobody here is told of it."""
        prefill = self._open.get(one.sequence.request.request_id)
        if prefill is None:
            return False
        request = prefill.request
        prefill.tokens[one.sequence.index] = one.token
        if one.sequence.index == 0:
            prefill.cached_tokens = one.sequence.num_cached
        if one.token in one.sequence.enders or one.sequence.num_output >= request.stop.max_tokens:
            prefill.can_tell = False
        if len(prefill.tokens) == request.sampling.num_choices:
            del self._open[request.request_id]
            self._expiry[request.request_id] = self.expires_at
            prefill.done(self._handoff(prefill))
        return True

    def fail(self, request_id: RequestId, error: ErrorInfo) -> bool:
        """Whether a request that failed was such a prompt. Blocks that others may be reading stay for a while."""
        prefill = self._open.pop(request_id, None)
        if prefill is None:
            return False
        if prefill.is_read:
            self._scheduler.forsake_kept(request_id)
            self._expiry[request_id] = self.expires_at
        else:
            self._scheduler.release_kept(request_id)  # its first choice may have ended
        self._unwatch(request_id)
        prefill.done(error)
        return True

    def release(self, request_id: RequestId) -> None:
        """Blocks that were taken, or a prompt that nobody wants any more: whoever still waits for it hears that. Also
        blocks that came for a request which does not."""
        prefill = self._open.pop(request_id, None)
        if prefill is not None:
            self._abort(request_id)
            prefill.done(to_info(Cancelled("the prompt was let go")))
        self._expiry.pop(request_id, None)
        self._scheduler.release_kept(request_id)
        self._scheduler.cancel_arrivals(request_id)
        self._unwatch(request_id)

    @property
    def hold_s(self) -> float:
        """How long something is kept for others."""
        return self._hold_s

    def hold(self, name: RequestId) -> None:
        """Something is held under that name, which is let go as a prompt is that nobody fetches."""
        self._expiry[name] = self.expires_at

    # --- blocks as they come

    @property
    def is_watched(self) -> bool:
        """Whether there is anybody to `tell`."""
        return bool(self._watches)

    def watch(self, request_id: RequestId, after: int, told: Told) -> None:
        """As `KvPlaced.computed_kv`; `told` is called by `tell`, or when the prompt is let go."""
        if request_id not in self._open and self._scheduler.kept(request_id) is None:
            raise _no_prompt(request_id)
        earlier = self._watches.get(request_id)
        self._watches[request_id] = _Watch(after, told)
        if earlier is not None:
            earlier.told(to_info(Cancelled("another waits for the blocks of this prompt now")))

    def tell(self) -> None:
        """Those who wait for blocks that are complete now."""
        for request_id, watch in list(self._watches.items()):
            lent = self._scheduler.lend(request_id, watch.after)
            if lent is None:
                continue
            del self._watches[request_id]
            if request_id in self._open:
                self._open[request_id].is_read = True
            watch.told(held_of(*lent))

    def _unwatch(self, request_id: RequestId) -> None:
        watch = self._watches.pop(request_id, None)
        if watch is not None:
            watch.told(to_info(_no_prompt(request_id)))

    # ---

    def expire(self) -> None:
        """Let go of what nobody has fetched, or gone on with, in time."""
        now = self._now()
        self._scheduler.expire_arrivals(now)
        for request_id in [each for each, at in self._expiry.items() if at <= now]:
            self.release(request_id)

    @property
    def next_expiry(self) -> float | None:
        kept, arrived = min(self._expiry.values(), default=None), self._scheduler.next_expiry
        return arrived if kept is None else kept if arrived is None else min(kept, arrived)

    def close(self, error: ErrorInfo) -> None:
        """Nothing is computed any more: all that is open fails, all that is kept is let go."""
        for request_id in list(self._open):
            self.fail(request_id, error)
        for request_id in list(self._expiry):
            self.release(request_id)
        self._scheduler.expire_arrivals(inf)

    def _handoff(self, prefill: _Prefill) -> Handoff:
        request = prefill.request
        kept = self._scheduler.kept(request.request_id)
        names = kept[1] if kept is not None else Names()
        tokens = tuple(token for _, token in sorted(prefill.tokens.items()))
        return Handoff(
            ticket=msgspec.msgpack.encode([request.request_id, names.keys]),
            prefill_instance=InstanceId(""),
            block_hashes=tuple(names.sequence_hashes),
            expires_in_s=self._hold_s,
            token_ids=request.token_ids,
            media=request.media,
            first_tokens=tokens if prefill.can_tell else None,
            cached_tokens=prefill.cached_tokens,
        )


def _no_prompt(request_id: RequestId) -> NotFound:
    return NotFound(f"no prompt {request_id} is computed or kept", kind="handoff", name=request_id)
