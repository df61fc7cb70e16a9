"""The load generators: what they are asked to do, and what they report. `kvolt bench` and aiperf.

aiperf is NVIDIA's, installed into a folder of its own and run as its users run it. It counts tokens by the server's
usage, as kvolt does, which is its cheaper way: by default it would tokenize all answers again. Nothing is drawn on a
screen, and no telemetry of GPUs or servers is looked for. How many workers and record processors it starts is left to
it. It needs a tokenizer to make prompts: that of kvolt's sim model, in a folder.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import msgspec
from benchmarks.harness import BrokenRun
from benchmarks.load.metered import Usage, run_metered
from benchmarks.processes import installed_python

from kvolt.bench.load.report import decode_report
from kvolt.engines.sim.model import SPECIAL, tokenizer_json

KVOLT = "kvolt bench"
_AIPERF_VERSION = "0.13.0"
AIPERF = f"aiperf {_AIPERF_VERSION}"


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a load generator, as a closed loop."""

    port: int
    model: str
    requests: int
    input_tokens: int
    output_tokens: int
    concurrency: int


class Seen(msgspec.Struct, frozen=True):
    """Counts that a generator reports."""

    answers: int
    failed: int
    output_tokens: int


class Client(Protocol):
    """A load generator."""

    name: str
    environ: Mapping[str, str]

    def command(self, load: Load, folder: Path) -> list[str]:
        """Its results are to be in the folder, or in its stdout, which will be."""
        ...

    def seen(self, folder: Path, stdout: bytes) -> Seen: ...


def run_client(client: Client, load: Load, cores: str | None = None) -> tuple[Seen, Usage]:
    """One run in fresh processes, on the named cores. BrokenRun: it failed, or did not send the load."""
    with tempfile.TemporaryDirectory(prefix="bench-load-") as name:
        folder = Path(name)
        used, stdout = run_metered(client.name, client.command(load, folder), folder, cores, **client.environ)
        seen = client.seen(folder, stdout)
    wanted = load.requests * load.output_tokens
    if seen.failed or seen.answers != load.requests or seen.output_tokens != wanted:
        raise BrokenRun(
            f"{client.name} has {seen.answers} answers of {load.requests} ({seen.failed} failed) with "
            f"{seen.output_tokens} tokens of {wanted}"
        )
    return seen, used


class KvoltBench:
    name = KVOLT
    environ: Mapping[str, str] = MappingProxyType({})

    def command(self, load: Load, folder: Path) -> list[str]:
        return [
            *(sys.executable, "-m", "kvolt", "bench", "--quiet", "--json"),
            *("--url", f"http://127.0.0.1:{load.port}", "--model", load.model),
            *("--concurrency", str(load.concurrency), "--requests", str(load.requests)),
            *("--input", str(load.input_tokens), "--output", str(load.output_tokens)),
        ]

    def seen(self, folder: Path, stdout: bytes) -> Seen:
        counts = decode_report(stdout, self.name).counts
        return Seen(counts.complete, counts.failed + counts.interrupted, counts.output_tokens)


class Aiperf:
    name = AIPERF
    environ = MappingProxyType({"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""})
    """Offline, it takes the tokenizer's folder for a name on a hub."""

    def __init__(self, folder: Path) -> None:
        self._program = folder / "aiperf" / "bin" / "aiperf"
        self._tokenizer = folder / "aiperf-tokenizer"

    @classmethod
    def installed(cls, folder: Path, *, may_install: bool = True) -> Aiperf:
        """From this folder, installed at the first use; Missing if it cannot be installed."""
        packages = ([f"aiperf=={_AIPERF_VERSION}"],)
        about = f"{AIPERF} (1.2 GB)"
        installed_python(folder / "aiperf", "import aiperf", about, packages, may_install=may_install)
        client = cls(folder)
        client._tokenizer.mkdir(parents=True, exist_ok=True)
        (client._tokenizer / "tokenizer.json").write_bytes(tokenizer_json())
        kind = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL[2],
            "bos_token": SPECIAL[0],
        }
        (client._tokenizer / "tokenizer_config.json").write_bytes(msgspec.json.encode(kind))
        return client

    def command(self, load: Load, folder: Path) -> list[str]:
        return [
            *(str(self._program), "profile", "--ui-type", "none"),
            *("--no-gpu-telemetry", "--no-server-metrics"),
            *("--url", f"http://127.0.0.1:{load.port}", "--model", load.model),
            *("--concurrency", str(load.concurrency)),
            *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
            *("--request-count", str(load.requests), "--num-prompts", str(load.requests)),
            *("--isl", str(load.input_tokens), "--osl", str(load.output_tokens)),
            *("--extra-inputs", "ignore_eos:true", "--random-seed", "0"),
            *("--tokenizer", str(self._tokenizer), "--output-artifact-dir", str(folder)),
        ]

    def seen(self, folder: Path, stdout: bytes) -> Seen:
        [path] = folder.rglob("profile_export_aiperf.json")
        summary: dict[str, Any] = msgspec.json.decode(path.read_bytes())

        def total(name: str) -> int:
            return round(float(summary[name]["avg"])) if summary.get(name) else 0

        tokens = total("total_output_tokens") or total("total_osl")
        return Seen(total("request_count"), total("error_request_count"), tokens)
