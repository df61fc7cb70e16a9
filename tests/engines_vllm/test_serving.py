"""kvolt in front of real vLLM workers, as a user starts it: who gets what, what only vLLM takes, one that is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
from forced_token import ARGUMENT
from tests.served import (
    Served,
    check_a_returning_prefix_goes_to_its_holder,
    check_streams_of_a_killed_worker_go_on,
    text_of,
)
from vectors import as_vectors

BLOCK = 32
ENGINE_ARGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 1024,
    "block_size": BLOCK,
    "num_gpu_blocks_override": 256,
    "max_num_seqs": 16,
}


@pytest.fixture(scope="module")
def pair(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    takes_more = {"enable_prompt_embeds": True, "logits_processors": ["forced_token:ForcedToken"]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where its processor is
        folder = tmp_path_factory.mktemp("pair")
        served = Served(folder, tiny, "vllm", ENGINE_ARGS | takes_more, "--workers", "2")
    try:
        served.ready(2)
        yield served
    finally:
        served.close()


def test_a_returning_prefix_goes_to_its_holder_and_is_found(pair: Served) -> None:
    check_a_returning_prefix_goes_to_its_holder(pair, BLOCK)


def tokens_of(answer: dict[str, Any]) -> list[int]:
    return list(answer["nvext"]["completion_token_ids"])


def refused(pair: Served, prompt: str | None, **fields: Any) -> dict[str, Any]:
    with pytest.raises(HTTPError) as caught:
        pair.ask(prompt, 4, **fields)
    assert caught.value.code == 400
    error: dict[str, Any] = json.load(caught.value)["error"]
    return error


def test_a_prompt_may_come_as_vectors(pair: Served, tiny: Path) -> None:
    prompts = [[*range(20, 60)], [*range(300, 370)]]
    vectors = [as_vectors(tiny, prompt) for prompt in prompts]
    told = [pair.ask(prompt, 12) for prompt in prompts]
    answer = pair.ask("", 12, prompt_embeds=vectors[0])
    assert text_of(answer) == text_of(told[0])
    assert answer["usage"]["prompt_tokens"] == 40
    several = pair.ask(None, 12, prompt_embeds=vectors)
    assert [each["text"] for each in several["choices"]] == [text_of(each) for each in told]
    narrow = refused(pair, None, prompt_embeds=as_vectors(tiny, [1, 2])[:-40])
    assert narrow["param"] == "prompt_embeds"


def test_extra_arguments_are_vllms(pair: Served) -> None:
    forced = pair.ask([*range(20, 60)], 6, vllm_xargs={ARGUMENT: 77})
    assert tokens_of(forced) == [77] * 6
    assert "is reserved" in refused(pair, "hi", vllm_xargs={"kv_transfer_params": "x"})["message"]


def test_streams_of_a_killed_worker_continue(pair: Served) -> None:
    check_streams_of_a_killed_worker_go_on(pair, 900)
