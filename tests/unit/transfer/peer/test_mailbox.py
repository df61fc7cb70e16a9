"""Rooms: a note goes to the one who comes with its number, whoever was there first; nothing of it stays behind."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from tests.unit.transfer.hostile_lab import SOON_S, Source, Talk, calling, reading_from

from kvolt.core.errors import (
    Cancelled,
    ConnectFailed,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    ProtocolError,
    WorkerLost,
    to_info,
)
from kvolt.transfer.address import read_where, where_of
from kvolt.transfer.agent import TransferAgent, TransferOptions
from kvolt.transfer.operation import OperationState
from kvolt.transfer.peer import mailbox as rooms
from kvolt.transfer.peer.connection import FrameConnection
from kvolt.transfer.peer.hub import MAX_TIMEOUT_S
from kvolt.transfer.peer.wire import (
    MAX_NOTE_BYTES,
    Address,
    Ended,
    Failed,
    Hello,
    Meet,
    Met,
)
from kvolt.transfer.transfer_handle import Posting

ROOM = 0x1234_5678_9ABC_DEF0
SHORT_S = 0.05


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + SOON_S / 4  # before anything else is over for its time
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


def settle(agent: TransferAgent) -> None:
    """Its thread has done all that it was asked for."""
    done = threading.Event()
    assert agent._hub.progress.call(done.set)
    assert done.wait(SOON_S)


def is_empty(agent: TransferAgent) -> bool:
    """Nothing is posted, and nobody waits, neither here nor at a peer."""
    settle(agent)
    hub = agent._hub
    found = hub.rooms
    kept = (found._posted, found._here, found._num_here, found._away)
    guests = [each._guests for each in (*hub._links.values(), *hub._served)]
    return not any((*kept, *guests))


def num_here(agent: TransferAgent) -> int:
    return agent._hub.rooms._num_here


@pytest.fixture
def decode() -> Iterator[TransferAgent]:
    agent = TransferAgent()
    yield agent
    agent.close()


@pytest.fixture(params=["own", "unix", "tcp"])
def prefill(request: pytest.FixtureRequest, decode: TransferAgent) -> Iterator[TransferAgent]:
    """Who meets: the very agent that posts, one of the same host, or one that could be anywhere."""
    if request.param == "own":
        yield decode
        return
    agent = TransferAgent(TransferOptions(shared_memory=request.param == "unix"))
    yield agent
    agent.close()


@pytest.fixture
def other() -> Iterator[TransferAgent]:
    agent = TransferAgent(TransferOptions(shared_memory=False))
    yield agent
    agent.close()


@pytest.fixture
def liar() -> Iterator[Source]:
    found = Source()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def no_defects(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert not [each for each in caplog.get_records("call") if "a defect" in each.message]


# --- either may come first


@pytest.mark.parametrize("note", [b"", b"where my blocks are", bytes(MAX_NOTE_BYTES)])
async def test_a_note_waits_for_who_comes_for_it(
    decode: TransferAgent, prefill: TransferAgent, note: bytes
) -> None:
    posting = decode.post(ROOM, note, SOON_S)
    assert await prefill.meet(decode.where, ROOM, SOON_S) == note
    await posting
    assert posting.state is OperationState.COMPLETE
    assert is_empty(decode)
    assert is_empty(prefill)


async def test_who_comes_first_waits_for_the_note(decode: TransferAgent, prefill: TransferAgent) -> None:
    meeting = prefill.meet(decode.where, ROOM, SOON_S)
    until(lambda: num_here(decode))
    elsewhere = decode.post(ROOM + 1, b"for another", SOON_S)
    assert not meeting.state.is_over
    posting = decode.post(ROOM, b"here", SOON_S)
    assert await meeting == b"here"
    await posting
    elsewhere.cancel()
    await elsewhere.over()
    assert is_empty(decode)
    assert is_empty(prefill)


async def test_many_meet_at_once(decode: TransferAgent, prefill: TransferAgent) -> None:
    early = [decode.post(room, str(room).encode(), SOON_S) for room in range(0, 100, 2)]
    meetings = [prefill.meet(decode.where, room, SOON_S) for room in range(100)]
    late = [decode.post(room, str(room).encode(), SOON_S) for room in range(1, 100, 2)]
    assert await asyncio.gather(*meetings) == [str(room).encode() for room in range(100)]
    await asyncio.gather(*early, *late)
    assert is_empty(decode)
    assert is_empty(prefill)


def test_a_thread_without_a_loop_meets_as_well(decode: TransferAgent, prefill: TransferAgent) -> None:
    decode.post(ROOM, b"here", SOON_S)
    assert prefill.meet(decode.where, ROOM, SOON_S).result(SOON_S) == b"here"


async def test_a_note_goes_to_the_first_who_came_and_the_others_wait_on(
    decode: TransferAgent, prefill: TransferAgent
) -> None:
    first = prefill.meet(decode.where, ROOM, SOON_S)
    until(lambda: num_here(decode) == 1)
    second = prefill.meet(decode.where, ROOM, SOON_S)
    until(lambda: num_here(decode) == 2)
    decode.post(ROOM, b"one", SOON_S)
    assert await first == b"one"
    assert num_here(decode) == 1
    decode.post(ROOM, b"two", SOON_S)
    assert await second == b"two"
    assert is_empty(decode)


async def test_a_note_that_was_fetched_is_not_there_any_more(
    decode: TransferAgent, prefill: TransferAgent
) -> None:
    decode.post(ROOM, b"here", SOON_S)
    assert await prefill.meet(decode.where, ROOM, SOON_S) == b"here"
    with pytest.raises(DeadlineExceeded):
        await prefill.meet(decode.where, ROOM, SHORT_S)


async def test_a_room_that_is_taken_is_refused_and_stays_with_who_has_it(decode: TransferAgent) -> None:
    first, second = (decode.post(ROOM, note, SOON_S) for note in (b"first", b"second"))
    with pytest.raises(InvalidRequest, match="taken"):
        await second
    second.cancel()
    assert await decode.meet(decode.where, ROOM, SOON_S) == b"first"
    await first


# --- time


async def test_nobody_comes_in_time(decode: TransferAgent) -> None:
    posting = decode.post(ROOM, b"here", SHORT_S)
    with pytest.raises(DeadlineExceeded, match="nobody has come"):
        await posting
    assert posting.state is OperationState.ERRORED
    assert is_empty(decode)


async def test_nothing_is_posted_in_time(decode: TransferAgent, prefill: TransferAgent) -> None:
    meeting = prefill.meet(decode.where, ROOM, SHORT_S)
    with pytest.raises(DeadlineExceeded, match="no note"):
        await meeting
    assert meeting.state is OperationState.ERRORED
    until(lambda: is_empty(decode) and is_empty(prefill))


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
async def test_who_is_late_already_takes_no_note(
    decode: TransferAgent, prefill: TransferAgent, timeout_s: float
) -> None:
    posting = decode.post(ROOM, b"here", SOON_S)
    with pytest.raises(DeadlineExceeded):
        await prefill.meet(decode.where, ROOM, timeout_s)
    with pytest.raises(DeadlineExceeded):
        await decode.post(ROOM + 1, b"here", timeout_s)
    assert await prefill.meet(decode.where, ROOM, SOON_S) == b"here"
    await posting


async def test_a_note_that_is_late_already_goes_to_nobody(decode: TransferAgent) -> None:
    meeting = decode.meet(decode.where, ROOM, SOON_S)
    with pytest.raises(DeadlineExceeded, match="nobody has come"):
        await decode.post(ROOM, b"late", -1.0)
    decode.post(ROOM, b"here", SOON_S)
    assert await meeting == b"here"


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), MAX_TIMEOUT_S * 1.01])
def test_what_is_no_time_is_refused(decode: TransferAgent, timeout_s: float) -> None:
    with pytest.raises(InvalidRequest, match="timeout"):
        decode.post(ROOM, b"", timeout_s)
    with pytest.raises(InvalidRequest, match="timeout"):
        decode.meet(decode.where, ROOM, timeout_s)


async def test_a_peer_that_does_not_keep_the_time_is_not_waited_for(
    other: TransferAgent, liar: Source
) -> None:
    meeting = other.meet(where_of(liar.address), ROOM, 0.2)
    talk = liar.greet()
    asked = talk.hear()
    assert isinstance(asked, Meet)
    assert asked.room == ROOM
    assert 0 < asked.timeout_s <= 0.2
    with pytest.raises(DeadlineExceeded):
        await meeting
    assert talk.hear() == Ended(asked.op, is_whole=False)
    talk.say(Met(asked.op, b"late"), Failed(asked.op, to_info(Cancelled("late"))))
    assert is_empty(other)


async def test_who_is_late_before_there_is_a_connection_asks_for_nothing(
    other: TransferAgent, liar: Source
) -> None:
    with pytest.raises(DeadlineExceeded):
        await other.meet(where_of(liar.address), ROOM, SHORT_S)
    second = other.meet(where_of(liar.address), ROOM + 1, SOON_S)
    talk = liar.greet()
    asked = talk.hear()
    assert isinstance(asked, Meet)
    assert asked.room == ROOM + 1
    talk.say(Met(asked.op, b"here"))
    assert await second == b"here"


# --- given up


async def test_a_note_that_was_taken_back_is_nobodys(decode: TransferAgent, prefill: TransferAgent) -> None:
    posting = decode.post(ROOM, b"here", SOON_S)
    posting.cancel()
    with pytest.raises(Cancelled):
        await posting
    assert posting.state is OperationState.CANCELLED
    assert is_empty(decode)
    with pytest.raises(DeadlineExceeded):
        await prefill.meet(decode.where, ROOM, SHORT_S)
    posting.cancel()
    until(lambda: is_empty(decode))  # it hears of that later than who met nobody


async def test_a_meeting_that_is_cancelled_is_told_to_the_peer(
    decode: TransferAgent, prefill: TransferAgent
) -> None:
    meeting = prefill.meet(decode.where, ROOM, SOON_S)
    until(lambda: num_here(decode))
    meeting.cancel()
    meeting.cancel()
    with pytest.raises(Cancelled):
        await meeting
    until(lambda: is_empty(decode))
    posting = decode.post(ROOM, b"here", SOON_S)
    settle(decode)
    assert not posting.state.is_over


async def test_who_awaits_a_meeting_and_goes_gives_it_up(
    decode: TransferAgent, prefill: TransferAgent
) -> None:
    meeting = prefill.meet(decode.where, ROOM, SOON_S)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(meeting, SHORT_S)
    await meeting.over()
    assert meeting.state is OperationState.CANCELLED
    until(lambda: is_empty(decode) and is_empty(prefill))


async def test_the_loop_does_not_complain_of_an_error_whose_awaiter_has_gone() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))

    async def go() -> None:
        posting = Posting("post", lambda: None)
        posting.begin()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(posting, 0.01)
        posting.end(Cancelled("the note was taken back"))
        await asyncio.sleep(0.01)

    await go()
    gc.collect()
    assert not complaints


async def test_a_meeting_that_is_over_can_be_cancelled(decode: TransferAgent, prefill: TransferAgent) -> None:
    decode.post(ROOM, b"here", SOON_S)
    meeting = prefill.meet(decode.where, ROOM, SOON_S)
    assert await meeting == b"here"
    meeting.cancel()
    late = prefill.meet(decode.where, ROOM, -1.0)
    await late.over()
    late.cancel()
    settle(prefill)
    assert late.state is OperationState.ERRORED


# --- who goes


async def test_a_peer_that_is_lost_ends_the_wait(decode: TransferAgent, other: TransferAgent) -> None:
    meeting = other.meet(decode.where, ROOM, SOON_S)
    until(lambda: num_here(decode))
    decode.close()
    with pytest.raises(WorkerLost):
        await meeting
    assert is_empty(other)


async def test_a_peer_that_is_not_there(decode: TransferAgent, other: TransferAgent) -> None:
    gone = decode.where
    decode.close()
    with pytest.raises(ConnectFailed):
        await other.meet(gone, ROOM, SOON_S)
    assert is_empty(other)


async def test_a_peer_that_goes_waits_no_more(decode: TransferAgent, other: TransferAgent) -> None:
    meeting = other.meet(decode.where, ROOM, SOON_S)
    until(lambda: num_here(decode))
    other.close()
    with pytest.raises(Cancelled):
        await meeting
    until(lambda: is_empty(decode))
    posting = decode.post(ROOM, b"here", SOON_S)
    assert await decode.meet(decode.where, ROOM, SOON_S) == b"here"
    await posting


async def test_an_agent_that_closes_ends_what_is_posted_and_who_waits(decode: TransferAgent) -> None:
    posting, meeting = decode.post(ROOM, b"here", SOON_S), decode.meet(decode.where, ROOM + 1, SOON_S)
    decode.close()
    for each in (posting, meeting, decode.post(ROOM, b"", SOON_S), decode.meet(decode.where, ROOM, SOON_S)):
        with pytest.raises(Cancelled):
            await each
        each.cancel()


@pytest.mark.parametrize("is_posted_first", [True, False])
async def test_a_note_that_could_not_be_sent_is_the_next_ones(
    decode: TransferAgent, is_posted_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = FrameConnection._send

    def breaks(self: FrameConnection, data: memoryview, descriptor: int | None) -> int:
        if b"Met" in bytes(data):
            raise BrokenPipeError(errno.EPIPE, "broken")
        return send(self, data, descriptor)

    monkeypatch.setattr(FrameConnection, "_send", breaks)
    posts = [decode.post(ROOM, b"here", SOON_S)] if is_posted_first else []
    with reading_from(decode.address) as (talk, _):
        talk.say(Meet(1, ROOM, SOON_S), Meet(2, ROOM, SOON_S))
        if not is_posted_first:
            until(lambda: num_here(decode) == 2)
            posts = [decode.post(ROOM, b"here", SOON_S)]
        assert talk.is_let_go()
    assert not posts[0].state.is_over
    assert await decode.meet(decode.where, ROOM, SOON_S) == b"here"
    await posts[0]
    assert is_empty(decode)


# --- bounds


async def test_posts_are_counted(decode: TransferAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "MAX_POSTS", 2)
    held = [decode.post(room, b"", SOON_S) for room in range(2)]
    with pytest.raises(Overloaded, match="posted already"):
        await decode.post(2, b"", SOON_S)
    await decode.meet(decode.where, 0, SOON_S)
    last = decode.post(2, b"", SOON_S)
    for each in (*held, last):
        each.cancel()
        await each.over()
    assert last.state is OperationState.CANCELLED
    assert is_empty(decode)


async def test_who_waits_here_is_counted(
    decode: TransferAgent, other: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "MAX_GUESTS", 2)
    here = [decode.meet(decode.where, room, SOON_S) for room in range(2)]
    with pytest.raises(Overloaded, match="wait for a note"):
        await decode.meet(decode.where, 2, SOON_S)
    with pytest.raises(Overloaded, match="wait for a note"):  # by the word of the peer
        await other.meet(decode.where, 2, SOON_S)
    for each in here:
        each.cancel()
        await each.over()
    assert is_empty(decode)
    assert is_empty(other)


async def test_who_waits_at_peers_is_counted(
    other: TransferAgent, liar: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rooms, "MAX_GUESTS", 2)
    away = [other.meet(where_of(liar.address), room, SOON_S) for room in range(2)]
    with pytest.raises(Overloaded, match="wait for a note"):
        await other.meet(where_of(liar.address), 2, SOON_S)
    for each in away:
        each.cancel()
        await each.over()
    assert is_empty(other)


def test_a_note_has_a_most_size(decode: TransferAgent) -> None:
    with pytest.raises(PayloadTooLarge, match=str(MAX_NOTE_BYTES)):
        decode.post(ROOM, bytes(MAX_NOTE_BYTES + 1), SOON_S)
    assert is_empty(decode)


@pytest.mark.parametrize("room", [-1, 1 << 63])
def test_numbers_that_no_room_has(decode: TransferAgent, room: int) -> None:
    with pytest.raises(InvalidRequest, match="63 bits"):
        decode.post(room, b"", SOON_S)
    with pytest.raises(InvalidRequest, match="63 bits"):
        decode.meet(decode.where, room, SOON_S)


# --- peers that break the rules


def failed(talk: Talk) -> tuple[int, str]:
    told = talk.hear()
    assert isinstance(told, Failed)
    return told.op, told.error.code


def test_times_that_are_none_are_refused_and_the_note_stays(decode: TransferAgent) -> None:
    decode.post(ROOM, b"here", SOON_S)
    with reading_from(decode.address) as (talk, _):
        for op, timeout_s in enumerate((float("nan"), float("inf"), float("-inf"), MAX_TIMEOUT_S * 2)):
            talk.say(Meet(op, ROOM, timeout_s))
            assert failed(talk) == (op, InvalidRequest.code)
        talk.say(Meet(8, ROOM, -1e300))
        assert failed(talk) == (8, DeadlineExceeded.code)
        talk.say(Meet(9, ROOM, SOON_S))
        assert talk.hear() == Met(9, b"here")
    assert is_empty(decode)


def test_a_number_that_is_taken_does_not_disturb_who_has_it(decode: TransferAgent) -> None:
    with reading_from(decode.address) as (talk, _):
        talk.say(Meet(1, ROOM, SOON_S), Meet(1, ROOM + 1, SOON_S))
        assert failed(talk) == (1, InvalidRequest.code)
        decode.post(ROOM, b"here", SOON_S)
        assert talk.hear() == Met(1, b"here")
        talk.say(Meet(1, ROOM, SHORT_S))
        assert failed(talk) == (1, DeadlineExceeded.code)
        assert is_empty(decode)


def test_rooms_that_nobody_could_post_are_waited_for_like_others(decode: TransferAgent) -> None:
    with reading_from(decode.address) as (talk, _):
        for room in (-1, (1 << 64) - 1):
            talk.say(Meet(1, room, SHORT_S))
            assert failed(talk) == (1, DeadlineExceeded.code)
    until(lambda: is_empty(decode))


def test_who_said_no_hello_meets_nobody(decode: TransferAgent) -> None:
    posting = decode.post(ROOM, b"here", SOON_S)
    with calling(decode.address) as talk:
        talk.say(Meet(1, ROOM, SOON_S))
        assert talk.is_let_go()
    assert not posting.state.is_over


def test_a_note_from_who_reads_is_out_of_place(decode: TransferAgent) -> None:
    with calling(decode.address) as talk:
        talk.say(Hello("somebody", "frames"), Met(1, b"here"))
        assert talk.is_let_go()


async def test_a_note_that_is_too_large_ends_the_connection(other: TransferAgent, liar: Source) -> None:
    meeting = other.meet(where_of(liar.address), ROOM, SOON_S)
    talk = liar.greet()
    asked = talk.hear()
    assert isinstance(asked, Meet)
    talk.say(Met(asked.op, bytes(MAX_NOTE_BYTES + 1)))
    with pytest.raises(ProtocolError):
        await meeting
    assert talk.is_let_go()
    assert is_empty(other)


async def test_answers_to_what_nobody_asked_are_passed_over(other: TransferAgent, liar: Source) -> None:
    meeting = other.meet(where_of(liar.address), ROOM, SOON_S)
    talk = liar.greet()
    asked = talk.hear()
    assert isinstance(asked, Meet)
    talk.say(Met(77, b"for nobody"), Failed(78, to_info(Cancelled("nobody's"))), Met(asked.op, b"here"))
    assert await meeting == b"here"
    assert is_empty(other)


# --- addresses as text


@pytest.mark.parametrize(
    "address",
    [
        Address("3f2a90c1d4e5b677", "10.0.0.7", 41213, "kvolt-transfer-3f2a90c1d4e5b677"),
        Address("a-source", "127.0.0.1", 1, ""),
        Address("b", "2001:db8::1", 65_535, "c"),
        Address("b", "::", 80, ""),
    ],
)
def test_an_address_is_read_as_it_was_written(address: Address) -> None:
    text = where_of(address)
    assert read_where(text) == address
    assert msgspec.json.decode(msgspec.json.encode(text)) == text


def test_an_agent_tells_where_it_is(decode: TransferAgent, other: TransferAgent) -> None:
    assert read_where(decode.where) == decode.address
    assert read_where(other.where) == other.address


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "10.0.0.7:80",
        "@10.0.0.7:80",
        "a@peer.example:80",
        "a@10.0.0.7",
        "a@10.0.0.7:0",
        "a@10.0.0.7:65536",
        "a@10.0.0.7:-1",
        "a@10.0.0.777:80",
        "a@[10.0.0.7]:80",
        "a@::1:80",
        "a@[::1:80",
        "a@10.0.0.7:80/",
        "a@10.0.0.7:80/x\0y",
        "a@10.0.0.7:80\n",
        "a b@10.0.0.7:80",
        "a@10.0.0.7:٣",
        "a" * 65 + "@10.0.0.7:80",
        "a@10.0.0.7:80/" + "u" * 101,
        "x" * 1_000_000,
    ],
)
def test_what_is_no_address_is_refused(decode: TransferAgent, text: str) -> None:
    with pytest.raises(InvalidRequest, match="AGENT@HOST:PORT") as refused:
        decode.meet(text, ROOM, SOON_S)
    assert len(str(refused.value)) < 1000
