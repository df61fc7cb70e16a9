"""The supervisor with real processes: small Python children that crash, chatter, and refuse to end."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import psutil
import pytest
from tests.integration.processes import read_status

from kvolt.core.errors import ConfigError
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.stop import StopSignal
from kvolt.runtime.supervisor.output import (
    LINE_LIMIT_BYTES,
    ChildOutput,
    LineCutter,
    RotatingFile,
    TerminalView,
    render_line,
)
from kvolt.runtime.supervisor.plan import ChildState, Level, RestartRule
from kvolt.runtime.supervisor.process import die_with_parent
from kvolt.runtime.supervisor.supervisor import (
    ChildSpec,
    ChildStatus,
    Supervisor,
    SupervisorConfig,
)

PATIENCE_S = 60.0
QUICK = SupervisorConfig(
    restart=RestartRule(backoff_initial_s=0.05, backoff_max_s=0.2, stable_after_s=60), stop_timeout_s=5.0
)
SLEEP = "import time; time.sleep(600)"


def child(name: str, program: str, **more: object) -> ChildSpec:
    argv = (sys.executable, "-S", "-c", textwrap.dedent(program))
    return ChildSpec(name, argv, **more)  # type: ignore[arg-type]


class Bench:
    """A supervisor under test, with what it said and every state it reported."""

    def __init__(self, specs: list[ChildSpec], log_dir: Path, config: SupervisorConfig = QUICK) -> None:
        self.log_dir = log_dir
        self.out = io.StringIO()
        self.stop = StopSignal()
        self.events: list[ChildStatus] = []
        view = TerminalView(self.out, [spec.name for spec in specs])
        self.supervisor = Supervisor(
            specs, log_dir, SystemClock(), self.stop, config, view, on_event=self.events.append
        )

    def pids(self) -> list[int]:
        return list(dict.fromkeys(event.pid for event in self.events if event.pid is not None))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[int]]:
        """Run it around a block; afterwards ask it to stop and see that nothing is left."""
        run = asyncio.get_running_loop().create_task(self.supervisor.run())
        try:
            yield run
            self.stop.request_stop("end of test")
            await asyncio.wait_for(asyncio.shield(run), PATIENCE_S)
        finally:
            run.cancel()
            await asyncio.wait([run])
        assert [pid for pid in self.pids() if psutil.pid_exists(pid)] == []


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.02)


async def test_only_a_run_that_served_resets_the_backoff(tmp_path: Path) -> None:
    rule = RestartRule(backoff_initial_s=0.05, backoff_max_s=10.0, stable_after_s=0.0)
    serves = "import os; open(os.environ['KVOLT_READY_FILE'], 'w').close(); raise SystemExit(1)"
    specs = [child("serves", serves), child("fails", "raise SystemExit(1)")]
    bench = Bench(specs, tmp_path, SupervisorConfig(restart=rule, stop_timeout_s=5.0))

    def delays(name: str) -> list[str]:
        lines = bench.out.getvalue().splitlines()
        return [line.rpartition("restarting in ")[2] for line in lines if f"| {name} exited" in line][:3]

    async with bench.running():
        await until(lambda: min(len(delays(spec.name)) for spec in specs) == 3)
    assert delays("serves") == ["0.05 s"] * 3
    assert delays("fails") == ["0.05 s", "0.1 s", "0.2 s"]


async def test_crash_is_restarted_with_backoff(tmp_path: Path) -> None:
    bench = Bench([child("a", "raise SystemExit('error: boom')")], tmp_path)
    async with bench.running():
        await until(lambda: len(bench.pids()) >= 3)
    out = bench.out.getvalue()
    assert "a exited with code 1" in out
    assert "boom; restarting in 0.05 s" in out
    assert "restarting in 0.1 s" in out
    states = [event.state for event in bench.events]
    assert states[:5] == ["pending", "running", "backoff", "pending", "running"]
    assert states[-1] == ChildState.STOPPED


def record(level: str, message: str) -> bytes:
    return json.dumps({"time": 0, "level": level, "message": message}).encode()


@pytest.mark.parametrize(
    ("lines", "quoted"),
    [
        ([record("info", "serving")], ""),
        ([record("info", "no error so far")], ""),
        ([record("warning", "slow")], ""),
        ([record("error", "no room")], "no room"),
        ([b"ready to serve"], ""),
        ([b"kvolt: 127.0.0.1:80 is taken (choose another)"], ""),  # shown already, in full
        ([b"x.ValueError: no", b""], "x.ValueError: no"),
        (
            [b"Traceback (most recent call last):", b"  File ...", b"some.DiscoveryLost: gone"],
            "DiscoveryLost",
        ),
        ([b"Traceback (most recent call last):", b"  File ...", b"some.DiscoveryLost: gone", b"bye"], ""),
    ],
)
async def test_only_errors_are_last_words(tmp_path: Path, lines: list[bytes], quoted: str) -> None:
    log_file = RotatingFile(tmp_path / "a.log", 1000)
    output = ChildOutput("a", log_file, TerminalView(io.StringIO(), ["a"]))
    output.data_received(b"".join(line + b"\n" for line in lines))
    log_file.close()
    assert quoted in output.last_words
    assert bool(quoted) == bool(output.last_words)


async def test_killed_child_is_restarted_and_its_helpers_go_with_it(tmp_path: Path) -> None:
    program = f"""
        import subprocess, sys, time
        helper = subprocess.Popen([sys.executable, "-I", "-S", "-c", {SLEEP!r}])
        print("helper", helper.pid)
        time.sleep(60)
    """
    bench = Bench([child("a", program), child("b", SLEEP)], tmp_path)
    async with bench.running():
        await until(lambda: "helper" in bench.out.getvalue())
        helper = int(bench.out.getvalue().split("helper ")[1].split()[0])
        first = bench.supervisor.status().children[0].pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        await until(lambda: bench.supervisor.status().children[0].pid not in (first, None))
        await until(lambda: not alive(helper))
        status = bench.supervisor.status()
        assert [(one.name, one.restarts) for one in status.children] == [("a", 1), ("b", 0)]
    assert "a was killed by SIGKILL" in bench.out.getvalue()


async def test_exit_code_2_ends_the_whole_supervisor(tmp_path: Path) -> None:
    program = "import sys; print('kvolt: no such model: x', file=sys.stderr); sys.exit(2)"
    bench = Bench([child("good", SLEEP), child("bad", program)], tmp_path)
    async with bench.running() as run:
        assert await asyncio.wait_for(asyncio.shield(run), PATIENCE_S) == 2
    assert "bad exited with code 2" in bench.out.getvalue()
    assert "s; stopping, since a restart cannot help" in bench.out.getvalue()
    assert bench.out.getvalue().count("no such model: x") == 1


async def test_missing_program_ends_the_whole_supervisor(tmp_path: Path) -> None:
    bench = Bench([ChildSpec("a", ("no-such-program-at-all",))], tmp_path)
    async with bench.running() as run:
        assert await asyncio.wait_for(asyncio.shield(run), PATIENCE_S) == 2
    assert "program not found: no-such-program-at-all" in bench.out.getvalue()


async def test_two_children_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Bench([child("a", SLEEP), child("a", SLEEP)], tmp_path)


async def test_unusable_log_folder_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write logs"):
        await Bench([child("a", SLEEP)], tmp_path / "file" / "logs").supervisor.run()


async def test_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    program = """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("deaf")
        time.sleep(60)
    """
    bench = Bench([child("a", program)], tmp_path, SupervisorConfig(stop_timeout_s=0.2))
    async with bench.running() as run:
        await until(lambda: "deaf" in bench.out.getvalue())
        bench.stop.request_stop("test")
        assert await asyncio.wait_for(asyncio.shield(run), PATIENCE_S) == 0
    assert "a did not end within 0.2 s of SIGTERM; killing it" in bench.out.getvalue()


async def test_cancelling_run_kills_at_once(tmp_path: Path) -> None:
    bench = Bench([child("a", SLEEP), child("b", SLEEP)], tmp_path)
    run = asyncio.get_running_loop().create_task(bench.supervisor.run())
    await until(lambda: len(bench.pids()) == 2)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    wait_gone(bench.pids())


async def test_long_line_neither_blocks_the_child_nor_grows(tmp_path: Path) -> None:
    program = """
        import sys, time
        sys.stdout.write("x" * 1_000_000 + "\\n" + "y" * 200_000 + "\\nshort\\n")
        sys.stdout.flush()
        print("through", file=sys.stderr)
        time.sleep(60)
    """
    bench = Bench([child("a", program)], tmp_path)
    async with bench.running():
        await until(lambda: "through" in bench.out.getvalue())
    lines = (tmp_path / "a.log").read_bytes().splitlines()
    assert [line[:5] for line in lines] == [b"xxxxx", b"yyyyy", b"short", b"throu"]
    assert len(lines[0]) == LINE_LIMIT_BYTES + len(" ... [cut]")


async def test_flood_is_drained_and_the_log_is_bounded(tmp_path: Path) -> None:
    program = """
        for number in range(20_000):
            print(number, "." * 100)
        print("done", flush=True)
        import time
        time.sleep(60)
    """
    config = SupervisorConfig(log_limit_bytes=500_000, stop_timeout_s=5)
    bench = Bench([child("a", program)], tmp_path, config)
    async with bench.running():
        await until(lambda: bench.out.getvalue().endswith("done\n"))
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("a.log*")}
    assert sorted(sizes) == ["a.log", "a.log.1"]
    assert max(sizes.values()) <= 500_000
    assert (tmp_path / "a.log").read_text().endswith("done\n")


async def test_environment_and_cores_reach_the_child(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    program = """
        import os, signal, time
        print("env", os.environ["KVOLT_TEST"], "PATH" in os.environ)
        print("cores", os.sched_getaffinity(0), "session", os.getsid(0) == os.getpid())
        time.sleep(60)
    """
    bench = Bench([child("a", program, env={"KVOLT_TEST": "yes"}, affinity=(core,))], tmp_path)
    async with bench.running():
        await until(lambda: "session" in bench.out.getvalue())
    assert "env yes True" in bench.out.getvalue()
    assert f"cores {{{core}}} session True" in bench.out.getvalue()


async def test_status_file_follows_the_children(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    bench = Bench([child("a", SLEEP)], tmp_path)
    async with bench.running():
        await until(lambda: bench.supervisor.status().children[0].state is ChildState.RUNNING)
        status = read_status(tmp_path)
        assert status is not None
        (one,) = status.children
        assert (status.pid, status.exit_code, status.stopping) == (os.getpid(), None, False)
        assert (one.name, one.pid, one.state, one.restarts) == ("a", bench.pids()[0], "running", 0)
        assert one.uptime_s is not None
    last = read_status(tmp_path)
    assert last is not None
    assert (last.exit_code, last.children[0].state, last.children[0].pid) == (0, "stopped", None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log", "supervisor.json"]


# --- A supervisor that is a process of its own --------------------------------------------------------

HOST = """
import asyncio, sys
from pathlib import Path
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.stop import StopSignal
from kvolt.runtime.supervisor.supervisor import ChildSpec, Supervisor

