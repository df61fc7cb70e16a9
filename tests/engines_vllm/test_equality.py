"""What kvolt's adapter answers is what vLLM itself answers to the same prompts, and vLLM's own figures are told."""

from __future__ import annotations

from typing import Any

from kept import Kept, VllmHarness

from kvolt.core.delta import FinishReason
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Sampling, StopConditions
from kvolt.testing.engines.harness import engine_run

PROMPTS = [tuple(range(start, start + 3 * start)) for start in range(5, 45, 5)]
SAMPLED = Sampling(temperature=0.8, top_p=0.9, top_k=40, min_p=0.02, repetition_penalty=1.1, seed=7)
GREEDY = Sampling(temperature=0.0)


def asked(number: int, sampling: Sampling) -> Request:
    return Request(
        request_id=RequestId(f"r{number}"),
        model="tiny",
        token_ids=PROMPTS[number],
        stop=StopConditions(max_tokens=24),
        sampling=sampling,
    )


async def of_vllm(llm: Any, request: Request) -> tuple[list[int], str]:
    from vllm.sampling_params import SamplingParams

    given = request.sampling
    params = SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k or 0,
        min_p=given.min_p,
        repetition_penalty=given.repetition_penalty,
        seed=given.seed,
        max_tokens=request.stop.max_tokens,
    )
    prompt = {"prompt_token_ids": list(request.token_ids)}
    outputs = [output async for output in llm.generate(prompt, params, request.request_id)]
    choice = outputs[-1].outputs[0]
    return list(choice.token_ids), str(choice.finish_reason)


async def test_as_vllm_itself(kept: Kept) -> None:
    await kept.make_ready()
    requests = [asked(number, GREEDY if number % 2 else SAMPLED) for number in range(len(PROMPTS))]
    async with engine_run(VllmHarness(kept)) as run:
        answers = [run.submit(request) for request in requests]
        await run.finish(*answers)
    ours = [(answer.tokens[0], answer.finishes[0]) for answer in answers]
    await kept.make_ready()
    assert kept.launched is not None
    llm = kept.launched.llm
    theirs = [await of_vllm(llm, request) for request in requests]
    llm.output_handler.cancel()  # begun by its `generate`: outputs are ours again
    llm.output_handler = None
    assert [(tokens, finish.value) for tokens, finish in ours] == theirs
    assert FinishReason.STOP in {finish for _, finish in ours}, "none of them ended by itself"


async def test_own_metrics_are_exported(kept: Kept) -> None:
    await kept.make_ready()
    async with engine_run(VllmHarness(kept)) as run:
        before = {each.name: each for each in kept.engine().metrics({"worker_id": "w"})}
        await run.answer(asked(1, GREEDY))
        after = {each.name: each for each in kept.engine().metrics({"worker_id": "w"})}

    def total(families: dict[str, Any], name: str, sample: str) -> float:
        return float(sum(each.value for each in families[name].samples if each.name == sample))

    told = ("vllm:generation_tokens", "vllm:generation_tokens_total")
    assert total(after, *told) - total(before, *told) >= 1
    first = ("vllm:time_to_first_token_seconds", "vllm:time_to_first_token_seconds_count")
    assert total(after, *first) - total(before, *first) == 1
    assert {each.labels["worker_id"] for each in after[told[0]].samples} == {"w"}
