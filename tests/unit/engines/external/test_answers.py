"""Answers: whatever an engine says and in whatever order, each choice ends once, and all of it is told in our words."""

from __future__ import annotations

from typing import Any

import pytest

from kvolt.core.delta import Delta, FinishReason, StepOutput, TokenLogprobs, Usage
from kvolt.core.errors import EngineFailed, InvalidRequest
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.kv_events import Cleared
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Handoff, Request, Sampling, StopConditions
from kvolt.engines.external.answers import Answers, Choice, ChoiceOutput

EOS, OTHER_EOS = 2, 5
LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


def asked(
    name: str = "r", *, prompt: int = 10, choices: int = 1, logprobs: int | None = None, **more: Any
) -> Request:
    stop = StopConditions(max_tokens=20, ignore_eos=more.pop("ignore_eos", False))
    return Request(
        request_id=RequestId(name),
        model="m",
        token_ids=tuple(range(100, 100 + prompt)),
        stop=stop,
        sampling=Sampling(num_choices=choices, logprobs=logprobs),
        **more,
    )


def answers_of(*requests: Request) -> tuple[Answers, list[Choice]]:
    answers = Answers(eos_token_ids={EOS, OTHER_EOS})
    return answers, [choice for request in requests for choice in answers.open(request)]


def step(answers: Answers) -> StepOutput:
    found = answers.take_step()
    assert found is not None
    return found


def only(answers: Answers) -> Delta:
    """The one delta of a step with nothing else."""
    [(_, delta)] = (found := step(answers)).deltas
    assert found == StepOutput(deltas=found.deltas)
    return delta


def begun(*requests: Request) -> tuple[Answers, list[Choice]]:
    """Their first tokens are told."""
    answers, choices = answers_of(*requests)
    for choice in choices:
        answers.add_output(choice, ChoiceOutput((1,), cached_tokens=0))
    step(answers)
    return answers, choices


# --- ends and usage


def test_one_answer_from_its_first_token_to_its_end() -> None:
    answers, [choice] = answers_of(asked())
    assert not answers.has_started(RequestId("r"))
    answers.add_output(choice, ChoiceOutput((11,), cached_tokens=4))
    assert answers.has_started(RequestId("r"))
    assert only(answers) == Delta((11,), cached_tokens=4)
    answers.add_output(choice, ChoiceOutput((12,)))
    assert step(answers) == StepOutput(plain_ids=(RequestId("r"),), plain_tokens=(12,))
    answers.add_output(choice, ChoiceOutput((13,), LENGTH))
    assert only(answers) == Delta((13,), finish=LENGTH, usage=Usage(10, 3, 4))
    assert (len(answers), answers.num_choices, answers.take_step()) == (0, 0, None)
    assert answers.find(choice.engine_id) is None
    assert RequestId("r") not in answers


def test_an_end_without_a_token() -> None:
    answers, [choice] = begun(asked())
    answers.add_output(choice, ChoiceOutput((), STOP))
    assert only(answers) == Delta(finish=STOP, usage=Usage(10, 1, 0))


def test_several_tokens_at_once() -> None:
    answers, [choice] = begun(asked())
    answers.add_output(choice, ChoiceOutput((2, 3, 4)))
    assert only(answers) == Delta((2, 3, 4))
    answers.add_output(choice, ChoiceOutput((5, 6), LENGTH))
    assert only(answers).usage == Usage(10, 6, 0)


def test_each_choice_ends_by_itself() -> None:
    answers, choices = answers_of(asked(choices=3))
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert len({choice.engine_id for choice in choices}) == 3
    for choice in choices:
        answers.add_output(choice, ChoiceOutput((7,), cached_tokens=0))
    assert [(delta.index, delta.cached_tokens) for _, delta in step(answers).deltas] == [
        (0, 0),
        (1, None),
        (2, None),
    ]
    for at, choice in enumerate((choices[1], choices[0], choices[2])):
        assert (RequestId("r") in answers, answers.num_choices) == (True, 3 - at)
        answers.add_output(choice, ChoiceOutput((8,), LENGTH))
        assert only(answers) == Delta((8,), choice.index, LENGTH, usage=Usage(10, 2, 0))
        assert answers.find(choice.engine_id) is None
    assert (len(answers), answers.num_choices) == (0, 0)


