"""`kvolt bench` as a user meets it, against a scripted server on a real socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop
from tests.unit.bench.load.scripted_server import Heard, Script, ScriptedServer, answer, plain
from tests.unit.bench.load.server_thread import listening
from tests.unit.cli.chat_lab import CERTIFICATE

from kvolt.bench.load.report import BenchReport, decode_report
from kvolt.cli.bench import command as bench
from kvolt.cli.main import main


@pytest.fixture(autouse=True)
def _clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def quick(number: int, heard: Heard) -> Script:
    return answer(3, first_s=0.005, gap_s=0.002)


@pytest.fixture
def server() -> ScriptedServer:
    return ScriptedServer(quick)


@pytest.fixture
def url(server: ScriptedServer) -> Iterator[str]:
    with listening(server) as port:
        yield f"http://127.0.0.1:{port}"


def asked(url: str, flags: str) -> int:
    """The exit code of `kvolt bench --url URL FLAGS`."""
    return main(["bench", "--url", url, *flags.split()])


def read(folder: str) -> BenchReport:
    path = Path(folder) / "report.json"
    return decode_report(path.read_bytes(), str(path))


def test_a_closed_loop_with_all_its_files(
    url: str, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--concurrency 4 --requests 20 --warmup 4 --input 30 --output 3 --shared-prefix 10 --sla ttft=60s --out o"
    assert asked(url, f"--api-key secret --namespace f24 {flags}") == 0
    report = read("o")
    assert (report.counts.complete, report.counts.failed, report.counts.warmup) == (20, 0, 4)
    assert report.model == "tiny"
    assert report.throughput.good_share == 1.0
    assert report.latencies["ttft"].count == 20
    assert report.latencies["ttft"].min >= 0.005
    assert len(server.heard) == 24
    assert "overrides" not in report.settings
    assert all("Bearer secret" in heard.head for heard in server.heard)
    assert len({heard.connection for heard in server.heard}) == 4
    assert "secret" not in Path("o/report.json").read_text()
    assert len(Path("o/requests.csv").read_text().splitlines()) == 25
    assert "<svg" in Path("o/report.html").read_text()
    printed = capsys.readouterr().out
    assert "20 complete, 0 failed" in printed
    assert "time to first token" in printed


@pytest.mark.parametrize("arrivals", ["poisson", "constant", "burst"])
def test_an_open_loop(url: str, arrivals: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"--rate 200 --arrivals {arrivals} --requests 20 --json --quiet --endpoint tokens"
    assert asked(url, flags) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["counts"]["whole"] == 20
    assert report["settings"]["arrivals"] == arrivals


def test_a_trace(url: str, server: ScriptedServer, tmp_path: Path) -> None:
    lines = [
        {"timestamp": at, "input_length": 20, "output_length": 3, "hash_ids": [at]} for at in (0, 10, 20)
    ]
    (tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert main(["bench", "--url", url, "--trace", "t.jsonl", "--endpoint", "tokens", "--speed", "2"]) == 0
    assert [len(heard.body["prompt"]) for heard in server.heard] == [20, 20, 20]


@pytest.mark.parametrize("pace", ["--concurrency 2", "--rate 100"])
def test_the_lengths_of_a_trace_at_another_pace(url: str, server: ScriptedServer, pace: str) -> None:
    said = [{"from": "human", "value": "one two three"}, {"from": "gpt", "value": "four five"}]
    chats = [{"id": str(number), "conversations": [*said, *said]} for number in range(3)]
    Path("chats.json").write_text(json.dumps(chats))
    assert asked(url, f"--trace chats.json {pace} --endpoint tokens --out o") == 0
    assert read("o").counts.complete == 6
    lengths = sorted(len(heard.body["prompt"]) for heard in server.heard)
    assert lengths[0] == lengths[2] < lengths[3] == lengths[5], "each second turn has the first one in front"


def test_a_trace_without_times_needs_some(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = '{"timestamp": 5, "input_length": 9, "output_length": 1}\n'
    Path("t.jsonl").write_text(line * 2)
    assert asked(url, "--trace t.jsonl") == 2
    assert "has no timestamps" in capsys.readouterr().err
    Path("t.jsonl").write_text(line)
    assert asked(url, "--trace t.jsonl") == 0


def test_conversations(url: str, server: ScriptedServer) -> None:
    assert asked(url, "--concurrency 1 --requests 4 --turns 2 --think 1ms --set n=1") == 0
    assert [len(heard.body["messages"]) for heard in server.heard] == [1, 3, 1, 3]
    assert server.heard[0].body["n"] == 1


def test_a_duration(url: str) -> None:
    assert asked(url, "--concurrency 2 --duration 0.2s --out o") == 0
    assert read("o").counts.complete > 0


def test_when_nothing_is_answered_it_fails(
    url: str, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = lambda number, heard: plain(400, b'{"error":{"message":"ignore_eos is unknown"}}')
    assert asked(url, "--concurrency 2 --requests 2") == 1
    assert "2 x http_400: ignore_eos is unknown" in capsys.readouterr().out


def test_ctrl_c_ends_in_order_and_reports(url: str, server: ScriptedServer) -> None:
    def slow(number: int, heard: Heard) -> Script:
        return answer(3, first_s=0.005) if number < 2 else answer(3, first_s=60.0)

    def interrupt() -> None:
        deadline = time.monotonic() + 20.0
        while time.monotonic() < deadline:
            if len(server.heard) >= 4:
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.01)

    server.script = slow
    thread = threading.Thread(target=interrupt)
    thread.start()
    code = asked(url, "--concurrency 2 --requests 50 --drain 50ms --out o")
    thread.join()
    assert code == 130
    report = read("o")
    assert report.is_interrupted
    assert (report.counts.complete, report.counts.interrupted, report.counts.failed) == (2, 2, 0)
    assert "interrupted" in Path("o/report.html").read_text()


def test_a_terminal_gets_a_picture_and_a_pipe_gets_lines(
    url: str, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvolt.cli import progress
    from kvolt.cli.bench import screen as bench_screen

    monkeypatch.setattr(progress, "LINE_S", 0.02)
    monkeypatch.setattr(bench_screen, "_LIVE_S", 0.02)
    flags = "--concurrency 1 --duration 0.3s"
    assert asked(url, flags) == 0
    assert "ttft p50" in capsys.readouterr().err
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert asked(url, flags) == 0
    assert "Ctrl-C" in capsys.readouterr().err


def test_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(CERTIFICATE)
    flags = "--concurrency 2 --requests 6"
    with listening(ScriptedServer(quick), tls) as port:
        url = f"https://localhost:{port}"
        assert asked(url, flags) == 2
        assert "not trusted" in capsys.readouterr().err
        monkeypatch.setenv("SSL_CERT_FILE", str(CERTIFICATE))
        assert asked(url, f"{flags} --out o") == 0
    assert read("o").counts.complete == 6


def test_the_time_to_connect_is_that_of_the_flag(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def connect(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", connect)
    monkeypatch.setattr(uvloop.Loop, "create_connection", connect)
    assert asked("http://127.0.0.1:1", "--rate 1 --connect-timeout 0.05s") == 2
    assert "did not answer within 0.05 s" in capsys.readouterr().err


def test_a_list_of_models_that_does_not_end_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def models(client: object) -> list[str]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(bench, "_LISTING_TIMEOUT_S", 0.05)
    monkeypatch.setattr(bench.ChatClient, "models", models)
    assert asked("http://127.0.0.1:1", "--rate 1") == 2
    assert "no model list within 0.05 s" in capsys.readouterr().err


def test_runs_are_compared(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(url, "--concurrency 2 --requests 10 --out a") == 0
    assert asked(url, "--rate 100 --requests 10 --out b --input 9") == 0
    capsys.readouterr()
    assert main(["bench", "compare", "a", "b/report.json"]) == 0
    printed = capsys.readouterr().out
    assert "the runs differ in input: 512 and 9" in printed
    assert "note: only the first run has concurrency=2\nnote: only the second run has rate=100" in printed
    assert "ttft p90 (ms)" in printed
    assert main(["bench", "compare", "a", "b", "--json", "--seed", "3"]) == 0
    assert {change["figure"] for change in json.loads(capsys.readouterr().out)} >= {"ttft mean", "requests/s"}
    assert main(["bench", "compare", "a", "nowhere"]) == 2
    assert "cannot read nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("", "no load is specified"),
        ("--rate 1 --concurrency 2", "--rate and --concurrency are mutually exclusive"),
        ("--rate 0", "--rate is 0"),
        ("--concurrency 0", "--concurrency is 0"),
        ("--rate 1 --requests 5 --duration 3s", "mutually exclusive"),
        ("--rate 1 --input 0", "invalid length"),
        ("--rate 1 --shared-prefix 600", "exceeds --input 512"),
        ("--rate 1 --sla quick=1s", "invalid limit"),
        ("--rate 1 --timeout 0", "--timeout is 0"),
        ("--rate 1 --turns 2 --endpoint tokens", "--turns requires generated chat prompts"),
        ("--rate 1 --turns 0", "--turns must be 1 or more"),
        ("--rate 1 --set x", "NAME=VALUE"),
        ("--trace nowhere.jsonl", "nowhere.jsonl"),
        ("--concurrency 99999999", "exceed the open file limit"),
        ("--rate 1 --url ftp://x", "invalid server URL"),
        ("--rate 1 --url 127.0.0.1:1", "http://127.0.0.1:1/v1 is unreachable"),
        ("--rate 1 --out /dev/null/x --url 127.0.0.1:1", "cannot write to"),
    ],
)
def test_mistakes_are_told_in_a_line(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *flags.split()]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert said in line
    assert line.endswith(")"), "and the remedy"


def test_a_report_is_not_written_over(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--concurrency 1 --requests 1 --out o"
    assert asked(url, flags) == 0
    assert asked(url, flags) == 2
    assert "--force" in capsys.readouterr().err
    assert asked(url, f"{flags} --force") == 0


@pytest.mark.parametrize(("names", "said"), [((), "serves no model"), (("a", "b"), "serves 2 models: a, b")])
def test_the_model_must_be_clear(
    names: tuple[str, ...], said: str, url: str, server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.names = names
    flags = "--concurrency 1 --requests 1"
    assert asked(url, flags) == 2
    assert said in capsys.readouterr().err
    assert asked(url, f"{flags} --model mine") == 0
    assert server.heard[0].body["model"] == "mine"


def test_where_it_asks(monkeypatch: pytest.MonkeyPatch, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", f"{url}/v1")
    assert main(["bench", "--concurrency", "1", "--requests", "1"]) == 0
    assert f"tiny at {url}/v1" in capsys.readouterr().out


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("open loop", "closed loop", "goodput", "compare", *bench.Endpoint))
