"""STEP frames against the ordinary path: whatever happens between steps, every stream gets its tokens.

A random walk over two sessions: steps of a changing batch, single deltas, ends, cancels, reads, pauses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from kvolt.core.delta import Delta, FinishReason
from kvolt.core.errors import KvoltError
from kvolt.runtime.plane.served_stream import ServedStream
from kvolt.runtime.plane.session import Session, SessionLimits
from kvolt.runtime.plane.stats import PlaneStats
from kvolt.runtime.plane.steps import StepSender
from kvolt.runtime.plane.streams import CallerStream
from kvolt.runtime.plane.wire import Hello

ACTIONS = [
    "step",
    "step",
    "step",
    "part",
    "one",
    "flush",
    "flush",
    "read",
    "pause",
    "resume",
    "end",
    "cancel",
    "late",
]

decode = msgspec.msgpack.Decoder(Delta).decode


class Peer:
    def __init__(self, dialer: bool, limits: SessionLimits, serve: Callable[[ServedStream], None]) -> None:
        self.on_open = serve
        hello = Hello(
            versions=(1,), process="p", max_frame_bytes=1 << 20, max_message_bytes=1 << 20, heartbeat_s=1.0
        )
        self.stats = PlaneStats()
        self.session = Session(dialer=dialer, hello=hello, limits=limits, host=self, stats=self.stats)

    def wake(self) -> None: ...

    def on_hello(self, hello: Hello) -> None: ...

    def report_callback_error(self, fault: Exception) -> None:
        raise fault


class Reader:
    def __init__(self, automatic: bool) -> None:
        self.automatic = automatic
        self.tokens: list[int] = []
        self.num_unread = 0
        self.ends = 0
        self.cancelled = False
        self.stream: CallerStream | None = None
        self.cancel_at: int | None = None

    def on_item(self, item: Delta) -> None:
        assert not self.ends
        assert not self.cancelled
        self.tokens += item.token_ids
        self.num_unread += 1
        if self.cancel_at is not None and len(self.tokens) >= self.cancel_at:
            self.cancel()  # from inside a delivery

    def on_end(self, error: KvoltError | None) -> None:
        assert error is None
        self.ends += 1

    def cancel(self) -> None:
        if not self.ends and not self.cancelled and self.stream is not None:
            self.stream.cancel()
            self.cancelled = True


class World:
    def __init__(self, window: int, kinds: list[bool]) -> None:
        limits = SessionLimits(window_items=window)
        self.served: list[ServedStream] = []
        self.caller = Peer(True, limits, lambda stream: None)
        self.server = Peer(False, limits, self.served.append)
        self.exchange()
        self.readers = [Reader(automatic) for automatic in kinds]
        for reader in self.readers:
            reader.stream = self.caller.session.open(
                "x", b"\xc0", reader, decode, automatic_credit=reader.automatic
            )
        self.exchange()
        self.sent: list[list[int]] = [[] for _ in kinds]
        self.next_token = 3
        self.batch: tuple[int, ...] = ()
        self.sender = StepSender(())

    def exchange(self) -> None:
        for _ in range(3):
            for source, target in ((self.caller, self.server), (self.server, self.caller)):
                data = b"".join(source.session.drain_urgent())
                if data:
                    target.session.receive(data)

    def token(self, index: int) -> int:
        self.next_token += 1
        if not self.served[index].ending and not self.served[index].closed:
            self.sent[index].append(self.next_token)
        return self.next_token

    def step(self, members: tuple[int, ...]) -> None:
        if members != self.batch:
            self.batch = members
            self.sender = StepSender([self.served[index] for index in members])
        self.sender.send([self.token(index) for index in members])

    def check(self) -> None:
        for reader, sent, stream in zip(self.readers, self.sent, self.served, strict=True):
            assert reader.tokens == sent[: len(reader.tokens)]
            if not reader.cancelled:
                assert stream.credit >= 0
                assert reader.stream is not None
                assert reader.stream.window_left >= 0

    def finish(self) -> None:
        """Read everything, end everything: nothing may be missing."""
        self.server.session.resume()
        for _ in range(200):
            self.exchange()
            self.read(1000)
        for stream in self.served:
            stream.end()
        for _ in range(200):
            self.exchange()
            self.read(1000)
        for reader, sent in zip(self.readers, self.sent, strict=True):
            if not reader.cancelled:
                assert reader.tokens == sent
                assert reader.ends == 1
        assert self.caller.session.num_calls == 0
        assert self.server.session.num_served == 0

    def read(self, most: int) -> None:
        for reader in self.readers:
            if not reader.automatic and not reader.cancelled and not reader.ends:
                count = min(reader.num_unread, most)
                reader.num_unread -= count
                if count and reader.stream is not None:
                    reader.stream.mark_consumed(count)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_steps_and_everything_else_in_any_order(data: Any) -> None:
    kinds = data.draw(st.lists(st.booleans(), min_size=1, max_size=5))
    world = World(data.draw(st.sampled_from((1, 2, 3, 8))), kinds)
    everyone = tuple(range(len(kinds)))
    for _ in range(data.draw(st.integers(1, 40))):
        index = data.draw(st.sampled_from(everyone))
        action = data.draw(
            st.sampled_from(
                (
                    "step",
                    "step",
                    "step",
                    "part",
                    "one",
                    "flush",
                    "flush",
                    "read",
                    "pause",
                    "resume",
                    "end",
                    "cancel",
                    "late",
                )
            )
        )
        if action == "step":
            world.step(everyone)
        elif action == "part":
            world.step(tuple(i for i in everyone if i != index) or everyone)
        elif action == "one":
            world.served[index].send(Delta(token_ids=(world.token(index),), cached_tokens=7))
        elif action == "flush":
            world.exchange()
        elif action == "read":
            world.read(data.draw(st.integers(1, 4)))
        elif action == "pause":
            world.server.session.paused = True
        elif action == "resume":
            world.server.session.resume()
        elif action == "end":
            world.served[index].end()
        elif action == "cancel":
            world.readers[index].cancel()
        else:
            world.readers[index].cancel_at = len(world.readers[index].tokens) + 1
        world.check()
    world.finish()


def test_a_stable_batch_goes_as_step_frames_and_credit_lasts() -> None:
    world = World(8, [True] * 16)
    for _ in range(100):
        world.step(tuple(range(16)))
        world.exchange()
    assert all(len(reader.tokens) == 100 for reader in world.readers)
    assert world.server.stats.items_out == 1600
    assert world.server.stats.merged == 0
    world.finish()


def test_a_last_delta_after_steps_keeps_its_place() -> None:
    world = World(4, [False, True])
    world.step((0, 1))
    world.served[0].send(Delta(token_ids=(world.token(0),), finish=FinishReason.STOP))
    world.served[0].end()
    world.step((1,))
    world.exchange()
    assert world.readers[0].tokens == world.sent[0]
    assert world.readers[0].ends == 1
    world.finish()
