"""What a real SGLang answers through us is what it answers to itself, and what it caches is what our index says."""

from __future__ import annotations

import asyncio
import json

import pytest
from kept import SglangHarness
from msgspec.structs import replace

from kvolt.core.delta import FinishReason
from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.request import Grammar, GrammarKind, Sampling
from kvolt.engines.contract import check_sampling_fields
from kvolt.testing.engines.harness import Run, block_hashes, engine_run

GREEDY = Sampling(temperature=0.0)


async def test_a_greedy_answer_is_the_model_s_own(harness: SglangHarness) -> None:
    """As transformers computes it from the same folder, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(harness.spec.model, torch_dtype=torch.float32)
    async with engine_run(harness) as run:
        for length in (5, 40, 100):
            request = replace(run.request(f"r{length}", prompt=length, tokens=12), sampling=GREEDY)
            answer = await run.answer(request)
            given = torch.tensor([request.token_ids])
            known = model.generate(given, max_new_tokens=12, do_sample=False, eos_token_id=None)
            assert answer.tokens[0] == known[0, length:].tolist()


async def test_cached_tokens_are_as_the_index_predicts(harness: SglangHarness) -> None:
    """Blocks of prompts and of answers, named by our hashes."""
    async with engine_run(harness) as run:
        size = run.info.block_size
        first = replace(run.request("first", prompt=50, tokens=30), sampling=GREEDY)
        output = (await run.answer(first)).tokens[0]
        told = block_hashes(first, size, output)
        assert run.replica.num_leading(told) == (50 + 30 - 1) // size
        longer = replace(first, request_id=RequestId("on"), token_ids=(*first.token_ids, *output))
        predicted = run.replica.num_leading(block_hashes(longer, size)) * size
        answer = await run.answer(longer)
        assert answer.cached == predicted == 64


async def test_salts_and_priorities_are_followed(harness: SglangHarness) -> None:
    async with engine_run(harness) as run:
        plain = replace(run.request("plain", prompt=40), sampling=GREEDY)
        salted = replace(plain, request_id=RequestId("salted"), salt="tenant")
        await run.answer(plain)
        assert (await run.answer(salted)).cached == 0
        assert run.replica.num_leading(block_hashes(salted, run.info.block_size)) == 2


@pytest.mark.parametrize(
    ("kind", "text", "is_right"),
    [
        (GrammarKind.REGEX, "[0-9]{3}", lambda text: len(text) == 3 and text.isdigit()),
        (GrammarKind.CHOICE, json.dumps(["yes", "no."]), lambda text: text in ("yes", "no.")),
        (
            GrammarKind.JSON_SCHEMA,
            json.dumps({"enum": ["red", "blue"]}),
            lambda text: "e" in json.loads(text),
        ),
        (GrammarKind.EBNF, 'root ::= "yes" | "no"', lambda text: text in ("yes", "no")),
    ],
    ids=lambda value: str(value) if isinstance(value, GrammarKind) else "",
)
async def test_grammars(harness: SglangHarness, kind: GrammarKind, text: str, is_right: object) -> None:
    from tokenizers import Tokenizer

    async with engine_run(harness) as run:
        request = run.request("r", tokens=40)
        asked = replace(
            request,
            grammar=Grammar(kind, text),
            sampling=GREEDY,
            stop=replace(request.stop, ignore_eos=False),
        )
        answer = await run.answer(asked)
        assert (answer.finishes[0], answer.stop_reasons[0]) == (FinishReason.STOP, None)
        ends = run.engine.card.eos_token_ids
        said = [token for token in answer.tokens[0] if token not in ends]
        words = Tokenizer.from_buffer(run.engine.card.tokenizer_json).decode(said)
        assert callable(is_right)
        assert is_right(words), words


async def test_a_bad_grammar_is_the_caller_s_fault(harness: SglangHarness) -> None:
    async with engine_run(harness) as run:
        asked = replace(run.request("r"), grammar=Grammar(GrammarKind.REGEX, "[0-9"), sampling=GREEDY)
        answer = run.submit(asked, may_fail=True)
        await run.finish(answer)
        assert answer.error is not None
        assert answer.error.code == "invalid_request"
        await run.assert_empty()


async def test_logit_bias_and_penalties(harness: SglangHarness) -> None:
    async with engine_run(harness) as run:
        request = replace(run.request("plain", tokens=6), sampling=GREEDY)
        forced = replace(
            request, request_id=RequestId("bias"), sampling=replace(GREEDY, logit_bias={7: 100.0})
        )
        assert (await run.answer(forced)).tokens[0] == [7] * 6
        sampling = replace(GREEDY, logit_bias={7: 20.0}, presence_penalty=2.0, frequency_penalty=2.0)
        stop = replace(request.stop, max_tokens=24)
        tamed = replace(request, request_id=RequestId("tamed"), sampling=sampling, stop=stop)
        assert len(set((await run.answer(tamed)).tokens[0])) > 1


async def test_what_it_cannot_do_is_refused(harness: SglangHarness) -> None:
    async with engine_run(harness) as run:
        request = run.request("r")
        sampling = request.sampling
        for refused in (
            replace(request, sampling=replace(sampling, min_p=0.1)),
            replace(request, sampling=replace(sampling, presence_penalty=1.0), prior_tokens=(5,)),
            replace(request, grammar=Grammar(GrammarKind.REGEX, "a"), prior_tokens=(5,)),
        ):
            with pytest.raises(Unsupported):
                run.engine.submit(refused)
        with pytest.raises(Unsupported):  # as the worker does before the engine gets it
            allowed = replace(sampling, allowed_token_ids=(3, 4))
            check_sampling_fields(allowed, run.engine.sampling_fields, "sglang")
        with pytest.raises(InvalidRequest):
            run.engine.submit(replace(request, lora="nobody"))
        await run.assert_empty()


async def test_metrics_are_there(harness: SglangHarness) -> None:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.multiprocess import MultiProcessCollector

    async with engine_run(harness) as run:
        await run.answer(run.request("r"))
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=run.engine._launched.facts.metrics_folder)  # type: ignore[attr-defined]
        text = await _until_there(registry, generate_latest)
        assert "sglang:num_running_reqs" in text
        assert "sglang:token_usage" in text


async def _until_there(registry: object, generate: object) -> str:
    assert callable(generate)
    for _ in range(50):
        text: str = generate(registry).decode()
        if "sglang:num_running_reqs" in text:
            return text
        await asyncio.sleep(0.1)
    return text


async def load_is_told(run: Run) -> None:
    answers = [run.submit(run.request(f"r{index}", tokens=30)) for index in range(4)]
    await run.until(lambda: run.load.running == 4)
    assert run.load.kv_used_blocks
    await run.finish(*answers)


async def test_load(harness: SglangHarness) -> None:
    async with engine_run(harness) as run:
        await load_is_told(run)
        await run.assert_empty()
