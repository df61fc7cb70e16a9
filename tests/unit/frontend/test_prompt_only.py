"""/v1/completions with echo and max_tokens 0: the prompt, its log probabilities, and no output."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.engines.lab import Frontend, Lab, RunningWorker
from tests.unit.frontend.serving import served


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fields", [{}, {"n": 2}, {"ignore_eos": True, "min_tokens": 0, "stop": "water"}], ids=str
)
def test_the_prompt_comes_back_without_output(stream: bool, fields: dict[str, Any]) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        options = {"include_usage": True} if stream else None
        answer = await edge.complete(
            prompt=["the water", "some water"],
            echo=True,
            max_tokens=0,
            stream=stream,
            stream_options=options,
            nvext={"extra_fields": ["completion_token_ids"]},
            **fields,
        )
        assert answer.status == 200
        n = fields.get("n", 1)
        texts = [answer.text(index) for index in range(2 * n)]
        assert texts == ["the water"] * n + ["some water"] * n
        last = answer.chunks[-1] if stream else answer.json
        usage = last["usage"]
        assert usage["completion_tokens"] == 0
        assert usage["total_tokens"] == usage["prompt_tokens"] > 0
        assert last["nvext"]["completion_token_ids"] == []
        bodies = answer.chunks if stream else [answer.json]
        reasons = [choice["finish_reason"] for each in bodies for choice in each["choices"]]
        assert [reason for reason in reasons if reason is not None] == ["length"] * 2 * n

    served(body)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_the_prompt(stream: bool) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        whole = (await edge.complete(echo=True, max_tokens=3, logprobs=2)).json["choices"][0]["logprobs"]
        answer = await edge.complete(echo=True, max_tokens=0, logprobs=2, stream=stream)
        bodies = answer.chunks if stream else [answer.json]
        found = [choice["logprobs"] for each in bodies for choice in each["choices"] if choice["logprobs"]]
        (alone,) = found
        num_prompt = len(whole["tokens"]) - 3
        assert len(alone["tokens"]) == num_prompt > 0
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert alone[name] == whole[name][:num_prompt]
        assert alone["token_logprobs"][0] is None

    served(body)


@pytest.mark.parametrize("fields", [{}, {"echo": False}, {"echo": None}, {"stream": True}], ids=str)
def test_without_echo_nothing_would_be_returned(fields: dict[str, Any]) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.complete(max_tokens=0, **fields)
        assert (answer.status, answer.json["error"]["param"]) == (400, "max_tokens")
        assert "echo" in answer.json["error"]["message"]
        assert (await edge.chat(max_tokens=0)).status == 400
        assert (await edge.complete(max_tokens=0, min_tokens=1, echo=True)).status == 400

    served(body)
