"""Recording a trace from a frontend: what it contains, what it omits, and that no reader affects recorded requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from tests.unit.engines.lab import MODEL, Frontend, Lab, RunningWorker, until
from tests.unit.frontend.admin.test_trace_ids import request
from tests.unit.frontend.serving import WHOLE, Answering, served

from kvolt.core.errors import InvalidRequest, Overloaded
from kvolt.core.trace import TraceRecord
from kvolt.frontend.admin import trace_recorder
from kvolt.frontend.admin.trace_recorder import (
    MAX_RECORDINGS,
    TRACE_ENDPOINT,
    RecordedPart,
    Recording,
    RecordTrace,
)
from kvolt.runtime.endpoint.call import Deadlines, ResponseStream, open_stream
from kvolt.runtime.plane.port import Destination
from kvolt.runtime.runtime import Runtime

KEY = b"k" * 32
LONG = Deadlines(total_s=1000.0)
PROMPT = list(range(300, 350))


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


async def opened(reader: Runtime, edge: Frontend, **wanted: Any) -> ResponseStream:
    assert edge.runtime.plane.address is not None
    to = Destination(edge.runtime.plane.address, TRACE_ENDPOINT)
    decode = msgspec.msgpack.Decoder(RecordedPart).decode
    return await open_stream(reader.plane, to, RecordTrace(key=KEY, **wanted), LONG, decode)


class Reader:
    """Collects a recording."""

    def __init__(self) -> None:
        self.records: list[TraceRecord] = []
        self.last = RecordedPart()
        self.over = False

    def take(self, part: RecordedPart) -> None:
        self.records += part.records
        self.last = part


@asynccontextmanager
async def recording(lab: Lab, edge: Frontend, name: str = "reader", **wanted: Any) -> AsyncIterator[Reader]:
    """A reader that has heard of the recording's begin."""
    runtime = await lab.runtime(name)
    reader = Reader()
    async with await opened(runtime, edge, **wanted) as stream:
        reader.take(await anext(stream))

        async def read() -> None:
            async for part in stream:
                reader.take(part)
            reader.over = True

        task = asyncio.get_running_loop().create_task(read())
        yield reader
        task.cancel()


def test_a_recording_has_times_lengths_and_shared_prefixes_and_no_text() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with recording(lab, edge) as reader:
            await asyncio.sleep(1.0)
            await edge.complete(prompt=PROMPT, max_tokens=5)
            await edge.complete(prompt=[*PROMPT[:32], *range(3, 20)], max_tokens=3, stream=True)
            await until(lambda: len(reader.records) == 2)
        first, second = reader.records
        assert 1000 <= first.timestamp < 1010
        assert second.timestamp > first.timestamp
        assert (first.input_length, first.output_length, first.block_size) == (50, 5, 16)
        assert (second.input_length, second.output_length) == (49, 3)
        assert len(first.hash_ids) == len(second.hash_ids) == 4
        assert first.hash_ids[:2] == second.hash_ids[:2]
        assert set(first.hash_ids[2:]).isdisjoint(second.hash_ids[2:])
        assert (first.session, first.tenant) == (None, None)

    served(body)


def test_nothing_is_recorded_before_or_after() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        await edge.complete(max_tokens=2)
        async with recording(lab, edge, duration_s=5.0) as reader:
            assert edge.recorder.num_recordings == 1
            await edge.complete(max_tokens=2)
            await asyncio.sleep(6.0)
            await edge.complete(max_tokens=2)
            await until(lambda: reader.over)
        assert len(reader.records) == 1
        assert edge.recorder.num_recordings == 0

    served(body)


def test_a_request_that_outlives_the_recording_is_waited_for() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with recording(lab, edge, duration_s=0.5) as reader:
            answer = asyncio.get_running_loop().create_task(edge.complete(max_tokens=200, ignore_eos=True))
            await asyncio.sleep(1.0)
            assert not reader.over
            assert (reader.last.running, reader.records) == (1, [])
            await answer
            await until(lambda: reader.over)
        assert [record.output_length for record in reader.records] == [200]
        assert reader.last.running == 0

    served(body)


def test_several_prompts_and_choices_are_as_many_records() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with recording(lab, edge) as reader:
            await edge.complete(prompt=[PROMPT, PROMPT[:20]], n=2, max_tokens=3, ignore_eos=True)
            await until(lambda: len(reader.records) == 4)
        assert [record.input_length for record in reader.records] == [50, 50, 20, 20]
        assert {record.output_length for record in reader.records} == {3}
        assert len({record.timestamp for record in reader.records}) == 1

    served(body)


def test_one_model_can_be_recorded_alone() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with recording(lab, edge, model="other") as reader:
            await edge.complete(max_tokens=2)
            await asyncio.sleep(1.0)
        assert (reader.records, reader.last.running) == ([], 0)
        async with recording(lab, edge, "another reader", model=MODEL) as reader:
            await edge.complete(max_tokens=2)
            await until(lambda: len(reader.records) == 1)

    served(body)


def test_sessions_and_tenants_are_distinct_and_anonymous() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with recording(lab, edge) as reader:
            for tenant in ("alice", "alice", "bob"):
                await edge.complete({"x-kvolt-tenant-id": tenant}, prompt=PROMPT, max_tokens=2)
            await until(lambda: len(reader.records) == 3)
        one, two, three = reader.records
        assert one.tenant == two.tenant != three.tenant
        assert "alice" not in msgspec.json.encode(reader.records).decode()
        assert one.hash_ids == two.hash_ids
        assert set(one.hash_ids).isdisjoint(three.hash_ids), "what the cache keeps apart is no shared prefix"

    served(body)