def test_logprobs_go_with_their_tokens() -> None:
    answers, [choice] = answers_of(asked(logprobs=1, prompt=2))
    told = TokenLogprobs(11, -0.5, ((11, -0.5),))
    answers.add_output(
        choice, ChoiceOutput((11,), logprobs=(told,), prompt_logprobs=(None, told), cached_tokens=0)
    )
    assert only(answers) == Delta((11,), logprobs=(told,), prompt_logprobs=(None, told), cached_tokens=0)


@pytest.mark.parametrize(
    ("ignore_eos", "named", "told"),
    [(False, EOS, None), (False, OTHER_EOS, None), (False, 9, 9), (True, EOS, EOS), (False, None, None)],
)
def test_eos_among_the_stop_tokens_needs_no_reason(
    ignore_eos: bool, named: int | None, told: int | None
) -> None:
    answers, [choice] = begun(asked(ignore_eos=ignore_eos))
    answers.add_output(choice, ChoiceOutput((named or EOS,), STOP, stop_reason=named))
    assert only(answers).stop_reason == told


# --- plain tokens


def test_while_the_batch_stays_the_same_it_is_the_same_object() -> None:
    answers, choices = begun(asked("a"), asked("b"))
    batches = []
    for token in (1, 2, 3):
        for choice in choices:
            answers.add_output(choice, ChoiceOutput((token,)))
        found = step(answers)
        assert (found.plain_ids, found.plain_tokens) == (("a", "b"), (token, token))
        batches.append(found.plain_ids)
    assert batches[0] is batches[1] is batches[2]
    answers.add_output(choices[1], ChoiceOutput((4,)))
    assert step(answers).plain_ids == ("b",)
    for choice in choices:
        answers.add_output(choice, ChoiceOutput((5,)))
    assert step(answers).plain_ids == ("a", "b")


def test_steps_without_plain_tokens_do_not_change_the_batch() -> None:
    answers, [one] = begun(asked("a"))
    answers.add_output(one, ChoiceOutput((1,)))
    first = step(answers).plain_ids
    [other] = answers.open(asked("b"))
    answers.add_output(other, ChoiceOutput((1,), LENGTH, cached_tokens=0))
    assert step(answers).plain_ids == ()
    answers.add_output(one, ChoiceOutput((2,)))
    assert step(answers).plain_ids is first


@pytest.mark.parametrize("kind", ["first", "choices", "logprobs", "two tokens", "end"])
def test_what_is_not_plain(kind: str) -> None:
    request = asked(choices=2 if kind == "choices" else 1, logprobs=0 if kind == "logprobs" else None)
    answers, [choice, *_] = answers_of(request) if kind == "first" else begun(request)
    output = ChoiceOutput((3, 4) if kind == "two tokens" else (3,), LENGTH if kind == "end" else None)
    if kind == "logprobs":
        output.logprobs = (TokenLogprobs(3, -0.1),)
    answers.add_output(choice, output)
    assert only(answers).token_ids == output.token_ids


def test_a_second_word_in_one_step_goes_after_the_first() -> None:
    """A plain token is one and nothing else: what was plain is a delta then."""
    answers, choices = begun(asked("a"), asked("b"))
    for choice in choices:
        answers.add_output(choice, ChoiceOutput((1,)))
    answers.add_output(choices[0], ChoiceOutput((2,), LENGTH))
    found = step(answers)
    assert [(name, delta.token_ids) for name, delta in found.deltas] == [("a", (1,)), ("a", (2,))]
    assert found.deltas[1][1].usage == Usage(10, 3, 0)
    assert (found.plain_ids, found.plain_tokens) == (("b",), (1,))


@pytest.mark.parametrize(("num_before", "num_words"), [(0, 2), (1, 3)])
def test_no_request_is_plain_and_has_a_delta_in_one_step(num_before: int, num_words: int) -> None:
    answers, [choice] = begun(asked()) if num_before else answers_of(asked())
    for token in range(num_words):
        answers.add_output(choice, ChoiceOutput((token,), cached_tokens=0))
    found = step(answers)
    tokens = [token for _, delta in found.deltas for token in delta.token_ids]
    assert tokens == list(range(num_words))
    assert not found.plain_ids


