"""`kvolt trace record` against real processes: what clients ask becomes a trace that the other verbs read."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import httpx
from tests.integration.processes import MODEL, PATIENCE_S, Bench, Kvolt, until, until_ready

from kvolt.bench.traces import read_trace

SECRET = "pelican " * 40


async def ask(url: str, prompt: str, **more: object) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, **more}
        assert (await client.post("/v1/completions", json=body)).status_code == 200


async def unsorted_lines(recorder: Kvolt, path: Path, count: int) -> None:
    """Until so many requests have reached the recorder."""
    left = path.with_name(f"{path.name}.unsorted")
    await until(lambda: left.exists() and left.read_bytes().count(b"\n") >= count, what=f"{count} records")
    assert recorder.exit_code is None


async def recording(bench: Bench, url: str, out: str) -> Kvolt:
    """A recorder that has begun."""
    recorder = bench.start("trace", "record", url, "--out", out, name="recorder")
    await until(
        lambda: "trace recording started" in (bench.folder / "frontend.err").read_text(), what="the recording"
    )
    return recorder


async def test_what_is_asked_becomes_a_trace(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        bench.worker("w0", speed=50)
        _, url = await bench.frontend()
        await until_ready(url)
        recorder = await recording(bench, url, "t.jsonl")
        await ask(url, SECRET + "one")
        await ask(url, SECRET + "two")
        await ask(url, "something else")
        await unsorted_lines(recorder, tmp_path / "t.jsonl", 3)
        recorder.send(signal.SIGINT)
        assert await recorder.ended() == 0
        assert "3 requests of" in recorder.out

        first, second, third = read_trace(tmp_path / "t.jsonl")
        shared = [one == other for one, other in zip(first.hash_ids, second.hash_ids, strict=True)]
        assert shared == sorted(shared, reverse=True)
        assert sum(shared) >= 4
        assert not set(third.hash_ids) & {*first.hash_ids, *second.hash_ids}
        assert [each.output_length for each in (first, second, third)] == [4, 4, 4]
        assert "pelican" not in (tmp_path / "t.jsonl").read_text()

        analysis = bench.run("trace", "analyze", "t.jsonl", "--json")
        assert analysis.returncode == 0, analysis.stderr
        assert json.loads(analysis.stdout)["reuse"]["requests_with_reuse"] > 0
        twin = bench.run("twin", "t.jsonl", timeout_s=60.0)
        assert twin.returncode == 0, twin.stderr


async def test_the_processes_of_one_edge_are_one_trace(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        (tmp_path / "kvolt.toml").write_text(
            f'[[workers]]\nmodel = "{MODEL}"\ncount = 1\nargs = {{speed = 50}}\n'
        )
        _, url = await bench.serve("--processes", "2")
        recorder = bench.start("trace", "record", "--out", "t.jsonl", name="recorder")
        logs = [tmp_path / "logs" / f"frontend-{slot}.log" for slot in range(2)]
        await until(
            lambda: all(log.exists() and "trace recording started" in log.read_text() for log in logs),
            what="both",
        )
        # New connections: the system spreads them over the processes.
        await asyncio.gather(*(ask(url, SECRET) for _ in range(16)))
        await unsorted_lines(recorder, tmp_path / "t.jsonl", 16)
        recorder.send(signal.SIGINT)
        assert await recorder.ended() == 0, recorder.err
        records = list(read_trace(tmp_path / "t.jsonl"))
        assert len(records) == 16
        assert len({each.hash_ids for each in records}) == 1, "the same prompt, whichever process it met"