def test_what_got_no_token_is_counted_only() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with recording(lab, edge) as reader:
            async with edge.send(
                "POST",
                "/v1/completions",
                msgspec.json.encode({"model": MODEL, "prompt": "a", "stream": True}),
            ):
                await until(lambda: bool(running.engine.submitted))
            await until(lambda: reader.last.unanswered == 1)
        assert reader.records == []
        assert reader.last.running == 0

    served(body, Answering)


def test_a_client_that_leaves_halfway_is_recorded_as_far_as_it_came() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with recording(lab, edge) as reader:
            async with edge.send(
                "POST",
                "/v1/completions",
                msgspec.json.encode({"model": MODEL, "prompt": "a", "stream": True}),
            ) as browser:
                await until(lambda: browser.received.count(b"data: ") == 2)
            await until(lambda: len(reader.records) == 1)
        assert reader.records[0].output_length == 2

    served(body, lambda: Answering(*WHOLE[:2]))


def test_a_reader_that_leaves_ends_its_recording() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = None
        async with recording(lab, edge):
            answer = asyncio.get_running_loop().create_task(edge.complete(max_tokens=100, ignore_eos=True))
            await asyncio.sleep(0.2)
        await until(lambda: edge.recorder.num_recordings == 0)
        assert (await answer).status == 200

    served(body)


def test_a_reader_that_does_not_read_costs_records_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_recorder, "MAX_PENDING_BYTES", 3000)
    monkeypatch.setattr(trace_recorder, "_PART_BYTES", 1)

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        runtime = await lab.runtime("reader")
        async with await opened(runtime, edge) as stream:
            await anext(stream)
            for _ in range(12):
                await asyncio.gather(*(edge.complete(max_tokens=1) for _ in range(60)))
            reader = Reader()
            async with asyncio.timeout(60):
                async for part in stream:
                    reader.take(part)
                    if len(reader.records) + part.dropped == 720:
                        break
        assert reader.last.dropped > 0

    served(body)


def test_too_many_recordings_are_refused() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        runtime = await lab.runtime("reader")
        streams = [await opened(runtime, edge) for _ in range(MAX_RECORDINGS)]
        for stream in streams:
            await anext(stream)
        async with await opened(runtime, edge) as extra:
            with pytest.raises(Overloaded, match="too many recordings: the limit is 4"):
                await anext(extra)
        for stream in streams:
            await stream.aclose()
        await until(lambda: edge.recorder.num_recordings == 0)

    served(body)


def test_an_edge_that_stops_tells_what_it_has() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with recording(lab, edge) as reader:
            await edge.complete(max_tokens=2)
            edge.recorder.close()
            await until(lambda: reader.over)
        assert len(reader.records) == 1

    served(body)


def test_a_recording_is_no_work_that_a_drain_waits_for() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with recording(lab, edge):
            assert edge.runtime.server.num_active == 0
            assert edge.runtime.server.num_active_streams(TRACE_ENDPOINT) == 1

    served(body)


@pytest.mark.parametrize(
    ("wanted", "param"),
    [
        ({"key": b"short"}, "key"),
        ({"key": b"k" * 65}, "key"),
        ({"key": KEY, "duration_s": 0.0}, "duration_s"),
        ({"key": KEY, "duration_s": float("nan")}, "duration_s"),
        ({"key": KEY, "duration_s": 1e9}, "duration_s"),
    ],
)
def test_a_question_is_checked(wanted: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        RecordTrace(**wanted)
    assert caught.value.fields["param"] == param


# --- the recording by itself


def test_a_part_is_bounded_and_has_one_record_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_recorder, "_PART_BYTES", 2 * (256 + 40))
    recording = Recording(RecordTrace(key=KEY), 10.0)
    for number in range(5):
        assert recording.begin(request((1, 2)), 11.0)
        recording.end(11.0 + number, [(request((1, 2)), [1])])
    parts = []
    while recording.has_pending:
        parts.append([record.timestamp for record in recording.next_part().records])
    assert parts == [[1000, 2000], [3000, 4000], [5000]]
    assert recording.next_part().records == ()
    monkeypatch.setattr(trace_recorder, "_PART_BYTES", 1)
    recording.begin(request((1, 2)), 11.0)
    recording.end(11.0, [(request((1, 2)), [1])])
    assert len(recording.next_part().records) == 1


def test_what_does_not_fit_is_dropped_and_counted_and_room_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trace_recorder, "MAX_PENDING_BYTES", 2 * (256 + 40))
    recording = Recording(RecordTrace(key=KEY), 0.0)

    def ask(*lengths: int) -> None:
        recording.begin(request((1, 2)), 1.0)
        recording.end(1.0, [(request((1, 2)), lengths)])

    ask(1)
    ask(1, 2)
    ask(1)
    ask(1)
    part = recording.next_part()
    assert (len(part.records), part.dropped) == (2, 3)
    ask(7)
    assert [record.output_length for record in recording.next_part().records] == [7]


def test_one_that_came_while_the_recording_was_asked_for_is_at_its_start() -> None:
    recording = Recording(RecordTrace(key=KEY), 10.0)
    recording.begin(request((1, 2)), 10.1)
    recording.end(9.9, [(request((1, 2)), [1])])
    assert recording.next_part().records[0].timestamp == 0.0


def test_no_text_leaves() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with recording(lab, edge) as reader:
            await edge.chat(messages=[{"role": "user", "content": "pelican secret"}], max_tokens=2)
            await until(lambda: len(reader.records) == 1)
        assert "pelican" not in msgspec.json.encode(reader.records).decode()

    served(body)
