"""`kvolt trace record`: which frontends are meant, several as one trace, and what is said at the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvolt.api.cluster import Cluster
from kvolt.bench.traces import read_trace
from kvolt.bench.traces.writing import UnsortedTrace
from kvolt.cli.frontends import find_frontends
from kvolt.cli.main import main
from kvolt.cli.trace import record as trace_record
from kvolt.cli.trace.record import RecordingRun
from kvolt.core.endpoints import EndpointAddress, Instance
from kvolt.core.errors import ConfigError, KvoltError, NotFound, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.trace import TraceRecord
from kvolt.frontend.admin.trace_recorder import RecordedPart, RecordTrace
from kvolt.runtime.config.settings import Settings
from kvolt.testing import run_virtual
from kvolt.testing.virtual.loop import VirtualClock

WANTED = RecordTrace(key=b"k" * 32)
Part = tuple[float, RecordedPart | KvoltError]


def frontend(name: str, http: str | None) -> Instance:
    return Instance(
        id=InstanceId(name),
        endpoint=EndpointAddress("default", "frontend", "http"),
        address=f"{name}:1",
        process=name,
        info=msgspec.Raw(msgspec.msgpack.encode({"http": http} if http else None)),
    )


class _Stream:
    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts

    async def __aenter__(self) -> AsyncIterator[RecordedPart]:
        return self._read()

    async def __aexit__(self, *error: object) -> None:
        pass

    async def _read(self) -> AsyncIterator[RecordedPart]:
        for delay_s, part in self._parts:
            await asyncio.sleep(delay_s)
            if isinstance(part, KvoltError):
                raise part
            yield part


class _Told(Cluster):
    """A cluster whose frontends say what a test wants."""

    def __init__(self, frontends: list[Instance], parts: dict[str, list[Part]] | None = None) -> None:
        self._frontends = frontends
        self._parts = parts or {}

    async def instances(self, endpoint: EndpointAddress) -> list[Instance]:
        return self._frontends

    async def open(self, to: Any, question: Any, limits: Any, decode: Any) -> Any:
        assert question is WANTED
        return _Stream(self._parts[to.address.partition(":")[0]])


def record(timestamp: float, length: int = 1) -> TraceRecord:
    return TraceRecord(timestamp=timestamp, input_length=length, output_length=1, hash_ids=(1,))


def part(*records: TraceRecord, **counts: int) -> RecordedPart:
    return RecordedPart(records=records, **counts)


def recorded(tmp_path: Path, parts: dict[str, list[Part]]) -> tuple[RecordingRun, UnsortedTrace]:
    file = UnsortedTrace(tmp_path / "t.jsonl")
    runs: list[RecordingRun] = []

    async def scenario() -> None:
        cluster = _Told([], parts)
        run = RecordingRun(cluster, VirtualClock(), file, [frontend(name, None) for name in parts])
        runs.append(run)
        await run.run(WANTED)

    run_virtual(scenario)
    return runs[0], file


# --- which frontends


def found(url: str | None, *addresses: str | None) -> list[str]:
    known = [frontend(f"f{number}", address) for number, address in enumerate(addresses)]

    async def scenario() -> list[Instance]:
        return await find_frontends(_Told(known), Settings(), url)

    return [each.process for each in asyncio.run(scenario())]


def test_all_frontends_unless_one_is_named() -> None:
    assert found(None, "127.0.0.1:8000", "10.0.0.1:80", None) == ["f0", "f1", "f2"]


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://localhost:8000/v1", "127.0.0.1:8000"),
        ("localhost:8000", "127.0.0.1:8000"),
        ("http://10.0.0.5:8000", "0.0.0.0:8000"),
        ("http://10.0.0.5", "10.0.0.5:80"),
        ("https://kvolt.example", "0.0.0.0:443"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_a_url_means_who_listens_there(url: str, address: str) -> None:
    assert found(url, "127.0.0.1:9", address, address, None) == ["f1", "f2"]


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8001", "http://10.0.0.5:8000", "http://x:99999999", "http://", "http://[::1"]
)
def test_a_url_where_nobody_listens_tells_where_somebody_does(url: str) -> None:
    with pytest.raises(ConfigError, match=r"registered: 127\.0\.0\.1:8000, \?"):
        found(url, "127.0.0.1:8000", None, "nonsense")


def test_without_frontends_the_remedy_is_told() -> None:
    with pytest.raises(Unavailable, match="no frontend is registered in default") as caught:
        found(None)
    assert "--join" in str(caught.value.fields["remedy"])


# --- several as one


def test_times_of_several_frontends_are_put_beside_each_other(tmp_path: Path) -> None:
    run, file = recorded(
        tmp_path,
        {
            "a": [(0.0, part()), (1.0, part(record(100.0), running=2))],
            "b": [(0.5, part()), (0.1, part(record(50.0), dropped=3, unanswered=1))],
        },
    )
    assert file.finish() == 2
    assert [each.timestamp for each in read_trace(tmp_path / "t.jsonl")] == [100.0, 550.0]
    assert [run.total(name) for name in ("running", "dropped", "unanswered")] == [2, 3, 1]
    assert "2 requests, 2 running, 3 dropped" in run.line()


def test_one_that_goes_away_does_not_end_the_others(tmp_path: Path) -> None:
    gone = Unavailable("the server is stopping", endpoint="x", reason="stopping")
    run, file = recorded(
        tmp_path,
        {
            "a": [(0.0, part()), (0.1, part(record(1.0))), (0.1, gone)],
            "b": [(0.0, part()), (3.0, part(record(9.0)))],
        },
    )
    assert file.num_records == 2
    assert [source.failure for source in run.sources] == [gone, None]
    file.discard()


def test_ending_early_keeps_what_came(tmp_path: Path) -> None:
    file = UnsortedTrace(tmp_path / "t.jsonl")

    async def scenario() -> None:
        parts: dict[str, list[Part]] = {"a": [(0.0, part(record(1.0))), (1e6, part())]}
        run = RecordingRun(_Told([], parts), VirtualClock(), file, [frontend("a", None)])
        run.end()
        asyncio.get_running_loop().call_later(5.0, run.end)
        await run.run(WANTED)
        assert run.elapsed_s == pytest.approx(5.0)

    run_virtual(scenario)
    assert file.finish() == 1


# --- what is said at the end


def finished(
    tmp_path: Path, parts: dict[str, list[Part]], capsys: pytest.CaptureFixture[str], was_cut: bool = False
) -> tuple[int, str, str]:
    run, file = recorded(tmp_path, parts)
    try:
        code = trace_record._finish(run, file, "t.jsonl", was_cut)
    finally:
        file.discard()
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_the_end_says_what_is_in_the_file_and_what_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts: dict[str, list[Part]] = {
        "a": [(0.0, part()), (2.0, part(record(1.0), running=2, dropped=1, unanswered=4))]
    }
    code, out, err = finished(tmp_path, parts, capsys, was_cut=True)
    assert (code, out) == (130, "1 requests of 2.0 s in t.jsonl\n")
    assert err.splitlines() == [
        "kvolt: 2 requests had not finished and are not included",
        "kvolt: 4 requests got no token and are not included",
        "kvolt: 1 requests were dropped because the recorder was too slow",
    ]


def test_a_lost_frontend_is_named_and_the_rest_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts: dict[str, list[Part]] = {
        "a": [(0.0, part(record(1.0)))],
        "b": [(0.0, Unavailable("gone", endpoint="x", reason="y"))],
    }
    code, out, err = finished(tmp_path, parts, capsys)
    assert code == 1
    assert out.startswith("1 requests of")
    assert "b stopped recording: gone" in err


def test_a_quiet_hour_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = finished(tmp_path, {"a": [(0.0, part())]}, capsys)
    assert (code, out) == (1, "")
    assert "no requests recorded, t.jsonl not written" in err
    assert not (tmp_path / "t.jsonl").exists()


def test_a_frontend_that_cannot_record_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = NotFound("kvolt.frontend.trace is not served here", kind="endpoint", name="x")
    with pytest.raises(Unavailable, match="a at a:1 cannot record"):
        finished(tmp_path, {"a": [(0.0, unknown)]}, capsys)
    (tmp_path / "2").mkdir()
    with pytest.raises(KvoltError, match="some other"):
        finished(tmp_path / "2", {"a": [(0.0, KvoltError("some other"))]}, capsys)


# --- the command


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVOLT_DISCOVERY_PATH", str(tmp_path / "discovery"))
    return tmp_path


def test_wrong_commands_leave_nothing_behind(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "trace.jsonl").write_text("mine")
    for argv, code, told in (
        ((), 2, "trace.jsonl exists (choose another file or use --force)"),
        (("--out", "o", "--duration", "0s"), 2, "--duration is 0s, must be above 0"),
        (("--out", "o", "--duration", "soon"), 2, "invalid duration 'soon'"),
        (("--out", "o/o"), 2, "No such file or directory"),
        (("--out", "o"), 1, "no frontend is registered in default"),
    ):
        assert main(["trace", "record", *argv]) == code
        assert told in capsys.readouterr().err
    assert (place / "trace.jsonl").read_text() == "mine"
    assert not list(place.glob("o*"))
