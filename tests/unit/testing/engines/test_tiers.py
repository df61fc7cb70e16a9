"""The tiers of the engine suite: an engine that offers everything passes them, and each finds what it is for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import ScriptedEngine
from tests.unit.testing.toy_engine import BLOCK_BYTES, Choice, Job, ToyArguments, ToyEngine
from tests.unit.testing.toy_store import Entry

from kvolt.core.delta import StepOutput
from kvolt.core.errors import NotFound
from kvolt.core.ids import BlockKey, InstanceId, RequestId, SequenceHash
from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored, pack_hashes
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Handoff, Request, Role
from kvolt.engines.contract import AttachedKv, EngineSpec, HeldKv, KvAllocation, SealedKv
from kvolt.testing import run_virtual
from kvolt.testing.engines import event_cases as events
from kvolt.testing.engines import handoff_cases as handoff
from kvolt.testing.engines import kept_cases as kept
from kvolt.testing.engines import parts_cases as parts
from kvolt.testing.engines import placed_cases as placed
from kvolt.testing.engines import tierable_cases as tierable
from kvolt.testing.engines import visible_cases as visible
from kvolt.testing.engines.suite import CASES as CORE
from kvolt.testing.engines.tiers import TIERS, suites_for
from kvolt.transfer.memory.slabs import Slab

SPEC = EngineSpec(model="toy", role=Role.AGGREGATED)
PLENTY = ToyArguments()
SCARCE = ToyArguments(kv_blocks=80)
"""Less than the cases ask for: blocks are evicted."""


class ToyHarness:
    def __init__(self, arguments: ToyArguments = PLENTY, kind: type[ToyEngine] = ToyEngine) -> None:
        self._arguments = arguments
        self._kind = kind

    def engine(self) -> ToyEngine:
        return self._kind(SPEC, self._arguments)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(range(3, 3 + num_tokens))

    def ending_prompt(self) -> tuple[int, ...]:
        return (30, 31, 32, 33, 34, 35)


ALL = [case for tier in TIERS for case in tier.cases]


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.__name__)
@pytest.mark.parametrize("arguments", [PLENTY, SCARCE], ids=["plenty", "scarce"])
def test_an_engine_that_offers_everything_passes(case: Any, arguments: ToyArguments) -> None:
    run_virtual(lambda: case(ToyHarness(arguments)))


async def test_an_engine_has_to_pass_what_it_offers() -> None:
    assert list(suites_for(ToyEngine(SPEC, PLENTY))) == ALL
    assert suites_for(ScriptedEngine()) == CORE


def test_no_case_is_there_twice() -> None:
    names = [case.__name__ for case in ALL]
    assert len(set(names)) == len(names)


# --- engines with a fault


class _Telling(ToyEngine):
    """Tells something else than what happened."""

    def tell(self, change: KvChange) -> Sequence[KvChange]:
        raise NotImplementedError

    async def steps(self) -> AsyncIterator[StepOutput]:
        async for step in super().steps():
            told = tuple(change for real in step.kv_changes for change in self.tell(real))
            yield replace(step, kv_changes=told)


class _TellsNothing(_Telling):
    def tell(self, change: KvChange) -> Sequence[KvChange]:
        return ()


class _ForgetsRemovals(_Telling):
    def tell(self, change: KvChange) -> Sequence[KvChange]:
        return () if isinstance(change, Removed) else (change,)


class _ForgetsToTellClears(_Telling):
    def tell(self, change: KvChange) -> Sequence[KvChange]:
        return () if isinstance(change, Cleared) else (change,)


class _TellsTwice(_Telling):
    def tell(self, change: KvChange) -> Sequence[KvChange]:
        return (change, change)


class _ChildrenFirst(_Telling):
    async def steps(self) -> AsyncIterator[StepOutput]:
        async for step in ToyEngine.steps(self):
            yield replace(step, kv_changes=step.kv_changes[::-1])


class _OwnHashes(_Telling):
    def tell(self, change: KvChange) -> Sequence[KvChange]:
        if not isinstance(change, Stored):
            return (change,)
        hashes = pack_hashes([each ^ 1 for each in change.sequence_hashes])
        return (replace(change, hashes=hashes, parent=change.parent and change.parent ^ 1),)


class _SharesLastToken(ToyEngine):
    """Says that a prompt which it has whole was not computed at all."""

    def _look_up(self, choice: Choice) -> None:
        super()._look_up(choice)
        if choice.keys.keys and choice.keys.keys[-1] in self.store.named:
            choice.num_cached = len(choice.request.token_ids)


class _NoSalt(ToyEngine):
    def _names(self, request: Request) -> Any:
        return super()._names(replace(request, salt=None))


class _ClearsInSilence(ToyEngine):
    """Tells of it only when something else happens."""

    async def clear_kv(self) -> int:
        return self.store.clear()


class _StaleAfterClear(ToyEngine):
    """The block of a held one stays findable."""

    async def clear_kv(self) -> int:
        before = dict(self.store.named)
        num_blocks = await super().clear_kv()
        self.store.named.update(before)
        return num_blocks


class _KeepsEvicted(ToyEngine):
    def __init__(self, spec: EngineSpec, arguments: ToyArguments) -> None:
        super().__init__(spec, arguments)

        def evict(entry: Entry) -> None:
            self.store.changes.append(Removed.from_hashes([entry.sequence_hash]))

        self.store.evict = evict  # type: ignore[method-assign]


class _MatchesTooMuch(ToyEngine):
    async def match(self, request: Request) -> int:
        held = await super().match(request)
        return held and len(request.token_ids)


class _MatchRegisters(ToyEngine):
    async def match(self, request: Request) -> int:
        held = await super().match(request)
        self.store.named.popitem() if held else None
        return held


class _HidesContents(ToyEngine):
    async def kv_contents(self) -> tuple[Stored, ...]:
        return (await super().kv_contents())[:-1]


class _ContentsUnsorted(ToyEngine):
    async def kv_contents(self) -> tuple[Stored, ...]:
        return (await super().kv_contents())[::-1]


class _OwnKeys(ToyEngine):
    def kv_keys(self, request: Request) -> tuple[BlockKey, ...]:
        return tuple(BlockKey(bytes([id(self) % 251]) + key[1:]) for key in super().kv_keys(request))


class _TellsFirstTwice(ToyEngine):
    def submit(self, request: Request) -> None:
        told = request.handoff and replace(request.handoff, first_tokens=None)
        super().submit(replace(request, handoff=told))


class _SamplesAnotherFirst(ToyEngine):
    async def prefill(self, request: Request) -> Handoff:
        found = await super().prefill(request)
        first = found.first_tokens and tuple(token + 1 for token in found.first_tokens)
        return replace(found, first_tokens=first)


class _GivesFinalTokens(ToyEngine):
    def _end(self, choice: Choice, token: int) -> Any:
        job = self._jobs.get(choice.request.request_id)
        return None if isinstance(job, Job) and job.prefilled is not None else super()._end(choice, token)


class _HoldsNothing(ToyEngine):
    async def prefill(self, request: Request) -> Handoff:
        found = await super().prefill(request)
        await self.release_prefill(request.request_id)
        return found


class _NeverLetsGo(ToyEngine):
    async def release_prefill(self, request_id: RequestId) -> None:
        pass


class _NeverExpires(ToyEngine):
    def _release(self, request_id: RequestId) -> None:
        pass

    async def release_prefill(self, request_id: RequestId) -> None:
        ToyEngine._release(self, request_id)


class _GoesOnWhenCancelled(ToyEngine):
    async def prefill(self, request: Request) -> Handoff:
        job = self._add(request)
        job.prefilled = asyncio.get_running_loop().create_future()
        return await asyncio.shield(job.prefilled)

    async def release_prefill(self, request_id: RequestId) -> None:
        pass


class _PrefillsAnything(ToyEngine):
    async def prefill(self, request: Request) -> Handoff:
        return Handoff(ticket=b"", prefill_instance=InstanceId(""))


class _WrongWithoutBlocks(ToyEngine):
    """Goes on from a handoff whose blocks are not here as if they were."""

    def _seal(self, choice: Choice) -> None:
        if choice.request.handoff is None or self.store.named:
            return super()._seal(choice)
        while len(choice.entries) < choice.num_computed // self._arguments.block_size:
            position = len(choice.entries)
            names = choice.keys.keys[position], choice.hashes.sequence[position]
            entry = self.store.new(*names, None)
            entry.place[:] = bytes(BLOCK_BYTES)
            choice.entries.append(entry)
        return None


class _MixesUpBlocks(ToyEngine):
    async def held_kv(self, request_id: RequestId) -> HeldKv:
        held = await super().held_kv(request_id)
        return replace(held, blocks=held.blocks[::-1])


class _NamesOtherBlocks(ToyEngine):
    async def held_kv(self, request_id: RequestId) -> HeldKv:
        held = await super().held_kv(request_id)
        return replace(held, hashes=held.hashes[::-1])


class _LendsWhatIsHeld(ToyEngine):
    """Has told where the blocks lie, and lets go of them."""

    async def held_kv(self, request_id: RequestId) -> HeldKv:
        held = await super().held_kv(request_id)
        entries, num_reserved, timer = self._held[request_id]
        self.store.num_reserved -= num_reserved
        self.store.release(entries)
        self._held[request_id] = ([], 0, timer)
        return held


class _HasTheSameRankTwice(ToyEngine):
    """Says that two slabs are all of the model each."""

    def kv_slabs(self) -> tuple[Slab, ...]:
        return (*super().kv_slabs(), *super().kv_slabs())


class _DoesNotSayWhatLiesThere(ToyEngine):
    def kv_slabs(self) -> tuple[Slab, ...]:
        (slab,) = super().kv_slabs()
        return (Slab(slab.memory, slab.block_bytes),)


class _HoldsForEver(ToyEngine):
    """Tells of blocks that are let go."""

    def __init__(self, spec: EngineSpec, arguments: ToyArguments) -> None:
        super().__init__(spec, arguments)
        self._told: dict[RequestId, HeldKv] = {}

    async def held_kv(self, request_id: RequestId) -> HeldKv:
        if request_id not in self._told:
            self._told[request_id] = await super().held_kv(request_id)
        return self._told[request_id]


class _ForgetsWhatIsPresent(ToyEngine):
    async def allocate_kv(self, keys: Sequence[BlockKey], hashes: Sequence[SequenceHash]) -> KvAllocation:
        self.store.named, known = {}, self.store.named
        room = await super().allocate_kv(keys, hashes)
        self.store.named |= known
        return room


class _GivesRoomOfOthers(ToyEngine):
    """Blocks that running requests hold."""

    async def allocate_kv(self, keys: Sequence[BlockKey], hashes: Sequence[SequenceHash]) -> KvAllocation:
        room = await super().allocate_kv(keys, hashes)
        choices = [choice for job in self._jobs.values() for choice in job.choices]
        held = [entry.block for choice in choices for entry in choice.entries]
        return replace(room, blocks=(*held, *room.blocks)[: len(room.blocks)])


class _WritesIntoRooms(ToyEngine):
    """Room is not taken out of what the engine computes with."""

    async def allocate_kv(self, keys: Sequence[BlockKey], hashes: Sequence[SequenceHash]) -> KvAllocation:
        room = await super().allocate_kv(keys, hashes)
        self.store.free += room.blocks
        return room


class _OneRoomForAPrompt(ToyEngine):
    """Of two for the same blocks it knows the later one."""

    def __init__(self, spec: EngineSpec, arguments: ToyArguments) -> None:
        super().__init__(spec, arguments)
        self._latest: dict[BlockKey, KvAllocation] = {}

    async def allocate_kv(self, keys: Sequence[BlockKey], hashes: Sequence[SequenceHash]) -> KvAllocation:
        room = self._latest[keys[-1]] = await super().allocate_kv(keys, hashes)
        return room

    async def commit_kv(self, room: KvAllocation, num_filled: int, keep_for: RequestId | None = None) -> None:
        if room in self._latest.values():
            await super().commit_kv(room, num_filled, keep_for)


class _SettlesUnfilled(ToyEngine):
    async def commit_kv(self, room: KvAllocation, num_filled: int, keep_for: RequestId | None = None) -> None:
        await super().commit_kv(room, len(room.blocks), keep_for)


class _SettlesNothing(ToyEngine):
    async def commit_kv(self, room: KvAllocation, num_filled: int, keep_for: RequestId | None = None) -> None:
        await super().commit_kv(room, 0, keep_for)


class _NeverLetsGoOfRoom(ToyEngine):
    async def commit_kv(self, room: KvAllocation, num_filled: int, keep_for: RequestId | None = None) -> None:
        await super().commit_kv(room, num_filled, keep_for)
        self.store.num_reserved += len(room.blocks)


class _NamesOrphans(ToyEngine):
    """Does not look at whether what a block follows is still there."""

    def __init__(self, spec: EngineSpec, arguments: ToyArguments) -> None:
        super().__init__(spec, arguments)
        self.store.is_orphan = lambda entry: False  # type: ignore[method-assign]


class _TellsPlannedParts(ToyEngine):
    """Names the blocks that a prompt is going to have, before they are computed."""

    async def computed_kv(self, request_id: RequestId, after: int) -> HeldKv:
        held = await super().computed_kv(request_id, after)
        job = self._jobs.get(request_id)
        if job is None:
            return held
        names = job.choices[0].keys.keys, job.choices[0].hashes.sequence
        num_more = len(names[0]) - len(held.blocks)
        coming = self.store.free[::-1][:num_more]
        return HeldKv((*held.blocks, *coming), tuple(names[0]), tuple(names[1]))


class _TellsPartsAtTheEnd(ToyEngine):
    async def computed_kv(self, request_id: RequestId, after: int) -> HeldKv:
        return await super().computed_kv(request_id, 10_000)


class _TellsCachedPartsLate(ToyEngine):
    """With what the first step computes."""

    async def computed_kv(self, request_id: RequestId, after: int) -> HeldKv:
        held = await super().computed_kv(request_id, after)
        job = self._jobs.get(request_id)
        if job is None or len(held.blocks) * self._arguments.block_size > job.choices[0].num_cached:
            return held
        return await super().computed_kv(request_id, len(held.blocks))


class _MixesUpParts(ToyEngine):
    async def computed_kv(self, request_id: RequestId, after: int) -> HeldKv:
        held = await super().computed_kv(request_id, after)
        return replace(held, blocks=held.blocks[::-1]) if request_id in self._jobs else held


class _OverwritesParts(ToyEngine):
    """Has told of a block, and gives it to somebody else."""

    async def computed_kv(self, request_id: RequestId, after: int) -> HeldKv:
        held = await super().computed_kv(request_id, after)
        if after:
            entry = self.store.named[held.keys[0]]
            entry.place[:] = bytes(BLOCK_BYTES)
        return held


class _WaitsForPartsForEver(ToyEngine):
    async def computed_kv(self, request_id: RequestId, after: int) -> HeldKv:
        try:
            return await super().computed_kv(request_id, after)
        except NotFound:
            return await asyncio.get_running_loop().create_future()


class _KeepsItsFirstWatcher(ToyEngine):
    """Also when that has gone."""

    def __init__(self, spec: EngineSpec, arguments: ToyArguments) -> None:
        super().__init__(spec, arguments)
        self._gone: set[RequestId] = set()

    async def computed_kv(self, request_id: RequestId, after: int) -> HeldKv:
        try:
            if request_id in self._gone:
                await asyncio.Event().wait()
            return await super().computed_kv(request_id, after)
        except asyncio.CancelledError:
            self._gone.add(request_id)
            raise


class _KeepsNothing(ToyEngine):
    async def commit_kv(self, room: KvAllocation, num_filled: int, keep_for: RequestId | None = None) -> None:
        await super().commit_kv(room, num_filled)


class _KeepsWhatCameOnly(ToyEngine):
    """Not what that follows."""

    async def commit_kv(self, room: KvAllocation, num_filled: int, keep_for: RequestId | None = None) -> None:
        await super().commit_kv(room, num_filled, keep_for)
        if keep_for is not None:
            entries, timer = self._kept[keep_for]
            self.store.release(entries[: room.num_present])
            self.store.num_reserved -= room.num_present
            self._kept[keep_for] = (entries[room.num_present :], timer)


class _KeepsUncounted(ToyEngine):
    def _load(self, plan: list[tuple[Choice, int]]) -> WorkerLoad:
        load = super()._load(plan)
        num_kept = sum(len(entries) for entries, _ in self._kept.values())
        return replace(load, kv_used_blocks=load.kv_used_blocks - num_kept)


class _KeepsForEver(ToyEngine):
    """What came, also when its request is admitted or gone."""

    def _let_go_kept(self, request_id: RequestId) -> None:
        pass

    def _reserve(self, num_blocks: int) -> bool:
        return self.store.reserve(num_blocks)


class _ThrowsAway(ToyEngine):
    """What it lets go of is not even cached."""

    async def release_prefill(self, request_id: RequestId) -> None:
        entries, _ = self._kept.get(request_id, ([], None))
        await super().release_prefill(request_id)
        for entry in reversed(entries):
            self.store.idle.pop(entry.key)
            self.store.evict(entry)
            self.store.free.append(entry.block)


class _KeepsFromWhoComputes(ToyEngine):
    def __init__(self, spec: EngineSpec, arguments: ToyArguments) -> None:
        super().__init__(spec, replace(arguments, expiry_s=3600.0))

    def _reserve(self, num_blocks: int) -> bool:
        return self.store.reserve(num_blocks)


class _KeepsWhatIsCleared(ToyEngine):
    async def clear_kv(self) -> int:
        kept, self._kept = self._kept, {}
        num_blocks = await super().clear_kv()
        self._kept = kept
        return num_blocks


class _TellsSealedAgain(ToyEngine):
    async def pin_sealed(self, name: RequestId) -> tuple[SealedKv, ...]:
        if self._known is not None and name not in self._held:
            self._known.clear()
        return await super().pin_sealed(name)


class _TellsWhatWasBefore(ToyEngine):
    async def pin_sealed(self, name: RequestId) -> tuple[SealedKv, ...]:
        if self._known is None:
            self._known = set()
        return await super().pin_sealed(name)


class _TakesAndComputesAllTheSame(ToyEngine):
    async def attach_kv(self, room: KvAllocation, num_last: int, request_id: RequestId) -> AttachedKv:
        taken = await super().attach_kv(room, num_last, request_id)
        return replace(taken, num_attached=int(num_last == 1))


class _PinsNothing(ToyEngine):
    async def pin_sealed(self, name: RequestId) -> tuple[SealedKv, ...]:
        found = await super().pin_sealed(name)
        self._release(name)
        return found


FAULTS = [
    (_TellsNothing, events.repeated_prompt_is_cached),
    (_TellsTwice, events.repeated_prompt_is_cached),
    (_ChildrenFirst, events.repeated_prompt_is_cached),
    (_OwnHashes, events.repeated_prompt_is_cached),
    (_OwnHashes, events.answer_blocks_are_published),
    (_SharesLastToken, events.common_prefix_is_shared),
    (_NoSalt, events.salts_isolate_blocks),
    (_ForgetsToTellClears, events.clear_removes_all_blocks),
    (_ClearsInSilence, events.clear_removes_all_blocks),
    (_StaleAfterClear, events.clear_removes_all_blocks),
    (_StaleAfterClear, events.clear_while_computing),
    (_ForgetsRemovals, events.evicted_blocks_are_not_found),
    (_KeepsEvicted, events.evicted_blocks_are_not_found),
    (_TellsNothing, events.aborted_blocks_are_published_correctly),
    (_MatchesTooMuch, visible.match_counts_held_blocks),
    (_HidesContents, visible.contents_match_events),
    (_ContentsUnsorted, visible.contents_match_events),
    (_ForgetsToTellClears, visible.contents_match_events),
    (_MatchRegisters, visible.reads_change_nothing),
    (_OwnKeys, placed.keys_identify_contents),
    (_NoSalt, placed.keys_identify_contents),
    (_SettlesNothing, handoff.decode_continues_after_prefill),
    (_TellsFirstTwice, handoff.decode_continues_after_prefill),
    (_SamplesAnotherFirst, handoff.decode_continues_after_prefill),
    (_TellsFirstTwice, handoff.each_choice_has_its_first_token),
    (_GivesFinalTokens, handoff.single_token_is_left_to_decode),
    (_WrongWithoutBlocks, handoff.unknown_ticket_gives_no_wrong_tokens),
    (_HoldsNothing, handoff.blocks_are_held_until_released),
    (_NeverLetsGo, handoff.blocks_are_held_until_released),
    (_NeverExpires, handoff.ticket_expires),
    (_GoesOnWhenCancelled, handoff.cancelled_prefill_frees_everything),
    (_PrefillsAnything, handoff.prefill_rejects_bad_requests),
    (_MixesUpBlocks, placed.copied_blocks_are_used),
    (_HasTheSameRankTwice, placed.copied_blocks_are_used),
    (_DoesNotSayWhatLiesThere, placed.copied_blocks_are_used),
    (_NamesOtherBlocks, placed.copied_blocks_are_used),
    (_SettlesNothing, placed.copied_blocks_are_used),
    (_NeverLetsGoOfRoom, placed.copied_blocks_are_used),
    (_TellsNothing, placed.copied_blocks_are_used),
    (_ForgetsWhatIsPresent, placed.only_missing_blocks_are_allocated),
    (_SettlesNothing, placed.only_missing_blocks_are_allocated),
    (_NeverLetsGoOfRoom, placed.only_missing_blocks_are_allocated),
    (_SettlesUnfilled, placed.missing_blocks_are_computed),
    (_NeverLetsGoOfRoom, placed.missing_blocks_are_computed),
    (_GivesRoomOfOthers, placed.allocation_is_exclusive),
    (_WritesIntoRooms, placed.allocation_is_exclusive),
    (_WritesIntoRooms, placed.allocations_never_overlap),
    (_NeverLetsGoOfRoom, placed.allocations_never_overlap),
    (_OneRoomForAPrompt, placed.same_blocks_are_imported_twice),
    (_NamesOrphans, placed.clear_during_import),
    (_StaleAfterClear, placed.clear_during_import),
    (_LendsWhatIsHeld, placed.held_blocks_stay),
    (_HoldsForEver, placed.held_blocks_stay),
    (_NeverLetsGo, placed.held_blocks_stay),
    (_HoldsForEver, placed.expired_blocks_are_not_held),
    (_NeverExpires, placed.expired_blocks_are_not_held),
    (_TellsPlannedParts, parts.parts_are_reported_while_computing),
    (_TellsPartsAtTheEnd, parts.parts_are_reported_while_computing),
    (_MixesUpParts, parts.parts_are_reported_while_computing),
    (_TellsCachedPartsLate, parts.cached_blocks_are_reported_first),
    (_TellsPartsAtTheEnd, parts.cached_blocks_are_reported_first),
    (_MixesUpParts, parts.parts_with_several_choices),
    (_OverwritesParts, parts.parts_stay_while_other_requests_run),
    (_NeverLetsGo, parts.released_prompt_has_no_parts),
    (_WaitsForPartsForEver, parts.released_prompt_has_no_parts),
    (_KeepsItsFirstWatcher, parts.parts_can_be_requested_again),
    (_KeepsNothing, kept.kept_blocks_stay_for_their_request),
    (_KeepsUncounted, kept.kept_blocks_stay_for_their_request),
    (_KeepsForEver, kept.kept_blocks_stay_for_their_request),
    (_KeepsWhatCameOnly, kept.cached_prefix_is_kept_too),
    (_KeepsNothing, kept.cached_prefix_is_kept_too),
    (_KeepsForEver, kept.release_prefill_releases_kept_blocks),
    (_ThrowsAway, kept.release_prefill_releases_kept_blocks),
    (_KeepsForEver, kept.kept_blocks_expire),
    (_KeepsForEver, kept.abort_releases_kept_blocks),
    (_KeepsFromWhoComputes, kept.kept_blocks_yield_to_running_requests),
    (_KeepsWhatIsCleared, kept.clear_removes_kept_blocks),
    (_TellsSealedAgain, tierable.complete_blocks_are_pinned_once),
    (_TellsWhatWasBefore, tierable.complete_blocks_are_pinned_once),
    (_PinsNothing, tierable.pinned_blocks_stay),
    (_TakesAndComputesAllTheSame, tierable.attached_blocks_are_skipped),
    (_NeverLetsGo, tierable.pinned_blocks_stay),
]


@pytest.mark.parametrize(("kind", "case"), FAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_the_suite_finds_a_broken_engine(kind: type[ToyEngine], case: Any) -> None:
    with pytest.raises((AssertionError, asyncio.TimeoutError)):
        run_virtual(lambda: case(ToyHarness(SCARCE, kind)))


def test_every_case_of_a_tier_can_fail() -> None:
    found = {case.__name__ for _, case in FAULTS}
    tiers = [tier for tier in TIERS if tier.needs]
    assert {case.__name__ for tier in tiers for case in tier.cases} == found
