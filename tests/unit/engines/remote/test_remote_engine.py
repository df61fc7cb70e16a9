"""The remote engine in front of servers that answer as real ones did, and of servers that fail."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from msgspec.structs import replace
from tests.unit.engines.remote.fake_server import FakeServer, cuts, hangs, recorded
from tests.unit.engines.remote.lab import PATHS, SAID, SPEC, attached, greedy
from tests.waits import MUST_HAPPEN_S

from kvolt.core.delta import FinishReason
from kvolt.core.errors import ConfigError, EngineDied, Overloaded, Unavailable, Unsupported, from_info
from kvolt.core.request import Role, Sampling
from kvolt.engines.remote import RemoteArguments, RemoteEngine
from kvolt.testing.engines.harness import Answer, Run
from kvolt.testing.model_server import model_folder, plain, plays

FAST: dict[str, Any] = {
    "probe_interval_s": 0.01,
    "probe_timeout_s": MUST_HAPPEN_S,
    "start_timeout_s": 4 * MUST_HAPPEN_S,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path)


@pytest.fixture(params=["vllm", "sglang"])
async def server(request):
    async with FakeServer(request.param) as server:
        yield server


async def failed(run: Run, name: str = "r") -> Answer:
    answer = run.submit(greedy(name), may_fail=True)
    await run.finish(answer)
    assert answer.error is not None
    return answer


async def answered(run: Run, name: str = "again") -> Answer:
    answer = await run.answer(greedy(name))
    assert answer.tokens == {0: SAID}
    return answer


async def test_properties_of_a_server(server: FakeServer, folder: Path) -> None:
    async with attached(server.url, folder) as (run, engine):
        assert run.info.model == engine.card.name == "tiny"
        blocks = {"vllm": (32, 256), "sglang": (16, 512)}[server.kind]
        assert (run.info.block_size, run.info.capacity.kv_total_blocks) == blocks
        assert engine.card.context_length == 2048
        assert engine.card.eos_token_ids == (2,)
        assert not run.info.kv_events
        assert not run.info.publishes_kv_events


async def test_a_recorded_answer(server: FakeServer, folder: Path) -> None:
    async with attached(server.url, folder) as (run, _):
        answer = await answered(run)
        assert answer.finishes == {0: FinishReason.LENGTH}
        cached = {"vllm": 96, "sglang": 0}[server.kind]
        assert answer.usage[0].cached_tokens == cached
        # vLLM tells only at the end, and nobody else has told: that is not the same as nothing.
        assert answer.cached == {"vllm": None, "sglang": 0}[server.kind]
        assert (run.load.running, run.load.waiting, run.load.kv_used_blocks) == (0, 0, 0)


@pytest.mark.parametrize("piece_bytes", [1, 13, 400])
async def test_half_frames(server: FakeServer, folder: Path, piece_bytes: int) -> None:
    async with attached(server.url, folder) as (run, _):
        server.then(PATHS[server.kind], plays(recorded(server.kind, "greedy"), piece_bytes))
        await answered(run)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 0.6, 0.9])
async def test_a_connection_that_is_cut(server: FakeServer, folder: Path, share: float) -> None:
    """Wherever: the request may go on elsewhere, and the engine goes on."""
    whole = recorded(server.kind, "greedy")
    async with attached(server.url, folder) as (run, _):
        num_times = 1 if share else 2  # who gets nothing at all on a kept connection tries once more
        server.then(PATHS[server.kind], *[cuts(whole[: int(share * len(whole))])] * num_times)
        answer = await failed(run)
        assert answer.error is not None
        error = from_info(answer.error)
        assert (error.code, error.retryable) == ("engine_died", True)
        told = answer.tokens.get(0, [])
        assert told == SAID[: len(told)]
        await answered(run)


async def test_an_answer_that_ends_without_an_end(server: FakeServer, folder: Path) -> None:
    empty = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    async with attached(server.url, folder) as (run, _):
        server.then(PATHS[server.kind], plays(empty))
        answer = await failed(run)
        assert answer.error is not None
        assert answer.error.code == "engine_died"


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzzz\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 20\r\n\r\ndata: nonsense\n\n......",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 400 + b"\r\n",
    ],
    ids=["another protocol", "bad chunk", "no JSON", "headers without end"],
)
async def test_garbage(server: FakeServer, folder: Path, garbage: bytes) -> None:
    async with attached(server.url, folder) as (run, _):
        server.then(PATHS[server.kind], plays(garbage))
        answer = await failed(run)
        assert answer.error is not None
        assert answer.error.code == "engine_died"
        await answered(run)


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "invalid_request"), (429, "overloaded"), (500, "engine_died"), (503, "overloaded")],
)
async def test_refusals(server: FakeServer, folder: Path, status: int, code: str) -> None:
    async with attached(server.url, folder) as (run, _):
        server.then(PATHS[server.kind], plays(plain(status, b'{"error": {"message": "because"}}')))
        answer = await failed(run)
        assert answer.error is not None
        assert answer.error.code == code
        assert "because" in answer.error.message
        await answered(run)


async def test_an_engine_that_died_behind_its_server(folder: Path) -> None:
    async with FakeServer("vllm") as server, attached(server.url, folder) as (run, _):
        server.then("/v1/completions", plays(recorded("vllm", "died")))
        answer = await failed(run)
        assert answer.error is not None
        assert (answer.error.code, from_info(answer.error).retryable) == ("engine_died", True)


@pytest.mark.parametrize("share", [0.0, 0.5])
async def test_a_server_that_hangs(server: FakeServer, folder: Path, share: float) -> None:
    whole = recorded(server.kind, "greedy")
    limits = {"first_token_timeout_s": 0.1, "idle_timeout_s": 0.1}
    async with attached(server.url, folder, **limits) as (run, _):
        server.then(PATHS[server.kind], hangs(whole[: int(share * len(whole))]))
        answer = await failed(run)
        assert answer.error is not None
        assert answer.error.code == "engine_died"
        assert "was silent for 0.1 s" in answer.error.message
        async with asyncio.timeout(MUST_HAPPEN_S):
            await server.hung_up.wait()


async def test_who_aborts_hangs_up(server: FakeServer, folder: Path) -> None:
    whole = recorded(server.kind, "greedy")
    async with attached(server.url, folder) as (run, _):
        server.then(PATHS[server.kind], hangs(whole[: int(0.6 * len(whole))]))
        answer = run.submit(greedy())
        await run.until(lambda: bool(answer.tokens))
        run.abort(answer)
        async with asyncio.timeout(MUST_HAPPEN_S):
            await server.hung_up.wait()


async def test_connections_are_used_again(server: FakeServer, folder: Path) -> None:
    async with attached(server.url, folder) as (run, engine):
        for number in range(5):
            await answered(run, f"r{number}")
        assert server.num_connections == 1
        assert engine._client.num_connections == 1


async def test_kept_connection_closed_by_server(server: FakeServer, folder: Path) -> None:
    """It is sent once more. A server that hangs up on a new connection as well has failed."""
    async with attached(server.url, folder) as (run, _):
        await answered(run, "first")
        server.then(PATHS[server.kind], cuts(b""))
        await answered(run, "second")
        assert server.num_connections == 2
        server.then(PATHS[server.kind], cuts(b""), cuts(b""))
        answer = await failed(run, "third")
        assert answer.error is not None
        assert answer.error.code == "engine_died"


async def test_too_many_waiting(server: FakeServer, folder: Path) -> None:
    async with attached(server.url, folder, max_waiting=2) as (run, _):
        server.then(PATHS[server.kind], hangs(), hangs())
        waiting = [run.submit(greedy(f"w{number}")) for number in range(2)]
        with pytest.raises(Overloaded):
            run.engine.submit(greedy("more"))
        run.abort(waiting[0])
        await answered(run)


async def test_choices_wait_each(server: FakeServer, folder: Path) -> None:
    async with attached(server.url, folder, max_waiting=2) as (run, engine):
        server.then(PATHS[server.kind], hangs(), hangs())
        waiting = run.submit(replace(greedy(), sampling=Sampling(temperature=0.0, num_choices=2)))
        with pytest.raises(Overloaded, match=f"the queue of {engine.url}"):
            run.engine.submit(greedy("more"))
        run.abort(waiting)


async def test_started_request_is_not_withdrawn(server: FakeServer, folder: Path) -> None:
    async with attached(server.url, folder) as (run, _):
        server.then(PATHS[server.kind], plays(recorded(server.kind, "greedy")), hangs())
        answer = run.submit(replace(greedy(), sampling=Sampling(temperature=0.0, num_choices=2)))
        await run.until(lambda: 0 in answer.finishes)
        assert not await run.engine.withdraw(answer.request.request_id)
        run.abort(answer)


async def test_half_of_a_request_is_not_left_behind(
    server: FakeServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with attached(server.url, folder) as (run, engine):
        send, sent = engine._server.send, []

        def send_once(*given: Any) -> Any:
            if sent:
                raise TypeError("a bug")
            sent.append(send(*given))
            return sent[0]

        monkeypatch.setattr(engine._server, "send", send_once)
        server.then(PATHS[server.kind], hangs())
        with pytest.raises(TypeError):
            run.engine.submit(replace(greedy(), sampling=Sampling(temperature=0.0, num_choices=2)))
        monkeypatch.undo()
        assert not engine._exchanges
        assert (engine._own.waiting, engine._own.running) == (0, 0)
        await answered(run)


async def test_choices_are_calls_of_their_own(server: FakeServer, folder: Path) -> None:
    async with attached(server.url, folder) as (run, _):
        request = replace(greedy(), sampling=Sampling(temperature=0.0, num_choices=3, seed=7))
        answer = await run.answer(request)
        assert answer.tokens == {0: SAID, 1: SAID, 2: SAID}
        seeds = [body.get("seed") or body["sampling_params"]["sampling_seed"] for _, body in server.requests]
        assert sorted(seeds) == [7, 8, 9]


async def test_one_choice_that_fails_is_the_end_of_all(server: FakeServer, folder: Path) -> None:
    async with attached(server.url, folder) as (run, _):
        server.then(PATHS[server.kind], hangs(), plays(plain(500, b"{}")), hangs())
        request = replace(greedy(), sampling=Sampling(temperature=0.0, num_choices=3))
        answer = run.submit(request, may_fail=True)
        await run.finish(answer)
        async with asyncio.timeout(MUST_HAPPEN_S):
            await server.hung_up.wait()
        assert answer.error is not None


# --- a server that goes and comes


class Health:
    """What an engine says of its server."""

    def __init__(self, engine: RemoteEngine) -> None:
        self.told: list[str | None] = []
        self._news = asyncio.Event()
        engine.on_health = self._on_health

    def _on_health(self, reason: str | None) -> None:
        self.told.append(reason)
        self._news.set()

    async def next(self) -> str | None:
        async with asyncio.timeout(MUST_HAPPEN_S):
            await self._news.wait()
        self._news.clear()
        return self.told[-1]


async def test_no_server(server: FakeServer, folder: Path) -> None:
    """Before anybody has noticed: nothing was sent, and another one may have it."""
    async with attached(server.url, folder) as (run, _):
        await server.stop()
        answer = await failed(run)
        assert answer.error is not None
        error = from_info(answer.error)
        assert (error.code, error.retryable) in (("connect_failed", True), ("engine_died", True))
        again = await failed(run, "again")
        assert again.error is not None
        assert again.error.code == "connect_failed"


async def test_a_restart(server: FakeServer, folder: Path) -> None:
    """Requests fail so that they go on elsewhere, others are refused meanwhile, and then it goes on."""
    whole = recorded(server.kind, "greedy")
    async with attached(server.url, folder, **FAST) as (run, engine):
        health = Health(engine)
        server.then(PATHS[server.kind], hangs(whole[: int(0.6 * len(whole))]))
        answer = run.submit(greedy("cut"), may_fail=True)
        await run.until(lambda: bool(answer.tokens))
        await server.stop()
        await run.finish(answer)
        assert answer.error is not None
        assert answer.error.code == "engine_died"
        assert await health.next() is not None
        with pytest.raises(Unavailable):
            engine.submit(greedy("meanwhile"))
        await server.start()
        assert await health.next() is None
        await answered(run)


async def test_another_model_in_its_place(folder: Path) -> None:
    async with FakeServer("vllm") as server, attached(server.url, folder, **FAST) as (_, engine):
        health = Health(engine)
        await server.stop()
        assert await health.next() is not None
        other = recorded("vllm", "models").replace(b'"id":"tiny"', b'"id":"tony"')
        looked_at = asyncio.Event()

        async def tell_other(writer: asyncio.StreamWriter) -> None:
            await plays(other)(writer)
            looked_at.set()

        server.always["/v1/models"] = tell_other
        await server.start()
        async with asyncio.timeout(MUST_HAPPEN_S):
            await looked_at.wait()
        with pytest.raises(Unavailable):
            engine.submit(greedy())
        del server.always["/v1/models"]
        assert await health.next() is None


async def test_server_without_answers(server: FakeServer, folder: Path) -> None:
    """Its connections stay open, so only its silence tells."""
    limits = {"probe_interval_s": 0.01, "probe_timeout_s": 0.5, "away_after": 2}
    async with attached(server.url, folder, **limits) as (run, engine):
        health = Health(engine)
        server.then(PATHS[server.kind], hangs())
        server.always["/health"] = hangs()
        answer = run.submit(greedy(), may_fail=True)
        reason = await health.next()
        assert reason is not None
        assert "no response from" in reason
        await run.finish(answer)
        assert answer.error is not None
        assert answer.error.code == "engine_died"
        del server.always["/health"]
        assert await health.next() is None
        await answered(run)


async def test_one_bad_probe_is_no_absence(folder: Path) -> None:
    async with FakeServer("vllm") as server:
        looked = asyncio.Event()
        num_looks = 0

        async def count(writer: asyncio.StreamWriter) -> None:
            nonlocal num_looks
            num_looks += 1
            if num_looks == 3:
                looked.set()
            await plays(plain(500, b"") if num_looks == 1 else recorded("vllm", "health"))(writer)

        server.always["/health"] = count
        async with attached(server.url, folder, **FAST) as (run, engine):
            health = Health(engine)
            async with asyncio.timeout(MUST_HAPPEN_S):
                await looked.wait()
            assert not health.told
            await answered(run)


# --- starting


async def start(server: FakeServer, **arguments: Any) -> str:
    """What is wrong with it."""
    engine = RemoteEngine(SPEC, RemoteArguments(url=server.url, start_timeout_s=0.2, **arguments))
    with pytest.raises(ConfigError) as caught:
        await engine.start()
    await engine.close()
    return f"{caught.value.message} ({caught.value.fields.get('remedy')})"


async def test_what_can_never_be_attached(folder: Path) -> None:
    here = {"tokenizer": str(folder)}
    async with FakeServer("vllm") as server:
        text = await start(server, tokenizer="/nowhere/at/all")
        assert "tokenizer=FOLDER" in text
        assert "no downloaded model is named '/nowhere/at/all'" in text
        assert "served models: tiny" in await start(server, model="other", **here)
        server.then("/v1/models", plays(plain(401, b"{}")))
        assert "api_key" in await start(server, **here)
        server.then("/v1/models", plays(recorded("vllm", "models").replace(b'"vllm"', b'"acme"')))
        assert "kind=vllm" in await start(server, **here)
        server.then("/v1/models", plays(plain(200, b'{"data": [{"id": "tiny", "owned_by": "kvolt"}]}')))
        text = await start(server, **here)
        assert "is a kvolt frontend, not a vLLM or SGLang server" in text
        assert "--join" in text
        server.then("/metrics", plays(plain(200, b"")))
        assert "block_size=TOKENS" in await start(server, **here)
        two = b'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_running{engine="1"} 0\n'
        server.then("/metrics", plays(plain(200, two)))
        assert "2 data-parallel ranks" in await start(
            server, kv_events="tcp://127.0.0.1:1", block_size=16, **here
        )
        await server.stop()
        assert "is not available after" in await start(server, **here)


@pytest.mark.parametrize(
    "arguments",
    [
        {"url": "ftp://localhost"},
        {"kv_events": "tcp://*:5557"},
        {"kv_events": "5557"},
        {"kv_events": "tcp://host"},
        {"kv_events": "tcp://host:port"},
        {"kv_events_replay": f"ipc:///{'long/' * 30}"},
    ],
    ids=str,
)
def test_addresses_that_lead_nowhere(arguments: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        RemoteEngine(SPEC, RemoteArguments(**arguments))


def test_no_other_role() -> None:
    with pytest.raises(ConfigError):
        RemoteEngine(replace(SPEC, role=Role.PREFILL), RemoteArguments())


async def test_it_waits_for_a_server_that_is_not_there_yet(server: FakeServer, folder: Path) -> None:
    await server.stop()
    arguments = RemoteArguments(url=server.url, tokenizer=str(folder), **FAST)
    engine = RemoteEngine(SPEC, arguments)
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    await server.start()
    info = await starting
    assert info.model == "tiny"
    await engine.close()


async def test_closing_an_engine_that_waits(server: FakeServer) -> None:
    await server.stop()
    engine = RemoteEngine(SPEC, RemoteArguments(url=server.url))
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await engine.close()


# --- load


async def test_the_load_of_others_counts(folder: Path) -> None:
    busy = (
        b'vllm:num_requests_running{engine="0"} 5\nvllm:num_requests_waiting{engine="0"} 2\n'
        b'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:generation_tokens_total{engine="0"} 9\n'
    )
    async with FakeServer("vllm") as server, attached(server.url, folder, **FAST) as (run, _):
        server.always["/metrics"] = plays(plain(200, busy))
        await run.until(lambda: run.load.running == 5)
        assert (run.load.waiting, run.load.kv_used_blocks) == (2, 64)
        server.always["/metrics"] = plays(
            plain(200, busy.replace(b" 5\n", b" 0\n").replace(b" 2\n", b" 0\n"))
        )
        await run.until(lambda: run.load.running == 0)
        assert (run.load.waiting, run.load.kv_used_blocks) == (0, 0)


async def test_a_look_that_fails_is_not_the_last(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    busy = b'vllm:num_requests_running{engine="0"} 5\n'

    def fails(text: str) -> None:
        monkeypatch.undo()
        raise RuntimeError("a bug of ours")

    async with FakeServer("vllm") as server, attached(server.url, folder, **FAST) as (run, _):
        monkeypatch.setattr("kvolt.engines.remote.health_watch.read_stats", fails)
        server.always["/metrics"] = plays(plain(200, busy))
        await run.until(lambda: run.load.running == 5)
    assert "a bug of ours" in caplog.text


async def test_closed_while_it_waits_for_the_server(server: FakeServer) -> None:
    await server.stop()
    engine = RemoteEngine(SPEC, RemoteArguments(url=server.url, **FAST))
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0.02)
    await engine.close()
    async with asyncio.timeout(MUST_HAPPEN_S):
        with pytest.raises(EngineDied):
            await starting


# --- KV events


class Publisher:
    """As vLLM's: a socket that says when somebody listens."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.XPUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(
            zmq.XPUB_VERBOSE, 1
        )  # tells of a second subscriber before the first one has left
        self.endpoint = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._number = 0

    async def heard(self) -> None:
        async with asyncio.timeout(60):
            while not (await self._socket.recv()).startswith(b"\x01"):
                pass  # one that left

    async def tell(self, *events: dict[str, Any]) -> None:
        payload = msgspec.msgpack.encode([0.0, events, 0])
        await self._socket.send_multipart((b"", self._number.to_bytes(8, "big"), payload))
        self._number += 1

    def close(self) -> None:
        self._socket.close(0)
        self._context.term()