async def main():
    stop = StopSignal()
    stop.install()
    specs = [
        ChildSpec(name, (sys.executable, "-I", "-S", "-c", sys.argv[3]), stage=stage)
        for stage, name in enumerate(["a", "b"])
    ]
    return await Supervisor(specs, Path(sys.argv[2]), SystemClock(), stop).run()

if sys.argv[1] == "uvloop":
    import uvloop
    sys.exit(uvloop.run(main()))
sys.exit(asyncio.run(main()))
"""
WITH_HELPER = f"""
import subprocess, sys, time
print("helper", subprocess.Popen([sys.executable, "-I", "-S", "-c", {SLEEP!r}]).pid, flush=True)
time.sleep(60)
"""


Host = tuple[subprocess.Popen[str], list[int]]


@contextmanager
def supervisor_process(loop: str, log_dir: Path, program: str) -> Iterator[Host]:
    """A supervisor process whose two children have a helper each, and all the pids below it."""
    argv = [sys.executable, "-c", HOST, loop, str(log_dir), program]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    below: list[int] = []
    try:
        lines: list[str] = []
        while sum("helper" in line for line in lines) < 2:
            line = process.stdout.readline()
            assert line, "".join(lines)
            lines.append(line)
        below = [one.pid for one in psutil.Process(process.pid).children(recursive=True)]
        assert len(below) == 5  # two children, two helpers, the guard
        yield process, below
    finally:
        process.kill()
        process.communicate(timeout=PATIENCE_S)
        for pid in below:
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture(params=["asyncio", "uvloop"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Host]:
    with supervisor_process(request.param, tmp_path, WITH_HELPER) as made:
        yield made


def test_sigterm_ends_everything(host: Host) -> None:
    process, below = host
    process.terminate()
    out, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, out
    assert "stopping: SIGTERM" in out
    wait_gone(below)


def test_kill_9_of_the_supervisor_leaves_nothing(host: Host) -> None:
    process, below = host
    process.kill()
    process.wait(PATIENCE_S)
    wait_gone(below)


def test_a_second_signal_ends_even_deaf_children_at_once(tmp_path: Path) -> None:
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WITH_HELPER
    with supervisor_process("asyncio", tmp_path, deaf) as (process, below):
        process.terminate()
        assert process.stdout is not None
        assert "stopping: SIGTERM" in process.stdout.readline()
        process.terminate()
        assert process.wait(PATIENCE_S) == 143
        wait_gone(below)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_the_kernel_alone_ends_a_child_with_its_parent() -> None:
    program = f"""
