"""NVIDIA's aiperf as the other load generator: installed into a folder of its own, run as its users run it.

It counts tokens by the server's usage, as kvolt does, which is its cheaper way: by default it would tokenize all
answers again. Nothing is drawn on a screen, and no telemetry of GPUs or servers is looked for. How many workers and
record processors it starts is left to it. It needs a tokenizer to make prompts: that of kvolt's sim model, in a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from benchmarks.load.client import Delay, Load, Seen
from benchmarks.processes import installed_python

from kvolt.engines.sim.model import SPECIAL, tokenizer_json

VERSION = "0.13.0"
NAME = f"aiperf {VERSION}"


class Aiperf:
    name = NAME

    def __init__(self, folder: Path) -> None:
        self._program = folder / "aiperf" / "bin" / "aiperf"
        self._tokenizer = folder / "aiperf-tokenizer"

    def command(self, load: Load, folder: Path) -> list[str]:
        pace = (
            ("--concurrency", str(load.concurrency))
            if load.concurrency is not None
            else ("--request-rate", str(load.rate), "--arrival-pattern", "constant")
        )
        return [
            *(str(self._program), "profile", "--ui-type", "none"),
            *("--no-gpu-telemetry", "--no-server-metrics"),
            *("--url", f"http://127.0.0.1:{load.port}", "--model", load.model, *pace),
            *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
            *("--request-count", str(load.requests), "--num-prompts", str(load.requests)),
            *("--isl", str(load.input_tokens), "--osl", str(load.output_tokens)),
            *("--extra-inputs", "ignore_eos:true", "--random-seed", "0"),
            *("--tokenizer", str(self._tokenizer), "--output-artifact-dir", str(folder)),
        ]

    def environ(self) -> dict[str, str]:
        # Offline, it takes the tokenizer's folder for a name on a hub.
        return {"HF_HUB_OFFLINE": "", "TRANSFORMERS_OFFLINE": ""}

    def seen(self, folder: Path, stdout: bytes) -> Seen:
        [path] = folder.rglob("profile_export_aiperf.json")
        found: dict[str, Any] = msgspec.json.decode(path.read_bytes())
        return Seen(
            answers=round(found["request_count"]["avg"]),
            failed=round(_value(found, "error_request_count")),
            output_tokens=round(_value(found, "total_output_tokens") or _value(found, "total_osl")),
            input_tokens=_value(found, "input_sequence_length"),
            first=_delay(found["time_to_first_token"]),
            gap=_delay(found["inter_chunk_latency"]) if "inter_chunk_latency" in found else None,
            per_token=_delay(found["inter_token_latency"]) if "inter_token_latency" in found else None,
        )


def installed(folder: Path, *, may_install: bool = True) -> Aiperf:
    """From this folder, installed at the first use; Missing if it cannot be installed."""
    packages = ([f"aiperf=={VERSION}"],)
    installed_python(
        folder / "aiperf", "import aiperf", f"{NAME} (1.2 GB)", packages, may_install=may_install
    )
    tokenizer = folder / "aiperf-tokenizer"
    tokenizer.mkdir(parents=True, exist_ok=True)
    (tokenizer / "tokenizer.json").write_bytes(tokenizer_json())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[2], "bos_token": SPECIAL[0]}
    (tokenizer / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    return Aiperf(folder)


def _value(found: dict[str, Any], name: str) -> float:
    return float(found[name]["avg"]) if found.get(name) else 0.0


def _delay(figure: dict[str, Any]) -> Delay:
    return Delay(float(figure["p50"]), float(figure["p90"]))
