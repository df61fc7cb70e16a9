"""KvFeed against a real publisher on a socket: order, holes, and publishers that are not what they were."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.unit.engines.external.publisher import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Publisher,
    payload_of,
)

from kvolt.core.hashing import SequenceHasher, request_seed
from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored
from kvolt.engines.external import kv_feed
from kvolt.engines.external.kv_feed import KvFeed
from kvolt.engines.kv_formats.schema import SourceEngine
from kvolt.runtime.tasks import TaskGroup

BLOCK = 4
RECORDED = json.loads((Path(__file__).parent / "data/vllm_0_32_events.json").read_text())


def stored(number: int, parent: int | None = None) -> bytes:
    """A batch with one block of tokens that nobody else has; its name in the engine is its number."""
    return payload_of(
        BlockStored(
            block_hashes=[number],
            parent_block_hash=parent,
            token_ids=tokens_of(number),
            block_size=BLOCK,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=[None],
            group_idx=0,
        )
    )


def removed(number: int) -> bytes:
    return payload_of(BlockRemoved(block_hashes=[number], medium="GPU", group_idx=0))


def tokens_of(number: int) -> list[int]:
    return list(range(number * BLOCK, (number + 1) * BLOCK))


def hashes(*tokens: int, lora: str | None = None, salt: str | None = None) -> tuple[int, ...]:
    hasher = SequenceHasher(BLOCK, request_seed(lora, salt))
    hasher.extend(tokens)
    return tuple(hasher.sequence)


def told(number: int) -> Stored:
    """What becomes of `stored`."""
    return Stored.from_hashes(hashes(*tokens_of(number)))


class Reading:
    """All that a feed has said."""

    def __init__(self, feed: KvFeed) -> None:
        self.feed = feed
        self.heard: asyncio.Queue[tuple[KvChange, ...]] = asyncio.Queue()

    async def run(self) -> None:
        async for changes in self.feed.changes():
            self.heard.put_nowait(changes)

    async def next(self, number: int) -> list[tuple[KvChange, ...]]:
        async with asyncio.timeout(20):
            return [await self.heard.get() for _ in range(number)]


@asynccontextmanager
async def reading(publisher: Publisher, **more: Any) -> AsyncIterator[Reading]:
    arguments = {"replay_endpoint": publisher.replay_endpoint, **more}
    feed = KvFeed(SourceEngine.VLLM, BLOCK, publisher.endpoint, **arguments)
    task_group = TaskGroup("reading")
    try:
        read = Reading(feed)
        task_group.start(read.run(), "feed")
        publisher.wait_for_reader()
        yield read
    finally:
        await task_group.close()
        feed.close()


@pytest.fixture
def publisher(tmp_path: Path) -> Any:
    with Publisher.within(tmp_path) as made:
        yield made


# --- what vLLM itself has published


def frames(which: str) -> list[list[bytes]]:
    return [[bytes.fromhex(frame) for frame in each] for each in RECORDED[which]]


def recorded_changes() -> list[tuple[KvChange, ...]]:
    first = hashes(*range(10, 22))
    return [
        (Stored.from_hashes(first[:2]),),
        (Stored.from_hashes(first[2:], parent=first[1]),),
        (
            Stored.from_hashes(hashes(*range(10, 14), salt="tenant")),
            Stored.from_hashes(hashes(*range(10, 14), lora="poet")),
        ),
        (Removed.from_hashes(first[2:]), Stored.from_hashes(hashes(*range(30, 34)))),
        (Cleared(),),
    ]


async def test_what_vllm_published(publisher: Publisher) -> None:
    async with reading(publisher) as read:
        for each in frames("published"):
            publisher.send(*each)
        assert await read.next(5) == recorded_changes()
        assert (read.feed.num_batches, read.feed.num_lost, read.feed._translator.skipped) == (5, 0, {})


def test_replays_are_made_as_vllm_makes_them(tmp_path: Path) -> None:
    """The stand-in's socket says what vLLM's own has said to the same question."""
    with (
        Publisher.within(tmp_path) as publisher,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as dealer,
    ):
        for _, _, payload in frames("published"):
            publisher.publish(payload, is_lost=True)
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart((b"", (1).to_bytes(8, "big")))
        assert [dealer.recv_multipart() for _ in range(5)] == frames("replayed_from_1")


# --- order and holes


async def test_batches_come_in_order_and_empty_ones_not_at_all(publisher: Publisher) -> None:
    async with reading(publisher) as read:
        publisher.publish(stored(1))
        publisher.publish(payload_of())
        publisher.publish(stored(2))
        publisher.publish(removed(1))
        publisher.publish(payload_of(AllBlocksCleared()))
        assert await read.next(4) == [
            (told(1),),
            (told(2),),
            (Removed.from_hashes(hashes(*tokens_of(1))),),
            (Cleared(),),
        ]
        assert read.feed.num_batches == 5


@pytest.mark.parametrize("num_before", [0, 2])
async def test_a_hole_is_filled_by_what_is_repeated(publisher: Publisher, num_before: int) -> None:
    """Also the very first: whoever listens late has missed them."""
    async with reading(publisher) as read:
        for number in range(num_before):
            publisher.publish(stored(number))
        for number in range(num_before, num_before + 3):
            publisher.publish(stored(number), is_lost=True)
        publisher.publish(stored(num_before + 3))
        publisher.publish(stored(num_before + 4))
        assert await read.next(num_before + 5) == [(told(number),) for number in range(num_before + 5)]
        assert (publisher.num_replays, read.feed.num_lost) == (1, 0)


async def test_what_was_repeated_is_not_read_twice(publisher: Publisher) -> None:
    """The replay goes on beyond the hole, to what the socket has as well."""
    async with reading(publisher) as read:
        publisher.publish(stored(0), is_lost=True)
        for number in range(1, 6):
            publisher.publish(stored(number))
        assert await read.next(6) == [(told(number),) for number in range(6)]
        publisher.publish(removed(5))
        assert await read.next(1) == [(Removed.from_hashes(hashes(*tokens_of(5))),)]
        assert read.feed.num_batches == 7


async def test_a_hole_that_cannot_be_filled_takes_everything_back(
    publisher: Publisher, caplog: pytest.LogCaptureFixture
) -> None:
    async with reading(publisher) as read:
        publisher.publish(stored(0))
        publisher.publish(stored(1), is_lost=True)
        publisher.publish(stored(2), is_lost=True)
        publisher.forget()
        publisher.publish(stored(3))
        assert await read.next(3) == [(told(0),), (Cleared(),), (told(3),)]
        assert read.feed.num_lost == 2
        # What was told before is unknown now: it is stored anew, and its removal is nobody's.
        publisher.publish(removed(0))
        publisher.publish(stored(0))
        assert await read.next(1) == [(told(0),)]
        assert read.feed._translator.skipped == {"unknown_block": 1}
    assert "KV events lost, blocks cleared: batches=2" in caplog.text


async def test_a_part_of_what_is_missing_is_of_no_use(publisher: Publisher) -> None:
    async with reading(publisher) as read:
        publisher.publish(stored(0), is_lost=True)
        publisher.forget()
        publisher.publish(stored(1), is_lost=True)
        publisher.publish(stored(2))
        assert await read.next(2) == [(Cleared(),), (told(2),)]
        assert read.feed.num_lost == 2, "from the first that is missing on, none is of use"


async def test_without_a_replay_a_hole_is_a_loss(publisher: Publisher) -> None:
    async with reading(publisher, replay_endpoint=None) as read:
        publisher.publish(stored(0))
        publisher.publish(stored(1), is_lost=True)
        publisher.publish(stored(2))
        assert await read.next(3) == [(told(0),), (Cleared(),), (told(2),)]
        assert (read.feed.num_lost, publisher.num_replays) == (1, 0)


async def test_replay_without_an_answer_times_out(
    publisher: Publisher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kv_feed, "_REPLAY_S", 0.05)
    async with reading(publisher, replay_endpoint=f"ipc://{tmp_path}/nobody") as read:
        publisher.publish(stored(0), is_lost=True)
        publisher.publish(stored(1))
        assert await read.next(2) == [(Cleared(),), (told(1),)]
    assert "KV event replay failed" in caplog.text


async def test_one_that_counts_from_the_start_again_is_another_one(publisher: Publisher) -> None:
    async with reading(publisher) as read:
        for number in range(3):
            publisher.publish(stored(number))
        publisher.restart()
        publisher.publish(stored(2))
        publisher.publish(stored(7))
        assert await read.next(6) == [
            *((told(number),) for number in range(3)),
            (Cleared(),),
            (told(2),),
            (told(7),),
        ]
        assert (read.feed.num_lost, publisher.num_replays) == (0, 0)


async def test_another_one_whose_beginning_was_missed(publisher: Publisher) -> None:
    async with reading(publisher) as read:
        for number in range(3):
            publisher.publish(stored(number))
        publisher.restart()
        publisher.publish(stored(11), is_lost=True)
        publisher.publish(stored(12))
        assert (await read.next(6))[3:] == [(Cleared(),), (told(11),), (told(12),)]
        assert publisher.num_replays == 1


# --- what is no event


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"garbage", b"\x93\x01"])
async def test_malformed_events_clear_blocks(
    publisher: Publisher, garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with reading(publisher) as read:
        publisher.publish(stored(0))
        publisher.publish(garbage)
        publisher.publish(stored(1))
        assert (await read.next(3))[:2] == [(told(0),), (Cleared(),)]
        assert read.feed.num_batches == 3
    assert "KV events unreadable" in caplog.text


async def test_an_event_of_an_unknown_kind_is_counted(publisher: Publisher) -> None:
    async with reading(publisher) as read:
        publisher.publish(payload_of({"type": "BlockPainted", "colour": "red"}))
        publisher.publish(stored(1))
        assert await read.next(1) == [(told(1),)]
        assert read.feed._translator.skipped == {"unreadable": 1}


async def test_too_few_frames_are_passed_over(publisher: Publisher, caplog: pytest.LogCaptureFixture) -> None:
    async with reading(publisher) as read:
        publisher.send(b"")
        publisher.send(b"", (0).to_bytes(8, "big"))
        publisher.publish(stored(0))
        assert await read.next(1) == [(told(0),)]
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2


async def test_only_its_topic(tmp_path: Path) -> None:
    with Publisher.within(tmp_path, topic=b"kv@one") as publisher:
        async with reading(publisher, topic="kv@one") as read:
            publisher.send(b"kv@two", (0).to_bytes(8, "big"), stored(9))
            publisher.publish(stored(0))
            assert await read.next(1) == [(told(0),)]


async def test_adapters_have_names(publisher: Publisher) -> None:
    """Where an event has only the number."""
    event = BlockStored([1], None, tokens_of(1), BLOCK, 7, "GPU", None)
    async with reading(publisher, lora_name={7: "poet"}.get) as read:
        publisher.publish(payload_of(event))
        assert await read.next(1) == [(Stored.from_hashes(hashes(*tokens_of(1), lora="poet")),)]


async def test_it_can_be_closed_while_it_waits_for_a_replay(publisher: Publisher, tmp_path: Path) -> None:
    where = f"ipc://{tmp_path}/silent"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as silent:
        silent.bind(where)
        async with reading(publisher, replay_endpoint=where) as read:
            publisher.publish(stored(0), is_lost=True)
            publisher.publish(stored(1))
            assert await asyncio.to_thread(silent.poll, 10_000), "it has not asked"
            assert silent.recv_multipart()[1:] == [b"", (0).to_bytes(8, "big")]
    assert read.feed._context.closed
    assert read.heard.empty()


# --- what was said before anybody listened


async def test_it_can_be_had_before_anything_else_is_said(publisher: Publisher) -> None:
    publisher.publish(stored(1), is_lost=True)
    publisher.publish(payload_of(), is_lost=True)
    feed = KvFeed(SourceEngine.VLLM, BLOCK, publisher.endpoint, publisher.replay_endpoint)
    task_group = TaskGroup("reading")
    try:
        assert feed.num_processed == 0
        assert await feed.read_missed() == [(told(1),)]
        assert (feed.num_processed, feed.num_batches, feed.num_lost) == (2, 2, 0)
        read = Reading(feed)
        task_group.start(read.run(), "feed")
        await asyncio.to_thread(publisher.wait_for_reader)
        # One that was on its way to the socket when it was repeated.
        publisher.send(b"", (1).to_bytes(8, "big"), stored(9))
        publisher.publish(stored(2))
        assert await read.next(1) == [(told(2),)], "nothing twice, and nothing taken back"
        assert feed.num_processed == 3
    finally:
        await task_group.close()
        feed.close()


@pytest.mark.parametrize("repeats", [True, False])
async def test_there_may_be_nothing_to_have(publisher: Publisher, repeats: bool) -> None:
    replay = publisher.replay_endpoint if repeats else None
    feed = KvFeed(SourceEngine.VLLM, BLOCK, publisher.endpoint, replay)
    try:
        assert await feed.read_missed() == []
        assert feed.num_processed == 0
    finally:
        feed.close()