import subprocess, sys, time
from kvolt.runtime.supervisor.process import die_with_parent
argv = die_with_parent([sys.executable, "-I", "-S", "-c", "print('up', flush=True); {SLEEP}"])
print(subprocess.Popen(argv, start_new_session=True).pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        words = {parent.stdout.readline().strip(), parent.stdout.readline().strip()}
        pid = int((words - {"up"}).pop())
        assert alive(pid)
        parent.kill()
        parent.wait(PATIENCE_S)
        wait_gone([pid])


def test_a_child_born_to_a_dead_parent_does_not_start() -> None:
    argv = die_with_parent([sys.executable, "-c", "print('alive')"])
    argv[argv.index(str(os.getpid()))] = "1"
    done = subprocess.run(argv, capture_output=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (137, b"")


# --- Lines, files and the view ------------------------------------------------------------------------


@pytest.mark.parametrize("step", [1, 3, 100])
def test_lines_are_cut_alike_however_they_arrive(step: int) -> None:
    cutter = LineCutter(limit_bytes=5)
    data = b"one\n\ntoolong\nfives\nrest"
    lines = [line for at in range(0, len(data), step) for line in cutter.feed(data[at : at + step])]
    assert lines == [b"one", b"", b"toolo ... [cut]", b"fives"]
    assert cutter.end_line() == b"rest"


def test_file_appends_and_rotates(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_bytes(b"old\n")
    log_file = RotatingFile(path, 10)
    for data in (b"12345\n", b"6789\n", b"longer than the limit\n", b"end\n"):
        log_file.write(data)
    log_file.close()
    assert path.read_bytes() == b"end\n"
    assert (tmp_path / "x.log.1").read_bytes() == b"longer than the limit\n"


def test_json_records_are_unfolded_and_other_lines_left_alone() -> None:
    record = {
        "time": "2026-01-02T03:04:05.6Z",
        "level": "warning",
        "logger": "k",
        "process": "p",
        "message": "hot",
    }
    assert render_line(json.dumps({**record, "temp": 90}).encode()) == (
        Level.WARNING,
        "03:04:05 WARNING hot temp=90",
    )
    fields = {"message": "hot: temp=90 time=3", "temp": 90, "time_": 3, "request_id": "r"}
    assert render_line(json.dumps(record | fields).encode())[1] == (
        "03:04:05 WARNING hot: temp=90 time=3 request_id=r"
    )
    fields = {
        "message": 'request failed: error="no worker: request_id=\\"x\\"" start=0.0s',
        "error": 'no worker: request_id="x"',
        "start": 0.00649,
        "request_id": "r",
    }
    assert render_line(json.dumps(record | fields).encode())[1] == (
        f"03:04:05 WARNING {fields['message']} request_id=r"
    ), "rounded and quoted values are shown once, and do not hide other fields"
    trace = "Traceback\n  ValueError\n"
    level, text = render_line(json.dumps({"level": "ERROR", "message": "bad", "exception": trace}).encode())
    assert (level, text) == (Level.ERROR, "ERROR   bad\nTraceback\n  ValueError")
    assert render_line(b'{"level": "debug", "time": 1.5, "message": "m"}')[0] is Level.INFO
    for line in (b"plain", b'{"no": "record"}', b"{broken", b'{"level": "info", "message": 3}'):
        assert render_line(line) == (None, line.decode())
    assert render_line(b"10%\r50%\r100%\r") == (None, "100%")
    assert render_line(b"\xff!") == (None, "\N{REPLACEMENT CHARACTER}!")
    for line in (b'{"level":"info","message":"\xff"}', b'{"level":"info","message":' + b"[" * 20_000):
        level, _ = render_line(line)
        assert level is None
    faked = b'{"level":"error","message":"a exception=b","exception":"Traceback\\n  real"}'
    assert render_line(faked)[1].endswith("Traceback\n  real")


async def test_quiet_shows_warnings_and_what_has_no_level() -> None:
    out = io.StringIO()
    view = TerminalView(out, ["a", "longer"], quiet=True)
    for line in (b'{"level":"info","message":"hidden"}', b'{"level":"error","message":"seen"}', b"Traceback"):
        view.show("a", line)
    view.show_own(Level.INFO, "hidden too")
    view.show_own(Level.ERROR, "seen too")
    assert out.getvalue() == "a      | ERROR   seen\na      | Traceback\nkvolt  | seen too\n"


async def test_json_output_has_one_record_per_line_with_the_name_of_its_process() -> None:
    out = io.StringIO()
    view = TerminalView(out, ["a", "b"], json_clock=SystemClock())
    own = b'{"level":"info","process":"a","message":"m","status":200}'
    for line in (own, b'{"level":"info","message":"foreign"}', b"plain \xff\r", b"ValueError: bad"):
        view.show("a" if line is own else "b", line)
    view.show_own(Level.ERROR, "two\nlines")
    first, *rest = out.getvalue().splitlines()
    assert first == own.decode()
    records = [json.loads(line) for line in rest]
    assert records[0] == {"level": "info", "process": "b", "message": "foreign"}
    found = [(each["process"], each["level"], each["message"]) for each in records[1:]]
    assert found == [
        ("b", "info", "plain \N{REPLACEMENT CHARACTER}"),
        ("b", "error", "ValueError: bad"),
        ("kvolt", "error", "two\nlines"),
    ]
    assert all(each["time"] for each in records[1:])


async def test_colours_only_on_request() -> None:
    out = io.StringIO()
    TerminalView(out, ["a"], colour=True).show("a", b"x")
    assert out.getvalue() == "\x1b[36ma     |\x1b[0m x\n"


async def test_a_terminal_that_takes_nothing_costs_lines_not_time() -> None:
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    with os.fdopen(reads, "rb", 0) as terminal, os.fdopen(writes, "w") as out:
        view = TerminalView(out, ["a"])
        for number in range(10_000):
            view.show("a", b"%d %s" % (number, b"." * 200))
        seen = b""
        async with asyncio.timeout(PATIENCE_S):
            while b" 9999 " not in seen:
                seen += terminal.read(65536) or b""
                await asyncio.sleep(0.001)
        await view.close()
    assert b"a     | 0 ..." in seen
    assert b"lines not shown\n" in seen
    assert seen.count(b"\n") < 3000