@pytest.fixture
def publisher():
    publisher = Publisher()
    yield publisher
    publisher.close()


async def test_published_blocks(folder: Path, publisher: Publisher) -> None:
    tokens = list(range(10, 10 + 64))
    stored = {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": tokens, "block_size": 32}
    async with (
        FakeServer("vllm") as server,
        attached(server.url, folder, kv_events=publisher.endpoint, **FAST) as (run, engine),
    ):
        assert run.info.publishes_kv_events
        await publisher.heard()
        await publisher.tell(stored)
        await run.until(lambda: len(run.replica.blocks) == 2)
        server.then("/v1/completions", plays(recorded("vllm", "greedy"), 600))
        answer = await answered(run)
        assert answer.cached == 64  # by what was told; vLLM itself says so at the end
        assert answer.usage[0].cached_tokens == 96
        assert run.replica.blocks
        later = {**stored, "block_hashes": [3], "token_ids": list(range(200, 232))}
        waiting = asyncio.Event()
        told = asyncio.Event()

        async def after_its_blocks(writer: asyncio.StreamWriter) -> None:
            waiting.set()
            await told.wait()
            await plays(recorded("vllm", "greedy"), 600)(writer)

        server.then("/v1/completions", after_its_blocks)
        new = run.submit(replace(greedy("new"), token_ids=tuple(range(200, 240))))
        await waiting.wait()
        await publisher.tell(later)
        await run.until(lambda: len(run.replica.blocks) == 3)
        told.set()
        await run.finish(new)
        assert new.cached == 0  # its own blocks were told before its first token: they were no hit
        await publisher.tell({"type": "BlockRemoved", "block_hashes": [3]})
        await publisher.tell({"type": "BlockRemoved", "block_hashes": [2]})
        await run.until(lambda: len(run.replica.blocks) == 1)
        health = Health(engine)
        await server.stop()
        await health.next()
        await run.until(lambda: not run.replica.blocks)
        await server.start()
        await health.next()
        await publisher.heard()


async def test_clearing(folder: Path) -> None:
    async with FakeServer("vllm") as server, attached(server.url, folder) as (_, engine):
        with pytest.raises(Unsupported, match="VLLM_SERVER_DEV_MODE"):
            await engine.clear_kv()
        server.then("/reset_prefix_cache", plays(plain(200, b"")))
        assert await engine.clear_kv() == 0
        server.then("/reset_prefix_cache", plays(plain(400, b'{"error": "busy"}')))
        with pytest.raises(Unavailable):
            await engine.clear_kv()
