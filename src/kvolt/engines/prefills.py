"""Prefills: prompts computed for a remote decode.

Implements the Prefill protocol for engines that use kvolt's scheduler: such a prompt is a request of one
token whose blocks are held, and the sampled token goes into the handoff. Watchers
(`KvAddressable.computed_kv`) receive the blocks as they are completed. Blocks received ahead of their
requests expire after the same time (`expires_at`). Owns no loop: the engine calls `expire` at `next_expiry`,
and `notify_watchers` after planning and computing a step if it `has_watchers`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

import msgspec

from kvolt.core.errors import Cancelled, ErrorInfo, NotFound, to_info
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Handoff, Request
from kvolt.engines.contract import HeldKv
from kvolt.engines.kv_exchange import to_held_kv
from kvolt.kv import BlockNames
from kvolt.scheduler.scheduler import Scheduler
from kvolt.scheduler.step_plan import NewToken, check_request

HOLD_S = 30.0
"""How long held blocks of a prompt wait to be fetched, by default."""

OnHandoff = Callable[[Handoff | ErrorInfo], None]
OnBlocks = Callable[[HeldKv | ErrorInfo], None]


@dataclass(slots=True)
class _Prefill:
    request: Request
    on_handoff: OnHandoff
    tokens: dict[int, int] = field(default_factory=dict)
    cached_tokens: int | None = None
    can_forward_tokens: bool = True
    """Whether its first tokens can be emitted before decode continues."""
    is_read: bool = False
    """Whether its blocks were reported to a watcher, which may be reading them."""


@dataclass(slots=True)
class _Watch:
    after: int
    on_blocks: OnBlocks


class Prefills:
    """See the module. `now` is a monotonic clock; `abort` drops a submitted request."""

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
        self.hold_s = hold_s
        self._in_progress: dict[RequestId, _Prefill] = {}
        self._expiry: dict[RequestId, float] = {}
        self._watches: dict[RequestId, _Watch] = {}

    @property
    def expires_at(self) -> float:
        """Expiry of a hold that starts now."""
        return self._now() + self.hold_s

    @property
    def num_in_progress(self) -> int:
        """Number of prompts being computed."""
        return len(self._in_progress)

    @property
    def num_open(self) -> int:
        """Number of prompts being computed, and of holds."""
        return len(self._in_progress) + len(self._expiry)

    def start(self, request: Request, submit: Callable[[Request], None], on_handoff: OnHandoff) -> None:
        """Compute a prompt and sample its first tokens; a later step calls `on_handoff`. Same errors as
        `submit`, which must keep the blocks."""
        scheduler = self._scheduler
        check_request(request, scheduler.limits, scheduler.pool.num_blocks, scheduler.is_tokenless)
        num_tokens = len(request.prior_tokens) + 1
        stop = msgspec.structs.replace(
            request.stop, max_tokens=num_tokens, min_tokens=min(request.stop.min_tokens, num_tokens)
        )
        submit(msgspec.structs.replace(request, stop=stop, handoff=None))
        can_forward_tokens = request.sampling.logprobs is None and request.sampling.prompt_logprobs is None
        self._in_progress[request.request_id] = _Prefill(
            request, on_handoff, can_forward_tokens=can_forward_tokens
        )

    def consume_token(self, new: NewToken) -> bool:
        """Consume a new token if it belongs to a prompt computed for a remote decode; returns whether it did."""
        prefill = self._in_progress.get(new.sequence.request.request_id)
        if prefill is None:
            return False
        request = prefill.request
        prefill.tokens[new.sequence.index] = new.token
        if new.sequence.index == 0:
            prefill.cached_tokens = new.sequence.num_cached
        if new.token in new.sequence.ending_ids or new.sequence.num_output >= request.stop.max_tokens:
            prefill.can_forward_tokens = False
        if len(prefill.tokens) == request.sampling.num_choices:
            del self._in_progress[request.request_id]
            self._expiry[request.request_id] = self.expires_at
            prefill.on_handoff(self._handoff(prefill))
        return True

    def fail(self, request_id: RequestId, error: ErrorInfo) -> bool:
        """Fail a prompt; returns whether the request was one. Blocks that a watcher may be reading are held
        until they expire."""
        prefill = self._in_progress.pop(request_id, None)
        if prefill is None:
            return False
        if prefill.is_read:
            self._scheduler.holds.orphan(request_id)
            self._expiry[request_id] = self.expires_at
        else:
            self._scheduler.release_kept(request_id)  # its first choice may have ended
        self._unwatch(request_id)
        prefill.on_handoff(error)
        return True

    def release(self, request_id: RequestId) -> None:
        """Release held blocks, cancel a prompt that is being computed, and release blocks received for a
        request that does not come."""
        prefill = self._in_progress.pop(request_id, None)
        if prefill is not None:
            self._abort(request_id)
            prefill.on_handoff(to_info(Cancelled("the prompt was released")))
        self._expiry.pop(request_id, None)
        self._scheduler.release_kept(request_id)
        self._scheduler.prefetched.release_expected(request_id)
        self._unwatch(request_id)

    def start_hold(self, name: RequestId) -> None:
        """Start the hold time of blocks that are held under `name`."""
        self._expiry[name] = self.expires_at

    # --- watchers

    @property
    def has_watchers(self) -> bool:
        return bool(self._watches)

    def watch(self, request_id: RequestId, after: int, on_blocks: OnBlocks) -> None:
        """As in `KvAddressable.computed_kv`; `on_blocks` is called by `notify_watchers`, or when the prompt
        is released."""
        if request_id not in self._in_progress and self._scheduler.holds.find(request_id) is None:
            raise _no_prompt(request_id)
        earlier = self._watches.get(request_id)
        self._watches[request_id] = _Watch(after, on_blocks)
        if earlier is not None:
            earlier.on_blocks(to_info(Cancelled("a later call waits for the blocks of this prompt")))

    def notify_watchers(self) -> None:
        """Report newly completed blocks to the watchers that wait for them."""
        for request_id, watch in list(self._watches.items()):
            lent = self._scheduler.lend_blocks(request_id, watch.after)
            if lent is None:
                continue
            del self._watches[request_id]
            if request_id in self._in_progress:
                self._in_progress[request_id].is_read = True
            watch.on_blocks(to_held_kv(*lent))

    def _unwatch(self, request_id: RequestId) -> None:
        watch = self._watches.pop(request_id, None)
        if watch is not None:
            watch.on_blocks(to_info(_no_prompt(request_id)))

    # ---

    def expire(self) -> None:
        """Release holds that were not fetched or continued in time."""
        now = self._now()
        self._scheduler.prefetched.expire(now)
        for request_id in [each for each, at in self._expiry.items() if at <= now]:
            self.release(request_id)

    @property
    def next_expiry(self) -> float | None:
        """Earliest expiry of a hold; None if there is none."""
        times = (min(self._expiry.values(), default=None), self._scheduler.prefetched.next_expiry)
        return min((at for at in times if at is not None), default=None)

    def close(self, error: ErrorInfo) -> None:
        """Fail all prompts in progress and release all holds."""
        for request_id in list(self._in_progress):
            self.fail(request_id, error)
        for request_id in list(self._expiry):
            self.release(request_id)
        self._scheduler.prefetched.expire(inf)

    def _handoff(self, prefill: _Prefill) -> Handoff:
        request = prefill.request
        kept = self._scheduler.holds.find(request.request_id)
        names = kept[1] if kept is not None else BlockNames()
        tokens = tuple(token for _, token in sorted(prefill.tokens.items()))
        return Handoff(
            ticket=msgspec.msgpack.encode([request.request_id, names.keys]),
            prefill_instance=InstanceId(""),
            block_hashes=tuple(names.sequence_hashes),
            expires_in_s=self.hold_s,
            token_ids=request.token_ids,
            media=request.media,
            first_tokens=tokens if prefill.can_forward_tokens else None,
            cached_tokens=prefill.cached_tokens,
        )


def _no_prompt(request_id: RequestId) -> NotFound:
    return NotFound(f"no prompt {request_id} is computed or held", kind="handoff", name=request_id)
