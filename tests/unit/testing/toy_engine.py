"""A whole engine without a model: it offers all that the suite has tiers for, and its tokens depend on its KV.

The KV of a block is a hash of the KV before it and of its tokens; a token is a hash of the KV before it. So an
answer from wrong bytes is a wrong answer, as with a real model.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
from tests.unit.testing.toy_store import Entry, Store

from kvolt.core.block_key import BlockKeyChain, BlockKeyContext, KvLayout
from kvolt.core.card import Capacity, EngineInfo, ModelCard, card_hash
from kvolt.core.delta import Delta, FinishReason, StepOutput, TokenLogprobs, Usage
from kvolt.core.errors import Cancelled, InvalidRequest, NotFound
from kvolt.core.hashing import SequenceHasher, request_seed, token_bytes
from kvolt.core.ids import BlockKey, InstanceId, RequestId, SequenceHash
from kvolt.core.kv_events import Stored
from kvolt.core.load import StepStats, WorkerLoad
from kvolt.core.request import Handoff, Request, Sampling
from kvolt.engines.contract import AttachedKv, EngineSpec, HeldKv, KvAllocation, SealedKv, features_of
from kvolt.engines.sim.model import EOS, sim_card
from kvolt.transfer.memory.slabs import Slab

BLOCK_BYTES = 32
VOCABULARY = 48
"""Few tokens, EOS among them: answers end by themselves before long."""


class ToyArguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kv_blocks: int = 256
    block_size: int = 4
    max_num_seqs: int = 16
    max_batch_tokens: int = 64
    expiry_s: float = 1.0


@dataclass(slots=True, eq=False)
class Choice:
    request: Request
    index: int
    tokens: list[int]
    num_blocks: int
    keys: BlockKeyChain
    hashes: SequenceHasher
    entries: list[Entry] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    started: bool = False
    told: int = 0

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.token_ids)


@dataclass(slots=True, eq=False)
class Job:
    request: Request
    choices: list[Choice]
    prefilled: asyncio.Future[Handoff] | None = None
    first: dict[int, int] = field(default_factory=dict)
    is_admitted: bool = False


class ToyEngine:
    sampling_fields = frozenset(Sampling.__struct_fields__)

    def __init__(self, spec: EngineSpec, arguments: ToyArguments) -> None:
        self._spec, self._arguments = spec, arguments
        self._card = sim_card(spec.model, 256, arguments.block_size)
        self.store = Store(arguments.kv_blocks, self.kv_layout())
        self._jobs: dict[RequestId, Job] = {}
        self._held: dict[RequestId, tuple[list[Entry], int, asyncio.TimerHandle]] = {}
        self._kept: dict[RequestId, tuple[list[Entry], asyncio.TimerHandle]] = {}
        """What came for requests that are not admitted."""
        self._known: set[BlockKey] | None = None
        """Blocks that were told to who copies them, once there is one."""
        self._stepped = asyncio.Event()
        """Set at the end of each step and by whatever ends a prompt, for who waits for blocks."""
        self._work = asyncio.Event()
        self._closed = False

    @property
    def card(self) -> ModelCard:
        return self._card

    async def start(self) -> EngineInfo:
        arguments = self._arguments
        return EngineInfo(
            engine="toy",
            role=self._spec.role,
            model=self._card.name,
            card=card_hash(self._card),
            block_size=arguments.block_size,
            capacity=Capacity(
                max_num_seqs=arguments.max_num_seqs,
                max_batch_tokens=arguments.max_batch_tokens,
                kv_total_blocks=arguments.kv_blocks,
            ),
            kv_layout=self.kv_layout().name,
            features=features_of(self),
        )

    def submit(self, request: Request) -> None:
        self._add(request)

    def _add(self, request: Request) -> Job:
        stop, num_prompt = request.stop, len(request.token_ids)
        is_uneven = len(request.prior_tokens_by_choice) not in (0, request.sampling.num_choices)
        most = max(
            (len(request.prior_tokens_of(index)) for index in request.open_choices), default=stop.max_tokens
        )
        if not num_prompt or is_uneven or stop.max_tokens <= most:
            raise InvalidRequest("nothing to do", param="token_ids")
        if num_prompt + stop.max_tokens > self._card.context_length or request.request_id in self._jobs:
            raise InvalidRequest("too long, or here already", param="max_tokens")
        job = Job(request, [self._choice(request, index) for index in request.open_choices])
        self._jobs[request.request_id] = job
        self._work.set()
        return job

    def _choice(self, request: Request, index: int) -> Choice:
        tokens = [*request.token_ids, *request.prior_tokens_of(index)]
        if request.handoff is not None and request.handoff.first_tokens is not None:
            tokens.append(request.handoff.first_tokens[index])
        num_blocks = -(-(len(request.token_ids) + request.stop.max_tokens) // self._arguments.block_size)
        return Choice(request, index, tokens, num_blocks, *self._names(request))

    def _names(self, request: Request) -> tuple[BlockKeyChain, SequenceHasher]:
        context = BlockKeyContext(
            weights_hash="toy",
            dtype="u8",
            block_size=self._arguments.block_size,
            layout="toy",
            salt=request.salt,
        )
        seed = request_seed(request.lora, request.salt)
        return BlockKeyChain(context), SequenceHasher(self._arguments.block_size, seed)

    def abort(self, request_id: RequestId) -> None:
        self._let_go_kept(request_id)
        job = self._jobs.pop(request_id, None)
        self._stepped.set()
        if job is not None and job.is_admitted:
            for choice in job.choices:
                self._let_go(choice)

    def _let_go(self, choice: Choice) -> None:
        self.store.num_reserved -= choice.num_blocks
        self.store.release(choice.entries)

    async def withdraw(self, request_id: RequestId) -> bool:
        job = self._jobs.get(request_id)
        if job is None or job.is_admitted:
            return False
        self.abort(request_id)
        return True

    async def steps(self) -> AsyncIterator[StepOutput]:
        while not self._closed:
            if not self._jobs and not self.store.changes:
                self._work.clear()
                await self._work.wait()
                continue
            plan = self._plan() if self._jobs else []
            self._stepped.set()
            await asyncio.sleep(0.0005)
            deltas = self._compute(plan)
            self._stepped.set()
            changes, self.store.changes = tuple(self.store.changes), []
            yield StepOutput(tuple(deltas), load=self._load(plan), kv_changes=changes)

    async def close(self) -> None:
        self._closed = True
        for _, _, timer in self._held.values():
            timer.cancel()
        for _, timer in self._kept.values():
            timer.cancel()
        self._work.set()

    # --- computing

    def _plan(self) -> list[tuple[Choice, int]]:
        """Who computes how many tokens now."""
        budget = self._arguments.max_batch_tokens
        num_running = sum(len(job.choices) for job in self._jobs.values() if job.is_admitted)
        plan: list[tuple[Choice, int]] = []
        for job in self._jobs.values():
            if not job.is_admitted:
                num_choices = len(job.choices)
                if num_running and num_running + num_choices > self._arguments.max_num_seqs:
                    break
                if not self._reserve(sum(choice.num_blocks for choice in job.choices)):
                    break
                job.is_admitted = True
                num_running += num_choices
            for choice in job.choices:
                if not choice.started:
                    self._look_up(choice)
                    self._let_go_kept(job.request.request_id)
                count = min(len(choice.tokens) - choice.num_computed, budget)
                budget -= count
                if count:
                    plan.append((choice, count))
        return plan

    def _reserve(self, num_blocks: int) -> bool:
        while not self.store.reserve(num_blocks):
            if not self._kept:
                return False
            self._let_go_kept(next(reversed(self._kept)))
        return True

    def _look_up(self, choice: Choice) -> None:
        choice.started = True
        block_size = self._arguments.block_size
        choice.keys.extend(choice.tokens)
        choice.hashes.extend(choice.tokens)
        choice.entries = self.store.acquire(choice.keys.keys[: (len(choice.tokens) - 1) // block_size])
        choice.num_computed = len(choice.entries) * block_size
        choice.num_cached = min(choice.num_computed, len(choice.request.token_ids))

    def _compute(self, plan: list[tuple[Choice, int]]) -> list[tuple[RequestId, Delta]]:
        deltas: list[tuple[RequestId, Delta]] = []
        for choice, count in plan:
            request_id = choice.request.request_id
            job = self._jobs.get(request_id)
            if job is None or choice not in job.choices:
                continue  # aborted during the step
            choice.num_computed += count
            self._seal(choice)
            if choice.num_computed == len(choice.tokens):
                self._advance(job, choice, deltas)
        return deltas

    def _seal(self, choice: Choice) -> None:
        block_size = self._arguments.block_size
        for position in range(len(choice.entries), choice.num_computed // block_size):
            parent = choice.entries[-1] if choice.entries else None
            block = choice.tokens[position * block_size : (position + 1) * block_size]
            before = parent.data if parent else b""
            data = blake2b(before + token_bytes(block), digest_size=BLOCK_BYTES).digest()
            names = choice.keys.keys[position], choice.hashes.sequence[position]
            choice.entries.append(self.store.add(*names, parent, data))

    def _sample(self, choice: Choice) -> int:
        tail = choice.tokens[len(choice.entries) * self._arguments.block_size :]
        before = choice.entries[-1].data if choice.entries else b""
        at = (choice.request.sampling.seed or 0, choice.index, choice.num_output)
        digest = blake2b(before + token_bytes(tail) + repr(at).encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little") % VOCABULARY

    def _advance(self, job: Job, choice: Choice, deltas: list[tuple[RequestId, Delta]]) -> None:
        token = self._sample(choice)
        end = self._end(choice, token)
        if job.prefilled is not None:
            self._note_first(job, choice, None if end else token)
            return
        choice.tokens.append(token)
        choice.keys.extend([token])
        choice.hashes.extend([token])
        request, sampling = choice.request, choice.request.sampling
        first = not choice.told
        choice.told += 1
        deltas.append(
            (
                request.request_id,
                Delta(
                    (token,),
                    choice.index,
                    finish=end[0] if end else None,
                    stop_reason=end[1] if end else None,
                    cached_tokens=choice.num_cached if first and not choice.index else None,
                    logprobs=_logprobs([token], sampling.logprobs),
                    prompt_logprobs=_prompt_logprobs(request) if first and not choice.index else None,
                    usage=Usage(len(request.token_ids), choice.num_output) if end else None,
                ),
            )
        )
        if end:
            self._let_go(choice)
            job.choices.remove(choice)
            if not job.choices:
                del self._jobs[request.request_id]

    def _end(self, choice: Choice, token: int) -> tuple[FinishReason, int | None] | None:
        stop, num_before = choice.request.stop, choice.num_output
        if num_before >= stop.min_tokens:
            if token == EOS and not stop.ignore_eos:
                return FinishReason.STOP, None
            if token in stop.stop_token_ids:
                return FinishReason.STOP, token
        return (FinishReason.LENGTH, None) if num_before + 1 >= stop.max_tokens else None

    def _load(self, plan: list[tuple[Choice, int]]) -> WorkerLoad:
        running = sum(job.is_admitted for job in self._jobs.values())
        return WorkerLoad(
            running=running,
            waiting=len(self._jobs) - running,
            kv_used_blocks=self.store.num_reserved,
            kv_total_blocks=self.store.num_blocks,
            step=StepStats(batch=len(plan), time_s=0.0005),
        )

    # --- KvEvents, KvVisible, KvMovable

    async def clear_kv(self) -> int:
        for request_id in list(self._kept):
            self._let_go_kept(request_id)
        num_blocks = self.store.clear()
        self._work.set()
        return num_blocks

    async def match(self, request: Request) -> int:
        keys = self.kv_keys(request)
        held = next((index for index, key in enumerate(keys) if key not in self.store.named), len(keys))
        return held * self._arguments.block_size

    async def kv_contents(self) -> tuple[Stored, ...]:
        entries = sorted(self.store.named.values(), key=lambda entry: entry.position)
        return tuple(entry.told() for entry in entries)

    def kv_layout(self) -> KvLayout:
        return KvLayout(
            name="toy",
            dtype="u8",
            num_layers=1,
            num_kv_heads=1,
            head_dim=BLOCK_BYTES,
            block_size=self._arguments.block_size,
            block_bytes=BLOCK_BYTES,
        )

    def kv_keys(self, request: Request) -> tuple[BlockKey, ...]:
        keys, _ = self._names(request)
        return tuple(keys.extend(request.token_ids))

    # --- KvAddressable

    def kv_slabs(self) -> tuple[Slab, ...]:
        return (self.store.slab,)

    async def held_kv(self, request_id: RequestId) -> HeldKv:
        if request_id not in self._held:
            raise NotFound(f"no blocks are held of {request_id}", kind="handoff", name=request_id)
        return _placed(self._held[request_id][0])

    async def computed_kv(self, request_id: RequestId, after: int) -> HeldKv:
        while True:
            if request_id in self._held:
                return await self.held_kv(request_id)
            job = self._jobs.get(request_id)
            if job is None or job.prefilled is None:
                raise NotFound(f"no prompt {request_id} is computed", kind="handoff", name=request_id)
            if len(job.choices[0].entries) > after:
                return _placed(job.choices[0].entries)
            self._stepped.clear()
            await self._stepped.wait()

    async def allocate_kv(self, keys: Sequence[BlockKey], hashes: Sequence[SequenceHash]) -> KvAllocation:
        room = self.store.allocate_kv(keys, hashes)
        self._work.set()
        return room

    async def commit_kv(self, room: KvAllocation, num_filled: int, keep_for: RequestId | None = None) -> None:
        kept = self.store.settle(room.blocks[0], num_filled, keep_for is not None)
        if keep_for is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._arguments.expiry_s, self._let_go_kept, keep_for)
            self._kept[keep_for] = (kept, timer)
        self._work.set()

    def _let_go_kept(self, request_id: RequestId) -> None:
        kept = self._kept.pop(request_id, None)
        if kept is not None:
            entries, timer = kept
            timer.cancel()
            self.store.num_reserved -= len(entries)
            self.store.release(entries)

    # --- KvTierable

    async def pin_sealed(self, name: RequestId) -> tuple[SealedKv, ...]:
        named = self.store.named
        if self._known is None:
            self._known = set(named)
        new = [entry for entry in named.values() if entry.key not in self._known]
        parents = {entry.parent.key for entry in new if entry.parent is not None}
        self._known = set(named)
        found = [self._pin(name, tip) for tip in new if tip.key not in parents]
        return tuple(found)

    async def attach_kv(self, room: KvAllocation, num_last: int, request_id: RequestId) -> AttachedKv:
        """It computes a prompt in one go: whatever comes meanwhile comes too late."""
        return AttachedKv(request_id in self._jobs)

    def _pin(self, name: RequestId, tip: Entry) -> SealedKv:
        chain = [tip]
        while (parent := chain[0].parent) is not None:
            chain.insert(0, parent)
        entries = self.store.acquire([entry.key for entry in chain])
        loop = asyncio.get_running_loop()
        held, num_reserved, timer = self._held.pop(name, ([], 0, None))
        if timer is not None:
            timer.cancel()
        self.store.num_reserved += len(entries)
        timer = loop.call_later(self._arguments.expiry_s, self._release, name)
        self._held[name] = ([*held, *entries], num_reserved + len(entries), timer)
        told = _placed(entries)
        return SealedKv(0, told.blocks, told.keys, told.hashes, expires_in_s=self._arguments.expiry_s)

    # --- Prefill

    async def prefill(self, request: Request) -> Handoff:
        job = self._add(request)
        job.prefilled = asyncio.get_running_loop().create_future()
        try:
            return await job.prefilled
        except asyncio.CancelledError:
            self.abort(request.request_id)
            await self.release_prefill(request.request_id)
            raise

    def _note_first(self, job: Job, choice: Choice, token: int | None) -> None:
        if token is not None:
            job.first[choice.index] = token
        choice.told += 1
        if not all(other.told for other in job.choices):
            return
        request = job.request
        del self._jobs[request.request_id]
        held = job.choices[0].entries
        for other in job.choices[1:]:
            self.store.release(other.entries)
        self.store.num_reserved -= sum(other.num_blocks for other in job.choices) - len(held)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._arguments.expiry_s, self._release, request.request_id)
        self._held[request.request_id] = (held, len(held), timer)
        whole = len(job.first) == len(job.choices) and request.sampling.logprobs is None
        handoff = Handoff(
            ticket=request.request_id.encode(),
            prefill_instance=InstanceId(""),
            block_hashes=tuple(entry.sequence_hash for entry in held),
            expires_in_s=self._arguments.expiry_s,
            first_tokens=tuple(job.first[index] for index in sorted(job.first)) if whole else None,
        )
        assert job.prefilled is not None
        job.prefilled.set_result(handoff)

    async def release_prefill(self, request_id: RequestId) -> None:
        job = self._jobs.get(request_id)
        self.abort(request_id)
        if job is not None and job.prefilled is not None and not job.prefilled.done():
            job.prefilled.set_exception(Cancelled("the prompt was let go"))
        self._release(request_id)

    def _release(self, request_id: RequestId) -> None:
        held = self._held.pop(request_id, None)
        if held is not None:
            entries, num_reserved, timer = held
            timer.cancel()
            self.store.num_reserved -= num_reserved
            self.store.release(entries)


def _placed(entries: Sequence[Entry]) -> HeldKv:
    return HeldKv(
        tuple(entry.block for entry in entries),
        tuple(entry.key for entry in entries),
        tuple(entry.sequence_hash for entry in entries),
    )


def _logprobs(tokens: Sequence[int], num_top: int | None) -> tuple[TokenLogprobs, ...] | None:
    if num_top is None:
        return None
    return tuple(
        TokenLogprobs(token, -0.5, tuple((token + index, -0.5 - index) for index in range(num_top)))
        for token in tokens
    )


def _prompt_logprobs(request: Request) -> tuple[TokenLogprobs | None, ...] | None:
    told = _logprobs(request.token_ids[1:], request.sampling.prompt_logprobs)
    return None if told is None or request.prior_tokens_of(0) else (None, *told)
