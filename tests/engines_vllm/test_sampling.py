"""Each field of a request that is in vLLM's words does there what it should, and what its own clients would get."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from forced_token import ARGUMENT
from kept import SMALL, Kept, VllmHarness
from msgspec.structs import replace
from own_answers import own_answers
from vectors import as_vectors

from kvolt.core.delta import FinishReason
from kvolt.core.errors import ConfigError, InvalidRequest, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.request import Grammar, GrammarKind, Request, Role, RoutingHints, Sampling, StopConditions
from kvolt.engines.contract import EngineSpec
from kvolt.engines.vllm.arguments import VllmArguments
from kvolt.engines.vllm.launch import launch
from kvolt.runtime.clock import SystemClock
from kvolt.testing.engines.harness import Run, block_hashes, engine_run

PROMPT = tuple(range(20, 60))
MAX_SEQS = 2
BLOCK = SMALL["block_size"]


@pytest.fixture(scope="module")
async def choosy(tiny: Path) -> AsyncIterator[Kept]:
    engine_args = SMALL | {
        "logits_processors": ["forced_token:ForcedToken"],
        "scheduling_policy": "priority",
        "enable_prompt_embeds": True,
        "max_num_seqs": MAX_SEQS,
    }
    kept = Kept(Role.AGGREGATED, VllmArguments(served_name="tiny", engine_args=engine_args), tiny)
    await kept.make_ready()
    yield kept
    await kept.close()


@pytest.fixture
async def run(choosy: Kept) -> AsyncIterator[Run]:
    await choosy.make_ready()
    async with engine_run(VllmHarness(choosy)) as run:
        yield run


def asked(name: str, sampling: dict[str, Any], stop: dict[str, Any] | None = None, **fields: Any) -> Request:
    given: dict[str, Any] = {
        "token_ids": PROMPT,
        "stop": StopConditions(**{"max_tokens": 12, "ignore_eos": True} | (stop or {})),
        "sampling": Sampling(**sampling),
    }
    return Request(request_id=RequestId(name), model="tiny", **given | fields)


GREEDY = {"temperature": 0.0}
DRAWN = {"temperature": 1.0, "seed": 5}
NARROW = DRAWN | {"allowed_token_ids": list(range(11, 21))}
"""Of a few tokens, so that they come again."""
PLAIN = ("greedy", "drawn", "narrow")
SAID: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": (GREEDY, {}),
    "drawn": (DRAWN, {}),
    "warm": ({"temperature": 0.4, "seed": 5}, {}),
    "top_p": (DRAWN | {"top_p": 0.3}, {}),
    "top_k": (DRAWN | {"top_k": 3}, {}),
    "min_p": (DRAWN | {"min_p": 0.5}, {}),
    "narrow": (NARROW, {"max_tokens": 30}),
    "presence_penalty": (NARROW | {"presence_penalty": 2.0}, {"max_tokens": 30}),
    "frequency_penalty": (NARROW | {"frequency_penalty": 2.0}, {"max_tokens": 30}),
    "repetition_penalty": (DRAWN | {"repetition_penalty": 2.0}, {}),
    "logit_bias": (GREEDY | {"logit_bias": {7: 100.0, 8: 99.0}}, {}),
    "allowed_token_ids": (GREEDY | {"allowed_token_ids": [11, 12, 13]}, {}),
    "max_tokens": (GREEDY, {"max_tokens": 3}),
    "eos": (DRAWN, {"ignore_eos": False, "max_tokens": 60}),
    "min_tokens": (DRAWN, {"ignore_eos": False, "max_tokens": 60, "min_tokens": 40}),
}
"""As vLLM calls them."""


def in_our_words(name: str) -> Request:
    sampling, stop = SAID[name]
    if "allowed_token_ids" in sampling:
        sampling = sampling | {"allowed_token_ids": tuple(sampling["allowed_token_ids"])}
    return asked(name, sampling, stop)


async def test_every_field_does_what_it_does_in_vllm(choosy: Kept) -> None:
    await choosy.make_ready()
    async with engine_run(VllmHarness(choosy)) as run:
        answers = [run.submit(in_our_words(name)) for name in SAID]
        await run.finish(*answers)
    ours = {name: answer.tokens[0] for name, answer in zip(SAID, answers, strict=True)}
    async with own_answers(choosy) as own:
        theirs = {
            name: await own.tokens(PROMPT, **{"max_tokens": 12, "ignore_eos": True} | sampling | stop)
            for name, (sampling, stop) in SAID.items()
        }
    assert ours == theirs
    plain = {tuple(ours[name]) for name in PLAIN}
    alike = [name for name in SAID if name not in PLAIN and tuple(ours[name]) in plain]
    assert not alike, "a field that changes nothing shows nothing"
    assert set(ours["logit_bias"]) <= {7, 8}
    assert set(ours["allowed_token_ids"]) <= {11, 12, 13}
    assert len(ours["eos"]) < 40 <= len(ours["min_tokens"])


async def test_stop_tokens(run: Run) -> None:
    plain = (await run.answer(asked("plain", GREEDY))).tokens[0]
    index = next(index for index in range(3, 12) if plain[index] not in plain[:index])
    stop = {"stop_token_ids": (plain[index],)}
    stopped = await run.answer(asked("stopped", GREEDY, stop))
    assert stopped.tokens[0] == plain[: index + 1]
    assert (stopped.finishes[0], stopped.stop_reasons[0]) == (FinishReason.STOP, plain[index])
    longer = await run.answer(asked("longer", GREEDY, stop | {"min_tokens": index + 2}))
    assert len(longer.tokens[0]) > index + 2
    assert plain[index] not in longer.tokens[0][: index + 2]


async def test_salts_keep_caches_apart(run: Run) -> None:
    requests = [asked(f"salt-{salt}", GREEDY, salt=salt) for salt in (None, "one", "other")]
    names = [block_hashes(request, BLOCK)[:1] for request in requests]
    for number, request in enumerate(requests):
        answer = await run.answer(request)
        assert answer.cached == 0, "another tenant's blocks were found"
        await run.settle()
        assert [run.replica.num_leading(each) for each in names] == [int(n <= number) for n in range(3)]
    for request in requests:
        again = await run.answer(replace(request, request_id=RequestId(f"{request.request_id}-again")))
        assert again.cached == BLOCK


async def test_what_vllm_refuses_is_the_callers_fault(run: Run) -> None:
    for sampling in ({"temperature": -1.0}, {"top_p": 0.0}, {"presence_penalty": 9.0}, {"logprobs": 50}):
        with pytest.raises(InvalidRequest, match="vLLM refuses the request"):
            run.engine.submit(asked("refused", sampling))
    with pytest.raises(InvalidRequest, match="vLLM refuses the request"):
        run.engine.submit(asked("refused", GREEDY, grammar=Grammar(GrammarKind.REGEX, "(")))
    await run.assert_empty()


# --- logits processors


@pytest.mark.parametrize(
    "extra",
    [
        {"vllm_xargs": {ARGUMENT: 77}},
        {"logits_processors": [{"name": "ForcedToken", "args": {ARGUMENT: 77}}]},
        {"logits_processors": [{"name": "forced_token:ForcedToken", "args": {ARGUMENT: 77}}]},
    ],
    ids=["arguments", "name", "full-name"],
)
async def test_a_logits_processor_is_heard(run: Run, extra: dict[str, Any]) -> None:
    alone = await run.answer(asked("alone", GREEDY))
    forced = run.submit(asked("forced", GREEDY, extra=extra))
    beside = run.submit(asked("beside", GREEDY))
    await run.finish(forced, beside)
    assert forced.tokens[0] == [77] * 12
    assert beside.tokens == alone.tokens, "others go on as they were"


async def test_a_logits_processor_that_is_not_there_is_refused(run: Run) -> None:
    for extra, words in (
        ({"logits_processors": [{"name": "Unknown", "args": {"a": 1}}]}, "ForcedToken"),
        ({"logits_processors": ["ForcedToken"]}, "needs args"),
        ({"vllm_xargs": {ARGUMENT: "many"}}, "token's number"),
        ({"vllm_xargs": {"kv_transfer_params": {}}}, "is reserved"),
    ):
        with pytest.raises(InvalidRequest, match=words):
            run.engine.submit(asked("refused", GREEDY, extra=extra))
    with pytest.raises(Unsupported):
        run.engine.submit(asked("refused", GREEDY, extra={"sglang_args": {}}))
    await run.assert_empty()


# --- prompts as vectors


async def test_a_prompt_may_come_as_vectors(run: Run, tiny: Path) -> None:
    told = await run.answer(asked("tokens", DRAWN))
    await run.settle()
    blocks = run.replica.blocks
    nothing = (0,) * len(PROMPT)
    vectors = {"prompt_embeds": as_vectors(tiny, PROMPT)}
    first = await run.answer(asked("vectors", DRAWN, token_ids=nothing, extra=vectors))
    assert (first.tokens, first.cached) == (told.tokens, 0)
    again = await run.answer(asked("again", DRAWN, token_ids=nothing, extra=vectors))
    assert (again.tokens, again.cached) == (told.tokens, BLOCK)
    others = {"prompt_embeds": as_vectors(tiny, PROMPT[::-1])}
    other = await run.answer(asked("others", DRAWN, token_ids=nothing, extra=others))
    assert other.tokens != told.tokens
    assert other.cached == 0, "they are told apart by what they are"
    said = told.tokens[0][:5]
    rest = await run.answer(asked("rest", DRAWN, token_ids=nothing, extra=vectors, prior_tokens=tuple(said)))
    assert rest.tokens[0] == told.tokens[0][5:]
    await run.settle()
    assert run.replica.blocks == blocks, "what has no name in our words is not told"


async def test_vectors_that_do_not_fit_are_refused(run: Run, tiny: Path) -> None:
    import torch

    written = io.BytesIO()
    torch.save(torch.zeros(len(PROMPT), 7), written)
    narrow = base64.b64encode(written.getvalue()).decode()
    for given, words in (
        (as_vectors(tiny, PROMPT[1:]), "39 rows for 40"),
        (narrow, "hidden_size"),
        ("AAAA", "deserialized"),
        ("no base64", "refuses"),
    ):
        extra = {"prompt_embeds": given}
        answer = run.submit(asked(f"refused by {words}", GREEDY, extra=extra), may_fail=True)
        await run.until(lambda answer=answer: answer.done)
        assert answer.error is not None
        assert answer.error.code == "invalid_request"
        assert words in answer.error.message
    with pytest.raises(InvalidRequest, match="base64"):
        run.engine.submit(asked("refused", GREEDY, extra={"prompt_embeds": 7}))
    with pytest.raises(Unsupported, match="logprobs"):
        given = {"prompt_embeds": as_vectors(tiny, PROMPT)}
        run.engine.submit(asked("refused", {"prompt_logprobs": 1}, extra=given))
    await run.assert_empty()


# --- priorities, sleep


async def test_who_is_more_urgent_goes_first(run: Run) -> None:
    long = {"max_tokens": 40}
    busy = [run.submit(asked(f"busy-{number}", GREEDY, long)) for number in range(MAX_SEQS)]
    await run.until(lambda: all(each.tokens for each in busy))
    waiting = {
        priority: run.submit(asked(f"p{priority}", GREEDY, long, routing=RoutingHints(priority=priority)))
        for priority in (0, -1, 3, 7)
    }
    begun: list[int] = []

    def all_begun() -> bool:
        begun.extend(each for each in sorted(waiting) if each not in begun and waiting[each].tokens)
        return len(begun) == len(waiting)

    await run.until(all_begun)
    assert sorted(begun[:2]) == [3, 7]
    assert sorted(begun[2:]) == [-1, 0]
    await run.finish(*busy, *waiting.values())


async def test_a_cpu_does_not_sleep(run: Run) -> None:
    engine: Any = run.engine
    assert "Sleep" not in run.info.features
    before = await run.answer(asked("before", GREEDY))
    with pytest.raises(Unsupported, match="enable_sleep_mode"):
        await engine.sleep(1)
    with pytest.raises(Unsupported, match="enable_sleep_mode"):
        await engine.wake()
    assert (await run.answer(asked("after", GREEDY))).tokens == before.tokens


def test_a_cpu_is_not_started_to_sleep(tiny: Path, tmp_path: Path) -> None:
    """vLLM says so before anything is loaded."""
    arguments = VllmArguments(engine_args=SMALL | {"enable_sleep_mode": True})
    with pytest.raises(ConfigError, match="Sleep mode is not supported on current platform"):
        launch(EngineSpec(model=str(tiny), role=Role.AGGREGATED), arguments, tmp_path, SystemClock())
