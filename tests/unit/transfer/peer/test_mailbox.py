"""Mailboxes: a message is delivered once, to the first waiter, whichever side comes first."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
from tests.unit.transfer import tls_lab
from tests.unit.transfer.hostile_lab import SOON_S, Source, Talk, calling, reading_from, security

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
from kvolt.transfer.agent import TransferAgent, TransferOptions
from kvolt.transfer.peer import mailbox as mailbox_module
from kvolt.transfer.peer.connection import FrameConnection
from kvolt.transfer.peer.hub import MAX_TIMEOUT_S
from kvolt.transfer.peer.sockets import format_address, parse_address
from kvolt.transfer.reads.wire import (
    MAX_MESSAGE_BYTES,
    Address,
    Delivered,
    Ended,
    Failed,
    Hello,
    Receive,
)
from kvolt.transfer.transfer_handle import OperationState, TransferHandle

MAILBOX = 0x1234_5678_9ABC_DEF0
SHORT_S = 0.05


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + SOON_S / 4  # before anything else is over for its time
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


def settle(agent: TransferAgent) -> None:
    """Wait until the progress thread has run all queued callbacks."""
    done = threading.Event()
    assert agent._hub.progress.call_soon(done.set)
    assert done.wait(SOON_S)


def is_empty(agent: TransferAgent) -> bool:
    """No message is posted and no waiter is left, here or at a peer."""
    settle(agent)
    hub = agent._hub
    found = hub.mailboxes
    kept = (found._posted, found._local, found._num_local, found._remote)
    waiters = [each._waiters for each in (*hub._links.values(), *hub._sessions)]
    return not any((*kept, *waiters))


def num_here(agent: TransferAgent) -> int:
    return agent._hub.mailboxes._num_local


@pytest.fixture(autouse=True, params=["plain", "tls"])
def secured(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """TCP connections are plain, or mutual TLS."""
    monkeypatch.setattr(security, "credentials", tls_lab.of_worker() if request.param == "tls" else None)


@pytest.fixture
def decode() -> Iterator[TransferAgent]:
    agent = TransferAgent(credentials=security.credentials)
    yield agent
    agent.close()


@pytest.fixture(params=["own", "unix", "tcp"])
def prefill(request: pytest.FixtureRequest, decode: TransferAgent) -> Iterator[TransferAgent]:
    """The receiver: the posting agent itself, an agent on the same host, or one that uses TCP."""
    if request.param == "own":
        yield decode
        return
    agent = TransferAgent(
        TransferOptions(shared_memory=request.param == "unix"), credentials=security.credentials
    )
    yield agent
    agent.close()


@pytest.fixture
def other() -> Iterator[TransferAgent]:
    agent = TransferAgent(TransferOptions(shared_memory=False), credentials=security.credentials)
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
    assert not [each for each in caplog.get_records("call") if "unexpected error" in each.message]


# --- either may come first


@pytest.mark.parametrize("message", [b"", b"where my blocks are", bytes(MAX_MESSAGE_BYTES)])
async def test_a_message_waits_for_its_receiver(
    decode: TransferAgent, prefill: TransferAgent, message: bytes
) -> None:
    posting = decode.post(MAILBOX, message, SOON_S)
    assert await prefill.receive(decode.address_text, MAILBOX, SOON_S) == message
    await posting
    assert posting.state is OperationState.COMPLETE
    assert is_empty(decode)
    assert is_empty(prefill)


async def test_a_receiver_waits_for_the_message(decode: TransferAgent, prefill: TransferAgent) -> None:
    meeting = prefill.receive(decode.address_text, MAILBOX, SOON_S)
    until(lambda: num_here(decode))
    elsewhere = decode.post(MAILBOX + 1, b"for another", SOON_S)
    assert not meeting.state.is_done
    posting = decode.post(MAILBOX, b"here", SOON_S)
    assert await meeting == b"here"
    await posting
    elsewhere.cancel()
    await elsewhere.wait_done()
    assert is_empty(decode)
    assert is_empty(prefill)


async def test_many_messages_at_once(decode: TransferAgent, prefill: TransferAgent) -> None:
    early = [decode.post(mailbox, str(mailbox).encode(), SOON_S) for mailbox in range(0, 100, 2)]
    meetings = [prefill.receive(decode.address_text, mailbox, SOON_S) for mailbox in range(100)]
    late = [decode.post(mailbox, str(mailbox).encode(), SOON_S) for mailbox in range(1, 100, 2)]
    assert await asyncio.gather(*meetings) == [str(mailbox).encode() for mailbox in range(100)]
    await asyncio.gather(*early, *late)
    assert is_empty(decode)
    assert is_empty(prefill)


def test_a_thread_without_a_loop_can_receive(decode: TransferAgent, prefill: TransferAgent) -> None:
    decode.post(MAILBOX, b"here", SOON_S)
    assert prefill.receive(decode.address_text, MAILBOX, SOON_S).result(SOON_S) == b"here"


async def test_a_message_goes_to_the_first_waiter_and_others_keep_waiting(
    decode: TransferAgent, prefill: TransferAgent
) -> None:
    first = prefill.receive(decode.address_text, MAILBOX, SOON_S)
    until(lambda: num_here(decode) == 1)
    second = prefill.receive(decode.address_text, MAILBOX, SOON_S)
    until(lambda: num_here(decode) == 2)
    decode.post(MAILBOX, b"one", SOON_S)
    assert await first == b"one"
    assert num_here(decode) == 1
    decode.post(MAILBOX, b"two", SOON_S)
    assert await second == b"two"
    assert is_empty(decode)


async def test_a_message_is_delivered_once(decode: TransferAgent, prefill: TransferAgent) -> None:
    decode.post(MAILBOX, b"here", SOON_S)
    assert await prefill.receive(decode.address_text, MAILBOX, SOON_S) == b"here"
    with pytest.raises(DeadlineExceeded):
        await prefill.receive(decode.address_text, MAILBOX, SHORT_S)


async def test_a_mailbox_in_use_is_rejected_and_unchanged(decode: TransferAgent) -> None:
    first, second = (decode.post(MAILBOX, message, SOON_S) for message in (b"first", b"second"))
    with pytest.raises(InvalidRequest, match="in use"):
        await second
    second.cancel()
    assert await decode.receive(decode.address_text, MAILBOX, SOON_S) == b"first"
    await first


# --- time


async def test_a_message_expires(decode: TransferAgent) -> None:
    posting = decode.post(MAILBOX, b"here", SHORT_S)
    with pytest.raises(DeadlineExceeded, match="not received"):
        await posting
    assert posting.state is OperationState.ERRORED
    assert is_empty(decode)


async def test_nothing_is_posted_in_time(decode: TransferAgent, prefill: TransferAgent) -> None:
    meeting = prefill.receive(decode.address_text, MAILBOX, SHORT_S)
    with pytest.raises(DeadlineExceeded, match="no message"):
        await meeting
    assert meeting.state is OperationState.ERRORED
    until(lambda: is_empty(decode) and is_empty(prefill))


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
async def test_an_expired_receive_takes_no_message(
    decode: TransferAgent, prefill: TransferAgent, timeout_s: float
) -> None:
    posting = decode.post(MAILBOX, b"here", SOON_S)
    with pytest.raises(DeadlineExceeded):
        await prefill.receive(decode.address_text, MAILBOX, timeout_s)
    with pytest.raises(DeadlineExceeded):
        await decode.post(MAILBOX + 1, b"here", timeout_s)
    assert await prefill.receive(decode.address_text, MAILBOX, SOON_S) == b"here"
    await posting


async def test_an_expired_message_is_not_delivered(decode: TransferAgent) -> None:
    meeting = decode.receive(decode.address_text, MAILBOX, SOON_S)
    with pytest.raises(DeadlineExceeded, match="not received"):
        await decode.post(MAILBOX, b"late", -1.0)
    decode.post(MAILBOX, b"here", SOON_S)
    assert await meeting == b"here"


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), MAX_TIMEOUT_S * 1.01])
def test_what_is_no_time_is_refused(decode: TransferAgent, timeout_s: float) -> None:
    with pytest.raises(InvalidRequest, match="timeout"):
        decode.post(MAILBOX, b"", timeout_s)
    with pytest.raises(InvalidRequest, match="timeout"):
        decode.receive(decode.address_text, MAILBOX, timeout_s)


async def test_a_peer_that_does_not_keep_the_time_is_not_waited_for(
    other: TransferAgent, liar: Source
) -> None:
    meeting = other.receive(format_address(liar.address), MAILBOX, 0.2)
    talk = liar.greet()
    asked = talk.hear()
    assert isinstance(asked, Receive)
    assert asked.mailbox == MAILBOX
    assert 0 < asked.timeout_s <= 0.2
    with pytest.raises(DeadlineExceeded):
        await meeting
    assert talk.hear() == Ended(asked.op, is_whole=False)
    talk.say(Delivered(asked.op, b"late"), Failed(asked.op, to_info(Cancelled("late"))))
    assert is_empty(other)


async def test_a_receive_that_expires_before_the_connection_sends_nothing(
    other: TransferAgent, liar: Source
) -> None:
    with pytest.raises(DeadlineExceeded):
        await other.receive(format_address(liar.address), MAILBOX, SHORT_S)
    second = other.receive(format_address(liar.address), MAILBOX + 1, SOON_S)
    talk = liar.greet()
    asked = talk.hear()
    assert isinstance(asked, Receive)
    assert asked.mailbox == MAILBOX + 1
    talk.say(Delivered(asked.op, b"here"))
    assert await second == b"here"


# --- given up


async def test_a_withdrawn_message_is_not_delivered(decode: TransferAgent, prefill: TransferAgent) -> None:
    posting = decode.post(MAILBOX, b"here", SOON_S)
    posting.cancel()
    with pytest.raises(Cancelled):
        await posting
    assert posting.state is OperationState.CANCELLED
    assert is_empty(decode)
    with pytest.raises(DeadlineExceeded):
        await prefill.receive(decode.address_text, MAILBOX, SHORT_S)
    posting.cancel()
    until(lambda: is_empty(decode))  # the peer is notified later


async def test_a_cancelled_receive_is_reported_to_the_peer(
    decode: TransferAgent, prefill: TransferAgent
) -> None:
    meeting = prefill.receive(decode.address_text, MAILBOX, SOON_S)
    until(lambda: num_here(decode))
    meeting.cancel()
    meeting.cancel()
    with pytest.raises(Cancelled):
        await meeting
    until(lambda: is_empty(decode))
    posting = decode.post(MAILBOX, b"here", SOON_S)
    settle(decode)
    assert not posting.state.is_done


async def test_cancelling_the_awaiting_task_cancels_the_receive(
    decode: TransferAgent, prefill: TransferAgent
) -> None:
    meeting = prefill.receive(decode.address_text, MAILBOX, SOON_S)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(meeting, SHORT_S)
    await meeting.wait_done()
    assert meeting.state is OperationState.CANCELLED
    until(lambda: is_empty(decode) and is_empty(prefill))


async def test_the_loop_does_not_complain_of_an_error_whose_awaiter_has_gone() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))

    async def go() -> None:
        posting: TransferHandle[None] = TransferHandle(lambda: None, None)
        posting.start()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(posting, 0.01)
        posting.finish(Cancelled("the message was withdrawn"))
        await asyncio.sleep(0.01)

    await go()
    gc.collect()
    assert not complaints


async def test_a_finished_receive_can_be_cancelled(decode: TransferAgent, prefill: TransferAgent) -> None:
    decode.post(MAILBOX, b"here", SOON_S)
    meeting = prefill.receive(decode.address_text, MAILBOX, SOON_S)
    assert await meeting == b"here"
    meeting.cancel()
    late = prefill.receive(decode.address_text, MAILBOX, -1.0)
    await late.wait_done()
    late.cancel()
    settle(prefill)
    assert late.state is OperationState.ERRORED


# --- who goes


async def test_a_peer_that_is_lost_ends_the_wait(decode: TransferAgent, other: TransferAgent) -> None:
    meeting = other.receive(decode.address_text, MAILBOX, SOON_S)
    until(lambda: num_here(decode))
    decode.close()
    with pytest.raises(WorkerLost):
        await meeting
    assert is_empty(other)


async def test_a_peer_that_is_not_there(decode: TransferAgent, other: TransferAgent) -> None:
    gone = decode.address_text
    decode.close()
    with pytest.raises(ConnectFailed):
        await other.receive(gone, MAILBOX, SOON_S)
    assert is_empty(other)


async def test_a_peer_that_goes_waits_no_more(decode: TransferAgent, other: TransferAgent) -> None:
    meeting = other.receive(decode.address_text, MAILBOX, SOON_S)
    until(lambda: num_here(decode))
    other.close()
    with pytest.raises(Cancelled):
        await meeting
    until(lambda: is_empty(decode))
    posting = decode.post(MAILBOX, b"here", SOON_S)
    assert await decode.receive(decode.address_text, MAILBOX, SOON_S) == b"here"
    await posting


async def test_close_ends_posts_and_receives(decode: TransferAgent) -> None:
    posting, meeting = (
        decode.post(MAILBOX, b"here", SOON_S),
        decode.receive(decode.address_text, MAILBOX + 1, SOON_S),
    )
    decode.close()
    for each in (
        posting,
        meeting,
        decode.post(MAILBOX, b"", SOON_S),
        decode.receive(decode.address_text, MAILBOX, SOON_S),
    ):
        with pytest.raises(Cancelled):
            await each
        each.cancel()


@pytest.mark.parametrize("is_posted_first", [True, False])
async def test_an_unsent_message_goes_to_the_next_waiter(
    decode: TransferAgent, is_posted_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = FrameConnection._send

    def breaks(self: FrameConnection, data: memoryview, descriptor: int | None) -> int:
        if b"Delivered" in bytes(data):
            raise BrokenPipeError(errno.EPIPE, "broken")
        return send(self, data, descriptor)

    monkeypatch.setattr(FrameConnection, "_send", breaks)
    posts = [decode.post(MAILBOX, b"here", SOON_S)] if is_posted_first else []
    with reading_from(decode.address) as (talk, _):
        talk.say(Receive(1, MAILBOX, SOON_S), Receive(2, MAILBOX, SOON_S))
        if not is_posted_first:
            until(lambda: num_here(decode) == 2)
            posts = [decode.post(MAILBOX, b"here", SOON_S)]
        assert talk.is_let_go()
    assert not posts[0].state.is_done
    assert await decode.receive(decode.address_text, MAILBOX, SOON_S) == b"here"
    await posts[0]
    assert is_empty(decode)


# --- bounds


async def test_posts_are_limited(decode: TransferAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox_module, "MAX_POSTS", 2)
    held = [decode.post(mailbox, b"", SOON_S) for mailbox in range(2)]
    with pytest.raises(Overloaded, match="too many posted"):
        await decode.post(2, b"", SOON_S)
    await decode.receive(decode.address_text, 0, SOON_S)
    last = decode.post(2, b"", SOON_S)
    for each in (*held, last):
        each.cancel()
        await each.wait_done()
    assert last.state is OperationState.CANCELLED
    assert is_empty(decode)


async def test_local_waiters_are_limited(
    decode: TransferAgent, other: TransferAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_module, "MAX_WAITERS", 2)
    here = [decode.receive(decode.address_text, mailbox, SOON_S) for mailbox in range(2)]
    with pytest.raises(Overloaded, match="too many waiters"):
        await decode.receive(decode.address_text, 2, SOON_S)
    with pytest.raises(Overloaded, match="too many waiters"):  # by the word of the peer
        await other.receive(decode.address_text, 2, SOON_S)
    for each in here:
        each.cancel()
        await each.wait_done()
    assert is_empty(decode)
    assert is_empty(other)


async def test_remote_waiters_are_limited(
    other: TransferAgent, liar: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_module, "MAX_WAITERS", 2)
    away = [other.receive(format_address(liar.address), mailbox, SOON_S) for mailbox in range(2)]
    with pytest.raises(Overloaded, match="too many waiters"):
        await other.receive(format_address(liar.address), 2, SOON_S)
    for each in away:
        each.cancel()
        await each.wait_done()
    assert is_empty(other)


def test_message_size_is_limited(decode: TransferAgent) -> None:
    with pytest.raises(PayloadTooLarge, match=str(MAX_MESSAGE_BYTES)):
        decode.post(MAILBOX, bytes(MAX_MESSAGE_BYTES + 1), SOON_S)
    assert is_empty(decode)


@pytest.mark.parametrize("mailbox", [-1, 1 << 63])
def test_invalid_mailbox_numbers(decode: TransferAgent, mailbox: int) -> None:
    with pytest.raises(InvalidRequest, match="63 bits"):
        decode.post(mailbox, b"", SOON_S)
    with pytest.raises(InvalidRequest, match="63 bits"):
        decode.receive(decode.address_text, mailbox, SOON_S)


# --- peers that break the rules


def failed(talk: Talk) -> tuple[int, str]:
    told = talk.hear()
    assert isinstance(told, Failed)
    return told.op, told.error.code


def test_invalid_timeouts_are_rejected_and_the_message_stays(decode: TransferAgent) -> None:
    decode.post(MAILBOX, b"here", SOON_S)
    with reading_from(decode.address) as (talk, _):
        for op, timeout_s in enumerate((float("nan"), float("inf"), float("-inf"), MAX_TIMEOUT_S * 2)):
            talk.say(Receive(op, MAILBOX, timeout_s))
            assert failed(talk) == (op, InvalidRequest.code)
        talk.say(Receive(8, MAILBOX, -1e300))
        assert failed(talk) == (8, DeadlineExceeded.code)
        talk.say(Receive(9, MAILBOX, SOON_S))
        assert talk.hear() == Delivered(9, b"here")
    assert is_empty(decode)


def test_a_number_that_is_taken_does_not_disturb_who_has_it(decode: TransferAgent) -> None:
    with reading_from(decode.address) as (talk, _):
        talk.say(Receive(1, MAILBOX, SOON_S), Receive(1, MAILBOX + 1, SOON_S))
        assert failed(talk) == (1, InvalidRequest.code)
        decode.post(MAILBOX, b"here", SOON_S)
        assert talk.hear() == Delivered(1, b"here")
        talk.say(Receive(1, MAILBOX, SHORT_S))
        assert failed(talk) == (1, DeadlineExceeded.code)
        assert is_empty(decode)


def test_invalid_mailbox_numbers_time_out_like_others(decode: TransferAgent) -> None:
    with reading_from(decode.address) as (talk, _):
        for mailbox in (-1, (1 << 64) - 1):
            talk.say(Receive(1, mailbox, SHORT_S))
            assert failed(talk) == (1, DeadlineExceeded.code)
    until(lambda: is_empty(decode))


def test_a_receive_without_hello_is_rejected(decode: TransferAgent) -> None:
    posting = decode.post(MAILBOX, b"here", SOON_S)
    with calling(decode.address) as talk:
        talk.say(Receive(1, MAILBOX, SOON_S))
        assert talk.is_let_go()
    assert not posting.state.is_done


def test_a_delivery_from_a_reader_is_rejected(decode: TransferAgent) -> None:
    with calling(decode.address) as talk:
        talk.say(Hello("reader", "frames"), Delivered(1, b"here"))
        assert talk.is_let_go()


async def test_an_oversized_message_closes_the_connection(other: TransferAgent, liar: Source) -> None:
    meeting = other.receive(format_address(liar.address), MAILBOX, SOON_S)
    talk = liar.greet()
    asked = talk.hear()
    assert isinstance(asked, Receive)
    talk.say(Delivered(asked.op, bytes(MAX_MESSAGE_BYTES + 1)))
    with pytest.raises(ProtocolError):
        await meeting
    assert talk.is_let_go()
    assert is_empty(other)


async def test_unexpected_responses_are_ignored(other: TransferAgent, liar: Source) -> None:
    meeting = other.receive(format_address(liar.address), MAILBOX, SOON_S)
    talk = liar.greet()
    asked = talk.hear()
    assert isinstance(asked, Receive)
    talk.say(
        Delivered(77, b"unexpected"),
        Failed(78, to_info(Cancelled("unexpected"))),
        Delivered(asked.op, b"here"),
    )
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
    text = format_address(address)
    assert parse_address(text) == address
    assert msgspec.json.decode(msgspec.json.encode(text)) == text


def test_an_agent_has_an_address_text(decode: TransferAgent, other: TransferAgent) -> None:
    assert parse_address(decode.address_text) == decode.address
    assert parse_address(other.address_text) == other.address


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
        decode.receive(text, MAILBOX, SOON_S)
    assert len(str(refused.value)) < 1000
