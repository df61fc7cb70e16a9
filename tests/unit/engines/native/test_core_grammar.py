"""Grammars in EngineCore: who asked for one follows it, whatever the others do."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.engines.native.equality_lab import (
    Drive,
    answer,
    answers,
    ask,
    assert_at_rest,
    core_of,
    make_prompts,
)
from tokenizers import Tokenizer

from kvolt.core.delta import FinishReason
from kvolt.core.errors import InvalidRequest, Overloaded
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Grammar, GrammarKind, Handoff, Request
from kvolt.engines.native.core import EngineCore
from kvolt.engines.native.grammar.threads import CompilingThreads
from kvolt.engines.native.model.lora import Adapter
from kvolt.engines.native.setup import MAX_COMPILING
from kvolt.testing.tiny_models import tiny_checkpoint

PROMPT = make_prompts(seed=7, vocabulary=900, count=6, longest=60)["p3"]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"open": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
        "required": ["open", "size"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("core") / "model", "Qwen3ForCausalLM", seed=4)


@pytest.fixture
def core(folder: Path) -> Iterator[EngineCore]:
    core = core_of(folder, max_batch_tokens=64)
    yield core
    core.close()


class Stuck:
    """A compiler that comes to no end until it may, and then to a bad one."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.go_on = threading.Event()

    def find_compiled(self, grammar: Grammar) -> None:
        return None

    def compile(self, grammar: Grammar) -> None:
        self.begun.append(grammar.text)
        self.go_on.wait(30)
        raise InvalidRequest("it was stuck", param="grammar")

    def await_full(self) -> None:
        until(lambda: len(self.begun) == MAX_COMPILING)


@pytest.fixture
def stuck() -> Iterator[Any]:
    stuck = Stuck()
    yield stuck
    stuck.go_on.set()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def constrained(name: str, kind: GrammarKind, text: str, **given: Any) -> Request:
    extra = given.pop("request", {})
    stop = {"ignore_eos": False} | given.pop("stop", {})
    grammar = {"grammar": Grammar(kind, text)} | extra
    return ask(name, PROMPT, 60, stop=stop, request=grammar, **({"temperature": 1.0} | given))


def text_of(core: EngineCore, tokens: list[int]) -> str:
    text: str = Tokenizer.from_buffer(core.card.tokenizer_json).decode(tokens)
    return text


def test_a_schema_makes_a_random_model_write_json(core: EngineCore) -> None:
    asked = [constrained(f"s{seed}", GrammarKind.JSON_SCHEMA, SCHEMA, seed=seed) for seed in range(4)]
    free = ask("free", PROMPT, 12)
    found = answers(core, *asked, free)
    for request in asked:
        one = found[request.request_id]
        assert one.finish is FinishReason.STOP
        document = json.loads(text_of(core, one.tokens))
        assert document.keys() == {"open", "size"}
        assert isinstance(document["open"], bool)
        assert document["size"] in ("small", "large")
    assert len({tuple(one.tokens) for one in found.values()}) > 2
    assert found["free"].tokens == answer(core, free).tokens


def test_every_choice_follows_the_grammar_and_resumes_in_its_middle(core: EngineCore) -> None:
    words = json.dumps(["yes", "no", "perhaps"])
    drive = Drive(core, [constrained("a", GrammarKind.CHOICE, words, num_choices=5, seed=1)])
    whole = drive.finish()["a"].tokens
    for one in drive.choices.values():
        assert text_of(core, one.tokens) in ("yes", "no", "perhaps")
    given = tuple(whole[:1])
    rest = constrained("a", GrammarKind.CHOICE, words, seed=1, request={"prior_tokens": given})
    assert answer(core, rest).tokens == whole[1:]


def test_a_grammar_waits_with_its_request(folder: Path) -> None:
    """Here until the only other one has ended."""
    core = core_of(folder, max_num_seqs=1)
    asked = constrained("a", GrammarKind.CHOICE, '["yes"]')
    answer(core, asked)  # compiled, and kept
    drive = Drive(core, [ask("other", PROMPT, 60), asked])
    has_waited = False
    while ("other", 0) not in drive.choices or drive.choices["other", 0].finish is None:
        drive.step()
        has_waited |= core.scheduler.num_waiting == 1
    assert has_waited, "it was still compiled when the other one ended"
    assert text_of(core, drive.finish()["a"].tokens) == "yes"
    core.close()


