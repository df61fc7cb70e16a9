"""EngineCore with a tiny model: what requests may ask of their tokens, and what does not disturb others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.engines.native.equality_lab import (
    Drive,
    Reference,
    Watch,
    answer,
    answers,
    ask,
    assert_at_rest,
    core_of,
    make_prompts,
)

from kvolt.core.delta import FinishReason
from kvolt.core.errors import EngineFailed, InvalidRequest, NotFound, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.load import StepStats, decode_step_log
from kvolt.core.request import MediaSpan, Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native import core as core_module
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.core import EngineCore
from kvolt.engines.native.loading import CoreHooks, build_core
from kvolt.engines.native.sampling import processors
from kvolt.engines.sim.model import EOS
from kvolt.models.checkpoint import open_checkpoint
from kvolt.testing.tiny_models import tiny_checkpoint

PROMPTS = make_prompts(seed=7, vocabulary=900, count=6, longest=60)
PROMPT = PROMPTS["p3"]
DICE: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("core") / "model", "Qwen3ForCausalLM", seed=4)


@pytest.fixture
def core(folder: Path) -> Iterator[EngineCore]:
    core = core_of(folder, max_batch_tokens=64)
    yield core
    core.close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference.of_folder(folder)


# --- Seeds and choices ----------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_text_alone_batched_and_preempted(
    folder: Path, core: EngineCore
) -> None:
    requests = [
        ask(name, prompt, 12, seed=number, **DICE) for number, (name, prompt) in enumerate(PROMPTS.items())
    ]
    single: dict[str, list[int]] = {request.request_id: answer(core, request).tokens for request in requests}
    together = answers(core, *requests)
    tight = core_of(folder, block_size=2, kv_blocks=50, max_batch_tokens=64)
    crowded = answers(tight, *requests, *(ask(f"x{number}", PROMPT, 12, **DICE) for number in range(6)))
    assert tight.scheduler.planner.num_preemptions > 0
    for name, tokens in single.items():
        assert together[name].tokens == tokens
        assert crowded[name].tokens == tokens
    other = answer(core, ask("p3", PROMPT, 12, seed=99, **DICE))
    assert other.tokens != single["p3"]


def test_a_request_without_a_seed_has_one_by_its_id(core: EngineCore) -> None:
    first = answer(core, ask("a", PROMPT, 12, **DICE)).tokens
    assert answer(core, ask("a", PROMPT, 12, **DICE)).tokens == first
    assert answer(core, ask("b", PROMPT, 12, **DICE)).tokens != first


@pytest.mark.parametrize("num_given", [1, 7, 11])
def test_a_resumed_request_goes_on_as_if_it_had_not_stopped(core: EngineCore, num_given: int) -> None:
    sampling = {"seed": 5, "frequency_penalty": 0.7, "repetition_penalty": 1.2, **DICE}
    whole = answer(core, ask("a", PROMPT, 12, **sampling))
    given = tuple(whole.tokens[:num_given])
    rest = answer(core, ask("b", PROMPT, 12, request={"prior_tokens": given}, prompt_logprobs=1, **sampling))
    assert rest.tokens == whole.tokens[num_given:]
    assert rest.usage is not None
    assert rest.usage.completion_tokens == 12
    assert rest.prompt_logprobs is None


def test_choices_are_distinct_and_share_the_prompt(core: EngineCore) -> None:
    drive = Drive(core, [ask("a", PROMPT, 10, num_choices=4, seed=3, logprobs=1, **DICE)])
    drive.finish()
    assert drive.choices.keys() == {("a", index) for index in range(4)}
    found = [drive.choices["a", index] for index in range(4)]
    assert len({tuple(one.tokens) for one in found}) == 4
    for one in found:
        assert (len(one.tokens), one.finish, len(one.logprobs)) == (10, FinishReason.LENGTH, 10)
    shared = (len(PROMPT) - 1) // 16 * 16
    assert [one.usage.cached_tokens for one in found if one.usage] == [0, shared, shared, shared]
    fewer = Drive(core, [ask("a", PROMPT, 10, num_choices=2, seed=3, **DICE)])
    fewer.finish()
    assert [fewer.choices["a", index].tokens for index in range(2)] == [one.tokens for one in found[:2]]


def test_greedy_choices_are_all_the_same(core: EngineCore) -> None:
    drive = Drive(core, [ask("a", PROMPT, 8, num_choices=3)])
    first = drive.finish()["a"].tokens
    assert [one.tokens for one in drive.choices.values()] == [first] * 3


# --- How choices end ------------------------------------------------------------------------------------


def test_a_stop_token_ends_a_choice_and_is_its_reason(core: EngineCore) -> None:
    free = answer(core, ask("a", PROMPT, 12))
    assert (free.finish, free.stop_reason) == (FinishReason.LENGTH, None)
    last = free.tokens[5]
    end = free.tokens.index(last) + 1
    found = answer(core, ask("b", PROMPT, 12, stop={"stop_token_ids": (899, last)}))
    assert found.tokens == free.tokens[:end]
    assert (found.finish, found.stop_reason) == (FinishReason.STOP, last)
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(PROMPT), end)


def test_eos_ends_a_choice_unless_it_is_ignored(core: EngineCore) -> None:
    bias: dict[str, Any] = {"logit_bias": {EOS: 100.0}}
    found = answer(core, ask("a", PROMPT, 6, stop={"ignore_eos": False}, **bias))
    assert (found.tokens, found.finish, found.stop_reason) == ([EOS], FinishReason.STOP, None)
    ignored = answer(core, ask("b", PROMPT, 6, **bias))
    assert (ignored.tokens, ignored.finish) == ([EOS] * 6, FinishReason.LENGTH)


def test_min_tokens_keeps_off_what_would_end_it(core: EngineCore) -> None:
    free = answer(core, ask("a", PROMPT, 8))
    ends = {"ignore_eos": False, "min_tokens": 4, "stop_token_ids": (free.tokens[0],)}
    found = answer(core, ask("b", PROMPT, 8, stop=ends, logit_bias={EOS: 100.0, free.tokens[0]: 50.0}))
    assert len(found.tokens) == 5
    assert not {EOS, free.tokens[0]} & set(found.tokens[:4])
    assert (found.tokens[4], found.finish, found.stop_reason) == (EOS, FinishReason.STOP, None)


# --- What may come --------------------------------------------------------------------------------------


def test_a_bias_moves_the_choice_to_the_next_best(core: EngineCore, reference: Reference) -> None:
    best = reference.logits(PROMPT)[-1].topk(3).indices.tolist()
    assert answer(core, ask("a", PROMPT, 1, logit_bias={best[0]: -100.0})).tokens == [best[1]]
    assert answer(core, ask("b", PROMPT, 1, allowed_token_ids=(best[2], 0))).tokens == [best[2]]
    assert answer(core, ask("c", PROMPT, 3, logit_bias={77: 100.0})).tokens == [77] * 3


def test_reported_figures_are_those_before_any_bias(core: EngineCore, reference: Reference) -> None:
    found = answer(core, ask("a", PROMPT, 1, logit_bias={77: 100.0}, logprobs=0, temperature=0.5))
    expected = reference.logits(PROMPT)[-1].log_softmax(dim=-1)
    assert found.logprobs[0].logprob == pytest.approx(float(expected[77]), abs=1e-3)


def test_a_custom_processor_sees_prompt_and_output(core: EngineCore) -> None:
    once = {"extra": {"logits_processors": [{"name": "ban_repeated_ngrams", "args": {"n": 1}}]}}
    found = answers(core, ask("a", PROMPT, 30, request=once), ask("b", PROMPT, 30))
    tokens = found["a"].tokens
    assert len({*tokens, *PROMPT}) == len(tokens) + len(set(PROMPT))
    assert found["b"].tokens == answer(core, ask("b", PROMPT, 30)).tokens


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"request": {"lora": "unknown"}}, NotFound),
        ({"request": {"media": (MediaSpan(0, 1, bytes(16)),)}}, Unsupported),
        ({"request": {"extra": {"logits_processors": ["unknown"]}}}, InvalidRequest),
        ({"logit_bias": {10**6: 1.0}}, InvalidRequest),
        ({"min_p": 1.5}, InvalidRequest),
        ({"allowed_token_ids": ()}, InvalidRequest),
        ({"max_tokens": 1000}, InvalidRequest),
        ({"num_choices": 0}, InvalidRequest),
    ],
    ids=lambda value: next(iter(value.get("request", value))) if isinstance(value, dict) else "",
)
def test_what_cannot_run_is_refused_at_once(
    core: EngineCore, asked: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        core.submit(ask("a", PROMPT, **asked))
    assert_at_rest(core)


@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_row_without_a_token_fails_its_request_alone(core: EngineCore, num_choices: int) -> None:
    asked: dict[str, Any] = {"stop": {"ignore_eos": False, "min_tokens": 2}, "allowed_token_ids": (EOS,)}
    drive = Drive(core, [ask("a", PROMPT, 8), ask("b", PROMPT, 4, num_choices=num_choices, **asked)])
    found = drive.finish()
    assert drive.failed.keys() == {"b"}
    assert "no token is allowed" in drive.failed["b"].message
    assert found["a"].tokens == answer(core, ask("a", PROMPT, 8)).tokens


@pytest.mark.parametrize("num_choices", [1, 2])
def test_a_processor_that_cannot_be_made_again_fails_its_request_alone(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, num_choices: int
) -> None:
    fickle = broken_second_time(lambda: processors.BanRepeatedNgrams(1))
    monkeypatch.setitem(processors._BUILT_IN, "fickle", fickle)  # type: ignore[arg-type]
    asked = ask("b", PROMPT, 8, num_choices=num_choices, request={"extra": {"logits_processors": ["fickle"]}})
    drive = Drive(core, [ask("a", PROMPT, 8), asked])
    found = drive.finish()
    assert drive.failed.keys() == {"b"}
    assert drive.failed["b"].code == EngineFailed.code
    assert "on fire" in drive.failed["b"].message
    assert found["a"].tokens == answer(core, ask("a", PROMPT, 8)).tokens


# --- Steps ----------------------------------------------------------------------------------------------


def test_only_what_has_not_started_can_be_withdrawn(core: EngineCore) -> None:
    drive = Drive(core, [ask("a", PROMPT, 6)])
    drive.step()
    drive.submit(ask("b", PROMPT, 6))
    assert not core.withdraw(RequestId("a"))
    assert core.withdraw(RequestId("b"))
    assert drive.finish().keys() == {"a"}


def broken_second_time(call: Callable[..., object]) -> Callable[..., object]:
    """The first of a step is done when the second one breaks."""
    num_calls = 0

    def counted(*arguments: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise RuntimeError("the device is on fire")
        return call(*arguments)

    return counted


@pytest.mark.parametrize("broken", ["forward", "sample", "prompt_logprobs"])
@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_step_that_breaks_changes_nothing(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, broken: str, num_steps: int
) -> None:
    requests = [
        ask(name, prompt, 8, prompt_logprobs=1, seed=2, num_choices=2, **DICE)
        for name, prompt in PROMPTS.items()
    ]
    expected = Drive(core, requests)
    expected.finish()
    core.capabilities.clear_kv()
    drive = Drive(core, requests)
    for _ in range(num_steps):
        drive.step()
    owner = core.runner.model if broken == "forward" else core_module
    with monkeypatch.context() as patch:
        patch.setattr(owner, broken, broken_second_time(getattr(owner, broken)))
        with pytest.raises(RuntimeError, match="on fire"):
            for _ in range(2):
                drive.step()
    core.scheduler.check_integrity()
    drive.finish()
    assert drive.choices.keys() == expected.choices.keys()
    for key, one in expected.choices.items():
        assert drive.choices[key].tokens == one.tokens
        assert drive.choices[key].prompt_logprobs == one.prompt_logprobs
        if key[1] == 0:
            assert len(one.prompt_logprobs or ()) == len(PROMPTS[key[0]])


def test_logits_that_are_not_finite_fail_their_requests(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All choices of one in the same step, and it fails once: Drive sees to it."""
    drive = Drive(core, [ask("a", PROMPT[:9], 9), ask("b", PROMPT[:9], 9, num_choices=3, temperature=1.0)])
    while core.scheduler.num_running < 4:
        drive.step()
    with monkeypatch.context() as patch:
        nothing = torch.full((4, 900), float("nan"))
        patch.setattr(core.runner.model, "logits", lambda hidden: nothing[: hidden.shape[0]])
        drive.step()
    assert drive.failed.keys() == {"a", "b"}
    assert "not finite" in drive.failed["b"].message
    assert_at_rest(core)


