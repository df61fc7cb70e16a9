"""A batch over streams of any plane. The wire side of steps is in tests/property/test_steps.py."""

from __future__ import annotations

from typing import Any

import msgspec

from kvolt.core.delta import Delta
from kvolt.runtime.plane.served_stream import ServedStream
from kvolt.runtime.plane.steps import StepSender
from kvolt.runtime.plane.wire import NIL, Open


class Session:
    """As much of one as a batch asks for."""

    paused = False
    open_deltas = None

    def __init__(self) -> None:
        self.step_owner: Any = None
        self.steps: list[int] = []

    def settle_step(self) -> None:
        self.step_owner = None

    def queue_step(self, frame: bytes, num_items: int) -> None:
        self.steps.append(num_items)


class Foreign:
    """A stream of another plane, as far as a batch looks."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, item: Any) -> None:
        self.sent.append(item)


def test_streams_of_another_plane_get_their_tokens_one_by_one() -> None:
    session = Session()
    ours = [
        ServedStream(session, number, Open("ns.c.e", 8, None, {}, False, msgspec.Raw(NIL)), b"")  # type: ignore[arg-type]
        for number in (1, 3)
    ]
    one, two = Foreign(), Foreign()
    sender = StepSender([one, ours[0], None, ours[1], two])  # type: ignore[list-item]
    sender.send([10, 11, 12, 13, 14])
    sender.send([20, 21, 22, 23, 24])
    assert one.sent == [Delta((10,)), Delta((20,))]
    assert two.sent == [Delta((14,)), Delta((24,))]
    assert session.steps == [2, 2]


def test_streams_of_another_plane_only() -> None:
    streams = [Foreign(), Foreign()]
    StepSender(streams).send((5, 6))  # type: ignore[arg-type]
    assert [stream.sent for stream in streams] == [[Delta((5,))], [Delta((6,))]]
