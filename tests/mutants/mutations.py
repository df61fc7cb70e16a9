"""Defects that seeded clusters must find: small patches of the source, each with the reason it matters.

A patch is a text that occurs exactly once in its file, and what it is replaced by. `seed` is one that is known to show
it, and is tried first; it only saves time.
"""

from __future__ import annotations

import msgspec


class Mutation(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    path: str
    """Below src/kvolt."""
    old: str
    new: str
    why: str
    """What goes wrong for a user."""
    seed: int = 0


MUTATIONS: tuple[Mutation, ...] = (
    # --- KV
    Mutation(
        name="swapped KV blocks",
        path="kv/pool.py",
        old="            run.num_holders += 1\n        return acquired\n",
        new="            run.num_holders += 1\n        return acquired[1::-1] + acquired[2:]\n",
        why="a prompt that is found in the cache is read in another order",
    ),
    Mutation(
        name="blocks of running requests are given away",
        path="kv/pool.py",
        old="            run.num_holders += 1\n        return acquired\n",
        new="            run.num_holders += run.num_holders == 0\n        return acquired\n",
        why="the first of two requests that share a prefix takes it with it when it ends",
    ),
    Mutation(
        name="KV of another salt is reused",
        path="core/block_key.py",
        old='            utf8(self.salt or "", "salt"),\n',
        new='            utf8("", "salt"),\n',
        why="tenants find each other's blocks",
    ),
    Mutation(
        name="a block's key does not cover the blocks before it",
        path="core/block_key.py",
        old="            state.update(parent + block)\n",
        new="            state.update(ROOT + block)\n",
        why="equal text behind another beginning is taken for the same KV",
    ),
    Mutation(
        name="wrong tier slots are read",
        path="kv/tiers/cache.py",
        old="        slots = int64_array(map(slot_table.slot, keys))\n        expected",
        new="        slots = int64_array(map(slot_table.slot, keys[::-1]))\n        expected",
        why="blocks come back from the host in another order",
    ),
    Mutation(
        name="holds of handoffs are never released",
        path="scheduler/holds.py",
        old="            self._pool.release(reversed(held.blocks))\n        return bool",
        new="            pass\n        return bool",
        why="a prefill worker has less and less room",
        seed=1,
    ),
    Mutation(
        name="handed-over KV that did not arrive is sealed",
        path="worker/kv/handoffs.py",
        old="            await self._settling.settle(allocation, pulled.num_blocks, kept_for)\n",
        new="            await self._settling.settle(allocation, len(allocation.blocks), kept_for)\n",
        why="a failed transfer leaves blocks with another prompt's KV, and later requests find them",
        seed=1,
    ),
    Mutation(
        name="checksums of host blocks are not compared",
        path="kv/tiers/cache.py",
        old="if actual[index] != expected[index]), len(keys))\n",
        new="if actual[index] < 0), len(keys))\n",
        why="a flipped bit in host memory becomes KV of a request",
        seed=22,
    ),
    Mutation(
        name="blocks read from a tier stay held",
        path="kv/tiers/host_tier.py",
        old="        self.slot_table.release(keys)\n\n    def mark_corrupt",
        new="        pass\n\n    def mark_corrupt",
        why="the host tier has fewer and fewer blocks that it can evict",
    ),
    # --- KV events
    Mutation(
        name="gaps in KV events are not noticed",
        path="router/ingest/feed.py",
        old="            self._buffer_batch(received)\n            return []\n",
        new="            pass\n",
        why="a router counts on blocks that are gone, until the next digest",
        seed=2,
    ),
    Mutation(
        name="snapshots of KV are ignored",
        path="router/ingest/ingest.py",
        old="                source.slots.replace(blocks)\n",
        new="                pass\n",
        why="a router that restarts does not know what workers hold",
    ),
    Mutation(
        name="KV events of a batch are applied in reverse",
        path="router/ingest/slots.py",
        old="        for event in events:\n",
        new="        for event in reversed(events):\n",
        why="a block that was removed and stored again counts as gone",
        seed=26,
    ),
    # --- cancelling and ends
    Mutation(
        name="a cancel is ignored",
        path="worker/request_intake.py",
        old="        if self._open.close(request_id, CANCELLED) is not None:\n            self._abort(request_id)\n",
        new="        self._open.close(request_id, CANCELLED)\n",
        why="engines compute for clients that have left",
    ),
    Mutation(
        name="an abort keeps the blocks",
        path="scheduler/scheduler.py",
        old="                self.holds.defer(sequence.blocks[sequence.num_lent :])\n",
        new="",
        why="every cancelled request costs its blocks for ever",
    ),
    Mutation(
        name="blocks of aborted requests are released twice",
        path="scheduler/holds.py",
        old="            self._pool.release(reversed(blocks))\n        self._deferred.clear()\n",
        new="            self._pool.release(reversed(blocks))\n        del self._deferred[1:]\n",
        why="blocks that another request has by now are taken from it",
    ),
    Mutation(
        name="the deadline of a request is ignored",
        path="journey/journey.py",
        old="        total_s = max(self._started + self._deadlines.total_s - self._loop.time(), 0.0)\n",
        new="        total_s = max(self._started + 100 * self._deadlines.total_s - self._loop.time(), 0.0)\n",
        why="a request may take for ever as long as tokens come",
    ),
    Mutation(
        name="a stop token is not honoured after a migration",
        path="scheduler/sequence.py",
        old="        self.ending_ids = self.eos.union(request.stop.stop_token_ids)\n",
        new="        self.ending_ids = self.eos.union(() if request.prior_tokens else request.stop.stop_token_ids)\n",
        why="a migrated answer goes on beyond its end",
    ),
    Mutation(
        name="a migrated answer has all its tokens anew",
        path="scheduler/sequence.py",
        old="        self.max_length = self.num_prompt + request.stop.max_tokens\n",
        new="        self.max_length = self.num_prompt + len(request.prior_tokens) + request.stop.max_tokens\n",
        why="max_tokens is counted from the migration on",
    ),
    Mutation(
        name="usage is counted twice after a migration",
        path="scheduler/step_output.py",
        old="        usage=Usage(sequence.num_prompt, sequence.num_output, num_cached) if end else None,\n        stop",
        new="        usage=Usage(sequence.num_prompt, sequence.num_output + len(sequence.request.prior_tokens), "
        "num_cached) if end else None,\n        stop",
        why="clients pay twice for the tokens before a migration",
    ),
    # --- migration and retries
    Mutation(
        name="tokens are resumed in reverse",
        path="journey/migration.py",
        old="prior_tokens=(*request.prior_tokens, *(received[0] or ())))",
        new="prior_tokens=(*request.prior_tokens, *(received[0] or ())[::-1]))",
        why="the model continues another text than the client has",
    ),
    Mutation(
        name="the last token is dropped at a migration",
        path="journey/migration.py",
        old="prior_tokens=(*request.prior_tokens, *(received[0] or ())))",
        new="prior_tokens=(*request.prior_tokens, *(received[0] or ())[:-1]))",
        why="the client gets a token twice",
    ),
    Mutation(
        name="a migration is one position off",
        path="scheduler/sequence.py",
        old="        self.tokens += request.prior_tokens_of(self.index) or self._handoff_tokens()\n",
        new="        self.tokens += request.prior_tokens_of(self.index)[1:] or self._handoff_tokens()\n",
        why="the answer goes on one token too early",
    ),
    Mutation(
        name="the failing worker is not excluded",
        path="journey/machine.py",
        old="        self._excluded |= failed\n",
        new="",
        why="a retry goes to the worker that has just failed",
    ),
    Mutation(
        name="the router ignores who is excluded",
        path="router/filters.py",
        old="        candidates = [instance for instance in capable if instance.id not in excluded]\n",
        new="        candidates = list(capable)\n",
        why="a retry goes to the worker that has just failed, as long as that can be reached",
        seed=10,
    ),
    Mutation(
        name="a stalled worker whose lease ended is forgotten",
        path="runtime/endpoint/client.py",
        old="                        self._await_return(removed)\n",
        new="                        pass\n",
        why="requests fail after stalls of a frontend and the last worker that overlap",
        seed=31,
    ),
    Mutation(
        name="a worker that was stalled counts as one that failed",
        path="journey/machine.py",
        old="            self._unreachable |= failed\n",
        new="            pass\n",
        why="requests fail after stalls of two workers that overlap",
        seed=415,
    ),
    Mutation(
        name="a request that is at fault itself is retried",
        path="journey/machine.py",
        old="        return error.fault in _NOT_WORKER_FAULTS or self._num_deaths > 1\n",
        new="        return self._num_deaths > 1\n",
        why="an invalid request is computed by one worker after the other",
        seed=2,
    ),
    Mutation(
        name="deltas of slow readers lose tokens",
        path="core/delta.py",
        old="        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),\n",
        new="        token_ids=last.token_ids,\n",
        why="merged deltas keep the later tokens only",
    ),
    # --- routing
    Mutation(
        name="a reservation outlives its request",
        path="journey/attempt_state.py",
        old="            self._router.release(decision, usage, outcome)\n",
        new="            if usage is None:\n                self._router.release(decision, usage, outcome)\n",
        why="a router believes in load that is gone",
    ),
    Mutation(
        name="a reservation is released twice",
        path="journey/attempt_state.py",
        old="        decision, self._decision = self._decision, None\n        if outcome",
        new="        decision = self._decision\n        if outcome",
        why="a router counts less load than there is",
        seed=3,
    ),
    # --- processes
    Mutation(
        name="leases never expire",
        path="runtime/join/server.py",
        old="            lease.expiry = loop.call_at(expires_at, self._expire, lease)\n",
        new="            lease.expiry = loop.call_at(1e6 + expires_at, self._expire, lease)\n",
        why="dead workers stay registered",
    ),
)