def test_a_choice_that_ends_first_leaves_the_grammar_to_the_others(core: EngineCore) -> None:
    asked = constrained("a", GrammarKind.CHOICE, '["yes"]', num_choices=4, stop={"max_tokens": 1})
    drive = Drive(core, [asked])
    drive.finish()
    assert len(drive.choices) == 4
    for one in drive.choices.values():
        assert "yes".startswith(text_of(core, one.tokens))


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"text": "{"}, "grammar"),
        ({"text": '["yes"]', "request": {"prior_tokens": (700,)}}, "prior tokens"),
        (
            {
                "text": '["yes"]',
                "request": {
                    "handoff": Handoff(ticket=b"", prefill_instance=InstanceId("i"), first_tokens=(700,))
                },
            },
            "prior tokens",
        ),
    ],
    ids=["unreadable", "resume", "handoff"],
)
def test_a_grammar_that_cannot_be_followed_fails_its_request_alone(
    core: EngineCore, asked: dict[str, Any], reason: str
) -> None:
    request = constrained("bad", GrammarKind.CHOICE, **asked)
    drive = Drive(core, [request, ask("free", PROMPT, 6)])
    assert len(drive.finish()["free"].tokens) == 6
    assert drive.failed.keys() == {"bad"}
    assert drive.failed["bad"].code == InvalidRequest.code
    assert reason in drive.failed["bad"].message


def test_a_compiler_that_breaks_fails_the_request(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(core, constrained("a", GrammarKind.CHOICE, '["yes"]'))

    def broken(grammar: Grammar) -> None:
        raise ValueError("out of luck")

    monkeypatch.setattr(core._grammars.compiler, "compile", broken)
    drive = Drive(core, [constrained("a", GrammarKind.CHOICE, '["no"]')])
    drive.finish()
    assert "out of luck" in drive.failed["a"].message


def test_a_request_can_be_taken_back_while_its_grammar_compiles(core: EngineCore) -> None:
    core.submit(constrained("a", GrammarKind.CHOICE, '["yes"]'))
    assert core.load().waiting == 1
    assert core.withdraw(RequestId("a"))
    core.submit(constrained("b", GrammarKind.CHOICE, '["yes"]'))
    core.abort(RequestId("b"))
    assert_at_rest(core)


@pytest.mark.parametrize(
    "take_back",
    [
        lambda core: core.abort(RequestId("unwanted")),
        lambda core: core.withdraw(RequestId("unwanted")),
        lambda core: core.drop_lora("x"),
    ],
    ids=["abort", "withdraw", "drop_lora"],
)
def test_a_grammar_of_an_aborted_request_is_not_compiled(
    core: EngineCore, stuck: Any, take_back: Callable[[EngineCore], object]
) -> None:
    core._grammars.compiler = stuck
    core.runner.model.adapters._loaded["x"] = Adapter("x", "")
    drive = Drive(core, [constrained(f"r{n}", GrammarKind.REGEX, f"r{n}") for n in range(MAX_COMPILING)])
    stuck.await_full()
    drive.submit(constrained("unwanted", GrammarKind.REGEX, "unwanted", request={"lora": "x"}))
    take_back(core)
    drive.submit(constrained("last", GrammarKind.REGEX, "last"))
    stuck.go_on.set()
    drive.finish()
    assert sorted(stuck.begun) == ["last", *(f"r{n}" for n in range(MAX_COMPILING))]


def test_a_grammar_that_is_kept_waits_for_no_other(
    core: EngineCore, stuck: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = constrained("a", GrammarKind.CHOICE, '["yes"]')
    answer(core, asked)
    monkeypatch.setattr(core._grammars.compiler, "compile", stuck.compile)
    slow = [constrained(f"r{n}", GrammarKind.REGEX, f"r{n}") for n in range(MAX_COMPILING)]
    drive = Drive(core, [*slow, asked])
    assert core.scheduler.num_waiting == 1
    until(lambda: drive.step() is not None and ("a", 0) in drive.choices)
    with pytest.raises(InvalidRequest, match="prior tokens"):
        core.submit(constrained("b", GrammarKind.CHOICE, '["yes"]', request={"prior_tokens": (700,)}))
    stuck.go_on.set()
    assert text_of(core, drive.finish()["a"].tokens) == "yes"


def test_as_many_grammars_are_compiled_as_requests_may_wait(folder: Path, stuck: Any) -> None:
    core = core_of(folder, max_num_seqs=1, max_waiting=2)
    core._grammars.compiler = stuck
    drive = Drive(core, [constrained(f"r{n}", GrammarKind.REGEX, f"r{n}") for n in range(3)])
    with pytest.raises(Overloaded) as refused:
        core.submit(constrained("r3", GrammarKind.REGEX, "r3"))
    assert refused.value.fields == {"queue": "grammars", "limit": 3}
    stuck.go_on.set()
    drive.finish()
    assert drive.failed.keys() == {"r0", "r1", "r2"}
    core.close()


def test_the_compiler_is_made_once(stuck: Any) -> None:
    num_made = 0

    def make() -> Any:
        nonlocal num_made
        time.sleep(0.05)
        num_made += 1
        return stuck

    threads = CompilingThreads(make)
    grammars = [Grammar(GrammarKind.REGEX, f"r{n}") for n in range(MAX_COMPILING)]
    assert threads.find_compiled(grammars[0]) is None
    for grammar in grammars:
        threads.start(grammar)
    stuck.await_full()
    threads.close()
    assert num_made == 1