# --- what is closed


def test_nothing_comes_after_an_abort() -> None:
    answers, choices = begun(asked("a"), asked("b"), asked("c", choices=2))
    answers.add_output(choices[0], ChoiceOutput((2,)))
    answers.add_output(choices[1], ChoiceOutput((2,)))
    answers.add_output(choices[2], ChoiceOutput((2,), LENGTH))
    assert answers.close(RequestId("a")) == [choices[0].engine_id]
    assert answers.close(RequestId("c")) == [choices[3].engine_id], "the engine has one of the two"
    found = step(answers)
    assert (found.deltas, found.plain_ids) == ((), ("b",))
    assert answers.close(RequestId("a")) == []
    assert answers.close(RequestId("nobody")) == []
    assert answers.find(choices[0].engine_id) is None
    assert (len(answers), answers.num_choices) == (1, 1)


@pytest.mark.parametrize("ends", ["finish", "fail"])
def test_nothing_comes_after_an_abort_of_what_has_just_ended(ends: str) -> None:
    answers, [choice, other] = begun(asked("a"), asked("b"))
    if ends == "finish":
        answers.add_output(choice, ChoiceOutput((2,), LENGTH))
    else:
        answers.fail(RequestId("a"), EngineFailed("lost"))
    answers.add_output(other, ChoiceOutput((2,)))
    assert answers.close(RequestId("a")) == []
    found = step(answers)
    assert (found.deltas, found.failed, found.plain_ids) == ((), (), ("b",))


def test_an_id_that_is_used_again_is_another_request() -> None:
    answers, [first] = begun(asked("same"))
    with pytest.raises(InvalidRequest, match="same exists already") as caught:
        answers.open(asked("same"))
    assert caught.value.fields["param"] == "request_id"
    answers.close(RequestId("same"))
    [second] = answers.open(asked("same", prompt=3))
    assert second.engine_id != first.engine_id
    assert answers.find(first.engine_id) is None
    assert answers.find(second.engine_id) is second
    answers.add_output(second, ChoiceOutput((9,), LENGTH, cached_tokens=0))
    assert only(answers).usage == Usage(3, 1, 0)


def test_clear_closes_all() -> None:
    answers, choices = begun(asked("a"), asked("b", choices=2))
    answers.add_output(choices[0], ChoiceOutput((2,)))
    answers.clear()
    assert (len(answers), answers.num_choices, answers.take_step()) == (0, 0, None)
    answers.open(asked("a"))


def test_a_request_fails_once_with_all_its_choices() -> None:
    answers, choices = begun(asked("a", choices=2), asked("b"))
    answers.add_output(choices[0], ChoiceOutput((2,)))
    error = EngineFailed("the engine gave up", engine="foreign")
    left = answers.fail(RequestId("a"), error)
    assert left == [choices[0].engine_id, choices[1].engine_id]
    assert answers.fail(RequestId("a"), error) == []
    assert answers.fail(RequestId("nobody"), error) == []
    found = step(answers)
    [(name, info)] = found.failed
    assert (name, info.code, info.fields) == ("a", "engine_failed", {"engine": "foreign"})
    assert found.deltas == ()
    assert answers.num_choices == 1


def test_one_that_has_ended_in_part_fails_with_what_is_left() -> None:
    answers, choices = begun(asked("a", choices=2))
    answers.add_output(choices[1], ChoiceOutput((2,), LENGTH))
    step(answers)
    assert answers.fail(RequestId("a"), EngineFailed("lost")) == [choices[0].engine_id]
    assert len(step(answers).failed) == 1


# --- counts