def test_plain_tokens_come_with_the_same_ids_while_the_batch_stays_the_same(core: EngineCore) -> None:
    drive = Drive(core, [ask(name, prompt[:8], 8) for name, prompt in PROMPTS.items()])
    first = drive.step()
    assert first is not None
    assert [delta.cached_tokens for _, delta in first.deltas] == [0] * len(PROMPTS)
    outputs = [drive.step() for _ in range(6)]
    assert outputs[0] is not None
    assert outputs[0].plain_ids == tuple(PROMPTS)
    for output in outputs:
        assert output is not None
        assert output.plain_ids is outputs[0].plain_ids
        assert output.load is not None
        assert (output.load.running, output.load.waiting) == (len(PROMPTS), 0)
    drive.finish()


def test_steps_are_logged(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    for _ in range(2):
        core = core_of(folder, step_log=str(log))
        drive = Drive(core, [ask("a", PROMPT, 5)])
        drive.finish()
        core.close()
    header, steps = decode_step_log(log.read_bytes().splitlines())
    assert (header.engine, header.device, header.dtype) == ("native", "cpu", "float32")
    assert [step.prefill_tokens for step in steps] == [len(PROMPT), 0, 0, 0, 0] * 2
    assert [step.context_tokens for step in steps[1:5]] == [len(PROMPT) + at for at in range(1, 5)]
    assert all(step.time_s > 0 for step in steps)


def test_what_lies_between_steps_is_in_the_time_of_the_next(folder: Path) -> None:
    watch = Watch()
    arguments = NativeArguments(dtype="float32", kv_blocks=64, context_length=256)
    spec = EngineSpec(model=str(folder), role=Role.AGGREGATED)
    core = build_core(spec, "m", open_checkpoint(folder, 256), arguments, CoreHooks(clock=watch))
    steps: list[StepStats] = []
    core.on_step = steps.append
    for name in ("a", "b"):
        core.submit(ask(name, PROMPT, 3))
        while core.has_work:
            core.step()
            watch.time += 0.25  # time of the output, on a clock on which a step takes no time
        watch.time += 60.0  # nothing to do: that is no step's time
    assert [step.time_s for step in steps] == [0.0, 0.25, 0.25] * 2

    core.submit(ask("gone", PROMPT, 3))
    core.step()
    core.abort(RequestId("gone"))
    core.step()
    watch.time += 60.0
    core.submit(ask("c", PROMPT, 1))
    core.step()
    assert steps[-1].time_s == 0.0
    core.close()
