"""LoRA adapters through real processes: given at the start, loaded and unloaded while it runs, chosen by clients."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.processes import PATIENCE_S, Bench, until_ready

from kvolt.testing.tiny_models import tiny_checkpoint

MODEL = "tiny"
PROMPT = tuple(range(70, 110))
NUM_TOKENS = 16
START_S = 50.0
"""torch takes seconds to import, and more of them on a busy machine."""


@dataclass(frozen=True, slots=True)
class Served:
    """A frontend and a worker that was started with adapter `one`."""

    url: str
    admin: dict[str, str]
    adapters: dict[str, Path]
    expected: dict[str, list[int]]
    """What the engine says when it is asked directly, by name of model."""

    def complete(self, model: str) -> httpx.Response:
        body = {
            "model": model,
            "prompt": list(PROMPT),
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "nvext": {"extra_fields": ["completion_token_ids"]},
        }
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=PATIENCE_S)

    def tokens(self, model: str) -> list[int]:
        said = self.complete(model).raise_for_status().json()
        assert said["model"] == model
        ids: list[int] = said["nvext"]["completion_token_ids"]
        return ids

    def models(self) -> dict[str, str | None]:
        """Each model's parent, as listed."""
        data = httpx.get(f"{self.url}/v1/models").raise_for_status().json()["data"]
        return {each["id"]: each["parent"] for each in data}

    def change(self, verb: str, process: str = "frontend", **body: str) -> httpx.Response:
        url = f"{self.admin[process]}/v1/{verb}_lora_adapter"
        return httpx.post(url, json=body, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # transformers takes seconds to import, which would delay every test process.
    from tests.unit.engines.native.equality_lab import Reference, answer, ask, core_of
    from tests.unit.engines.native.lora_lab import write_adapter

    folder = tmp_path_factory.mktemp("lora")
    model = tiny_checkpoint(folder / "model", seed=8)
    base = Reference.of_folder(model)
    adapters = {name: write_adapter(folder / name, base, seed) for seed, name in enumerate(("one", "two"), 1)}
    with Bench(folder) as bench:
        arguments = {
            "served_name": MODEL,
            "dtype": "float32",
            "threads": 1,
            "kv_blocks": 256,
            "measure_steps": "false",
        }
        flags = [part for key, value in arguments.items() for part in ("--arg", f"{key}={value}")]
        lora = ("--lora", f"one={adapters['one'].relative_to(bench.folder)}")
        bench.start("worker", str(model), "--name", "worker", *flags, *lora, name="worker")

        async def start() -> tuple[str, dict[str, str]]:
            _, url = await bench.frontend()
            await until_ready(url, START_S)
            views = await bench.until_seen("frontend", "worker")
            return url, {name: f"http://{view.admin}" for name, view in views.items()}

        core = core_of(model, loras={name: str(path) for name, path in adapters.items()})
        expected = {
            name or MODEL: answer(core, ask(name or MODEL, PROMPT, NUM_TOKENS, request={"lora": name})).tokens
            for name in (None, *adapters)
        }
        core.close()
        yield Served(*asyncio.run(start()), adapters, expected)


def test_an_adapter_says_what_the_engine_says_with_it(served: Served) -> None:
    assert len({tuple(tokens) for tokens in served.expected.values()}) == 3, "the adapters change nothing"
    assert served.models() == {MODEL: None, "one": MODEL}
    assert served.complete("two").status_code == 404

    [loaded] = served.change("load", lora_name="two", lora_path=str(served.adapters["two"])).json()
    assert (loaded["model"], loaded["process"], loaded["loras"]) == (MODEL, "worker", ["one", "two"])
    assert served.models() == {MODEL: None, "one": MODEL, "two": MODEL}
    for _ in range(2):  # then from the cache, where none may find another's blocks
        assert {name: served.tokens(name) for name in served.expected} == served.expected

    [unloaded] = served.change("unload", lora_name="one").json()
    assert unloaded["loras"] == ["two"]
    assert served.models() == {MODEL: None, "two": MODEL}
    gone = served.complete("one")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "model_not_found")
    assert served.tokens("two") == served.expected["two"]


@pytest.mark.parametrize(
    ("verb", "process", "body", "status", "words"),
    [
        ("load", "frontend", {"lora_name": "x", "lora_path": "/no/such/folder"}, 400, "/no/such/folder"),
        ("load", "frontend", {"lora_name": MODEL, "lora_path": "/any"}, 400, "belongs to a model"),
        ("load", "frontend", {"lora_name": "x"}, 400, "lora_path"),
        ("unload", "frontend", {"lora_name": "nobody"}, 404, "adapter 'nobody' is not loaded"),
        ("load", "worker", {"lora_name": "x", "lora_path": "/any"}, 501, "use the admin port of a frontend"),
    ],
)
def test_what_is_refused(
    served: Served, verb: str, process: str, body: dict[str, Any], status: int, words: str
) -> None:
    refused = served.change(verb, process, **body)
    assert refused.status_code == status
    assert words in refused.json()["error"]["message"]
    assert served.tokens(MODEL) == served.expected[MODEL]