@pytest.mark.parametrize(("cached", "told"), [(0, 0), (8, 8), (9, 9), (10, 9), (64, 9)])
def test_the_last_token_of_a_prompt_is_always_computed(cached: int, told: int) -> None:
    """Whatever the engine was given besides the prompt does not count as the prompt's."""
    answers, [choice] = answers_of(asked(prompt=10, prior_tokens=tuple(range(5))))
    answers.add_output(choice, ChoiceOutput((1,), cached_tokens=cached))
    assert only(answers).cached_tokens == told
    answers.add_output(choice, ChoiceOutput((1,), LENGTH))
    assert only(answers).usage == Usage(10, 7, told)


def test_a_first_word_without_figures_says_that_nothing_was_cached() -> None:
    answers, [choice] = answers_of(asked())
    answers.add_output(choice, ChoiceOutput((1,)))
    assert only(answers).cached_tokens == 0


def test_what_is_cached_is_that_of_the_first_choice() -> None:
    """Others find the blocks that it has computed, which the prompt had to be computed for."""
    answers, choices = answers_of(asked(choices=2))
    answers.add_output(choices[0], ChoiceOutput((1,), cached_tokens=0))
    answers.add_output(choices[1], ChoiceOutput((1,), cached_tokens=8))
    for choice in choices:
        answers.add_output(choice, ChoiceOutput((2,), LENGTH))
    deltas = [delta for _, delta in step(answers).deltas]
    assert deltas[0].cached_tokens == 0
    assert deltas[2].usage == Usage(10, 2, 0)


def test_first_choice_reports_the_prompt() -> None:
    answers, choices = answers_of(asked(choices=2))
    answers.add_output(choices[1], ChoiceOutput((1,), cached_tokens=4))
    assert only(answers).cached_tokens is None
    answers.add_output(choices[0], ChoiceOutput((1,), cached_tokens=4))
    assert only(answers).cached_tokens == 4
    answers.add_output(choices[0], ChoiceOutput((1,)))
    assert only(answers).cached_tokens is None


def test_resumed_tokens_count() -> None:
    answers, [choice] = answers_of(asked(prior_tokens=(1, 2, 3)))
    assert choice.num_tokens == 3
    answers.add_output(choice, ChoiceOutput((4,), LENGTH, cached_tokens=0))
    assert only(answers).usage == Usage(10, 4, 0)


def test_each_choice_resumes_after_its_own() -> None:
    answers, choices = answers_of(asked(choices=3, prior_tokens_by_choice=(None, (1, 2), ())))
    assert [(choice.index, choice.num_tokens) for choice in choices] == [(1, 2), (2, 0)]
    assert answers.num_choices == 2
    answers.add_output(choices[1], ChoiceOutput((4,), LENGTH, cached_tokens=0))
    answers.add_output(choices[0], ChoiceOutput((4,), LENGTH, cached_tokens=0))
    found = {delta.index: (delta.usage, delta.cached_tokens) for _, delta in step(answers).deltas}
    assert found == {2: (Usage(10, 1, 0), None), 1: (Usage(10, 3, 0), 0)}
    assert len(answers) == 0


@pytest.mark.parametrize(("first_tokens", "num_before"), [((7, 8), 1), (None, 0)])
def test_handed_over_tokens_count(first_tokens: tuple[int, ...] | None, num_before: int) -> None:
    """They were told by who computed the prompt."""
    handoff = Handoff(ticket=b"", prefill_instance=InstanceId("p"), first_tokens=first_tokens)
    answers, choices = answers_of(asked(choices=2, handoff=handoff))
    assert [choice.num_tokens for choice in choices] == [num_before] * 2
    answers.add_output(choices[0], ChoiceOutput((1,), LENGTH, cached_tokens=9))
    assert only(answers).usage == Usage(10, 1 + num_before, 9)


# --- steps


def test_load_and_changes_alone_make_a_step() -> None:
    answers = Answers()
    assert answers.take_step() is None
    load = WorkerLoad(running=1)
    assert answers.take_step(load) == StepOutput(load=load)
    assert answers.take_step(kv_changes=(Cleared(),)) == StepOutput(kv_changes=(Cleared(),))


def test_a_step_is_taken_once() -> None:
    answers, [choice] = begun(asked())
    answers.add_output(choice, ChoiceOutput((2,)))
    step(answers)
    assert answers.take_step() is None
