"""Writes down what a real SGLang says, for the unit tests that have none: tests/unit/engines/sglang/recorded.json.

VENV/bin/python tests/engines_sglang/record.py MODEL_FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import msgspec
import zmq

TARGET = Path(__file__).parents[1] / "unit" / "engines" / "sglang" / "recorded.json"
FIELDS = [
    "rids",
    "output_ids",
    "finished_reasons",
    "cached_tokens",
    "dp_ranks",
    "output_token_logprobs_val",
    "output_token_logprobs_idx",
    "output_top_logprobs_val",
    "output_top_logprobs_idx",
    "input_token_logprobs_val",
    "input_token_logprobs_idx",
    "input_top_logprobs_val",
    "input_top_logprobs_idx",
]


class Recorder:
    """In the place of the socket to the engine."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self.batches: list[dict[str, Any]] = []

    def send(self, message: Any) -> None:
        self.messages.append(message)

    def keep(self, batch: Any) -> None:
        lists = {name: getattr(batch, name) for name in FIELDS}
        self.batches.append(json.loads(json.dumps(lists, default=list)))


def main(model: str) -> None:
    sys.path.insert(0, str(Path(__file__).parent))
    from kept import SMALL, spec_of

    from kvolt.engines.sglang.arguments import SglangArguments
    from kvolt.engines.sglang.host import host as module
    from kvolt.engines.sglang.host.launch import launch
    from kvolt.engines.sglang.host.messages import Batch, Generate, Start
    from kvolt.runtime.clock import SystemClock

    folder = tempfile.mkdtemp()
    start = Start(spec_of(Path(model)), SglangArguments(engine_args=SMALL), model, folder, 30)
    launched = launch(start, SystemClock())
    events = zmq.Context().socket(zmq.SUB)
    events.setsockopt(zmq.SUBSCRIBE, b"")
    events.setsockopt(zmq.RCVTIMEO, 1500)
    events.connect(launched.facts.kv_sources[0].endpoint)
    recorder = Recorder()
    rows_of = module.rows_of
    module.rows_of = lambda batch: recorder.keep(batch) or rows_of(batch)
    host = module.Host(recorder, launched)  # type: ignore[arg-type]

    def ask(rid: str, tokens: list[int], sampling: dict[str, Any], **fields: Any) -> None:
        given = {"stream": True, "return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0}
        host._handle(Generate(rid, tokens, sampling, given | fields))
        while not any(
            row.rid == rid and row.finish
            for each in recorder.messages
            if isinstance(each, Batch)
            for row in each.rows
        ):
            for source in (launched.sockets.tokens, launched.sockets.answers):
                source.poll(100)
                host._drain(source)

    greedy = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True, "stop_token_ids": []}
    prompt = list(range(20, 60))
    logprobs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}
    ask("logprobs/1/0.", prompt, greedy, **logprobs)
    ask("again/2/0.", prompt, greedy)
    ask("salted/3/0.", prompt, greedy, cache_salt="tenant")
    ask("bad/4/0.", prompt, greedy | {"regex": "[0-9"})
    ask("wrong/5/0.", prompt, greedy | {"top_p": 7.0})
    payloads = []
    while True:
        try:
            _, number, payload = events.recv_multipart()
        except zmq.Again:
            break
        payloads.append([int.from_bytes(number, "big"), payload.hex()])
    document = {
        "version": launched.facts.version,
        "facts": msgspec.to_builtins(launched.facts),
        "batches": recorder.batches,
        "messages": [
            {"kind": type(each).__name__, "message": msgspec.to_builtins(each)} for each in recorder.messages
        ],
        "kv_events": payloads,
    }
    TARGET.write_text(json.dumps(document, indent=1) + "\n")
    module._end_children()
    for pid in launched.pids:
        os.kill(pid, 9)


if __name__ == "__main__":
    main(sys.argv[1])
